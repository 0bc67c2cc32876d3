"""How long a trainer keeps the engines that it is connected to, where another trainer asks for them."""

from __future__ import annotations

import time

_STALLED = 2
"""A push that has not moved for this many timeouts is stuck. None of rank 0's waits lasts longer than one."""


class Hold:
    """The clock of trainer rank 0's main thread, which another thread reads to answer for it.

    A process that answers is not yet one that works: its main thread may be in a deadlock. So an answer says whether
    the trainer keeps its engines. It does while a push moves, and between two pushes.

    idle_s: for how long between two pushes. None: until the trainer closes its `WeightSync`, or ends.
    """

    def __init__(self, timeout_s: float, idle_s: float | None = None) -> None:
        self._stalled_s, self._idle_s = _STALLED * timeout_s, idle_s
        self._is_pushing = False
        self._moved_at = time.monotonic()

    def begin(self) -> None:
        """Note that the main thread begins a push."""
        self._moved_at, self._is_pushing = time.monotonic(), True

    def move(self) -> None:
        """Note that the main thread runs."""
        self._moved_at = time.monotonic()

    def end(self) -> None:
        """Note that the push has ended, in whichever way."""
        self._moved_at, self._is_pushing = time.monotonic(), False

    def lasts(self) -> bool:
        """Return whether the trainer keeps its engines. From any thread."""
        limit_s = self._stalled_s if self._is_pushing else self._idle_s
        return limit_s is None or time.monotonic() - self._moved_at <= limit_s
