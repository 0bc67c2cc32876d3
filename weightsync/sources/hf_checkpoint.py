"""The tensors of a transformers model as its checkpoint has them. Engines load the checkpoint's form.

Since transformers 5 a model's tensors can differ from its checkpoint's in name and number. All experts of a layer are
one `experts.gate_up_proj`, and the checkpoint has a `gate_proj` and an `up_proj` for each expert. `save_pretrained`
converts back. No table gives the names that it writes. So its conversion is run once over tensors without storage, and
the result gives each tensor's place.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace as replace_meta
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.errors import UnsupportedError
from weightsync.kernels.runs import storage_of
from weightsync.planning.alike_layers import alike_layers
from weightsync.planning.layout import Box, Manifest, TensorMeta, row_major
from weightsync.planning.single_view import index_of
from weightsync.selection import TensorSelection
from weightsync.sources.module_tree import as_built, unwrapped


@dataclass(frozen=True, slots=True)
class SavedRegion:
    """A region (`box`) of a tensor of the model, saved as the region `into` of a tensor of the checkpoint.

    Dimension i of `into` runs along dimension `dims[i]` of `box`. If `dims[i]` is None, dimension i has length 1.
    """

    box: Box
    dims: tuple[int | None, ...]
    into: Box


class SavedView(NamedTuple):
    """A region of a tensor of the checkpoint, and its place in tensors with some region and strides of the model's.

    part: the number of the part in `SavedParts`. `box` is the region in its tensor of the checkpoint.
    """

    part: int
    box: Box
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region's memory in such a tensor, of shape `box.size`."""
        return torch.as_strided(tensor, self.box.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class SavedParts:
    """The checkpoint's parts of one of the model's tensors, in the order in which they are saved.

    metas: the checkpoint's tensor of each part. `regions` has the place of each part.
    """

    metas: tuple[TensorMeta, ...]
    regions: tuple[SavedRegion, ...]
    _views: dict[tuple[Box, tuple[int, ...]], list[SavedView]] = field(default_factory=dict, compare=False)

    def without(self, drops: Callable[[str], bool]) -> SavedParts:
        """Return the parts without each part in a tensor of the checkpoint that `drops` by its name."""
        keeps = [not drops(meta.name) for meta in self.metas]
        if all(keeps):
            return self  # layers share its views
        return SavedParts(tuple(compress(self.metas, keeps)), tuple(compress(self.regions, keeps)))

    def of_layer(self, number: int, other: int) -> SavedParts:
        """Return the parts of the same tensor in layer `other`. These are the parts in layer `number`."""
        metas = (replace_meta(meta, name=meta.name.replace(f".{number}.", f".{other}.", 1)) for meta in self.metas)
        return replace(self, metas=tuple(metas))

    def views(self, box: Box, stride: tuple[int, ...]) -> list[SavedView]:
        """Return the parts, in their order, in a tensor with these strides and the region `box` of the model's tensor.

        The result is kept, since a model can have tens of thousands of parts. Layers share it, see `of_layer`.
        """
        if (box, stride) not in self._views:
            found = (_view(number, region, box, stride) for number, region in enumerate(self.regions))
            self._views[box, stride] = [view for view in found if view is not None]
        return self._views[box, stride]


def manifest_of(saved: Iterable[SavedParts], tied: Iterable[tuple[str, str]] = ()) -> Manifest:
    """Return the tensors of the checkpoint, each once. Several of the model's tensors may be parts of one.

    `tied` has (other name, name) of each tensor that the checkpoint has twice.
    """
    return Manifest(tuple(dict.fromkeys(meta for parts in saved for meta in parts.metas)), tuple(tied))


EachOnce = tuple[list[SavedParts], dict[str, str]]
"""The parts of the tensors that travel, and the name of the equal tensor by each other tensor's name."""


def each_once(names: Sequence[str], saved: Sequence[SavedParts]) -> EachOnce:
    """Leave out each tensor of the checkpoint with the parts of an earlier one.

    names: a name for each of the model's tensors, the same for tied ones.
    saved: the parts of these tensors.
    """
    times = Counter(names)
    shared = {meta.name for name, parts in zip(names, saved, strict=True) if times[name] > 1 for meta in parts.metas}
    made: dict[TensorMeta, set[tuple[str, SavedRegion]]] = defaultdict(set)
    for name, parts in zip(names, saved, strict=True):
        for meta, region in zip(parts.metas, parts.regions, strict=True):
            if meta.name in shared:  # hashing the parts of all experts takes long
                made[meta].add((name, region))
    first: dict[Hashable, str] = {}
    known = ((meta.name, first.setdefault((frozenset(own), meta.shape), meta.name)) for meta, own in made.items())
    tied = {other: name for other, name in known if other != name}
    return [parts.without(tied.__contains__) for parts in saved] if tied else [*saved], tied


def saved_form(
    model: nn.Module, tensors: Sequence[TensorMeta], selection: TensorSelection, excluded: Sequence[str] = ()
) -> list[SavedParts]:
    """Return, for each of the model's `tensors`, its parts in the checkpoint, without excluded ones.

    `tensors` have the names that `walk` gives them. `excluded` names the model's excluded tensors. A model that is not
    from transformers is saved unchanged. Raises one `UnsupportedError` for all tensors with values that a save
    computes, or for all excluded parts of a larger tensor.
    """
    built = _as_transformers_has_it(unwrapped(model)) if tensors else None
    found = _saved(built, tensors)
    if lost := [meta.name for meta in tensors if meta.name not in found]:
        lines = "".join(f"\n  {name}" for name in lost)
        raise UnsupportedError(
            f"{len(lost)} tensors cannot be pushed: transformers saves values computed from them. Name tensors that "
            f"must not travel in TensorSelection.exclude:{lines}",
            tensors=dict.fromkeys(lost, "computed when it is saved"),
        )
    kept = {meta.name: found[meta.name].without(selection.excludes) for meta in tensors}
    if built is not None and excluded and (cut := _cut(built, kept, excluded)):
        name, part = next(iter(cut.items()))
        raise UnsupportedError(
            f"TensorSelection.exclude leaves {len(cut)} tensors without a part, such as {name} without {part}. A "
            f"checkpoint has the parts in one tensor: exclude {name}, all of its parts, or none of them",
            tensors={name: f"excluded in part, as {part}" for name, part in cut.items()},
        )
    return [*kept.values()]


def _cut(built: Any, kept: Mapping[str, SavedParts], excluded: Sequence[str]) -> dict[str, str]:
    """Return an excluded part of each of the checkpoint's tensors that would lack it, by the tensor's name.

    Names tell: transformers may be unable to save an excluded tensor, and its shape may be unknown.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if (loaded := getattr(built, "_weight_conversions", None)) is None:
        loaded = get_model_conversion_mapping(built, add_legacy=False)
    converters = [each.reverse_transform() for each in reversed(loaded) if hasattr(each, "operations")]

    def together(name: str) -> str:
        """Return the name that transformers gives to all tensors of one conversion."""
        renamed = (each.rename_source_key(name) for each in converters)
        return next((common for common, pattern in renamed if pattern is not None), name)

    without = {together(name): name for name in excluded}
    lacking = {name: without[common] for name in kept if (common := together(name)) in without}
    return {meta.name: part for name, part in lacking.items() for meta in kept[name].metas}


def _saved(built: Any, tensors: Sequence[TensorMeta]) -> dict[str, SavedParts]:
    if built is None:
        whole = ((meta, Box.full(meta.shape), tuple(range(len(meta.shape)))) for meta in tensors)
        return {meta.name: SavedParts((meta,), (SavedRegion(box, dims, box),)) for meta, box, dims in whole}
    return _repeat(built, tensors) or _follow(built, tensors)


def _as_transformers_has_it(model: nn.Module) -> Any:
    """Return the model with transformers' own classes and conversions. None: the model is saved unchanged."""
    if "transformers.core_model_loading" not in sys.modules:
        return None  # in transformers 4, models have the tensors of their checkpoints
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    built = as_built(model)
    _forget_quantiser(built)
    return built


def _convert(built: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(built, state))
    except Exception as error:
        raise UnsupportedError(
            f"cannot follow how transformers saves a {type(built).__name__} ({type(error).__name__}: {error})"
        ) from error


def _forget_quantiser(model: Any) -> None:
    """Give a dequantised model the conversions of its class. Those of its loading would quantise again."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    loaded = getattr(model, "_weight_conversions", None) or ()
    modules = {type(operation).__module__ for each in loaded for operation in getattr(each, "operations", ())}
    is_packed = getattr(model.config, "quantization_config", None) is not None
    # What bitsandbytes has packed travels dequantised: see four_bits.py.
    foreign = {"transformers.integrations.bitsandbytes"} & modules if is_packed else modules
    if any(module.startswith("transformers.integrations.") for module in foreign):
        own = get_model_conversion_mapping(model, add_legacy=False)
        # Only the loading tells whether names had the prefix.
        kept = [each for each in loaded if type(each).__name__ == "PrefixChange"]
        model._weight_conversions = kept + [each for each in own if type(each).__name__ != "PrefixChange"]


def _repeat(built: Any, tensors: Sequence[TensorMeta]) -> dict[str, SavedParts] | None:
    """Follow three of all layers with equal tensors, and return the first's parts for each of them.

    Following all layers of a mixture of experts takes long. Return None if there are no such layers, or if the examples
    are not saved alike.
    """
    groups = [each for each in alike_layers(tensors) if each.others]
    repeated = set().union(*(each.names(each.others) for each in groups))
    try:
        found = _follow(built, [meta for meta in tensors if meta.name not in repeated]) if repeated else {}
    except UnsupportedError:
        return None
    for group in groups:
        first, *more = group.examples
        for layer in (*more, *group.others):
            for meta, like in zip(group.tensors[layer], group.tensors[first], strict=True):
                parts = found[like.name].of_layer(first, layer) if like.name in found else None
                if parts is None or (meta.name not in repeated and found.get(meta.name) != parts):
                    return None
                found[meta.name] = parts
    return found


def _follow(built: Any, tensors: Sequence[TensorMeta]) -> dict[str, SavedParts]:
    """Convert tensors without storage. Return the parts of each tensor saved whole."""
    with Aliases() as aliases:
        state = {meta.name: torch.empty(meta.shape, dtype=torch.uint8, device="meta") for meta in tensors}
        written = _convert(built, dict(state))
    by_storage = {at: meta for meta in tensors if (at := storage_of(state[meta.name])) not in aliases.changed}
    found: dict[str, list[tuple[TensorMeta, SavedRegion]]] = {meta.name: [] for meta in tensors}
    for name, tensor in written.items():
        parts: list[tuple[TensorMeta, SavedRegion]] = []
        for view, into in aliases.parts(tensor):
            source = by_storage.get(storage_of(view))
            if source is None or (region := _region(source.shape, view)) is None:
                break
            parts.append((source, SavedRegion(*region, into)))
        else:
            if len({source.dtype for source, _ in parts}) == 1:
                for source, saved in parts:
                    found[source.name].append((TensorMeta(name, tuple(tensor.shape), source.dtype), saved))
    return {
        name: SavedParts(tuple(meta for meta, _ in parts), tuple(saved for _, saved in parts))
        for name, parts in found.items()
        if parts and sum(saved.box.numel for _, saved in parts) == state[name].numel()
    }


class Aliases(TorchDispatchMode):
    """A mode that returns a tensor as its own clone. So a clone's storage identifies the cloned tensor.

    It notes the parts of tensors made by `cat` and `stack`, and the written storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[int] = set()
        self._joined: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, Box]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default:
            return args[0]
        if func._schema.is_mutable:
            self.changed.add(storage_of(args[0]))
            self._joined.pop(storage_of(args[0]), None)
        result = func(*args, **(kwargs or {}))
        if func in (aten.cat.default, aten.stack.default):
            dim = (args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)) % result.dim()
            parts = [part.unsqueeze(dim) if func is aten.stack.default else part for part in args[0]]
            starts = accumulate((part.shape[dim] for part in parts), initial=0)
            boxes = [
                Box(tuple(start if d == dim else 0 for d in range(part.dim())), tuple(part.shape))
                for part, start in zip(parts, starts, strict=False)
            ]
            self._joined[storage_of(result)] = result, list(zip(parts, boxes, strict=True))  # keeps the ids in use
        return result

    def parts(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, Box]]:
        """Return the parts of a joined `tensor`, each with its region in it.

        Any other tensor is its own only part.
        """
        whole, parts = self._joined.get(storage_of(tensor), (None, []))
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


def _view(part: int, saved: SavedRegion, box: Box, stride: tuple[int, ...]) -> SavedView | None:
    """Return the view of a part in a tensor with strides `stride` and the region `box` of the model's tensor."""
    if (common := saved.box.intersect(box)) is None:
        return None
    offset = sum((inner - outer) * step for inner, outer, step in zip(common.start, box.start, stride, strict=True))
    within = (0 if dim is None else common.start[dim] - saved.box.start[dim] for dim in saved.dims)
    start = tuple(outer + inner for outer, inner in zip(saved.into.start, within, strict=True))
    size, strides = (tuple(1 if dim is None else each[dim] for dim in saved.dims) for each in (common.size, stride))
    return SavedView(part, Box(start, size), strides, offset)
