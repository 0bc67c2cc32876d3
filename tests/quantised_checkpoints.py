"""Checkpoints in 8 bits, as llm-compressor writes them, made from a model by the quantiser that a push uses too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from weightsync.kernels.quantize import fp8_per_channel, int8_per_channel

SCHEMES: dict[str, tuple[str, str, Any]] = {
    "FP8-dynamic": ("float-quantized", "float", fp8_per_channel),
    "W8A8-int8": ("int-quantized", "int", int8_per_channel),
}


def save(model: nn.Module, scheme: str, folder: Path) -> Path:
    """Every linear layer but `lm_head` in the `scheme`, with a scale for each output channel."""
    from safetensors.torch import save_file

    layout, kind, quantise = SCHEMES[scheme]
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = f"{name}.weight"
            tensors[weight], tensors[f"{weight}_scale"] = quantise(tensors[weight])
    bits = {"num_bits": 8, "type": kind, "symmetric": True}
    config = model.config.to_dict() | {  # type: ignore[union-attr, operator]
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": layout,
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**bits, "strategy": "channel", "dynamic": False},
                    "input_activations": {**bits, "strategy": "token", "dynamic": True},
                }
            },
        }
    }
    config["architectures"] = [type(model).__name__]
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder
