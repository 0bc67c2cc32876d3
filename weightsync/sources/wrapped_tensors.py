"""Tensor subclasses of trainers around a plain tensor, as torchao makes them for training in 8 bits.

Such a parameter has the values of its plain tensor. It quantises them when FSDP gathers it, or when a product reads it.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_FOR_TRAINING = (
    "torchao.float8.",
    "torchao.prototype.moe_training.",
    "torchao.prototype.quantized_training.int8_mixed_precision",
)


def inner_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor with the values of a wrapper for training. Return any other tensor itself."""
    if not type(tensor).__module__.startswith(_FOR_TRAINING) or not is_traceable_wrapper_subclass(tensor):
        return tensor
    attributes, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, attribute) for attribute in attributes):
        if (inner.dtype, inner.shape, inner.stride()) == (tensor.dtype, tensor.shape, tensor.stride()):
            return inner
    return tensor  # its values are quantised already
