"""Copies into a weight of many matrices, taken apart into whole rows of them."""

from __future__ import annotations

import pytest
import torch

from weightsync.planning.layout import CopyOp
from weightsync.worker.fused_quantize import pieces_of

SHAPE = MATRICES, ROWS, COLUMNS = 5, 8, 6
WHOLE: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "the weight": ((5, 8, 6), (48, 6, 1), 0),
    "the weight as rows": ((40, 6), (6, 1), 0),
    "a row": ((6,), (1,), 90),
    "a row as a matrix": ((1, 6), (0, 1), 90),
    "rows of a matrix": ((3, 6), (6, 1), 48 + 12),
    "rows of two matrices": ((4, 6), (6, 1), 6 * 6),
    "rows of two matrices and one between": ((14, 6), (6, 1), 5 * 6),
    "half of each matrix": ((5, 4, 6), (48, 6, 1), 24),
    "both halves of some matrices": ((3, 2, 4, 6), (48, 24, 6, 1), 48),
    "halves in the other order": ((2, 3, 4, 6), (24, 48, 6, 1), 48),
    "one row of each matrix": ((5, 6), (48, 1), 7 * 6),
    "every other row": ((4, 6), (12, 1), 6),
    "every other matrix": ((3, 8, 6), (96, 6, 1), 0),
}
TORN: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "columns": ((8, 3), (6, 1), 0),
    "transposed": ((6, 8), (1, 6), 0),
    "between two rows": ((2, 6), (6, 1), 3),
    "rows of two matrices, again and again": ((2, 4, 6), (48, 6, 1), 6 * 6),
}


def copy_op(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> CopyOp:
    return CopyOp(0, "tensor", size, 0, 0, 0, (), "float32", "weight", offset, stride)


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("name", WHOLE)
def test_pieces_hold_the_rows_that_the_copy_moves(name: str, gap: int):
    size, stride, offset = WHOLE[name]
    source = torch.arange(1.0, 1 + torch.Size(size).numel() // COLUMNS * (COLUMNS + gap))
    source = source.view(*size[:-1], COLUMNS + gap)[..., :COLUMNS]
    pieces = pieces_of(copy_op(size, stride, offset), source, SHAPE, torch.empty(0))
    assert pieces is not None
    expected, found = torch.zeros(SHAPE), torch.zeros(SHAPE)
    expected.as_strided(size, stride, offset).copy_(source)
    for first, row, rows in pieces:
        found[first : first + len(rows), row : row + rows.shape[1]] = rows
    assert torch.equal(found, expected)
    assert sum(rows.numel() for *_, rows in pieces) == source.numel()


@pytest.mark.parametrize("name", TORN)
def test_other_copies_have_no_pieces(name: str):
    size, stride, offset = TORN[name]
    assert pieces_of(copy_op(size, stride, offset), torch.zeros(size), SHAPE, torch.empty(0)) is None


def test_rows_in_another_dtype_have_no_pieces():
    size, stride, offset = WHOLE["the weight"]
    op = copy_op(size, stride, offset)
    assert pieces_of(op, torch.zeros(size, dtype=torch.bfloat16), SHAPE, torch.empty(0)) is None
    assert pieces_of(op, torch.zeros(6, 8, 5).permute(2, 1, 0), SHAPE, torch.empty(0)) is None
