"""Weights that bitsandbytes has packed in 4 bits: they travel dequantised, as PEFT dequantises them for a merge."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.planning.layout import Box
from weightsync.sources.edits import Whole
from weightsync.sources.module_tree import walk


@dataclass(frozen=True, eq=False)
class FourBits:
    """The weight of one layer. An `Edit`.

    param: this rank's part of the packed weight, two values in a byte.
    state: bitsandbytes' scales, and the shape and dtype of the values.
    """

    param: torch.Tensor
    state: Any
    needs_whole = True

    def inputs(self) -> list[torch.Tensor]:
        return [self.param]

    def apply(self, values: torch.Tensor, box: Box, whole: Whole) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        dequantised: torch.Tensor = dequantize_4bit(values, self.state)
        return dequantised

    def settings(self) -> str:
        return ""


def packed_weights(model: nn.Module) -> dict[str, FourBits]:
    """Return the packed weights of a model, by name. Raise `UnsupportedError` for weights in 8 bits."""
    layers: Any = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    found: dict[str, FourBits] = {}
    for prefix, module in walk(model) if layers is not None else ():
        if isinstance(module, layers.Linear8bitLt):
            raise UnsupportedError(
                f"{prefix}weight is in bitsandbytes' 8 bits, which do not travel. Load the model in 4 bits or in "
                'bfloat16, push `model.dequantize()`, or send adapters alone by transport="lora"'
            )
        if isinstance(module, layers.Linear4bit):
            param: Any = module._parameters["weight"]
            # `fully_shard` replaces the parameter that had the state.
            state = getattr(param, "quant_state", None) or getattr(module, "quant_state", None)
            if state is not None:  # else not quantised yet
                found[f"{prefix}weight"] = FourBits(param, state)
    return found
