"""verl's Megatron engine on CPUs, with Megatron-core's own layers in the place of Transformer Engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import mbridge.core.llm_bridge
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron_models import PlainAttention, on_cpu
from torch import nn


class NormedLinear(ColumnParallelLinear):
    """A linear layer that has the norm before it, under Transformer Engine's name: mbridge knows no other."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        normed = nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **options)


def _local(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
    """Return the layers that Megatron-core has without Transformer Engine, with the parameters that it has with it."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **options)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        parts.self_attention.submodules.linear_qkv = parts.mlp.submodules.linear_fc1 = NormedLinear
        parts.self_attention.submodules.core_attention = PlainAttention
    return block


def _here(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `make` for a process without a GPU, where no memory can be pinned."""

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, device="cpu" if device == "cuda" else device, **options)

    return made


_type = torch.Tensor.type
on_cpu().start()
mock.patch.multiple(torch, **{name: _here(getattr(torch, name)) for name in ("empty", "tensor", "zeros")}).start()
# Megatron's optimizer refuses parameters without these names.
torch.Tensor.type = lambda self, *to: _type(self, *to) if to else _type(self).replace("torch.", "torch.cuda.")
mock.patch.object(mbridge.core.llm_bridge, "get_gpt_decoder_block_spec", _local).start()
