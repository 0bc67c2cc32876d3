"""A trainer that stops answering loses its engines to the next one, and touches them no more; a mixture is mute."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from faults import FaultyTransport
from msgspec.structs import replace
from recorders import RecordedEngine
from torch import nn

from weightsync import (
    ConfigError,
    EngineBusyError,
    EngineError,
    FencedError,
    PlacementError,
    ProtocolError,
    SyncTimeoutError,
    WeightSync,
    WeightSyncError,
)
from weightsync.fleet import fleet
from weightsync.net import timeouts
from weightsync.net.authentication import FrameMac
from weightsync.net.hold import Hold
from weightsync.net.runtime import boot_id, started_ticks, this_process
from weightsync.net.wire import POISONED
from weightsync.worker.session import WorkerSession

TIMEOUT_S = 20.0


@pytest.fixture
def engine() -> Iterator[RecordedEngine]:
    engine = RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "HOLDER_ANSWER_S", 0.3)
    monkeypatch.setattr(timeouts, "WORKER_GRACE_S", 0.0)


@contextmanager
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainers that connect in this context answer nobody who asks whether they are alive, as if they were stopped."""
    monkeypatch.setattr(timeouts, "LEASE_LOOK_S", 3600.0)
    yield
    monkeypatch.setattr(timeouts, "LEASE_LOOK_S", 0.05)


def answers_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is asked whether it is alive answers soon, and has long to do so."""
    monkeypatch.setattr(timeouts, "LEASE_LOOK_S", 0.05)
    monkeypatch.setattr(timeouts, "HOLDER_ANSWER_S", 30.0)


def assert_serves(engine: RecordedEngine, seed: int, version: int) -> None:
    assert torch.equal(engine.hosts[0].live.embed.weight, cold(checkpoint(seed)).embed.weight)
    assert engine.version() == str(version)
    engine.hosts[0].check_before_answer()


def test_trainer_that_answers_keeps_its_engine(engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_are_heard(monkeypatch)
    with (
        WeightSync("fsdp", "ipc", engine, timeout_s=60.0) as first,
        WeightSync("fsdp", "ipc", engine, timeout_s=60.0) as second,
    ):
        first.push(trainer_model(checkpoint(2)))
        with pytest.raises(EngineBusyError, match=r"another trainer is connected.*: close it") as busy:
            second.push(trainer_model(checkpoint(3)))
        assert "stop its process" not in str(busy.value), "both are in this process"
        first.push(trainer_model(checkpoint(2)))
        assert_serves(engine, 2, 2)


by_the_collector = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""The collector closes sockets with a `ResourceWarning`."""


@by_the_collector
@pytest.mark.parametrize("refused", [False, True])
def test_one_that_nobody_holds_leaves_its_engine_to_the_next(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """A cell of a notebook that is run again. A refusal keeps the connections, and its traceback is a cycle."""
    answers_are_heard(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        for seed in (2, 3, 4):
            sync = WeightSync("fsdp", "ipc", engine, timeout_s=60.0)
            sync.push(trainer_model(checkpoint(seed)))
            if refused:
                with suppress(ConfigError):
                    sync.push(trainer_model(checkpoint(seed)), version=0)
        assert_serves(engine, 4, 3)
        sync.close()
    finally:
        gc.enable()


@by_the_collector
def test_one_that_its_own_list_of_engines_holds_is_freed(engine: RecordedEngine) -> None:
    def push() -> weakref.ref[WeightSync]:
        held: list[WeightSync] = []
        held.append(WeightSync("fsdp", "ipc", lambda: [engine] if held else [], timeout_s=60.0))
        held[0].push(trainer_model(checkpoint(2)))
        return weakref.ref(held[0])

    about = push()
    gc.collect()
    assert about() is None


class FailingInit(RecordedEngine):
    """Its call to meet a trainer fails before its worker has met it, where `fails` is set."""

    fails = False

    def init(self, init_info: dict[str, Any]) -> None:
        if not self.fails:
            super().init(init_info)
            return
        threading.Thread(target=super().init, args=(init_info,)).start()
        raise EngineError("the call has failed")


def test_what_a_worker_says_comes_before_what_its_failed_call_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answers_are_heard(monkeypatch)
    monkeypatch.setattr(timeouts, "WORKER_MESSAGE_S", 30.0)
    engine = FailingInit(ModuleHost(TinyEngineModel, checkpoint(1)))
    with (
        WeightSync("fsdp", "ipc", engine, timeout_s=60.0) as first,
        WeightSync("fsdp", "ipc", engine, timeout_s=60.0) as second,
    ):
        first.push(trainer_model(checkpoint(2)))
        engine.fails = True
        with pytest.raises(EngineBusyError, match="another trainer is connected"):
            second.push(trainer_model(checkpoint(3)))
    engine.close()


def test_trainer_that_stalls_between_pushes_is_fenced_off(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as first,
        WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as second,
    ):
        with stalled(monkeypatch):
            first.push(trainer_model(checkpoint(2)))
        second.push(trainer_model(checkpoint(3)))
        engine.heard()
        with pytest.raises(FencedError, match="another trainer has taken over this engine"):
            first.push(trainer_model(checkpoint(2)))
        assert engine.heard() == ""
        assert_serves(engine, 3, 2)
        with pytest.raises(EngineBusyError):
            first.push(trainer_model(checkpoint(2)))
        second.close()
        first.push(trainer_model(checkpoint(4)))
        assert_serves(engine, 4, 3)


def test_answer_that_was_changed_on_the_way_is_no_fence(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has answered, and its connection is what has failed."""
    answers_are_heard(monkeypatch)
    with (
        WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as first,
        WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as second,
    ):
        first.push(trainer_model(checkpoint(2)))
        connection = first._strategy._fleet.workers[0].connection
        connection._sent = FrameMac(b"of another connection")
        second.push(trainer_model(checkpoint(3)))
        until(lambda: not connection.is_open())
        reported = connection.reported()
        assert isinstance(reported, ProtocolError)
        assert "a frame has a wrong seal" in str(reported)
        with pytest.raises(EngineBusyError):
            first.push(trainer_model(checkpoint(2)))
        assert_serves(engine, 3, 2)


def run_slowly(engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the engine's worker take so long for what it loads last."""
    receiver = engine.sessions[0].receiver
    run = receiver.run

    def slow(*args: Any) -> Any:
        done = run(*args)
        time.sleep(seconds)
        return done

    monkeypatch.setattr(receiver, "run", slow)


def test_worker_that_loads_for_longer_than_a_wait_is_waited_for(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LEASE_LOOK_S", 0.05)
    monkeypatch.setattr(timeouts, "WORKER_LEASE_LOOK_S", 0.05)
    run_slowly(engine, monkeypatch, 2.2)
    with WeightSync("fsdp", "ipc", engine, max_bytes=64, timeout_s=1.5) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert_serves(engine, 2, 1)


def test_worker_that_has_stopped_is_lost_though_its_engine_says_that_it_lives(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LEASE_LOOK_S", 0.05)
    monkeypatch.setattr(timeouts, "WORKER_LEASE_LOOK_S", 3600.0)
    run_slowly(engine, monkeypatch, 8.0)
    with WeightSync("fsdp", "ipc", engine, max_bytes=64, timeout_s=2.5) as sync:
        with pytest.raises(SyncTimeoutError, match=r"no answer from engine 0 worker tp=0 .*within 2\.5 s") as raised:
            sync.push(trainer_model(checkpoint(2)))
        assert raised.value.lost == [engine.name]
        assert engine.is_alive()


@pytest.mark.parametrize("ends", ["done", "under way"])
def test_trainer_that_stalls_in_a_push_touches_nothing_when_it_goes_on(
    engine: RecordedEngine, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on when the next trainer's push is done, or while that is under way."""
    session = engine.sessions[0]
    going_on = threading.Event()
    outcome: list[WeightSyncError] = []

    def push_first() -> None:
        transport = FaultyTransport("broadcast")
        transport.before_chunk = lambda chunk: going_on.wait() and None
        with WeightSync("fsdp", transport, engine, timeout_s=4.0) as first:  # its connection must not pass it
            try:
                first.push(trainer_model(checkpoint(2)))
            except WeightSyncError as error:
                outcome.append(error)

    def goes_on(chunk: int) -> None:
        if ends == "under way":
            end_first()

    def end_first() -> None:
        going_on.set()
        stalling.join()

    with stalled(monkeypatch):
        stalling = threading.Thread(target=push_first)
        stalling.start()
        until(lambda: session.receiver.state == POISONED and not session._serving)
    assert engine.version().startswith("POISONED")
    with pytest.raises(EngineError, match="does not answer: it is POISONED"):
        engine.hosts[0].check_before_answer()
    transport = FaultyTransport("ipc")
    transport.before_chunk = goes_on
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as second:
        engine.heard()
        second.push(trainer_model(checkpoint(3)))
        if ends == "done":
            end_first()
        calls = engine.heard()
        assert calls.count("finish") == 2, "the second ends what the first left open, and its own"
        assert calls.count("resume") == 1
        assert "failed" not in calls
        assert_serves(engine, 3, 1)
    assert [type(error) for error in outcome] == [FencedError]


def pushes_once_it_may(sync: WeightSync, seed: int, timeout_s: float) -> None:
    """Push until another trainer does not keep the engine any more."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sync.push(trainer_model(checkpoint(seed)))
            return
        except EngineBusyError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.parametrize("where", ["transfer", "look", "commit"])
def test_trainer_that_answers_and_hangs_in_a_push_loses_its_engine(
    engine: RecordedEngine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread is in a deadlock, and another thread of its answers whoever asks."""
    monkeypatch.setattr(timeouts, "LEASE_LOOK_S", 0.05)
    hung, going_on = threading.Event(), threading.Event()
    outcome: list[WeightSyncError] = []

    def hang(*_: Any) -> None:
        hung.set()
        assert going_on.wait(60.0)

    def push_first() -> None:
        transport = FaultyTransport("broadcast")
        with WeightSync("fsdp", transport, engine, timeout_s=1.0) as first:
            first.push(trainer_model(checkpoint(2)))
            if where == "transfer":
                transport.before_chunk = hang
            if where == "look":
                monkeypatch.setattr(first._strategy._source, "read", hang)
            if where == "commit":
                monkeypatch.setattr(transport, "on_commit", hang)
            try:
                first.push(trainer_model(checkpoint(2)))
            except WeightSyncError as error:
                outcome.append(error)

    with WeightSync("fsdp", "broadcast", engine, timeout_s=TIMEOUT_S) as before:
        before.push(trainer_model(checkpoint(1)))  # a first push imports much, longer than the next one may wait
    hanging = threading.Thread(target=push_first)
    hanging.start()
    assert hung.wait(30.0)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as second:
        pushes_once_it_may(second, 3, 60.0)
        engine.heard()
        going_on.set()
        hanging.join()
        assert engine.heard() == ""
        assert engine.version() == str(second.last_report.version)
        assert_serves(engine, 3, second.last_report.version)
    assert [type(error) for error in outcome] == [FencedError]


def test_trainer_keeps_its_engine_between_pushes_for_as_long_as_its_user_says(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_are_heard(monkeypatch)
    with (
        WeightSync("fsdp", "ipc", engine, timeout_s=60.0, hold_s=1e-6) as first,
        WeightSync("fsdp", "ipc", engine, timeout_s=60.0, hold_s=600.0) as second,
        WeightSync("fsdp", "ipc", engine, timeout_s=60.0) as third,
    ):
        first.push(trainer_model(checkpoint(2)))
        second.push(trainer_model(checkpoint(3)))
        assert_serves(engine, 3, 2)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("weightsync.net.listener.this_process", lambda: f"{boot_id()}:1:0")
            with pytest.raises(EngineBusyError, match=f"stop its process, {os.getpid()} on the engine's host"):
                third.push(trainer_model(checkpoint(4)))
        with pytest.raises(FencedError):
            first.push(trainer_model(checkpoint(4)))
        second.push(trainer_model(checkpoint(4)))
        assert_serves(engine, 4, 3)
    for wrong in (0, -1.0, "60", True):
        with pytest.raises(ConfigError, match="hold_s"):
            WeightSync("fsdp", "ipc", engine, hold_s=wrong)
    with pytest.raises(ConfigError, match="hold_s: no effect"):
        WeightSync("fsdp", "lora", engine, hold_s=60.0)


def test_hold_lasts_while_a_push_moves_and_between_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limited, unlimited = Hold(10.0, 5.0), Hold(10.0)
    for hold in (limited, unlimited):
        hold.begin()
        now += 19.0
        hold.move()
        now += 19.0
        assert hold.lasts()
        now += 2.0
        assert not hold.lasts(), "the push is stuck"
        hold.end()
        assert hold.lasts()
        now += 6.0
        assert hold.lasts() is (hold is unlimited)


def test_trainer_that_stalls_before_the_commit_loses_the_engine_like_any_other(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is done waits long for other workers, but for no trainer that does not answer."""
    session, going_on, commit = engine.sessions[0], threading.Event(), fleet.Fleet.commit
    outcome: list[WeightSyncError] = []

    def push_first() -> None:
        with WeightSync("fsdp", "ipc", engine, timeout_s=2.0) as first, pytest.raises(FencedError) as raised:
            first.push(trainer_model(checkpoint(2)))
        outcome.append(raised.value)

    def stall(those: fleet.Fleet, label: str | None) -> Any:
        going_on.wait()
        return commit(those, label)

    with stalled(monkeypatch):
        monkeypatch.setattr(fleet.Fleet, "commit", stall)
        stalling = threading.Thread(target=push_first)
        stalling.start()
        until(lambda: session.receiver.state == POISONED)
        until(lambda: not session._serving, timeout_s=2.0 * timeouts.WORKER_PATIENCE - 4.0)
        monkeypatch.setattr(fleet.Fleet, "commit", commit)
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as second:
        second.push(trainer_model(checkpoint(3)))
        going_on.set()
        stalling.join()
        assert_serves(engine, 3, 1)
    assert len(outcome) == 1


def test_mixture_refuses_to_answer_until_a_push_has_healed_it(engine: RecordedEngine) -> None:
    def fail(chunk: int) -> None:
        transport.before_chunk = None
        raise MemoryError("no memory left")

    transport = FaultyTransport("broadcast")
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        transport.before_chunk = fail
        with pytest.raises(WeightSyncError, match="no memory left"):
            sync.push(trainer_model(checkpoint(3)))
        with pytest.raises(EngineError, match="does not answer: it is POISONED: a push after version 1"):
            engine.hosts[0].check_before_answer()
        healed = sync.push(trainer_model(checkpoint(3)))
        assert_serves(engine, 3, healed.version)


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def test_memory_that_a_trainer_may_write_to_is_taken_back_before_the_next_trainer() -> None:
    engine = RecordedEngine(ModuleHost(Plain, {"weight": torch.ones(4, 4)}))
    session, live = engine.sessions[0], engine.hosts[0].live
    trainers, models, places = [], [], set()
    for number in (1, 2, 3):
        session._trainer = replace(session._trainer, process="another process")
        trainers.append(sync := WeightSync("fsdp", "single_copy", engine, timeout_s=TIMEOUT_S))
        with torch.device("meta"):
            models.append(model := Plain())
        sync.attach(model)
        for stopped in models[:-1]:
            stopped.weight.data.fill_(99.0)  # as one that goes on in the middle of a step
        with sync.writing(), torch.no_grad():
            model.weight.fill_(number)
        assert live.weight.eq(number).all()
        places.add(live.weight.data_ptr())
        sync._strategy._fleet.workers[0].connection.close()  # without a word, as a trainer that is stopped
    assert len(places) == 1, "whatever has noted where the parameters lie"
    for words in ("closed its connection", "taken by another trainer"):
        with pytest.raises(WeightSyncError, match=words), trainers[0].writing():
            raise AssertionError("the body must not run")
    for sync in trainers:
        sync.close()
    engine.close()


def test_worker_that_cannot_take_its_memory_back_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last worker may raise, and this is the first."""

    def fail() -> None:
        raise PlacementError("no room for 64 bytes in /dev/shm")

    hosts = [ModuleHost(Plain, {"weight": torch.ones(4, 4)}, rank=rank, world=2) for rank in (0, 1)]
    engine = RecordedEngine(*hosts)
    first = engine.sessions[0]
    first._mapped_by, take_back = {this_process()}, first.receiver.take_back
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        monkeypatch.setattr(first.receiver, "take_back", fail)
        with pytest.raises(PlacementError, match="no room for 64 bytes"):
            sync.push(trainer_model({"weight": torch.zeros(4, 4)}))
        monkeypatch.setattr(first.receiver, "take_back", take_back)
        sync.push(trainer_model({"weight": torch.zeros(4, 4)}))
    engine.close()


def test_gpu_memory_that_a_live_process_may_write_to_goes_to_nobody_else() -> None:
    session = WorkerSession(ModuleHost(Plain, {"weight": torch.ones(4, 4)}))
    session.receiver.model.device = torch.device("cuda")
    with subprocess.Popen(["sleep", "600"]) as writer:
        session._mapped_by.add(f"{boot_id()}:{writer.pid}:{started_ticks(writer.pid)}")
        with pytest.raises(EngineBusyError, match=rf"end its processes first \({writer.pid}\)"):
            session._check_free("another process", 0.0)
        writer.kill()
    session._check_free("another process", 0.0)


def test_trainer_that_closes_gives_the_memory_back() -> None:
    engine = RecordedEngine(ModuleHost(Plain, {"weight": torch.ones(4, 4)}))
    with torch.device("meta"):
        model = Plain()
    with WeightSync("fsdp", "single_copy", engine, timeout_s=TIMEOUT_S) as sync:
        sync.attach(model)
        assert len(engine.sessions[0]._mapped_by) == 1
    assert not engine.sessions[0]._mapped_by
    engine.sessions[0]._trainer = replace(engine.sessions[0]._trainer, process="another process")
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as other:
        other.push(trainer_model({"weight": torch.zeros(4, 4)}))
    engine.close()


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
