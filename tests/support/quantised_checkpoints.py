"""Checkpoints in 8 bits, as llm-compressor and DeepSeek write them, made from a model by the quantiser that a push uses
too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightsync.kernels.quantize import BLOCK, fp8_per_block, fp8_per_channel, int8_per_channel
from weightsync.worker.checkpoint_quantize import mxfp4_experts

SCHEMES: dict[str, tuple[str, str, Any]] = {
    "FP8-dynamic": ("float-quantized", "float", fp8_per_channel),
    "W8A8-int8": ("int-quantized", "int", int8_per_channel),
}


def save(
    model: nn.Module,
    scheme: str,
    folder: Path,
    cache_scale: float | None = None,
    ignored: Sequence[str] = ("lm_head",),
) -> Path:
    """Every linear layer but those `ignored` in the `scheme`: with a scale for each output channel, or, for
    "FP8-block", for each block of 128 by 128. With `cache_scale`, an fp8 KV cache has that scale in every layer."""
    in_blocks = scheme == "FP8-block"
    layout, kind, quantise = ("", "", fp8_per_block) if in_blocks else SCHEMES[scheme]
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in ignored:
            weight = f"{name}.weight"
            tensors[weight], tensors[weight + ("_scale_inv" if in_blocks else "_scale")] = quantise(tensors[weight])
    # vLLM quantises a router too, unless the checkpoint says that it is left out, as those of the hub do.
    ignored = [*ignored, *(name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight"))]
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        for expert, weight in _experts_of(name, tensors.pop(name)):
            tensors[expert], tensors[expert + ("_scale_inv" if in_blocks else "_scale")] = quantise(weight)
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    if cache_scale is not None:
        for layer in range(model.config.num_hidden_layers):  # type: ignore[union-attr, arg-type]
            for kind in ("k_scale", "v_scale"):
                tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.tensor(cache_scale)
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    config = model.config.to_dict() | {  # type: ignore[union-attr, operator]
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": layout,
            "ignore": [*ignored],
            "kv_cache_scheme": cache if cache_scale is not None else None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**bits, "strategy": "channel", "dynamic": False},
                    "input_activations": {**bits, "strategy": "token", "dynamic": True},
                }
            },
        }
    }
    if in_blocks:
        scales = {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
        config["quantization_config"] = {"quant_method": "fp8", "ignored_layers": [*ignored], **scales}
    return _write(model, tensors, config, folder)


def _experts_of(name: str, fused: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a weight for each expert and projection, as the hub has them. fused: of all experts, (E, out, in)."""
    folder, _, projection = name.rpartition(".")
    for number, expert in enumerate(fused):
        if projection == "down_proj":
            yield f"{folder}.{number}.down_proj.weight", expert.contiguous()
        else:
            for each, weight in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                yield f"{folder}.{number}.{each}.weight", weight.contiguous()


def save_mxfp4(model: nn.Module, folder: Path) -> Path:
    """GPT-OSS with its experts in MXFP4, as its own checkpoints have them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4_experts(tensor.detach())
        else:
            tensors[name] = tensor.detach().contiguous()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = model.config.to_dict() | {  # type: ignore[union-attr, operator]
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    }
    return _write(model, tensors, config, folder)


def _write(model: nn.Module, tensors: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    named = config | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(named, default=str))
    return folder
