"""The quantisations that weightsync adds to vLLM: `quantization="weightsync_int8"` and `"weightsync_plain"`.

vLLM's plug-in loader calls `register` in every process. This module imports only modules that vLLM has imported by
then.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

_ROUTERS = (r"re:.*\.(gate|router|shared_expert_gate)$",)
"""Small layers with large effects: they stay unquantised."""


class _Scheme(QuantizationConfig):
    """A quantisation of bf16 weights at loading, repeated at every push."""

    weightsync_reloads = True
    _capability = 0

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return cls._capability

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class Int8Config(_Scheme):
    """A quantisation of linear layers to int8, with scales for output channels of weights and tokens of activations.

    vLLM quantises to fp8 at loading, but not to int8. Embeddings, `lm_head`, routers, norms and experts stay as they
    are.

    Args:
        ignore: Names of layers to leave alone, or patterns after "re:", as in compressed-tensors.
    """

    _capability = 75

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ignore = [*ignore, *_ROUTERS]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8Config:
        """Read the `quantization_config` of a model's config.json. A plain bf16 checkpoint has none."""
        keys = ("ignore", "ignored_layers", "modules_to_not_convert")
        return cls(tuple(name for key in keys for name in config.get(key) or ()))

    def get_name(self) -> str:
        return "weightsync_int8"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        from weightsync.vllm.quant_layers import Int8LinearMethod

        if not isinstance(layer, LinearBase):
            return None
        if should_ignore_layer(prefix, ignore=self.ignore, fused_mapping=self.packed_modules_mapping):
            return UnquantizedLinearMethod()
        return Int8LinearMethod()


class PlainConfig(_Scheme):
    """No quantisation: linear layers and embeddings stay as they are loaded, on CPUs too.

    On CPUs with AVX-512, vLLM packs the weights of linear layers for oneDNN and drops the originals. With this
    configuration it keeps and uses the originals, as on GPUs, so a trainer can share them (transport="single_copy").
    vLLM still packs experts, and layers that it makes without asking a quantisation: routers, gates of shared experts.
    """

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainConfig:
        return cls()

    def get_name(self) -> str:
        return "weightsync_plain"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from weightsync.vllm.quant_layers import PlainEmbeddingMethod, PlainLinearMethod

        if isinstance(layer, LinearBase):
            return PlainLinearMethod()
        return PlainEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else None


def register() -> None:
    """Register both with vLLM. May be called any number of times."""
    register_quantization_config("weightsync_int8")(Int8Config)
    register_quantization_config("weightsync_plain")(PlainConfig)
