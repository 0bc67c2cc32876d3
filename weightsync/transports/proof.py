"""The proof that two processes see the same memory: a digest of it, or of a small sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.kernels.copies import BatchedCopy
from weightsync.kernels.digest import GOLDEN, MASK, WHOLE, Digests

_BLOCK_BYTES = 4096
_MOST_BLOCKS = 1024
_LEAST_SAMPLES = 4
_SPREAD = 0x9E3779B1


class Proof:
    """Runs of memory that are read in place: contiguous 1-D uint8 tensors on one device, the same on both sides."""

    def __init__(self, runs: Sequence[torch.Tensor]) -> None:
        self._runs = [run for run in runs if run.numel()]
        self._turns = -(-len(self._runs) // _MOST_BLOCKS)
        self._whole: Digests | None = None
        self._samples: dict[int, tuple[BatchedCopy, Digests]] = {}

    def of(self, sample: int) -> int:
        """Return one digest of all bytes with `WHOLE`, and else of the sample with this number.

        A sample has a block of each of at most a thousand runs, which take turns. The samples repeat. Waits for the
        current stream.
        """
        if not self._runs:
            return 0
        if sample == WHOLE:
            self._whole = self._whole or Digests(self._runs)
            return sum((number * GOLDEN | 1) * found for number, found in enumerate(self._whole.of(WHOLE))) & MASK
        sample %= max(self._turns, _LEAST_SAMPLES)
        if sample not in self._samples:
            self._samples[sample] = self._collect(sample)
        collect, digests = self._samples[sample]
        collect.run()
        return digests.of(WHOLE)[0]

    def _collect(self, sample: int) -> tuple[BatchedCopy, Digests]:
        """Return what copies the sample's blocks side by side, and what tells their digest."""
        blocks = [
            _block(run, sample + number)
            for number, run in enumerate(self._runs)
            if (number + sample) % self._turns == 0
        ]
        sizes = [block.numel() for block in blocks]
        together = torch.empty(sum(sizes), dtype=torch.uint8, device=blocks[0].device)
        places = together.split(sizes)
        copies = [(place, block, 0) for place, block in zip(places, blocks, strict=True)]
        return BatchedCopy(copies), Digests([together])


def _block(run: torch.Tensor, number: int) -> torch.Tensor:
    count = -(-run.numel() // _BLOCK_BYTES)
    first = number * _SPREAD % count * _BLOCK_BYTES
    return run[first : first + _BLOCK_BYTES]
