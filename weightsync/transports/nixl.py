"""Workers read chunks out of the ranks' memory by NIXL: over InfiniBand, RoCE, CUDA IPC, shared memory or TCP.

Each rank packs its part of a chunk into a registered slot, with digests. It tells the first worker of each chain how
many chunks it has packed. The worker reads the rank's part into a registered slot of its own, and the rank's code takes
no part in it. Each further worker of the chain reads the chunk out of the slot of the worker before it. Counts pace the
members:

    rank        fills 1      fills 2      fills 3                 fills 4, once 1 is read
    worker 0                 reads 1      reads 2, loads 1        reads 3, loads 2
    worker 1                              reads 1                 reads 2, loads 1

Each member has three slots. A slot takes another chunk once its chunk is read by all members behind, and loaded. A
worker begins to read a chunk while earlier ones are being read. A member waits only for earlier chunks, or for the same
chunk on an earlier member. So waits form no cycle.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from msgspec import Struct

from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline, submit
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo, typed
from weightsync.planning.layout import Count
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.planning.wire_types import Storage
from weightsync.transports import base, staging
from weightsync.transports.members import MemberReceiver, MemberTransport, refuse_dialled, wait_unless_aborted
from weightsync.transports.nixl_agent import BACKEND
from weightsync.transports.nixl_group import NixlGroup, meet
from weightsync.transports.tcp_links import TcpRendezvous

SLOTS = 3
"""Chunks in memory at once at each end. One is read while the others are packed, announced or loaded."""


class _Offers:
    """Chunks in this member's slots, offered to the members behind."""

    def __init__(self, group: NixlGroup) -> None:
        self._group = group
        self._counts: Counter[int] = Counter()  # chunks offered to each member
        # The count of each slot's chunk, for each member.
        self._due: list[dict[int, int]] = [{} for _ in range(SLOTS)]

    def add(self, slot: int, members: Sequence[int]) -> None:
        """Tell members of a chunk in a slot."""
        for member in members:
            self._counts[member] += 1
            staging.still_open(self._group.agent).tell(self._group.peers[member], self._counts[member])
        self._due[slot] = {member: self._counts[member] for member in members}

    def late(self, slot: int) -> list[str]:
        """Return the names of members yet to read the chunk in a slot."""
        counts = staging.still_open(self._group.agent).counts()
        due = [(self._group.peers[member], count) for member, count in self._due[slot].items()]
        return [peer.member for peer, count in due if counts[peer.agent] < count]


class NixlTransport(MemberTransport):
    """The trainer's end."""

    least_bytes: ClassVar = {"cpu": 2**22, "cuda": 2**24}
    """Smaller chunks would take longer to announce than to read."""
    most_bytes: ClassVar = {"cpu": 2**23, "cuda": 3 * 2**26}
    """Larger chunks would leave a CPU's cache between two copies. On a GPU the slots would take more memory."""

    def route(self, request: base.RouteRequest) -> tuple[Chain, ...]:
        devices = {member.device for member in (*request.ranks, *request.workers)}
        self.max_chunk_bytes = self.most_bytes["cuda" if "cuda" in devices else "cpu"]
        return super().route(request)

    def invite(self, ranks: Sequence[MachineInfo], workers: Sequence[MachineInfo], host: str) -> list[dict[str, Any]]:
        refuse_dialled("NIXL", workers)
        self._peers = [member.peer for member in (*ranks, *workers)]
        return self._invitations(self._open_rendezvous(TcpRendezvous(host)), backend=os.environ.get(BACKEND, "UCX"))

    def meet(self, invitation: dict[str, Any], device: torch.device, deadline: Deadline) -> None:
        self._communicator = meet(self._communicator, invitation, device, deadline, self._rendezvous, self._peers)
        self._rendezvous = None

    def prepare(self, plan: TransferPlan, tensors: base.LocalTensors, update: Update) -> list[base.Endpoint]:
        ranks = self._ranks = update.ranks
        self._sender = None  # free the old slots first
        self._sender = own = _RankSlots(plan, tensors, ranks.rank, staging.still_open(self._communicator), ranks.size)
        endpoints = [base.Endpoint() for _ in range(plan.workers)]
        for number, chain in enumerate(plan.chains):
            firsts = [those[number].first if number in those else None for those in own.layout]
            if any(first is not None for first in firsts):
                endpoints[chain.workers[0]].storages.append((ranks.rank, 0, self.name, {"firsts": firsts}))
            if ranks.rank == 0:
                received = staging.receive_layout(plan, number, SLOTS)
                for position, worker in enumerate(chain.workers):
                    endpoints[worker] = self._endpoint(chain, position, received, endpoints[worker].storages)
        return endpoints

    def _endpoint(self, chain: Chain, position: int, layout: staging.Layout, storages: list[Storage]) -> base.Endpoint:
        """Return the endpoint of a chain's worker, with the places of runs in the ranks' slots as `storages`."""
        members = [self._ranks.size + worker for worker in chain.workers]
        before = staging.keys_of(layout)
        fields: dict[str, Any] = {}
        if position and before:  # the slots of the worker before are laid out alike
            before = [members[position - 1]]
            ends = [max((each.end for each in those.values()), default=0) for those in layout]
            fields["runs"] = [[[before[0], 0, end]] if end else [] for end in ends]
        behind = members[position + 1 :][:1] if before else []  # workers that read nothing have no slots to try
        return staging.endpoint(layout, storages, before=before, behind=behind, **fields)

    def connect(self, deadline: Deadline) -> None:
        sender = staging.still_open(self._sender)
        wait = wait_unless_aborted(sender.group.aborted, self._ranks)
        sender.group.share(sender.slots, [], sender.behind, wait, deadline)


class _RankSlots:
    """One rank's slots and offers for one plan. `behind` are the first workers of its chains."""

    def __init__(self, plan: TransferPlan, tensors: base.LocalTensors, rank: int, group: NixlGroup, ranks: int) -> None:
        self.group = group
        self.layout = staging.send_layout(plan, rank, SLOTS)
        self._firsts = [ranks + chain.workers[0] for chain in plan.chains]
        self.behind = sorted({self._firsts[chain] for those in self.layout for chain in those})
        self.gpus = tensors.gpus
        kinds = {each.tensor.device for each in tensors.at.values()}
        self.device = next((kind for kind in kinds if kind.type == "cpu"), min(kinds, key=str, default=group.device))
        nbytes = staging.slot_bytes(self.layout)
        self.slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        self.packer: staging.Packer | None = staging.Packer(plan, tensors, self.layout, dict(enumerate(self.slots)))
        self._offers = _Offers(group)

    def send(self, chunks: Sequence[int], seal: base.Seal | None, update: Update) -> int:
        """Send as `Transport.send` does. Return the bytes offered to workers."""
        sent_bytes = 0
        for number in chunks:
            slot, sections = number % SLOTS, self.layout[number]
            if sections:
                late, deadline = partial(self._offers.late, slot), update.deadline_after_workers()
                staging.wait_until(late, "read a chunk", update.wait, deadline, _longest_poll_s(self.device))
            staging.still_open(self.packer).fill(number, seal)
            if not sections:
                continue
            if self.device.type == "cuda":
                filled = torch.cuda.current_stream(self.device).record_event()
                late = partial(_unfinished, filled, self.device)
                staging.wait_until(late, "fill a slot", update.wait, update.deadline(), timeouts.READ_POLL_S)
            self._offers.add(slot, [self._firsts[chain] for chain in sections])
            sent_bytes += sum(each.end - each.first for each in sections.values())
        return sent_bytes


def _longest_poll_s(device: torch.device) -> float:
    """Return the longest pause between two looks at peers. On a CPU looks take time from the transfer itself."""
    return timeouts.READ_POLL_S if device.type == "cuda" else timeouts.STAGING_LONGEST_POLL_S


def _unfinished(event: torch.cuda.Event | None, device: torch.device) -> list[str]:
    return [f"the GPU {device}"] if event is not None and not event.query() else []


class NixlEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's data about its transport.

    runs: for each chunk, [member to read from, first byte in the slot, end].
    before: the members to read from.
    behind: the next member of the chain, or none.
    """

    runs: list[list[tuple[Count, Count, Count]]]
    slot_bytes: Count
    before: list[Count]
    behind: list[Count]


class NixlRow(Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a worker's run in a rank's slot, for each chunk."""

    firsts: list[Count | None]


class NixlReceiver(MemberReceiver):
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._reader: _Reader | None = None

    def meet(self, invitation: dict[str, Any], deadline: Deadline) -> None:
        self._communicator = meet(self._communicator, invitation, self.device, deadline)

    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: base.Wait, deadline: Deadline) -> None:
        told = self._read_endpoint(fields, NixlEndpoint)
        rows = {rank: typed(row, NixlRow).firsts for rank, _, _, row in storages}
        if not {member for runs in told.runs for member, _, _ in runs}.issubset(told.before):
            raise ProtocolError(f"the plan reads from other members than {told.before}")
        runs = [[_place_run(rows, number, *run) for run in those] for number, those in enumerate(told.runs)]
        self._slots, self._reader = [], None  # free the old slots first
        self._slots = [torch.empty(told.slot_bytes, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        self._communicator.share(self._slots, told.before, told.behind, wait, deadline)
        self.waiting_for = [self._communicator.peers[member].member for member in (*told.before, *told.behind)]
        self._reader = _Reader(self._communicator, self._slots, runs, told.behind)

    def chunks(self, numbers: Sequence[int], wait: base.Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        reader = staging.still_open(self._reader)
        reader.begin(numbers)
        for number in numbers:
            late = partial(reader.late, number)
            staging.wait_until(late, "let a chunk be read", wait, deadline(), _longest_poll_s(self.device))
            yield number
            reader.loaded(number)

    def close(self) -> None:
        super().close()
        if self._reader is not None:
            self._reader.join()
        self._reader = None


class _Run(NamedTuple):
    """Bytes of one chunk: the member to read from, and the bytes in this worker's slot and in the member's own."""

    member: int
    first: int
    end: int
    at: int


def _place_run(rows: dict[int, list[int | None]], number: int, member: int, first: int, end: int) -> _Run:
    """Return a run of chunk `number`. A rank's slot has its own layout, in `rows`, a worker's has the same one."""
    if member not in rows:
        return _Run(member, first, end, first)
    at = rows[member][number] if number < len(rows[member]) else None
    if at is None:
        raise ProtocolError(f"trainer rank {member} has no part in chunk {number}, and the plan reads it there")
    return _Run(member, first, end, at)


class _ChunkRead(NamedTuple):
    """A chunk under way.

    waiting: the runs to read, each with the count of its offer.
    reads: the reads under way.
    """

    number: int
    waiting: dict[_Run, int]
    reads: dict[_Run, Any]


class _Reader:
    """One worker's reads of one plan. A thread reads chunks while the worker loads others.

    Reads may end in another order than they began. Chunks are loaded, and offered to the member behind, in theirs.

    runs: for each chunk.
    """

    def __init__(
        self, group: NixlGroup, slots: Sequence[torch.Tensor], runs: Sequence[Sequence[_Run]], behind: Sequence[int]
    ) -> None:
        self._group, self._slots, self._runs, self._behind = group, slots, runs, behind
        self._offers = _Offers(group)
        self._counts: Counter[int] = Counter()  # chunks read of each member
        self._read: set[int] = set()  # chunks to load, or being loaded
        self._loads: list[torch.cuda.Event | None] = [None] * len(slots)  # the end of each slot's last load
        self._late: list[str] = []
        self._error: Exception | None = None
        self._running: Future[None] | None = None

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin to read these chunks, in this order."""
        self.join()  # the last push's thread may still be on its last line
        self._running = submit("nixl", partial(self._read_all, [*numbers]))

    def late(self, number: int) -> list[str]:
        """Return the names of the late members of a chunk. Raise the error of its read."""
        if self._error is not None:
            raise self._error
        return [] if number in self._read else self._late or ["the members before"]

    def loaded(self, number: int) -> None:
        """Note that the loading of a chunk is queued on the current stream."""
        device = self._slots[0].device
        loaded = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._loads[number % SLOTS] = loaded
        self._read.remove(number)

    def join(self) -> None:
        """Wait for the end of the thread. All chunks are read, or the group is aborted."""
        if self._running is not None:
            self._running.result()

    def _read_all(self, numbers: Sequence[int]) -> None:
        try:
            if self._slots[0].is_cuda:
                torch.cuda.set_device(self._slots[0].device)
            ahead, under_way = deque(numbers), deque[_ChunkRead]()
            pause_s = timeouts.STAGING_POLL_S
            while ahead or under_way:
                if self._advance(ahead, under_way):
                    pause_s = timeouts.STAGING_POLL_S
                elif self._group.aborted.wait(pause_s):  # the worker's own wait has the deadline
                    raise WeightSyncError("the transport was closed while it was in use")
                else:
                    pause_s = min(2 * pause_s, _longest_poll_s(self._slots[0].device))
        except Exception as error:
            self._error = error.with_traceback(None)  # the traceback would keep the agent

    def _advance(self, ahead: deque[int], under_way: deque[_ChunkRead]) -> bool:
        """Begin the next chunk once its slot is free, and the offered reads. Return whether a chunk moved."""
        busy = self._in_use(ahead[0] % SLOTS, under_way) if ahead else ["no chunk"]
        if moved := not busy:
            under_way.append(self._expect(ahead.popleft()))
        counts = staging.still_open(self._group.agent).counts()
        waiting = busy
        for reading in [*under_way]:
            unread = self._read_offered(reading, counts)
            if reading is under_way[0]:  # several may end in one call: behind an ended one, the next is the first
                waiting = unread
                if not unread:
                    moved, number = True, under_way.popleft().number
                    if self._runs[number]:
                        self._offers.add(number % SLOTS, self._behind)
                    self._read.add(number)
        self._late = waiting
        return moved

    def _in_use(self, slot: int, under_way: Iterable[_ChunkRead]) -> list[str]:
        """Return the names of members yet to read, or to load, a slot's last chunk."""
        if any(number % SLOTS == slot for number in [*self._read, *(each.number for each in under_way)]):
            return ["this worker"]
        return [*_unfinished(self._loads[slot], self._slots[slot].device), *self._offers.late(slot)]

    def _expect(self, number: int) -> _ChunkRead:
        self._counts.update(run.member for run in self._runs[number])
        return _ChunkRead(number, {run: self._counts[run.member] for run in self._runs[number]}, {})

    def _read_offered(self, reading: _ChunkRead, counts: Counter[str]) -> list[str]:
        """Begin to read the offered runs of a chunk. Return the names of members with runs yet to read."""
        agent, peers = staging.still_open(self._group.agent), self._group.peers
        for run, count in [*reading.waiting.items()]:
            peer = peers[run.member]
            if counts[peer.agent] >= count:
                del reading.waiting[run]
                slot = reading.number % SLOTS
                reading.reads[run] = agent.read(peer, slot, run.at, self._slots[slot][run.first : run.end], count)
        for run, read in [*reading.reads.items()]:
            if agent.is_read(read, peers[run.member]):
                del reading.reads[run]
        return [peers[run.member].member for run in (*reading.waiting, *reading.reads)]


ENDS = NixlTransport, NixlReceiver
