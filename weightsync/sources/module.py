"""The source for every backend with one `nn.Module` per rank."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from msgspec.structs import replace as replace_meta
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.errors import UnsupportedError, first_few
from weightsync.planning.layout import Box, TensorMeta, flat_boxes
from weightsync.selection import TensorSelection
from weightsync.sources.base import Barrier, LocalSource, Memo, Model, Reading, TensorShard, dtype_name, one_module
from weightsync.sources.hf_checkpoint import SavedParts, manifest_of, saved_form
from weightsync.sources.module_tree import modules, walk_shells
from weightsync.sources.peft import Adapter, adapter_of
from weightsync.sources.state_dict_hooks import changed_when_saved, hooks_of
from weightsync.sources.wrapped_tensors import inner_tensor

ON_META = "it is on the meta device and has no values; materialise it first (`to_empty`, then load)"


@dataclass(frozen=True, slots=True)
class LocalParam:
    """One tensor of the model, and this rank's parts of it.

    Tied tensors have the same `identity`. `trains` is as in `TensorShard`. `adapter` is added to the parts.
    """

    shape: tuple[int, ...]
    dtype: str
    identity: Hashable
    parts: list[tuple[Box, torch.Tensor]]
    trains: bool
    adapter: Adapter | None = None


_SHAPE, _DTYPE, _LAYOUT, _TRAINS = map(attrgetter, ("shape", "dtype", "layout", "requires_grad"))

NamedReader: TypeAlias = tuple[str, Callable[[], LocalParam]]
"""A checkpoint name, and a function that reads its tensor or raises `UnsupportedError`."""


class ModuleSource(LocalSource):
    """A `ShardSource` of one module tree.

    It applies the selection and sends tied tensors once, under their first name. It refuses all unreadable tensors in
    one error. PEFT's adapters are added to the values of `readers`.
    """

    def __init__(self, selection: TensorSelection) -> None:
        super().__init__(selection)
        self._adapters: dict[str, Adapter] = {}  # by name of the weight
        self._whole: dict[torch.Tensor, torch.Tensor] = {}  # the last `gather`'s whole factors, by this rank's factor
        self._wrapped = False  # PEFT has wrapped layers: their state is not only in tensors
        self._changed: Memo[dict[str, str]] = Memo()
        self._saved: Memo[list[list[SavedParts]]] = Memo()

    @abstractmethod
    def readers(self, model: nn.Module) -> Iterator[NamedReader]:
        """Yield every parameter and persistent buffer in the order of `state_dict`, tied ones under each name."""

    @abstractmethod
    def read_param(self, tensor: torch.Tensor) -> LocalParam:
        """Return this rank's part of a parameter. Raise `UnsupportedError` if it cannot be read."""

    @abstractmethod
    def whole(self, tensors: Sequence[torch.Tensor], barrier: Barrier) -> dict[torch.Tensor, torch.Tensor]:
        """Return each of these parameters whole. `read_param` can read them all. Collective if any is sharded.

        barrier: as for `ShardSource.gather`.
        """

    def reshard(self, found: list[nn.Module]) -> None:
        """Put the tensors of a model with the modules `found` into the state that `readers` reads."""

    def local(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return this rank's memory of these tensors, in any order, or None if addresses alone do not show a change."""
        return None

    def sketch(self, model: Model) -> list[TensorShard]:
        """Return the shards of a model on the `meta` device: this rank's future regions, without values."""
        return self._read(model, on_meta=True).shards

    def _marks(self, model: Model) -> object:
        found = modules(one_module(model))
        self.reshard(found)
        return None if self._wrapped else fingerprint(found, self.local)

    def _read(self, model: Model, on_meta: bool = False) -> Reading:
        tensors, tied = self._as_saved(one_module(model), on_meta)
        self._adapters = {
            meta.name: held.adapter for held, saved in tensors if held.adapter is not None for meta in saved.metas
        }
        trained = {meta.name for held, saved in tensors if held.trains for meta in saved.metas}
        shards = []
        for held, saved in tensors:
            for meta, box, view in saved.cut(held.parts):
                compute = partial(self._merged, meta.name, box, view) if held.adapter else None
                shards.append(TensorShard(meta, box, view, meta.name in trained, compute))
        manifest = manifest_of((saved for _, saved in tensors), tied)
        place = {name: number for number, name in enumerate(manifest.names)}
        return Reading(manifest, sorted(shards, key=lambda shard: place[shard.meta.name]), self._settings)

    def close(self) -> None:
        super().close()
        self._saved.clear()
        self._changed.clear()
        self._adapters, self._whole = {}, {}

    def _settings(self) -> list[Any]:
        """Return the active adapters and their scaling."""
        return [
            (name, [(active, adapter.scaling(active)) for active in adapter.names()])
            for name, adapter in self._adapters.items()
        ]

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        self._whole = {}  # free the factors of the last names first
        adapters = dict.fromkeys(self._adapters[name] for name in names if name in self._adapters)
        with torch.no_grad():
            self._whole = self.whole([factor for adapter in adapters for factor in adapter.active_factors()], barrier)

    def _merged(self, name: str, box: Box, values: torch.Tensor) -> torch.Tensor:
        return self._adapters[name].add_to(values, box, self._whole)

    def _as_saved(
        self, model: nn.Module, on_meta: bool
    ) -> tuple[list[tuple[LocalParam, SavedParts]], list[tuple[str, str]]]:
        """Return this rank's part of each of the model's tensors, with its parts in the checkpoint.

        The second list has (other name, name), in the checkpoint, of each tied tensor that is saved unchanged.
        """
        tensors, tied = self._tensors(model, on_meta)
        of_name = {name: TensorMeta(name, held.shape, held.dtype) for name, held in tensors}
        others = [replace_meta(of_name[name], name=other) for other, name in tied.items()]
        marks = weakref.ref(model), list(of_name.values()), others, self.selection
        saved, saved_others = self._saved.of(
            marks, lambda: [saved_form(model, metas, self.selection) for metas in (list(of_name.values()), others)]
        )
        found = list(zip(tensors, saved, strict=True))
        if cut := [name for (name, held), parts in found if held.adapter is not None and not parts.are_the_whole()]:
            raise UnsupportedError(
                f"{len(cut)} tensors have an adapter and are saved in parts, such as {cut[0]}; leave adapters off them",
                tensors=dict.fromkeys(cut, "has an adapter, and is saved in parts"),
            )
        by_name = dict(zip(of_name, saved, strict=True))
        ties = [(other, by_name[name]) for other, name in zip(saved_others, tied.values(), strict=True)]
        return [(held, parts) for (_, held), parts in found], [
            (other.metas[0].name, first.metas[0].name)
            for other, first in ties
            if len(other.metas) == len(first.metas) == 1 and other.are_the_whole() and first.are_the_whole()
        ]

    @torch.no_grad()
    def _tensors(self, model: nn.Module, on_meta: bool) -> tuple[list[tuple[str, LocalParam]], dict[str, str]]:
        """Return the tensors that travel, each once, with this rank's part.

        The second result has the first name of each tied tensor by its other names.
        """
        found: dict[str, LocalParam] = {}
        first: dict[Hashable, str] = {}
        others: dict[str, str] = {}
        refused: dict[str, str] = {}
        adapters = adapters_of(model)
        self._wrapped = bool(adapters)
        without_weight = set(adapters)
        there: dict[str, tuple[Hashable, tuple[int, ...], torch.dtype]] = {}
        hooks = [hook for module in modules(model) for hook in hooks_of(module)]
        for name, read in self.readers(model):
            without_weight.discard(name.removesuffix("weight"))
            if self.selection.excludes(name):
                continue
            try:
                held = self._adapted(name, read(), adapters)
            except UnsupportedError as error:
                refused[name] = error.message
                continue
            there[name] = held.identity, held.shape, getattr(torch, held.dtype)
            if any(part.is_meta for _, part in held.parts) and not on_meta:
                refused[name] = ON_META
                continue
            tied = found.setdefault(first.setdefault(held.identity, name), held)
            if tied is not held:
                others[name] = first[held.identity]
            if tied.adapter is not held.adapter:
                refused[name] = f"it is tied to {first[held.identity]}, but one of the two has an adapter; untie them"
            elif held.trains and not tied.trains:
                found[first[held.identity]] = replace(tied, trains=True)
        refused |= self._changed.of((weakref.ref(model), there, hooks), lambda: changed_when_saved(model, there))
        refused |= {f"{prefix}weight": "it has an adapter, but is no parameter" for prefix in without_weight}
        if refused:
            raise refusal(refused)
        return list(found.items()), others

    def _adapted(self, name: str, held: LocalParam, adapters: dict[str, Adapter]) -> LocalParam:
        """Return `held` with its adapter, if `name` is the weight of a layer with an adapter.

        Raises `UnsupportedError` for an adapter that cannot be added, also if `name` is another tensor of its layer.
        """
        for end in (at + 1 for at, letter in enumerate(name) if letter == "."):
            if (adapter := adapters.get(name[:end])) is not None:
                names = adapter.names()
                if name[end:] == "weight":
                    adapter.check(names, held.shape, lambda factor: self.read_param(factor).shape)
                    return replace(held, trains=True, adapter=adapter if names else None)
        return held

    def buffers(
        self, prefix: str, module: nn.Module, read: Callable[[torch.Tensor], LocalParam]
    ) -> Iterator[NamedReader]:
        """Yield the module's own persistent buffers, or none if the selection has no buffers."""
        for name, buffer in module._buffers.items():
            if buffer is not None and self.selection.buffers and name not in module._non_persistent_buffers_set:
                yield prefix + name, partial(read, buffer)


def fingerprint(
    found: list[nn.Module], local: Callable[[list[torch.Tensor]], list[torch.Tensor] | None]
) -> list[Any] | None:
    """Return a value that stays equal until the model with these modules changes, or None if `local` returns None.

    It has the modules, and each tensor's identity, its address from `local`, and whether it trains. Every push waits
    for it. So it consists of one list per property, and making and comparing it runs no Python per tensor.
    """
    places: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    for module in found:
        places.append(module)
        if children := module._modules:
            places += children
        for hooks in (module._state_dict_hooks, module._state_dict_pre_hooks):
            if hooks:
                places += hooks.values()
        if parameters := module._parameters:
            places += parameters
            tensors += parameters.values()
        if buffers := module._buffers:
            places += buffers
            tensors += buffers.values()
    there = [tensor for tensor in tensors if tensor is not None]
    if (held := local(there)) is None:
        return None
    return [
        places,
        list(map(id, tensors)),
        list(map(torch.Tensor.data_ptr, held)),
        list(map(_SHAPE, held)),
        list(map(torch.Tensor.stride, held)),
        list(map(_DTYPE, held)),
        list(map(_TRAINS, there)),
    ]


def plain(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the memory of the tensors if all are plain, or wrappers around plain ones. Else return None."""
    if not {*map(type, tensors)} <= {nn.Parameter, torch.Tensor}:
        tensors = list(map(inner_tensor, tensors))
    memory = {*map(type, tensors)} <= {nn.Parameter, torch.Tensor} and {*map(_LAYOUT, tensors)} <= {torch.strided}
    return tensors if memory else None


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return an `Adapter` for each layer that PEFT has wrapped, by the prefix of its tensors' names."""
    known: dict[nn.Module, Adapter | None] = {}
    found: dict[str, Adapter] = {}
    for prefix, shells in walk_shells(model):
        for shell in shells:
            if shell not in known:
                known[shell] = adapter_of(shell)
            if (adapter := known[shell]) is not None:
                found[prefix] = adapter
    return found


def refusal(refused: dict[str, str]) -> UnsupportedError:
    """Return one error for all tensors that cannot be read. Its text has one line per reason."""
    names: dict[str, list[str]] = {}
    for name, reason in refused.items():
        names.setdefault(reason, []).append(name)
    lines = "\n".join(f"  {first_few(alike)}: {reason}" for reason, alike in names.items())
    return UnsupportedError(
        f"{len(refused)} tensors cannot be pushed (to leave them out, name them in `exclude`):\n{lines}",
        tensors=refused,
    )


def read_whole(tensor: torch.Tensor) -> LocalParam:
    """Read a tensor that is whole on this rank."""
    values = readable(tensor)
    shape = tuple(values.shape)
    parts = [(Box.full(shape), values)] if values.numel() > 0 else []
    return LocalParam(shape, dtype_name(values), memory_of(values, shape), parts, trains(tensor))


def trains(tensor: torch.Tensor) -> bool:
    """Return whether training may change a tensor: a parameter that takes a gradient, or any buffer."""
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, detached. Raise `UnsupportedError` if it is not plain memory with values."""
    if is_lazy(tensor):
        raise UnsupportedError("it is not initialised yet; run a forward first")
    values = inner_tensor(tensor).detach()
    if isinstance(values, DTensor):
        raise UnsupportedError('it is a DTensor, as `fully_shard` makes them; backend="fsdp" reads these')
    if is_traceable_wrapper_subclass(values):
        raise UnsupportedError(
            f"it is a {type(values).__name__}, a tensor subclass around others; push its dequantised values, with "
            'backend="stream"'
        )
    if values.layout != torch.strided:
        raise UnsupportedError(f"its layout is {values.layout}, expected torch.strided")
    if values.is_neg():
        raise UnsupportedError("it is the negative of its memory; give it memory of its own (`resolve_neg()`)")
    dtype_name(values)
    if values.numel() > 0 and values.untyped_storage().nbytes() == 0:
        raise UnsupportedError("its memory has been freed; check that its sharding is of this backend")
    return values


def memory_of(values: torch.Tensor, shape: tuple[int, ...]) -> Hashable:
    """Return a value that is equal for two tensors of full shape `shape` in the same memory."""
    at = values.untyped_storage()._cdata, values.storage_offset()
    return *at, shape, tuple(values.shape), values.stride(), values.dtype


def flat_parts(shape: tuple[int, ...], start: int, values: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Cut `values`, the elements from `start` on of a flattened tensor of `shape`, into boxes.

    `values` is 1-D and contiguous. Returns each box with its view of `values`.
    """
    boxes = flat_boxes(shape, start, start + values.numel())
    runs = values.split([box.numel for box in boxes])
    return [(box, run.view(box.size)) for box, run in zip(boxes, runs, strict=True)]
