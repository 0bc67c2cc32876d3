"""Tiny random checkpoints in the forms that the hub has, where these are not what `save_pretrained` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import quantised_checkpoints
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def write(form: str, weights: str, folder: Path) -> Path:
    """Write the checkpoint of these weights in this form."""
    model, change = FORMS[form]
    return change(tiny_models.build(model, weights), folder)


def trainer(form: str, checkpoint: Path) -> nn.Module:
    """Return the trainer's model, loaded as users do. One of a quantised checkpoint has the weights before that."""
    from transformers import AutoModelForCausalLM

    if form.startswith("FP8"):
        return tiny_models.build(FORMS[form][0], "A")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return model


def _saved(model: nn.Module, folder: Path) -> Tensors:
    tiny_models.save(model, folder)
    return load_file(folder / FILE)


def _write(tensors: Tensors, folder: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE, {"format": "pt"})
    return folder


def _as_saved(model: nn.Module, folder: Path) -> Path:
    return tiny_models.save(model, folder)


def _with_head(model: nn.Module, folder: Path) -> Path:
    tensors = _saved(model, folder)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    return _write(tensors, folder)


def with_another_head(model: nn.Module, folder: Path) -> Path:
    """A head that is not the embedding, under a config that says tied."""
    tensors = _saved(model, folder)
    return _write(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).clone()}, folder)


def _with_head_in_shards(model: nn.Module, folder: Path) -> Path:
    return _in_shards(_with_head(model, folder))


def _in_shards(folder: Path) -> Path:
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + 2 * at // len(names):05d}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _saved_in_shards(model: nn.Module, folder: Path) -> Path:
    return _in_shards(tiny_models.save(model, folder))


def _beside_the_original(model: nn.Module, folder: Path) -> Path:
    """Meta's own files, in a folder beside, have other names and other weights here."""
    tiny_models.save(model, folder)
    (folder / "original").mkdir()
    torch.save({"tok_embeddings.weight": torch.zeros(251, 128)}, folder / "original" / "consolidated.00.pth")
    (folder / "original" / "params.json").write_text(json.dumps({"dim": 128, "n_layers": 2}))
    return folder


def _beside_pickles(model: nn.Module, folder: Path) -> Path:
    """The same tensors in the older format, as many repositories keep them, of other values here.

    Llama 2's have the rotary frequencies of each layer.
    """
    tensors = _saved(model, folder)
    tensors |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(16) for layer in (0, 1)}
    _write(tensors, folder)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    return folder


def _with_norms_in_float32(model: nn.Module, folder: Path) -> Path:
    tensors = _saved(model, folder)
    return _write({name: t.float() if name.endswith("norm.weight") else t for name, t in tensors.items()}, folder)


def _with_one_more_layer(model: nn.Module, folder: Path) -> Path:
    """DeepSeek-V3's layer that predicts one token more, which its config counts apart."""
    tensors = _saved(model, folder)
    last, more = "model.layers.1.", "model.layers.2."
    tensors |= {more + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    hidden = tensors["model.norm.weight"]
    tensors |= {f"{more}{name}.weight": hidden.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{more}eh_proj.weight"] = torch.zeros(len(hidden), 2 * len(hidden), dtype=hidden.dtype)
    tensors[f"{more}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{more}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return _write(tensors, folder)


def _without_prefix(model: nn.Module, folder: Path) -> Path:
    """GPT-2's names lack `transformer.`, and each layer has its mask."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in _saved(model, folder).items()}
    mask = torch.tril(torch.ones(1, 1, 512, 512))
    return _write(tensors | {f"h.{layer}.attn.bias": mask.clone() for layer in (0, 1)}, folder)


def _fp8_dynamic(model: nn.Module, folder: Path) -> Path:
    ignored = [f"model.layers.{name}" for name in ("0.mlp.gate_proj", "0.mlp.up_proj", "1.self_attn.o_proj")]
    return quantised_checkpoints.save(model, "FP8-dynamic", folder, ignored=["lm_head", *ignored])


def _fp8_dynamic_with_head(model: nn.Module, folder: Path) -> Path:
    return quantised_checkpoints.save(model, "FP8-dynamic", folder)  # of the state dict, which has the tied head too


FORMS: dict[str, tuple[str, Callable[[nn.Module, Path], Path]]] = {
    "Qwen3-0.6B, tied, and with its head": ("qwen3-tied", _with_head),
    "Qwen3-1.7B, tied, and with its head, in shards": ("qwen3-tied", _with_head_in_shards),
    "Qwen2.5-0.5B, tied": ("qwen2.5", _as_saved),
    "Llama-3.2-1B, tied, beside the original": ("llama-tied", _beside_the_original),
    "Gemma-3-1B, tied": ("gemma3", _as_saved),
    "Qwen3-30B-A3B, a tensor for each expert": ("qwen3-moe", _saved_in_shards),
    "Mixtral, a tensor for each expert": ("mixtral", _as_saved),
    "DeepSeek-V3, with one more layer": ("deepseek-v3", _with_one_more_layer),
    "GPT-2, without the prefix": ("gpt2", _without_prefix),
    "dots.llm1, a buffer that modules share": ("dots1", _as_saved),
    "HRM-Text, which is loaded in parts of one tensor": ("hrm-text", _as_saved),
    "Qwen3, norms in float32": ("qwen3", _with_norms_in_float32),
    "Llama 2, with rotary frequencies, beside pickles": ("llama2", _beside_pickles),
    "FP8-dynamic, with modules that are left as they are": ("qwen2", _fp8_dynamic),
    "FP8-dynamic, tied, and with its head": ("qwen3-tied", _fp8_dynamic_with_head),
}
"""What stands for the form: a model of `tiny_models`, and what writes its checkpoint."""
