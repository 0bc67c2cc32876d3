"""The copies of `copies.BatchedCopy` that are runs of bytes in a CPU's memory.

Threads take one tile after another. torch gives each of its threads an equal share of every tensor and waits for the
last thread. Every tensor then waits where another process, as vLLM's scheduler, keeps one of the cores busy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from ctypes import memmove
from threading import Semaphore

import torch

from weightsync.net.runtime import spawn

_TILE_BYTES = 2**22


def can_tile(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether this copy is one of bytes that are contiguous on both sides, in a CPU's memory."""
    alike = target.dtype == source.dtype and target.device.type == source.device.type == "cpu"
    return alike and all(one.is_contiguous() and not (one.is_neg() or one.is_conj()) for one in (target, source))


class Tiles:
    """Copies by as many threads as torch has. The thread that calls `run` is one of them."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = copies  # they keep the memory
        self._tiles = [
            (target.data_ptr() + first, source.data_ptr() + first, min(_TILE_BYTES, target.nbytes - first))
            for target, source in copies
            for first in range(0, target.nbytes, _TILE_BYTES)
        ]
        self._cores = _cores()
        # With many small tiles threads would wait for Python more than they copy.
        worthwhile = sum(target.nbytes for target, _ in copies) // _TILE_BYTES
        self._others = max(min(torch.get_num_threads(), len(self._cores), worthwhile) - 1, 0)

    def run(self) -> None:
        left, done, started = iter(self._tiles), Semaphore(0), 0

        def help_out() -> None:
            with suppress(OSError):  # all of these cores have since been taken from the process
                os.sched_setaffinity(0, self._cores)
            for tile in left:
                memmove(*tile)  # which lets other threads run
            done.release()

        try:
            with suppress(RuntimeError):  # no thread can be started: there are fewer then
                for _ in range(self._others):
                    spawn("copy", help_out)
                    started += 1
            for tile in left:
                memmove(*tile)
        finally:
            for _ in range(started):
                done.acquire()


def _cores() -> set[int]:
    """Return the cores that any thread of this process may run on.

    OpenMP may have bound each of its threads to one core, this thread too, and a new thread inherits that.
    """
    cores = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            cores |= os.sched_getaffinity(int(thread))
    return cores
