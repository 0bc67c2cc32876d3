"""One sender or many, every worker of every engine, any hosts: NCCL or gloo.

Each worker gets what it reads from the ranks that hold it where no link carries more bytes that way (`to_each`); else
one broadcast goes to all (`to_all`). Workers have two buckets' memory: while one is loaded the next arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, PlacementError, WeightSyncError
from weightsync.kernels.digest import warm_up
from weightsync.layout import Placement
from weightsync.transports.base import SLOTS, Group, Idle, Offer, Region, Shipment, WorkerInfo
from weightsync.transports.communicator import Communicator, Pending, visit
from weightsync.transports.slots import Exchange, exchange_layout, merge
from weightsync.transports.to_all import ToAll
from weightsync.transports.to_each import ToEach

_ABOUT = 1.02
"""What every worker reads (norms) is sent to each, and regions begin at multiples of 256 bytes."""


class BroadcastTransport:
    """The trainer's end. `name` is "broadcast", or "nccl" to refuse CPU tensors."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._way: ToAll | ToEach | None = None
        self._apart = False

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
        gpus = [member.gpu_uuid for member in (*ranks, *workers) if member.gpu_uuid]
        self._apart = len(set(gpus)) == len(gpus)  # or all of them cannot be one communicator

    def prepare(self, shipment: Shipment, pieces: Mapping[Placement, Region], group: Group) -> Offer:
        kinds = {region.tensor.device.type for region in pieces.values()}
        kinds = set().union(*group.share([sorted(k) for k in group.gather(sorted(kinds), "plan")], "plan"))
        if len(kinds) > 1:
            raise ConfigError(f"a broadcast needs all tensors on one kind of device, found {sorted(kinds)}")
        on_gpu = kinds == {"cuda"}
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        device = next((region.tensor.device for region in pieces.values()), device)
        exchange = None
        if group.share(self._apart, "plan"):
            exchange = exchange_layout(shipment.manifest, shipment.buckets, shipment.placements, shipment.reads)
            if not spares(exchange, shipment, group.size):
                exchange = None
        warm_up(device)
        if exchange is None:
            shipment = _with_fewer_buckets(
                shipment,
                [{"root": sum(shipment.manifest[name].nbytes for name in names)} for names in shipment.buckets],
            )
            if not isinstance(self._way, ToAll):
                self.abort()
                self._way = ToAll(self._timeout_s)
            return self._way.prepare(shipment, pieces, group, device)
        shipment = _with_fewer_buckets(shipment, exchange.loads())
        exchange = exchange_layout(shipment.manifest, shipment.buckets, shipment.placements, shipment.reads)
        if not isinstance(self._way, ToEach):
            self.abort()
            self._way = ToEach()
        return self._way.prepare(shipment, exchange, pieces, group, device)

    def storages(self, worker: int) -> list[list[Any]]:
        return []

    def spans(self) -> list[list[int]]:
        return self._prepared().spans()

    def invite(self, worker: int) -> dict[str, Any]:
        return self._prepared().invite(worker)

    def join(self, deadline: Deadline) -> None:
        self._prepared().join(deadline)

    def joined(self) -> None:
        return

    def stage_ahead(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> bool:
        return self._prepared().stage_ahead(bucket, part, idle, deadline)

    def stage(self, bucket: int, part: int | None, idle: Idle, deadline: Deadline) -> list[int]:
        return self._prepared().stage(bucket, part, idle, deadline)

    def post(self, bucket: int) -> None:
        self._prepared().post(bucket)

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        self._prepared().finish(idle, deadline)

    def finish(self, version: int, idle: Idle, deadline: Deadline) -> None:
        self._prepared().finish(idle, deadline)

    def abort(self) -> None:
        if self._way is not None:
            self._way.abort()
            self._way = None

    def _prepared(self) -> ToAll | ToEach:
        if self._way is None:
            raise WeightSyncError("the transport is closed")
        return self._way


def _with_fewer_buckets(shipment: Shipment, loads: Sequence[Mapping[Any, int]]) -> Shipment:
    """With fewer buckets, which are fewer messages: there is room for the largest part of one that any member has, and
    `loads` are the bytes of each bucket by member. Pure."""
    if shipment.as_cut:
        return shipment
    largest = max(max(load.values(), default=0) for load in loads)
    return replace(shipment, buckets=merge(shipment.buckets, loads, shipment.frozen, largest))


def spares(exchange: Exchange, shipment: Shipment, ranks: int) -> bool:
    """Whether to send each worker its own: no member sends or receives more than a broadcast of everything has it do,
    and there is somebody to spare, a rank 0 that would gather or workers that read different parts. Pure."""
    nbytes = sum(meta.nbytes for meta in shipment.manifest)
    return exchange.busiest_bytes() <= _ABOUT * nbytes and (ranks > 1 or len(shipment.reads) > 1)


class BroadcastSource:
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._communicator: Communicator | None = None
        self._name = ""  # the communicator's
        self._slots: list[torch.Tensor] = []
        self._bucket_bytes: list[int] = []
        self._arriving: list[list[list[int]]] | None = None  # of each bucket: rank, and its run of bytes of the slot
        self._posted: dict[int, Pending] = {}

    def connect(self, storages: list[list[Any]], fields: dict[str, Any], idle: Idle, deadline: Deadline) -> None:
        self._bucket_bytes, self._arriving = fields.get("bucket_bytes", []), fields.get("arriving")
        if not self._slots or self._slots[0].numel() != fields["slot_bytes"]:
            self._slots = [
                torch.empty(fields["slot_bytes"], dtype=torch.uint8, device=self._device) for _ in range(SLOTS)
            ]
        if self._name != fields["communicator"]:
            if self._communicator is not None:
                self._communicator.abort()
            self._communicator = Communicator(
                lambda: visit(fields["host"], fields["port"], deadline.left_s()),
                fields["rank"],
                fields["size"],
                self._device,
                fields["host"],
                idle,
                deadline,
                receives_from=fields.get("senders"),
            )
            self._name = fields["communicator"]

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self._slots[storage % SLOTS]

    def fetch(self, bucket: int, following: int | None, idle: Idle, deadline: Deadline) -> None:
        if bucket not in self._posted:
            self._post(bucket)
        if following is not None:
            # Its slot held bucket - 1, which has been loaded; so it follows this one without a pause.
            self._post(following)
        self._posted.pop(bucket).wait(idle, deadline, "transfer")

    def expect(self, bucket: int) -> bool:
        self._post(bucket)
        return False

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        while self._posted:
            self._posted.popitem()[1].wait(idle, deadline, "transfer")

    def _post(self, bucket: int) -> None:
        if self._communicator is None:
            raise WeightSyncError("a bucket was announced before the communicator was joined")
        slot = self._slots[bucket % SLOTS]
        if self._arriving is None:
            self._posted[bucket] = self._communicator.broadcast(slot[: self._bucket_bytes[bucket]])
        else:
            runs = [(slot[first:last], rank) for rank, first, last in self._arriving[bucket]]
            self._posted[bucket] = self._communicator.exchange(bucket, [], runs)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()
        self._communicator, self._name = None, ""
        self._posted.clear()
        self._slots = []
