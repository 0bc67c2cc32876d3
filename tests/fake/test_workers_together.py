"""Workers of one engine have collectives of their own: what fails on one must not leave the others in them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from fake_engine import HEADS, Attention, Decay, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from faults import FaultyTransport
from msgspec import structs
from recorders import RecordedEngine
from test_fused_quantize import Workers as SharingWorkers
from test_fused_quantize import assert_same_model
from torch import nn

from weightsync import DigestError, ProtocolError, WeightSync, WeightSyncError
from weightsync.net import timeouts
from weightsync.transports.base import Endpoint

TIMEOUT_S = 30.0


class Workers:
    """Two, which take the larger of what each has."""

    def __init__(self, kind: type[TinyEngineModel] = TinyEngineModel) -> None:
        self._kind = kind
        self._barrier, self._seen = threading.Barrier(2, timeout=TIMEOUT_S), {}
        self.abort = self._barrier.abort
        self._have_started = False
        self.engine = RecordedEngine(self._host(0), self._host(1))
        self._have_started = True

    def _host(self, rank: int) -> ModuleHost:
        make, post_process = functools.partial(self._kind, rank, 2), functools.partial(self._post_process, rank)
        made = ModuleHost(make, checkpoint(1), post_process, rank=rank, world=2)
        made.all_reduce_max = functools.partial(self._largest, rank)
        return made

    def _post_process(self, rank: int, module: nn.Module) -> None:
        """Wait for the other worker, as layers do whose scale is that of all workers."""
        if isinstance(module, Decay) and self._have_started:
            self._largest(rank, torch.zeros(1))

    def _largest(self, rank: int, numbers: torch.Tensor) -> None:
        self._seen[rank] = numbers.clone()
        self._barrier.wait()
        numbers.copy_(torch.maximum(self._seen[0], self._seen[1]))
        self._barrier.wait()


def mislead(endpoints: list[Endpoint]) -> None:
    """Let worker 0 fail before it joins. Worker 1 waits for it in the communicator."""
    endpoints[0] = replace(endpoints[0], fields={**endpoints[0].fields, "slot_bytes": 1})


def test_worker_that_fails_before_it_joins_is_the_cause() -> None:
    engine = Workers().engine
    transport = FaultyTransport("broadcast")
    transport.change_endpoints = mislead
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        started = time.monotonic()
        with pytest.raises(ProtocolError, match="does not lie in a slot of 1 bytes"):
            sync.push(trainer_model(checkpoint(2)))
        assert time.monotonic() - started < TIMEOUT_S / 2
        sync.push(trainer_model(checkpoint(2)))
    assert_serves(engine, 2)
    engine.close()


def misplace(endpoints: list[Endpoint]) -> None:
    """Tell worker 0 that everything arrives in a slot that there is not."""
    arrivals = [
        structs.replace(each, locations=tuple(structs.replace(at, storage=9) for at in each.locations))
        for each in endpoints[0].arrivals
    ]
    endpoints[0] = replace(endpoints[0], arrivals=tuple(arrivals))


def test_worker_that_cannot_bind_frees_those_that_agree_on_shared_scales() -> None:
    sharing = SharingWorkers(functools.partial(TinyEngineModel, tp=2), Attention)
    engine = RecordedEngine(*sharing.hosts(checkpoint(1)))
    transport = FaultyTransport("broadcast")
    transport.change_endpoints = misplace
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        started = time.monotonic()
        with pytest.raises(ProtocolError, match="the plan reads storage 9"):
            sync.push(trainer_model(checkpoint(2)))
        assert time.monotonic() - started < TIMEOUT_S / 2
        sync.push(trainer_model(checkpoint(2)))
        assert sync.last_report.load_paths["fused_quantize"] > 0
    for host, other in zip(engine.hosts, sharing.hosts(checkpoint(2)), strict=True):
        assert_same_model(host.live, other.live)
    engine.close()


@pytest.mark.parametrize("chunk", [0, 7], ids=["before", "in the same chunk"])
def test_worker_that_fails_does_not_leave_the_others_in_their_post_processing(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = Workers().engine, trainer_model(checkpoint(2))
    with WeightSync("fsdp", "broadcast", engine, timeout_s=TIMEOUT_S, bucketer="parameter") as sync:
        sync.push(model)
        assert sync.last_report.load_paths["native_loader"] > 0
        plan = engine.sessions[0].receiver._plan

        def fail(number: int, sample: int | None) -> None:
            if number == chunk:
                raise DigestError("the bytes for one worker have changed on the way")

        monkeypatch.setattr(plan.verifier, "check_chunk", fail)
        started = time.monotonic()
        with pytest.raises(DigestError):
            sync.push(model)
        assert time.monotonic() - started < TIMEOUT_S / 2
        sync.push(trainer_model(checkpoint(4)))
    assert_serves(engine, 4)
    engine.close()


@pytest.mark.parametrize("when", ["in a push", "in the experiment before the first"])
def test_worker_that_fails_inside_of_post_processing_is_named_and_the_others_end(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    engine, (failing, other) = workers.engine, workers.engine.hosts
    post_process, reasons, ended = failing.post_process, [], threading.Event()

    def fail(module: nn.Module) -> None:
        if isinstance(module, Decay):
            raise MemoryError("no memory left for the scales")
        post_process(module)

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()
        workers.abort()  # as the end of the process ends what its threads wait for

    monkeypatch.setattr(timeouts, "WORKER_GRACE_S", 0.5)
    monkeypatch.setattr(other, "end_process", end)
    with WeightSync("fsdp", "ipc", engine, timeout_s=2.0) as sync:
        if when == "in a push":
            sync.push(trainer_model(checkpoint(2)))
        failing.post_process = fail
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="no memory left for the scales") as raised:
            sync.push(trainer_model(checkpoint(2)))
        assert raised.value.who == "engine 0 worker tp=0"
        assert time.monotonic() - started < 15.0
        assert ended.wait(15.0)
    (reason,) = reasons
    assert reason.startswith("engine 0 worker tp=1 waits for other workers after a failed push: MemoryError")
    engine.close()


class OfNothing(TinyEngineModel):
    """Its loader makes the rates of tensors without elements, which do not travel."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            whole = tensor.sum().expand(HEADS) if name.endswith("log_rate") else tensor
            super().load_weights([(name, whole)])


def without_rates(seed: int) -> nn.Module:
    return trainer_model({n: t[:0] if n.endswith("log_rate") else t for n, t in checkpoint(seed).items()})


def test_worker_that_fails_at_once_frees_those_in_post_processing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, model = Workers(OfNothing).engine, without_rates(2)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        assert sync.last_report.load_paths["native_loader"] > 0

        def fail() -> None:
            raise DigestError("one worker has lost what it had")

        monkeypatch.setattr(engine.sessions[0].receiver._plan.frozen, "check", fail)
        started = time.monotonic()
        with pytest.raises(DigestError):
            sync.push(model)
        assert time.monotonic() - started < TIMEOUT_S / 2
        sync.push(without_rates(4))
    for rank, host in enumerate(engine.hosts):
        assert torch.equal(host.live.embed.weight, cold(checkpoint(4), rank=rank, tp=2).embed.weight)
        assert torch.equal(host.live.layers[0].decay.rate, torch.full((HEADS,), -1.0))
    engine.close()


def assert_serves(engine: RecordedEngine, seed: int) -> None:
    for rank, host in enumerate(engine.hosts):
        expected = cold(checkpoint(seed), rank=rank, tp=2).state_dict()
        for name, tensor in host.live.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
