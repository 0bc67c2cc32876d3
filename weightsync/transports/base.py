"""What a transport is: how bytes reach an engine worker, seen from both ends.

Both ends speak of *storages*: runs of bytes with a number. The trainer's end says which placements lie in which
storage; the worker's end makes the storages readable. What is read out of them is the receiver's business. A
transport knows nothing about senders, receivers or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError
from weightsync.layout import Box, Manifest, Placement

ALIGN_BYTES = 256
"""Where tensors start in a staging area; covers every dtype and the widest vector load."""
SLOTS = 2
"""Buckets that may be under way at once: one being read, one being filled."""


Reads = Mapping[str, tuple[Box, ...]]
"""By name of a tensor: the regions that a worker reads of it. What is not named it does not read."""


@dataclass(frozen=True)
class Shipment:
    """What is to be moved, the same on every trainer rank.

    `manifest` has the dtypes that travel; `buckets` its names, each once; `placements` where every rank's bytes lie.
    `reads` has every worker, in the order of their numbers; `host` is an address of trainer rank 0 that all of them
    reach. The names in `frozen` have the last buckets to themselves, and travel only once as long as an offer keeps it
    so. With `as_cut` what is sent goes in just these buckets, though fewer may be faster.
    """

    manifest: Manifest
    buckets: tuple[tuple[str, ...], ...]
    placements: tuple[Placement, ...]
    reads: tuple[Reads, ...]
    host: str
    frozen: frozenset[str] = frozenset()
    as_cut: bool = False


@dataclass(frozen=True)
class Region:
    """What this rank has of one placement. `tensor` is where it lies; with `compute` that has the shape, dtype and
    device alone, and the values are made anew for each push."""

    tensor: torch.Tensor
    compute: Callable[[], torch.Tensor] | None = None

    def read(self) -> torch.Tensor:
        """The values of now. To be called in `Transport.stage`, and not kept."""
        return self.tensor if self.compute is None else self.compute()


@dataclass(frozen=True)
class WorkerInfo:
    """One engine worker, as it introduced itself, or one trainer rank."""

    peer: str
    device: str
    gpu_uuid: str
    boot_id: str


@dataclass(frozen=True)
class Offer:
    """What workers are told: for each of them placements over storages, which cover what it reads, and in which buckets
    to read them. Of `placements` those that rank 0 offers are told. `newest` is the newest version that the transport
    has kept of earlier sessions, 0 without any; a push must be newer."""

    placements: tuple[tuple[Placement, ...], ...]
    buckets: tuple[tuple[str, ...], ...]
    fields: dict[str, Any]
    newest: int = 0


Idle = Callable[[float], None]
"""What a wait calls while it waits: sleep for at most that many seconds, and raise if there is bad news."""


class Group(Protocol):
    """The trainer's ranks, talking on the host. `gather` and `share` are collective. `host` is rank 0's address among
    the ranks."""

    rank: int
    size: int
    host: str

    def gather(self, value: Any, phase: str) -> list[Any]:
        """Every rank's value, in rank order, on rank 0; an empty list elsewhere."""

    def share(self, value: Any, phase: str) -> Any:
        """Rank 0's value, on every rank."""

    def idle(self, seconds: float) -> None:
        """An `Idle`: raises when any rank has failed."""


class Transport(Protocol):
    """The trainer's end. Made for one session; `abort` may be called at any time and from any state.

    Life: `check` (rank 0), `prepare`, `storages`, `spans`, `invite` (rank 0), `join`, `joined`; then for each push,
    perhaps `stage_ahead`, then `stage` and `post` (rank 0) for each bucket from the first on, though not always to the
    last, and `finish` (rank 0); or `withdraw` after `stage_ahead`.
    """

    name: str

    def check(self, ranks: Sequence[WorkerInfo], workers: Sequence[WorkerInfo]) -> None:
        """Raise `PlacementError` when these trainer ranks cannot reach these workers this way. Sends nothing."""

    def prepare(self, shipment: Shipment, pieces: Mapping[Placement, Region], group: Group) -> Offer:
        """Collective: every trainer rank calls this. Lay out the storages. `pieces` are this rank's own placements;
        their tensors stay valid, at the same addresses, until the next `prepare`."""

    def storages(self, worker: int) -> list[list[Any]]:
        """This rank's storages for one worker, as [rank, storage, kind, fields] rows of a `Connect` message."""

    def spans(self) -> list[list[int]]:
        """Of what `stage` gives digests on this rank: all that it copies, and perhaps what is read in place. Rows of
        [bucket, rank, storage, first byte, bytes], in the order of the buckets. Settled by `prepare`."""

    def invite(self, worker: int) -> dict[str, Any]:
        """Rank 0: what else worker number `worker` must know to join."""

    def join(self, deadline: Deadline) -> None:
        """Every rank, while the workers connect: meet them, where the transport needs that. Rank 0 calls it in a thread
        of its own."""

    def joined(self) -> None:
        """Every rank, once every worker has connected."""

    def stage_ahead(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> bool:
        """Collective: what the next `stage`, of this bucket and part, would do, as far as nobody waits for it; before
        it is known whether the push is to be. Whether, when it has returned on all ranks, workers may expect the bucket
        and rank 0 `post` it: then it is posted in any case, now, after `stage`, or before `withdraw`. Where not,
        `prepare` or `abort` takes it back."""

    def stage(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> list[int]:
        """Collective: every trainer rank calls this. When it returns on all ranks the bucket's bytes are in place.
        Gives `digest(bytes, part)` of each of the bucket's `spans`, or nothing with `part` None. Called for bucket n
        only when every worker has loaded bucket n - 2."""

    def post(self, bucket: int) -> None:
        """Rank 0, once the workers have been told to load the bucket, or to expect it: set it going without waiting."""

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        """Every rank, after a `stage_ahead` that was True, once rank 0 has posted: the push is not to be. Returns when
        nothing of it is under way any more. `prepare` or `abort` follows."""

    def finish(self, version: int, idle: Idle, deadline: Deadline) -> None:
        """Rank 0, once every worker has loaded every bucket of this version: nothing of this push is under way any
        more."""

    def abort(self) -> None:
        """Give everything back, and break whoever waits."""


class Source(Protocol):
    """The worker's end."""

    def connect(self, storages: list[list[Any]], fields: dict[str, Any], idle: Idle, deadline: Deadline) -> None:
        """Map or join what a `Connect` message names. Raises `PlacementError` when that cannot be done. Wherever it
        waits it calls `idle(seconds)`, which may raise."""

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        """A storage's bytes, a 1-D uint8 tensor; its contents are meaningful after `fetch`."""

    def fetch(self, bucket: int, following: int | None, idle: Idle, deadline: Deadline) -> None:
        """Return when the bucket's bytes can be read. `following` is the bucket that this push has after it, which may
        begin to arrive; None when it is the last. Wherever it waits it calls `idle(seconds)`, which may raise."""

    def expect(self, bucket: int) -> bool:
        """Every rank has staged the bucket ahead, and `fetch` of it will follow, or `withdraw`: let it arrive, without
        waiting. Whether its bytes can be read already."""

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        """What was expected is not to be fetched: return when it has arrived. Does nothing where nothing was."""

    def close(self) -> None:
        """Unmap, leave."""


class Nothing:
    """The worker's end where nothing is moved: the trainer writes into the engine's own memory."""

    def connect(self, storages: list[list[Any]], fields: dict[str, Any], idle: Idle, deadline: Deadline) -> None:
        return

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        raise ProtocolError(f"storage {storage} of trainer rank {rank} is read, but nothing is moved")

    def fetch(self, bucket: int, following: int | None, idle: Idle, deadline: Deadline) -> None:
        return

    def expect(self, bucket: int) -> bool:
        return True

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        return

    def close(self) -> None:
        return


def align(nbytes: int) -> int:
    """The next multiple of what every tensor in a buffer begins at."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def strided(data: torch.Tensor, dtype: str, offset: int, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A view into a storage's bytes (1-D uint8), with offset and strides in elements of `dtype`."""
    kind: torch.dtype = getattr(torch, dtype)
    whole = data[: data.numel() // kind.itemsize * kind.itemsize].view(kind)
    if offset < 0 or offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= max(whole.numel(), 1):
        raise ProtocolError(
            f"a region of {tuple(size)} {dtype} at element {offset} with strides {tuple(stride)} lies outside its "
            f"storage of {data.numel()} bytes"
        )
    return whole.as_strided(tuple(size), tuple(stride), offset)
