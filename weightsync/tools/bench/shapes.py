"""The models of a benchmark: configurations of known families, written out, without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

_COMMON: dict[str, Any] = {
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DENSE = {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
_QWEN2 = {**_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
_LLAMA = {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
_EXPERTS = {
    **_DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_experts_per_tok": 8}
# For the other fields, transformers has DeepSeek-V3's values.
_DEEPSEEK = {**_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_ROUTING}
_KIMI = {
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
}
_TINY = {"head_dim": 32, "vocab_size": 256}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _shape(family: dict[str, Any], *sizes: int, **more: Any) -> dict[str, Any]:
    return {**family, **dict(zip(_SIZES, sizes, strict=True)), **more}


def _experts(number: int, chosen: int, size: int) -> dict[str, int]:
    return {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": size}


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(_DENSE, 128, 256, 2, 4, 2, **_TINY),
    "tiny-moe": _shape(_EXPERTS, 128, 256, 2, 4, 2, **_TINY, **_experts(16, 2, 128)),
    "small": _shape(_DENSE, 512, 512, 2, 4, 2, vocab_size=256),
    "0.5B": _shape(_QWEN2, 896, 4864, 24, 14, 2),
    "1.5B": _shape(_QWEN2, 1536, 8960, 28, 12, 2),
    "4B": _shape(_DENSE, 2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "8B": _shape(_DENSE, 4096, 12288, 36, 32, 8),
    "14B": _shape(_DENSE, 5120, 17408, 40, 40, 8),
    "30B-A3B": _shape(_EXPERTS, 2048, 6144, 48, 32, 4, **_experts(128, 8, 768)),
    "32B": _shape(_DENSE, 5120, 25600, 64, 64, 8),
    "70B": _shape(_LLAMA, 8192, 28672, 80, 64, 8, rms_norm_eps=1e-5, rope_theta=500_000.0),
    "DeepSeek-V3": _shape(_DEEPSEEK, 7168, 18432, 61, 128, 128, vocab_size=129280, n_routed_experts=256),
    "Kimi-K2": _shape(_DEEPSEEK, 7168, 18432, 61, 64, 64, vocab_size=163840, **_KIMI),
}
"""Hugging Face's config.json by name: Qwen2.5 (0.5B, 1.5B), Qwen3 (4B to 32B, 30B-A3B), Llama 3 (70B), and two more.

The layers of DeepSeek-V3 that predict further tokens are left out. Trainers of transformers have none.
"""


def cut_layers(shapes: Sequence[str], layers: int) -> list[str]:
    """Add each shape with its first layers alone to `SHAPES`, and return the names."""
    found = {f"{name}-{layers}-layers": {**SHAPES[name], "num_hidden_layers": layers} for name in shapes}
    SHAPES.update(found)
    return list(found)


def write_config(shape: str, folder: Path, **changes: Any) -> Path:
    """Write the config.json of `shape` into `folder`, with `changes` to its fields, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], **changes}, indent=2))
    return folder


def add_shapes(file: Path) -> list[str]:
    """Add the models of a JSON file of config.json's by name to `SHAPES`, and return their names.

    Raise `ConfigError` for any other file.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--families {file}: {error}") from error
    needed = {"architectures", "model_type", *_SIZES}
    for name, config in found.items() if isinstance(found, dict) else [(str(file), found)]:
        if missing := needed - set(config if isinstance(config, dict) else ()):
            raise ConfigError(f"--families {file}: {name} has no {sorted(missing)[0]}; expected config.json's by name")
    SHAPES.update(found)
    return list(found)
