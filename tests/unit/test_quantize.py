"""Quantised weights: plain arithmetic gives the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.kernels import quantize
from weightsync.kernels.quantize import (
    Form,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    mxfp4,
    row_maxima,
)
from weightsync.tools.testing.assertions import same_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOTH = pytest.mark.parametrize("form", [fp8_per_channel, int8_per_channel], ids=["fp8", "int8"])
ALL = {
    "fp8 per channel": fp8_per_channel,
    "int8 per channel": int8_per_channel,
    "fp8 per tensor": fp8_per_tensor,
    "fp8 per block": fp8_per_block,
}
EVERY = pytest.mark.parametrize("quantise", ALL.values(), ids=ALL)


def noise(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of zeros, some values that are alone in their row."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=draw) * torch.logspace(-9, 2, rows)[:, None]
    weight[rows // 2] = 0
    weight[rows // 3, 1:] = 0
    return weight.to(dtype)


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    numbers = st.floats(-60000, 60000, width=16) | st.sampled_from([0.0, 1e-7, -1.0, 448.0, 127.0])
    values = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values).view(rows, columns).to(draw(st.sampled_from(DTYPES)))


def same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(map(same_bytes, found, expected))


# --- Plain arithmetic


def nearest(number: float, grid: list[float]) -> float:
    """The number of the grid that is nearest, of two the one at an even place."""
    at = min(range(len(grid)), key=lambda n: (abs(grid[n] - number), n % 2))
    return grid[at]


FP8_GRID = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
"""The numbers from 0 to 448: their places are their bits."""


def magnitudes(values: torch.Tensor) -> list[float]:
    return values.float().abs().flatten().tolist()


@given(weights())
def test_float8_is_the_nearest_to_the_quotient_in_float32(weight: torch.Tensor) -> None:
    values, scale = fp8_per_channel(weight)
    quotients = (weight.float() / scale).abs().flatten().tolist()
    assert magnitudes(values) == [nearest(min(q, 448.0), FP8_GRID) for q in quotients]
    values, scale = fp8_per_tensor(weight)
    if scale > 0:
        quotients = (weight.float() * (1 / scale)).abs().flatten().tolist()
        assert magnitudes(values) == [nearest(min(q, 448.0), FP8_GRID) for q in quotients]


@given(weights())
def test_int8_is_the_nearest_to_the_quotient_in_float32(weight: torch.Tensor) -> None:
    values, scale = int8_per_channel(weight)
    grid = [float(n) for n in range(128)]
    quotients = (weight.float() / scale).nan_to_num(0).abs().flatten().tolist()
    assert magnitudes(values) == [nearest(min(q, 127.0), grid) for q in quotients]


@given(weights())
def test_signs_and_the_largest_of_each_row_are_kept(weight: torch.Tensor) -> None:
    for form in (fp8_per_channel, int8_per_channel):
        values, scale = form(weight)
        assert (values.float() * weight.float() >= 0).all()
        assert torch.isfinite(scale).all()
        full = scale > form.smallest_scale
        assert torch.equal(values.float().abs().amax(1, keepdim=True)[full], torch.full_like(scale, form.largest)[full])


@EVERY
def test_zeros_stay_zeros(quantise: Any) -> None:
    values, scale = quantise(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert ((values.float() * scale) == 0).all()


@given(weights(), st.data())
def test_a_row_does_not_depend_on_the_others(weight: torch.Tensor, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(weight) - 1))
    rows = slice(first, data.draw(st.integers(first + 1, len(weight))))
    for form in (fp8_per_channel, int8_per_channel):
        values, scale = form(weight)
        assert same(form(weight[rows]), (values[rows], scale[rows]))


@given(weights(), st.data())
def test_columns_can_be_done_apart_once_their_maxima_are_put_together(
    weight: torch.Tensor, data: st.DataObject
) -> None:
    parts = weight.tensor_split([data.draw(st.integers(0, weight.shape[1]))], dim=1)
    parts = [part for part in parts if part.numel()]
    for form in (fp8_per_channel, int8_per_channel):
        scale = form.scale(torch.stack([row_maxima(part) for part in parts]).amax(0))
        assert same((torch.cat([form.values(part, scale) for part in parts], dim=1), scale), form(weight))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 128), (129, 127), (300, 257)])
def test_a_block_does_not_depend_on_the_others(rows: int, columns: int) -> None:
    weight = noise(rows, columns)
    values, scale = fp8_per_block(weight)
    assert scale.shape == (-(-rows // 128), -(-columns // 128))
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            block = slice(row, row + 128), slice(column, column + 128)
            expected, its_scale = fp8_per_block(weight[block])
            assert same_bytes(values[block], expected)
            assert scale[row // 128, column // 128] == its_scale


@EVERY
def test_strided_weights(quantise: Any) -> None:
    weight = noise(9, 300)
    assert same(quantise(weight.t().contiguous().t()), quantise(weight))
    assert same(quantise(weight[::2, 1:150]), quantise(weight[::2, 1:150].contiguous()))


class LargestNew(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return made


@EVERY
def test_no_copy_of_the_whole_weight_is_made(quantise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = noise(2000, 200)
    whole = quantise(weight)
    monkeypatch.setattr(quantize, "_STRIP_ELEMENTS", 128 * 256 * 2)
    with LargestNew() as largest:
        assert same(quantise(weight), whole)
    assert largest.nbytes <= max(weight.numel(), 4 * 128 * 256 * 2)
    assert largest.nbytes < weight.nbytes


@BOTH
def test_half_way_between_two_is_rounded_as_by_division(form: Form) -> None:
    """Where the reciprocal would round the other way; it is the difference between vLLM's kernels."""
    weight = noise(400, 500, seed=3)
    values, scale = form(weight)
    filled = scale[:, 0] > 0
    other = weight[filled].float() * (1 / scale[filled])
    other = other.to(form.dtype) if form.dtype.is_floating_point else other.round().to(form.dtype)
    assert not torch.equal(values.float()[filled], other.float())


def test_what_is_not_a_number_does_not_become_one() -> None:
    weight = noise(4, 6)
    weight[1, 2] = float("nan")
    for form in (fp8_per_channel, int8_per_channel):
        assert form(weight)[1].isnan().flatten().tolist() == [False, True, False, False]


# --- MXFP4

FP4_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_the_nearest_under_the_least_power_of_two(dtype: torch.dtype) -> None:
    halves = torch.tensor([6.0, -5.0, 3.5, 2.5, -1.75, 1.25, 0.75, -0.25, 0.0, 0.1] + 22 * [1.0]).repeat(12, 1)
    weight = torch.cat([noise(12, 96, dtype), halves.to(dtype)], dim=1)
    values, scales = mxfp4(weight)
    assert values.shape == (12, 4, 16)
    assert scales.shape == (12, 4)
    groups = weight.float().view(12, 4, 32)
    for group, packed, exponent in zip(
        groups.flatten(0, 1).tolist(), values.view(-1, 16), scales.flatten(), strict=True
    ):
        largest, scale = max(map(abs, group)), 2.0 ** (int(exponent) - 127)
        assert largest <= 6 * scale
        assert largest == 0 or largest > 3 * scale or exponent == 1
        bits = [half for byte in packed.tolist() for half in (byte & 15, byte >> 4)]
        for number, found in zip(group, bits, strict=True):
            distances = [abs(abs(number) / scale - each) for each in FP4_GRID]
            away_from_zero = max(at for at in range(8) if distances[at] == min(distances))
            assert found & 7 == away_from_zero, number
            assert number == 0 or (found >> 3) == (number < 0)
