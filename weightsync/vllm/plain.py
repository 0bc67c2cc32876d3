"""`quantization="weightsync_plain"`: nothing is quantised, and linear layers and embeddings stay as they are loaded.

On CPUs with AVX-512 vLLM packs the weights of linear layers for oneDNN, and drops the originals. With this it keeps and
uses those, as it does on GPUs, so that a trainer can share them (transport="single_copy"). Experts are packed all the
same, and so are the few layers that vLLM makes without asking a quantisation: routers, gates of shared experts.
Registered by the plug-in; only what vLLM has imported anyway when it calls that is imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config

from weightsync.vllm.scheme import Scheme

NAME = "weightsync_plain"
"""What users write in `quantization="weightsync_plain"`."""


class PlainConfig(Scheme):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainConfig:
        return cls()

    def get_name(self) -> str:
        return NAME

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from weightsync.vllm.plain_linear import PlainEmbeddingMethod, PlainLinearMethod

        if isinstance(layer, LinearBase):
            return PlainLinearMethod()
        return PlainEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else None


def register() -> None:
    """Make vLLM know `NAME`. May be called any number of times."""
    register_quantization_config(NAME)(PlainConfig)
