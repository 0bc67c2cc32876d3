"""Engine calls in threads, beside the messages to and from the engines' workers."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from weightsync.errors import WeightSyncError, wrap_exception
from weightsync.net import timeouts
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline, spawn

logger = logging.getLogger(__name__)


class BackgroundCall:
    """A call in a thread of its own. It wakes the listener at its end.

    who: the called engine's name, or "" when the call is not to an engine.
    """

    def __init__(
        self, listener: Listener, name: str, function: Callable[..., None], *args: object, who: str = ""
    ) -> None:
        self.name, self.who = f"{name} of {who}" if who else name, who
        self.error: WeightSyncError | None = None
        self._seen_at = math.inf
        self._listener, self._function, self._args = listener, function, args
        self._over = threading.Event()
        spawn(name, self._run)

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def join(self, timeout_s: float) -> None:
        self._over.wait(timeout_s)

    def ended_s(self) -> float:
        """Return the seconds since this method first found the call ended, or 0.0."""
        if self.is_alive():
            return 0.0
        self._seen_at = min(self._seen_at, time.monotonic())
        return time.monotonic() - self._seen_at

    def _run(self) -> None:
        logger.debug("%s begins", self.name)
        try:
            self._function(*self._args)
        except BaseException as error:
            self.error = wrap_exception(error, who="", phase="")
        logger.debug("%s ended", self.name)
        self._over.set()
        self._listener.wake()


class EngineCalls:
    """The calls of one fleet.

    running: the calls beside the push's messages. `init` and `update` return when the workers are released.
    changes: the calls of this push to change an engine, such as `pause`.
    finishes: of these, `finish` and `reset_caches` of the engines with a queue.
    opening: the call in `running` for the changes up to `update`. None once `wait_open` has waited for it.
    """

    def __init__(self, listener: Listener, failed: EngineCalls | None) -> None:
        """Take the unfinished changes of the `failed` fleet before this one."""
        self.running: list[BackgroundCall] = []
        self.changes: list[BackgroundCall] = []
        self.finishes: list[BackgroundCall] = []
        self.opening: BackgroundCall | None = None
        self._listener = listener
        self._earlier = failed.unfinished() if failed is not None else []

    def run(self, name: str, function: Callable[..., None], *args: object, who: str = "") -> BackgroundCall:
        """Begin a call beside the push's messages."""
        self.running.append(call := BackgroundCall(self._listener, name, function, *args, who=who))
        return call

    def change(self, name: str, function: Callable[..., None], *args: object, who: str) -> BackgroundCall:
        """Begin a call to change an engine."""
        self.changes.append(call := BackgroundCall(self._listener, name, function, *args, who=who))
        return call

    def unfinished(self) -> list[BackgroundCall]:
        """Return unfinished changes of this fleet and of earlier ones. Each may still pause or resume an engine."""
        return [call for call in (*self._earlier, *self.changes) if call.is_alive()]

    def check(self, news_s: float = 0.0) -> None:
        """Raise a running call's error, after `news_s`: a worker's `Failure` with the cause comes first."""
        for call in self.running:
            if call.error is not None and call.ended_s() >= news_s:
                raise call.error

    def await_earlier(self, names: Collection[str], timeout_s: float) -> None:
        """Wait for unfinished calls of failed pushes to the engines of these names."""
        deadline = Deadline(timeout_s)
        while late := [call for call in self._earlier if call.who in names and call.is_alive()]:
            if deadline.passed():
                what = f"{late[0].name} of the failed push did not return"
                raise deadline.expired(what, "init", [call.who or call.name for call in late])
            late[0].join(min(timeouts.CALL_LOOK_S, deadline.left_s()))


def await_calls(calls: Sequence[BackgroundCall], deadline: Deadline, phase: str, look: Callable[[], None]) -> None:
    """Wait for these calls. Raise the first failed call's error, or as `look` does."""
    for call in calls:
        while call.is_alive() and not deadline.passed():
            call.join(min(timeouts.CALL_LOOK_S, deadline.left_s()))
            look()
        if call.is_alive():
            raise deadline.expired(f"{call.name} did not return", phase, [call.who or call.name])
        if call.error is not None:
            call.error.phase = call.error.phase or phase
            raise call.error


def join(calls: Sequence[BackgroundCall], silent: Collection[str], deadline: Deadline) -> set[str]:
    """Wait for calls, except to `silent` engines. Return the names of the engines with unfinished calls."""
    for call in calls:
        if call.who not in silent:
            call.join(deadline.left_s())
    return {call.who for call in calls if call.is_alive()}


_owed: weakref.WeakSet[BackgroundCall] = weakref.WeakSet()
os.register_at_fork(after_in_child=_owed.clear)  # a child process does not have the threads of these calls


def wait_at_exit(calls: Sequence[BackgroundCall]) -> None:
    """Wait for these calls when this process exits. Without the wait they would end, and engines would stay paused."""
    _owed.update(calls)
    atexit.unregister(_wait_for_owed)
    atexit.register(_wait_for_owed)  # registered anew, it runs before the exit handlers of later imports, such as Ray


def _wait_for_owed() -> None:
    if late := join([*_owed], (), Deadline(timeouts.EXIT_S)) - {""}:
        logger.warning("%s may stay paused until a push succeeds: its call did not end", ", ".join(sorted(late)))


def repeat(method: weakref.WeakMethod[Callable[[], None]], every_s: float, ended: threading.Event) -> None:
    """Call an object's method every `every_s`, until `ended` is set or the object is collected."""
    while not ended.wait(every_s) and (call := method()) is not None:
        call()
        del call  # or this thread's reference would keep the object alive
