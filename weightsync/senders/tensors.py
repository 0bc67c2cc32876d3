"""Reading the tensors of a module tree: what every backend whose model is one `nn.Module` per rank has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.layout import Box, Manifest, TensorMeta, flat_boxes, itemsize
from weightsync.senders.base import Model, Piece, TensorPolicy, one_module
from weightsync.senders.saved import SavedForm, SavedParts

ON_META = "it is on the meta device and has no values; materialise it first (`to_empty`, then load)"


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of the model, and the parts of it that this rank holds. Tied tensors have the same `identity`."""

    shape: tuple[int, ...]
    dtype: str
    identity: Hashable
    parts: list[tuple[Box, torch.Tensor]]


Source: TypeAlias = tuple[str, Callable[[], Held]]
"""A checkpoint name and what reads the tensor behind it, or raises `UnsupportedError` that says why it cannot."""


class ModuleSender(ABC):
    """A `Sender` of one module tree: applies the policy, lets tied tensors travel once under their first name, and
    refuses in one error all that cannot be read."""

    def __init__(self, policy: TensorPolicy) -> None:
        self.policy = policy
        self._saved = SavedForm(policy)

    @abstractmethod
    def sources(self, model: nn.Module) -> Iterator[Source]:
        """Every parameter and persistent buffer in the order of `state_dict`, tied ones under each name."""

    def manifest(self, model: Model) -> Manifest:
        return Manifest(tuple(part.meta for _, saved in self._as_saved(model) for part in saved.parts))

    def pieces(self, model: Model) -> list[Piece]:
        return [
            Piece(meta, region, view)
            for held, saved in self._as_saved(model)
            for meta, region, view in saved.cut(held.parts)
        ]

    def _as_saved(self, model: Model) -> list[tuple[Held, SavedParts]]:
        """What this rank holds of each of the model's tensors, and what these are in the checkpoint."""
        tensors = self._tensors(one_module(model))
        metas = [TensorMeta(name, held.shape, held.dtype) for name, held in tensors]
        saved = self._saved.of(one_module(model), metas)
        return [(held, parts) for (_, held), parts in zip(tensors, saved, strict=True)]

    @torch.no_grad()
    def _tensors(self, model: nn.Module) -> list[tuple[str, Held]]:
        """The tensors that travel, each once, with what this rank holds of them."""
        found: list[tuple[str, Held]] = []
        seen: set[Hashable] = set()
        refused: dict[str, str] = {}
        for name, read in self.sources(model):
            if self.policy.excludes(name):
                continue
            try:
                held = read()
            except UnsupportedError as error:
                refused[name] = error.message
                continue
            if held.identity not in seen:
                seen.add(held.identity)
                found.append((name, held))
        if refused:
            lines = "\n".join(f"  {name}: {reason}" for name, reason in refused.items())
            raise UnsupportedError(
                f"{len(refused)} tensors cannot be pushed (what should not travel goes into `exclude`):\n{lines}",
                tensors=refused,
            )
        return found

    def buffers(self, prefix: str, module: nn.Module, read: Callable[[torch.Tensor], Held]) -> Iterator[Source]:
        """The module's own persistent buffers, none where the policy says so."""
        for name, buffer in module._buffers.items():
            if buffer is not None and self.policy.buffers and name not in module._non_persistent_buffers_set:
                yield prefix + name, partial(read, buffer)


def read_whole(tensor: torch.Tensor) -> Held:
    """A tensor that this rank has all of."""
    values = readable(tensor)
    shape = tuple(values.shape)
    parts = [(Box.full(shape), values)] if values.numel() > 0 else []
    return Held(shape, dtype_name(values), memory_of(values, shape), parts)


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
    if values.is_meta:
        raise UnsupportedError(ON_META)
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
