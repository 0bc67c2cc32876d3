"""Modules with computed values in their `state_dict`, such as a norm stored around zero.

A checkpoint has the values of `state_dict`, and engines load these. Hooks that rename, copy or reshard give the tensors
unchanged. No list tells them from hooks that compute. So a copy of the modules holds stand-ins without storage, and the
tensors of its `state_dict` are compared with these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.sources.hf_checkpoint import Aliases
from weightsync.sources.module_tree import as_built, own_tensors, walk

CHANGED = (
    "a hook, or a module's own `state_dict`, saves another value under its name; push the saved values, with "
    'backend="stream"'
)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return a module's hooks and overrides of `state_dict`. A plain module has none."""
    found = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    for name in ("state_dict", "_save_to_state_dict"):
        own = vars(module).get(name, getattr(type(module), name))
        if own is not getattr(nn.Module, name):
            found.append(own)
    return found


def changed_when_saved(
    model: nn.Module, tensors: Mapping[str, tuple[Hashable, tuple[int, ...], torch.dtype]]
) -> dict[str, str]:
    """Return the names of values computed by `state_dict`, each with the reason against a push.

    tensors: identity, full shape and dtype of each tensor by its name in the checkpoint.
    """
    roots = dict(_outermost(model))
    if not roots:
        return {}
    made: dict[Hashable, torch.Tensor] = {}
    stand_ins: dict[str, torch.Tensor] = {}
    own: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, (identity, shape, dtype) in tensors.items():
        owner, _, tail = name.rpartition(".")
        if identity not in made:
            blank = torch.empty(shape, dtype=dtype, device="meta")
            made[identity] = nn.Parameter(blank) if dtype.is_floating_point else blank
        own[f"{owner}." if owner else ""][tail] = stand_ins[name] = made[identity]
    found: dict[str, str] = {}
    for prefix, module in roots.items():
        here = {name: tensor for name, tensor in stand_ins.items() if name.startswith(prefix)}
        copies = _Copies()
        try:
            try:
                with copies:
                    saved = as_built(module, prefix, own).state_dict(prefix=prefix)
            except Exception:  # a hook reads values, and a stand-in has none
                with copies:
                    saved = as_built(module).state_dict(prefix=prefix)
        except Exception as error:
            kinds = ", ".join(sorted({type(module).__name__ for _, module in walk(module) if hooks_of(module)}))
            reason = f"cannot follow the `state_dict` of {kinds} ({type(error).__name__}: {error})"
            found |= dict.fromkeys(here, reason)
            continue
        real = {f"{prefix}{at}{name}": each for at, inner in walk(module) for name, each in own_tensors(inner)}
        for name, tensor in here.items():
            if name in saved and not copies.are_same(saved[name], tensor, real.get(name)):
                found[name] = CHANGED
    return found


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with hooks, each with its prefix, without modules inside of another one."""
    last = None
    for prefix, module in walk(model):
        if (last is None or not prefix.startswith(last)) and hooks_of(module):
            last = prefix
            yield prefix, module


class _Copies(Aliases):
    """A mode that returns a tensor as its own lossless copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            dtype = (kwargs or {}).get("dtype") or args[0].dtype
            if torch.promote_types(args[0].dtype, dtype) == dtype:
                return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def are_same(self, saved: Any, stand_in: torch.Tensor, real: torch.Tensor | None) -> bool:
        """Return whether `saved` is the unchanged tensor."""
        if not isinstance(saved, torch.Tensor):
            return False
        return any(
            memory(saved) == memory(each) and memory(saved)[0] not in self.changed
            for each in (stand_in, real)
            if each is not None
        )


def memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's place in memory and its order of elements."""
    shape = tensor.shape
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    storage = int(local.untyped_storage()._cdata)
    return storage, shape, local.shape, local.stride(), local.storage_offset()
