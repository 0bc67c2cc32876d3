"""Constants computed by constructors and registered nowhere, such as ALiBi's slopes or a norm's ones.

Sleep of level 2 discards them: vLLM brings buffers back, and a push fills parameters. Workers note them at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

_LARGEST_NBYTES = 4 * 2**20
"""Larger tensors are noted only if they hold zeros. The others are scratch memory."""
_OF_CACHES = "kv_cache", "_k_scale_cpu", "_v_scale_cpu", "q_range", "k_range", "v_range"
"""Attributes of attention for the KV cache and its scales. Every model has some of them."""

Place = tuple[str, str, int]
"""A tensor's module or kernel, its attribute, and its place in the attribute's list."""


def unregistered(model: nn.Module, prefix: str = "") -> dict[Place, torch.Tensor]:
    """Return the tensors of modules and attention kernels, without parameters and buffers."""
    registered = {id(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors}
    return {place: tensor for place, tensor in _attributes(model, prefix) if id(tensor) not in registered}


def _attributes(model: nn.Module, prefix: str) -> Iterator[tuple[Place, torch.Tensor]]:
    for path, module in model.named_modules(prefix=prefix):
        for owner, at in ((module, path), (getattr(module, "impl", None), f"{path}.impl")):
            for key, value in getattr(owner, "__dict__", {}).items():
                for n, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                    if isinstance(item, torch.Tensor) and item.numel() and key not in _OF_CACHES:
                        yield (at, key, n), item


class NotedConstants:
    """The unregistered tensors of running models, and their values at the engine's start."""

    def __init__(self, models: Sequence[nn.Module], prefixes: Sequence[str]) -> None:
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        filled = {tensor.untyped_storage().data_ptr() for tensor in tensors}  # views of these change with a push
        self._noted = {
            place: (tensor, tensor.to("cpu", copy=True) if is_small(tensor) else tensor.new_zeros(()))
            for model, prefix in zip(models, prefixes, strict=False)
            for place, tensor in unregistered(model, prefix).items()
            if tensor.untyped_storage().data_ptr() not in filled
            and (is_small(tensor) or not tensor.contiguous().view(torch.uint8).any())  # 8-bit floats have no `any`
        }

    def restore(self, constructed: dict[Place, torch.Size]) -> None:
        """Write the noted values of tensors from a constructor. Other tensors are made of weights, or are the cache."""
        for place, (tensor, value) in self._noted.items():
            if constructed.get(place) == tensor.shape:
                tensor.copy_(value)


def is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= _LARGEST_NBYTES
