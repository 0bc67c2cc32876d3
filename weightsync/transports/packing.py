"""Filling a bucket: a rank's regions of it, each to its place in memory that is there for many pushes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.kernels.copies import BatchedCopy
from weightsync.layout import Placement, itemsize
from weightsync.transports.base import Region, strided


class Packer:
    """Copies a bucket's regions into `data` (1-D uint8), whose first byte is byte `first` of what their placements
    speak of. `span` is the run of bytes of `data` from the first that it writes to the last."""

    def __init__(self, data: torch.Tensor, regions: Iterable[tuple[Placement, Region]], first: int = 0) -> None:
        self._computed: list[tuple[torch.Tensor, Region]] = []
        ready = []
        ends = []
        for placement, region in regions:
            size = itemsize(placement.dtype)
            offset = placement.offset - first // size
            place = strided(data, placement.dtype, offset, placement.box.size, placement.stride)
            if region.compute is None:
                ready.append((place, region.tensor, 0))
            else:
                self._computed.append((place, region))
            ends += [offset * size, (offset + placement.box.numel) * size]
        self._copy = BatchedCopy(ready)
        self.span = (min(ends), max(ends)) if ends else (0, 0)

    def fill(self) -> None:
        """Of the values of now. Collective where regions are computed together."""
        self._copy.run()
        for place, region in self._computed:
            place.copy_(region.read())
