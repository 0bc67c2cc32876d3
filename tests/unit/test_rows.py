"""Many weights quantised in one go: the bits of each weight quantised alone, from any pieces, into any live tensors."""

from __future__ import annotations

import pytest
import torch

from weightsync.kernels.quantize import (
    BlockForm,
    Form,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
)
from weightsync.kernels.rows import Job, RowQuantiser, WeightPiece
from weightsync.tools.testing.assertions import same_bytes

FORMS: dict[str, Form] = {"fp8": fp8_per_channel, "int8": int8_per_channel, "fp8 per tensor": fp8_per_tensor}
EVERY_FORM: dict[str, Form | BlockForm] = {**FORMS, "fp8 per block": fp8_per_block}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of zeros, and quotients that are half-way between two values."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, columns, generator=draw) * torch.logspace(-7, 2, rows)[:, None]
    found[rows // 2] = 0
    found[rows // 2, ::2] *= -1
    found[rows // 3] = torch.linspace(-448, 448, columns)
    return found.to(dtype).to(device)


def empty(
    rows: int, columns: int, form: Form | BlockForm, device: str, padding: int = 0, matrices: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values whose rows lie `padding` bytes apart, and scales, full of what no push leaves behind."""
    shape = (matrices, rows, columns + padding)
    values = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(form.dtype)
    scale = torch.full((matrices, *form.scale_shape(rows, columns)), float("nan"), device=device)
    return values[:, :, :columns], scale


def job(shards: tuple[tuple[int, torch.Tensor], ...], values: torch.Tensor, scale: torch.Tensor) -> Job:
    """One matrix, from (first row, rows) of it."""
    return Job(tuple(WeightPiece(0, row, rows[None]) for row, rows in shards), values, scale)


def assert_is(form: Form | BlockForm, found: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor) -> None:
    """Compare values and scales with those of each matrix of `weights` alone."""
    for values, scale, weight in zip(*found, weights, strict=True):
        expected, its_scale = form(weight)
        assert same_bytes(values.contiguous(), expected)
        assert same_bytes(scale.contiguous(), its_scale.view(scale.shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_many_at_once_are_as_each_alone(form: Form | BlockForm, dtype: torch.dtype, device: str) -> None:
    shapes = [(7, 64), (164, 1056), (33, 4096), (5, 100), (16, 12288), (2, 17)]
    cut = form.height or 3
    sources = [weight(rows, columns, dtype, device, seed) for seed, (rows, columns) in enumerate(shapes)]
    places = [empty(*shape, form, device, padding=seed % 2 * 16) for seed, shape in enumerate(shapes)]
    jobs = [
        job(((0, source[:cut]), (cut, source[cut:])) if len(source) > cut else ((0, source),), values, scale)
        for source, (values, scale) in zip(sources, places, strict=True)
    ]
    quantiser = RowQuantiser(form, jobs)
    for _ in range(2):
        quantiser.run()
        for source, (values, scale) in zip(sources, places, strict=True):
            assert_is(form, (values, scale), source[None])
        for source in sources:
            source.mul_(0.37).add_(0.001)


def experts_in_pieces(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, list[WeightPiece]]:
    """Experts, and their pieces. Gate and up are the halves of each expert's rows."""
    experts, half, columns = 5, 128, 272
    weights = torch.stack([weight(2 * half, columns, dtype, device, seed) for seed in range(experts)])
    gate, up = weights[:, :half].clone(), torch.zeros(experts, half, columns + 3, dtype=dtype, device=device)
    up[:, :, 1:-2] = weights[:, half:]
    up = up[:, :, 1:-2]
    return weights, [
        WeightPiece(0, 0, gate[:2]),
        WeightPiece(2, 0, gate[2:]),
        WeightPiece(1, half, up[1:]),
        WeightPiece(0, half, up[:1]),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", EVERY_FORM.values(), ids=EVERY_FORM)
def test_experts_come_in_pieces_of_some_experts_and_of_some_rows(form: Form | BlockForm, device: str) -> None:
    weights, pieces = experts_in_pieces(torch.bfloat16, device)
    values, scale = empty(*weights.shape[1:], form, device, 16, len(weights))
    scale = torch.empty_like(scale.mT.contiguous()).mT  # as DeepGEMM wants it
    RowQuantiser(form, [Job(tuple(pieces), values, scale)]).run()
    assert_is(form, (values, scale), weights)


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_may_come_in_any_order_and_lie_anywhere(device: str) -> None:
    whole = weight(48, 256, torch.bfloat16, device)
    behind = torch.empty(49, 512, dtype=torch.bfloat16, device=device)
    behind[1:, 3:259] = whole  # no address here is a multiple of 16
    shards = ((40, behind[41:, 3:259]), (0, whole[:8]), (8, behind[9:41, 3:259]))
    values, scale = empty(48, 256, fp8_per_channel, device)
    RowQuantiser(fp8_per_channel, [job(shards, values, scale)]).run()
    assert_is(fp8_per_channel, (values, scale), whole[None])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_workers_share_the_largest(form: Form, device: str) -> None:
    whole = weight(24, 512, torch.bfloat16, device)
    other = torch.randn_like(whole)

    def share(maxima: torch.Tensor) -> None:
        largest = other.float().abs().amax(dim=1) if form.per_row else other.float().abs().amax().reshape(1)
        torch.maximum(maxima, largest, out=maxima)

    values, scale = empty(24, 512, form, device)
    RowQuantiser(form, [job(((16, whole[16:]), (0, whole[:16])), values, scale)], share).run()
    both, its_scale = form(torch.cat([whole, other], dim=1))
    assert same_bytes(values[0], both[:, :512].contiguous())
    assert same_bytes(scale.view(-1), its_scale.view(-1))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_bfloat16_over_many_scales(form: Form) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    every = every[every.float().abs() <= 1]
    rows = every.repeat(96, 1)
    rows[:, 0] = torch.linspace(1, 3, 96, device="cuda").to(torch.bfloat16)
    rows *= torch.logspace(-12, 4, 96, base=2, device="cuda").to(torch.bfloat16)[:, None]
    values, scale = empty(*rows.shape, form, "cuda")
    RowQuantiser(form, [job(((0, rows),), values, scale)]).run()
    assert_is(form, (values, scale), rows[None])
