"""The interface of a weight source, and the parts that all sources share.

A weight source lists a trainer's tensors under their checkpoint names and gives this rank's shards of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import nn

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.kernels.runs import Run, join_runs
from weightsync.planning.layout import Box, Manifest, TensorMeta, itemsize
from weightsync.selection import TensorSelection


class DeclaredTensors(Protocol):
    """vLLM's `WeightSource`, as of 0.33: it need not be iterable itself."""

    @property
    def metadata(self) -> Any:
        """The `ParamMeta` objects of all tensors, or a function that returns them."""


Pairs: TypeAlias = "Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]"
"""Checkpoint names and whole tensors, one pair after the other."""
Model: TypeAlias = "nn.Module | Sequence[nn.Module] | Pairs | Callable[[], Pairs] | DeclaredTensors | None"
"""The argument of `push`: one module, the chunks of a pipeline rank in their order, or a stream."""
Barrier: TypeAlias = "Callable[[], None]"
"""A function that returns once every trainer rank has called it. It raises if a rank has failed."""


def one_module(model: Model) -> nn.Module:
    """Return the model of a backend that has no chunks. Raise `ConfigError` for anything but one module."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Sequence):
        raise ConfigError(
            f"push got a {type(model).__name__} of length {len(model)}, expected one torch.nn.Module; lists of chunks "
            'are for backend="megatron". Elsewhere push an nn.ModuleList of them, renamed by a TensorSelection'
        )
    raise ConfigError(
        f'push got a {type(model).__name__}, expected the model, a torch.nn.Module; tensors are for backend="stream"'
    )


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of the tensor's dtype. Raise `UnsupportedError` for a dtype that does not travel."""
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        itemsize(name)
    except ConfigError as error:
        raise UnsupportedError(error.message) from None
    return name


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's region of one tensor.

    Attributes:
        meta: The full shape, and the dtype of the trainer's tensor.
        box: The region within the full shape.
        tensor: A detached view of the trainer's memory, on CPU or CUDA, of shape `box.size`. It may be strided.
        trains: False for a parameter that needs no gradient. Buffers count as trained.
        compute: None, or a function that returns this push's values in memory of their own. Each push calls it after
            `ShardSource.gather`. Of `tensor` only shape, dtype and device count then.
    """

    meta: TensorMeta
    box: Box
    tensor: torch.Tensor
    trains: bool = True
    compute: Callable[[], torch.Tensor] | None = None

    def values(self) -> torch.Tensor:
        """Return the shard's current values. A shard with `compute` needs `ShardSource.gather` before."""
        return self.tensor if self.compute is None else self.compute()


@dataclass(frozen=True, eq=False)
class Reading:
    """One answer of a source: a model's tensors on this rank. Readings are compared by identity.

    Attributes:
        manifest: Every tensor of this rank with full shape and the trainer's dtype, in the model's export order. A
            pipeline stage knows its own tensors. A push delivers the union of all ranks' manifests.
        shards: This rank's shards in the manifest's order, perhaps none. All ranks' shards together cover each tensor.
            Replicas (HSDP, DDP, buffers) each report their own.
        settings: Returns the state beside tensors that `compute` depends on, such as an adapter's multiplier. It must
            equal itself until that state changes. Ranks with the same tensors must have the same texts in it.
    """

    manifest: Manifest
    shards: list[TensorShard]
    settings: Callable[[], object] = tuple

    @cached_property
    def lying(self) -> list[TensorShard]:
        """The shards in the trainer's memory, so all but the computed ones."""
        return [shard for shard in self.shards if shard.compute is None]

    @cached_property
    def is_on_gpus(self) -> bool:
        """Whether all shards are on GPUs."""
        return all(shard.tensor.is_cuda for shard in self.shards)

    @cached_property
    def runs(self) -> list[Run]:
        """The memory of `lying`, in few runs. A run's members are numbers in `lying`."""
        return join_runs([shard.tensor for shard in self.lying])


def wait_for_copies(is_on_gpus: bool) -> None:
    """Wait until the current GPU has ended its copies to the CPU, as by `to("cpu", non_blocking=True)`.

    is_on_gpus: whether all tensors to be read are on GPUs. Their values are waited for on the GPU.
    """
    if torch.cuda.is_initialized() and not is_on_gpus:
        torch.cuda.synchronize()


def await_writes(shards: Iterable[TensorShard]) -> None:
    """Wait for the GPUs of these shards. The optimizer's writes may be queued on any stream."""
    for gpu in {shard.tensor.device for shard in shards if shard.tensor.is_cuda}:
        torch.cuda.synchronize(gpu)


def settled(reading: Reading) -> Reading:
    """Return `reading`, once its tensors on the CPU have their values."""
    wait_for_copies(reading.is_on_gpus)
    return reading


@runtime_checkable
class ShardSource(Protocol):
    """One trainer backend. Implement it to push from a trainer of your own.

    No forward or backward may be running. The trainer's GPU work may still be queued. Tensors on the CPU have their
    values: a source waits for copies from a GPU to them.
    """

    def read(self, model: Model) -> Reading:
        """Return this rank's tensors. Every push calls it. Local, except for a stream.

        A source may return the object of its last answer if nothing has moved or changed since. A push then skips the
        comparison of the shards' addresses. Shards at the addresses of the last push are not negotiated again, and the
        push uses the earlier shards, with their `compute`.

        Args:
            model: The model that the user pushes.

        Returns:
            The tensors. The views stay valid until the trainer moves its storages.

        Raises:
            UnsupportedError: Some tensors cannot be read. One error lists them all.
        """

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        """Fetch from other ranks the values that `compute` of these tensors' shards needs. Collective.

        Every trainer rank calls this at each push, for one group of tensors after the other. A call may drop the values
        that an earlier call fetched.

        Args:
            names: The tensors of the next group. The last call of a push has no names.
            barrier: Call it before collectives of the training job. It returns once every rank has called it, and
                raises if a rank has failed. Without it, ranks would wait in a collective for a failed rank.
        """

    def close(self) -> None:
        """Drop the model. The source can be used again afterwards."""


Found = TypeVar("Found")


class Memo(Generic[Found]):
    """A value that was read from a model, valid until something in the model moves."""

    def __init__(self) -> None:
        self._found: Found | None = None
        self._marks: object = None

    def of(self, marks: object, read: Callable[[], Found]) -> Found:
        """Return the last value of `read` if `marks` equal the last ones, else call `read`. None equals nothing."""
        if self._found is None or marks is None or marks != self._marks:
            self._marks = None  # `read` may raise
            self._found = read()
            self._marks = marks
        return self._found

    def clear(self) -> None:
        self._found = self._marks = None


class LocalSource(ABC):
    """A `ShardSource` with a memory: it reads this rank's tensors again only after one has moved."""

    def __init__(self, selection: TensorSelection) -> None:
        self.selection = selection
        self._memo: Memo[Reading] = Memo()

    @abstractmethod
    def _marks(self, model: Model) -> object:
        """Return a value that stays equal until a tensor of the model moves, or None if only `_read` can tell."""

    @abstractmethod
    def _read(self, model: Model) -> Reading:
        """Read the model's tensors."""

    def read(self, model: Model) -> Reading:
        marks = self._marks(model)
        return settled(self._memo.of(None if marks is None else (self.selection, marks), lambda: self._read(model)))

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        return

    def close(self) -> None:
        self._memo.clear()


class DerivedSource:
    """The tensors of `source` in another form. `read` returns the same object while `source` does."""

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        self._forget()

    def _forget(self) -> None:
        self._given: Reading | None = None  # the last answer of `source`
        self._reading: Reading | None = None

    def _derive(self, given: Reading) -> Reading:
        """Return the answer to an answer of `source`."""
        return given

    def read(self, model: Model) -> Reading:
        given = self._source.read(model)
        if self._reading is None or given is not self._given:
            self._given, self._reading = given, self._derive(given)
        return self._reading

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        self._source.gather(names, barrier)

    def close(self) -> None:
        self._forget()
        self._source.close()


class SteadySource(DerivedSource):
    """The tensors of `source`. `read` returns the same object until a tensor moves or changes."""

    def _forget(self) -> None:
        super()._forget()
        self._places: list[Any] = []

    def read(self, model: Model) -> Reading:
        last, found = self._reading, super().read(model)
        if found is not last:
            # Compare with noted addresses: resizing a storage moves the tensors of both readings.
            places = list(map(_place, found.shards))
            if last is not None and places == self._places and found.manifest == last.manifest:
                self._reading = found = last
            self._places = places
        return found


def _place(shard: TensorShard) -> tuple[Any, ...]:
    tensor = shard.tensor
    where = tensor.data_ptr(), tensor.untyped_storage()._cdata, tensor.stride(), tensor.device
    return shard.meta, shard.box, shard.trains, shard.compute is None, where
