"""A bucket from trainer rank 0 to every worker of every engine, as one broadcast.

A bucket is the regions of its tensors as the trainer's ranks hold them, those of one rank side by side. Rank 0 receives
the other ranks' parts where they belong in the bucket, and broadcasts it; nobody puts whole tensors together. It has
two buckets' memory: while one is being broadcast the next is gathered. Another rank has room for its part of one
bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.kernels.digest import Digests
from weightsync.layout import Placement
from weightsync.transports.base import SLOTS, Group, Idle, Offer, Region, Shipment
from weightsync.transports.communicator import Communicator, Pending, Rendezvous, visit
from weightsync.transports.packing import Packer
from weightsync.transports.slots import slot_layout


class ToAll:
    """The trainer's end; for the methods see `Transport`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._engines: Rendezvous | None = None
        self._to_engines: Communicator | None = None
        self._among_ranks: Communicator | None = None
        self._posted: dict[int, Pending] = {}  # by slot
        self._slots: list[torch.Tensor] = []
        self._packers: list[Packer] = []  # of each bucket
        self._digests: list[Digests] = []  # of each bucket, on rank 0
        self._filled = False  # the first bucket of the next push, ahead
        self._aborted = threading.Event()

    def prepare(
        self, shipment: Shipment, pieces: Mapping[Placement, Region], group: Group, device: torch.device
    ) -> Offer:
        self._rank, self._device, self._workers = group.rank, device, len(shipment.reads)
        owned, in_slots, self._parts = slot_layout(shipment.manifest, shipment.buckets, shipment.placements)
        number = {name: i for i, names in enumerate(shipment.buckets) for name in names}
        mine: list[list[tuple[Placement, Placement, Region]]] = [[] for _ in shipment.buckets]
        for own, new in zip(owned, in_slots, strict=True):
            if own.rank == group.rank:
                mine[number[new.name]].append((new, own, pieces[own]))
        self._bucket_bytes = [max((last for _, last in parts.values()), default=0) for parts in self._parts]
        self._meet_ranks(group, device)
        if group.rank == 0 and self._engines is None:
            self._engines = Rendezvous(shipment.host)
        self._filled = False
        slot_bytes = max(self._bucket_bytes)
        ranges = [parts.get(group.rank, (0, 0)) for parts in self._parts]
        sizes = [slot_bytes] * SLOTS if group.rank == 0 else [max(last - first for first, last in ranges)]
        self._slots, self._packers, self._digests = [], [], []  # before there are others
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
        starts = [0 if group.rank == 0 else first for first, _ in ranges]
        self._packers = [
            Packer(self._slots[bucket % len(self._slots)], regions, start)
            for bucket, (regions, start) in enumerate(zip(mine, starts, strict=True))
        ]
        if group.rank == 0:
            self._digests = [Digests([self._data(bucket)]) for bucket in range(len(shipment.buckets))]
        fields = {"slot_bytes": slot_bytes, "bucket_bytes": self._bucket_bytes}
        return Offer((tuple(in_slots),) * self._workers, shipment.buckets, fields)

    def _meet_ranks(self, group: Group, device: torch.device) -> None:
        """A communicator among the trainer's ranks, made once."""
        if group.size == 1 or self._among_ranks is not None:
            return
        rendezvous = Rendezvous(group.host) if group.rank == 0 else None
        host, port = group.share([rendezvous.host, rendezvous.port] if rendezvous else None, "connect")
        deadline = Deadline(self._timeout_s)

        def store() -> dist.Store:
            return rendezvous.store(deadline.left_s()) if rendezvous else visit(host, port, deadline.left_s())

        others = range(1, group.size)
        self._among_ranks = Communicator(
            store,
            group.rank,
            group.size,
            device,
            host,
            group.idle,
            deadline,
            sends_to=[] if group.rank == 0 else [0],
            receives_from=others if group.rank == 0 else [],
        )

    def spans(self) -> list[list[int]]:
        nbytes = self._bucket_bytes if self._rank == 0 else []
        return [[bucket, 0, bucket % SLOTS, 0, count] for bucket, count in enumerate(nbytes)]

    def invite(self, worker: int) -> dict[str, Any]:
        assert self._engines is not None
        return {
            "host": self._engines.host,
            "port": self._engines.port,
            "communicator": self._engines.name,
            "rank": 1 + worker,
            "size": 1 + self._workers,
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
                1 + self._workers,
                self._device,
                engines.host,
                idle,
                deadline,
            )

    def stage_ahead(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> bool:
        self._packers[bucket].fill()
        self._filled = True
        return self._parts[bucket].keys() <= {0}  # else what the other ranks have must come first

    def stage(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> list[int]:
        parts, filled = self._parts[bucket], self._filled
        self._filled = False
        if self._rank != 0:
            if self._rank in parts:
                first, last = parts[self._rank]
                if not filled:
                    self._packers[bucket].fill(lightly=bucket > 0)
                self._ranks().exchange(bucket, [(self._slots[0][: last - first], 0)], []).wait(idle, deadline, "gather")
            return []
        if not filled and (earlier := self._posted.pop(bucket % SLOTS, None)) is not None:
            earlier.wait(idle, deadline, "transfer")
        data = self._slots[bucket % SLOTS]
        arriving = [
            (rank, self._ranks().exchange(bucket, [], [(data[first:last], rank)]))
            for rank, (first, last) in parts.items()
            if rank != 0
        ]
        if not filled:
            self._packers[bucket].fill(lightly=bucket > 0)
        for rank, pending in arriving:
            try:
                pending.wait(idle, deadline, "gather")
            except WeightSyncError as error:
                error.who = error.who or f"trainer rank {rank}"
                raise
        return [] if part is None else self._digests[bucket].of(part)

    def post(self, bucket: int) -> None:
        if self._to_engines is not None:
            self._posted[bucket % SLOTS] = self._to_engines.broadcast(self._data(bucket))

    def finish(self, idle: Idle, deadline: Deadline) -> None:
        for slot in list(self._posted):
            self._posted.pop(slot).wait(idle, deadline, "transfer")

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
