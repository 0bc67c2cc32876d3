"""The proof that two processes map the same memory: equal digests of all of it, or of a small sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import mul

import torch

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
        self._samples: dict[tuple[int, ...], tuple[Digests, list[list[int]]]] = {}  # with each rank's factors

    def of(self, sample: int) -> list[int]:
        """Return one digest of each rank's memory: of all bytes with `WHOLE`, otherwise of this sample.

        A sample has one block from each of at most a thousand runs. Runs take turns, and samples repeat. Waits for the
        current streams, once for all ranks.
        """
        return self.begin(sample)()

    def begin(self, sample: int) -> Callable[[], list[int]]:
        """Queue the digests of GPU memory on the current streams, and make the others. Return the rest of `of`."""
        samples = tuple(sample if sample == WHOLE else sample % max(turns, _LEAST_SAMPLES) for turns in self._turns)
        if samples not in self._samples:
            blocks = [self._blocks(rank, own) for rank, own in enumerate(samples)]
            factors = [[number * GOLDEN | 1 for number in range(len(own))] for own in blocks]
            self._samples[samples] = Digests(*blocks, of_samples=False), factors
        digests, factors = self._samples[samples]
        rest = digests.begin(WHOLE)

        def finish() -> list[int]:
            found = iter(rest())
            return [sum(map(mul, own, islice(found, len(own)))) & MASK for own in factors]

        return finish

    def _blocks(self, rank: int, sample: int) -> list[torch.Tensor]:
        """Return the bytes of a rank that belong to a sample."""
        runs, turns = self._runs[rank], self._turns[rank]
        if sample == WHOLE:
            return runs
        return [_block(runs[at], sample + at) for at in range(-sample % turns, len(runs), turns)]


def _block(run: torch.Tensor, number: int) -> torch.Tensor:
    count = -(-run.numel() // _BLOCK_BYTES)
    first = number * _SPREAD % count * _BLOCK_BYTES
    return run[first : first + _BLOCK_BYTES]
