"""The proof that two processes map the same memory: equal digests of all of it, or of a small sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import repeat

import torch

from weightsync.kernels.copies import BatchedCopy, Copy
from weightsync.kernels.digest import GOLDEN, MASK, WHOLE, Digests

_BLOCK_BYTES = 4096
_MOST_BLOCKS = 1024
_LEAST_SAMPLES = 4
_SPREAD = 0x9E3779B1


class MemoryFingerprint:
    """Runs of some ranks' memory that workers read in place. Both sides list the same runs.

    Runs are contiguous 1-D uint8 tensors. The runs of one rank are on one device.
    """

    def __init__(self, runs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Set the runs of each rank."""
        self._runs = [[run for run in own if run.numel()] for own in runs]
        # Powers of two: all ranks' samples then repeat with one period, so few combinations are cached.
        self._turns = [1 << (max(len(own) - 1, 0) // _MOST_BLOCKS).bit_length() for own in self._runs]
        self._rooms: list[torch.Tensor] = []
        self._whole: Digests | None = None
        self._samples: dict[tuple[int, ...], tuple[list[BatchedCopy], Digests]] = {}

    def of(self, sample: int) -> list[int]:
        """Return one digest of each rank's memory: of all bytes with `WHOLE`, otherwise of this sample.

        A sample has one block from each of at most a thousand runs. Runs take turns, and samples repeat. Waits for the
        current streams, once for all ranks.
        """
        if sample == WHOLE:
            self._whole = self._whole or Digests([run for own in self._runs for run in own])
            found = iter(self._whole.of(WHOLE))
            return [sum((number * GOLDEN | 1) * next(found) for number in range(len(own))) & MASK for own in self._runs]
        samples = tuple(sample % max(turns, _LEAST_SAMPLES) for turns in self._turns)
        if samples not in self._samples:
            self._samples[samples] = self._collect(samples)
        collect, digests = self._samples[samples]
        for copies in collect:
            copies.run()
        return digests.of(WHOLE)

    def _collect(self, samples: Sequence[int]) -> tuple[list[BatchedCopy], Digests]:
        """Return the copies of each rank's blocks into one buffer, and the digests of these buffers."""
        if not self._rooms:
            self._rooms = [_room(runs, turns) for runs, turns in zip(self._runs, self._turns, strict=True)]
        copies: dict[torch.device, list[Copy]] = defaultdict(list)
        collected = []
        for runs, turns, room, sample in zip(self._runs, self._turns, self._rooms, samples, strict=True):
            blocks = [_block(run, sample + at) for at, run in enumerate(runs) if (at + sample) % turns == 0]
            sizes = [block.numel() for block in blocks]
            collected.append(room[: sum(sizes)])
            copies[room.device] += zip(collected[-1].split(sizes), blocks, repeat(0))
        return [BatchedCopy(those) for those in copies.values()], Digests(collected)


def _room(runs: Sequence[torch.Tensor], turns: int) -> torch.Tensor:
    """Return a buffer for the blocks of any one sample."""
    device = runs[0].device if runs else torch.device("cpu")
    return torch.empty(-(-len(runs) // turns) * _BLOCK_BYTES, dtype=torch.uint8, device=device)


def _block(run: torch.Tensor, number: int) -> torch.Tensor:
    count = -(-run.numel() // _BLOCK_BYTES)
    first = number * _SPREAD % count * _BLOCK_BYTES
    return run[first : first + _BLOCK_BYTES]
