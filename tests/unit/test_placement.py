"""The placement of parameters that post-processing rearranges, and the copies that follow it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weightsync.planning.layout import Box, LoadCopy, row_major
from weightsync.worker.placement import Placement, find_placement, place

Rearrange = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (6, 8, 10)
COPIES = [
    [  # gate is the first half of each expert's rows, up the second one
        LoadCopy("gate", Box((0, 0, 0), (6, 4, 10)), "w", 0, (80, 10, 1)),
        *(LoadCopy("up", Box((0, 0), (4, 10)), "w", 80 * expert + 40, (10, 1)) for expert in range(6)),
    ],
    [  # the first columns of both halves, and the others with the columns first
        LoadCopy("rows", Box((0, 0, 0), (6, 8, 3)), "w", 0, (80, 10, 1)),
        LoadCopy("turned", Box((0, 0, 0), (7, 6, 8)), "w", 3, (1, 80, 10)),
    ],
]


def swap(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([*reversed(tensor.chunk(2, dim))], dim)


REARRANGED: dict[str, Rearrange] = {
    "as loaded": lambda w: w.clone(),
    "halves": lambda w: swap(w, 1),
    "halves of columns": lambda w: swap(w, 2),
    "transposed": lambda w: w.mT.contiguous(),
    "other strides": lambda w: w.mT.contiguous().mT,
    "experts last, halves": lambda w: swap(w, 1).permute(1, 2, 0).contiguous(),
    "wide rows": lambda w: torch.cat([w, w], 2)[:, :, :10],
}
OTHER: dict[str, Rearrange] = {
    "shuffled": lambda w: w[:, torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])],
    "reversed": lambda w: w.flip(1),
    "doubled": lambda w: w * 2,
    "one element lost": lambda w: torch.where(torch.arange(480).view(SHAPE) == 97, 0, w),
    "longer": lambda w: torch.cat([w, w]),
    "flat": lambda w: w.reshape(-1),
    "wider": lambda w: w.double(),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_a_copy_lands_where_post_processing_would_have_moved_it(name: str):
    torch.manual_seed(0)
    loaded = torch.randn(SHAPE)
    live = REARRANGED[name](loaded)
    placement = find_placement(loaded, live)
    assert placement is not None
    target = torch.empty_strided(live.shape, live.stride())
    for copies in COPIES:
        target.fill_(torch.nan)
        for copy in copies:
            placed = place(copy, SHAPE, placement)
            assert placed is not None
            for part in placed:
                first = copy.offset + sum(n * step for n, step in zip(part.box.start, copy.stride, strict=True))
                values = torch.as_strided(loaded, part.box.size, copy.stride, first)
                torch.as_strided(target, part.box.size, part.stride, part.offset).copy_(values)
        assert torch.equal(target, live)
    rows_of_all_experts = LoadCopy("rows", Box((0, 0), (48, 10)), "w", 0, (10, 1))
    assert place(rows_of_all_experts, SHAPE, placement) is None, "its first dimension follows two of the parameter"


@pytest.mark.parametrize("name", OTHER)
def test_more_than_a_rearrangement_has_no_placement(name: str):
    torch.manual_seed(0)
    loaded = torch.randn(SHAPE)
    assert find_placement(loaded, OTHER[name](loaded)) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64])
def test_a_placement_is_one_of_bits(dtype: torch.dtype):
    bits = torch.randint(0, 256, (8, 16 * dtype.itemsize), dtype=torch.uint8)
    bits[0] = 255  # NaN in each of these dtypes
    loaded = bits.view(dtype)
    assert find_placement(loaded, swap(bits, 0).view(dtype)) == Placement((16, 1), 0)
    zeros = torch.zeros(8, 16)
    assert find_placement(zeros.to(dtype), (-zeros).to(dtype)) is None


def test_few_elements_of_8_bits_have_no_other_place_than_their_own():
    few = torch.tensor([[1, 0], [1, 0]], dtype=torch.uint8)
    assert find_placement(few, few.clone()) == Placement((2, 1), None)
    assert find_placement(few, swap(few, 1)) is None


def test_a_scalar_and_an_empty_parameter_lie_where_they_were():
    for shape in ((), (0, 4)):
        tensor = torch.zeros(shape)
        assert find_placement(tensor, tensor.clone()) == Placement(row_major(shape), None)
    scalar = LoadCopy("scale", Box((), ()), "s", 0, ())
    assert place(scalar, (), Placement((), None)) == [scalar]
