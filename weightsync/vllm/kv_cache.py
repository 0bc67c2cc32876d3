"""The KV cache of a running vLLM, cleared if it holds NaN or infinity.

A block keeps the values of earlier requests. Kernels multiply the values after a request's last token by 0, and 0 times
NaN is NaN. NaN computed from bad weights therefore spoils requests after a push of good weights. A reset of vLLM's
prefix cache does not clear the blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightsync.kernels import finite

_LAYER = re.compile(r".*\.\d+(?=\.)")
_AT_ONCE_BYTES = 1 << 26
_LEAST_NON_FINITE = 0x7C
"""The smallest byte, without its sign bit, that may be NaN or infinity in a float8 (float8_e5m2's infinity)."""


def last_layers(layers: Mapping[str, Any], models: Sequence[nn.Module]) -> list[str]:
    """Return the names of the caching parts of each model's last layer. Call it once the engine has a cache.

    Parts in memory of several dtypes are left out: finite float32 states may be NaN as bfloat16. Where attention shares
    memory with states, vLLM itself zeroes each new block of attention.

    Args:
        layers: All attention and recurrent layers, by name, in the order of the forward.
        models: The model, and its drafter if there is one.
    """
    cached = _cached(layers)
    kinds = {(_address(each), each.dtype) for tensors in cached.values() for each in tensors}
    dtypes = Counter(address for address, _ in kinds)
    names = [name for model in models for name in _last_of(model, layers, cached)]
    return [name for name in names if all(dtypes[_address(each)] == 1 for each in cached[name])]


def begin_search(layers: Mapping[str, Any], last: Sequence[str]) -> Callable[[], bool]:
    """Queue a search of the caches of the `last` layers on their GPU. Return a function to call before the next step.

    If such a cache is not finite, the function clears the cache of all `layers`. It returns whether it has.

    NaN or infinity in a token's state persists in every following layer, so the last layer shows it.
    """
    looked_at = [tensor for name in last for tensor in _tensors(getattr(layers[name], "kv_cache", None))]
    floats = [tensor for tensor in looked_at if tensor.is_floating_point() and tensor.dtype.itemsize > 1]
    others = [tensor for tensor in looked_at if not tensor.is_floating_point() or tensor.dtype.itemsize == 1]
    search = finite.begin_search(floats)

    def clear() -> bool:
        if not search() and not any(map(_may_be_non_finite, others)):
            return False
        storages = {_address(each): each for tensors in _cached(layers).values() for each in tensors}
        for tensor in storages.values():
            # Torch refuses writes, outside of inference mode, to a tensor made in it. This is another tensor of the
            # same memory.
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).zero_()
        return True

    return clear


def _cached(layers: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Return the cache tensors of each layer, without layers that have no cache yet."""
    return {name: found for name, layer in layers.items() if (found := _tensors(getattr(layer, "kv_cache", None)))}


def _last_of(model: nn.Module, layers: Mapping[str, Any], cached: Collection[str]) -> list[str]:
    """Return the names of the caching parts of a model's last layer.

    A layer may have attention to itself and attention to an encoder.
    """
    own = set(model.modules())
    # A layer that reads another layer's cache stores nothing there.
    names = [n for n in cached if layers[n] in own and not getattr(layers[n], "kv_sharing_target_layer_name", None)]
    layer = _LAYER.match(names[-1]) if names else None
    return [name for name in names if name == names[-1] or (layer is not None and name.startswith(f"{layer[0]}."))]


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Return a layer's cache tensors. A cache is one tensor, or a list of tensors, or a list of such lists."""
    if isinstance(cache, torch.Tensor):
        return [cache] if cache.numel() and not cache.is_meta else []
    return [tensor for each in cache for tensor in _tensors(each)] if isinstance(cache, (list, tuple)) else []


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _may_be_non_finite(tensor: torch.Tensor) -> bool:
    """Return whether some byte of an 8-bit cache may be NaN or infinity.

    True for caches of other kinds: they may have scales.
    """
    if tensor.dtype.itemsize > 1 or tensor.dtype is torch.int8:
        return True
    # In parts, because the engine leaves little memory free. The first dimension may be keys and values alone.
    length, dim = max((length, dim) for dim, length in enumerate(tensor.shape))
    parts = tensor.view(torch.uint8).split(max(1, _AT_ONCE_BYTES * length // tensor.numel()), dim)
    return any(bool(((part & 0x7F) >= _LEAST_NON_FINITE).any()) for part in parts)
