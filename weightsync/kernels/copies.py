"""Many copies in one go, between views of any strides and of any element size; cast on the way, where dtypes differ.

On a GPU all that are alike in dtypes and alignment take one launch, however many they are. On a CPU, runs of bytes are
shared out among threads. Torch copies what is left, and all of it to check the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.kernels.copies_cpu import Tiles, can_tile

Copy = tuple[torch.Tensor, torch.Tensor, int]
"""(target, source, link): views of equal shape. Copies that have different numbers as their `link` come over different
links (the memories of several GPUs): they are made at the same time, in proportion, so that no link is the last."""


class BatchedCopy:
    """All that never changes between two runs over the same memory is worked out here, once. No two targets may
    overlap. Targets are on one device; other GPUs' memory that is mapped for it is its own here."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        if wrong := [copy for copy in copies if copy[0].shape != copy[1].shape]:
            target, source, _ = wrong[0]
            raise ValueError(f"a copy of shape {tuple(source.shape)} into {tuple(target.shape)}")
        kept = [(target, source, link) for target, source, link in copies if target.numel()]
        self._launches = None
        if kept and kept[0][0].is_cuda:
            from weightsync.kernels.copies_triton import Launches, can_launch

            launched = [copy for copy in kept if can_launch(*copy[:2])]
            kept = [copy for copy in kept if not can_launch(*copy[:2])]
            if launched:
                self._launches = Launches(launched)
        tiled = [copy[:2] for copy in kept if can_tile(*copy[:2])]
        self._tiles = Tiles(tiled) if tiled else None
        kept = [copy for copy in kept if not can_tile(*copy[:2])]
        self._one_by_one = [(target, source) for target, source, _ in kept]

    def run(self, lightly: bool = False) -> None:
        """Copy what the sources hold now. On a GPU it is ordered on the current stream, and returns at once; `lightly`
        lets what runs beside it go first, as NCCL that sends the next bucket."""
        if self._launches is not None:
            self._launches.run(lightly)
        if self._tiles is not None:
            self._tiles.run()
        for target, source in self._one_by_one:
            target.copy_(source)


Dimension = tuple[int, int, int]
"""The size, and the strides of target and source."""


def collapse(target: torch.Tensor, source: torch.Tensor) -> list[Dimension]:
    """The dimensions of both, outermost first, with those joined that lie behind one another on both sides; at least
    one."""
    dims: list[Dimension] = []
    for size, to, of in zip(target.shape, target.stride(), source.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * to, size * of):
            dims[-1] = (dims[-1][0] * size, to, of)
        else:
            dims.append((size, to, of))
    return dims or [(1, 1, 1)]
