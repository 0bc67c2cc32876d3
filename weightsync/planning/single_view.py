"""The single view of a storage for a set of copies. Pure arithmetic, like `layout`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightsync.planning.layout import CopyOp, View, row_major


def as_single_view(shape: Sequence[int], offset: int, steps: Iterable[CopyOp]) -> View | None:
    """Return the strided view of a storage from which `steps` read.

    The steps write a contiguous tensor of `shape`, from `offset` of their destination on, and must write all of it. The
    view's element at each index is the element that the steps write there. Returns None if no such view exists, or if
    the steps read from several storages.
    """
    at = row_major(shape)
    strides: list[int | None] = [0 if length == 1 else None for length in shape]
    firsts: list[tuple[tuple[int, ...], int]] = []
    storages = set()
    for step in steps:
        storages.add((step.rank, step.storage))
        firsts.append((index_of(step.dst_offset - offset, at), step.src_offset))
        for length, dst_stride, src_stride in zip(step.size, step.dst_stride, step.src_stride, strict=True):
            if length == 1:
                continue
            dim = next((d for d, s in enumerate(at) if s == dst_stride and shape[d] > 1), None)
            if dim is None or strides[dim] not in (None, src_stride):
                return None
            strides[dim] = src_stride
    if len(storages) != 1:
        return None
    # If each step has one index of a dimension, two steps' first elements give the stride.
    index, start = firsts[0]
    unknown = [dim for dim, stride in enumerate(strides) if stride is None]
    for dim in unknown:
        others = [d for d in unknown if d != dim]
        beside = (f for f in firsts if f[0][dim] != index[dim] and all(f[0][d] == index[d] for d in others))
        if (neighbour := next(beside, None)) is None:
            return None
        there, its_start = neighbour
        known = sum((strides[d] or 0) * (there[d] - index[d]) for d in range(len(shape)) if d not in unknown)
        strides[dim] = (its_start - start - known) // (there[dim] - index[dim])
    found = tuple(stride or 0 for stride in strides)
    base = start - sum(s * i for s, i in zip(found, index, strict=True))
    fits = all(base + sum(s * i for s, i in zip(found, index, strict=True)) == start for index, start in firsts)
    return (base, tuple(shape), found) if fits else None


def index_of(offset: int, strides: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at `offset` of a contiguous tensor with these strides."""
    found = []
    for stride in strides:
        found.append(offset // stride)
        offset %= stride
    return tuple(found)
