"""What each worker reads, from whichever trainer ranks hold it: no rank gathers, and nobody gets what it does not need.

All ranks and all workers are one communicator. A bucket is one group of sends and receives. Each rank has two buckets'
memory for what it sends, and each worker for what it receives: while one bucket travels the next is filled.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.kernels.digest import Digests
from weightsync.layout import Placement
from weightsync.transports.base import SLOTS, Group, Idle, Offer, Region, Shipment
from weightsync.transports.communicator import Communicator, Pending, Rendezvous, visit
from weightsync.transports.packing import Packer
from weightsync.transports.slots import Exchange, storage_of

_LOOPBACK = "127."


class ToEach:
    """The trainer's end; for the methods see `Transport`."""

    def __init__(self) -> None:
        self._rendezvous: Rendezvous | None = None
        self._address: tuple[str, int] | None = None
        self._communicator: Communicator | None = None
        self._pairs: set[tuple[int, int]] = set()  # rank and worker that the communicator has connected
        self._posted: dict[int, Pending] = {}  # by slot
        self._slots: list[torch.Tensor] = []
        self._packers: list[Packer] = []  # of each bucket
        self._digests: list[Digests] = []  # of each bucket, by worker
        self._filled = False  # the first bucket of the next push, ahead
        self._aborted = threading.Event()

    def prepare(
        self,
        shipment: Shipment,
        exchange: Exchange,
        pieces: Mapping[Placement, Region],
        group: Group,
        device: torch.device,
    ) -> Offer:
        self._group, self._device, self._exchange = group, device, exchange
        self._workers = len(shipment.reads)
        pairs = {pair for parts in exchange.sent for pair in parts}
        if not pairs <= self._pairs:
            self.abort()
            self._pairs = pairs
        if self._address is None:
            if group.rank == 0:
                # Engines that are reached by the loopback are on this host, where any of its addresses will do.
                near = group.size > 1 and shipment.host.startswith(_LOOPBACK)
                self._rendezvous = Rendezvous(group.host if near else shipment.host)
            rendezvous = self._rendezvous
            host, port = group.share([rendezvous.host, rendezvous.port] if rendezvous else None, "connect")
            self._address = host, port
        # By bucket: the worker to which each run of this rank's slot goes, and that run.
        self._runs = [
            [(worker, run) for (rank, worker), run in parts.items() if rank == group.rank] for parts in exchange.sent
        ]
        slot_bytes = max((last for runs in self._runs for _, (_, last) in runs), default=0)
        self._slots, self._packers, self._digests = [], [], []  # before there are others
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._posted.clear()  # all has arrived, or the workers would not have asked for more
        self._filled = False
        regions: list[list[tuple[Placement, Placement, Region]]] = [[] for _ in shipment.buckets]
        for bucket, own, new in exchange.leaving(group.rank):
            regions[bucket].append((new, own, pieces[own]))
        self._packers = [Packer(self._slots[bucket % SLOTS], those) for bucket, those in enumerate(regions)]
        self._digests = [
            Digests([self._slots[bucket % SLOTS][first:last] for _, (first, last) in runs])
            for bucket, runs in enumerate(self._runs)
        ]
        placements = tuple(exchange.arriving(worker) for worker in range(self._workers) if group.rank == 0)
        return Offer(placements, shipment.buckets, {})

    def spans(self) -> list[list[int]]:
        rank = self._group.rank
        rows = []
        for bucket, runs in enumerate(self._runs):
            for worker, _ in runs:
                first, last = self._exchange.received[bucket][rank, worker]
                rows.append([bucket, rank, storage_of(worker, bucket), first, last - first])
        return rows

    def invite(self, worker: int) -> dict[str, Any]:
        assert self._rendezvous is not None
        return {
            "host": self._rendezvous.host,
            "port": self._rendezvous.port,
            "communicator": self._rendezvous.name,
            "rank": self._group.size + worker,
            "size": self._group.size + self._workers,
            "slot_bytes": self._exchange.slot_bytes(worker),
            "senders": [rank for rank, to in sorted(self._pairs) if to == worker],
            "arriving": [
                [[rank, *run] for (rank, to), run in parts.items() if to == worker] for parts in self._exchange.received
            ],
        }

    def join(self, deadline: Deadline) -> None:
        if self._communicator is not None:
            return
        assert self._address is not None
        host, port = self._address
        rendezvous, aborted, group = self._rendezvous, self._aborted, self._group

        def idle(seconds: float) -> None:
            if aborted.wait(seconds):
                raise WeightSyncError("the push was given up")
            if group.rank:  # rank 0's connections are in use by another thread
                group.idle(0.0)

        self._communicator = Communicator(
            lambda: rendezvous.store(deadline.left_s()) if rendezvous else visit(host, port, deadline.left_s()),
            group.rank,
            group.size + self._workers,
            self._device,
            host,
            idle,
            deadline,
            sends_to=[group.size + worker for rank, worker in sorted(self._pairs) if rank == group.rank],
        )

    def stage_ahead(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> bool:
        self._fill(bucket, part, idle, deadline)
        self._filled = True
        return True

    def stage(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> list[int]:
        if not self._filled:
            self._fill(bucket, part, idle, deadline)
        self._filled = False
        return [] if part is None else self._digests[bucket].of(part)

    def _fill(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> None:
        if (earlier := self._posted.pop(bucket % SLOTS, None)) is not None:
            earlier.wait(idle, deadline, "transfer")
        self._packers[bucket].fill(lightly=bucket > 0)
        if part is not None:
            self._digests[bucket].begin(part)  # before a send, which keeps the GPU until workers come, who want digests
        if self._group.rank != 0:
            self._send(bucket)  # the workers receive when they are told to

    def post(self, bucket: int) -> None:
        self._send(bucket)

    def _send(self, bucket: int) -> None:
        if self._communicator is None:
            raise WeightSyncError("the communicator is closed")
        slot = self._slots[bucket % SLOTS]
        sends = [(slot[first:last], self._group.size + worker) for worker, (first, last) in self._runs[bucket]]
        if sends:
            self._posted[bucket % SLOTS] = self._communicator.exchange(bucket, sends, [])

    def finish(self, idle: Idle, deadline: Deadline) -> None:
        for slot in list(self._posted):
            self._posted.pop(slot).wait(idle, deadline, "transfer")

    def abort(self) -> None:
        self._aborted.set()  # for the thread that may still be waiting for the others
        self._aborted = threading.Event()
        if self._communicator is not None:
            self._communicator.abort()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._communicator = self._rendezvous = self._address = None
        self._pairs = set()
        self._posted.clear()
        self._slots, self._packers, self._digests = [], [], []
