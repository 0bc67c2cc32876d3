"""`quantization="weightsync_int8"`: linear layers in int8, made from bf16 weights as they are loaded.

vLLM quantises to fp8 as it loads, not to int8. This is a `QuantizationConfig` like any other, registered by the
plug-in: weights with a scale for each output channel, computed anew at every load and every push; activations with a
scale for each token, computed as they come. Embeddings, `lm_head`, routers, norms and experts stay as they are. Only
what vLLM has imported anyway when it calls the plug-in is imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config

from weightsync.vllm.scheme import Scheme

NAME = "weightsync_int8"
"""What users write in `quantization="weightsync_int8"`."""

_ROUTERS = (r"re:.*\.(gate|router|shared_expert_gate)$",)
"""Small, and what they decide is worth more than their bytes."""


class Int8Config(Scheme):
    """`ignore` are names of layers to leave alone, or patterns after "re:", as compressed-tensors has them."""

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ignore = [*ignore, *_ROUTERS]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        """From the `quantization_config` of a model's config.json; a plain bf16 checkpoint has none."""
        keys = ("ignore", "ignored_layers", "modules_to_not_convert")
        return cls(tuple(name for key in keys for name in config.get(key) or ()))

    def get_name(self) -> str:
        return NAME

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        from weightsync.vllm.int8_linear import Int8LinearMethod

        if not isinstance(layer, LinearBase):
            return None
        if should_ignore_layer(prefix, ignore=self.ignore, fused_mapping=self.packed_modules_mapping):
            return UnquantizedLinearMethod()
        return Int8LinearMethod()


def register() -> None:
    """Make vLLM know `NAME`. May be called any number of times."""
    register_quantization_config(NAME)(Int8Config)
