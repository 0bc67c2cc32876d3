"""Reading the tensors of a module tree: what every backend whose model is one `nn.Module` per rank has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.layout import Box, Manifest, TensorMeta, flat_boxes, itemsize
from weightsync.senders.base import Model, Piece, TensorPolicy, one_module
from weightsync.senders.names import modules, walk_shells
from weightsync.senders.peft import Adapter, adapter_of
from weightsync.senders.saved import SavedForm, SavedParts

ON_META = "it is on the meta device and has no values; materialise it first (`to_empty`, then load)"


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of the model, and the parts of it that this rank holds. Tied tensors have the same `identity`.
    `trains` is that of `Piece`; `adapter` has what is to be added to the parts."""

    shape: tuple[int, ...]
    dtype: str
    identity: Hashable
    parts: list[tuple[Box, torch.Tensor]]
    trains: bool
    adapter: Adapter | None = None


_SHAPE, _DTYPE, _LAYOUT, _TRAINS = map(attrgetter, ("shape", "dtype", "layout", "requires_grad"))

Source: TypeAlias = tuple[str, Callable[[], Held]]
"""A checkpoint name and what reads the tensor behind it, or raises `UnsupportedError` that says why it cannot."""


class ModuleSender(ABC):
    """A `Sender` of one module tree: applies the policy, lets tied tensors travel once under their first name, and
    refuses in one error all that cannot be read. Adapters of PEFT's are added to what `sources` reads."""

    def __init__(self, policy: TensorPolicy) -> None:
        self.policy = policy
        self._saved = SavedForm(policy)
        self._adapters: dict[str, Adapter] = {}  # by name of the tensor: what was found by the last `pieces`
        self._wrapped = False  # PEFT has wrapped layers, whose state is not only in their tensors
        self._last: tuple[tuple[TensorPolicy, list[Any]], list[Piece]] | None = None

    @abstractmethod
    def sources(self, model: nn.Module) -> Iterator[Source]:
        """Every parameter and persistent buffer in the order of `state_dict`, tied ones under each name."""

    def settle(self, found: list[nn.Module]) -> None:  # noqa: B027  (most have nothing to do)
        """Bring the tensors of the model, which has these modules, to where `sources` reads them."""

    def local(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """What of parameters and buffers this rank has in memory, in any order; None where that alone does not tell
        what is read."""
        return None

    def manifest(self, model: Model) -> Manifest:
        self.settle(modules(one_module(model)))
        return Manifest(tuple(part.meta for _, saved in self._as_saved(model) for part in saved.parts))

    def pieces(self, model: Model) -> list[Piece]:
        """The same list as the last time, as long as nothing has moved."""
        found = modules(one_module(model))
        self.settle(found)
        seen = marks(found, self.local)
        if self._last is not None and seen is not None and self._last[0] == (self.policy, seen):
            return self._last[1]
        pieces = self._pieces(model)
        self._last = ((self.policy, seen), pieces) if seen is not None and not self._wrapped else None
        return pieces

    def _pieces(self, model: Model) -> list[Piece]:
        tensors = self._as_saved(model)
        self._adapters = {
            part.meta.name: held.adapter for held, saved in tensors if held.adapter is not None for part in saved.parts
        }
        return [
            Piece(meta, box, view, held.trains, partial(self._merged, meta.name, box, view) if held.adapter else None)
            for held, saved in tensors
            for meta, box, view in saved.cut(held.parts)
        ]

    def sketch(self, model: Model) -> list[Piece]:
        """As `pieces`, of a model on the `meta` device: what this rank will hold, without values."""
        return [
            Piece(meta, box, view, held.trains)
            for held, saved in self._as_saved(model, on_meta=True)
            for meta, box, view in saved.cut(held.parts)
        ]

    def close(self) -> None:
        self._last = None
        self._adapters = {}

    def gather(self, names: Sequence[str]) -> None:
        for adapter in dict.fromkeys(self._adapters[name] for name in names if name in self._adapters):
            adapter.gather()

    def _merged(self, name: str, box: Box, values: torch.Tensor) -> torch.Tensor:
        return self._adapters[name].add_to(values, box)

    def _as_saved(self, model: Model, on_meta: bool = False) -> list[tuple[Held, SavedParts]]:
        """What this rank holds of each of the model's tensors, and what these are in the checkpoint."""
        tensors = self._tensors(one_module(model), on_meta)
        metas = [TensorMeta(name, held.shape, held.dtype) for name, held in tensors]
        saved = self._saved.of(one_module(model), metas)
        found = list(zip(tensors, saved, strict=True))
        if cut := [name for (name, held), parts in found if held.adapter is not None and not parts.are_the_whole()]:
            raise UnsupportedError(
                f"{len(cut)} tensors have an adapter and are saved in parts, such as {cut[0]}; leave adapters off them",
                tensors=dict.fromkeys(cut, "has an adapter, and is saved in parts"),
            )
        return [(held, parts) for (_, held), parts in found]

    @torch.no_grad()
    def _tensors(self, model: nn.Module, on_meta: bool) -> list[tuple[str, Held]]:
        """The tensors that travel, each once, with what this rank holds of them."""
        found: dict[str, Held] = {}
        first: dict[Hashable, str] = {}
        refused: dict[str, str] = {}
        adapters = adapters_of(model)
        self._wrapped = bool(adapters)
        without_weight = set(adapters)
        for name, read in self.sources(model):
            without_weight.discard(name.removesuffix("weight"))
            if self.policy.excludes(name):
                continue
            try:
                held = _adapted(name, read(), adapters)
            except UnsupportedError as error:
                refused[name] = error.message
                continue
            if any(part.is_meta for _, part in held.parts) and not on_meta:
                refused[name] = ON_META
                continue
            tied = found.setdefault(first.setdefault(held.identity, name), held)
            if tied.adapter is not held.adapter:
                refused[name] = f"it is tied to {first[held.identity]}, but an adapter is on one of them; untie them"
            elif held.trains and not tied.trains:
                found[first[held.identity]] = replace(tied, trains=True)
        refused |= {f"{prefix}weight": "it has an adapter, but is no parameter" for prefix in without_weight}
        if refused:
            raise refusal(refused)
        return list(found.items())

    def buffers(self, prefix: str, module: nn.Module, read: Callable[[torch.Tensor], Held]) -> Iterator[Source]:
        """The module's own persistent buffers, none where the policy says so."""
        for name, buffer in module._buffers.items():
            if buffer is not None and self.policy.buffers and name not in module._non_persistent_buffers_set:
                yield prefix + name, partial(read, buffer)


def marks(found: list[nn.Module], local: Callable[[list[torch.Tensor]], list[torch.Tensor] | None]) -> list[Any] | None:
    """What tells whether the model that has these modules is as it was: the modules, and for each tensor which it is,
    where that lies which `local` gives for it, and whether it trains. None when `local` gives None.

    Every push waits for it, so it is written for speed: lists of one thing each, made and compared without a line of
    Python for each tensor.
    """
    places: list[nn.Module | str] = []
    tensors: list[torch.Tensor | None] = []
    for module in found:
        places.append(module)
        if children := module._modules:
            places += children
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
    """The tensors, if they are nothing else than memory."""
    memory = {*map(type, tensors)} <= {nn.Parameter, torch.Tensor} and {*map(_LAYOUT, tensors)} <= {torch.strided}
    return tensors if memory else None


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """The layers that PEFT has wrapped, by the prefix of their tensors' names; one `Adapter` for each layer."""
    known: dict[nn.Module, Adapter | None] = {}
    found: dict[str, Adapter] = {}
    for prefix, shells in walk_shells(model):
        for shell in shells:
            if shell not in known:
                known[shell] = adapter_of(shell)
            if (adapter := known[shell]) is not None:
                found[prefix] = adapter
    return found


def _adapted(name: str, held: Held, adapters: dict[str, Adapter]) -> Held:
    """With the adapter, where `name` is the weight of a layer that has one. Raises `UnsupportedError` for one that
    cannot be added, and for whatever else is in its layer."""
    for end in (at + 1 for at, letter in enumerate(name) if letter == "."):
        if (adapter := adapters.get(name[:end])) is not None:
            names = adapter.names()
            if name[end:] == "weight":
                adapter.check(names, held.shape)
                return replace(held, trains=True, adapter=adapter if names else None)
    return held


def refusal(refused: dict[str, str]) -> UnsupportedError:
    """One error for all tensors that cannot be read, with what is wrong with each."""
    lines = "\n".join(f"  {name}: {reason}" for name, reason in refused.items())
    return UnsupportedError(
        f"{len(refused)} tensors cannot be pushed (what should not travel goes into `exclude`):\n{lines}",
        tensors=refused,
    )


def read_whole(tensor: torch.Tensor) -> Held:
    """A tensor that this rank has all of."""
    values = readable(tensor)
    shape = tuple(values.shape)
    parts = [(Box.full(shape), values)] if values.numel() > 0 else []
    return Held(shape, dtype_name(values), memory_of(values, shape), parts, trains(tensor))


def trains(tensor: torch.Tensor) -> bool:
    """Whether training may change it: a parameter that takes a gradient, or any buffer."""
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached. Raises `UnsupportedError` when it is not plain memory with values in it."""
    if is_lazy(tensor):
        raise UnsupportedError("it is not initialised yet; run a forward first")
    values = tensor.detach()
    if is_traceable_wrapper_subclass(values):
        raise UnsupportedError(f"{type(values).__name__} has no memory of its own; push the tensors that it wraps")
    if values.layout != torch.strided:
        raise UnsupportedError(f"its layout is {values.layout}, expected torch.strided")
    dtype_name(values)
    if values.numel() > 0 and values.untyped_storage().nbytes() == 0:
        raise UnsupportedError("its memory has been freed; is it sharded by something else than this backend?")
    return values


def memory_of(values: torch.Tensor, shape: tuple[int, ...]) -> Hashable:
    """Equal for two tensors of full shape `shape` that lie in the same memory."""
    at = values.untyped_storage()._cdata, values.storage_offset()
    return *at, shape, tuple(values.shape), values.stride(), values.dtype


def flat_parts(shape: tuple[int, ...], start: int, values: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Where `values` (1-D, contiguous) belong that are the elements from `start` on of a flattened tensor of `shape`:
    boxes, and views of `values`."""
    boxes = flat_boxes(shape, start, start + values.numel())
    runs = values.split([box.numel for box in boxes])
    return [(box, run.view(box.size)) for box, run in zip(boxes, runs, strict=True)]


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of the tensor's dtype. Raises `UnsupportedError` for one that does not travel."""
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        itemsize(name)
    except ConfigError as error:
        raise UnsupportedError(error.message) from None
    return name
