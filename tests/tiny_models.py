"""Tiny Hugging Face models of the architectures that the tests push, with random weights that a name stands for."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

# 251 rows are cut unevenly over two ranks, and engines pad them to 256.
_SIZES: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(kind: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, kind)(**{**_SIZES, "tie_word_embeddings": False, **more})

    return make


CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": _config("Qwen3Config", head_dim=32),
    "qwen3-tied": _config("Qwen3Config", head_dim=32, tie_word_embeddings=True),
    "qwen2": _config("Qwen2Config"),
    "llama": _config("LlamaConfig"),
    "llama-tied": _config("LlamaConfig", tie_word_embeddings=True),
    "mistral": _config("MistralConfig", head_dim=32, sliding_window=None),
    "gemma2": _config("Gemma2Config", head_dim=32, query_pre_attn_scalar=16, tie_word_embeddings=True),
    "phi3": _config("Phi3Config"),
    # One KV head: with two engine workers each holds a copy of it.
    "qwen3-moe": _config(
        "Qwen3MoeConfig",
        head_dim=32,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
    ),
}


def build(name: str, weights: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model `name` with the weights that `weights`, any text, stands for."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    fill(model, weights)
    return model


def fill(model: nn.Module, weights: str) -> None:
    """Overwrite the parameters in place, sharded or not, with the values that `weights` stands for: the same on every
    rank, drawn in float32 and rounded to the parameter's dtype."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(f"{weights} {name}".encode()))
            value = torch.randn(param.shape, generator=draw)
            if param.dim() > 1:
                value *= 0.08
            elif name.endswith(".bias"):
                value *= 0.1
            else:
                value = 1 + 0.1 * value
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(value)


def save(model: nn.Module, folder: Path) -> Path:
    """The checkpoint of `model`, for an engine to start from."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def shard(model: nn.Module) -> nn.Module:
    """Collective: every trainer rank calls this. FSDP2 around every layer and around the whole model."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return model
