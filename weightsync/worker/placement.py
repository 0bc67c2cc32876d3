"""Parameters that post-processing only rearranges: the place of each loaded element in the live tensor.

A kernel may want the halves of a fused tensor in the other order, other strides, or dimensions in another order. Then a
push writes each tensor where the kernel reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product
from typing import NamedTuple

import torch

from weightsync.planning.layout import Box, LoadCopy, row_major

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_DIMS = 3
_STRIP_ELEMENTS = 1 << 24
_LEAST_BITS = 64
"""Fewer random bits could be equal by chance."""


class Placement(NamedTuple):
    """The place of a loaded parameter in the storage of its live tensor.

    Element `i` of the loaded parameter lies at `sum(i[d] * stride[d])`. Along dimension `swapped` the halves have
    changed places first.
    """

    stride: tuple[int, ...]
    swapped: int | None

    def offset(self, at: Sequence[int], shape: Sequence[int]) -> int:
        """Return the place of the element at these coordinates of a parameter of this shape."""
        moved = list(at)
        if (d := self.swapped) is not None:
            moved[d] = (at[d] + shape[d] // 2) % shape[d]
        return sum(n * step for n, step in zip(moved, self.stride, strict=True))


def find_placement(loaded: torch.Tensor, processed: torch.Tensor, bits: int = 1) -> Placement | None:
    """Return where post-processing has put each element of `loaded`. None: it did more than rearrange them.

    The contents must be random, at least `bits` of each element. Of two runs with other contents the placements must be
    equal.
    """
    alike = processed.dtype == loaded.dtype and processed.numel() == loaded.numel() and not processed.storage_offset()
    if not alike or processed.dim() != loaded.dim() or loaded.dim() > _MOST_DIMS or not loaded.is_contiguous():
        return None
    loaded, processed = as_bits(loaded), as_bits(processed)
    for axes in permutations(range(loaded.dim())):
        view = processed.permute(axes)
        if view.shape != loaded.shape:
            continue
        for swapped in (None, *(d for d, size in enumerate(loaded.shape) if size and size % 2 == 0)):
            is_plain = swapped is None and axes == tuple(range(loaded.dim()))
            if (is_plain or loaded.numel() * bits >= _LEAST_BITS) and _has_moved(loaded, view, swapped):
                return Placement(tuple(view.stride()), swapped)
    return None


def _has_moved(loaded: torch.Tensor, view: torch.Tensor, swapped: int | None) -> bool:
    if swapped is None:
        return same_bits(loaded, view)
    (a, b), (c, d) = loaded.chunk(2, swapped), view.chunk(2, swapped)
    return same_bits(a, d) and same_bits(b, c)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers with the same bits. A number may be NaN or -0.0, and not every kernel compares 8-bit floats."""
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare integers in strips: a comparison takes a byte of scratch memory for each element."""
    if not a.numel() or not a.dim():
        return torch.equal(a, b)
    rows = max(1, _STRIP_ELEMENTS * len(a) // a.numel())
    return all(torch.equal(mine, other) for mine, other in zip(a.split(rows), b.split(rows), strict=True))


def place(copy: LoadCopy, shape: tuple[int, ...], placement: Placement) -> list[LoadCopy] | None:
    """Return the copies into the live tensor in place of `copy`, a copy into a contiguous parameter of `shape`.

    None: a dimension of the copy does not follow one dimension of the parameter.
    """
    if not copy.box.numel or not shape:
        return [copy]
    at = [copy.offset // step % size for step, size in zip(row_major(shape), shape, strict=True)]
    if (follows := _follow(copy, at, shape)) is None:
        return None
    cuts = [[(0, size)] for size in copy.box.size]
    if (swapped := placement.swapped) is not None:
        along = [k for k, (d, by) in enumerate(follows) if by and d == swapped]
        if len(along) > 1:
            return None
        for k in along:
            first = -((at[swapped] - shape[swapped] // 2) // follows[k][1])  # the first index in the second half
            first = min(max(first, 0), copy.box.size[k])
            cuts[k] = [(low, high) for low, high in ((0, first), (first, copy.box.size[k])) if low < high]
    stride = tuple(by * placement.stride[d] for d, by in follows)
    placed = []
    for part in product(*cuts):
        here = list(at)
        for (low, _), (d, by) in zip(part, follows, strict=True):
            here[d] += low * by
        start = tuple(n + low for n, (low, _) in zip(copy.box.start, part, strict=True))
        box = Box(start, tuple(high - low for low, high in part))
        placed.append(LoadCopy(copy.name, box, copy.param, placement.offset(here, shape), stride))
    return placed


def _follow(copy: LoadCopy, at: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return, for each dimension of a copy, the parameter's dimension that it follows and the indices of each step.

    A dimension of one element has no steps: (0, 0). None: a dimension leaves the one that it follows.
    """
    steps, last = row_major(shape), list(at)
    found: list[tuple[int, int]] = []
    for size, stride in zip(copy.box.size, copy.stride, strict=True):
        if size == 1:
            found.append((0, 0))
            continue
        d = next((d for d, step in enumerate(steps) if stride and stride % step == 0), None)
        if d is None:
            return None
        found.append((d, stride // steps[d]))
        last[d] += (size - 1) * found[-1][1]
    return found if all(end < size for end, size in zip(last, shape, strict=True)) else None
