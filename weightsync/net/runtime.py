"""Deadlines, threads, and the identity of hosts, devices and processes."""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from weightsync.errors import ConfigError, SyncTimeoutError
from weightsync.net import timeouts

if TYPE_CHECKING:  # the command imports this module and starts without torch
    import torch

T = TypeVar("T")


class Deadline:
    """A moment in the future. Every wait has a deadline.

    Args:
        timeout_s: The seconds from now to the deadline.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left, 0 at least."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self._end

    def expired(self, what: str, phase: str, waiting_for: list[str], why: str = "") -> SyncTimeoutError:
        """Return the error of a wait past this deadline: `what` did not happen in time, perhaps because of `why`."""
        text = f"{what} within {self.timeout_s:g} s" + (f": {why}" if why else "")
        return SyncTimeoutError(text, phase=phase, waiting_for=waiting_for)


def boot_id() -> str:
    """Return the id of this boot of this host. Two processes with equal ids can share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def describe_device(device: torch.device) -> tuple[str, str]:
    """Return ("cuda", UUID of the GPU) or ("cpu", ""). The UUID does not depend on CUDA_VISIBLE_DEVICES.

    Raises `ConfigError` for a GPU that torch did not count.
    """
    if device.type == "cuda":
        import torch

        try:
            return "cuda", str(torch.cuda.get_device_properties(device).uuid)
        except AssertionError as error:
            raise ConfigError(
                f"torch has counted {torch.cuda.device_count()} GPUs in this process, and {device} is none of them. "
                "Set CUDA_VISIBLE_DEVICES for the whole process, not for a part of it such as LLM(...)"
            ) from error
    return "cpu", ""


def started_ticks(pid: int) -> int | None:
    """Return the start time of a process of this host in clock ticks since boot. None: it does not run.

    Two processes with the same pid, one after the other, have different start times.
    """
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # the kernel cuts a process's name inside letters
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    return None


def this_process() -> str:
    """Return this process's unique name: "boot id:pid:clock ticks of its start"."""
    return f"{boot_id()}:{os.getpid()}:{started_ticks(os.getpid())}"


def is_running(process: str) -> bool:
    """Return whether a process runs on this host. Its name is that of `this_process`."""
    boot, pid, ticks = process.split(":")
    return boot == boot_id() and str(started_ticks(int(pid))) == ticks


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector, for work that makes many lasting objects. Also a decorator.

    Each of its passes would visit all of them, and all objects of the process.
    """
    with ExitStack() as stack:
        if gc.isenabled():
            # No line of ours runs at the end: an interrupt there would leave the collector off.
            stack.callback(gc.enable)
            gc.disable()
        yield


def spawn(name: str, function: Callable[[], None]) -> None:
    """Run `function`, which must not raise, in a daemon thread of this name.

    Threads are kept for later functions: starting a thread beside an in-process engine takes longer than most engine
    calls. The interpreter does not wait for these threads when it exits. Raises `RuntimeError` when no thread starts.
    """
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Kept()
        thread.start()
    thread.work.put((name, function))


def submit(name: str, function: Callable[[], T]) -> Future[T]:
    """Run `function` as `spawn` does, and return a future of its result or exception.

    When the interpreter is finalizing, no other thread runs, and `function` runs in this one.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    run() if sys.is_finalizing() else spawn(name, run)
    return outcome


def close_in_thread(close: Callable[..., None], *args: object) -> None:
    """Call `close` in another thread, for a `__del__`, and wait a few seconds. Drop its exceptions.

    The collector runs a `__del__` in any thread. This thread may hold a lock that `close` takes: it then ends later.
    """
    with suppress(RuntimeError):  # no thread starts
        wait([submit("close", lambda: close(*args))], timeouts.CLOSING_S)


class _Kept(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="weightsync idle", daemon=True)
        self.work: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                name, function = self.work.get(timeout=timeouts.IDLE_THREAD_S)
            except queue.Empty:
                try:
                    _idle.remove(self)
                except ValueError:  # `spawn` has just taken this thread, and puts a function into its queue
                    name, function = self.work.get()
                else:
                    return
            self.name = f"weightsync {name}"
            function()
            del function  # an idle thread must not keep what the function holds
            self.name = "weightsync idle"
            _idle.append(self)


_idle: list[_Kept] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child process inherits the list, but not the threads
