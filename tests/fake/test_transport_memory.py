"""What both ends of a transfer allocate: two chunks, whatever the model's size."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from weightsync.control.runtime import Deadline
from weightsync.control.update import Update
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.planning.transfer_plan import Route, TransferPlan, make_chunks
from weightsync.sources.base import TensorShard
from weightsync.strategies.base import locate
from weightsync.tools.testing.runner import Mail, run_together
from weightsync.transports import open_receiver, open_transport
from weightsync.transports.base import SLOTS, LocalTensors

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


def send(route: Route, name: str, rank_count: int, mail: Mail) -> None:
    threading.current_thread().name = f"rank {mail.rank}"
    rows = EMBED.shape[0] // rank_count
    box = Box((mail.rank * rows, 0), (rows, EMBED.shape[1]))
    shards = [TensorShard(EMBED, box, torch.full(box.size, float(mail.rank)))]
    if mail.rank == 0:
        shards.append(TensorShard(NORM, Box.full(NORM.shape), torch.ones(NORM.shape)))
    held = locate(shards, mail.rank)
    everyone = [location for rank in range(rank_count) for location in _locations(rank, rows)]
    reads = tuple({meta.name: (Box.full(meta.shape),) for meta in MANIFEST} for _ in mail.workers)
    none: frozenset[str] = frozenset()
    chunks = make_chunks(MANIFEST, route, [["embed"], ["norm"]], none, none, everyone, reads, CHUNK_BYTES, {})
    assert EMBED.nbytes > 10 * CHUNK_BYTES
    assert len(chunks) > 10
    transport, update = open_transport(name), Update(mail, 20.0)
    plan = TransferPlan(MANIFEST, route, chunks, reads, mail.host, {})
    endpoints = transport.prepare(plan, LocalTensors(held), update)
    storages = mail.gather([each.storages for each in endpoints], "connect")
    for number, end in enumerate(mail.workers if mail.rank == 0 else ()):
        rows_of = [row for each in storages for row in each[number]]
        mail.send(end, [rows_of, endpoints[number].fields, len(chunks)])
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
    threading.current_thread().name = "worker"
    storages, fields, count = mail.receive(0)
    receiver = open_receiver(name, CPU)
    receiver.connect(storages, fields, mail.wait, Deadline(20.0))
    assert list(receiver.chunks(range(count), mail.wait, lambda: Deadline(20.0))) == list(range(count))
    receiver.close()
    mail.send(0, "done")


@pytest.mark.parametrize("route", [Route.ALL, Route.EACH])
@pytest.mark.parametrize("ranks", [1, 2])
def test_broadcast_of_an_embedding_of_many_chunks_allocates_two_chunks_on_both_ends(
    route: Route, ranks: int, monkeypatch: pytest.MonkeyPatch
):
    made = Allocations(monkeypatch)
    ends = [functools.partial(send, route, "broadcast", ranks)] * ranks
    run_together([*ends, functools.partial(receive, "broadcast")], ranks, False, 20.0)
    assert made.nbytes.keys() >= {"worker", "rank 0"}
    for end, nbytes in made.nbytes.items():
        assert nbytes <= SLOTS * (CHUNK_BYTES + SLACK_BYTES), end
    assert made.nbytes["worker"] > CHUNK_BYTES
