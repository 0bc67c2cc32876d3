"""Work that is done to its end though a signal interrupts the thread that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from weightsync.net.runtime import submit

T = TypeVar("T")

_TRIES = 3


class Ending(Generic[T]):
    """What must be done when a step has failed, once.

    Python raises `KeyboardInterrupt`, and what other signals raise, in the main thread. So the work runs in another
    one there, and the main thread waits, however often it is interrupted.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._outcome = work, Future[T]()
        self._working = threading.Lock()

    def result(self) -> T:
        """Return what the work returns, or raise what it raises, or what has interrupted the wait.

        It may be called again, and does the work if it is not done. Safe from any thread.
        """
        if threading.current_thread() is not threading.main_thread():
            self._do()
        interrupt: BaseException | None = None
        while not self._outcome.done():
            try:
                submit("ending", self._do).exception()
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
