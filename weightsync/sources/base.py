"""What a trainer backend answers: which tensors there are, under their checkpoint names, and where their bytes lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import nn

from weightsync.errors import ConfigError
from weightsync.selection import TensorSelection

if TYPE_CHECKING:
    import torch

    from weightsync.planning.layout import Box, Manifest, TensorMeta

Pairs: TypeAlias = "Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]"
"""Checkpoint names and whole tensors, one after the other."""
Model: TypeAlias = "nn.Module | Sequence[nn.Module] | Pairs | Callable[[], Pairs] | None"
"""What is pushed: one module, the chunks of a pipeline rank in their order, or a stream."""


def one_module(model: Model) -> nn.Module:
    """Return the model of a backend that has no chunks. Raises `ConfigError` for anything but one module."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Sequence):
        raise ConfigError(
            f"push was given {type(model).__name__} of length {len(model)}, and takes one torch.nn.Module; only the "
            'chunks of backend="megatron" come as several'
        )
    raise ConfigError(
        f"push takes the model itself, a torch.nn.Module, and got {type(model).__name__}; tensors are for "
        'backend="stream"'
    )


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's region of one tensor.

    meta: the full shape, and the dtype that the trainer holds.
    tensor: a detached view of the trainer's memory, on CPU or CUDA, of shape `box.size`. It may be strided.
    trains: False for what training does not change, a parameter that needs no gradient. Buffers count as trained.
    compute: None, or what each push calls for new values, in their own memory, after `ShardSource.gather`. Only shape,
        dtype and device of `tensor` count then.
    """

    meta: TensorMeta
    box: Box
    tensor: torch.Tensor
    trains: bool = True
    compute: Callable[[], torch.Tensor] | None = None

    def values(self) -> torch.Tensor:
        """Return what the shard holds now. After `ShardSource.gather` where it is computed."""
        return self.tensor if self.compute is None else self.compute()


@runtime_checkable
class ShardSource(Protocol):
    """One trainer backend.

    `manifest` and `shards` are local, not collective, but for those of a stream. No forward or backward may be
    running. The trainer's pending GPU work need not have finished.
    """

    def manifest(self, model: Model) -> Manifest:
        """Return every tensor that this rank knows of: full shapes, the trainer's dtypes, in the model's export order.

        A pipeline stage knows its own tensors. A push delivers the union of all ranks' manifests. Raises one
        `UnsupportedError` that lists all tensors that cannot be read.
        """

    def shards(self, model: Model) -> list[TensorShard]:
        """Return what this rank holds, in the manifest's order. It may be nothing.

        The list is the same object as the last time for as long as nothing has moved, which makes a push cheap. All
        ranks' shards together cover each tensor. Replicas (HSDP, DDP, buffers) each report their own. The views stay
        valid until the trainer moves its storages. Raises as `manifest` does.
        """

    def gather(self, names: Sequence[str]) -> None:
        """Fetch from other ranks what the `compute` of these tensors' shards needs. Collective.

        Every trainer rank calls this at each push, for one group of tensors after the other. It may drop what an
        earlier call fetched. The last call has no names: the push needs no more.
        """

    def close(self) -> None:
        """Drop the model. The source may be used again afterwards."""


def no_barrier() -> None:
    """Do what a source's attribute `barrier` does outside of pushes: nothing.

    A source whose `gather` takes collectives of the training job has this attribute, and calls it before. In a push it
    returns once every rank has come. Otherwise a rank that fails would leave the others waiting in a collective.
    """


Found = TypeVar("Found")


class Memo(Generic[Found]):
    """What was read of a model, for as long as nothing of it moves."""

    def __init__(self) -> None:
        self._found: Found | None = None
        self._marks: object = None

    def of(self, marks: object, read: Callable[[], Found]) -> Found:
        """Return what `read` gave last if `marks` equal those of then, else what it gives now. None equals nothing."""
        if self._found is None or marks is None or marks != self._marks:
            self._marks = None  # `read` may raise
            self._found = read()
            self._marks = marks
        return self._found

    def clear(self) -> None:
        self._found = self._marks = None


class LocalSource(ABC):
    """A `ShardSource` that reads what this rank holds, anew only when something has moved."""

    def __init__(self, selection: TensorSelection) -> None:
        self.selection = selection
        self._snapshot: Memo[tuple[Manifest, list[TensorShard]]] = Memo()
        self._last = LastShards()

    @abstractmethod
    def _marks(self, model: Model) -> object:
        """Return what is equal as long as nothing of the model has moved, or None if only `_read` can tell."""

    @abstractmethod
    def _read(self, model: Model) -> tuple[Manifest, list[TensorShard]]:
        """Return the manifest and this rank's shards."""

    def manifest(self, model: Model) -> Manifest:
        return self._look(model)[0]

    def shards(self, model: Model) -> list[TensorShard]:
        return self._last.of(self._look(model)[1])

    def gather(self, names: Sequence[str]) -> None:
        return

    def close(self) -> None:
        self._snapshot.clear()
        self._last = LastShards()

    def _look(self, model: Model) -> tuple[Manifest, list[TensorShard]]:
        marks = self._marks(model)
        return self._snapshot.of(None if marks is None else (self.selection, marks), lambda: self._read(model))


class LastShards:
    """The shards that were given last, and where each of them lay then."""

    def __init__(self) -> None:
        self.shards: list[TensorShard] = []
        self._places: list[Any] = []

    def of(self, shards: list[TensorShard]) -> list[TensorShard]:
        """Return the list of the last call if `shards` has the same tensors at the same places, else `shards`.

        Places are compared as they were noted: storage that is resized moves under the tensors of both lists.
        """
        if shards is not self.shards:
            places = list(map(_place, shards))
            if places != self._places:
                self.shards, self._places = shards, places
        return self.shards


def _place(shard: TensorShard) -> tuple[Any, ...]:
    tensor = shard.tensor
    where = tensor.data_ptr(), tensor.untyped_storage()._cdata, tensor.stride(), tensor.device
    return shard.meta, shard.box, shard.trains, shard.compute is None, where
