"""The interface of a transport, from trainer ranks to engine workers. One file has both ends of a transport.

    once, and again after a change of the tensors or the receivers
        rank 0          invite       return an invitation for each rank and worker, or raise `PlacementError`
        all             meet         begin to meet, in the background: meanwhile the workers plan
        rank 0          route        return the chains of workers, or raise `PlacementError`
        every rank      prepare      allocate; return each worker's data for reading this rank's bytes
        every rank      connect      link with the workers, while `TransportReceiver.connect` runs on each of them
    every push
        every rank      prepare_push publish and digest the bytes that workers read in place, before any worker reads
        every rank      begin_send   begin the part of `send` without workers
        every rank      send         send this rank's part of the plan, chunk by chunk; the transport sets the pace
        every worker    chunks       yield the same chunks in the same order, as each becomes readable
        rank 0          on_commit    note that every worker has loaded the version
        rank 0          after_commit remove what no engine needs any more
    at any time
        any             abort, close release the trainer's end, the worker's end

Bytes lie in *storages*. A storage is a numbered run of bytes of a trainer rank. No control message announces a chunk.
The ends pace each other by matching sends and receives, by counters in shared memory, or by files. A transport knows
nothing about weight sources, models or engines.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from weightsync.errors import ConfigError, ProtocolError
from weightsync.kernels.digest import GOLDEN, STEP
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo
from weightsync.planning.layout import Manifest, ShardLocation
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.planning.wire_types import ByteRange, ChunkLayout, ReadRegions, Storage

ALIGN_BYTES = 256
"""Alignment of tensors in a slot. It covers every dtype and the widest vector load."""
SLOTS = 2
"""Chunks in memory at once: one being read, one being filled."""
FIRST_USES = 2
"""Chunks at the begin of a first push before which the host waits for the GPU: torch may load kernels for them."""
DIGEST_BYTES = 8
"""Size of a run's digest. It follows the run's last byte, as a little-endian 64-bit integer."""

Wait = Callable[[float], None]
"""A function called during waits. It sleeps for at most that many seconds, and raises if a peer has failed."""


class Seal(NamedTuple):
    """The digests behind the runs of one push.

    They are bound to the push and the chunk: zeros, and bytes of another chunk or push, have other digests.

    Attributes:
        sample: The number of each run's sample.
        version: The version of the push.
    """

    sample: int
    version: int

    def seed(self, chunk: int) -> int:
        """Return the summand of each digest of a chunk."""
        return self.version * STEP + (chunk + 1) * GOLDEN


@dataclass(frozen=True)
class LocalTensor:
    """This rank's tensor at one location.

    Attributes:
        tensor: The tensor. With `compute`, only its shape, dtype and device count.
        compute: Returns the values, anew in each push. Call `LocalTensors.gather` with the tensor's name before.
    """

    tensor: torch.Tensor
    compute: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True)
class LocalTensors:
    """All tensors of this rank, by location.

    Attributes:
        at: The tensors.
        gather: Fetches the inputs of `compute` for the named tensors from other ranks. Collective. It may forget
            earlier inputs. A transport calls it in `send` before each chunk, with the names that this push has not
            gathered yet.
        model: Returns the model of the push under way. Another push may have another one with the same tensors.
    """

    at: Mapping[ShardLocation, LocalTensor]
    gather: Callable[[Sequence[str]], None] = lambda names: None
    model: Callable[[], Any] = lambda: None

    @property
    def gpus(self) -> set[torch.device]:
        """The GPUs of the tensors."""
        return {each.tensor.device for each in self.at.values() if each.tensor.is_cuda}


@dataclass(frozen=True)
class Endpoint:
    """Data for one worker. `storages` come from every rank, the rest from rank 0 alone.

    Attributes:
        storages: [rank, storage, kind, fields] of each storage that the worker maps.
        arrivals: One layout for each chunk of the plan.
        fields: Further plain values for `TransportReceiver.connect`.
    """

    storages: list[Storage] = field(default_factory=list)
    arrivals: tuple[ChunkLayout, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


class Changes(NamedTuple):
    """The changed words in one rank's runs of some chunks.

    chunks: the numbers of the chunks.
    rank: the trainer rank.
    body: see `kernels.changed_words`. Its pieces are the rank's pieces of these chunks, in their order.
    checksum: of the body, over the bytes of the last push.
    """

    chunks: Sequence[int]
    rank: int
    body: torch.Tensor
    checksum: int


@dataclass(frozen=True)
class RouteRequest:
    """The machines of both ends, and the bytes to move between them.

    Attributes:
        ranks: The ranks' machines, in rank order.
        workers: The workers' machines, in the order of their numbers.
        manifest: All tensors of the push.
        locations: The locations of all ranks' shards.
        reads: The regions read by each worker.
    """

    ranks: Sequence[MachineInfo]
    workers: Sequence[MachineInfo]
    manifest: Manifest
    locations: Sequence[ShardLocation]
    reads: Sequence[ReadRegions]


class Transport(ABC):
    """The trainer's end. Every rank has one, for one connection to the engines.

    Attributes:
        name: The name in the entry point group, or of a built-in transport. Workers find their end by it.
    """

    name: str
    sends_unread: bool = False
    """Whether the tensors that no engine reads travel too. `route` must then give a chain that reads them."""
    min_chunk_bytes: int = 1
    """Least size of a chunk whose bytes take longer than its messages. Rank 0 sets it in `route`."""
    max_chunk_bytes: int = sys.maxsize
    """Most bytes of a chunk, below the user's `max_bytes`. Rank 0 sets it in `route`."""
    encodings: tuple[str, ...] = ()
    """The accepted values of `encoding`."""
    encoding: str | None = None
    """The encoding of the bytes on the wire, known before `route`. None: unencoded."""
    keeps_runs: bool = False
    """Whether the workers have the bytes of the last push at their places in the next plan, known before `prepare`."""
    encoding_base: str | None = None
    """The memory for the last push's bytes of GPU tensors: "host", or else the GPU."""
    sent_bytes: int = 0
    """Bytes sent by this rank's last `send`. Zero if workers read them themselves."""
    newest_version: int = 0
    """The newest version that outlives engines. Rank 0 sets it in `prepare`. Only `catch_up` pushes it again."""
    _owner: object = None

    def claim(self, owner: object, encoding: str | None, encoding_base: str | None = None) -> None:
        """Use the transport for `owner` alone, with this encoding, until `release`.

        Raises:
            ConfigError: Another owner has claimed it.
        """
        if self._owner not in (None, owner):
            raise ConfigError("another WeightSync uses the transport: close the other, or use another transport")
        self._owner, self.encoding, self.encoding_base = owner, encoding, encoding_base

    def release(self) -> None:
        """Abort, and let another owner claim the transport."""
        self.abort()
        self._owner = None

    def invite(self, ranks: Sequence[MachineInfo], workers: Sequence[MachineInfo], host: str) -> list[dict[str, Any]]:
        """Return an invitation for each member's `meet`: for the ranks, then for the workers. Rank 0 calls it.

        Args:
            ranks: The ranks' machines, in rank order.
            workers: The workers' machines, in the order of their numbers.
            host: An address of rank 0 that every member reaches.

        Returns:
            Plain values by name. An empty list if nothing needs to meet before `connect`.

        Raises:
            PlacementError: These members cannot meet.
        """
        return []

    def meet(self, invitation: dict[str, Any], device: torch.device, deadline: Deadline) -> None:
        """Begin to meet the other members, in the background. Every invited rank calls it, while the workers plan.

        Returns at once. `connect` raises the errors. `abort` ends it.

        Args:
            invitation: This rank's.
            device: The device of this rank's tensors.
            deadline: The deadline of the whole meeting.
        """
        return

    @abstractmethod
    def route(self, request: RouteRequest) -> tuple[Chain, ...]:
        """Return the chains of workers along which the ranks' bytes travel. Rank 0 calls it. It sends nothing.

        Args:
            request: The machines, the tensors, and the regions that workers read.

        Returns:
            The chains. Empty if workers map the ranks' memory.

        Raises:
            PlacementError: The ranks cannot reach the workers over this transport.
        """

    def can_map(self, tensor: LocalTensor) -> bool:
        """Return whether a worker that maps memory can read this tensor at its own address.

        Every rank calls it, before `route`. The answer has no effect if `route` returns chains.
        """
        return False

    @abstractmethod
    def prepare(self, plan: TransferPlan, tensors: LocalTensors, update: Update) -> list[Endpoint]:
        """Allocate, and return one endpoint for each worker. Collective.

        The tensors stay valid, at the same addresses, until the next `prepare`. Release the allocations of earlier
        calls.
        """

    def connect(self, deadline: Deadline) -> None:
        """Link with the workers while they connect, and prepare to send.

        Every rank calls it, rank 0 in a background thread. Blocks.
        """
        return

    def in_place(self) -> list[ByteRange]:
        """Return this rank's byte ranges that workers read in place. Called after `prepare`.

        `prepare_push` digests these ranges.
        """
        return []

    def prepare_push(self, sample: int | None) -> int:
        """Publish this rank's bytes that workers read in place, and return the digest of its sample of them.

        Every rank calls it, perhaps more than once, before any rank sends and before any worker may read. Acquire
        everything that may be missing here, such as room on a disk. The engines are untouched when it raises.

        Args:
            sample: The number of the sample. `WHOLE`: all bytes. None: no digest.
        """
        return 0

    def withdraw(self) -> None:
        """Undo `prepare_push` of a push that is refused before `send`, perhaps before `prepare_push` too.

        Every rank calls it. It must not raise.
        """
        return

    def begin_send(self, seal: Seal | None) -> None:
        """Begin the part of `send` without workers, while engines pause.

        Every rank calls it, at most once in a push, before `send`. The push may still end without `send`.
        """
        return

    def drop_workers(self, workers: Collection[int]) -> bool:
        """Send nothing to these workers from now on. Their engines have left. Every rank calls it, rank 0 first.

        Returns:
            False if the transport cannot do this. The remaining workers are then connected anew.
        """
        return False

    @abstractmethod
    def send(self, chunks: Sequence[int], seal: Seal | None, update: Update) -> None:
        """Send this rank's part of these chunks. Every rank calls it, once in a push.

        Return once the tensors may be changed again, or sooner if workers read in place. Wait with `update.wait`.

        Args:
            chunks: The numbers of all chunks of the push, in order.
            seal: The digest behind each run. None: no digests.

        Raises:
            SyncTimeoutError: No chunk moved within the timeout.
            WeightSyncError: The error of `update.wait`.
        """

    def on_commit(self, version: int) -> None:
        """Note that every worker has loaded this version. Rank 0 calls it before the workers commit."""
        return

    def after_commit(self) -> None:
        """Remove files or memory of older versions. Rank 0 calls it when the engines serve the version."""
        return

    @abstractmethod
    def abort(self) -> None:
        """Release everything and break every wait. Called from any thread, in any state, more than once."""


class TransportReceiver(ABC):
    """The worker's end, for one worker's device."""

    name: str = ""
    """The transport's name in messages. The engine's worker sets it."""
    copy_programs: int | None = None
    """Most GPU programs of a kernel that copies out of a chunk. More would delay the transport's own kernels."""
    sends_changes: bool = False
    """Whether pushes may bring `changes` in place of chunks, known after `connect`."""
    waiting_for: Sequence[str] = ("trainer ranks",)
    """Peers that a GPU may wait for when chunks come late, as named in errors, the nearest first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def meet(self, invitation: dict[str, Any], deadline: Deadline) -> None:
        """Begin to meet the other members, in the background. Returns at once. `connect` raises the errors.

        Args:
            invitation: This worker's, from `Transport.invite`.
            deadline: The deadline of the whole meeting.
        """
        return

    @abstractmethod
    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: Wait, deadline: Deadline) -> None:
        """Map or join the endpoints' storages.

        Release earlier connections, or use unchanged ones again.

        Args:
            storages: The storages of all ranks, from `Endpoint.storages`.
            fields: `Endpoint.fields`.
            wait: Called during waits. It raises if a peer has failed.
            deadline: The deadline of the whole call.

        Raises:
            PlacementError: A storage cannot be mapped or joined.
        """

    @abstractmethod
    def storage(self, rank: int, storage: int) -> torch.Tensor:
        """Return a storage's bytes, a 1-D uint8 tensor at a fixed address.

        The bytes of a chunk are valid once `chunks` has yielded its number.
        """

    def keep_runs(self, numbers: Collection[int]) -> None:
        """Keep the bytes of these chunks from push to push, in memory of their own. `changes` needs them.

        Called after `connect`, and before `storage`, if `sends_changes`.
        """
        return

    def changes(
        self, numbers: Sequence[int], wait: Wait, deadline: Callable[[], Deadline], arrived: Callable[[Changes], object]
    ) -> bool:
        """Receive the changes of these chunks since the last push. Return False if `chunks` yields them.

        Every push calls it first, if `sends_changes`. Blocks until all changes have arrived. On a GPU, later work on
        the current stream can read the bodies given to `arrived`. The other arguments are as in `chunks`.
        """
        return False

    @abstractmethod
    def chunks(self, numbers: Sequence[int], wait: Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        """Yield the number of each chunk, in this order, once its bytes can be read.

        On a GPU, later work on the current stream can read them. The request for the next chunk releases the memory of
        the last one, in the order of the device's current stream. If the iterator is not exhausted, the push failed.

        Args:
            numbers: The numbers of the chunks of one push, without the chunks of `changes`.
            wait: Called during waits. It raises if a peer has failed.
            deadline: Returns the deadline of a wait that begins now.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap storages and leave. Called more than once, between the other calls, and perhaps in another thread.

        After a failure the GPU's current stream may still read the tensors of `storage`, or wait for bytes that never
        come.
        """


def finish_stream(device: torch.device) -> None:
    """Wait until the current stream of a GPU has done its work. A CPU's work is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def align(nbytes: int) -> int:
    """Return the next multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def strided(data: torch.Tensor, dtype: str, offset: int, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a view of a storage's bytes (1-D uint8). Offset and strides are in elements of `dtype`."""
    kind: torch.dtype = getattr(torch, dtype)
    whole = data[: data.numel() // kind.itemsize * kind.itemsize].view(kind)
    if offset < 0 or offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= max(whole.numel(), 1):
        raise ProtocolError(
            f"a region of {tuple(size)} {dtype} at element {offset} with strides {tuple(stride)} lies outside its "
            f"storage of {data.numel()} bytes"
        )
    return whole.as_strided(tuple(size), tuple(stride), whole.storage_offset() + offset)
