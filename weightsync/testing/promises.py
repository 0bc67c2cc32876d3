"""What the checks have in common: a broken promise is an `AssertionError` in plain words."""

from __future__ import annotations

import torch

from weightsync.layout import Box

PROMPT_S = 10.0
"""How soon a wait must end once there is a reason to."""


def require(condition: bool, words: str) -> None:
    if not condition:
        raise AssertionError(words)


def region(box: Box) -> tuple[slice, ...]:
    """The index of a box in its tensor."""
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
