"""How long a wait may last. Every wait has one of these."""

from __future__ import annotations

import time


class Deadline:
    """A moment in the future. `Deadline(30.0)` is 30 seconds from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end
