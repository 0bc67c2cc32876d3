"""The source for every backend with one `nn.Module` per rank."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.errors import UnsupportedError, first_few
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Box, TensorMeta, flat_boxes, itemsize, row_major
from weightsync.selection import TensorSelection
from weightsync.sources.base import Barrier, LocalSource, Memo, Model, Reading, TensorShard, dtype_name, one_module
from weightsync.sources.edits import Edit, edited, stand_in
from weightsync.sources.four_bits import FourBits, packed_weights
from weightsync.sources.hf_checkpoint import EachOnce, SavedParts, SavedRegion, each_once, manifest_of, saved_form
from weightsync.sources.module_tree import modules, own_tensors, walk, walk_shells
from weightsync.sources.peft import Adapter, adapters_around
from weightsync.sources.state_dict_hooks import changed_when_saved, hooks_of
from weightsync.sources.wrapped_tensors import inner_tensor

ON_META = "it is on the meta device: load it after `to_empty`; if accelerate offloads it, `remove_hook_from_submodules`"


@dataclass(frozen=True, slots=True)
class LocalParam:
    """One tensor of the model, and this rank's parts of it.

    Tied tensors have the same `identity`. `trains` is as in `TensorShard`. The tensor travels after its `edits`.
    """

    shape: tuple[int, ...]
    dtype: str
    identity: Hashable
    parts: list[tuple[Box, torch.Tensor]]
    trains: bool
    edits: tuple[Edit, ...] = ()


_SHAPE, _DTYPE, _LAYOUT, _TRAINS = map(attrgetter, ("shape", "dtype", "layout", "requires_grad"))

NamedReader: TypeAlias = tuple[str, Callable[[], LocalParam]]
"""A checkpoint name, and a function that reads its tensor or raises `UnsupportedError`."""


class ModuleSource(LocalSource):
    """A `ShardSource` of one module tree.

    It applies the selection and sends tied tensors once, under their first name. It refuses all unreadable tensors in
    one error. 4-bit weights are dequantised, and PEFT's adapters are added.
    """

    def __init__(self, selection: TensorSelection) -> None:
        super().__init__(selection)
        self._edited: dict[str, dict[SavedRegion, LocalParam]] = {}  # by name in the checkpoint, and by region
        self._whole: dict[torch.Tensor, torch.Tensor] = {}  # the last `gather`'s whole tensors, by this rank's part
        self._computed: dict[tuple[Hashable, Box], torch.Tensor] = {}  # parts of which the push needs more
        self._mergeable: set[Hashable] = set()  # the known forms of PEFT's layers
        self._wrapped = False  # PEFT has wrapped layers: their state is not only in tensors
        self._changed: Memo[dict[str, str]] = Memo()
        self._saved: Memo[EachOnce] = Memo()

    def readers(self, model: nn.Module) -> Iterator[NamedReader]:
        """Yield every parameter and persistent buffer in the order of `state_dict`, tied ones under each name."""
        for prefix, module in walk(model):
            yield from self.own_readers(prefix, module)

    @abstractmethod
    def read_param(self, tensor: torch.Tensor) -> LocalParam:
        """Return this rank's part of a parameter or buffer. Raise `UnsupportedError` if it cannot be read."""

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

    def read(self, model: Model) -> Reading:
        self._computed = {}  # a failed push may have left some
        return super().read(model)

    def _read(self, model: Model, on_meta: bool = False) -> Reading:
        tensors, tied = self._as_saved(one_module(model), on_meta)
        self._edited = {}
        for held, saved in tensors:
            for meta, region in zip(saved.metas, saved.regions, strict=True) if held.edits else ():
                self._edited.setdefault(meta.name, {})[region] = held
        trained = {meta.name for held, saved in tensors if held.trains for meta in saved.metas}
        shards = []
        for held, saved in tensors:
            for number, (box, tensor) in enumerate(held.parts):
                views = saved.views(box, tensor.stride())
                for at, view in enumerate(views):
                    meta = saved.metas[view.part]
                    compute = partial(self._compute, saved, number, at, len(views) > 1) if held.edits else None
                    shards.append(TensorShard(meta, view.box, view.of(tensor), meta.name in trained, compute))
        manifest = manifest_of((saved for _, saved in tensors), tied.items())
        place = {name: number for number, name in enumerate(manifest.names)}
        return Reading(manifest, sorted(shards, key=lambda shard: place[shard.meta.name]), self._settings)

    def close(self) -> None:
        super().close()
        self._saved.clear()
        self._changed.clear()
        self._edited, self._whole, self._computed = {}, {}, {}

    def _settings(self) -> list[str]:
        edited = (held for those in self._edited.values() for held in those.values())
        return ["".join(edit.settings() for edit in held.edits) for held in edited]

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        self._whole = {}  # free the tensors of the last names first
        due = [held for name in names for held in self._edited.get(name, {}).values()]
        identities = {held.identity for held in due}
        self._computed = {key: values for key, values in self._computed.items() if key[0] in identities}
        inputs = dict.fromkeys(each for held in due for edit in held.edits for each in edit.inputs())
        with torch.no_grad():
            self._whole = self.whole([*inputs], barrier)

    def _compute(self, saved: SavedParts, number: int, at: int, is_one_of_many: bool) -> torch.Tensor:
        """Compute part `number` of a tensor of the model, and return view number `at` of it.

        If the push needs more of it, the part is kept until `gather` begins with other tensors.
        """
        held = self._edited[saved.metas[0].name][saved.regions[0]]
        box, values = held.parts[number]
        computed = self._computed.get((held.identity, box))
        if computed is None:
            computed = edited(held.edits, held.shape, values, box, self._whole)
            if is_one_of_many:
                self._computed[held.identity, box] = computed
        return saved.views(box, computed.stride())[at].of(computed)

    def _as_saved(self, model: nn.Module, on_meta: bool) -> tuple[list[tuple[LocalParam, SavedParts]], dict[str, str]]:
        """Return this rank's part of each of the model's tensors, with its parts in the checkpoint.

        The second result is that of `each_once`.
        """
        held, tied, excluded = self._tensors(model, on_meta)
        held |= {other: held[name] for other, name in tied.items()}
        metas = [TensorMeta(name, own.shape, own.dtype) for name, own in held.items()]
        names, selection = [tied.get(name, name) for name in held], self.selection
        marks = weakref.ref(model), metas, names, selection, excluded
        saved, ties = self._saved.of(marks, lambda: each_once(names, saved_form(model, metas, selection, excluded)))
        return list(zip(held.values(), saved, strict=True)), ties

    @torch.no_grad()
    def _tensors(self, model: nn.Module, on_meta: bool) -> tuple[dict[str, LocalParam], dict[str, str], list[str]]:
        """Return this rank's part of each of the model's tensors, tied ones under their first names.

        The second result has the first name of each tied tensor by its other names. The third has the excluded names.
        """
        found: dict[str, LocalParam] = {}
        first: dict[Hashable, str] = {}
        others: dict[str, str] = {}
        refused: dict[str, str] = {}
        excluded: list[str] = []
        adapters = adapters_of(model)
        self._wrapped = bool(adapters)
        packed = packed_weights(model)
        absent = {prefix + adapter.tail for prefix, own in adapters.items() for adapter in own}
        there: dict[str, tuple[Hashable, tuple[int, ...], torch.dtype]] = {}
        hooks = [hook for module in modules(model) for hook in hooks_of(module)]
        for name, read in self.readers(model):
            absent.discard(name)
            if self.selection.excludes(name):
                excluded.append(name)
                continue
            try:
                held = read()
                held = self._adapted(name, unpacked(held, packed[name]) if name in packed else held, adapters)
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
                # PEFT merges each of the layers into the one tensor.
                edits = (*tied.edits, *(edit for edit in held.edits if edit not in tied.edits))
                found[first[held.identity]] = replace(tied, trains=tied.trains or held.trains, edits=edits)
        refused |= self._changed.of((weakref.ref(model), there, hooks), lambda: changed_when_saved(model, there))
        refused |= dict.fromkeys(absent, "it has an adapter, but is no parameter")
        if refused:
            raise refusal(refused)
        return found, others, excluded

    def _adapted(self, name: str, held: LocalParam, adapters: dict[str, list[Adapter]]) -> LocalParam:
        """Return `held` with its adapters, if `name` is a tensor that adapters change.

        Raises `UnsupportedError` for an adapter that cannot be merged, also if `name` is another tensor of its layer.
        """
        prefix, _, tail = name.rpartition(".")
        for adapter in reversed(adapters.get(f"{prefix}.", ())):  # PEFT merges inner layers first
            if adapter.names() and adapter.tail == tail:
                dtype = getattr(torch, held.dtype)
                adapter.check(held.shape, dtype, lambda each: self.read_param(each).shape, self._mergeable)
                held = replace(held, edits=(*held.edits, adapter))
            held = replace(held, trains=held.trains or adapter.tail == tail)
        return held

    def own_readers(self, prefix: str, module: nn.Module) -> Iterator[NamedReader]:
        """Yield the module's own parameters and persistent buffers, without buffers if the selection has none."""
        for name, tensor in own_tensors(module, self.selection.buffers):
            yield prefix + name, partial(self.read_param, tensor)


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
    of_held = (list(map(read, held)) for read in (torch.Tensor.data_ptr, _SHAPE, torch.Tensor.stride, _DTYPE))
    return [places, list(map(id, tensors)), *of_held, list(map(_TRAINS, there))]


def plain(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the memory of the tensors if all are plain, or wrappers around plain ones. Else return None."""
    if not {*map(type, tensors)} <= {nn.Parameter, torch.Tensor}:
        tensors = list(map(inner_tensor, tensors))
    memory = {*map(type, tensors)} <= {nn.Parameter, torch.Tensor} and {*map(_LAYOUT, tensors)} <= {torch.strided}
    return tensors if memory else None


def adapters_of(model: nn.Module) -> dict[str, list[Adapter]]:
    """Return the adapters around each module that PEFT has wrapped, by the prefix of the module's tensors."""
    known: dict[nn.Module, list[Adapter]] = {}
    found: dict[str, list[Adapter]] = {}
    for prefix, shells in walk_shells(model):
        if adapters := known.setdefault(shells[0], adapters_around(shells)):
            found[prefix] = adapters
    return found


def unpacked(held: LocalParam, weight: FourBits) -> LocalParam:
    """Return this rank's part of a weight in 4 bits as a part of the values. They share no memory with the trainer."""
    per_element = 2 * itemsize(held.dtype)
    shape, dtype = tuple(weight.state.shape), weight.state.dtype
    parts = []
    for box, packed in held.parts:
        start = sum(a * step for a, step in zip(box.start, row_major(held.shape), strict=True)) * per_element
        count = min(packed.numel() * per_element, prod(shape) - start)
        if count > 0:  # else the rank has only padding
            parts += flat_parts(shape, start, stand_in(dtype, packed.device).expand(count))
    return replace(held, shape=shape, dtype=dtype_name(torch.empty((), dtype=dtype)), parts=parts, edits=(weight,))


def refusal(refused: dict[str, str]) -> UnsupportedError:
    """Return one error for all tensors that cannot be read. Its text has one line per reason."""
    alike = grouped(refused, refused.__getitem__)
    lines = "\n".join(f"  {first_few(names)}: {reason}" for reason, names in alike.items())
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
