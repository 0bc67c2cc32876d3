"""8-bit weights: vLLM's own functions give the same bits, and plain arithmetic does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engines import Remote
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.kernels import quantize
from weightsync.kernels.quantize import (
    PerChannel,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
    row_maxima,
)
from weightsync.testing.promises import same_bytes

pytest_plugins = ["engine_fixtures"]

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


# --- vLLM's own


def online_linear(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantization="fp8_per_channel"` makes of a layer with this weight."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

    method = object.__new__(Fp8PtpcOnlineLinearMethod)
    method.fp8_linear = Mock()  # no kernel, which would make a format of its own out of it
    method.requantization_source, method.requantization_source_parameters = None, {}
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.tp_size = 1
    method.process_weights_after_loading(layer)
    return layer.weight.data.t(), layer.weight_scale.data


def online_experts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's online int8 makes of the one expert of a layer, that has this weight."""
    from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod

    layer: Any = torch.nn.Module()
    layer.num_experts = layer.local_num_experts = 1
    layer.w13_weight = layer.w2_weight = torch.nn.Parameter(weight[None], requires_grad=False)
    method: Any = SimpleNamespace(moe=SimpleNamespace(tp_size=1))
    Int8OnlineMoEMethod._quantize_weights(method, layer)
    return layer.w13_weight[0].data, layer.w13_scale[0, :, None].data


def compressed(form: PerChannel, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values that the compressed-tensors library writes into a checkpoint with these scales."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize as compress

    kind = "float" if form.dtype.is_floating_point else "int"
    args = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="channel")
    return compress(weight, scale, None, args, dtype=form.dtype)


def vllm_gives_the_same_on_a_cpu(_: object) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_scale, weight_amax
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    per_block_cast_to_fp8 = per_block_cast_to_fp8._torchdynamo_orig_callable  # compiling it takes half a minute
    for dtype in DTYPES:
        weight = noise(301, 515, dtype)
        assert same(fp8_per_channel(weight), online_linear(weight)), dtype
        assert same(fp8_per_block(weight), per_block_cast_to_fp8(weight, [128, 128], False)), dtype
        # The rest of this one has no kernel for CPUs.
        assert same_bytes(fp8_per_tensor(weight)[1], _fp8_scale(weight_amax(weight).reshape(1))), dtype
        int8, scale = int8_per_channel(weight)
        by_kernel, its_scale, _ = ops.scaled_int8_quant(weight)
        assert same_bytes(scale, its_scale), dtype
        filled = scale[:, 0] > 0  # the kernel makes -128 of zeros, with scale 0
        assert (by_kernel[filled].int() - int8[filled].int()).abs().max() <= 1, dtype
        for form in (fp8_per_channel, int8_per_channel):
            values, scale = form(weight)
            filled = scale[:, 0] > 0
            assert same_bytes(values[filled], compressed(form, weight[filled], scale[filled])), dtype
    weight = noise(301, 515, torch.float32)
    weight[weight.abs().amax(1) == 0] = 1  # of zeros it makes what division by zero gives
    assert same(int8_per_channel(weight), online_experts(weight))


def vllm_gives_the_same_on_a_gpu(_: object) -> None:
    from vllm import _custom_ops as ops

    for dtype in DTYPES:
        weight = noise(301, 515, dtype).cuda()
        assert same(fp8_per_channel(weight), ops.scaled_fp8_quant(weight, use_per_token_if_dynamic=True)), dtype
        assert same(fp8_per_channel(weight), tuple(t.cuda() for t in fp8_per_channel(weight.cpu()))), dtype
        assert same(int8_per_channel(weight), tuple(t.cuda() for t in int8_per_channel(weight.cpu()))), dtype
        for one in (weight, torch.zeros_like(weight)):
            assert same(fp8_per_tensor(one), ops.scaled_fp8_quant(one)), dtype


def test_vllm_gives_the_same(engines: Remote) -> None:
    engines.call(vllm_gives_the_same_on_a_cpu)


@pytest.mark.gpu(1)
def test_vllm_gives_the_same_on_a_gpu() -> None:
    gpu = Remote(Process)
    try:
        gpu.call(vllm_gives_the_same_on_a_gpu)
    finally:
        gpu.close()


class Process:
    """Nothing but a process."""

    connections = ()

    def close(self) -> None:
        return


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
def test_half_way_between_two_is_rounded_as_by_division(form: PerChannel) -> None:
    """Where the reciprocal would round the other way; it is the difference between vLLM's kernels."""
    weight = noise(400, 500, seed=3)
    values, scale = form(weight)
    filled = scale[:, 0] > 0
    other = weight[filled].float() * (1 / scale[filled])
    other = other.to(form.dtype) if form.dtype.is_floating_point else other.round().to(form.dtype)
    assert not torch.equal(values[filled].float(), other.float())


def test_what_is_not_a_number_does_not_become_one() -> None:
    weight = noise(4, 6)
    weight[1, 2] = float("nan")
    for form in (fp8_per_channel, int8_per_channel):
        assert form(weight)[1].isnan().flatten().tolist() == [False, True, False, False]
