"""Batched copies between views of any strides and element sizes. Values are cast where dtypes differ.

On a GPU one launch makes all copies of equal dtypes and alignment. On a CPU threads share runs of bytes. Torch makes
the other copies. Tests compare launches and threads with torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.kernels.copies_cpu import Tiles, can_tile

Copy = tuple[torch.Tensor, torch.Tensor, int]
"""(target, source, link): views of equal shape. `link` numbers the physical link that the source is read over, for
example one for each other GPU's memory. Copies of all links advance in proportion, so no link is idle before the end.
"""


class BatchedCopy:
    """Many copies, prepared once for all runs over the same memory.

    No two targets of a group may overlap. All targets and sources are on one device. Another GPU's memory counts as
    this device's memory while it is mapped here.

    groups: the copies, in groups to be run at different times. All groups share one table.
    programs: the most programs of a launch that run on the GPU at once. The rest of the GPU stays free for other work.
    """

    def __init__(self, *groups: Sequence[Copy], programs: int | None = None) -> None:
        if wrong := [copy for copies in groups for copy in copies if copy[0].shape != copy[1].shape]:
            target, source, _ = wrong[0]
            raise ValueError(f"a copy of shape {tuple(source.shape)} into {tuple(target.shape)}")
        left = [[copy for copy in copies if copy[0].numel()] for copies in groups]
        self._launches = None
        if any(copies[0][0].is_cuda for copies in left if copies):
            from weightsync.kernels.copies_triton import CopyLaunches, can_launch

            launched = [[copy for copy in copies if can_launch(*copy[:2])] for copies in left]
            self._launches = CopyLaunches(*launched, programs=programs) if any(launched) else None
            left = [[copy for copy in copies if not can_launch(*copy[:2])] for copies in left]
        tiled = [[copy[:2] for copy in copies if can_tile(*copy[:2])] for copies in left]
        self._tiles = {group: Tiles(copies) for group, copies in enumerate(tiled) if copies}
        self._one_by_one = [[copy[:2] for copy in copies if not can_tile(*copy[:2])] for copies in left]

    @property
    def is_loaded(self) -> bool:
        """Whether a run loads no further kernel: launches of kernels that are loaded already make all copies."""
        return not (self._tiles or any(self._one_by_one))

    def run(self, group: int = 0) -> None:
        """Copy the current contents of a group's sources.

        On a GPU the copies are queued on the current stream without waiting.
        """
        if self._launches is not None:
            self._launches.run(group)
        if group in self._tiles:
            self._tiles[group].run()
        for target, source in self._one_by_one[group]:
            target.copy_(source)


Dimension = tuple[int, int, int]
"""(size, stride of target, stride of source)."""


def collapse(sizes: Sequence[int], to_strides: Sequence[int], of_strides: Sequence[int]) -> list[Dimension]:
    """Return the dimensions of two views, outermost first. Dimensions that are contiguous on both sides are joined."""
    dims: list[Dimension] = []
    for size, to, of in zip(sizes, to_strides, of_strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * to, size * of):
            dims[-1] = (dims[-1][0] * size, to, of)
        else:
            dims.append((size, to, of))
    return dims or [(1, 1, 1)]
