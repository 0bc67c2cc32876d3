"""The tensors of a transformers model as its checkpoint has them. Engines load the checkpoint's form.

Since transformers 5 a model's tensors can differ from its checkpoint's in name and number. All experts of a layer are
one `experts.gate_up_proj`, and the checkpoint has a `gate_proj` and an `up_proj` for each expert. `save_pretrained`
converts back. No table gives the names that it writes. So its conversion is run once over tensors without storage, and
the result gives each tensor's place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.errors import UnsupportedError
from weightsync.planning.layout import Box, Manifest, TensorMeta, row_major
from weightsync.planning.single_view import index_of
from weightsync.selection import TensorSelection
from weightsync.sources.module_tree import as_built, unwrapped


@dataclass(frozen=True, slots=True)
class Saved:
    """One region (`box`) of a tensor of the model, saved as the region `into` of a tensor of the checkpoint.

    Dimension i of `into` runs along dimension `dims[i]` of `box`. If `dims[i]` is None, dimension i has length 1.
    """

    meta: TensorMeta
    box: Box
    dims: tuple[int | None, ...]
    into: Box


_Cut = tuple[int, Box, tuple[int, ...], int]
"""Number of a part, a region of it, and the region's strides and offset in a trainer's tensor."""


@dataclass(frozen=True, slots=True)
class SavedParts:
    """The checkpoint's parts of one of the model's tensors, in the order in which they are saved."""

    parts: tuple[Saved, ...]
    _cuts: dict[tuple[Box, tuple[int, ...]], list[_Cut]] = field(default_factory=dict)

    def are_the_whole(self) -> bool:
        """Return whether a checkpoint tensor equals this tensor, apart from its name."""
        return all(
            part.box == part.into == Box.full(part.meta.shape) and part.dims == tuple(range(len(part.dims)))
            for part in self.parts
        )

    def cut(self, held: Iterable[tuple[Box, torch.Tensor]]) -> list[tuple[TensorMeta, Box, torch.Tensor]]:
        """Return the regions of the parts in the tensors `held`, in the parts' order.

        `held` has regions of the model's tensor. Each result is a tensor of the checkpoint, a region of it, and this
        region as a view of a tensor in `held`.
        """
        views = [
            (number, region, torch.as_strided(tensor, region.size, stride, tensor.storage_offset() + offset))
            for box, tensor in held
            for number, region, stride, offset in self._cuts_of(box, tensor.stride())
        ]
        views.sort(key=itemgetter(0))
        return [(self.parts[number].meta, region, view) for number, region, view in views]

    def _cuts_of(self, box: Box, stride: tuple[int, ...]) -> list[_Cut]:
        if (box, stride) not in self._cuts:  # kept, for a model can have tens of thousands of parts
            found = (_cut(number, part, box, stride) for number, part in enumerate(self.parts))
            self._cuts[box, stride] = [cut for cut in found if cut is not None]
        return self._cuts[box, stride]


def manifest_of(saved: Iterable[SavedParts], tied: Iterable[tuple[str, str]] = ()) -> Manifest:
    """Return the tensors of the checkpoint, each once. Several of the model's tensors may be parts of one.

    `tied` has (other name, name) of each tensor that the model has twice.
    """
    metas = dict.fromkeys(part.meta for parts in saved for part in parts.parts)
    names = {meta.name for meta in metas}
    return Manifest(tuple(metas), tuple(pair for pair in tied if pair[0] not in names))


def saved_form(model: nn.Module, tensors: Sequence[TensorMeta], selection: TensorSelection) -> list[SavedParts]:
    """Return, for each of the model's `tensors`, its parts in the checkpoint, without excluded ones.

    `tensors` have the names that `walk` gives them. A model that is not from transformers is saved unchanged. Raises
    one `UnsupportedError` for all tensors with values that a save computes.
    """
    return [
        SavedParts(tuple(part for part in parts if not selection.excludes(part.meta.name)))
        for parts in _follow(unwrapped(model), tensors)
    ]


def _follow(model: nn.Module, tensors: Sequence[TensorMeta]) -> Iterable[list[Saved]]:
    as_they_are = [
        [Saved(meta, Box.full(meta.shape), tuple(range(len(meta.shape))), Box.full(meta.shape))] for meta in tensors
    ]
    if "transformers" not in sys.modules:
        return as_they_are
    from transformers import PreTrainedModel

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return as_they_are  # transformers 4: models have the tensors of their checkpoints
    if not isinstance(model, PreTrainedModel):
        return as_they_are
    with Aliases() as aliases:
        state = {meta.name: torch.empty(meta.shape, dtype=torch.uint8, device="meta") for meta in tensors}
        try:
            written = revert_weight_conversion(as_built(model), dict(state))
        except Exception as error:
            raise UnsupportedError(
                f"cannot follow how transformers saves a {type(model).__name__} ({type(error).__name__}: {error})"
            ) from error
    by_storage = {_storage(state[meta.name]): meta for meta in tensors}
    for storage in aliases.changed:
        by_storage.pop(storage, None)
    found: dict[str, list[Saved]] = {meta.name: [] for meta in tensors}
    for name, tensor in written.items():
        parts: list[tuple[TensorMeta, Saved]] = []
        for view, into in aliases.parts(tensor):
            source = by_storage.get(_storage(view))
            if source is None or (region := _region(source.shape, view)) is None:
                break
            parts.append((source, Saved(TensorMeta(name, tuple(tensor.shape), source.dtype), *region, into)))
        else:
            if len({source.dtype for source, _ in parts}) == 1:
                for source, part in parts:
                    found[source.name].append(part)
    whole = {name: sum(part.box.numel for part in parts) == state[name].numel() for name, parts in found.items()}
    if lost := [name for name in whole if not (found[name] and whole[name])]:
        lines = "".join(f"\n  {name}" for name in lost)
        raise UnsupportedError(
            f"{len(lost)} tensors cannot be pushed: transformers saves values computed from them. Name tensors that "
            f"must not travel in TensorSelection.exclude:{lines}",
            tensors=dict.fromkeys(lost, "computed when it is saved"),
        )
    return found.values()


class Aliases(TorchDispatchMode):
    """A mode that returns a tensor as its own clone. So a clone's storage identifies the cloned tensor.

    It notes the parts of tensors made by `cat` and `stack`, and the written storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[int] = set()
        self._joined: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, Box]]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return args[0]
        if func._schema.is_mutable:
            self.changed.add(_storage(args[0]))
            self._joined.pop(_storage(args[0]), None)
        result = func(*args, **(kwargs or {}))
        if func in (aten.cat.default, aten.stack.default):
            dim = (args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)) % result.dim()
            parts = [part.unsqueeze(dim) if func is aten.stack.default else part for part in args[0]]
            starts = accumulate((part.shape[dim] for part in parts), initial=0)
            boxes = [
                Box(tuple(start if d == dim else 0 for d in range(part.dim())), tuple(part.shape))
                for part, start in zip(parts, starts, strict=False)
            ]
            self._joined[_storage(result)] = result, list(zip(parts, boxes, strict=True))  # keeps the ids in use
        return result

    def parts(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, Box]]:
        """Return the parts of a joined `tensor`, each with its region in it.

        Any other tensor is its own only part.
        """
        whole, parts = self._joined.get(_storage(tensor), (None, []))
        as_joined = whole is not None and (whole.shape, whole.stride()) == (tensor.shape, tensor.stride())
        return parts if as_joined else [(tensor, Box.full(tuple(tensor.shape)))]


def _region(shape: tuple[int, ...], view: torch.Tensor) -> tuple[Box, tuple[int | None, ...]] | None:
    """Return the region of a contiguous tensor of `shape` under `view`, and its dimension for each view dimension.

    Return None if the view is no region, such as every second row.
    """
    if tuple(view.shape) == shape and view.is_contiguous():
        return Box.full(shape), tuple(range(len(shape)))
    steps = row_major(shape)
    start = index_of(int(view.storage_offset()), steps)
    size = [1] * len(shape)
    dims: list[int | None] = []
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            dims.append(None)
            continue
        dim = next((d for d, step in enumerate(steps) if step == stride and shape[d] > 1), None)
        if dim is None or start[dim] + length > shape[dim]:
            return None
        size[dim] = length
        dims.append(dim)
    return Box(start, tuple(size)), tuple(dims)


def _cut(number: int, saved: Saved, box: Box, stride: tuple[int, ...]) -> _Cut | None:
    """Cut part `saved` from a tensor with strides `stride` and the region `box` of the model's tensor."""
    if (common := saved.box.intersect(box)) is None:
        return None
    offset = sum((inner - outer) * step for inner, outer, step in zip(common.start, box.start, stride, strict=True))
    within = (0 if dim is None else common.start[dim] - saved.box.start[dim] for dim in saved.dims)
    region = Box(
        tuple(outer + inner for outer, inner in zip(saved.into.start, within, strict=True)),
        tuple(1 if dim is None else common.size[dim] for dim in saved.dims),
    )
    return number, region, tuple(1 if dim is None else stride[dim] for dim in saved.dims), offset


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
