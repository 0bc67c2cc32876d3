"""Where the tensors lie that a module works with, wherever it keeps them, so that a push can prove that none moved.

CUDA graphs have captured these addresses. A quantised layer keeps tensors not only as parameters: as attributes, in a
kernel's object, in the closure of a function, as a workspace. All that can be reached is looked at.
"""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch
from torch import nn

_LEAVES: tuple[type, ...] = (bool, int, float, complex, str, bytes, type, type(None), enum.Enum)
_LEAVES += (types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size)
_MAX_DEPTH = 12


def held(value: Any) -> list[tuple[str, Any]] | None:
    """What an object holds, with the names it has there; None for a kind of object that cannot be looked into."""
    if isinstance(value, _LEAVES):
        return []
    if isinstance(value, types.FunctionType):
        free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        cells = [(name, cell.cell_contents) for name, cell in free if _is_filled(cell)]
        return cells + [(f"default{n}", item) for n, item in enumerate(value.__defaults__ or ())]
    if isinstance(value, functools.partial):
        arguments = [(f"argument{n}", item) for n, item in enumerate(value.args)]
        return [("function", value.func), *arguments, *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [("function", value.__func__), ("self", value.__self__)]
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(n), item) for n, item in enumerate(value)]
    if isinstance(value, nn.Module):
        slots = [item for key in ("_parameters", "_buffers", "_modules") for item in value.__dict__[key].items()]
        return slots + [(key, item) for key, item in value.__dict__.items() if not _is_container(key, item)]
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    return None


def addresses(parts: dict[str, Any], outside: set[int], seen: set[int]) -> dict[str, int]:
    """The address of every tensor with memory that can be reached from `parts`, by the path to it from their names.

    `outside` are ids of objects that are looked at on their own account or not at all, such as the model's other
    modules. `seen` are ids of objects that have been looked at; it grows, so that one set over many calls has each
    object looked at once.
    """
    found: dict[str, int] = {}
    stack = [(name, part, 0) for name, part in reversed(parts.items())]
    while stack:
        path, value, depth = stack.pop()
        if isinstance(value, _LEAVES) or id(value) in seen or (depth and id(value) in outside):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta" and value.numel():
                found[path] = value.data_ptr()
            inside: list[tuple[str, Any]] = list(value.__dict__.items())
        else:
            inside = held(value) or []
        if depth < _MAX_DEPTH:
            stack += [(f"{path}.{name}", item, depth + 1) for name, item in reversed(inside)]
    return found


def moved(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The paths of tensors that lie elsewhere than before, or nowhere. What is new may lie where it likes."""
    return [path for path, address in before.items() if after.get(path) != address]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_container(key: str, item: Any) -> bool:
    """Whether this is one of the containers that nn.Module keeps for itself: hooks and the like."""
    return key.startswith("_") and isinstance(item, dict)
