"""One sender, every worker of every engine: NCCL or gloo.

A bucket is the regions of its tensors as the trainer's ranks hold them, those of one rank side by side. Trainer rank 0
receives the other ranks' parts where they belong in the bucket, and broadcasts it; nobody puts whole tensors together.
It has two buckets' memory: while one is being broadcast the next is gathered. Another rank has room for its part of one
bucket. Workers have two buckets: while one is loaded the next arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightsync.channel import Deadline
from weightsync.errors import ConfigError, PlacementError, WeightSyncError
from weightsync.kernels.digest import Digests, warm_up
from weightsync.layout import Manifest, Placement, choose_owners, itemsize, row_major
from weightsync.transports.base import Group, Idle, Offer, Region, Shipment, WorkerInfo, align
from weightsync.transports.communicator import Communicator, Pending, Rendezvous, visit
from weightsync.transports.packing import Packer

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
        self._aborted = threading.Event()

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

    def prepare(self, shipment: Shipment, pieces: Mapping[Placement, Region], group: Group) -> Offer:
        self._rank = group.rank
        kinds = {region.tensor.device.type for region in pieces.values()}
        kinds = set().union(*group.share([sorted(k) for k in group.gather(sorted(kinds), "plan")], "plan"))
        if len(kinds) > 1:
            raise ConfigError(f"a broadcast needs all tensors on one kind of device, found {sorted(kinds)}")
        on_gpu = kinds == {"cuda"}
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._device = next((region.tensor.device for region in pieces.values()), device)
        owned, in_slots, self._parts = slot_layout(shipment.manifest, shipment.buckets, shipment.placements)
        number = {name: i for i, names in enumerate(shipment.buckets) for name in names}
        mine: list[list[tuple[Placement, Region]]] = [[] for _ in shipment.buckets]
        for old, new in zip(owned, in_slots, strict=True):
            if old.rank == group.rank:
                mine[number[new.name]].append((new, pieces[old]))
        self._bucket_bytes = [max((last for _, last in parts.values()), default=0) for parts in self._parts]
        self._meet_ranks(group, self._device)
        slot_bytes = max(self._bucket_bytes)
        ranges = [parts.get(group.rank, (0, 0)) for parts in self._parts]
        sizes = [slot_bytes] * SLOTS if group.rank == 0 else [max(last - first for first, last in ranges)]
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for nbytes in sizes]
        starts = [0 if group.rank == 0 else first for first, _ in ranges]
        self._packers = [
            Packer(self._slots[bucket % len(self._slots)], regions, start)
            for bucket, (regions, start) in enumerate(zip(mine, starts, strict=True))
        ]
        self._digests: list[Digests] = []  # of each bucket, on rank 0
        if group.rank == 0:
            self._digests = [Digests([self._data(bucket)]) for bucket in range(len(shipment.buckets))]
            warm_up(self._device)
        fields = {"slot_bytes": slot_bytes, "bucket_bytes": self._bucket_bytes}
        return Offer(tuple(in_slots), shipment.buckets, fields)

    def _meet_ranks(self, group: Group, device: torch.device) -> None:
        """A communicator among the trainer's ranks, made once."""
        if group.size == 1 or self._among_ranks is not None:
            return
        rendezvous = Rendezvous(group.host) if group.rank == 0 else None
        host, port = group.share([rendezvous.host, rendezvous.port] if rendezvous else None, "connect")
        deadline = Deadline(self._timeout_s)

        def store() -> dist.Store:
            return rendezvous.store(deadline.left_s()) if rendezvous else visit(host, port, deadline.left_s())

        self._among_ranks = Communicator(store, group.rank, group.size, device, host, group.idle, deadline)

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
        }

    def join(self, deadline: Deadline) -> None:
        if self._to_engines is None and self._engines is not None:
            engines, aborted = self._engines, self._aborted

            def idle(seconds: float) -> None:
                if aborted.wait(seconds):
                    raise WeightSyncError("the push was given up")

            self._to_engines = Communicator(
                lambda: engines.store(deadline.left_s()),
                0,
                self._workers + 1,
                self._device,
                engines.host,
                idle,
                deadline,
            )

    def joined(self) -> None:
        return

    def stage(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> list[list[Any]]:
        parts = self._parts[bucket]
        if self._rank != 0:
            if self._rank in parts:
                first, last = parts[self._rank]
                self._packers[bucket].fill()
                self._ranks().send(self._slots[0][: last - first], 0).wait(idle, deadline, "gather")
            return []
        if (earlier := self._posted.pop(bucket - SLOTS, None)) is not None:
            earlier.wait(idle, deadline, "transfer")
        data = self._slots[bucket % SLOTS]
        arriving = [(r, self._ranks().receive(data[first:last], r)) for r, (first, last) in parts.items() if r]
        self._packers[bucket].fill()
        for rank, pending in arriving:
            try:
                pending.wait(idle, deadline, "gather")
            except WeightSyncError as error:
                error.who = error.who or f"trainer rank {rank}"
                raise
        if part is None:
            return []
        return [[0, bucket % SLOTS, 0, self._bucket_bytes[bucket], part, *self._digests[bucket].of(part)]]

    def post(self, bucket: int) -> None:
        if self._to_engines is not None:
            self._posted[bucket] = self._to_engines.broadcast(self._data(bucket))

    def finish(self, version: int, idle: Idle, deadline: Deadline) -> None:
        for bucket in sorted(self._posted):
            self._posted.pop(bucket).wait(idle, deadline, "transfer")

    def abort(self) -> None:
        self._aborted.set()  # for the thread that may still be waiting for the engines
        self._aborted = threading.Event()
        for communicator in (self._to_engines, self._among_ranks):
            if communicator is not None:
                communicator.abort()
        if self._engines is not None:
            self._engines.close()
        self._to_engines = self._among_ranks = self._engines = None
        self._posted.clear()
        self._slots, self._packers, self._digests = [], [], []

    def _ranks(self) -> Communicator:
        if self._among_ranks is None:
            raise WeightSyncError("the trainer ranks' communicator is closed")
        return self._among_ranks

    def _data(self, bucket: int) -> torch.Tensor:
        return self._slots[bucket % SLOTS][: self._bucket_bytes[bucket]]


class BroadcastSource:
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communicator: Communicator | None = None
        self._address: tuple[str, int] | None = None
        self._slots: list[torch.Tensor] = []
        self._bucket_bytes: list[int] = []
        self._posted: dict[int, Pending] = {}

    def connect(self, storages: list[list[Any]], fields: dict[str, Any], idle: Idle, deadline: Deadline) -> None:
        self._bucket_bytes = fields["bucket_bytes"]
        if not self._slots or self._slots[0].numel() != fields["slot_bytes"]:
            self._slots = [
                torch.empty(fields["slot_bytes"], dtype=torch.uint8, device=self._device) for _ in range(SLOTS)
            ]
        address = (fields["host"], fields["port"])
        if self._address != address:
            self._communicator = Communicator(
                lambda: visit(*address, deadline.left_s()),
                fields["rank"],
                fields["size"],
                self._device,
                fields["host"],
                idle,
                deadline,
            )
            self._address = address

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self._slots[storage]

    def fetch(self, bucket: int, following: int | None, idle: Idle, deadline: Deadline) -> None:
        if bucket not in self._posted:
            self._post(bucket)
        if following is not None:
            # Its slot held bucket - 1, which has been loaded; so it follows this one without a pause.
            self._post(following)
        self._posted.pop(bucket).wait(idle, deadline, "transfer")

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


Part = tuple[int, int]
"""The first byte of a run of bytes, and the one after its last."""


def slot_layout(
    manifest: Manifest, buckets: Sequence[Sequence[str]], placements: Sequence[Placement]
) -> tuple[list[Placement], list[Placement], list[dict[int, Part]]]:
    """Which rank gives which region, where it lies in its bucket's slot in the dtype that travels, and each rank's part
    of each bucket. What rank 0 holds it gives itself. Pure."""
    number = {name: i for i, names in enumerate(buckets) for name in names}
    at_root = {(p.name, p.box) for p in placements if p.rank == 0}
    owned = choose_owners([p for p in placements if p.rank == 0 or (p.name, p.box) not in at_root])
    owned.sort(key=lambda p: (number[p.name], p.rank))
    used = [0] * len(buckets)
    parts: list[dict[int, Part]] = [{} for _ in buckets]
    in_slots = []
    for placement in owned:
        bucket, dtype = number[placement.name], manifest[placement.name].dtype
        first = used[bucket]
        used[bucket] = align(first + placement.box.numel * itemsize(dtype))
        parts[bucket][placement.rank] = (parts[bucket].get(placement.rank, (first, 0))[0], used[bucket])
        stride = row_major(placement.box.size)
        in_slots.append(
            Placement(placement.name, placement.box, 0, bucket % SLOTS, first // itemsize(dtype), stride, dtype)
        )
    return owned, in_slots, parts
