"""Quantisation configurations for vLLM whose linear layers keep their weights in a form of their own.

On CPUs with AVX512 vLLM repacks the weights of linear layers, on others it does not. With these every machine takes the
reload road. Import this module in the process that starts the engine, before it does. Nothing is quantised: a cold
engine with the same configuration is the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase


class Transposed(UnquantizedLinearMethod):
    """Replaces the weight by one of another shape, and adds the scale of each row as an attribute."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight.data
        layer.row_scale = weight.float().abs().amax(dim=1).to(weight.dtype)
        layer.weight = nn.Parameter((weight / layer.row_scale[:, None]).t().contiguous(), requires_grad=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x @ layer.weight * layer.row_scale
        return out if bias is None else out + bias


class Failing(Transposed):
    """Like `Transposed`, and raises once when `calls_to_failure` has counted down to nothing."""

    calls_to_failure: int | None = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if Failing.calls_to_failure is not None:
            Failing.calls_to_failure -= 1
            if Failing.calls_to_failure == 0:
                layer.weight = None  # half done
                raise RuntimeError("this kernel does not like these weights")
        super().process_weights_after_loading(layer)


class InClosure(UnquantizedLinearMethod):
    """Leaves an empty weight behind; the packed one is known to a function alone."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed = layer.weight.data.t().contiguous()
        layer.weight = nn.Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)
        layer.run_packed = lambda x: x @ packed

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = layer.run_packed(x)
        return out if bias is None else out + bias


class InMethod(UnquantizedLinearMethod):
    """Leaves no weight behind at all; the packed one is the method's."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.packed = layer.weight.data.t().contiguous()
        layer.weight = None

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x @ self.packed
        return out if bias is None else out + bias


def _register(name: str, method: type[UnquantizedLinearMethod], *, reloads: bool = True) -> None:
    class Config(QuantizationConfig):
        weightsync_reloads = reloads

        def get_name(self) -> str:
            return name

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            return cls()

        def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
            return method() if isinstance(layer, LinearBase) else None

    register_quantization_config(name)(Config)


_register("test-transposed", Transposed)
_register("test-failing", Failing)
_register("test-in-closure", InClosure)
_register("test-in-method", InMethod)
_register("test-undeclared", Transposed, reloads=False)
