"""Collectives between trainer ranks and engine workers of any hosts: NCCL on GPUs, gloo on CPUs.

With `Route.EACH` all ranks and workers are one communicator, and every rank sends each worker what it reads. With
`Route.ALL` the ranks send to rank 0, which broadcasts to all workers. Both ends have two slots: one chunk travels while
the next is filled, or the last one loaded. Sends and receives match, in the order of the plan, and so pace each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct

from weightsync.control.addresses import is_loopback
from weightsync.control.runtime import Deadline
from weightsync.control.update import Group, Update
from weightsync.control.wire import MachineInfo, typed
from weightsync.errors import ConfigError, PlacementError, ProtocolError, WeightSyncError
from weightsync.planning.layout import Count, Manifest, ShardLocation
from weightsync.planning.rows import Reads, Storage
from weightsync.planning.transfer_plan import Route, TransferPlan, choose_route
from weightsync.transports.base import SLOTS, Endpoint, LocalTensors, Transport, TransportReceiver, Wait
from weightsync.transports.communicator import Communicator, Pending, Rendezvous, visit
from weightsync.transports.staging import (
    Bundle,
    Layout,
    Packer,
    arriving,
    by_rank,
    endpoint,
    lay_out,
    leaving,
    slot_bytes,
)

_AHEAD = 8
"""Operations that the host begins on a GPU before it looks whether the first has ended. The stream orders them. Without
a bound, the death of a member would be noticed late."""

_COPY_PROGRAMS = 64
"""Copies of a whole GPU would hold up NCCL, whose kernels need places on it. These are as fast as the fastest link."""

_Part = tuple[torch.Tensor, Bundle, int]
"""A slot, a bundle in it, and the member of a communicator that sends or receives it."""


class NcclTransport(Transport):
    """The trainer's end. `name` is "broadcast", or "nccl" to refuse CPU tensors."""

    def __init__(self, name: str = "broadcast") -> None:
        self.name = name
        self._forget()

    def _forget(self) -> None:
        self._to_workers: _Meeting | None = None  # EACH: all ranks; ALL: rank 0 alone
        self._among_ranks: _Meeting | None = None  # ALL
        self._pairs: set[tuple[int, int]] = set()  # EACH, rank 0: (rank, worker) that are connected
        self._posted: dict[int, Pending] = {}  # by slot
        self._slots: list[torch.Tensor] = []
        self._packer: Packer | None = None

    def route(
        self,
        ranks: Sequence[MachineInfo],
        workers: Sequence[MachineInfo],
        manifest: Manifest,
        locations: Sequence[ShardLocation],
        reads: Sequence[Reads],
    ) -> Route:
        root = ranks[0]
        if self.name == "nccl" and root.device != "cuda":
            raise PlacementError('transport="nccl" takes GPU tensors only, and trainer rank 0 holds CPU tensors')
        if other := [worker.peer for worker in workers if worker.device != root.device]:
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
        if len(set(gpus)) < len(gpus):  # NCCL cannot make one communicator of all
            return Route.ALL
        return choose_route(manifest, locations, reads, len(ranks))

    def prepare(self, plan: TransferPlan, tensors: LocalTensors, update: Update) -> list[Endpoint]:
        self._ranks, self._route, self._workers = update.ranks, plan.route, len(plan.reads)
        self._device = self._agree_on_device(tensors, update.ranks)
        self._packer, self._slots = None, []  # before there are others
        self._posted.clear()
        if plan.route is Route.EACH:
            self._mine, endpoints = self._prepare_each(plan)
        else:
            self._mine, endpoints = self._prepare_all(plan, update)
        nbytes = slot_bytes([*self._mine, *self._gathered])
        self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
        self._packer = Packer(plan, tensors, self._mine, dict(enumerate(self._slots)), _COPY_PROGRAMS)
        return endpoints

    def _agree_on_device(self, tensors: LocalTensors, ranks: Group) -> torch.device:
        own = sorted({each.tensor.device.type for each in tensors.at.values()})
        kinds = ranks.broadcast(sorted(set().union(*ranks.gather(own, "connect"))), "connect")
        if len(kinds) > 1:
            raise ConfigError(f"a broadcast needs all tensors on one kind of device, found {kinds}")
        for each in tensors.at.values():
            return each.tensor.device
        return torch.device("cuda", torch.cuda.current_device()) if kinds == ["cuda"] else torch.device("cpu")

    def _prepare_each(self, plan: TransferPlan) -> tuple[Layout, list[Endpoint]]:
        ranks, workers = self._ranks, range(self._workers)
        mine = leaving(plan, ranks.rank, SLOTS)
        alike = [plan.reads.index(reads) for reads in plan.reads] if ranks.rank == 0 else []
        layouts = {worker: arriving(plan, worker, SLOTS) for worker in dict.fromkeys(alike)}  # engines read alike
        pairs = {(rank, w) for w, first in enumerate(alike) for those in layouts[first] for rank in those}
        rendezvous = self._to_workers.rendezvous if self._to_workers is not None else None
        if ranks.rank == 0 and (rendezvous is None or not pairs <= self._pairs):
            self.abort()
            # Workers that are reached by the loopback are on this host, where any of its addresses will do.
            near = ranks.size > 1 and is_loopback(plan.host)
            rendezvous, self._pairs = Rendezvous(ranks.host if near else plan.host), pairs
        place = ranks.broadcast([rendezvous.host, rendezvous.port, rendezvous.name] if rendezvous else None, "connect")
        if self._to_workers is None or self._to_workers.name != place[2]:
            if ranks.rank:
                self.abort()
            sends_to = sorted({ranks.size + worker for those in mine for worker in those})
            size = ranks.size + self._workers
            self._to_workers = _Meeting(place, rendezvous, ranks.rank, size, self._device, ranks.size, sends_to)
        self._gathered: Layout = [{} for _ in plan.chunks]  # ALL: what rank 0 has in its slots
        if ranks.rank:
            return mine, [Endpoint() for _ in workers]
        endpoints = []
        for worker, first in enumerate(alike):
            senders = sorted(rank for rank, to in self._pairs if to == worker)
            joins = {"place": place, "rank": ranks.size + worker, "size": ranks.size + self._workers}
            endpoints.append(endpoint(layouts[first], [], **joins, senders=senders))
        return mine, endpoints

    def _prepare_all(self, plan: TransferPlan, update: Update) -> tuple[Layout, list[Endpoint]]:
        ranks = self._ranks
        parts = [by_rank(chunk.pieces) for chunk in plan.chunks]
        own = [{rank: pieces for rank, pieces in each.items() if ranks.rank in (0, rank)} for each in parts]
        self._gathered = [lay_out(plan.manifest, each, number % SLOTS) for number, each in enumerate(own)]
        if self._to_workers is not None and self._to_workers.sends_to is not None:  # for another route
            self.abort()
        if ranks.size > 1:
            self._meet_ranks(update)
        mine = [{0: each[ranks.rank]} if ranks.rank in each else {} for each in self._gathered]
        if ranks.rank:  # it has its own alone in its slots
            return mine, [Endpoint() for _ in plan.reads]
        size = 1 + self._workers
        if self._to_workers is None:
            at = Rendezvous(plan.host)
            self._to_workers = _Meeting([at.host, at.port, at.name], at, 0, size, self._device, 1)
        # Without senders there are broadcasts.
        joins = {"place": self._to_workers.place, "size": size, "senders": None}
        return mine, [endpoint(self._gathered, [], **joins, rank=1 + worker) for worker in range(self._workers)]

    def _meet_ranks(self, update: Update) -> None:
        """Make a communicator of the ranks, once. Collective."""
        ranks = self._ranks
        known = ranks.broadcast(self._among_ranks.name if self._among_ranks is not None else "", "connect")
        if self._among_ranks is not None and self._among_ranks.name == known:
            return
        at = Rendezvous(ranks.host) if ranks.rank == 0 else None
        place = ranks.broadcast([at.host, at.port, at.name] if at else None, "connect")
        ends = ([], [*range(1, ranks.size)]) if ranks.rank == 0 else ([0], [])
        self._among_ranks = _Meeting(place, at, ranks.rank, ranks.size, self._device, ranks.size, *ends)
        self._among_ranks.meet(update.wait, update.deadline())

    def connect(self, deadline: Deadline) -> None:
        meeting, ranks = self._to_workers, self._ranks
        if meeting is None:
            return

        def wait(seconds: float) -> None:
            if meeting.aborted.wait(seconds):
                raise WeightSyncError("the push was given up")
            if ranks.rank:  # rank 0's connections are in use by another thread
                ranks.wait(0.0)

        meeting.meet(wait, deadline)

    def send(self, chunks: Sequence[int], sample: int | None, update: Update) -> None:
        packer = self._packer

        def wait(seconds: float) -> None:
            if self._packer is not packer or packer is None:
                raise WeightSyncError("the transport was closed while it was sending")
            update.wait(seconds)

        under_way = _UnderWay()
        for number in chunks:
            if (earlier := self._posted.pop(number % SLOTS, None)) is not None:
                earlier.follow(wait, update.deadline_after_workers(), "transfer")
            under_way.bound(_AHEAD, wait, update.deadline_after_workers())
            if self._packer is not packer or packer is None:
                raise WeightSyncError("the transport was closed while it was sending")
            slot, mine = self._slots[number % SLOTS], self._mine[number]
            others = [(slot, each, rank) for rank, each in self._gathered[number].items() if rank != self._ranks.rank]
            gathering = self._exchange(self._among_ranks, number, [], others)
            packer.fill(number, sample)
            if self._route is Route.EACH:
                first = self._ranks.size
                sends = [(slot, each, first + worker) for worker, each in mine.items()]
                sending = self._exchange(self._to_workers, number, sends, [])
            elif self._ranks.rank:
                sending = self._exchange(self._among_ranks, number, [(slot, each, 0) for each in mine.values()], [])
            else:
                if gathering is not None:
                    gathering.follow(wait, update.deadline(), "gather")
                    under_way.add(gathering)
                end = max(each.end for each in self._gathered[number].values())
                sending = _joined(self._to_workers).broadcast(slot[:end])
            if sending is not None:
                self._posted[number % SLOTS] = sending
                under_way.add(sending)
        self._posted.clear()
        under_way.bound(0, wait, update.deadline_after_workers())

    @staticmethod
    def _exchange(
        meeting: _Meeting | None, number: int, sends: Sequence[_Part], receives: Sequence[_Part]
    ) -> Pending | None:
        """Start sending and receiving bundles of a slot, where there are any."""
        if not sends and not receives:
            return None
        to, of = ([(slot[b.first : b.end], member) for slot, b, member in those] for those in (sends, receives))
        return _joined(meeting).exchange(number, to, of)

    def abort(self) -> None:
        for meeting in (self._to_workers, self._among_ranks):
            if meeting is not None:
                meeting.abort()
        self._forget()


class _Endpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker is told of its transport. `runs` has, for each chunk, [rank, first byte in the slot, end]."""

    runs: list[list[tuple[Count, Count, Count]]]
    slot_bytes: Count
    place: tuple[str, Count, str]
    rank: Count
    size: Count
    senders: list[Count] | None


class NcclReceiver(TransportReceiver):
    """The worker's end."""

    copy_programs = _COPY_PROGRAMS

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._meeting: _Meeting | None = None
        self._slots: list[torch.Tensor] = []
        self._posted: dict[int, Pending] = {}

    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: Wait, deadline: Deadline) -> None:
        told = typed(fields, _Endpoint)
        if any(not first <= end <= told.slot_bytes for runs in told.runs for _, first, end in runs):
            raise ProtocolError(f"a run of bytes does not lie in a slot of {told.slot_bytes} bytes")
        self._runs, self._broadcasts = told.runs, told.senders is None
        if not self._slots or self._slots[0].numel() != told.slot_bytes:
            self._slots = []  # before there are others
            self._slots = [torch.empty(told.slot_bytes, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        if self._meeting is None or self._meeting.place != told.place:
            if self._meeting is not None:
                self._meeting.abort()
            size = told.size  # those that a worker receives from are ranks
            self._meeting = _Meeting(told.place, None, told.rank, size, self.device, size, None, told.senders)
            self._meeting.meet(wait, deadline)

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        if storage not in range(SLOTS):
            raise ProtocolError(
                f"something lies in storage {storage} of trainer rank {rank}, and there are {SLOTS} slots"
            )
        return self._slots[storage]

    def chunks(self, numbers: Sequence[int], wait: Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        self._posted.clear()
        under_way = _UnderWay()
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            # The slot of `following` held the chunk before this one, which has been loaded.
            for one in (number, following):
                if one is not None and one not in self._posted:
                    self._posted[one] = self._receive(one)
            arriving = self._posted.pop(number)
            arriving.follow(wait, deadline(), "transfer")
            under_way.add(arriving)
            under_way.bound(_AHEAD, wait, deadline())
            yield number
        under_way.bound(0, wait, deadline())

    def _receive(self, number: int) -> Pending:
        communicator, slot, runs = _joined(self._meeting), self._slots[number % SLOTS], self._runs[number]
        if self._broadcasts:
            return communicator.broadcast(slot[: max(end for _, _, end in runs)])
        return communicator.exchange(number, [], [(slot[first:end], rank) for rank, first, end in runs])

    def close(self) -> None:
        if self._meeting is not None:
            self._meeting.abort()
        self._meeting = None
        self._posted.clear()
        self._slots = []


class _UnderWay:
    """Operations that were begun and have not been seen to end, the oldest first."""

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()

    def add(self, pending: Pending) -> None:
        """Note an operation."""
        self._pending.append(pending)

    def bound(self, count: int, wait: Wait, deadline: Deadline) -> None:
        """Wait for the oldest until at most `count` are left."""
        while len(self._pending) > count:
            self._pending.popleft().wait(wait, deadline, "transfer")


class _Meeting:
    """A communicator that is to be: where its members meet, and which of them this one exchanges with.

    place: [host, port, name] of the rendezvous, which its first member alone has.
    ranks: how many of the members are trainer ranks. They come first.
    """

    def __init__(
        self,
        place: Sequence[Any],
        rendezvous: Rendezvous | None,
        rank: int,
        size: int,
        device: torch.device,
        ranks: int,
        sends_to: list[int] | None = None,
        receives_from: list[int] | None = None,
    ) -> None:
        self.place, self.rendezvous, self.sends_to = place, rendezvous, sends_to
        self.name: str = place[2]
        self.aborted = threading.Event()
        self.communicator: Communicator | None = None
        self._arguments = rank, size, device
        self._receives_from = receives_from
        workers = [f"engine worker {number}" for number in range(size - ranks)]
        self._names = [*(f"trainer rank {number}" for number in range(ranks)), *workers]

    def meet(self, wait: Wait, deadline: Deadline) -> None:
        """Wait for the other members, once."""
        if self.communicator is not None:
            return
        host, port, _ = self.place

        def open_store() -> dist.Store:
            if self.rendezvous is not None:
                return self.rendezvous.store(deadline.left_s())
            return visit(host, port, deadline)

        ends = self.sends_to, self._receives_from, self._names
        self.communicator = Communicator(open_store, *self._arguments, host, wait, deadline, *ends)
        if self.aborted.is_set():
            self.communicator.abort()

    def abort(self) -> None:
        """Break the wait for the members, and the communicator."""
        self.aborted.set()
        if self.communicator is not None:
            self.communicator.abort()
        if self.rendezvous is not None:
            self.rendezvous.close()


def _joined(meeting: _Meeting | None) -> Communicator:
    if meeting is None or meeting.communicator is None:
        raise WeightSyncError("the communicator was closed, or no member has joined it")
    return meeting.communicator


ENDS = NcclTransport, NcclReceiver
