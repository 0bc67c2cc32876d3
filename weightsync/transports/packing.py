"""Filling a bucket: a rank's regions of it, each to its place in memory that is there for many pushes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.kernels.copies import BatchedCopy
from weightsync.layout import Box, Placement, itemsize
from weightsync.transports.base import Region, strided


class Packer:
    """Copies a bucket's regions into `data` (1-D uint8), whose first byte is byte `first` of what the new placements
    speak of. `regions` are (new, own, region): what lies at `own`, or the part of it that `new` has, goes to `new`.
    `span` is the run of bytes of `data` from the first that it writes to the last."""

    def __init__(
        self, data: torch.Tensor, regions: Iterable[tuple[Placement, Placement, Region]], first: int = 0
    ) -> None:
        self._computed: dict[Placement, tuple[Region, list[tuple[torch.Tensor, Box]]]] = {}  # by where they seem to lie
        ready = []
        ends = []
        for new, own, region in regions:
            size = itemsize(new.dtype)
            offset = new.offset - first // size
            place = strided(data, new.dtype, offset, new.box.size, new.stride)
            if region.compute is None:
                ready.append((place, _part(region.tensor, own.box, new.box), 0))
            else:
                self._computed.setdefault(own, (region, []))[1].append((place, new.box))
            ends += [offset * size, (offset + new.box.numel) * size]
        self._copy = BatchedCopy(ready)
        self.span = (min(ends), max(ends)) if ends else (0, 0)

    def fill(self, lightly: bool = False) -> None:
        """Of the values of now; `lightly` as in `BatchedCopy.run`. Collective where regions are computed together."""
        self._copy.run(lightly)
        for own, (region, places) in self._computed.items():
            values = region.read()
            for place, box in places:
                place.copy_(_part(values, own.box, box))


def _part(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """What `part` is of a tensor that is `box`."""
    at = zip(part.start, box.start, part.size, strict=True)
    return tensor[tuple(slice(inner - outer, inner - outer + size) for inner, outer, size in at)]
