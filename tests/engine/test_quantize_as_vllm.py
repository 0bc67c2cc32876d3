"""8-bit weights: vLLM's own functions give the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engines import Remote
from test_quantize import DTYPES, noise, same

from weightsync.kernels.quantize import (
    Form,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
)
from weightsync.tools.testing.assertions import same_bytes

pytest_plugins = ["engine_fixtures"]


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


def compressed(form: Form, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
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

    if hasattr(per_block_cast_to_fp8, "_torchdynamo_orig_callable"):  # compiling it takes half a minute
        per_block_cast_to_fp8 = per_block_cast_to_fp8._torchdynamo_orig_callable
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
