"""Copies at equal distances, such as those of a layer's experts, joined into one copy with one more dimension. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from msgspec.structs import replace

from weightsync.planning.layout import CopyOp

_form = attrgetter("param", "chunk", "size", "rank", "storage", "src_stride", "src_dtype", "dst_stride")
"""Returns all but the name and the offsets. Copies that differ in these alone may be joined."""


def join_regular(ops: Iterable[CopyOp]) -> list[CopyOp]:
    """Return copies that move the same elements as `ops`, and usually fewer of them.

    Neighbours in `ops` are joined if they have equal shapes, and equal distances in their source and in their target. A
    joined copy has the name of its first tensor.
    """
    joined = [*ops]
    while True:
        before, joined = len(joined), _join_runs(joined)
        if len(joined) == before:
            return joined


def _join_runs(ops: Sequence[CopyOp]) -> list[CopyOp]:
    """Join each run of neighbours at equal distances. The joined copies may themselves be such neighbours."""
    runs: list[tuple[CopyOp, CopyOp, int, tuple[int, int]]] = []  # first, last, count, and the step to each next one
    for op in ops:
        if runs and _form(runs[-1][0]) == _form(op):
            first, last, count, step = runs[-1]
            ahead = op.src_offset - last.src_offset, op.dst_offset - last.dst_offset
            if min(ahead) > 0 and (count == 1 or ahead == step):
                runs[-1] = first, op, count + 1, ahead
                continue
        runs.append((op, op, 1, (0, 0)))
    return [_joined(first, count, step) for first, _, count, step in runs]


def _joined(first: CopyOp, count: int, step: tuple[int, int]) -> CopyOp:
    """Return `count` copies like `first`, each `step` elements behind the one before, in source and target."""
    if count == 1:
        return first
    if first.size and step == (first.size[0] * first.src_stride[0], first.size[0] * first.dst_stride[0]):
        return replace(first, size=(count * first.size[0], *first.size[1:]))  # its rows go on
    src, dst = step
    return replace(
        first, size=(count, *first.size), src_stride=(src, *first.src_stride), dst_stride=(dst, *first.dst_stride)
    )
