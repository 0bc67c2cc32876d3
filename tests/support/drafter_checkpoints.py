"""Checkpoints of models that draft tokens: with layers for the next token but one, or with an EAGLE head beside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch
from engines import Engines
from torch import nn

MTP = {"method": "mtp", "num_speculative_tokens": 1}


def mimo(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A Qwen2 becomes a MiMo: one layer more, under names of its own."""
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("layers.1", "mtp_layers.0")] = tensors[name]
    width = len(tensors["model.norm.weight"])
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{name}.weight"] = torch.empty(width)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.empty(width, 2 * width)
    return {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def deepseek(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One layer more, with copies of the embeddings and of the head, which vLLM replaces by the model's own."""
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("layers.1", "layers.2")] = tensors[name]
    width = len(tensors["model.norm.weight"])
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.2.{name}.weight"] = torch.empty(width)
    tensors["model.layers.2.eh_proj.weight"] = torch.empty(width, 2 * width)
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"]
    return {"num_nextn_predict_layers": 1}


LAYOUTS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, Any]]]] = {
    "mimo": ("qwen2", mimo),
    "deepseek-v3": ("deepseek-v3", deepseek),
}


def checkpoint(engines: Engines, layout: str, weights: str) -> Path:
    """The checkpoint of a layout, every tensor of which has the values that `weights` and its name stand for."""
    from safetensors.torch import load_file, save_file

    plain, add = LAYOUTS[layout]
    source = engines.checkpoint(plain, weights)
    folder = source.with_name(f"{layout}-mtp-{weights}")
    if not folder.exists():
        folder.mkdir()
        tensors = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text()) | add(tensors)
        save_file({name: tensor.bfloat16().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
        model = tiny_models.as_saved(folder)
        tiny_models.fill(model, weights)
        save_file(model.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    return folder


DRAFT_VOCABULARY = 64


def eagle(engines: Engines, method: str, weights: str) -> tuple[Path, Path, nn.Module]:
    """A Llama and an EAGLE head for it, each as a checkpoint of its own, and a trainer that has both."""
    from safetensors.torch import load_file, save_file

    source = engines.checkpoint("llama", weights)
    tensors = load_file(source / "model.safetensors")
    width = len(tensors["model.norm.weight"])
    layer = "midlayer" if method == "eagle3" else "layers.0"
    head = {
        name.replace("model.layers.0", layer): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    own = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    if method == "eagle3":
        for name in ("q_proj", "k_proj", "v_proj"):  # its layer is given embeddings and states, side by side
            rows = len(head[f"midlayer.self_attn.{name}.weight"])
            head[f"midlayer.self_attn.{name}.weight"] = torch.empty(rows, 2 * width)
        head |= {"midlayer.hidden_norm.weight": torch.empty(width), "norm.weight": torch.empty(width)}
        head |= {"fc.weight": torch.empty(width, 2 * width), "lm_head.weight": torch.empty(DRAFT_VOCABULARY, width)}
        own |= {
            "draft_vocab_size": DRAFT_VOCABULARY,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]},  # the model has no more layers
        }
    else:
        del head["layers.0.input_layernorm.weight"]
        head |= {"fc.weight": torch.empty(width, 2 * width)}
    folder = source.with_name(f"llama-{method}-{weights}")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | own))
    save_file({name: tensor.bfloat16().clone() for name, tensor in head.items()}, folder / "model.safetensors")
    trainer, drafter = tiny_models.as_saved(source), tiny_models.as_saved(folder)
    trainer.add_module("drafter", drafter)
    tiny_models.fill(trainer, weights)
    if method == "eagle3":
        # Which token each of its own stands for: the difference, counted from its own number.
        step = {"A": 1, "B": 2}[weights]
        drafter.d2t = nn.Parameter(torch.arange(DRAFT_VOCABULARY) * step, requires_grad=False)
    save_file(drafter.state_dict(), folder / "model.safetensors")
    return source, folder, trainer
