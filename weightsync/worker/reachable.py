"""A search for all tensors that a module uses, in any place.

A reload fills the module's old tensors from the new ones. A push must not move any of them, because CUDA graphs have
captured their addresses. A quantised layer keeps tensors as parameters, as attributes, in a kernel's object, in the
closure of a function, or as a workspace. The search follows every reference.
"""

from __future__ import annotations

import enum
import functools
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

LEAVES: tuple[type, ...] = (bool, int, float, complex, str, bytes, type, type(None), enum.Enum)
LEAVES += (types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size)
"""The types of objects that hold no other object."""
_MAX_DEPTH = 12


def children_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the objects held by an object, by name. None for an object that cannot be searched."""
    if isinstance(value, LEAVES):
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
        return [(key if isinstance(key, str) else f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(n), item) for n, item in enumerate(value)]
    if isinstance(value, nn.Module):
        slots = [item for key in ("_parameters", "_buffers", "_modules") for item in value.__dict__[key].items()]
        return slots + [(key, item) for key, item in value.__dict__.items() if not _is_container(key, item)]
    kind: Any = type(value)
    slots = [name for name in _slots(kind) if hasattr(value, name)]
    if hasattr(value, "__dict__") or slots:
        return [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name)) for name in slots)]
    return None


def addresses(parts: dict[str, Any], outside: set[int], seen: set[int]) -> dict[str, int]:
    """Return the address of every tensor with memory in reach of `parts`, by the path to it.

    Args:
        parts: The objects to search, by name.
        outside: Ids of objects to pass over, such as the model's other modules.
        seen: Ids of objects already searched. It grows, so one set over many calls has each object searched once.
    """
    found: dict[str, int] = {}
    stack = [(name, part, 0) for name, part in reversed(parts.items())]
    while stack:
        path, value, depth = stack.pop()
        if isinstance(value, LEAVES) or id(value) in seen or (depth and id(value) in outside):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta" and value.numel():
                found[path] = value.data_ptr()
            inside: list[tuple[str, Any]] = list(value.__dict__.items())
        else:
            inside = children_of(value) or []
        if depth < _MAX_DEPTH:
            stack += [(f"{path}.{name}", item, depth + 1) for name, item in reversed(inside)]
    return found


@dataclass(frozen=True)
class Counterparts:
    """The correspondence of two objects that were made in the same way, from different weights.

    tensors: (path, old, new) of corresponding tensors.
    differ: values, types and layouts that do not correspond.
    closed: objects with hidden attributes, and objects that free a resource when they are deleted.
    """

    tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)


def diff_objects(old: Any, new: Any, path: str, outside: set[int]) -> Counterparts:
    """Compare two objects, reference by reference.

    An object in both, or with its id in `outside`, was not made and is passed over. An object only in the old one came
    with its use, and is passed over too.
    """
    found = Counterparts()
    seen: set[tuple[int, int]] = set()
    stack = [(path, old, new)]
    while stack:
        at, a, b = stack.pop()
        if a is b or b is None or (id(a), id(b)) in seen or id(a) in outside:
            continue
        seen.add((id(a), id(b)))
        if type(a) is not type(b):
            found.differ.append(f"{at} is now a {type(b).__name__}, and was a {type(a).__name__}")
        elif isinstance(a, torch.Tensor):
            if any(step == 0 and size > 1 for step, size in zip(a.stride(), a.shape, strict=True)):
                found.closed.append(f"{at} has elements that share their memory")
            elif same_layout(a, b):
                found.tensors.append((at, a, b))
            else:
                found.differ.append(f"{at} is now {tuple(b.shape)} {b.dtype}, and was {tuple(a.shape)} {a.dtype}")
        elif isinstance(a, LEAVES):
            if a != b:
                found.differ.append(f"{at} is now {b!r}, and was {a!r}")
        elif (inside := children_of(a)) is None or (others := children_of(b)) is None:
            found.closed.append(f"{at}, a {type(a).__name__}, does not show its attributes")
        elif hasattr(a, "__del__"):
            found.closed.append(f"{at}, a {type(a).__name__}, has a finaliser")
        else:
            mine, theirs = dict(inside), dict(others)
            if code_of(a) is not code_of(b):
                found.differ.append(f"{at} is now another function")
            found.differ.extend(f"{at}.{name} was not there" for name in theirs.keys() - mine.keys())
            stack += [(f"{at}.{name}", mine[name], item) for name, item in theirs.items() if name in mine]
    return found


def same_layout(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether one can replace the other after a copy of its contents."""
    layouts = [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in (a, b) if t is not None]
    return len(layouts) == 2 and layouts[0] == layouts[1]


def code_of(value: Any) -> types.CodeType | None:
    """Return the code of a Python function. None for any other object."""
    return value.__code__ if isinstance(value, types.FunctionType) else None


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@functools.cache
def _slots(kind: type) -> list[str]:
    """Return the names of a class's slots, with the slots of its bases."""
    declared = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_container(key: str, item: Any) -> bool:
    """Return whether this is one of nn.Module's own containers, such as hooks."""
    return key.startswith("_") and isinstance(item, dict)
