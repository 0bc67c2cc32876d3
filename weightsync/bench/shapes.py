"""The models that are benchmarked: configurations of known families, written out, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        **more,
    }


_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(128, 256, 2, 4, 2, head_dim=32, vocab_size=256),
    "tiny-moe": _qwen3(
        128,
        256,
        2,
        4,
        2,
        head_dim=32,
        vocab_size=256,
        **_EXPERTS,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
    ),
    "0.5B": _qwen2(896, 4864, 24, 14, 2),
    "1.5B": _qwen2(1536, 8960, 28, 12, 2),
    "4B": _qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "8B": _qwen3(4096, 12288, 36, 32, 8),
    "14B": _qwen3(5120, 17408, 40, 40, 8),
    "30B-A3B": _qwen3(
        2048, 6144, 48, 32, 4, **_EXPERTS, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "32B": _qwen3(5120, 25600, 64, 64, 8),
    "70B": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
}
"""By name: Hugging Face's config.json of Qwen2.5 (0.5B, 1.5B), Qwen3 (4B to 32B, 30B-A3B) and Llama 3 (70B)."""


def write_config(shape: str, folder: Path) -> Path:
    """Write the config.json of `shape` into `folder`, which is made; gives `folder`. Raises `ConfigError` for a shape
    that there is not."""
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; choose from {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    return folder
