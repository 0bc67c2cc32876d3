"""Tiny vision-language models with random weights, and processors for them that need no network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

_TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 244,
}
_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_TOKENS = dict(
    zip(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        range(240, 244),
        strict=True,
    )
)
_GEMMA_TOKENS = {"image_token_index": 240, "boi_token_index": 242, "eoi_token_index": 243, "mm_tokens_per_image": 4}
PROMPTS = {
    "llava": "<|image_pad|> t5 t6 t7",
    "gemma3": "<|vision_start|> t5 t6 t7",
    "llava-onevision": "<|image_pad|> t5 t6 t7",
    "mistral3": "<|image_pad|> t5 t6 t7",
}
"""What asks about one picture, where it is not Qwen's form."""
QWEN_PROMPT = "<|vision_start|> <|image_pad|> <|vision_end|> t5 t6 t7"
KINDS = (
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "gemma3",
    "llava",
    "llava-onevision",
    "mistral3",
    "qwen3.5",
    "qwen3.5-moe",
)


def make_vision_model(kind: str, folder: Path, device: torch.device) -> nn.Module:
    """Return a model in bfloat16 on `device`, and write what an engine needs of it to `folder`, but for its weights."""
    config, processor = _DESCRIPTIONS[kind]()
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText

    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    _tokenizer(kind).save_pretrained(folder)
    for file, content in processor.items():
        (folder / file).write_text(json.dumps(content))
    if config.vision_config.model_type in ("siglip_vision_model", "clip_vision_model"):
        # One that was never loaded is saved without the `vision_model` of published checkpoints, which vLLM wants.
        (weights,) = folder.glob("*.safetensors")
        names = re.compile(r"\bvision_tower\.(?!vision_model)")
        published = {names.sub("vision_tower.vision_model.", name): t for name, t in load_file(weights).items()}
        save_file(published, weights, metadata={"format": "pt"})
    model: nn.Module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device)


def _tokenizer(kind: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(240)}
    words |= {
        word: 240 + i for i, word in enumerate((*_SPECIAL, "<|endoftext|>", "<unk>", *("\n" * n for n in range(1, 5))))
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    if kind == "gemma3":
        named |= {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>"}
    special = {"additional_special_tokens": list(_SPECIAL), "extra_special_tokens": named}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", pad_token="<|endoftext|>", unk_token="<unk>", **special
    )


def _qwen(
    name: str, patch: int, sections: list[int], vision: dict[str, Any], text: dict[str, Any] | None = None, **rope: Any
) -> Any:
    import transformers

    scaling = {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e6, **rope}
    own = {"depth": 2, "num_heads": 4, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = {**_TEXT, "rope_parameters": scaling, **(text or {})}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config={**own, **vision}, tie_word_embeddings=False, **_QWEN_TOKENS
    )
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{'Qwen3VL' if name.startswith('Qwen3') else name}Processor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    video = "Qwen3VLVideoProcessor" if name.startswith("Qwen3") else "Qwen2VLVideoProcessor"
    files = {
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": {**image, "video_processor_type": video},
    }
    return config, files


def _qwen2() -> Any:
    vision = {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
    return _qwen("Qwen2VL", 14, [4, 6, 6], vision)


def _qwen2_5() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128}
    return _qwen("Qwen2_5_VL", 14, [4, 6, 6], {**sizes, "fullatt_block_indexes": [1], "window_size": 112})


def _qwen3() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128}
    more = {"deepstack_visual_indexes": [0], "num_position_embeddings": 256}
    return _qwen("Qwen3VL", 16, [6, 5, 5], {**sizes, **more}, mrope_interleaved=True)


def _qwen3_5(name: str = "Qwen3_5", **more: Any) -> Any:
    """Return one whose layers have linear attention, but for the last."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 128, "num_position_embeddings": 256}
    own = {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 64,  # of which a quarter is rotated
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    return _qwen(name, 16, [3, 3, 2], sizes, {**own, **more}, mrope_interleaved=True, partial_rotary_factor=0.25)


def _qwen3_5_moe() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2}
    return _qwen3_5("Qwen3_5Moe", **sizes, moe_intermediate_size=128, shared_expert_intermediate_size=128)


_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
_SIGLIP = {**_TOWER, "vision_use_head": False}


def _gemma3() -> Any:
    from transformers import Gemma3Config

    text = {
        **_TEXT,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    config = Gemma3Config(text_config=text, vision_config=_SIGLIP, **_GEMMA_TOKENS)
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_seq_length": 4,
    }
    return config, {
        "preprocessor_config.json": image,
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    }


def _llava() -> Any:
    """The output of the tower's last layer but one is used, so vLLM runs no last one."""
    from transformers import LlavaConfig

    config = LlavaConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 64},
        image_token_index=240,
        tie_word_embeddings=False,
    )
    image = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    own = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        "image_token": "<|image_pad|>",
    }
    return config, {"preprocessor_config.json": image, "processor_config.json": own}


def _llava_onevision() -> Any:
    from transformers import LlavaOnevisionConfig

    config = LlavaOnevisionConfig(
        text_config={**_TEXT, "model_type": "qwen2"},
        vision_config={**_SIGLIP, "model_type": "siglip_vision_model"},
        image_token_index=240,
        video_token_index=241,
        image_grid_pinpoints=[[56, 56], [56, 112], [112, 56]],
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=False,
    )
    image = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56]],
    }
    own = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
    }
    video = {
        "video_processor_type": "LlavaOnevisionVideoProcessor",
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return config, {
        "preprocessor_config.json": image,
        "processor_config.json": own,
        "video_preprocessor_config.json": video,
    }


def _mistral3() -> Any:
    from transformers import Mistral3Config

    config = Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral"},
        vision_config={**_TOWER, "model_type": "pixtral", "head_dim": 16, "hidden_act": "gelu"},
        image_token_index=240,
        tie_word_embeddings=False,
    )
    image = {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 14, "width": 14},
        "size": {"longest_edge": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    own = {
        "processor_class": "PixtralProcessor",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_start|>",
        "image_end_token": "<|vision_end|>",
    }
    return config, {"preprocessor_config.json": image, "processor_config.json": own}


_DESCRIPTIONS = {
    "qwen2-vl": _qwen2,
    "qwen2.5-vl": _qwen2_5,
    "qwen3-vl": _qwen3,
    "qwen3.5": _qwen3_5,
    "qwen3.5-moe": _qwen3_5_moe,
    "gemma3": _gemma3,
    "llava": _llava,
    "llava-onevision": _llava_onevision,
    "mistral3": _mistral3,
}
