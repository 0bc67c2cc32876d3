"""What a transport is: how the bytes of a push reach the engines' workers. One file has both ends.

    once, and again when what travels or who receives has changed
        rank 0          route        may these ranks reach these workers, and how
        every rank      prepare      allocate; say what each worker needs to read this rank's bytes
        every rank      connect      meet the workers, while `TransportReceiver.connect` runs on each of them
    every push
        every rank      look         prove and publish what is read in place, before any worker may read
        every rank      send         this rank's part of the plan, chunk by chunk, paced by the transport itself
        every worker    chunks       the same chunks in the same order, as each becomes readable
        rank 0          complete     every worker has committed to the version
    at any time
        any             abort, close

Bytes lie in *storages*: runs of bytes with a number, of a trainer rank. No message is sent for a chunk: the ends pace
each other, by matching sends and receives, by counters in shared memory, or by what is on the disk. A transport knows
nothing about weight sources, models or engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.errors import ProtocolError
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo
from weightsync.planning.layout import Manifest, ShardLocation
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.planning.wire_types import ByteRange, ChunkLayout, ReadRegions, Storage

ALIGN_BYTES = 256
"""Where tensors start in a slot; covers every dtype and the widest vector load."""
SLOTS = 2
"""Chunks in memory at once: one being read, one being filled."""
DIGEST_BYTES = 8
"""A run's digest follows its last byte, as a little-endian 64-bit integer."""

Wait = Callable[[float], None]
"""What a wait calls while it waits: sleep for at most that many seconds, and raise when there is bad news."""


@dataclass(frozen=True)
class LocalTensor:
    """What this rank has at one location.

    `tensor` is where it lies. With `compute`, `tensor` has the shape, dtype and device alone, and the values are made
    anew for each push, after `LocalTensors.gather` of the tensor's name.
    """

    tensor: torch.Tensor
    compute: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True)
class LocalTensors:
    """Everything that this rank holds, by where it lies.

    `gather` is collective among the ranks: it fetches what `compute` of the named tensors needs, and may forget what it
    fetched before. A transport calls it in `send` before each chunk, with the names that the push has not had yet.
    `model` is what was pushed.
    """

    at: Mapping[ShardLocation, LocalTensor]
    gather: Callable[[Sequence[str]], None] = lambda names: None
    model: Any = None


@dataclass(frozen=True)
class Endpoint:
    """What one worker is told. `storages` come from every rank, the rest from rank 0 alone.

    storages: [rank, storage, kind, fields] of what the worker maps.
    arrivals: one for each chunk of the plan.
    fields: what else `TransportReceiver.connect` needs.
    """

    storages: list[Storage] = field(default_factory=list)
    arrivals: tuple[ChunkLayout, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


class Transport(ABC):
    """The trainer's end. Every rank has one, made for one connection to the engines."""

    name: str
    owner: object = None
    """Who has connected it, until who has aborts it."""
    keeps_frozen: bool = True
    """False: what is frozen travels in every push too."""
    min_chunk_bytes: int = 1
    """What a chunk must have for its time to pass that of its messages, known to rank 0 after `route`."""
    encodings: tuple[str, ...] = ()
    """The values of `encoding` that it knows."""
    encoding: str | None = None
    """How what travels is written. Set before `route`; None stands for bytes as they are."""
    sent_bytes: int = 0
    """How many bytes the last `send` of this rank has sent. Zero where workers read them themselves."""
    newest_version: int = 0
    """The newest version that outlives engines, known to rank 0 after `prepare`. A push must be newer."""

    @abstractmethod
    def route(
        self,
        ranks: Sequence[MachineInfo],
        workers: Sequence[MachineInfo],
        manifest: Manifest,
        locations: Sequence[ShardLocation],
        reads: Sequence[ReadRegions],
    ) -> tuple[Chain, ...]:
        """Return the chains along which bytes go from these ranks to these workers; none where workers map memory.

        Rank 0 calls it; it sends nothing.

        Raises `PlacementError` when the ranks cannot reach the workers this way.
        """

    def can_map(self, tensor: LocalTensor) -> bool:
        """Return whether workers can read this tensor where it lies. Without chains alone."""
        return False

    @abstractmethod
    def prepare(self, plan: TransferPlan, tensors: LocalTensors, update: Update) -> list[Endpoint]:
        """Allocate, and return one endpoint for each worker. Collective.

        The tensors stay valid, at the same addresses, until the next `prepare`. What an earlier call allocated is let
        go.
        """

    def connect(self, deadline: Deadline) -> None:
        """Meet the workers while they connect. Every rank calls it, rank 0 in a background thread. Blocks."""
        return

    def in_place(self) -> list[ByteRange]:
        """Return the runs of this rank that workers read in place, which `prepare_push` digests. After `prepare`."""
        return []

    def prepare_push(self, sample: int | None) -> int:
        """Make what is read in place readable by others, and return the digest of this rank's sample of it.

        Every rank has called it, perhaps more than once, before any rank sends and before any worker may read. What a
        push needs and may not get, such as room on a disk, is taken here: the engines are untouched when it raises.
        `sample` is `WHOLE` for all bytes, None for no digest.
        """
        return 0

    def drop_workers(self, workers: Collection[int]) -> bool:
        """Send nothing to these workers from now on, whose engines have left. Every rank calls it, rank 0 first.

        Return False where that cannot be done: those that stay are then connected anew.
        """
        return False

    @abstractmethod
    def send(self, chunks: Sequence[int], sample: int | None, update: Update) -> None:
        """Send this rank's part of these chunks, the whole push. Every rank calls it; it returns once the bytes may be
        changed again, or sooner where workers read in place.

        Each run's digest of `sample` is written behind the run; none is with `sample` None. Waits with `update.wait`.
        Raises what that raises, and `SyncTimeoutError` when no chunk moves within the timeout.
        """

    def on_commit(self, version: int) -> None:
        """Note that every worker has loaded this version. Rank 0 calls it before the workers commit."""
        return

    @abstractmethod
    def abort(self) -> None:
        """Release everything and break every wait. From any thread, in any state, more than once."""


class TransportReceiver(ABC):
    """The worker's end, made for one worker's device."""

    copy_programs: int | None = None
    """How many programs of a GPU copy out of a chunk at most, so that the transport's own kernels are not held up."""
    waiting_for: Sequence[str] = ("trainer ranks",)
    """What people call those that a GPU may wait for when chunks come late, the nearest first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: Wait, deadline: Deadline) -> None:
        """Map or join what the endpoints name. What was connected before is let go, or used again where it is the same.

        Raises `PlacementError` when that cannot be done.
        """

    @abstractmethod
    def storage(self, rank: int, storage: int) -> torch.Tensor:
        """Return a storage's bytes, a 1-D uint8 tensor at a fixed address. A chunk's bytes are there once `chunks` has
        yielded its number."""

    @abstractmethod
    def chunks(self, numbers: Sequence[int], wait: Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        """Yield the number of each chunk of one whole push, in this order, once its bytes can be read.

        On a GPU they can be read by what follows on the current stream.

        A chunk's memory may be reused once the next one is asked for, in the order of the device's current stream.
        `deadline()` gives the deadline of each wait. An iterator that is not exhausted means that the push failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap, leave. More than once.

        After a failure the current stream of a GPU may still read what `storage` gave, or wait for what never comes.
        """


def align(nbytes: int) -> int:
    """Return the next multiple of what every region in a slot begins at."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def strided(data: torch.Tensor, dtype: str, offset: int, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a view into a storage's bytes (1-D uint8), with offset and strides in elements of `dtype`."""
    kind: torch.dtype = getattr(torch, dtype)
    whole = data[: data.numel() // kind.itemsize * kind.itemsize].view(kind)
    if offset < 0 or offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= max(whole.numel(), 1):
        raise ProtocolError(
            f"a region of {tuple(size)} {dtype} at element {offset} with strides {tuple(stride)} lies outside its "
            f"storage of {data.numel()} bytes"
        )
    return whole.as_strided(tuple(size), tuple(stride), whole.storage_offset() + offset)
