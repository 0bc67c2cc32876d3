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


_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # the kernels for CPUs take 512 + 64 only
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

_GPT_OSS: dict[str, Any] = {
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}

_DEEPSEEK_BLOCKS = _DEEPSEEK | {
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama-tied": _config("LlamaConfig", tie_word_embeddings=True),
    "llama2": _config("LlamaConfig", num_key_value_heads=4),
    # What two workers share evenly, but for the KV head, of which each holds a copy.
    "llama-even": _config("LlamaConfig", vocab_size=256, num_key_value_heads=1),
    "llama3": _config(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "deepseek-coder": _config(
        "LlamaConfig", rope_parameters={"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0}
    ),
    "yi": _config("LlamaConfig", num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 5e6}),
    "mistral": _config("MistralConfig", head_dim=32, sliding_window=None),
    "mixtral": _config("MixtralConfig", head_dim=32, num_local_experts=4),
    "qwen2": _config("Qwen2Config"),
    "qwen2.5": _config("Qwen2Config", tie_word_embeddings=True, rms_norm_eps=1e-6, use_sliding_window=False),
    # Enough tensors in layers that are alike for a trace by example.
    "qwen2-moe": _config(
        "Qwen2MoeConfig",
        num_hidden_layers=6,
        num_experts=112,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    ),
    "qwen3": _config("Qwen3Config", head_dim=32),
    "qwen3-tied": _config("Qwen3Config", head_dim=32, tie_word_embeddings=True),
    # Whole blocks of 128 by 128, whichever layers are fused.
    "qwen3-blocks": _config("Qwen3Config", head_dim=128, num_attention_heads=2, num_key_value_heads=1),
    "qwen3-moe-blocks": _config(
        "Qwen3MoeConfig",
        head_dim=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=32,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        decoder_sparse_step=1,
    ),
    "deepseek-v3-blocks": _config("DeepseekV3Config", **_DEEPSEEK_BLOCKS, n_group=2, topk_method="noaux_tc"),
    "deepseek-dense-blocks": _config("DeepseekV3Config", **_DEEPSEEK_BLOCKS | {"first_k_dense_replace": 2}, n_group=2),
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
    # What two workers share unevenly.
    "qwen3-moe-of-5": _config(
        "Qwen3MoeConfig",
        head_dim=32,
        num_key_value_heads=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
    ),
    "qwen3-next": _config(
        "Qwen3NextConfig",
        head_dim=64,  # of which a quarter is rotated
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "phi2": _config("PhiConfig", num_key_value_heads=4),
    "phi3": _config("Phi3Config"),
    "gemma": _config("GemmaConfig", head_dim=32, tie_word_embeddings=True),
    "gemma2": _config("Gemma2Config", head_dim=32, query_pre_attn_scalar=16, tie_word_embeddings=True),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=32,
        query_pre_attn_scalar=16,
        tie_word_embeddings=True,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek-v2": _config("DeepseekV2Config", **_DEEPSEEK, n_group=1),
    "deepseek-v3": _config("DeepseekV3Config", **_DEEPSEEK, n_group=2, topk_method="noaux_tc"),
    "glm4-moe": _config(
        "Glm4MoeConfig",
        head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    "dots1": _config(
        "Dots1Config",
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "starcoder2": _config("Starcoder2Config", tie_word_embeddings=True, sliding_window=None),
    "olmo2": _config("Olmo2Config"),
    "smollm3": _config("SmolLM3Config", tie_word_embeddings=True),
    "granite": _config("GraniteConfig", tie_word_embeddings=True),
    "gpt-oss": _config("GptOssConfig", **_GPT_OSS),
    "gpt-oss-wide": _config("GptOssConfig", hidden_size=256, intermediate_size=256, **_GPT_OSS),
    # The widths of the published 20 B, which kernels pad, with fewer experts and layers.
    "gpt-oss-20b": _config(
        "GptOssConfig",
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        **_GPT_OSS | {"sliding_window": 128},
    ),
    "gpt2": _config("GPT2Config", n_embd=128, n_layer=2, n_head=4, n_positions=512, tie_word_embeddings=True),
    "bloom": _config("BloomConfig", n_layer=2, n_head=4, tie_word_embeddings=True),
    "apertus": _config("ApertusConfig"),
    "hrm-text": _config("HrmTextConfig", num_layers_per_stack=1, head_dim=32),
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


def tied(kind: str, first: str, second: str, *names: str) -> Any:
    """A model with weights "A". Its layer `second` has these tensors of its layer `first`, as if code tied them."""
    model = build(kind, "A")
    for name in names:
        module, _, tensor = name.rpartition(".")
        own = model.model.get_submodule(f"{first}.{module}")
        setattr(model.model.get_submodule(f"{second}.{module}"), tensor, getattr(own, tensor))
    return model


def save(model: nn.Module, folder: Path) -> Path:
    """The checkpoint of `model`, for an engine to start from."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def as_saved(checkpoint: Path) -> nn.Module:
    """A trainer that is no transformers model: a tree of plain modules with a checkpoint's tensors under its names."""
    from safetensors.torch import load_file

    model = nn.Module()
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor))
    return model


def shard(model: nn.Module) -> nn.Module:
    """Collective: every trainer rank calls this. FSDP2 around every layer and around the whole model."""
    from torch.distributed.fsdp import fully_shard

    layers = model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers  # type: ignore[union-attr]
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    return model
