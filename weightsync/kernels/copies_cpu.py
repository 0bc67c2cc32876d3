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
_LEAST_ROW_BYTES = 2**16
"""The least size of a row for a tile of its own. Smaller rows would cost Python more than torch's own copy."""


def can_tile(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether both sides of this copy are contiguous bytes of one dtype in CPU memory, or rows of them."""
    alike = target.dtype == source.dtype and target.device.type == source.device.type == "cpu"
    if not alike or any(one.is_neg() or one.is_conj() for one in (target, source)):
        return False
    if target.is_contiguous() and source.is_contiguous():
        return True
    has_long_rows = target.dim() > 1 and target.nbytes >= len(target) * _LEAST_ROW_BYTES
    return has_long_rows and target[0].is_contiguous() and source[0].is_contiguous()


class Tiles:
    """Copies by up to as many threads as torch has, the thread that calls `run` included."""

    def __init__(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._copies = copies  # keeps the memory alive
        self._tiles = [
            (to + first, of + first, min(_TILE_BYTES, nbytes - first))
            for target, source in copies
            for to, of, nbytes in _rows(target, source)
            for first in range(0, nbytes, _TILE_BYTES)
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


def _rows(target: torch.Tensor, source: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return the addresses and the size of each run of contiguous bytes."""
    to, of = target.data_ptr(), source.data_ptr()
    if target.is_contiguous() and source.is_contiguous():
        return [(to, of, target.nbytes)]
    count, size = len(target), target.element_size()
    steps = target.stride(0) * size, source.stride(0) * size
    return [(to + row * steps[0], of + row * steps[1], target.nbytes // count) for row in range(count)]


def _cores() -> set[int]:
    """Return the cores on which any thread of this process may run.

    OpenMP may have bound each of its threads to one core, this thread included. A new thread inherits this binding.
    """
    cores = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            cores |= os.sched_getaffinity(int(thread))
    return cores
