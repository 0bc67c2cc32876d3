"""The KV cache of a running vLLM, cleared where it holds NaN or infinity.

A block keeps what an earlier request has left there. Kernels multiply what lies behind a request's last token by a
weight of 0, and 0 times NaN is NaN. So NaN that bad weights have computed spoils requests after a push of good ones,
whatever vLLM's prefix cache has forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightsync.kernels.finite import find_non_finite

_LAYER = re.compile(r".*\.\d+(?=\.)")
_AT_ONCE_BYTES = 1 << 26
_LEAST_NON_FINITE = 0x7C
"""The smallest byte, without its sign, that may be no number in a float8: NaN or infinity of float8_e5m2."""


def last_layers(layers: Mapping[str, Any], models: Sequence[nn.Module]) -> list[str]:
    """Return the names of what the last layers cache in, once the engine has a cache.

    layers: those that cache anything, by name, in the order of the forward: attention and recurrent ones.
    models: the one that answers, and the one that drafts.
    """
    cached = _cached(layers)
    return [name for model in models for name in _last_of(model, layers, cached)]


def clear_non_finite(layers: Mapping[str, Any], last: Sequence[str]) -> bool:
    """Clear the cache of all `layers` where one of the `last` holds what is not finite. Return whether it did.

    What is not finite in a token's state stays so in every layer that follows, so the last one shows it.
    """
    looked_at = [tensor for name in last for tensor in _tensors(getattr(layers[name], "kv_cache", None))]
    floats = [tensor for tensor in looked_at if tensor.is_floating_point() and tensor.dtype.itemsize > 1]
    others = [tensor for tensor in looked_at if not tensor.is_floating_point() or tensor.dtype.itemsize == 1]
    if not any(map(_may_be_non_finite, others)) and not find_non_finite(floats):
        return False
    cached = _cached(layers)
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensors in cached.values() for tensor in tensors}
    for tensor in storages.values():
        # A tensor that was made in inference mode must not be written outside of it. This one is another.
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).zero_()
    return True


def _cached(layers: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Return what each layer caches in, without layers that have no cache yet."""
    return {name: found for name, layer in layers.items() if (found := _tensors(getattr(layer, "kv_cache", None)))}


def _last_of(model: nn.Module, layers: Mapping[str, Any], cached: Collection[str]) -> list[str]:
    """Return the names of what a model's last layer caches: it may have attention to itself and to an encoder."""
    own = set(model.modules())
    # One that reads another layer's cache stores nothing of its own there.
    names = [n for n in cached if layers[n] in own and not getattr(layers[n], "kv_sharing_target_layer_name", None)]
    if not names:
        return []
    layer = _LAYER.match(names[-1])
    return [name for name in names if name == names[-1] or (layer is not None and name.startswith(f"{layer[0]}."))]


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Return what a layer caches: one tensor, or a list of tensors, or of such lists."""
    if isinstance(cache, torch.Tensor):
        return [cache] if cache.numel() and not cache.is_meta else []
    return [tensor for each in cache for tensor in _tensors(each)] if isinstance(cache, (list, tuple)) else []


def _may_be_non_finite(tensor: torch.Tensor) -> bool:
    """Return whether some byte of a cache in 8 bits may stand for no number. Caches of other kinds may have scales."""
    if tensor.dtype.itemsize > 1 or tensor.dtype is torch.int8:
        return True
    rows = max(1, _AT_ONCE_BYTES * tensor.shape[0] // tensor.numel())  # the engine has little memory left
    parts = tensor.view(torch.uint8).split(rows)
    return any(bool(((part & 0x7F) >= _LEAST_NON_FINITE).any()) for part in parts)
