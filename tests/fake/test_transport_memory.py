"""What both ends of a transfer allocate: two chunks, whatever the model's size."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_process import EngineProcess
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model
from fake_server import FakeServer
from ranks import run_ranks
from trainer_process import TrainerProcess

from weightsync import WeightSync
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline, spawn
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
from weightsync.worker.load_planner import LoadPlanner

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that the search touches
        return sum(isinstance(each, torch.Tensor) and each.nbytes >= EMBED.nbytes for each in gc.get_objects())


def test_transport_that_was_aborted_keeps_no_slot(tmp_path: Path):
    held = locate([TensorShard(EMBED, Box.full(EMBED.shape), torch.ones(EMBED.shape))], 0)
    alone: Any = SimpleNamespace(rank=0, size=1, host="127.0.0.1", broadcast=lambda value, *_: value)
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
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(0)))) as engine:
        yield engine


@pytest.mark.parametrize("workers", [1, 3])
def test_close_returns_when_every_worker_has_unmapped_the_trainer(workers: int):
    """Without an answer of the engine, and without a search for garbage."""
    hosts = [ModuleHost(TinyEngineModel, checkpoint(0), rank=rank, world=workers) for rank in range(workers)]
    gc.collect()
    gc.disable()  # an engine's worker looks for garbage seldom
    try:
        with closing(FakeEngine(*hosts)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
            before = mapped()
            for seed in (1, 2, 3):
                for _ in range(2):
                    sync.push(trainer_model(checkpoint(seed)))
                    assert mapped() > before
                sync.close()
                assert mapped() <= before
    finally:
        gc.enable()


def test_a_push_after_a_close_traces_no_loader_again(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    traced, trace = [], LoadPlanner.make
    monkeypatch.setattr(LoadPlanner, "make", lambda *args: traced.append(args) or trace(*args))
    with WeightSync("fsdp", "ipc", engine, timeout_s=20.0) as sync:
        for seed in (1, 2, 3):
            sync.push(trainer_model(checkpoint(seed)))
            sync.close()
    assert len(traced) == 1


def test_workers_unmap_a_collected_trainer(engine: FakeEngine):
    before = mapped()
    sync = WeightSync("fsdp", "ipc", engine, timeout_s=20.0)
    sync.push(trainer_model(checkpoint(1)))
    assert mapped() > before
    del sync
    assert mapped() <= before


@pytest.mark.forks
def test_a_worker_unmaps_a_trainer_that_has_died(engine: FakeEngine, tmp_path: Path):
    server = FakeServer(engine, 0)
    spawn("server", server.serve_forever)
    trainer = TrainerProcess(tmp_path, "ipc", [f"http://127.0.0.1:{server.server_port}"])
    try:
        trainer.order(push=2)
        before = mapped()
        assert trainer.answer(60.0) == {"version": 1}
        assert mapped() > before
    finally:
        trainer.kill()
        server.shutdown()
        server.server_close()
    until(lambda: mapped() <= before)


def close_and_push_again(rank: int) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(0))) if rank == 0 else None
    with WeightSync("fsdp", "ipc", engine, timeout_s=30.0) as sync:
        before = mapped()
        for version in (1, 2, 3):
            assert sync.push(trainer_model(checkpoint(version))).version == version
            assert mapped() > before
            sync.close()
            dist.barrier()
            assert mapped() <= before


def test_ranks_push_again_after_they_have_closed():
    """All memory is unmapped once rank 0 has closed."""
    run_ranks(close_and_push_again, 2)


@pytest.mark.forks
def test_a_stopped_engine_holds_a_close_up_for_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(timeouts, "ENGINE_FAREWELL_S", 0.5)
    engine, model = EngineProcess(tmp_path), trainer_model(checkpoint(1))
    try:
        with WeightSync("fsdp", "ipc", engine.url, timeout_s=60.0) as sync:
            sync.push(model)
            engine.signal(signal.SIGSTOP)
            started = time.monotonic()
            sync.close()
            assert 0.5 <= time.monotonic() - started < 20.0
            assert "engine 0 worker tp=0 has not unmapped the trainer's memory" in caplog.text
            engine.signal(signal.SIGCONT)
            assert sync.push(model).version == 2
            engine.kill()
            caplog.clear()
            sync.close()
            assert not caplog.text, "a dead engine has nothing mapped"
    finally:
        engine.kill()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the socket that goes with it
def test_a_session_is_collected_while_its_trainer_is_connected(engine: FakeEngine):
    """An `LLM` in the trainer's process is deleted, and the memory of its model is free."""
    sync = WeightSync("fsdp", "ipc", engine, timeout_s=20.0)
    sync.push(trainer_model(checkpoint(1)))
    session = weakref.ref(engine.sessions.pop())
    engine.hosts = ()
    gc.collect()
    until(lambda: session() is None)
    sync.close()


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
