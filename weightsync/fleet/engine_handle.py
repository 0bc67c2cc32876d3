"""One engine of a fleet, on rank 0: its workers, and its changes by a push."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field

from weightsync.engines import Engine
from weightsync.errors import EngineError, EngineUnreachableError, FencedError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.connection import Connection, timed_out
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline, submit
from weightsync.net.wire import POISONED, Go, Hello, MachineInfo, Release

CALLER = "caller"
"""The pause mode when the caller itself pauses and resumes engines."""
_SILENT = 2
"""Failed health checks in a row of a dead engine. A busy server may fail one."""


@dataclass(frozen=True)
class Worker:
    """One connected engine worker."""

    hello: Hello
    connection: Connection

    @property
    def machine(self) -> MachineInfo:
        return MachineInfo(self.connection.peer, self.hello.device, self.hello.gpu_uuid, self.hello.boot_id)


@dataclass(eq=False)
class EngineHandle:
    """One engine, and the calls that change it. Each call raises `WeightSyncError`s.

    number: the engine's number, unique in the life of the fleet.
    served: the version that this trainer has pushed into it, or None.
    is_left_open: another trainer has started an update and not finished it.
    is_poisoned: the weights are a mixture.
    version: the version reported between two pushes, once `was_asked` is set. None: vLLM before 0.27 reports none.
    is_dirty: its workers may have had `Go`, and the push is not complete.
    is_over: the push has failed. A call that ends later rolls its change back.
    is_whole: after a failed push, the weights are those of one version.
    runs: its workers run the plan, or wait for `Commit`.
    """

    engine: Engine
    number: int = 0
    workers: list[Worker] = field(default_factory=list)
    served: int | None = None
    is_left_open: bool = False
    is_poisoned: bool = False
    version: str | None = None
    was_asked: bool = False
    is_started: bool = False
    is_paused: bool = False
    paused_at: float = 0.0
    """Time of the engine's answer that it is paused. Before the answer it may have generated."""
    is_marked: bool = False
    is_dirty: bool = False
    is_over: bool = False
    is_whole: bool = True
    runs: bool = False
    silent: int = 0
    """Failed health checks in a row."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, admitted: Sequence[tuple[Hello, Connection]]) -> None:
        """Take the engine's workers. Their `Hello`s tell the state in which the last trainer left the engine."""
        self.workers = [Worker(hello, connection) for hello, connection in admitted]
        # The last trainer may have died between start and finish, or with the weights half loaded.
        self.is_left_open = any(hello.update_open for hello, _ in admitted)
        self.is_poisoned = any(hello.state == POISONED for hello, _ in admitted)

    def hang_up(self) -> None:
        """Release the workers and close their connections. Never raises."""
        for worker in self.workers:
            with suppress(WeightSyncError):  # the worker is gone
                worker.connection.send(Release(), Deadline(timeouts.ENGINE_FAREWELL_S), "close")
            worker.connection.close()

    def is_held(self) -> bool:
        """Return whether this trainer still holds the engine: the connections of all workers are open."""
        return all(worker.connection.is_open() for worker in self.workers)

    @property
    def newest_version(self) -> int:
        """The newest version that the engine has served."""
        return max(self.served or 0, *(worker.hello.version for worker in self.workers))

    @property
    def names(self) -> set[str]:
        """The engine's names in errors: its own, and its workers'."""
        return {self.engine.name, *(worker.connection.peer for worker in self.workers)}

    def ask_whether_alive(self) -> None:
        self.silent = self.silent + 1 if self.engine.is_alive() is False else 0

    def ask_workers(self) -> None:
        """Send workers a `Ping` during a push. The engine's health check does not notice a stopped worker."""
        for worker in self.workers:
            worker.connection.ask(lambda: self.runs)

    def is_stuck(self) -> bool:
        """Return whether a worker owes a `Pong`, although the engine may pass its health check."""
        return self.runs and any(
            worker.connection.seconds_since_read > timeouts.ENGINE_ANSWER_S for worker in self.workers
        )

    def check_health(self, timeout_s: float) -> None:
        """Raise when the engine fails its health checks, or a worker has owed a `Pong` for `timeout_s`."""
        silent = [worker.connection.peer for worker in self.workers if worker.connection.seconds_since_read > timeout_s]
        if silent and self.runs:
            raise timed_out(silent, "load", Deadline(timeout_s))
        if self.silent >= _SILENT:
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
        """Finish the update that another trainer has left open."""
        self.engine.finish(None)
        self.is_left_open = False

    def read_version(self) -> None:
        """Ask for the version. Called before the first push: its mark replaces the version."""
        self.version, self.was_asked = self.engine.version(), True

    def pause(self, mode: str) -> None:
        if self.is_over:
            return
        if mode == CALLER:
            self._check_paused()
            return
        self.is_paused = True
        try:
            self.engine.pause(mode)
            self.paused_at = time.perf_counter()
        finally:
            if self.is_over:  # the fleet did not wait for this call, and its `resume` came before this pause
                self.is_paused = True
                self.call(EngineHandle.roll_back)

    def _check_paused(self) -> None:
        """Raise `EngineError` when the engine reports that it generates. Not every engine reports it."""
        is_paused = getattr(self.engine, "is_paused", lambda: None)()
        if is_paused is False:
            raise EngineError(
                f'pause="{CALLER}", but the engine generates. Pause it before each push, and resume it afterwards',
                who=self.engine.name,
            )
        self.paused_at = time.perf_counter()

    def start(self) -> None:
        if self.is_over:
            return
        self.engine.start()
        self.is_started = True
        if self.is_over:
            self.call(EngineHandle.roll_back)

    def mark(self) -> None:
        """Mark the engine POISONED before anything is written: after that the trainer may die at any time."""
        if self.version is None or self.is_over:
            return
        self.is_marked = True
        self.engine.set_version(f"{POISONED}: a push is under way, or its trainer has died")
        if self.is_over:
            self.is_marked = True
            self.call(EngineHandle.roll_back)

    def go(self, message: Go, deadline: Deadline) -> None:
        """Send the workers `Go`: run their part of the plan."""
        self.is_dirty = True  # before sending: a failure between two workers leaves some with `Go`
        for worker in self.workers:
            worker.connection.send(message, deadline, "transfer")
        self.runs = True

    def finish(self, version: int, label: str) -> None:
        """Finish the update. The engine then serves `version` and reports `label`."""
        self._finish(label)
        self.version, self.is_marked = label if self.version is not None else None, False
        self.is_poisoned, self.served = False, version

    def abort_update(self) -> None:
        """Finish an update in which nothing was written. The engine then reports its version as before."""
        self._finish(None)
        self._unmark()

    def resume(self) -> None:
        self.is_dirty = False
        if self.is_paused:
            self.is_paused = False
            self.engine.resume()

    def mark_failed(self) -> None:
        """Record the failure of the push."""
        # An earlier failed push may have left other weights: the engine's version then begins with POISONED.
        marked = (self.version or "").startswith(POISONED)
        self.is_whole = not (self.is_dirty or self.is_poisoned or marked)
        self.is_over, self.runs = True, False

    def roll_back(self) -> None:
        """Finish the update after a failure. If the weights are whole, restore the version and resume generation."""
        with self.lock:
            try:
                if self.is_started:  # `finish` is vLLM's only way out of an update
                    self._finish(None)
                if self.is_whole:
                    self._unmark()
            finally:
                if self.is_paused and self.is_whole:
                    self.resume()

    def _finish(self, version: str | None) -> None:
        self.is_started = False  # before the call: even after a failure vLLM must not be asked twice
        self.engine.finish(version)

    def _unmark(self) -> None:
        if self.is_marked and self.version is not None:
            self.is_marked = False
            self.engine.set_version(self.version)


def admit(
    one: EngineHandle,
    called: Collection[EngineHandle],
    early: list[EngineHandle],
    listener: Listener,
    check: Callable[[], None],
    deadline: Deadline,
) -> None:
    """Wait for the workers of engine `one`, and give them to its handle. Raises as `check` does.

    An engine serves one call at a time. An engine listed under two names serves its first `init`, and the second one
    waits. So when workers are late, this releases the engines in `called` that have met their workers, and puts them
    into `early`. A worker that then gets the second `init` of its session reports the error.
    """
    doubt = Deadline(min(timeouts.DOUBT_S, deadline.timeout_s / 4))

    def look() -> None:
        check()
        if doubt.passed() and not early:
            early.extend(other for other in called if other.workers)
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
    asked = {one: submit("health", one.engine.is_alive) for one in suspects if one.silent < _SILENT}
    answered, _ = wait(asked.values(), timeouts.ENGINE_ANSWER_S)
    alive = {one for one, answer in asked.items() if answer in answered and not answer.exception() and answer.result()}
    lost = [one.engine.name for one in suspects if one not in alive or one.is_stuck()]
    if lost and not any(name in str(error) for name in lost):
        error.message += f"; {', '.join(lost)} does not answer"
    return lost
