"""Pushes to an engine that takes calls before it has answered earlier ones, as the core of an `LLM` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, fail_once_after, trainer_model
from torch import nn

from weightsync import WeightSync
from weightsync.errors import EngineAsleepError, EngineError, WeightSyncError
from weightsync.net.wire import CLEAN, POISONED

TIMEOUT_S = 20.0


class QueueingEngine(FakeEngine):
    """A fake engine that serves one call after the other, in the order in which they were sent."""

    def __init__(self, host: ModuleHost, has_versions: bool) -> None:
        super().__init__(host)
        self._has_versions = has_versions
        self._core = ThreadPoolExecutor(1)
        self.refuses = ""
        """A method to refuse once."""

    def takes_calls_ahead(self) -> bool:
        return True

    def send_update(self, mark: str | None, update_info: dict[str, Any]) -> list[Callable[[], None]]:
        marks = [] if mark is None else [self._send("set_version", mark)]
        return [*marks, self._send("start"), self._send("update", update_info)]

    def send_finish(self) -> list[Callable[[], None]]:
        return [self._send("finish", None), self._send("reset_caches")]

    def finish(self, version: str | None) -> None:
        assert version is None
        self._send("finish", version)()

    def set_version(self, version: str) -> None:
        self._send("set_version", version)()

    def version(self) -> str | None:
        return self._version if self._has_versions else None

    def resume(self) -> None:
        raise AssertionError("it is never paused")

    def _send(self, method: str, *arguments: object) -> Callable[[], None]:
        answer = self._core.submit(self._serve, method, *arguments)
        return lambda: answer.result(TIMEOUT_S)

    def _serve(self, method: str, *arguments: object) -> None:
        if method == self.refuses:
            self.refuses = ""
            raise EngineError(f"{method} is refused")
        if method == "set_version":
            self.log.append(f"stamp {str(arguments[0]).partition(':')[0]}")
        getattr(super(), method)(*arguments)

    def has(self, seed: int) -> bool:
        return torch.equal(self.hosts[0].live.embed.weight, cold(checkpoint(seed)).embed.weight)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[QueueingEngine]:
    engine = QueueingEngine(ModuleHost(TinyEngineModel, checkpoint(1)), getattr(request, "param", True))
    yield engine
    engine.close()


@pytest.fixture
def pushed(engine: QueueingEngine) -> Iterator[tuple[WeightSync, nn.Module]]:
    """A trainer that has pushed once: the first push reads the version, and waits for each answer."""
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        model = trainer_model(checkpoint(2))
        sync.push(model)
        assert engine.has(2)
        engine.log.clear()
        model.load_state_dict(checkpoint(3))
        yield sync, model


@pytest.mark.parametrize(
    ("engine", "stamps"), [(True, ["stamp POISONED", "stamp 2"]), (False, [])], indirect=["engine"]
)
def test_a_later_push_makes_each_call_once(engine: QueueingEngine, pushed: Any, stamps: list[str]) -> None:
    sync, model = pushed
    assert sync.push(model).version == 2
    assert engine.has(3)
    assert engine.log == [*stamps[:1], "start", "finish", "reset caches", *stamps[1:]]


def test_an_update_opened_ahead_is_closed_when_the_model_has_moved(engine: QueueingEngine, pushed: Any) -> None:
    sync, _ = pushed
    assert sync.push(trainer_model(checkpoint(3))).version == 2
    assert engine.has(3)
    assert engine.log[:4] == ["stamp POISONED", "start", "finish", "stamp 1"]
    assert engine.log[4:] == ["stamp POISONED", "start", "finish", "reset caches", "stamp 2"]


def test_a_refusal_before_go_leaves_the_engine_as_it_was(engine: QueueingEngine, pushed: Any) -> None:
    sync, model = pushed
    engine.hosts[0].sleeps = True
    with pytest.raises(EngineAsleepError):
        sync.push(model)
    assert engine.log == ["stamp POISONED", "start", "finish", "stamp 1"]
    assert (engine.has(2), engine.sessions[0].receiver.state) == (True, CLEAN)
    engine.hosts[0].sleeps = False
    assert sync.push(model).version == 2


def test_a_cache_is_searched_before_go_and_cleared_after_it(engine: QueueingEngine, pushed: Any) -> None:
    sync, _ = pushed
    receiver, steps = engine.sessions[0].receiver, list[tuple[str, str]]()

    def search() -> Callable[[], bool]:
        steps.append(("search", receiver.state))
        return lambda: bool(steps.append(("clear", receiver.state)))

    engine.hosts[0].search_kv_cache = search
    sync.push(trainer_model(checkpoint(3)))  # it has moved: the update is opened twice
    assert steps == [("search", CLEAN), ("search", CLEAN), ("clear", POISONED)]


def test_a_worker_that_cannot_begin_a_push_leaves_the_engine_as_it_was(engine: QueueingEngine, pushed: Any) -> None:
    sync, model = pushed

    def refuse() -> Callable[[], bool]:
        raise EngineError("a kernel has changed")

    search, engine.hosts[0].search_kv_cache = engine.hosts[0].search_kv_cache, refuse
    with pytest.raises(EngineError, match="a kernel has changed"):
        sync.push(model)
    assert engine.log == ["stamp POISONED", "start", "finish", "stamp 1"]
    assert (engine.has(2), engine.sessions[0].receiver.state) == (True, CLEAN)
    engine.hosts[0].search_kv_cache = search
    assert sync.push(model).version == 2


def test_a_mark_that_fails_stops_the_push_before_go(engine: QueueingEngine, pushed: Any) -> None:
    sync, model = pushed
    engine.refuses = "set_version"
    with pytest.raises(EngineError, match=r"set_version is refused.*phase pause"):
        sync.push(model)
    assert (engine.has(2), engine.version()) == (True, "1")


@pytest.mark.parametrize("refuses", ["", "finish", "reset_caches"])
def test_a_failure_after_go_poisons_and_the_next_push_heals(engine: QueueingEngine, pushed: Any, refuses: str) -> None:
    sync, model = pushed
    engine.refuses = refuses
    if not refuses:
        fail_once_after(engine.sessions[0].receiver, 0)
    with pytest.raises(WeightSyncError, match=f"{refuses} is refused" if refuses else "no memory left"):
        sync.push(model)
    assert str(engine.version()).startswith(POISONED)
    assert engine.log.count("finish") == (refuses != "finish"), "vLLM is asked once"
    assert sync.push(model).version == (3 if refuses else 2)
    assert (engine.has(3), engine.version()) == (True, "3" if refuses else "2")
