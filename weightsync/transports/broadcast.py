"""One sender, every worker of every engine: NCCL or gloo.

Trainer rank 0 assembles whole tensors in a bucket, from the regions that the other ranks send it, and broadcasts the
bucket. It has two buckets' memory: while one is being broadcast the next is gathered. Workers have two as well: while
one is loaded the next arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightsync.channel import Deadline
from weightsync.errors import ConfigError, PlacementError, WeightSyncError
from weightsync.kernels.digest import digest
from weightsync.layout import Box, Manifest, Placement, choose_owners, itemsize, row_major
from weightsync.transports.base import Group, Idle, Offer, Shipment, WorkerInfo, align, strided
from weightsync.transports.communicator import Communicator, Pending, Rendezvous, visit

SLOTS = 2


class BroadcastTransport:
    """The trainer's end. `name` is "broadcast", or "nccl" to refuse CPU tensors."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._engines: Rendezvous | None = None
        self._to_engines: Communicator | None = None
        self._among_ranks: Communicator | None = None
        self._posted: dict[int, Pending] = {}

    def check(self, ranks: Sequence[WorkerInfo], workers: Sequence[WorkerInfo]) -> None:
        root = ranks[0]
        if self.name == "nccl" and root.device != "cuda":
            raise PlacementError('transport="nccl" takes GPU tensors only, and trainer rank 0 holds CPU tensors')
        if other := [w.peer for w in workers if w.device != root.device]:
            raise PlacementError(
                f"a broadcast needs one kind of device: trainer rank 0 sends from {root.device}, {', '.join(other)} "
                f"receives on {workers[0].device}"
            )
        seen: dict[str, str] = {}
        for member in (root, *workers):
            if member.gpu_uuid and member.gpu_uuid in seen:
                raise PlacementError(
                    f"{member.peer} and {seen[member.gpu_uuid]} share the GPU {member.gpu_uuid}, which NCCL refuses; "
                    'use transport="ipc" for engines on the trainer\'s GPUs'
                )
            seen[member.gpu_uuid] = member.peer

    def prepare(self, shipment: Shipment, pieces: Mapping[Placement, torch.Tensor], group: Group) -> Offer:
        self._rank, self._digests = group.rank, shipment.digests
        kinds = {tensor.device.type for tensor in pieces.values()}
        kinds = set().union(*group.share([sorted(k) for k in group.gather(sorted(kinds), "plan")], "plan"))
        if len(kinds) > 1:
            raise ConfigError(f"a broadcast needs all tensors on one kind of device, found {sorted(kinds)}")
        on_gpu = kinds == {"cuda"}
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._device = next((tensor.device for tensor in pieces.values()), device)
        self._pieces = pieces
        self._buckets = shipment.buckets
        self._manifest = shipment.manifest
        offset, self._bucket_bytes = slot_layout(shipment.manifest, shipment.buckets)
        number = {name: i for i, names in enumerate(shipment.buckets) for name in names}
        whole = []
        for meta in shipment.manifest:
            slot, first = number[meta.name] % SLOTS, offset[meta.name] // itemsize(meta.dtype)
            whole.append(Placement(meta.name, Box.full(meta.shape), 0, slot, first, row_major(meta.shape), meta.dtype))
        self._whole = {p.name: p for p in whole}
        self._owners: list[list[Placement]] = [[] for _ in shipment.buckets]
        for owner in choose_owners(list(shipment.placements)):
            self._owners[number[owner.name]].append(owner)
        self._meet_ranks(group, self._device)
        slot_bytes = max(self._bucket_bytes)
        self._slots = (
            [torch.empty(slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
            if group.rank == 0
            else []
        )
        fields = {"slot_bytes": slot_bytes, "bucket_bytes": self._bucket_bytes}
        return Offer(tuple(whole), shipment.buckets, fields)

    def _meet_ranks(self, group: Group, device: torch.device) -> None:
        """A communicator among the trainer's ranks, made once."""
        if group.size == 1 or self._among_ranks is not None:
            return
        rendezvous = Rendezvous(group.host) if group.rank == 0 else None
        host, port = group.share([rendezvous.host, rendezvous.port] if rendezvous else None, "connect")
        store = rendezvous.store(self._timeout_s) if rendezvous else visit(host, port, self._timeout_s)
        self._among_ranks = Communicator(store, group.rank, group.size, device, host, self._timeout_s)

    def storages(self, worker: int) -> list[list[Any]]:
        return []

    def invite(self, worker: int, workers: int, host: str) -> dict[str, Any]:
        if self._engines is None:
            self._engines = Rendezvous(host)
            self._workers = workers
        return {
            "host": self._engines.host,
            "port": self._engines.port,
            "rank": worker + 1,
            "size": workers + 1,
            "timeout_s": self._timeout_s,
        }

    def join(self, deadline: Deadline) -> None:
        if self._to_engines is None and self._engines is not None:
            store = self._engines.store(deadline.left_s())
            size = self._workers + 1
            self._to_engines = Communicator(store, 0, size, self._device, self._engines.host, self._timeout_s)

    def joined(self) -> None:
        return

    def stage(self, bucket: int, idle: Idle, deadline: Deadline) -> list[list[Any]]:
        mine = [p for p in self._owners[bucket] if p.rank == self._rank]
        if self._rank != 0:
            if mine:
                flat, views = self._flat(mine)
                for placement, view in zip(mine, views, strict=True):
                    view.copy_(self._pieces[placement])
                self._ranks().send(flat, 0).wait(idle, deadline, "gather")
            return []
        if (earlier := self._posted.pop(bucket - SLOTS, None)) is not None:
            earlier.wait(idle, deadline, "transfer")
        arriving = []
        for rank in sorted({p.rank for p in self._owners[bucket]} - {0}):
            theirs = [p for p in self._owners[bucket] if p.rank == rank]
            flat, views = self._flat(theirs)
            arriving.append((theirs, views, rank, self._ranks().receive(flat, rank)))
        for placement in mine:
            self._target(placement).copy_(self._pieces[placement])
        for theirs, views, rank, pending in arriving:
            try:
                pending.wait(idle, deadline, "gather")
            except WeightSyncError as error:
                error.who = error.who or f"trainer rank {rank}"
                raise
            for placement, view in zip(theirs, views, strict=True):
                self._target(placement).copy_(view)
        if not self._digests:
            return []
        data = self._data(bucket)
        return [[0, bucket % SLOTS, 0, data.numel(), digest(data)]]

    def post(self, bucket: int) -> None:
        if self._to_engines is not None:
            self._posted[bucket] = self._to_engines.broadcast(self._data(bucket))

    def finish(self, idle: Idle, deadline: Deadline) -> None:
        for bucket in sorted(self._posted):
            self._posted.pop(bucket).wait(idle, deadline, "transfer")

    def abort(self) -> None:
        for communicator in (self._to_engines, self._among_ranks):
            if communicator is not None:
                communicator.abort()
        if self._engines is not None:
            self._engines.close()
        self._to_engines = self._among_ranks = self._engines = None
        self._posted.clear()

    def _ranks(self) -> Communicator:
        if self._among_ranks is None:
            raise WeightSyncError("the trainer ranks' communicator is closed")
        return self._among_ranks

    def _data(self, bucket: int) -> torch.Tensor:
        return self._slots[bucket % SLOTS][: self._bucket_bytes[bucket]]

    def _target(self, placement: Placement) -> torch.Tensor:
        """Where a region lies within its whole tensor, in the bucket."""
        whole = self._whole[placement.name]
        offset = whole.offset + sum(i * s for i, s in zip(placement.box.start, whole.stride, strict=True))
        return strided(self._slots[whole.storage], whole.dtype, offset, placement.box.size, whole.stride)

    def _flat(self, placements: Sequence[Placement]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One message for several regions, in the dtypes that travel: the bytes, and a view for each region."""
        first, nbytes = [], 0
        for placement in placements:
            first.append(nbytes)
            nbytes = align(nbytes + placement.box.numel * itemsize(self._manifest[placement.name].dtype))
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        views = []
        for placement, start in zip(placements, first, strict=True):
            dtype = self._manifest[placement.name].dtype
            size = placement.box.size
            views.append(strided(flat, dtype, start // itemsize(dtype), size, row_major(size)))
        return flat, views


class BroadcastSource:
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communicator: Communicator | None = None
        self._address: tuple[str, int] | None = None
        self._slots: list[torch.Tensor] = []
        self._bucket_bytes: list[int] = []
        self._posted: dict[int, Pending] = {}

    def connect(self, storages: list[list[Any]], fields: dict[str, Any], deadline: Deadline) -> None:
        self._bucket_bytes = fields["bucket_bytes"]
        if not self._slots or self._slots[0].numel() != fields["slot_bytes"]:
            self._slots = [
                torch.empty(fields["slot_bytes"], dtype=torch.uint8, device=self._device) for _ in range(SLOTS)
            ]
        address = (fields["host"], fields["port"])
        if self._address != address:
            try:
                store = visit(*address, deadline.left_s())
                self._communicator = Communicator(
                    store, fields["rank"], fields["size"], self._device, fields["host"], fields["timeout_s"]
                )
            except RuntimeError as error:
                raise PlacementError(f"cannot join the trainer's communicator at {address}: {error}") from error
            self._address = address

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self._slots[storage]

    def fetch(self, bucket: int, idle: Idle, deadline: Deadline) -> None:
        if bucket not in self._posted:
            self._post(bucket)
        self._posted.pop(bucket).wait(idle, deadline, "transfer")
        if bucket + 1 < len(self._bucket_bytes):
            # Its slot held bucket - 1, which has been loaded; so it may arrive while this one is.
            self._post(bucket + 1)

    def _post(self, bucket: int) -> None:
        if self._communicator is None:
            raise WeightSyncError("a bucket was announced before the communicator was joined")
        data = self._slots[bucket % SLOTS][: self._bucket_bytes[bucket]]
        self._posted[bucket] = self._communicator.broadcast(data)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()
        self._communicator, self._address = None, None
        self._posted.clear()
        self._slots = []


def slot_layout(manifest: Manifest, buckets: Sequence[Sequence[str]]) -> tuple[dict[str, int], list[int]]:
    """Where each whole tensor starts in its bucket's slot, and each bucket's bytes. Pure."""
    offset: dict[str, int] = {}
    sizes: list[int] = []
    for names in buckets:
        used = 0
        for name in names:
            offset[name] = used
            used = align(used + manifest[name].nbytes)
        sizes.append(used)
    return offset, sizes
