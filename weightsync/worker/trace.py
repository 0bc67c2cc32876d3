"""A trace of a model's loader: one run over tensors without storage records each copy and its target.

The model is a copy of the engine's on the `meta` device, so nothing is read or written. The loader itself shows every
slice, replica, fusion and omission. No tables of names are needed.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.errors import UnsupportedError
from weightsync.kernels.runs import storage_of
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import (
    MAX_BOXES,
    Box,
    LoadCopy,
    Manifest,
    TensorMeta,
    affine_boxes,
    coverage,
    row_major,
    strided_boxes,
)

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]

_OVERWRITTEN = "weight_shape"
"""The shape of a packed weight in compressed-tensors. No kernel reads it, and the loader of a fused layer overwrites it
with each shard's."""

_NO_VALUES = re.compile(r"\bmeta (tensor|device)|aten::\w+.*\bmeta\b", re.IGNORECASE)
"""Torch's messages when code asks for the values of a tensor without storage."""

_BELOW_LOADERS = re.compile(rf"[/\\]torch[/\\]|{re.escape(__file__)}$")


@dataclass(frozen=True)
class Fill:
    """A strided region of a parameter that the loader sets to a constant, such as a vocabulary's padding."""

    param: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    value: float

    def apply(self, data: torch.Tensor) -> None:
        """Set the region in `data`. `data` has the parameter's storage to itself."""
        torch.as_strided(data, self.size, self.stride, self.offset).fill_(self.value)


@dataclass
class Trace:
    """The effects of one run of the loader.

    copies, fills: exactly its copies and constants.
    computed: parameters that the loader computes, and the tensors used. Only the loader can load them.
    refused: the loader's reason for each refused tensor.
    unknown: tensors without a parameter here.
    """

    copies: list[LoadCopy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    computed: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def landed(self) -> Iterator[tuple[str, str]]:
        """Yield each filled parameter with each of its tensors."""
        yield from ((copy.param, copy.name) for copy in self.copies)
        yield from ((param, name) for param, names in self.computed.items() for name in names)

    def filled(self) -> set[str]:
        """Return the parameters that the loader copies to or computes."""
        return {copy.param for copy in self.copies}.union(self.computed)

    def read(self) -> set[str]:
        """Return the tensors that the loader uses."""
        return {name for _, name in self.landed()}


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, with one name for each shared tensor."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def trace_loader(model: nn.Module, load_weights: LoadWeights, manifest: Manifest, *, may_lack: bool = False) -> Trace:
    """Trace `load_weights` of a `model` on `meta` for the tensors of `manifest`.

    No tensor is changed, but a loader may add parameters to the model. A tensor refused by the loader is recorded and
    left out, and the trace starts again. One call thus finds all refused tensors.

    Args:
        model: The never loaded model on `meta`.
        load_weights: The engine's loader for `model`.
        manifest: The trainer's tensors.
        may_lack: Ignore an error after the last tensor: the loader misses a tensor, and the trainer may not have it.

    Raises:
        UnsupportedError: The loader reads the values of a tensor or of a loaded parameter, or fails before the first
            tensor.
    """
    trace = Trace()
    feed = Feed(list(manifest))
    while True:
        try:
            found = run_loader(model, load_weights, feed, may_lack=may_lack)
        except UnsupportedError:
            raise
        except Exception as error:
            if feed.current is None or _NO_VALUES.search(str(error)):
                raise _untraceable(model, feed.current, error) from error
            name, shape = feed.current.name, feed.current.shape
            # Loaders look their parameters up in a dict, or say in words that there is no such thing.
            if isinstance(error, KeyError) or "no module or parameter named" in str(error):
                trace.unknown.append(name)
            else:
                trace.refused[name] = f"shape {shape}: {str(error) or _refusal(model, name)}"
            feed.leave_out_current()
        else:
            return replace(found, refused=trace.refused, unknown=trace.unknown)


def run_loader(model: nn.Module, load_weights: LoadWeights, feed: Feed, *, may_lack: bool = False) -> Trace:
    """Trace one run of the loader over `feed`.

    Raises as the loader does for tensors that it refuses, and `UnsupportedError` if it loads from a loaded parameter.
    """
    recorder = _Recorder(model, feed)
    try:
        with recorder:
            load_weights(feed)
        recorder.note_made()
    except Exception:
        if not (may_lack and feed.is_read):
            raise
    return _from_tensors(model, recorder)


def _from_tensors(model: nn.Module, recorder: _Recorder) -> Trace:
    """Return the loader's work in terms of tensors alone.

    A parameter computed from another parameter, as for a classifier made of a language model, is computed from the
    tensors of that one. Parameters that the loader removes at its end, such as an output layer, are left out.
    """
    for param, read in recorder.read_back.items():
        names = [*(copy.name for copy in recorder.copies if copy.param == read), *recorder.computed.get(read, ())]
        if not names:
            raise UnsupportedError(
                f"the loader of the engine's {type(model).__name__} computes {param} from {read}, for which the "
                "trainer has no tensor. Push the whole model, or use CheckpointTransport(folder, restart=True)"
            )
        recorder.computed[param] = list(dict.fromkeys([*recorder.computed[param], *names]))
    removed = {*recorder.read_back.values()} - named_tensors(model).keys()
    return Trace(
        [copy for copy in recorder.copies if copy.param not in removed],
        [fill for fill in recorder.fills if fill.param not in removed],
        {param: names for param, names in recorder.computed.items() if param not in removed},
    )


def _untraceable(model: nn.Module, meta: TensorMeta | None, error: Exception) -> UnsupportedError:
    """Return the reason why a loader cannot be traced, with the loader's line."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _BELOW_LOADERS.search(frame.filename)]
    line = f" in {own[-1].name}: {own[-1].line}" if own else ""
    what = "fails before it looks at a tensor" if meta is None else f"reads the values of {meta.name}"
    return UnsupportedError(
        f"the loader of the engine's {type(model).__name__} {what}{line} ({type(error).__name__}: {error}). A load "
        "plan has the places of values, and no values; use CheckpointTransport(folder, restart=True)"
    )


def _refusal(model: nn.Module, name: str) -> str:
    """Return the reason for a loader that gives none, such as an assertion without a text."""
    held = named_tensors(model).get(name)
    if held is None:
        return "the engine's loader refuses it"
    # An embedding has rows of padding beside the rows that the loader takes.
    rows = getattr(model.get_submodule(name.rpartition(".")[0]), "org_vocab_size", None)
    return f"the engine has {tuple(held.shape) if rows is None else (rows, *held.shape[1:])} there"


def uncovered(model: nn.Module, trace: Trace) -> tuple[dict[str, list[Box]], dict[str, list[Box]]]:
    """Return (unfilled regions, regions filled twice) of parameters, by parameter name."""
    copies = grouped(trace.copies, lambda copy: copy.param)
    constants = grouped(trace.fills, lambda fill: fill.param)
    missing: dict[str, list[Box]] = {}
    doubled: dict[str, list[Box]] = {}
    known: dict[Any, tuple[list[Box], list[Box]]] = {}  # layers are alike
    for name, param in model.named_parameters():
        if name in trace.computed:
            continue
        places = [(copy.offset, copy.box.size, copy.stride) for copy in copies.get(name, ())]
        alike = _view(param), tuple(places)
        if alike not in known:
            boxes = [box for place in places for box in _storage_boxes(param, *place)]
            known[alike] = coverage(_rows_first(param)[0], boxes)
        holes, twice = known[alike]
        # A loader may set a constant before it copies over it. A constant counts only in regions without a copy.
        boxes = [box for fill in constants.get(name, ()) for box in _fill_boxes(param, fill)]
        holes = [hole for hole in holes if coverage(hole.size, _inside(hole, boxes))[0]]
        if holes:
            missing[name] = holes
        if twice and name.rpartition(".")[2] != _OVERWRITTEN:
            doubled[name] = twice
    return missing, doubled


def paddings(model: nn.Module, trace: Trace) -> list[Fill]:
    """Return the constants of `trace` in regions without a copy."""
    found: list[Fill] = []
    tensors, copies = named_tensors(model), grouped(trace.copies, lambda copy: copy.param)
    for name, fills in grouped(trace.fills, lambda fill: fill.param).items():
        shape, start = _rows_first(tensors[name])
        copied = [box for copy in copies.get(name, ()) for box in _param_boxes(tensors[name], copy)]
        holes = coverage(shape, copied)[0]
        steps = row_major(shape)
        for fill in fills:
            boxes = _fill_boxes(tensors[name], fill)
            for part in [part for box in boxes for hole in holes if (part := hole.intersect(box)) is not None]:
                offset = start + sum(at * step for at, step in zip(part.start, steps, strict=True))
                found.append(Fill(name, offset, part.size, steps, fill.value))
    return found


def writers(model: nn.Module, trace: Trace, param: str, boxes: list[Box]) -> list[str]:
    """Return the names of the tensors with targets in `boxes` of a parameter."""
    tensor = named_tensors(model)[param]
    own = [(copy.name, _param_boxes(tensor, copy)) for copy in trace.copies if copy.param == param]
    return sorted({name for name, parts in own if any(part.intersect(box) for part in parts for box in boxes)})


class Feed:
    """Tensors as the loader's input, and the tensor now being read by the loader."""

    def __init__(self, offered: list[TensorMeta]) -> None:
        self.current: TensorMeta | None = None
        self.is_read = False
        self.names: dict[int, TensorMeta] = {}
        # Made before a mode sees operations, and kept: another storage could get a freed storage's identity.
        self._offered = [*map(_offer, offered)]

    def leave_out_current(self) -> None:
        """Begin anew without the tensor now being read. Make the tensors again that the loader may have changed."""
        read = next(at for at, (meta, _) in enumerate(self._offered) if meta is self.current)
        self._offered[: read + 1] = [_offer(meta) for meta, _ in self._offered[:read]]
        self.current, self.is_read = None, False
        self.names.clear()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, tensor in self._offered:
            self.names[storage_of(tensor)] = meta
            self.current = meta
            yield meta.name, tensor
        # Loaders that collect before they load fail after the last tensor. The blame then is only a guess.
        self.is_read = True


def _offer(meta: TensorMeta) -> tuple[TensorMeta, torch.Tensor]:
    return meta, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")


class _Recorder(TorchDispatchMode):
    """A mode that sees every operation of the loader.

    It notes every write into the model's tensors, and the named tensors behind each intermediate value.
    """

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        super().__init__()
        self.copies: list[LoadCopy] = []
        self.fills: list[Fill] = []
        self.computed: dict[str, list[str]] = {}
        self.read_back: dict[str, str] = {}
        """Parameters computed from another parameter, with the name of that one."""
        self._feed = feed
        self._model = model
        self._keep: list[torch.Tensor] = []  # another storage could get a freed storage's identity
        self._params: dict[int, str | None] = {}
        self._look_up_parameters()
        self._origins: dict[int, list[str]] = {}
        self._read: dict[int, str] = {}  # the parameter behind an intermediate value
        self._casts: dict[int, TensorMeta] = {}  # whole tensors in another dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [(tensor, self._written_parameter(tensor)) for tensor in _written(func, args, kwargs)]
        params = [(tensor, param) for tensor, param in written if param is not None]
        for target, param in params:  # several if an operation takes lists
            self._note_write(func, target, param, args, kwargs)
        if params:
            return params[0][0] if func._schema.returns else None
        if func is torch.ops.aten.empty.memory_format:
            kwargs = {**kwargs, "device": torch.device("meta")}  # it is loaded from tensors without values
        result = func(*args, **kwargs)
        self._note_origins(func, result, args, kwargs)
        self._note_changes(func, args, kwargs)
        return result

    def _look_up_parameters(self) -> None:
        for name, tensor in named_tensors(self._model).items():
            if storage_of(tensor) not in self._params:
                self._params[storage_of(tensor)] = name
                self._keep.append(tensor)

    def _written_parameter(self, target: torch.Tensor) -> str | None:
        """Return the parameter of which `target` is a view. Loaders make some parameters while they load."""
        if storage_of(target) not in self._params:
            self._look_up_parameters()
            if storage_of(target) not in self._params:
                self._params[storage_of(target)] = None
                self._keep.append(target)
        return self._params[storage_of(target)]

    def _note_write(
        self, func: Any, target: torch.Tensor, param: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        aten = torch.ops.aten
        place = _view(target)
        if func is aten.copy_.default:
            source = args[1]
            meta = self._feed.names.get(storage_of(source))
            if meta is not None and source.shape == target.shape:
                boxes = affine_boxes(meta.shape, _view(source), place)
                if not meta.numel:  # nothing is read of it, but it has a target
                    boxes = [(Box.full(meta.shape), 0, row_major(meta.shape))]
                if boxes is not None:
                    self.copies += [LoadCopy(meta.name, box, param, offset, stride) for box, offset, stride in boxes]
                    return
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            value = float(args[1]) if func is aten.fill_.Scalar else 0.0
            self.fills.append(Fill(param, *place, value))
            return
        names = self.computed.setdefault(param, [])
        names += [name for name in self._sources(args, kwargs) if name not in names]
        if (read := self._parameter_read(args, kwargs, besides=param)) is not None:
            self.read_back[param] = read

    def note_made(self) -> None:
        """Note the parameters made by the loader from a whole tensor, instead of a copy into a parameter."""
        for name, param in self._model.named_parameters():
            key = storage_of(param)
            meta = self._feed.names.get(key) or self._casts.get(key)
            if meta is not None and tuple(param.shape) == meta.shape:
                self.copies.append(LoadCopy(meta.name, Box.full(meta.shape), name, 0, row_major(meta.shape)))

    def _note_origins(self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _tensors(result):
            key = storage_of(tensor)
            if key in self._feed.names or self._params.get(key) is not None:
                continue
            if names := self._sources(args, kwargs):
                self._origins[key] = names
                self._keep.append(tensor)
            if (read := self._parameter_read(args, kwargs)) is not None:
                self._read[key] = read
                self._keep.append(tensor)
            meta = self._feed.names.get(storage_of(args[0])) if func is torch.ops.aten._to_copy.default else None
            if meta is not None:
                self._casts[key] = meta

    def _note_changes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a written tensor is no longer the trainer's, but computed from the trainer's."""
        if not _written_arguments(func) or torch.Tag.inplace_view in func.tags:
            return
        if not (names := self._sources(args, kwargs)):
            return
        for tensor in _written(func, args, kwargs):
            self._feed.names.pop(storage_of(tensor), None)
            self._origins[storage_of(tensor)] = names
            self._keep.append(tensor)

    def _parameter_read(self, args: tuple[Any, ...], kwargs: dict[str, Any], besides: str | None = None) -> str | None:
        """Return a parameter, not `besides`, behind the values that an operation reads."""
        keys = [storage_of(tensor) for tensor in (*_tensors(args), *_tensors(kwargs))]
        read = (self._params.get(key) or self._read.get(key) for key in keys if key not in self._feed.names)
        return next((param for param in read if param not in (None, besides)), None)

    def _sources(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        names: list[str] = []
        for tensor in (*_tensors(args), *_tensors(kwargs)):
            key = storage_of(tensor)
            meta = self._feed.names.get(key)
            names += [meta.name] if meta is not None else self._origins.get(key, [])
        return list(dict.fromkeys(names))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors written by an operation."""
    for position, name in _written_arguments(func):
        yield from _tensors(args[position] if position < len(args) else kwargs.get(name))


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return position and name of each argument that an operation writes."""
    arguments = enumerate(func._schema.arguments)
    return [(at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _view(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's place in its storage: (offset, size, stride)."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _rows_first(param: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return a dense parameter's shape in the order of its storage, and its offset. Some are stored transposed."""
    offset, size, stride = _view(param)
    order = sorted(range(len(size)), key=lambda d: -stride[d])
    return tuple(size[d] for d in order), offset


def _param_boxes(param: torch.Tensor, copy: LoadCopy) -> list[Box]:
    return _storage_boxes(param, copy.offset, copy.box.size, copy.stride)


def _fill_boxes(param: torch.Tensor, fill: Fill) -> list[Box]:
    return _storage_boxes(param, fill.offset, fill.size, fill.stride)


def _storage_boxes(param: torch.Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> list[Box]:
    shape, start = _rows_first(param)
    boxes = strided_boxes(shape, offset - start, size, stride)
    if boxes is None and prod(size) > 16 * MAX_BOXES:
        raise UnsupportedError(
            f"the engine's loader writes {prod(size)} elements of a parameter of shape {tuple(param.shape)} in over "
            f"{MAX_BOXES} blocks, and a load plan lists blocks. Use CheckpointTransport(folder, restart=True)"
        )
    # Rare: a region that is no box is counted element by element.
    return boxes if boxes is not None else _element_boxes(shape, offset - start, size, stride)


def _element_boxes(shape: tuple[int, ...], offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> list[Box]:
    numbers = torch.arange(1).add(offset)
    for length, step in zip(size, stride, strict=True):
        numbers = (numbers[:, None] + torch.arange(length)[None, :] * step).reshape(-1)
    columns = torch.unravel_index(numbers, shape)
    return [Box(tuple(map(int, row)), (1,) * len(shape)) for row in zip(*columns, strict=True)]


def _inside(hole: Box, boxes: list[Box]) -> list[Box]:
    """Return the parts of `boxes` within `hole`, in the hole's own coordinates."""
    parts = [part for box in boxes if (part := hole.intersect(box)) is not None]
    return [Box(tuple(p - h for p, h in zip(part.start, hole.start, strict=True)), part.size) for part in parts]
