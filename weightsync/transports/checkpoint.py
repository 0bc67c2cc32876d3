"""Versions of a checkpoint in a folder that trainer and engines see: written by the ranks, loaded into live engines.

Every rank writes what it holds, one bucket after the other, into files that nobody else looks at yet:

    folder/.lock                    held by the trainer that writes here
    folder/.incoming-3f2a/1/        the first push of this connection, while it is under way
    folder/version-00000007/        complete

Workers read each bucket as soon as it is written. When all have loaded all of them the folder gets its name. No push
uses the name of an earlier one's folder, so that what a network file system remembers of names is no danger.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightsync.checkpoint.beside import files_beside
from weightsync.checkpoint.files import (
    check_seen,
    check_whole,
    create,
    lock,
    memory_of,
    prune,
    publish,
    spans,
    unlock,
    version_name,
    versions,
    write,
)
from weightsync.checkpoint.shards import MAX_SHARD_BYTES, Shards, lay_out
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, PlacementError, SyncTimeoutError, WeightSyncError
from weightsync.layout import Box, Placement, choose_owners, itemsize, row_major
from weightsync.transports.base import Group, Idle, Offer, Region, Shipment, WorkerInfo

_SLOT = 0
"""The number of a worker's slot, which holds one bucket, among the storages of rank 0."""
_LOCK = ".lock"
_INCOMING = ".incoming-"
_CHUNK_BYTES = 64 * 2**20
"""Read at once, between looks for bad news."""


class CheckpointTransport:
    """The trainer's end: each push writes a checkpoint, and loads it into the running engines.

        CheckpointTransport("/shared/run-1", config=model.config, tokenizer=tokenizer)

    After a push of version 7 `folder/version-00000007` is what `save_pretrained` would have left: safetensors, an index
    when there are several files, and what is given here of a config, a generation config and a tokenizer, of which
    `save_pretrained` is called once for each connection. The name appears when everything is on the disk, before the
    engines are told to go on. The `keep_last` newest versions are kept. Every version has all tensors, also those that
    the policy freezes.

    folder: is made when it is missing. All ranks and all workers must see it under this path. One trainer at a time.
    max_shard_bytes: of a file, unless one bucket has more.
    restart: do not load into a running engine, but start the engine anew from each version: for engines that cannot be
        pushed to. The engine must be a `weightsync.server.VllmServer`. Tensors are saved in the trainer's own dtypes,
        unless the policy says others.

    Raises `ConfigError` for arguments that cannot work.
    """

    name = "checkpoint"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        restart: bool = False,
        config: Any = None,
        generation_config: Any = None,
        tokenizer: Any = None,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last}: the version that was just written must stay")
        if max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes={max_shard_bytes}: a file needs room for at least one byte")
        if isinstance(config, torch.nn.Module):
            raise ConfigError("config is a model; give its config alone: config=model.config")
        self.restart = restart
        self.folder = Path(folder).absolute()
        self.keep_last = keep_last
        self.max_shard_bytes = max_shard_bytes
        self.saved_beside = (config, generation_config, tokenizer)
        self._lock: int | None = None
        self._incoming: Path | None = None
        self._pushes = 0

    def check(self, ranks: Sequence[WorkerInfo], workers: Sequence[WorkerInfo]) -> None:
        return  # any worker that sees the folder is reached, and it looks when it connects

    def prepare(self, shipment: Shipment, pieces: Mapping[Placement, Region], group: Group) -> Offer:
        self._group = group
        check_whole(shipment.manifest, shipment.placements)
        # What is frozen comes first, so that no push leaves it out: every version has everything.
        buckets = tuple(sorted(shipment.buckets, key=lambda names: not shipment.frozen.issuperset(names)))
        self._shards = lay_out(shipment.manifest, buckets, self.max_shard_bytes)
        number = {name: i for i, names in enumerate(buckets) for name in names}
        self._mine: list[list[tuple[Placement, Region]]] = [[] for _ in buckets]
        for owner in choose_owners(shipment.placements):
            if owner.rank == group.rank:
                self._mine[number[owner.name]].append((owner, pieces[owner]))
        self._beside: dict[str, bytes] = {}
        opened = None
        if group.rank == 0:
            self._beside = files_beside(self.saved_beside, shipment.manifest)
            opened = self._open()
        incoming, newest = group.share(opened, "plan")
        check_seen(Path(incoming), f"trainer rank {group.rank}")
        self._incoming, self._pushes = Path(incoming), 0
        fields = {
            "incoming": incoming,
            "buckets": [[self._shards.files[own.shard].name, own.runs] for own in self._shards.buckets],
        }
        return Offer((_in_slot(self._shards),) * len(shipment.reads), buckets, fields, newest)

    def _open(self) -> tuple[str, int]:
        """Rank 0: take the folder. Gives where pushes of this connection are written, and the newest version."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = lock(self.folder / _LOCK)
            if self._lock is None:
                raise ConfigError(
                    f"another trainer writes checkpoints to {self.folder}: close its WeightSync first, or use another "
                    "folder"
                )
            for left in self.folder.glob(f"{_INCOMING}*"):  # by a trainer that was killed, or our last connection
                shutil.rmtree(left)
            incoming = self.folder / f"{_INCOMING}{secrets.token_hex(4)}"
            incoming.mkdir()
            return str(incoming), max(versions(self.folder), default=0)
        except OSError as error:
            raise PlacementError(f"cannot write checkpoints to {self.folder}: {error}") from error

    def storages(self, worker: int) -> list[list[Any]]:
        return []

    def spans(self) -> list[list[int]]:
        return [
            [bucket, 0, _SLOT, *span]
            for bucket, mine in enumerate(self._mine)
            for placement, _ in mine
            for span in spans(self._shards, placement)
        ]

    def invite(self, worker: int) -> dict[str, Any]:
        return {}

    def join(self, deadline: Deadline) -> None:
        return

    def joined(self) -> None:
        return

    def stage_ahead(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> bool:
        return False  # a version that is not to be would have to be removed again

    def stage(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> list[int]:
        if bucket == 0:
            self._pushes += 1
            if self._group.rank == 0:
                create(self._current(), self._shards, self._beside)
            self._group.share(None, "gather")  # the files are there
        regions = ((placement, region.read()) for placement, region in self._mine[bucket])
        return write(self._current(), self._shards, bucket, regions, part)

    def _current(self) -> Path:
        if self._incoming is None:
            raise WeightSyncError("the folder of checkpoints is closed")
        return self._incoming / str(self._pushes)

    def post(self, bucket: int) -> None:
        return

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        return

    def finish(self, version: int, idle: Idle, deadline: Deadline) -> None:
        publish(self._current(), self.folder / version_name(version))
        prune(self.folder, self.keep_last)

    def abort(self) -> None:
        if self._lock is not None:  # rank 0
            if self._incoming is not None:
                shutil.rmtree(self._incoming, ignore_errors=True)
            unlock(self._lock)
        self._lock = self._incoming = None


class CheckpointSource:
    """The worker's end: a slot for one bucket on the engine's device, so that what is read out of it is read there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slot = torch.empty(0, dtype=torch.uint8, device=device)
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._incoming = Path()
        self._buckets: list[tuple[str, list[tuple[int, int]]]] = []
        self._pushes = 0

    def connect(self, storages: list[list[Any]], fields: dict[str, Any], idle: Idle, deadline: Deadline) -> None:
        self._incoming, self._buckets, self._pushes = Path(fields["incoming"]), fields["buckets"], 0
        check_seen(self._incoming, "this engine worker")
        slot_bytes = max(sum(nbytes for _, nbytes in runs) for _, runs in self._buckets)
        if self._slot.numel() != slot_bytes:
            self._slot = torch.empty(slot_bytes, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda" and not self._chunk.numel():
            self._chunk = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self._slot

    def fetch(self, bucket: int, following: int | None, idle: Idle, deadline: Deadline) -> None:
        self._pushes += bucket == 0
        name, runs = self._buckets[bucket]
        path = self._incoming / str(self._pushes) / name
        try:
            # Opened anew for each bucket: only then does a network file system look for what others have written.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                at = 0
                for first, nbytes in runs:
                    self._read(fd, first, self._slot[at : at + nbytes], idle, deadline)
                    at += nbytes
            finally:
                os.close(fd)
        except OSError as error:
            raise PlacementError(f"cannot read bucket {bucket} from {path}: {error}") from error

    def expect(self, bucket: int) -> bool:
        return False

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        return

    def _read(self, fd: int, at: int, target: torch.Tensor, idle: Idle, deadline: Deadline) -> None:
        """Fill `target` with a file's bytes from `at` on, on a GPU by way of pinned memory."""
        while target.numel():
            chunk = self._chunk[: target.numel()] if target.is_cuda else target[:_CHUNK_BYTES]
            done = os.preadv(fd, [memory_of(chunk)], at)
            if not done:
                raise PlacementError(f"a file of the checkpoint ends at byte {at}, where {target.numel()} more belong")
            if target.is_cuda:
                target[:done].copy_(chunk[:done])
            target, at = target[done:], at + done
            idle(0.0)
            if target.numel() and deadline.passed():
                raise SyncTimeoutError(
                    f"a bucket was not read within {deadline.timeout_s:g} s", phase="transfer", waiting_for=["the disk"]
                )

    def close(self) -> None:
        self._slot = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._chunk = torch.empty(0, dtype=torch.uint8)


def _in_slot(shards: Shards) -> tuple[Placement, ...]:
    """Where workers find each tensor, whole, once they have read its bucket."""
    return tuple(
        Placement(
            meta.name,
            Box.full(meta.shape),
            0,
            _SLOT,
            shards.in_bucket[meta.name] // itemsize(meta.dtype),
            row_major(meta.shape),
            meta.dtype,
        )
        for meta in shards.manifest
    )
