"""The copies of `copies.BatchedCopy` between contiguous bytes in CPU memory.

Each thread takes the next tile when it has finished one. torch instead gives each thread an equal share of every tensor
and waits for the slowest thread. Every tensor then waits if another process, such as vLLM's scheduler, keeps one core
busy.
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
    """Return whether both sides of this copy are contiguous bytes of one dtype in CPU memory."""
    alike = target.dtype == source.dtype and target.device.type == source.device.type == "cpu"
    return alike and all(one.is_contiguous() and not (one.is_neg() or one.is_conj()) for one in (target, source))


class Tiles:
    """Copies by up to as many threads as torch has, the thread that calls `run` included."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = copies  # keeps the memory alive
        self._tiles = [
            (target.data_ptr() + first, source.data_ptr() + first, min(_TILE_BYTES, target.nbytes - first))
            for target, source in copies
            for first in range(0, target.nbytes, _TILE_BYTES)
        ]
        self._cores = _cores()
        # With many small tiles, threads would spend more time on Python's lock than on copies.
        worthwhile = sum(target.nbytes for target, _ in copies) // _TILE_BYTES
        self._others = max(min(torch.get_num_threads(), len(self._cores), worthwhile) - 1, 0)

    def run(self) -> None:
        left, done, started = iter(self._tiles), Semaphore(0), 0

        def help_out() -> None:
            with suppress(OSError):  # the process has lost all of these cores since
                os.sched_setaffinity(0, self._cores)
            for tile in left:
                memmove(*tile)  # releases Python's lock
            done.release()

        try:
            with suppress(RuntimeError):  # no thread can be started, so fewer threads copy
                for _ in range(self._others):
                    spawn("copy", help_out)
                    started += 1
            for tile in left:
                memmove(*tile)
        finally:
            for _ in range(started):
                done.acquire()


def _cores() -> set[int]:
    """Return the cores on which any thread of this process may run.

    OpenMP may have bound each of its threads to one core, this thread included. A new thread inherits this binding.
    """
    cores = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            cores |= os.sched_getaffinity(int(thread))
    return cores
