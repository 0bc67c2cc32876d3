"""Work that a signal to the main thread cannot interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from weightsync.net.runtime import submit

T = TypeVar("T")

_TRIES = 3


class UninterruptedWork(Generic[T]):
    """Work to do once: to end a failed step, or to disconnect.

    Python runs signal handlers, such as the one raising `KeyboardInterrupt`, in the main thread. So the main thread has
    another thread do the work. It waits for the end, however often it is interrupted.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._outcome = work, Future[T]()
        self._working = threading.Lock()

    def result(self) -> T:
        """Do the work unless it is done, and return its result. Safe from any thread, any number of times.

        Raises the work's exception. An exception that interrupted the wait is raised in its place.
        """
        if threading.current_thread() is not threading.main_thread():
            self._do()
        interrupt: BaseException | None = None
        while not self._outcome.done():
            try:
                try:
                    working = submit("cleanup", self._do)
                except RuntimeError:  # no thread starts, as when Python ends
                    self._do()
                else:
                    working.exception()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return self._outcome.result()

    def _do(self) -> None:
        with self._working:
            for tried in range(_TRIES if not self._outcome.done() else 0):
                try:
                    self._outcome.set_result(self._work())
                    return
                except BaseException as error:
                    if isinstance(error, Exception) or tried + 1 == _TRIES:
                        self._outcome.set_exception(error)
                        return
