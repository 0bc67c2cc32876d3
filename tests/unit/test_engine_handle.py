"""The undo log of one engine: what a failed push takes back in each state, and what a call that ends too late does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from weightsync.engines.base import CalledEngine
from weightsync.fleet.engine_handle import CALLER, EngineHandle, UpdateState
from weightsync.net.runtime import Deadline, submit
from weightsync.net.wire import POISONED, Go

MARK = f"set_version {POISONED}: a push is under way, or its trainer has died"
STEPS: list[Callable[[EngineHandle], None]] = [
    lambda one: one.pause("keep"),
    EngineHandle.start,
    EngineHandle.mark,
    lambda one: one.go(Go(2, None, 0, []), Deadline(1.0)),
    lambda one: one.finish(2, "2"),
]
CALLS = "pause keep", "start", MARK, None, "finish 2"


class RecordingEngine(CalledEngine):
    """An engine that notes its calls. A call of the method `slow` ends once `go_on` is set."""

    name, host = "engine 0", "127.0.0.1"

    def __init__(self, version: str | None = "1", slow: str = "", broken: str = "") -> None:
        self.calls: list[str] = []
        self.slow, self.broken, self.begun, self.go_on = slow, broken, threading.Event(), threading.Event()
        self._version = version

    def version(self) -> str | None:
        return self._version

    def takes_calls_ahead(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return True

    def _call(self, method: str, *args: object) -> None:
        if method == self.slow and not self.begun.is_set():
            self.begun.set()
            assert self.go_on.wait(20.0)
        self.calls.append(" ".join([method, *map(str, args)]))
        if method == self.broken:
            raise ValueError(f"{method} is broken")


def joined(engine: RecordingEngine, is_poisoned: bool = False) -> EngineHandle:
    """Return the handle of an engine in an open push."""
    one = EngineHandle(engine, is_poisoned=is_poisoned)
    one.read_version()
    one.state = UpdateState.OPEN
    return one


def fail(one: EngineHandle) -> None:
    one.state = UpdateState.FAILED
    one.roll_back()


@pytest.mark.parametrize(
    ("steps", "undone", "undone_if_poisoned"),
    [
        (0, [], []),
        (1, ["resume"], []),
        (2, ["finish None", "resume"], ["finish None"]),
        (3, ["finish None", "set_version 1", "resume"], ["finish None"]),
        (4, ["finish None"], ["finish None"]),
        (5, [], []),
    ],
)
def test_a_failure_takes_back_the_steps_before_it(steps: int, undone: list[str], undone_if_poisoned: list[str]) -> None:
    made = [call for call in CALLS[:steps] if call is not None]
    for engine, is_poisoned, expected in (
        (RecordingEngine(), False, undone),
        (RecordingEngine(), True, undone_if_poisoned),
        (RecordingEngine(f"{POISONED}: the push of version 1 failed"), False, undone_if_poisoned),
    ):
        one = joined(engine, is_poisoned)
        for step in STEPS[:steps]:
            step(one)
        fail(one)
        assert engine.calls == made + expected
        one.roll_back()
        assert engine.calls == made + expected, "an undo runs once"


@pytest.mark.parametrize(
    ("engine", "step", "before", "late"),
    [
        (RecordingEngine(slow="pause"), 0, ["resume"], ["pause keep", "resume"]),
        (RecordingEngine(slow="pause", broken="pause"), 0, ["resume"], ["pause keep", "resume"]),
        (RecordingEngine(slow="start"), 1, [], ["start", "finish None"]),
        (RecordingEngine(slow="set_version"), 2, ["set_version 1"], [MARK, "set_version 1"]),
    ],
)
def test_a_call_that_ends_after_the_failure_takes_itself_back(
    engine: RecordingEngine, step: int, before: list[str], late: list[str]
) -> None:
    one = joined(engine)
    call = submit("late", lambda: STEPS[step](one))
    assert engine.begun.wait(20.0)
    fail(one)
    assert engine.calls == before
    engine.go_on.set()
    with nullcontext() if not engine.broken else pytest.raises(ValueError, match="is broken"):
        call.result(20.0)
    assert engine.calls == before + late


@pytest.mark.parametrize("step", STEPS[:3])
def test_a_call_that_begins_after_the_failure_is_not_made(step: Callable[[EngineHandle], None]) -> None:
    engine = RecordingEngine()
    one = joined(engine)
    fail(one)
    step(one)
    assert engine.calls == []


def test_a_start_that_fails_is_not_finished() -> None:
    engine = RecordingEngine(broken="start")
    one = joined(engine)
    with pytest.raises(ValueError, match="start is broken"):
        one.start()
    fail(one)
    assert engine.calls == ["start"]


def test_an_engine_is_resumed_after_a_failed_rollback_of_its_update() -> None:
    engine = RecordingEngine(broken="finish")
    one = joined(engine)
    for step in STEPS[:3]:
        step(one)
    with pytest.raises(ValueError, match="finish is broken"):
        fail(one)
    assert engine.calls[3:] == ["finish None", "set_version 1", "resume"]


def test_an_engine_paused_by_the_caller_is_left_to_the_caller() -> None:
    engine = RecordingEngine()
    engine.is_paused = lambda: True  # type: ignore[method-assign]
    one = joined(engine)
    one.pause(CALLER)
    one.start()
    fail(one)
    assert engine.calls == ["start", "finish None"]


def test_an_engine_without_versions_is_not_marked() -> None:
    engine = RecordingEngine(version=None)
    one = joined(engine)
    one.mark()
    one.finish(2, "2")
    assert (engine.calls, one.version, one.served) == (["finish 2"], None, 2)


class QueueingEngine(RecordingEngine):
    """A recording engine that takes calls ahead."""

    def takes_calls_ahead(self) -> bool:
        return True

    def send_update(self, mark: str | None, update_info: dict[str, str]) -> list[Callable[[], None]]:
        self.calls.append(f"send update {mark}")
        if self.slow == "update":
            self.begun.set()
            assert self.go_on.wait(20.0)
        return [lambda: None]

    def send_finish(self) -> list[Callable[[], None]]:
        self.calls.append("send finish")
        return [lambda: self.calls.append("finished")]


AHEAD: list[Callable[[EngineHandle], object]] = [lambda one: one.send_update({}), STEPS[3], EngineHandle.send_finish]


@pytest.mark.parametrize(
    ("steps", "undone", "undone_if_poisoned"),
    [
        (1, ["finish None", "set_version 1"], ["finish None"]),
        (2, ["finish None"], ["finish None"]),
        (3, ["send finish", "finished"], ["send finish", "finished"]),
    ],
)
def test_a_failure_takes_back_calls_sent_ahead(steps: int, undone: list[str], undone_if_poisoned: list[str]) -> None:
    for is_poisoned, expected in (False, undone), (True, undone_if_poisoned):
        engine = QueueingEngine()
        one = joined(engine, is_poisoned)
        for step in AHEAD[:steps]:
            step(one)
        fail(one)
        one.send_finish()  # behind the rollback it finishes nothing
        assert engine.calls == [f"send update {MARK.removeprefix('set_version ')}", *expected]


def test_an_update_sent_after_the_failure_takes_itself_back() -> None:
    engine = QueueingEngine(slow="update")
    one = joined(engine)
    call = submit("late", lambda: one.send_update({}))
    assert engine.begun.wait(20.0)
    fail(one)
    engine.go_on.set()
    call.result(20.0)
    assert engine.calls[1:] == ["set_version 1", "finish None"]


@pytest.mark.parametrize("version", ["1", None])
def test_an_update_finished_ahead_is_only_stamped(version: str | None) -> None:
    engine = QueueingEngine(version)
    one = joined(engine)
    for step in AHEAD:
        step(one)
    one.finish(2, "label")
    stamped = [] if version is None else ["set_version label"]
    assert engine.calls[1:] == ["send finish", "finished", *stamped]
    assert (one.served, one.version) == (2, version and "label")
