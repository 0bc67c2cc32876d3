"""Copies at equal distances, such as those of a layer's experts, joined into one copy with one more dimension. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from weightsync.planning.layout import CopyOp


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
    found: list[CopyOp] = []
    first = last = None
    count, step = 1, (0, 0)
    for op in ops:
        if first is not None and last is not None and _is_like(first, op):
            ahead = op.src_offset - last.src_offset, op.dst_offset - last.dst_offset
            if min(ahead) > 0 and (count == 1 or ahead == step):
                count, step, last = count + 1, ahead, op
                continue
        if first is not None:
            found.append(_joined(first, count, step))
        first = last = op
        count = 1
    return found if first is None else [*found, _joined(first, count, step)]


def _is_like(op: CopyOp, other: CopyOp) -> bool:
    return (
        op.size == other.size
        and op.param == other.param
        and op.chunk == other.chunk
        and op.storage == other.storage
        and op.rank == other.rank
        and op.src_stride == other.src_stride
        and op.dst_stride == other.dst_stride
        and op.src_dtype == other.src_dtype
    )


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
