"""What the quantisations have in common that weightsync adds to vLLM."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


class Scheme(QuantizationConfig):
    """Made from unquantised weights as they are loaded, and made anew at every push."""

    weightsync_reloads = True

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []
