"""Calls that run beside the conversation with the engines' workers."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from weightsync.errors import EngineError, WeightSyncError, wrap_exception
from weightsync.net import timeouts
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline, spawn

logger = logging.getLogger(__name__)


class BackgroundCall:
    """A call that runs in a thread beside the conversation with the engine's workers, and wakes the hub at its end.

    who: the engine that is called, where it is one.
    """

    def __init__(
        self, listener: Listener, name: str, function: Callable[..., None], *args: object, who: str = ""
    ) -> None:
        self.name, self.who = f"{name} of {who}" if who else name, who
        self.error: WeightSyncError | None = None
        self._failure_seen_at = math.inf
        self._listener, self._function, self._args = listener, function, args
        self._over = threading.Event()
        spawn(name, self._run)

    def is_alive(self) -> bool:
        return not self._over.is_set()

    def join(self, timeout_s: float) -> None:
        self._over.wait(timeout_s)

    def since_failure_s(self) -> float:
        """Return the seconds since this was first asked after the call had failed."""
        self._failure_seen_at = min(self._failure_seen_at, time.monotonic())
        return time.monotonic() - self._failure_seen_at

    def _run(self) -> None:
        try:
            self._function(*self._args)
        except BaseException as error:
            self.error = wrap_exception(error, who="", phase="")
        self._over.set()
        self._listener.wake()


def join(calls: Sequence[BackgroundCall], silent: Collection[str], deadline: Deadline) -> set[str]:
    """Wait for the calls of engines that are not `silent`. Return the engines whose calls have not ended."""
    for call in calls:
        if call.who not in silent:
            call.join(deadline.left_s())
    return {call.who for call in calls if call.is_alive()}


_owed: weakref.WeakSet[BackgroundCall] = weakref.WeakSet()
os.register_at_fork(after_in_child=_owed.clear)  # a child process has not the threads of these calls


def wait_at_exit(calls: Sequence[BackgroundCall]) -> None:
    """Wait for these calls when this process exits. They would end with it, and leave engines paused."""
    _owed.update(calls)
    atexit.unregister(_wait_for_owed)
    atexit.register(_wait_for_owed)  # last, and so before what has been imported since ends, such as Ray


def _wait_for_owed() -> None:
    if late := join([*_owed], (), Deadline(timeouts.EXIT_S)) - {""}:
        logger.warning("%s may stay paused until a push succeeds: a call has not ended", ", ".join(sorted(late)))


def make_arrival_check(
    calls: Sequence[BackgroundCall], listener: Listener, check: Callable[[], None], deadline: Deadline
) -> Callable[[], None]:
    """Return what a wait for workers that `calls` call in looks at: `check`, and whether they still may come."""
    returned: dict[BackgroundCall, float] = {}

    def look() -> None:
        check()
        for call in calls:
            if not call.is_alive():
                since = returned.setdefault(call, time.monotonic())
                if time.monotonic() - since > timeouts.WORKER_ARRIVAL_S or deadline.passed():
                    raise EngineError(
                        f"{call.name} returned, but no worker connected: the engine's weight transfer backend is not "
                        'weightsync. Start it with weight_transfer_config={"backend": "weightsync"}, and see its log. '
                        f"{listener.refused}",
                        phase="init",
                    )

    return look


def repeat(method: weakref.WeakMethod[Callable[[], None]], every_s: float, ended: threading.Event) -> None:
    """Call a method of an object every so often, until `ended` is set or the object is gone."""
    while not ended.wait(every_s) and (call := method()) is not None:
        call()
        del call  # this thread must not keep the object
