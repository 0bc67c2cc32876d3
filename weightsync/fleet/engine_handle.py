"""One engine of a fleet, on rank 0: its workers, and its changes by a push."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

from weightsync.engines import Engine
from weightsync.engines.base import AwaitAnswer, QueueingEngine, reports_paused
from weightsync.errors import EngineError, EngineUnreachableError, FencedError, WeightSyncError
from weightsync.fleet.engine_call import BackgroundCall
from weightsync.net import timeouts
from weightsync.net.connection import Connection, timed_out
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline, submit
from weightsync.net.wire import POISONED, Go, Hello, MachineInfo, Release

CALLER = "caller"
"""The pause mode when the caller itself pauses and resumes engines."""
_STEPS = "pause", "mark", "start"
"""The steps of a push before `Go`. A rollback takes the last one back first: vLLM must not generate in an update."""
_MARK = f"{POISONED}: a push is under way, or its trainer has died"
_DEAD = 2
"""Failed health checks in a row of a dead engine. A busy server may fail one."""


@dataclass(frozen=True)
class ConnectedWorker:
    """One connected engine worker."""

    hello: Hello
    connection: Connection

    @property
    def machine(self) -> MachineInfo:
        hello, connection = self.hello, self.connection
        return MachineInfo(connection.peer, hello.device, hello.gpu_uuid, hello.boot_id, connection.dialled)


class UpdateState(Enum):
    """The state of an engine in a push, and its undo log. A failed push runs the log and leads to FAILED.

        state       the engine                            the undo log               after a failure
        CLOSED      is as the last push left it           empty                      as it was
        OPEN        pauses, starts an update, is marked   finish, version, resume    as it was, generating
        DIRTY       has `Go`: its weights are a mixture   finish                     paused, `POISONED`
        FINISHING   has committed, gets the new version   finish, until it is asked  paused, `POISONED`
        COMMITTED   resumes                               empty                      serves the new version
        FAILED      is rolled back                        calls that end late        as in the state that failed

    `open` leads from CLOSED to OPEN, and `go` to DIRTY. The `Committed` of all workers leads to FINISHING, the new
    version of all engines to COMMITTED, and `resume` to CLOSED. `cancel` runs the log and leads from OPEN to CLOSED.

    An engine with a `queue` is sent `finish` right after `Go`, to be served after the update. Its log is then empty.

    An engine `POISONED` before the push logs `finish` alone. It stays paused and `POISONED` until a push succeeds.
    """

    CLOSED = auto()
    OPEN = auto()
    DIRTY = auto()
    FINISHING = auto()
    COMMITTED = auto()
    FAILED = auto()


@dataclass(eq=False)
class EngineHandle:
    """One engine, and the calls that change it. Each call raises `WeightSyncError`s.

    number: the engine's number, unique in the life of the fleet.
    served: the last version pushed into it by this trainer, or None.
    version: the version reported between two pushes, read before the first one. None: vLLM before 0.27 reports none.
    is_poisoned: the weights are the mixture of an earlier push.
    paused_at: the time of the engine's answer that it is paused. Before the answer it may have generated.
    failed_checks: the failed health checks in a row.
    """

    engine: Engine
    number: int = 0
    workers: list[ConnectedWorker] = field(default_factory=list)
    served: int | None = None
    version: str | None = None
    is_poisoned: bool = False
    state: UpdateState = UpdateState.CLOSED
    paused_at: float = 0.0
    failed_checks: int = 0
    _undo: dict[str, Callable[[], None]] = field(init=False, default_factory=dict)
    """The call to take back each of the `_STEPS`."""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Held by a rollback. The rollback of a late call waits for the fleet's."""

    def meet(self, admitted: Sequence[tuple[Hello, Connection]]) -> None:
        """Take the engine's workers. Their `Hello`s tell the state in which the last trainer left the engine."""
        self.workers = [ConnectedWorker(hello, connection) for hello, connection in admitted]
        self.is_poisoned = any(hello.state == POISONED for hello, _ in admitted)

    def is_held(self) -> bool:
        """Return whether this trainer still holds the engine: the connections of all workers are open."""
        return all(worker.connection.is_open() for worker in self.workers)

    @property
    def newest_version(self) -> int:
        """The newest version served by the engine."""
        return max(self.served or 0, *(worker.hello.version for worker in self.workers))

    @property
    def names(self) -> set[str]:
        """The engine's names in errors: its own, and its workers'."""
        return {self.engine.name, *(worker.connection.peer for worker in self.workers)}

    @property
    def is_dirty(self) -> bool:
        """Whether the weights are the mixture of this push."""
        return self.state in (UpdateState.DIRTY, UpdateState.FINISHING)

    @property
    def has_failed(self) -> bool:
        """Whether the push has failed. The fleet does not wait for each call before its rollback."""
        return self.state is UpdateState.FAILED

    def ask_whether_alive(self) -> None:
        self.failed_checks = self.failed_checks + 1 if self.engine.is_alive() is False else 0

    def ask_workers(self) -> None:
        """Send workers a `Ping` during a push. The engine's health check does not notice a stopped worker."""
        for worker in self.workers:
            worker.connection.ask(lambda: self.state is UpdateState.DIRTY)

    def find_silent(self, timeout_s: float) -> list[str]:
        """Return the names of workers that owe a `Pong` for `timeout_s`, although the engine may be healthy."""
        owing = [worker.connection for worker in self.workers if self.state is UpdateState.DIRTY]
        return [connection.peer for connection in owing if connection.ping_unanswered_s > timeout_s]

    def check_health(self, timeout_s: float) -> None:
        """Raise when the engine fails its health checks, or a worker has owed a `Pong` for `timeout_s`."""
        if silent := self.find_silent(timeout_s):
            raise timed_out(silent, "load", Deadline(timeout_s))
        if self.failed_checks >= _DEAD:
            raise EngineUnreachableError("the engine died in a push; look into its log", who=self.engine.name)

    def call(self, method: Callable[[EngineHandle], None]) -> None:
        """Call a method with this handle. Raise `FencedError` instead if another trainer has taken the engine over."""
        self.check_fence()
        method(self)

    def check_fence(self) -> None:
        """Raise `FencedError` when another trainer has taken the engine over."""
        for worker in self.workers:
            fenced = None if worker.connection.is_open() else worker.connection.reported()
            if isinstance(fenced, FencedError):
                raise fenced

    def finish_left_open(self) -> None:
        """Finish the update of another trainer, after the trainer's death between `start` and `finish`."""
        if any(worker.hello.update_open for worker in self.workers):
            self.engine.finish(None)

    def read_version(self) -> None:
        """Read the version. Called before the first push: its mark replaces the version."""
        self.version = self.engine.version()
        self.is_poisoned |= (self.version or "").startswith(POISONED)

    def pause(self, mode: str) -> None:
        """Pause the engine, or check that the caller has paused it. Not every engine reports whether it generates."""
        if mode != CALLER:
            self._change("pause", lambda: self.engine.pause(mode), lambda: self.engine.resume())
        elif reports_paused(self.engine) is False:
            raise EngineError(
                f'pause="{CALLER}", but the engine generates. Pause it before each push, and resume it afterwards',
                who=self.engine.name,
            )
        self.paused_at = time.perf_counter()

    def start(self) -> None:
        """Open the update. A failed `start` must not be followed by `finish`, so the undo is logged last."""
        if self.has_failed:
            return
        self.engine.start()
        self._undo["start"] = self._abort_update
        if self.has_failed:
            self.call(EngineHandle.roll_back)

    def mark(self) -> None:
        """Mark the engine POISONED before anything is written: after that the trainer may die at any time."""
        if (version := self.version) is not None:
            self._change("mark", lambda: self.engine.set_version(_MARK), lambda: self.engine.set_version(version))

    @cached_property
    def queue(self) -> QueueingEngine | None:
        """The engine, if calls can be sent to it before it has answered earlier ones."""
        engine = self.engine
        return engine if isinstance(engine, QueueingEngine) and engine.takes_calls_ahead() else None

    def send_update(self, update_info: dict[str, Any]) -> list[AwaitAnswer]:
        """Send the calls of `mark`, `start` and the update to the engine's queue. Return before any answer."""
        engine, version = self.queue, self.version
        assert engine is not None
        if version is not None and not self.is_poisoned:
            self._undo["mark"] = lambda: engine.set_version(version)
        waits = engine.send_update(None if version is None else _MARK, update_info)
        self._undo["start"] = self._abort_update
        self.paused_at = time.perf_counter()
        if self.has_failed:
            self.call(EngineHandle.roll_back)
        return waits

    def send_finish(self) -> None:
        """Send the calls behind the update to the engine's queue, and wait until they have returned."""
        waits: list[AwaitAnswer] = []
        with self._lock:
            if self.queue is not None and self._undo.pop("start", None) is not None:
                waits = self.queue.send_finish()
        for wait_for_answer in waits:
            wait_for_answer()

    def go(self, message: Go, deadline: Deadline) -> None:
        """Send the workers `Go`: run their part of the plan."""
        self.state = UpdateState.DIRTY  # before sending: a failure between two workers leaves some with `Go`
        self._undo = {"start": self._abort_update}
        for worker in self.workers:
            worker.connection.send(message, deadline, "transfer")

    def finish(self, version: int, label: str) -> None:
        """Finish the update, unless `send_finish` has. The engine then serves `version` and reports `label`."""
        self._undo.clear()  # before the call: even after a failure vLLM must not be asked twice
        if self.queue is None:
            self.engine.finish(label)
        elif self.version is not None:
            self.engine.set_version(label)
        self.version, self.served = label if self.version is not None else None, version
        self.is_poisoned = False

    def roll_back(self) -> None:
        """Run the undo log. Each call is made once, even after the failure of another."""
        with self._lock, ExitStack() as calls:
            for step in _STEPS:
                if (undo := self._undo.pop(step, None)) is not None:
                    calls.callback(undo)  # run at the exit, from the last one to the first

    def _change(self, step: str, change: Callable[[], None], undo: Callable[[], None]) -> None:
        """Change the engine. Log the undo first, since a failed change may have an effect."""
        if self.has_failed:
            return
        logged = {} if self.is_poisoned else {step: undo}
        self._undo.update(logged)
        try:
            change()
        finally:
            if self.has_failed:  # the fleet's rollback did not wait for this change
                self._undo.update(logged)
                self.call(EngineHandle.roll_back)

    def _abort_update(self) -> None:
        self.engine.finish(None)


def admit(
    one: EngineHandle,
    calls: Mapping[EngineHandle, BackgroundCall],
    early: list[EngineHandle],
    listener: Listener,
    check: Callable[[], None],
    deadline: Deadline,
) -> None:
    """Wait for the workers of engine `one`, and give them to its handle. `calls` are the engines' `init` calls.

    An engine serves one call at a time. An engine listed under two names serves one `init`, and the other one waits.
    So when workers are late, this meets the workers of all engines that have connected, releases them, and puts their
    engines into `early`. A worker that then gets the second `init` of its session reports the error.

    Raises as `check` does, and `EngineError` when the `init` has returned and no worker connects.
    """
    doubt = Deadline(min(timeouts.DOUBT_S, deadline.timeout_s / 4))

    def look() -> None:
        check()
        call = calls[one]
        if call.ended_s() > timeouts.WORKER_ARRIVAL_S or (deadline.passed() and not call.is_alive()):
            raise EngineError(
                f"{call.name} returned, but no worker connected. Start the engine with "
                f'weight_transfer_config={{"backend": "weightsync"}}, and look into its log',
                phase="init",
            )
        if doubt.passed() and not early:
            for other in calls:
                if not other.workers and listener.have_arrived("worker", other.number):
                    other.meet(listener.admit("worker", other.number, deadline, "init", check))
            early.extend(other for other in calls if other.workers)
            for worker in (worker for other in early for worker in other.workers):
                worker.connection.send(Release(), deadline, "init")

    one.meet(listener.admit("worker", one.number, deadline, "init", look))


def find_lost(handles: Sequence[EngineHandle], error: WeightSyncError) -> list[str]:
    """Return the names of dead or silent engines, among the possible causes of `error`. Add them to its text."""
    waiting_for = getattr(error, "waiting_for", [])
    named = {error.who, *waiting_for}
    suspects = [one for one in handles if not one.is_held() or not named.isdisjoint(one.names)]
    if not suspects and waiting_for and not any(name.startswith("trainer rank") for name in waiting_for):
        suspects = list(handles)  # the error may be of a rank, with the workers' numbers in place of their names
    asked = {one: submit("health", one.engine.is_alive) for one in suspects if one.failed_checks < _DEAD}
    answered, _ = wait(asked.values(), timeouts.ENGINE_ANSWER_S)
    alive = {one for one, answer in asked.items() if answer in answered and not answer.exception() and answer.result()}
    lost = [one.engine.name for one in suspects if one not in alive or one.find_silent(timeouts.ENGINE_ANSWER_S)]
    if lost and not any(name in str(error) for name in lost):
        error.message += f"; {', '.join(lost)} does not answer"
    return lost
