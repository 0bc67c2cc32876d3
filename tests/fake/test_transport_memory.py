"""What both ends of a transfer allocate: two chunks, whatever the model's size."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model

from weightsync import WeightSync
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.planning.transfer_plan import Chunk, TransferPlan, make_chunks
from weightsync.sources.base import TensorShard
from weightsync.strategies.base import locate
from weightsync.tools.testing.runner import Mail, run_together, title
from weightsync.transports import open_receiver, open_transport
from weightsync.transports.base import SLOTS, LocalTensors, RouteRequest, Transport
from weightsync.transports.files import FilesTransport
from weightsync.transports.ipc import IpcTransport
from weightsync.transports.shared_handles import SHARED_MEMORY

CHUNK_BYTES = 1 << 16
SLACK_BYTES = 1024
"""Digests, and the alignment of what lies in a slot."""
EMBED = TensorMeta("embed", (4096, 128), "float32")
NORM = TensorMeta("norm", (128,), "float32")
MANIFEST = Manifest((EMBED, NORM))
CPU = torch.device("cpu")


class Allocations:
    """Counts the bytes that `torch.empty` gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes: dict[str, int] = {}
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.empty)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        made = self._empty(*size, **options)
        name = threading.current_thread().name
        self.nbytes[name] = self.nbytes.get(name, 0) + made.untyped_storage().nbytes()
        return made


def send(name: str, rank_count: int, mail: Mail) -> None:
    threading.current_thread().name = f"rank {mail.rank}"
    rows = EMBED.shape[0] // rank_count
    box = Box((mail.rank * rows, 0), (rows, EMBED.shape[1]))
    shards = [TensorShard(EMBED, box, torch.full(box.size, float(mail.rank)))]
    if mail.rank == 0:
        shards.append(TensorShard(NORM, Box.full(NORM.shape), torch.ones(NORM.shape)))
    held = locate(shards, mail.rank)
    everyone = [location for rank in range(rank_count) for location in _locations(rank, rows)]
    reads = [{meta.name: (Box.full(meta.shape),) for meta in MANIFEST} for _ in mail.workers]
    machines = [MachineInfo(title(end, rank_count), "cpu", "", "") for end in range(rank_count + len(reads))]
    transport, update = open_transport(name), Update(mail, 20.0)
    invitations = transport.invite(machines[:rank_count], machines[rank_count:], mail.host) if mail.rank == 0 else []
    transport.meet(mail.broadcast(invitations, "plan")[mail.rank], CPU, update.deadline())
    chains = transport.route(RouteRequest(machines[:rank_count], machines[rank_count:], MANIFEST, everyone, reads))
    none: frozenset[str] = frozenset()
    chunks = make_chunks(MANIFEST, chains, [["embed"], ["norm"]], none, none, everyone, CHUNK_BYTES, {})
    assert EMBED.nbytes > 10 * CHUNK_BYTES
    assert len(chunks) > 10
    plan = TransferPlan(MANIFEST, chains, chunks, len(mail.workers), {})
    endpoints = transport.prepare(plan, LocalTensors(held), update)
    storages = mail.gather([each.storages for each in endpoints], "connect")
    for number, end in enumerate(mail.workers if mail.rank == 0 else ()):
        rows_of = [row for each in storages for row in each[number]]
        mail.send(end, [invitations[rank_count + number], rows_of, endpoints[number].fields, len(chunks)])
    transport.connect(update.deadline())
    transport.send(range(len(chunks)), None, update)
    for end in mail.workers if mail.rank == 0 else ():
        mail.receive(end)
    mail.broadcast(mail.gather(None, "done"), "done")
    transport.abort()


def _locations(rank: int, rows: int) -> list[Any]:
    shards = [TensorShard(EMBED, Box((rank * rows, 0), (rows, EMBED.shape[1])), torch.zeros(rows, EMBED.shape[1]))]
    if rank == 0:
        shards.append(TensorShard(NORM, Box.full(NORM.shape), torch.ones(NORM.shape)))
    return list(locate(shards, rank))


def receive(name: str, mail: Mail) -> None:
    threading.current_thread().name = f"worker {mail.rank}"
    invitation, storages, fields, count = mail.receive(0)
    receiver = open_receiver(name, CPU)
    receiver.meet(invitation, Deadline(20.0))
    receiver.connect(storages, fields, mail.wait, Deadline(20.0))
    assert list(receiver.chunks(range(count), mail.wait, lambda: Deadline(20.0))) == list(range(count))
    receiver.close()
    mail.send(0, "done")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_broadcast_of_an_embedding_of_many_chunks_allocates_two_chunks_on_every_end(
    workers: int, ranks: int, monkeypatch: pytest.MonkeyPatch
):
    made = Allocations(monkeypatch)
    ends = [
        *[functools.partial(send, "broadcast", ranks)] * ranks,
        *[functools.partial(receive, "broadcast")] * workers,
    ]
    run_together(ends, ranks, False, 20.0)
    assert made.nbytes.keys() >= {"rank 0", *(f"worker {ranks + number}" for number in range(workers))}
    for end, nbytes in made.nbytes.items():
        assert nbytes <= SLOTS * (CHUNK_BYTES + SLACK_BYTES), end
    assert made.nbytes[f"worker {ranks + workers - 1}"] > CHUNK_BYTES


def large_tensors() -> int:
    """Count the tensors in memory with at least the embedding's bytes."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # of deprecated objects that the search touches
        return sum(isinstance(each, torch.Tensor) and each.nbytes >= EMBED.nbytes for each in gc.get_objects())


def test_transport_that_was_aborted_keeps_no_slot(tmp_path: Path):
    held = locate([TensorShard(EMBED, Box.full(EMBED.shape), torch.ones(EMBED.shape))], 0)
    alone: Any = SimpleNamespace(rank=0, size=1, host="127.0.0.1", broadcast=lambda value, phase: value)
    files = FilesTransport(tmp_path, 2, 1 << 30, (None, None, None), takes_configs=False)
    transports: list[Transport] = [IpcTransport(), files]
    for transport in transports:
        before = large_tensors()
        plan = TransferPlan(Manifest((EMBED,)), (), (Chunk(tuple(held)),), 1, {})
        transport.prepare(plan, LocalTensors(held), Update(alone, 5.0))
        assert large_tensors() > before
        transport.abort()
        assert large_tensors() == before, transport.name


def mapped() -> int:
    """Count this process's mappings of shared memory."""
    return Path("/proc/self/maps").read_text().count(f" {SHARED_MEMORY}/#")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(0)))
    gc.collect()
    gc.disable()  # an engine's worker looks for garbage seldom
    try:
        yield engine
    finally:
        gc.enable()
        engine.close()


def test_a_worker_unmaps_an_earlier_trainer_without_a_search_for_garbage(engine: FakeEngine):
    counts = []
    for seed in range(1, 5):
        with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
            sync.push(trainer_model(checkpoint(seed)))
        counts.append(mapped())
    assert counts[0] > 0
    assert max(counts[2:]) <= counts[1]


def test_an_engine_that_answers_unmaps_a_trainer_that_has_closed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeouts, "TRAINER_LOOK_S", 0.0)
    before = mapped()
    model = trainer_model(checkpoint(1))
    with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
        for _ in range(2):
            sync.push(model)
            engine.hosts[0].check_before_answer()  # the trainer has the engine, and its next push reads there again
            assert mapped() > before
    del sync, model
    assert mapped() > before
    engine.hosts[0].check_before_answer()
    assert mapped() <= before
