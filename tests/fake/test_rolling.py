"""Pushes with `rolling=True`: one engine after the other, each paused for its own update alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, fail_once_after, trainer_model
from optional_transports import NIXL
from ranks import run_ranks
from recorders import RecordedEngine
from torch import nn

from weightsync import CheckpointTransport, ConfigError, DigestError, PushReport, WeightSync, WeightSyncError
from weightsync.net.wire import CLEAN, POISONED

TIMEOUT_S = 20.0


class Slow(RecordedEngine):
    """An engine whose worker may wait in each push, before it takes a chunk."""

    def __init__(self, name: str) -> None:
        super().__init__(ModuleHost(TinyEngineModel, checkpoint(1)))
        self.name = name
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self._run = self.sessions[0].receiver.run
        self.sessions[0].receiver.run = self._wait_and_run

    def _wait_and_run(self, *args: Any) -> Any:
        self.waits.set()
        assert self.goes_on.wait(TIMEOUT_S)
        return self._run(*args)

    def hold(self) -> None:
        """Wait in the next push until `goes_on` is set."""
        self.waits.clear()
        self.goes_on.clear()

    @property
    def state(self) -> str:
        return self.sessions[0].receiver.state

    @property
    def generates(self) -> bool:
        return [call for call in self.calls if call.startswith("pause") or call == "resume"][-1] == "resume"

    def serves(self, seed: int) -> bool:
        self.hosts[0].check_before_answer()
        return torch.equal(self.hosts[0].live.embed.weight, cold(checkpoint(seed)).embed.weight)


@pytest.fixture
def engines() -> Iterator[list[Slow]]:
    engines = [Slow(f"engine {number}") for number in range(3)]
    yield engines
    for engine in engines:
        engine.goes_on.set()
        engine.close()


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Let a model hold another checkpoint, in the same memory."""
    model.load_state_dict(checkpoint(seed))
    return model


def rolling(engines: list[Slow], transport: str = "ipc", **options: Any) -> WeightSync:
    return WeightSync("fsdp", transport, engines, rolling=True, timeout_s=TIMEOUT_S, **options)


def begin_slow_push(
    background: Callable[..., Future[PushReport]], sync: WeightSync, model: nn.Module, slow: Slow, **options: Any
) -> Future[PushReport]:
    """Begin a push. Return it when the worker of the slow engine waits."""
    slow.hold()
    pushing = background(sync.push, model, **options)
    assert slow.waits.wait(TIMEOUT_S)
    return pushing


@pytest.mark.parametrize("transport", ["ipc", "broadcast", NIXL])
def test_fast_engines_serve_the_new_version_while_a_slow_one_receives(
    engines: list[Slow], transport: str, background: Callable[..., Future[PushReport]]
) -> None:
    slow, *fast = engines
    model = trainer_model(checkpoint(2))
    with rolling(engines, transport) as sync:
        pushing = begin_slow_push(background, sync, model, slow)
        assert all(engine.version() == "default" and not engine.calls[1:] for engine in fast), "they wait unpaused"
        threading.Event().wait(1.0)
        slow.goes_on.set()
        pushing.result(TIMEOUT_S)
        pushing = begin_slow_push(background, sync, fill(model, 3), slow, label="step 3")
        assert all((one.serves(3), one.generates, one.version()) == (True, True, "step 3") for one in fast)
        assert not slow.generates
        slow.goes_on.set()
        assert pushing.result(TIMEOUT_S).version == 2
        assert (slow.serves(3), slow.generates, slow.version()) == (True, True, "step 3")


def test_report_has_the_pause_of_each_engine_and_slow_ones_are_last_in_the_next_push(
    engines: list[Slow], background: Callable[..., Future[PushReport]]
) -> None:
    slow = engines[0]
    model = trainer_model(checkpoint(2))
    with rolling(engines) as sync:
        pushing = begin_slow_push(background, sync, model, slow)
        threading.Event().wait(0.5)
        slow.goes_on.set()
        first = pushing.result(TIMEOUT_S)
        assert [each.name for each in first.engines] == ["engine 0", "engine 1", "engine 2"]
        pauses = {each.name: each.pause_s for each in first.engines}
        assert pauses["engine 0"] >= 0.5
        assert first.pause_s == max(pauses.values()) < first.total_s
        assert first.metrics()["weightsync/pause_s/engine 1"] == pauses["engine 1"]
        second = sync.push(fill(model, 3))
    assert second.engines[-1].name == "engine 0"
    assert all(engine.serves(3) for engine in engines)


def test_pause_of_each_engine_is_reported_when_all_are_updated_at_once(engines: list[Slow]) -> None:
    with WeightSync("fsdp", "ipc", engines, timeout_s=TIMEOUT_S) as sync:
        report = sync.push(trainer_model(checkpoint(2)))
    assert [each.name for each in report.engines] == ["engine 0", "engine 1", "engine 2"]
    assert all(0 < each.pause_s <= report.pause_s < report.total_s for each in report.engines)


def failed(sync: WeightSync, model: nn.Module, engine: Slow, **options: Any) -> WeightSyncError:
    """Push, with an engine whose worker fails halfway. Return the error."""
    receiver = engine.sessions[0].receiver
    fail_once_after(receiver, 0)
    with pytest.raises(WeightSyncError) as raised:
        sync.push(model, **options)
    return raised.value


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_engines_before_a_failure_keep_the_new_version_and_later_ones_the_old(
    engines: list[Slow], transport: str
) -> None:
    model = trainer_model(checkpoint(2))
    with rolling(engines, transport) as sync:
        sync.push(model)
        order = sort_as_pushed(sync, engines)
        error = failed(sync, fill(model, 3), order[1])
        assert error.facts["updated"] == [order[0].name]
        assert f"engines with the new version: {order[0].name}" in str(error)
        assert (order[0].serves(3), order[0].version(), order[0].generates) == (True, "2", True)
        assert (order[1].state, order[1].generates) == (POISONED, False)
        assert (order[1].version() or "").startswith(POISONED)
        assert (order[2].serves(2), order[2].version(), order[2].generates) == (True, "1", True)
        assert (order[0].state, order[2].state) == (CLEAN, CLEAN)
        assert sync.push(fill(model, 4)).version == 3
    assert all(engine.serves(4) and engine.version() == "3" and engine.generates for engine in engines)


def test_error_names_engines_that_an_earlier_push_has_poisoned(engines: list[Slow]) -> None:
    model = trainer_model(checkpoint(2))
    with rolling(engines) as sync:  # only a success sorts engines by their pauses, so both pushes begin with engine 0
        error = failed(sync, model, engines[1])
        assert "; POISONED until the next success: engine 1; engines with the new version: engine 0" in error.message
        error = failed(sync, model, engines[0])
        assert error.message.endswith("; POISONED until the next success: engine 0, engine 1")
        assert [engine.state for engine in engines] == [POISONED, POISONED, CLEAN]


def sort_as_pushed(sync: WeightSync, engines: list[Slow]) -> list[Slow]:
    """Return the engines in the order of the next push: by the pauses of the last one."""
    assert sync.last_report is not None
    pauses = {each.name: each.pause_s for each in sync.last_report.engines}
    return sorted(engines, key=lambda engine: pauses[engine.name])


def die(engine: Slow) -> None:
    """Let an engine's worker die in its next push."""

    def run(*_: Any) -> None:
        engine.is_alive = lambda: False  # type: ignore[method-assign]
        engine.sessions[0].close()
        raise ConnectionError("dead")

    engine.sessions[0].receiver.run = run


def test_drop_pushes_to_the_engines_that_are_left(engines: list[Slow]) -> None:
    model = trainer_model(checkpoint(2))
    with rolling(engines, on_engine_failure="drop") as sync:
        sync.push(model)
        order = sort_as_pushed(sync, engines)
        die(order[1])
        report = sync.push(fill(model, 3), label="step 3")
        assert report.left_out == (order[1].name,)
        assert report.version == 3, "version 2 is the first engine's"
        for engine in (order[0], order[2]):
            assert (engine.serves(3), engine.version(), engine.generates) == (True, "step 3", True)


def test_drop_raises_when_an_engine_serves_the_requested_version(engines: list[Slow]) -> None:
    model = trainer_model(checkpoint(2))
    with rolling(engines, on_engine_failure="drop") as sync:
        sync.push(model)
        order = sort_as_pushed(sync, engines)
        die(order[1])
        with pytest.raises(WeightSyncError) as raised:
            sync.push(fill(model, 3), version=7)
        assert (raised.value.lost, raised.value.updated) == ([order[1].name], [order[0].name])  # type: ignore[attr-defined]
        assert order[0].version() == "7"


def test_weights_written_between_two_engines_poison_the_later_one(engines: list[Slow]) -> None:
    model = trainer_model(checkpoint(2))
    with rolling(engines[:2]) as sync:
        sync.push(model)
        first, second = sort_as_pushed(sync, engines[:2])
        resume = first.resume
        first.resume = lambda: (resume(), fill(model, 4))[0]  # type: ignore[method-assign]
        with pytest.raises(DigestError, match="a thread wrote"):
            sync.push(fill(model, 3))
        assert (first.serves(3), first.version(), first.generates) == (True, "2", True)
        assert second.state == POISONED
        first.resume = resume  # type: ignore[method-assign]
        sync.push(model)
    assert first.serves(4)
    assert second.serves(4)


def test_engines_that_join_and_leave_have_an_update_of_their_own(engines: list[Slow]) -> None:
    model = trainer_model(checkpoint(2))
    with rolling(engines[:1], "broadcast") as sync:
        sync.push(model)
        sync.engines.add(engines[1])
        sync.engines.add(engines[2])
        caught_up = sync.catch_up(model)
        assert caught_up is not None
        assert [each.name for each in caught_up.engines] == ["engine 1", "engine 2"]
        assert len(sync.push(fill(model, 3)).engines) == 3
        assert all(engine.serves(3) for engine in engines)
        sync.engines.remove(engines[0])
        assert len(sync.push(fill(model, 4)).engines) == 2
    assert [engine.serves(seed) for engine, seed in zip(engines, (3, 4, 4), strict=True)] == [True] * 3


def test_a_model_that_has_moved_is_planned_anew_for_each_engine(engines: list[Slow]) -> None:
    with rolling(engines, "broadcast") as sync:
        for seed in (2, 3):
            assert len(sync.push(trainer_model(checkpoint(seed))).engines) == 3
            assert all(engine.serves(seed) for engine in engines)


def push_from_ranks(rank: int, transport: str) -> None:
    engines = [Slow(f"engine {number}") for number in range(3)] if rank == 0 else []
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", transport, engines or None, rolling=True, timeout_s=TIMEOUT_S) as sync:
        for _ in range(3):
            assert len(sync.push(model).engines) == 3
            assert all(engine.serves(2) for engine in engines)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_ranks_update_the_engines_in_the_same_order(transport: str) -> None:
    run_ranks(push_from_ranks, 2, transport)


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("ipc", {"backend": "stream"}),
        ("ipc", {"pause": "caller"}),
        ("checkpoint", {}),
        ("single_copy", {}),
        ("lora", {}),
    ],
)
def test_ways_to_push_without_a_transfer_for_each_engine_are_refused(
    engines: list[Slow], transport: str, options: dict[str, Any], tmp_path: Path
) -> None:
    way = CheckpointTransport(tmp_path) if transport == "checkpoint" else transport
    with pytest.raises(ConfigError, match="rolling"):
        WeightSync(**{"backend": "fsdp", "transport": way, "engine": engines, "rolling": True, **options})
    assert engines[0].calls == []
