"""One call at a time, for what cannot do two things at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightsync.deadline import Deadline
from weightsync.engines.calls import POLL_S, RESET, limit_s
from weightsync.errors import EngineUnreachableError, SyncTimeoutError


class Turns:
    """For what cannot do two things at once: each call takes its turn, and gives it when it has ended, which may be
    long after its caller has ceased to wait."""

    def __init__(self, who: str, timeout_s: float) -> None:
        self._who, self._timeout_s = who, timeout_s
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._doing = ""
        self._calls = 0  # that have a part in the turn

    def take(self, doing: str, died: Callable[[], bool]) -> None:
        deadline = Deadline(limit_s(doing, self._timeout_s) if doing == RESET else self._timeout_s)
        while not self._lock.acquire(timeout=min(POLL_S, deadline.left_s())):
            if died():
                raise EngineUnreachableError(f"the engine died before {doing}; its log says why", who=self._who)
            if deadline.passed():
                raise SyncTimeoutError(
                    f"{doing} could not start within {deadline.timeout_s:g} s: {self._doing} is still running",
                    who=self._who,
                    waiting_for=[self._who],
                )
        with self._counting:
            self._doing, self._calls = doing, 1

    def join(self, doing: str) -> bool:
        """Have a part in the turn of a call that is `doing` this, if it is under way: whether it was."""
        with self._counting:
            joined = self._calls > 0 and self._doing == doing
            self._calls += joined
        return joined

    def give(self) -> None:
        """The last call that has a part in the turn ends it."""
        with self._counting:
            self._calls -= 1
            if self._calls == 0:
                self._lock.release()
