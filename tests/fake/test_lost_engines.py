"""A fleet of which an engine dies: the others are pushed to without it, and it is taken in again when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from faults import FaultyTransport
from optional_transports import NIXL
from ranks import run_ranks
from recorders import RecordedEngine

from weightsync import ConfigError, EngineUnreachableError, SyncTimeoutError, WeightSync, WeightSyncError
from weightsync.fleet import EngineList, engine_handle
from weightsync.fleet.engine_call import BackgroundCall
from weightsync.fleet.roster import Roster
from weightsync.net import timeouts
from weightsync.net.listener import Listener
from weightsync.net.wire import POISONED

TIMEOUT_S = 20.0
CALLS = ("init", "start", "update", "finish", "pause", "resume", "set_version", "reset_caches", "version")


class MortalEngine(RecordedEngine):
    """An engine that may die, and be started anew from its first weights."""

    def __init__(self, name: str) -> None:
        super().__init__(ModuleHost(TinyEngineModel, checkpoint(1)))
        self.name = name
        self.is_dead = False

    def die(self, chunk: int = 0) -> None:
        self.is_dead = True
        for session in self.sessions:
            session._connection._sock.shutdown(2)

    def start_anew(self) -> None:
        self.close()
        RecordedEngine.__init__(self, ModuleHost(TinyEngineModel, checkpoint(1)))
        self.is_dead = False

    def is_alive(self) -> bool:
        return not self.is_dead

    def __getattribute__(self, name: str) -> Any:
        return self._refuse if name in CALLS and self.is_dead else super().__getattribute__(name)

    def _refuse(self, *_: Any) -> None:
        raise EngineUnreachableError("nothing answers there", who=self.name)

    def serves(self, seed: int) -> bool:
        self.hosts[0].check_before_answer()
        return torch.equal(self.hosts[0].live.embed.weight, cold(checkpoint(seed)).embed.weight)


@pytest.fixture
def engines() -> Iterator[list[MortalEngine]]:
    engines = [MortalEngine("engine 0"), MortalEngine("engine 1")]
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast", NIXL])
def test_others_serve_the_version_and_the_report_names_the_lost_one(
    engines: list[MortalEngine], transport: str
) -> None:
    faulty = FaultyTransport(transport)
    with WeightSync("fsdp", faulty, engines, on_engine_failure="drop", timeout_s=TIMEOUT_S) as sync:
        assert sync.push(trainer_model(checkpoint(2))).left_out == ()
        faulty.before_chunk = lambda chunk: engines[1].is_dead or engines[1].die()
        assert sync.push(trainer_model(checkpoint(3))).left_out == ("engine 1",)
        faulty.before_chunk = None
        assert engines[0].serves(3)
        assert engines[0].version() == str(sync.last_report.version)
        assert sync.push(trainer_model(checkpoint(4))).left_out == ("engine 1",)
        assert engines[0].serves(4)
        engines[1].start_anew()
        back = sync.push(trainer_model(checkpoint(5)))
        assert back.left_out == ()
        assert len(back.workers) == 2
        assert all(engine.serves(5) for engine in engines)


def test_version_of_the_caller_is_not_pushed_twice_after_a_commit(
    engines: list[MortalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightSync("fsdp", "ipc", engines, on_engine_failure="drop", timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)), version=1)

        def die(version: int) -> float:
            engines[1].die()
            raise RuntimeError("it died")

        monkeypatch.setattr(engines[1].sessions[0].receiver, "commit", die)
        with pytest.raises(WeightSyncError, match=r"engine 1.*version 2 is spent, so push again") as raised:
            sync.push(trainer_model(checkpoint(3)), version=2)
        assert raised.value.spent == ["the version"]
        assert sync.push(trainer_model(checkpoint(3)), version=3).left_out == ("engine 1",)
        assert engines[0].serves(3)


def test_others_go_on_by_one_call_where_the_push_raises(engines: list[MortalEngine]) -> None:
    with WeightSync("fsdp", "ipc", engines, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        assert sync.leave_out_lost() == []
        engines[1].die()
        with pytest.raises(EngineUnreachableError) as raised:
            sync.push(trainer_model(checkpoint(3)))
        assert (raised.value.lost, raised.value.survivors) == (["engine 1"], ["engine 0"])
        with pytest.raises(EngineUnreachableError):
            sync.push(trainer_model(checkpoint(3)))
        assert sync.leave_out_lost() == ["engine 1"]
        assert sync.push(trainer_model(checkpoint(3))).left_out == ("engine 1",)
        assert engines[0].serves(3)


def test_last_engine_is_not_left_out(engines: list[MortalEngine]) -> None:
    with WeightSync("fsdp", "ipc", engines[0], on_engine_failure="drop", timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        engines[0].die()
        with pytest.raises(EngineUnreachableError):
            sync.push(trainer_model(checkpoint(3)))


@pytest.mark.parametrize(("method", "come"), [("init", False), ("init", True), ("update", True)])
def test_engine_that_dies_and_leaves_its_call_unanswered_is_noticed(
    engines: list[MortalEngine], method: str, come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does vLLM's server when the process of its engine core is killed, and the workers' are not."""
    monkeypatch.setattr(timeouts, "HEALTH_LOOK_S", 0.05)
    over = threading.Event()

    def call(engine: MortalEngine, info: dict[str, Any]) -> None:
        if come:  # the engine's workers
            getattr(RecordedEngine, method)(engine, info)
        engine.is_dead = True
        over.wait()

    with WeightSync("fsdp", "ipc", engines[0], timeout_s=600.0) as sync:
        if method == "update":
            sync.push(trainer_model(checkpoint(2)))
        monkeypatch.setattr(MortalEngine, method, call, raising=False)
        with pytest.raises(EngineUnreachableError, match="the engine died in a push"):
            sync.push(trainer_model(checkpoint(3)))
        over.set()


def test_engine_that_does_not_say_where_it_is_is_asked_once() -> None:
    """Its error is an OSError too, as is the one that says that there is no way to its host."""
    asked = []

    class Mute(MortalEngine):
        @property
        def host(self) -> str:
            asked.append(1)
            raise SyncTimeoutError("no answer within 5 s", who=self.name, waiting_for=[self.name])

    mute = Mute("engine 0")
    with (
        WeightSync("fsdp", "ipc", mute, timeout_s=TIMEOUT_S) as sync,
        pytest.raises(SyncTimeoutError),
    ):
        sync.push(trainer_model(checkpoint(2)))
    assert asked == [1]
    mute.close()


@pytest.mark.parametrize(
    ("answers", "waiting_for", "lost"),
    [
        (lambda: False, ["engine worker 0"], ["engine 0"]),
        (lambda: time.sleep(1.0) or True, ["engine worker 0"], ["engine 0"]),
        (lambda: None, ["engine worker 0"], ["engine 0"]),
        (lambda: True, ["engine worker 0"], []),
        (lambda: False, ["trainer rank 1"], []),
    ],
    ids=["dead", "stopped", "busy", "alive", "not asked"],
)
def test_engine_that_a_rank_has_waited_for_is_named_where_it_does_not_answer(
    engines: list[MortalEngine],
    answers: Callable[[], bool],
    waiting_for: list[str],
    lost: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks know workers by their numbers alone."""
    monkeypatch.setattr(timeouts, "ENGINE_ANSWER_S", 0.2)
    monkeypatch.setattr(engines[0], "is_alive", answers)
    error = SyncTimeoutError(f"{waiting_for[0]} did not take a chunk", who="trainer rank 1", waiting_for=waiting_for)
    assert engine_handle.find_lost([engine_handle.EngineHandle(engines[0])], error) == lost
    assert ("engine 0 does not answer" in str(error)) is bool(lost)


def test_answer_to_an_earlier_question_does_not_count(
    engines: list[MortalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "ENGINE_ANSWER_S", 0.5)
    begun, asked_again, over = threading.Event(), threading.Event(), threading.Event()

    def is_alive() -> bool:
        if not begun.is_set():
            begun.set()
            return asked_again.wait(TIMEOUT_S)
        asked_again.set()
        return over.wait(TIMEOUT_S)

    monkeypatch.setattr(engines[0], "is_alive", is_alive)
    one, listener = engine_handle.EngineHandle(engines[0]), Listener()
    BackgroundCall(listener, "health", one.ask_whether_alive)
    assert begun.wait(TIMEOUT_S)
    error = SyncTimeoutError("no answer", who="engine 0", waiting_for=["engine 0"])
    assert engine_handle.find_lost([one], error) == ["engine 0"]
    over.set()
    listener.close()


def test_lost_engine_that_may_be_busy_stays_left_out_until_it_answers(
    engines: list[MortalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Ray actor that has stopped, and then goes on."""
    monkeypatch.setattr(timeouts, "LOST_ENGINE_ANSWER_S", TIMEOUT_S)
    answers = [True, None, None]
    monkeypatch.setattr(engines[1], "is_alive", lambda: answers.pop())
    roster = Roster(EngineList(engines, TIMEOUT_S), TIMEOUT_S)
    roster.leave_out(["engine 1"])
    for _ in range(2):
        assert roster.engines() == engines[:1]
    assert roster.engines() == engines


def test_busy_engine_has_not_died(engines: list[MortalEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines[0], "is_alive", lambda: None)
    one = engine_handle.EngineHandle(engines[0])
    for _ in range(3):
        one.ask_whether_alive()
    one.check_health(TIMEOUT_S)


def test_engine_that_leaves_a_call_unanswered_is_not_waited_for_again(
    engines: list[MortalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does when its core is stopped: it says that it is alive, and answers nothing else."""
    monkeypatch.setattr(timeouts, "FAREWELL_S", 60.0)
    over, model = threading.Event(), trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engines, timeout_s=2.0) as sync:
        sync.push(model)
        with monkeypatch.context() as patch:
            patch.setattr(engines[1], "finish", lambda version: over.wait(2 * TIMEOUT_S))
            started = time.monotonic()
            with pytest.raises(SyncTimeoutError) as raised:
                sync.push(model)
            assert time.monotonic() - started < TIMEOUT_S
            assert raised.value.waiting_for == ["engine 1"]
            assert engines[0].version().startswith(POISONED)
            over.set()
        sync.push(trainer_model(checkpoint(4)))
    assert all(engine.serves(4) for engine in engines)


def test_others_do_not_wait_for_calls_to_an_engine_that_is_left_out(
    engines: list[MortalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    over, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(engines[1], "_refuse", lambda *_: over.wait(4 * TIMEOUT_S) and ended.set())
    faulty = FaultyTransport("ipc")
    with WeightSync("fsdp", faulty, engines, on_engine_failure="drop", timeout_s=3.0) as sync:
        sync.push(trainer_model(checkpoint(2)))
        faulty.before_chunk = lambda chunk: setattr(engines[1], "is_dead", True)
        assert sync.push(trainer_model(checkpoint(3))).left_out == ("engine 1",)
        assert engines[0].serves(3)
        faulty.before_chunk = None
        engines[1].is_dead = False
        threading.Timer(0.5, over.set).start()
        assert sync.push(trainer_model(checkpoint(5))).left_out == ()
        assert ended.is_set(), "its calls were not waited for when it was back"
        assert all(engine.serves(5) for engine in engines)


def test_push_when_all_engines_are_left_out_says_so(engines: list[MortalEngine]) -> None:
    with WeightSync("fsdp", "ipc", engines[0], timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        engines[0].die()
        with pytest.raises(EngineUnreachableError):
            sync.push(trainer_model(checkpoint(3)))
        sync.leave_out_lost()
        with pytest.raises(EngineUnreachableError, match="all engines are lost: engine 0"):
            sync.push(trainer_model(checkpoint(3)))
        engines[0].start_anew()
        sync.push(trainer_model(checkpoint(3)))
    assert engines[0].serves(3)


def test_version_that_an_engine_may_have_is_given_to_no_other_weights(engines: list[MortalEngine]) -> None:
    """The others may never have heard of it."""
    with WeightSync("fsdp", "ipc", engines, on_engine_failure="drop", timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        session = engines[1].sessions[0]
        commit = session.receiver.commit

        def commit_and_die(version: int) -> float:
            commit(version)
            engines[1].die()
            raise MemoryError("its last breath")

        session.receiver.commit = commit_and_die  # type: ignore[method-assign]
        report = sync.push(trainer_model(checkpoint(3)))
        assert session.receiver.version == 2
        assert (report.version, report.left_out) == (3, ("engine 1",))
        assert engines[0].serves(3)


def push_from_ranks(rank: int) -> None:
    engines = [MortalEngine("engine 0"), MortalEngine("engine 1")] if rank == 0 else None
    with WeightSync("fsdp", "ipc", engines, on_engine_failure="drop", timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        if engines is not None:
            engines[0].die()
        assert sync.push(trainer_model(checkpoint(3))).left_out == ("engine 0",)
        assert engines is None or engines[1].serves(3)
    for engine in engines or ():
        engine.close()


def test_every_rank_pushes_again() -> None:
    run_ranks(push_from_ranks, 2)


@pytest.mark.parametrize("transport", ["lora", "single_copy"])
def test_strategy_that_cannot_leave_an_engine_out_refuses_the_option(transport: str) -> None:
    with pytest.raises(ConfigError, match="on_engine_failure: no effect"):
        WeightSync("fsdp", transport, on_engine_failure="drop")


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_engine_failure='ignore'; choose one of raise, drop"):
        WeightSync("fsdp", "ipc", on_engine_failure="ignore")
