"""Joined copies move the same elements, and copies at equal distances are joined."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from weightsync.planning.layout import CopyOp
from weightsync.planning.regular_copies import join_regular

OP = CopyOp(0, "a", (2, 3), 0, 0, 0, (3, 1), "float32", "w", 0, (3, 1))


def moves(ops: list[CopyOp]) -> list[tuple[object, ...]]:
    """Each element moved, in a form that does not depend on the copies that move it."""
    found = []
    for op in ops:
        for at in product(*map(range, op.size)):
            src = op.src_offset + sum(i * step for i, step in zip(at, op.src_stride, strict=True))
            dst = op.dst_offset + sum(i * step for i, step in zip(at, op.dst_stride, strict=True))
            found.append((op.chunk, op.rank, op.storage, op.src_dtype, src, op.param, dst))
    return sorted(found)


def at(src: int, dst: int, **other: object) -> CopyOp:
    return replace(OP, src_offset=src, dst_offset=dst, **other)


def test_experts_at_equal_distances_become_one_copy():
    (joined,) = join_regular([at(10 * n, 20 * n) for n in range(5)])
    assert (joined.size, joined.src_stride, joined.dst_stride) == ((5, 2, 3), (10, 3, 1), (20, 3, 1))


def test_rows_that_go_on_stay_rows():
    (joined,) = join_regular([at(6 * n, 6 * n) for n in range(5)])
    assert (joined.size, joined.src_stride) == ((10, 3), (3, 1))


def test_pairs_at_equal_distances_become_one_copy():
    """Gate and up of an expert follow each other, and down, which goes elsewhere, comes before the next pair."""
    (joined,) = join_regular([at(18 * n + 6 * half, 12 * n + 6 * half) for n in range(4) for half in range(2)])
    assert (joined.size, joined.src_stride, joined.dst_stride) == ((4, 4, 3), (18, 3, 1), (12, 3, 1))


def test_a_scalar_is_joined():
    scalars = [replace(OP, size=(), src_stride=(), dst_stride=(), src_offset=n, dst_offset=2 * n) for n in range(3)]
    (joined,) = join_regular(scalars)
    assert (joined.size, joined.src_stride, joined.dst_stride) == ((3,), (1,), (2,))


def test_nothing_is_joined_backwards_or_on_one_place():
    ops = [at(0, 20), at(10, 0), at(10, 40)]
    assert join_regular(ops) == ops


OTHERS = st.fixed_dictionaries(
    {
        "chunk": st.integers(0, 1),
        "rank": st.integers(0, 1),
        "storage": st.integers(0, 1),
        "src_dtype": st.sampled_from(["float32", "bfloat16"]),
        "param": st.sampled_from(["w", "v"]),
        "size": st.sampled_from([(2, 3), (1, 3), (2, 1)]),
        "src_stride": st.sampled_from([(3, 1), (4, 1)]),
        "dst_stride": st.sampled_from([(3, 1), (1, 2)]),
    }
)
OFFSETS = st.tuples(st.integers(0, 4).map(lambda n: 6 * n), st.integers(0, 4).map(lambda n: 6 * n))


@given(st.lists(st.tuples(OFFSETS, st.one_of(st.just({}), OTHERS)), max_size=12))
def test_any_copies_move_the_same_elements_when_joined(rows):
    ops = [at(src, dst, **other) for (src, dst), other in rows]
    joined = join_regular(ops)
    assert moves(joined) == moves(ops)
    assert len(joined) <= len(ops)
