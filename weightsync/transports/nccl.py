"""Carries bytes between trainer ranks and engine workers on any hosts: NCCL between GPUs, TCP between CPUs.

All ranks and workers are members of one communicator. Workers that read the same bytes form a chain. Every rank sends
its part of a chunk to the first worker of each chain. Each worker passes the whole chunk on while the next chunk
arrives. So each byte leaves the trainer once a chain, for any number of engines. Each byte of a chain crosses a host's
link once in either direction. A chain's second worker on a host receives from the first, over NVLink, shared memory or
the loopback.

    rank        sends 1      sends 2      sends 3
    worker 0                 receives 2,  receives 3,
                receives 1   passes on 1  passes on 2    passes on 3
    worker 1                 receives 1   receives 2     receives 3

Each rank and each worker has two slots. While one chunk travels, a rank fills the next, and a worker loads the last.
Sends and receives follow the order of the plan, and so pace each other. A worker's slot takes another chunk once the
worker has loaded the slot's chunk and passed it on. A worker waits only for earlier chunks, or for the same chunk on an
earlier member of the chain. So waits form no cycle.

With an `encoding`, each rank begins a push with one byte along each chain. On CPUs it says whether the rank sends
messages (encoding.py) or plain runs of bytes. A worker keeps each chunk until the next push, in the chunk's own slot.
On GPUs it says whether all ranks send changed words (changes.py). Plain runs follow if these find no room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta, Struct

from weightsync.errors import ConfigError, ProtocolError
from weightsync.net.addresses import ANYWHERE
from weightsync.net.ranks import Ranks
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo
from weightsync.planning.layout import Count
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.planning.wire_types import Storage
from weightsync.transports import base, members
from weightsync.transports.changes import HEAD_BYTES, WHOLE, parts_of, read_head
from weightsync.transports.communicator import Communicator, Operation, PeerBuffer, UnderWay, longest
from weightsync.transports.encoding import ReceiveBuffers, drop_digests, length, read
from weightsync.transports.nccl_sender import AHEAD, COPY_PROGRAMS, ChangeSender, MessageSender, Sender
from weightsync.transports.staging import Layout, endpoint, keys_of, receive_layout, send_layout, still_open


class NcclTransport(members.MemberTransport):
    """The trainer's end. `name` is "broadcast", or "nccl" to refuse CPU tensors."""

    encodings = ("auto", "delta")
    least_bytes: ClassVar = {"cpu": 7 * 2**15, "cuda": 2**24}
    """Smaller chunks cost more processor time than they save."""

    def invite(self, ranks: Sequence[MachineInfo], workers: Sequence[MachineInfo], host: str) -> list[dict[str, Any]]:
        members.check_machines(self.name, ranks, workers)
        device, before = ranks[0].device, self._peers
        dialled = {len(ranks) + at: each.dialled for at, each in enumerate(workers) if each.dialled is not None}
        self._peers = [member.peer for member in (*ranks, *workers)]
        if self._communicator is not None and self._peers == before:
            place = self._communicator.place
        else:
            place = self._open_rendezvous(members.kind_of(device).rendezvous_at(host))
            self._rendezvous.dials = [*dialled.values()]
        invitations = self._invitations(place, device=device)
        for member, (address, port) in dialled.items():
            invitations[member]["place"] = [ANYWHERE[":" in address], port, place[2]]
        return invitations

    def meet(self, invitation: dict[str, Any], device: torch.device, deadline: Deadline) -> None:
        rendezvous, self._rendezvous = self._rendezvous, None
        self._communicator = members.meet(self._communicator, invitation, device, deadline, rendezvous)

    def prepare(self, plan: TransferPlan, tensors: base.LocalTensors, update: Update) -> list[base.Endpoint]:
        ranks = self._ranks = update.ranks
        device, computes = self._agree(tensors, ranks)
        self._by_words = self.encoding is not None and finds_words(device)
        before, self._sender = self._sender if self.keeps_runs else None, None  # frees the old slots first
        slots = base.SLOTS if self.encoding is None else max(len(plan.chunks), 1)
        chains = range(len(plan.chains)) if ranks.rank == 0 else ()
        layouts = [receive_layout(plan, chain, slots) for chain in chains]
        communicator, layout = still_open(self._communicator), send_layout(plan, ranks.rank, base.SLOTS)
        options = plan, tensors, layout, device, communicator, self._peers, computes
        how: dict[str, Any] = {"before": before, "measures": self.encoding == "auto"}
        if self.encoding is None:
            self._sender = Sender(*options)
        elif self._by_words:
            self._sender = ChangeSender(*options, on_host=self.encoding_base == "host", **how)
        else:
            self._sender = MessageSender(*options, **how)
        self._pushes = self._sender.pushes
        endpoints = [base.Endpoint() for _ in range(plan.workers)]
        for chain, received in zip(plan.chains, layouts, strict=True) if ranks.rank == 0 else ():
            first = endpoint(received, [])
            for position, worker in enumerate(chain.workers):
                endpoints[worker] = self._endpoint(chain, position, received, slots, first)
        return endpoints

    def _agree(self, tensors: base.LocalTensors, ranks: Ranks) -> tuple[torch.device, bool]:
        """Return this rank's device for sending, and whether any rank computes tensors. Collective.

        If one rank computes tensors, all ranks must gather with it. Every rank learns the members' names.
        """
        own = sorted({each.tensor.device.type for each in tensors.at.values()})
        everyone = ranks.gather([own, any(each.compute is not None for each in tensors.at.values())], "connect")
        kinds: set[str] = set().union(*(each for each, _ in everyone))
        own_view = [sorted(kinds), any(each for _, each in everyone), self._peers]
        found, computes, self._peers = ranks.broadcast(own_view, "connect")
        if len(found) > 1:
            raise ConfigError(f"a broadcast needs all tensors on one kind of device, found {found}")
        for each in tensors.at.values():
            return each.tensor.device, computes
        on_gpu = found == ["cuda"]
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"), computes

    def _endpoint(
        self, chain: Chain, position: int, layout: Layout, slots: int, common: base.Endpoint
    ) -> base.Endpoint:
        """Return the endpoint of a chain's worker. `common` has the data of all of them."""
        chained = [self._ranks.size + worker for worker in chain.workers]
        last, senders = len(chained) - 1, keys_of(layout)
        fields: dict[str, Any] = {**common.fields, "encoders": [], "origins": [], "by_words": self._by_words}
        if self.encoding is not None:  # workers then pass runs on one by one
            fields |= {"encoders": senders, "origins": [[*those] for those in layout]}
        if position:
            before = chained[position - 1]
            rows = [[[before, each.first, each.end] for each in those.values()] for those in layout]
            senders, fields["runs"] = [before], rows if self.encoding is not None else [*map(_joined_runs, rows)]
        fields |= {
            "senders": senders,
            "slots": slots,
            "pushes": self._pushes,
            "onward": chained[position + 1] if position < last else None,
            "before": [self._peers[member] for member in (reversed(chained[:position]) if position else senders)],
            "after": [self._peers[member] for member in chained[position + 1 :]],
        }
        return base.Endpoint([], common.arrivals, fields)

    def connect(self, deadline: Deadline) -> None:
        sender = still_open(self._sender)
        wait = members.wait_unless_aborted(sender.communicator.aborted, self._ranks)
        with sender.stream:
            sender.communicator.link(sender.first_sends(), [], wait, deadline)
            sender.pack()  # while the workers prepare their copies

    def begin_send(self, seal: base.Seal | None) -> None:
        still_open(self._sender).begin(seal)

    def on_commit(self, version: int) -> None:
        still_open(self._sender).note_loaded()


def finds_words(device: torch.device) -> bool:
    """Return whether an encoding between such devices is by changed words. Between CPUs it is by messages."""
    return device.type == "cuda"


def _joined_runs(runs: list[list[int]]) -> list[list[int]]:
    """Return the runs of one chunk as one run from the slot's first byte. One member sends them all."""
    return [[runs[0][0], 0, max(end for _, _, end in runs)]] if runs else []


class NcclEndpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's data about its transport.

    runs: for each chunk, [sending member, first byte in the slot, end].
    slots: the number of slots. Chunks take them in turn.
    pushes: the number of pushes behind the runs in the slots, perhaps over other connections. 0: there are none.
    senders: the members that the worker receives from.
    onward: the member that the worker passes everything on to.
    encoders: the ranks that announce at each push whether they encode it. Empty without an encoding.
    by_words: whether the encoding is by changed words.
    origins: with an encoding, for each chunk, the rank of each run.
    before: names of upstream members, nearest first.
    after: names of downstream members, nearest first.
    """

    runs: list[list[tuple[Count, Count, Count]]]
    slot_bytes: Count
    slots: Annotated[int, Meta(ge=1)]
    pushes: Count
    senders: list[Count]
    encoders: list[Count]
    by_words: bool
    origins: list[list[Count]]
    onward: Count | None
    before: list[str]
    after: list[str]


class NcclReceiver(members.MemberReceiver):
    """The worker's end."""

    copy_programs = COPY_PROGRAMS

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._kept: dict[int, torch.Tensor] = {}  # the slots of kept chunks
        self._pushes = 0

    def meet(self, invitation: dict[str, Any], deadline: Deadline) -> None:
        self._communicator = members.meet(self._communicator, invitation, self.device, deadline)

    def connect(self, storages: list[Storage], fields: dict[str, Any], wait: base.Wait, deadline: Deadline) -> None:
        told = self._told = self._read_endpoint(fields, NcclEndpoint)
        if told.encoders and [*map(len, told.origins)] != [*map(len, told.runs)]:
            raise ProtocolError("some runs of bytes do not name their rank")
        self.waiting_for = [*told.before, *told.after]
        self.sends_changes = told.by_words
        nbytes = [told.slot_bytes] * (base.SLOTS if told.by_words else told.slots)
        is_kept = told.by_words or [slot.numel() for slot in self._slots] == nbytes
        if told.pushes and not (is_kept and self._pushes):
            raise ProtocolError("this worker has not kept the last push. Push again: the next push sends everything")
        if told.by_words or not is_kept:
            self._slots = []  # free the old slots first
            self._slots = [torch.empty(each, dtype=torch.uint8, device=self.device) for each in nbytes]
        if told.by_words:  # two in turn, until `keep_runs`
            self._slots = [self._slots[number % base.SLOTS] for number in range(told.slots)]
            self._kept = self._kept if told.pushes else {}
        self._mailbox = ReceiveBuffers(told.slot_bytes, 0 if told.by_words else len(told.encoders))
        self._encoding: set[int] = set()
        self._pushes = told.pushes
        if told.pushes and not told.by_words:
            slots = (self._slots[number % told.slots] for number in range(len(told.runs)))
            drop_digests(slot[:end] for slot, runs in zip(slots, told.runs, strict=True) for _, _, end in runs)
        self._communicator.link(*self._first_exchange(), wait, deadline)

    def _first_exchange(self) -> tuple[list[PeerBuffer], list[PeerBuffer]]:
        """Return the first sends and receives: the longest run on the way to and from each member."""
        told = self._told
        slots = [(self._slots[number % told.slots], runs) for number, runs in enumerate(told.runs) if runs]
        # With an encoding, runs are passed on one by one.
        sends = [(slot[f if told.encoders else 0 : end], told.onward) for slot, runs in slots for _, f, end in runs]
        receives = [(slot[first:end], member) for slot, runs in slots for member, first, end in runs]
        return longest((data, member) for data, member in sends if member is not None), longest(receives)

    def keep_runs(self, numbers: Collection[int]) -> None:
        if self._told.pushes and self._kept.keys() != {*numbers}:
            raise ProtocolError("this worker has not kept the last push. Push again: the next push sends everything")
        for number in numbers:
            nbytes = base.align(max((end for _, _, end in self._told.runs[number]), default=0))
            if not self._told.pushes:
                self._kept[number] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._slots[number] = self._kept[number]

    def changes(
        self,
        numbers: Sequence[int],
        wait: base.Wait,
        deadline: Callable[[], Deadline],
        arrived: Callable[[base.Changes], object],
    ) -> bool:
        told, under_way = self._told, UnderWay()
        self._ask_ranks(under_way, wait, deadline())
        encodes, self._encoding = bool(self._encoding), set()
        parts = parts_of(numbers) if encodes else []
        is_whole = not encodes
        for at, part in enumerate(parts):
            rooms = [self._room(part, rank) for rank in told.encoders]
            heads = self._heads(2 * at + 1, rooms, under_way, wait, deadline)
            is_whole = is_whole or any(nbytes == WHOLE for nbytes, _ in heads)
            bodies = [torch.empty(max(nbytes, 0), dtype=torch.uint8, device=self.device) for nbytes, _ in heads]
            if coming := [(body, member) for body, member in zip(bodies, self._members(), strict=True) if body.numel()]:
                number = len(told.runs) + 2 * at + 2
                self._start(number, [], coming).follow(wait, deadline(), "transfer")
                if told.onward is not None:
                    under_way.append(self._start(number, [(body, told.onward) for body, _ in coming], []))
            for rank, body, (nbytes, checksum) in zip(told.encoders, bodies, heads, strict=True):
                if nbytes != WHOLE:
                    arrived(base.Changes(part, rank, body, checksum))
        if encodes:
            last = self._heads(2 * len(parts) + 1, [0] * len(told.encoders), under_way, wait, deadline)
            is_whole = is_whole or any(nbytes == WHOLE for nbytes, _ in last)
        under_way.bound(0, wait, deadline())
        self._pushes += 1
        return not is_whole

    def _heads(
        self, number: int, rooms: Sequence[int], under_way: UnderWay, wait: base.Wait, deadline: Callable[[], Deadline]
    ) -> list[tuple[int, int]]:
        """Receive, pass on and read a head of each rank."""
        told, number = self._told, len(self._told.runs) + number
        heads = [torch.empty(HEAD_BYTES, dtype=torch.uint8, device=self.device) for _ in rooms]
        self._start(number, [], [*zip(heads, self._members(), strict=True)]).wait(wait, deadline(), "transfer")
        if told.onward is not None:
            under_way.append(self._start(number, [(each, told.onward) for each in heads], []))
        return [read_head(each, room, self._pushes) for each, room in zip(heads, rooms, strict=True)]

    def _room(self, part: Sequence[int], rank: int) -> int:
        """Return the bytes of a rank's runs in some chunks."""
        told = self._told
        runs = (own for number in part for own in zip(told.origins[number], told.runs[number], strict=True))
        return sum(end - first for origin, (_, first, end) in runs if origin == rank)

    def _members(self) -> list[int]:
        """Return the sending member of each rank's data."""
        told = self._told
        return told.senders if told.senders == told.encoders else told.senders * len(told.encoders)

    def chunks(self, numbers: Sequence[int], wait: base.Wait, deadline: Callable[[], Deadline]) -> Iterator[int]:
        on_gpu = self.device.type == "cuda"
        under_way = UnderWay()
        if self._told.encoders and not self._told.by_words:
            self._ask_ranks(under_way, wait, deadline())
        expected = [*numbers, None]
        arriving = self._exchange(None, expected[0])
        passing: Operation | None = None
        if on_gpu:
            # torch hands out 32 streams of each priority in turn. Use another priority, or it may hand out the current
            # stream.
            aside = torch.cuda.Stream(self.device, priority=-1)
            loaded = torch.cuda.current_stream(self.device).record_event()
        for number, following in zip(numbers, expected[1:], strict=True):
            # The slot of `following` held the chunk before this one. That chunk is loaded, and must be passed on first.
            if passing is not None:
                passing.follow(wait, deadline(), "transfer")
            coming = None if on_gpu else self._exchange(None, following)
            arriving.follow(wait, deadline(), "transfer")
            under_way.append(arriving)
            under_way.bound(AHEAD, wait, deadline())
            passing = None if on_gpu else self._exchange(number, None)
            for run, room, _ in self._runs(number):
                if room is not run:
                    read(room, run, self._pushes)
            yield number
            if coming is None:
                # Post the exchange after the load is queued. Loading can synchronise the GPU, and would then wait for
                # the exchange without a deadline.
                before, loaded = loaded, torch.cuda.current_stream(self.device).record_event()
                with torch.cuda.stream(aside):
                    aside.wait_event(before)
                    # One exchange for both: a communicator runs its operations one after the other.
                    coming = self._exchange(number, following)
            arriving = coming
        for last in (passing, arriving):
            if last is not None:
                under_way.append(last)
        under_way.bound(0, wait, deadline())
        self._pushes += not self._told.by_words  # `changes` has counted the push

    def _ask_ranks(self, under_way: UnderWay, wait: base.Wait, deadline: Deadline) -> None:
        """Receive, and pass on, whether each rank encodes this push."""
        told, number = self._told, len(self._told.runs)
        said = torch.zeros(len(told.encoders), 1, dtype=torch.uint8, device=self.device)
        self._start(number, [], [*zip(said, self._members(), strict=True)]).wait(wait, deadline, "transfer")
        self._encoding = {rank for rank, (encodes,) in zip(told.encoders, said.tolist(), strict=True) if encodes}
        if told.onward is not None:
            under_way.append(self._start(number, [(each, told.onward) for each in said], []))

    def _runs(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield each run of a chunk: its place in the slot, the tensor that receives it, and its sending member."""
        slot = self._slots[number % len(self._slots)]
        for position, (member, first, end) in enumerate(self._told.runs[number]):
            run = slot[first:end]
            is_message = bool(self._encoding) and self._told.origins[number][position] in self._encoding
            yield run, self._mailbox.room(number, position, first, end) if is_message else run, member

    def _exchange(self, leaving: int | None, arriving: int | None) -> Operation:
        """Start passing chunk `leaving` on, and receiving chunk `arriving`."""
        told, sends, receives = self._told, [], []
        if leaving is not None and told.onward is not None and told.runs[leaving]:
            data = [room if room is run else room[: length(room)] for run, room, _ in self._runs(leaving)]
            if not told.encoders:
                data = [self._slots[leaving % base.SLOTS][: max(end for _, _, end in told.runs[leaving])]]
            sends = [(each, told.onward) for each in data]
        if arriving is not None:
            receives = [(room, member) for _, room, member in self._runs(arriving)]
        number = (leaving or 0) if arriving is None else arriving  # on a CPU at most one of them is given
        return self._start(number, sends, receives)

    def _start(
        self, number: int, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Operation:
        """Start sends and receives, with the names of the members that this worker waits for."""
        told = self._told
        count = len(told.senders) if receives else 0
        names = [*told.before[:count], *(told.after[:1] if sends else ())]
        behind = [*(told.before[count:] if receives else ()), *(told.after[1:] if sends else ())]
        communicator: Communicator = still_open(self._communicator)
        return communicator.exchange(number, sends, receives, names, behind)

    def close(self) -> None:
        super().close()
        self._kept = {}


ENDS = NcclTransport, NcclReceiver
