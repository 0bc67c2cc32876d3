"""Shallow models of the architectures that both vLLM and transformers have, for load plans alone.

A config keeps the sizes that its class gives it, which fit each other, and loses layers and experts. Nothing of it is
ever allocated.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from weightsync.planning.layout import Manifest, TensorMeta

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
_DEPTHS += ("conf_num_hidden_layers", "num_layers_per_stack")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_INDICES = ("full_attn_idxs", "deepstack_visual_indexes", "fullatt_block_indexes", "moe_layers", "hybrid_layer_ids")
_BY_LAYER = "per_layer_config"
_OTHER = {"first_k_dense_replace": 1, "num_dense_layers": 1}
"""A model of few layers has one that is dense, and the next has experts."""

SPELLED_OTHERWISE = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""vLLM's name of an architecture, and that of the class in transformers."""

_QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 64,
    "output_gate_type": "sigmoid",
}
_GEMMA4_VISION = {"vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 2}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8}},
    "DeepseekV2ForCausalLM": {"moe_intermediate_size": 1408},
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "FalconForCausalLM": {"hidden_size": 4096, "ffn_hidden_size": 16384, "num_attention_heads": 64},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [16384] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 1536,
        "route_norm": True,
        "qk_norm": True,
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "KimiLinearForCausalLM": {
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
    },
    "Lfm2ForCausalLM": {"block_dim": 2560, "conv_dim": 2560},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
        "zero_expert_num": 1,
    },
    "MiMoV2FlashForCausalLM": {
        "hybrid_layer_pattern": [0, 1, 0],
        "moe_layer_freq": [0, 1, 1],
        "layernorm_epsilon": 1e-5,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window_size": 128,
        "add_swa_attention_sink_bias": True,
    },
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "PhiMoEForCausalLM": {"attention_bias": True, "lm_head_bias": True},
    "Qwen4ExpForCausalLM": _QSA,
    # Multimodal.
    "Cohere2VisionForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "CohereCompassForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        "tie_word_embeddings": True,
    },
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 704},
        **_GEMMA4_VISION,
    },
    "Gemma3ForConditionalGeneration": {"vision_config": {"vision_use_head": False}},
    "Gemma4ForConditionalGeneration": _GEMMA4_VISION,
    "Gemma4UnifiedForConditionalGeneration": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "GlmOcrForConditionalGeneration": {"text_config": {"intermediate_size": 4608}},
    "Glm4vForConditionalGeneration": {"text_config": {"attention_bias": True}},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128, "use_qk_norm": False}},
    "Granite4VisionForConditionalGeneration": {"text_config": {"model_type": "granite"}},
    "HunYuanVLForConditionalGeneration": {"text_config": {"head_dim": 128}},
    "Idefics3ForConditionalGeneration": {"text_config": {"vocab_size": 128256}},
    "Lfm2VlForConditionalGeneration": {
        "text_config": {"block_dim": 2560, "conv_dim": 2560},
        "vision_config": {"vision_use_head": False},
    },
    "Qwen3OmniMoeForConditionalGeneration": {
        "thinker_config": {"vision_config": {"image_size": 768}},
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 768}, "spatial_merge_size": 2},
    },
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"norm_topk_prob": True}},
    "Qwen4ExpForConditionalGeneration": {
        "text_config": _QSA,
        "vision_config": {"deepstack_visual_indexes": []},
    },
    "SmolVLMForConditionalGeneration": {"text_config": {"vocab_size": 128256}},
    "VoxtralForConditionalGeneration": {"audio_config": {"downsample_factor": 4}},
}


def shallow(fields: dict[str, Any]) -> None:
    """Take layers and experts away from what a config.json says, and from the parts within. Of layers that differ, the
    first of each kind stays."""
    for value in fields.values():
        if isinstance(value, dict) and "model_type" in value:
            shallow(value)
    if (depth := next((fields[key] for key in _DEPTHS if isinstance(fields.get(key), int)), None)) is not None:
        if by_layer := fields.get(_BY_LAYER):
            by_layer = {int(n): own for n, own in by_layer.items()}
            fields[_BY_LAYER] = [by_layer.get(n) for n in range(depth)]
        each = [key for key, value in fields.items() if isinstance(value, list) and len(value) == depth]
        each = [key for key in each if key not in _INDICES]
        kinds = [repr([fields[key][n] for key in each]) for n in range(depth)]
        kept = [n for n, kind in enumerate(kinds) if kinds.index(kind) == n]
        if len(kept) == 1:
            kept = list(range(min(depth, 2)))
        fields |= {key: [fields[key][n] for n in kept] for key in each}
        if by_layer:
            fields[_BY_LAYER] = {n: own for n, own in enumerate(fields[_BY_LAYER]) if own is not None}
        fields |= {key: len(kept) for key in _DEPTHS if isinstance(fields.get(key), int)}
        fields |= {key: list(range(len(kept))) for key in _INDICES if fields.get(key)}
    fields |= {key: min(value, 16) for key in _EXPERTS if isinstance(value := fields.get(key), int)}
    fields |= {key: min(value, fields[key]) for key, value in _OTHER.items() if isinstance(fields.get(key), int)}


def _own(config: Any) -> dict[str, Any]:
    """Return what a config.json would say of this class alone: some take no other fields."""
    from transformers import PretrainedConfig

    common = PretrainedConfig().to_dict()

    def own(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            key: own(value) if isinstance(value, dict) and "model_type" in value else value
            for key, value in fields.items()
            if key == "model_type" or key not in common or value != common[key]
        }

    return own(config.to_dict())


def merge(fields: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(fields.get(key), dict):
            merge(fields[key], value)
        else:
            fields[key] = value


def trainer_class(architecture: str) -> Any:
    """Return the class that transformers trains a vLLM architecture with, or None."""
    import transformers

    return getattr(transformers, SPELLED_OTHERWISE.get(architecture, architecture), None)


def build(architecture: str, folder: Path) -> Any:
    """Return a model on the `meta` device, and write its config.json to `folder`."""
    import torch

    kind = trainer_class(architecture)
    fields = _own(kind.config_class())
    shallow(fields)
    merge(fields, OVERRIDES.get(architecture, {}))
    config = kind.config_class.from_dict({**fields, "dtype": "bfloat16"})
    config.architectures = [architecture]
    config.save_pretrained(folder)
    with torch.device("meta"):
        return kind._from_config(config)


def checkpoint_tensors(model: Any, published: bool) -> Manifest:
    """Return the tensors that a trainer of the model sends.

    published: the model has the conversions that transformers attaches when it loads a published checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    from weightsync.selection import TensorSelection
    from weightsync.sources.hf_checkpoint import manifest_of, saved_form

    if published:
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    tensors: dict[int, TensorMeta] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    return manifest_of(saved_form(model, list(tensors.values()), TensorSelection()))


def stand_in(*packages: str) -> None:
    """Let imports of packages succeed that are not installed. Only what prepares pictures and sounds uses them."""
    from transformers.utils import import_utils

    missing = {package for package in packages if find_spec(package) is None}
    for package in missing:
        getattr(import_utils, f"is_{package}_available")()  # remembered: transformers is not to choose them
    sys.meta_path.append(_Finder(missing))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] in self._packages
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()
