"""The layers of the quantisations in `quant_schemes.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.platforms import current_platform

from weightsync.kernels.quantize import int8_per_channel, row_maxima


class Int8LinearMethod(LinearMethodBase):
    """A linear layer with bf16 weights as input and vLLM's int8 kernels.

    Weights have a scale for each output channel, the same for any number of tensor parallel workers.
    """

    uses_meta_device = True
    """A marker for vLLM: make each layer's weights when they arrive. Only one layer's bf16 weights are then in memory
    at the start."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.splits_inputs = input_size_per_partition != input_size
        self.kernel: Any = _kernel()
        layer.logical_widths = output_partition_sizes
        shape = (sum(output_partition_sizes), input_size_per_partition)
        loader: Callable[..., Any] | None = extra_weight_attrs.get("weight_loader")
        data = torch.empty(shape, dtype=params_dtype, device="meta")
        layer.register_parameter(
            "weight", ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantise the weight. Collective with row parallelism: all workers call this for their layers in one order."""
        if getattr(layer, "weightsync_is_int8", False):
            return  # vLLM calls this again after all layers are loaded
        maxima = row_maxima(layer.weight)
        if self.splits_inputs:
            largest = torch.distributed.ReduceOp.MAX
            torch.distributed.all_reduce(maxima, op=largest, group=get_tp_group().device_group)
        scale = int8_per_channel.scale(maxima)
        layer.weight = nn.Parameter(int8_per_channel.values(layer.weight, scale), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None  # activations are scaled at run time
        self.kernel.process_weights_after_loading(layer)
        layer.weightsync_is_int8 = True

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.kernel.apply_weights(layer, x, bias)
        return out


def _kernel() -> Any:
    if current_platform.is_cpu() and not torch.cpu._is_vnni_supported():
        return _ExactOnCpu()
    return init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=__name__
    )


class _ExactOnCpu:
    """The kernel for CPUs without VNNI.

    oneDNN's kernel is wrong there: it adds products in pairs of 16 bits, and these overflow.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = int8_per_channel.scale(row_maxima(rows))
        sums: torch.Tensor = torch._int_mm(int8_per_channel.values(rows, scale), layer.weight)
        out: torch.Tensor = sums.float() * scale * layer.weight_scale.t()
        if bias is not None:
            out += bias
        return out.to(x.dtype).reshape((*x.shape[:-1], out.shape[-1]))


class PlainLinearMethod(UnquantizedLinearMethod):
    """vLLM's unquantised linear layer, without the packing for a CPU's kernels."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = functional.linear  # vLLM calls this on a CPU; GPUs do not use it


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """vLLM's unquantised embedding, without the packing for a CPU's kernels."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = functional.linear
