"""The trainer's hold on its engines, when another trainer asks for them."""

from __future__ import annotations

import time

_STALLED = 2
"""A push is stuck after this many timeouts without progress. Each of rank 0's waits ends after one."""


class Hold:
    """The time of rank 0's last progress. The main thread sets it, and the thread that answers `Ping` reads it.

    A `Pong` shows only a running process: its main thread may be in a deadlock. So `Pong.holds` tells whether the
    trainer keeps its engines. It does while its push makes progress, and between two pushes.

    idle_s: longest hold between two pushes. None: until the trainer closes its `WeightSync`, or ends.
    """

    def __init__(self, timeout_s: float, idle_s: float | None = None) -> None:
        self._stalled_s, self._idle_s = _STALLED * timeout_s, idle_s
        self._is_pushing = False
        self._moved_at = time.monotonic()

    def begin(self) -> None:
        """Record the start of a push."""
        self._moved_at, self._is_pushing = time.monotonic(), True

    def move(self) -> None:
        """Record progress of the main thread."""
        self._moved_at = time.monotonic()

    def end(self) -> None:
        """Record the end of a push, successful or not."""
        self._moved_at, self._is_pushing = time.monotonic(), False

    def lasts(self) -> bool:
        """Return whether the trainer keeps its engines. From any thread."""
        limit_s = self._stalled_s if self._is_pushing else self._idle_s
        return limit_s is None or time.monotonic() - self._moved_at <= limit_s
