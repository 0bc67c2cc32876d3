"""Threads that are kept for the next who needs one: in a process that holds an engine it takes longer to start a thread
than the engine takes for most of what it is asked."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

_KEPT_S = 10.0

_idle: list[_Kept] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has the list, and none of the threads


class _Kept(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="weightsync idle", daemon=True)
        self.work: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                name, function = self.work.get(timeout=_KEPT_S)
            except queue.Empty:
                try:
                    _idle.remove(self)
                except ValueError:  # it has been taken just now
                    name, function = self.work.get()
                else:
                    return
            self.name = f"weightsync {name}"
            function()
            del function  # whatever it holds is not to be kept
            self.name = "weightsync idle"
            _idle.append(self)


def in_thread(name: str, function: Callable[[], None]) -> None:
    """Run `function`, which must not raise, in a daemon thread, for which the interpreter does not wait at its end.
    The thread has this name meanwhile. Raises `RuntimeError` when no thread can be started."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Kept()
        thread.start()
    thread.work.put((name, function))
