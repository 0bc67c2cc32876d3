"""The layers of `quantization="weightsync_plain"`: vLLM's own, less the packing for a CPU's kernels."""

from __future__ import annotations

from typing import Any

from torch.nn import functional
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


class PlainLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = functional.linear  # what vLLM calls on a CPU; elsewhere nobody looks


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = functional.linear
