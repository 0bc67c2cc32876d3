"""Workers of one engine have collectives of their own: what fails on one must not leave the others in them."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from faults import FaultyTransport
from recorders import RecordedEngine

from weightsync import ProtocolError, WeightSync
from weightsync.transports.base import Endpoint

TIMEOUT_S = 30.0


class Workers:
    """Two, which take the larger of what each has."""

    def __init__(self) -> None:
        self._barrier, self._seen = threading.Barrier(2, timeout=TIMEOUT_S), {}

    def host(self, rank: int) -> ModuleHost:
        made = ModuleHost(functools.partial(TinyEngineModel, rank, 2), checkpoint(1), rank=rank, world=2)
        made.all_reduce_max = functools.partial(self._largest, rank)
        return made

    def _largest(self, rank: int, numbers: torch.Tensor) -> None:
        self._seen[rank] = numbers.clone()
        self._barrier.wait()
        numbers.copy_(torch.maximum(self._seen[0], self._seen[1]))
        self._barrier.wait()


def mislead(endpoints: list[Endpoint]) -> None:
    """Let worker 0 fail before it joins. Worker 1 waits for it in the communicator."""
    endpoints[0] = replace(endpoints[0], fields={**endpoints[0].fields, "slot_bytes": 1})


def test_worker_that_fails_before_it_joins_is_the_cause() -> None:
    workers = Workers()
    engine = RecordedEngine(*(workers.host(rank) for rank in (0, 1)))
    transport = FaultyTransport("broadcast")
    transport.change_endpoints = mislead
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        started = time.monotonic()
        with pytest.raises(ProtocolError, match="does not lie in a slot of 1 bytes"):
            sync.push(trainer_model(checkpoint(2)))
        assert time.monotonic() - started < TIMEOUT_S / 2
        sync.push(trainer_model(checkpoint(2)))
    for rank, host in enumerate(engine.hosts):
        assert torch.equal(host.live.embed.weight, cold(checkpoint(2), rank=rank, tp=2).embed.weight)
    engine.close()
