"""A progress bar for pushes that last longer than a moment."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_AFTER_S = 1.0


class Progress:
    """Shows itself once a push has lasted a second; never, when standard error is not a terminal (`show=None`) or
    when told so (`show=False`)."""

    def __init__(self, show: bool | None, title: str, total_bytes: int, here: bool) -> None:
        self._wanted = here and (sys.stderr.isatty() if show is None else show)
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._started = time.monotonic()
        self._bar: object | None = None

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if not self._wanted or time.monotonic() - self._started < _AFTER_S:
            return
        from rich.progress import Progress as RichProgress

        if self._bar is None:
            self._bar = RichProgress(transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        assert isinstance(self._bar, RichProgress)
        self._bar.update(self._task, completed=self._done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
