"""One rank's sends of `nccl`: runs as they are, as messages (encoding.py), or as changed words (changes.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch

from weightsync.net.update import Update
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.transports.base import FIRST_USES, SLOTS, LocalTensors, Seal, Wait
from weightsync.transports.changes import WHOLE, Bases, Choice, Found, first_whole, head
from weightsync.transports.communicator import Communicator, Operation, PeerBuffer, UnderWay, longest
from weightsync.transports.encoding import Encoder
from weightsync.transports.staging import Layout, Packer, keys_of, slot_bytes, still_open

AHEAD = 8
"""Most GPU operations in flight before the host waits for the oldest. The stream orders them.

Without a bound the host would notice a member's death late.
"""

COPY_PROGRAMS = 64
"""Most programs of a copy kernel. More would delay NCCL's kernels on the GPU. So many keep up with the fastest link."""


class Sender:
    """One rank's sends for one plan. Its slots take the chunks in turn.

    pushes: the number of pushes behind the bytes that all workers have, perhaps over other connections.
    """

    pushes = 0
    _clears_gaps = False
    """Whether to zero gaps in runs. Workers keep them, and over another connection they had other bytes."""

    def __init__(
        self,
        plan: TransferPlan,
        tensors: LocalTensors,
        layout: Layout,
        device: torch.device,
        communicator: Communicator,
        peers: Sequence[str],
        computes: bool,
    ) -> None:
        """Allocate the slots.

        peers: the members' names in errors.
        computes: whether any rank computes tensors.
        """
        self.device, self.layout, self.communicator = device, layout, communicator
        self.gpus = tensors.gpus
        self._computes, self._sent_bytes = computes, 0
        self._plan, self._changing = plan, plan.due(first=False)
        self._slots = [torch.empty(slot_bytes(layout), dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.packer: Packer | None = None
        self._new_packer = partial(Packer, plan, tensors, layout, dict(enumerate(self._slots)), COPY_PROGRAMS)
        ranks = communicator.size - plan.workers
        self._members = [[ranks + worker for worker in chain.workers] for chain in plan.chains]
        names = [[peers[member] for member in self._members[chain]] for chain in keys_of(layout)]
        self._after = [each[0] for each in names], [name for each in names for name in each[1:]]
        self._has_sent = False
        # Of the thread that sends. The allocator gives memory back in the order of the stream that it was taken on.
        self.stream: AbstractContextManager[Any] = nullcontext()
        if device.type == "cuda":
            self.stream = torch.cuda.stream(torch.cuda.current_stream(device))

    def first_sends(self) -> list[PeerBuffer]:
        """Return the largest run of each chain, for the first exchange: NCCL then has its channels for large runs."""
        return longest(
            (self._slots[number % SLOTS][each.first : each.end], self._members[chain][0])
            for number, sections in enumerate(self.layout)
            for chain, each in sections.items()
        )

    def pack(self) -> None:
        """Prepare the copies into the slots."""
        self.packer = self._new_packer()

    def send(self, chunks: Sequence[int], seal: Seal | None, update: Update) -> int:
        """Send as `Transport.send` does, until `packer` is None. Return the bytes sent."""

        def wait(seconds: float) -> None:
            still_open(self.packer)
            update.wait(seconds)

        self._sent_bytes = 0
        self._send_runs(self._send_changes(chunks, seal, update, wait), seal, update, wait)
        self.pushes += 1
        return self._sent_bytes

    def begin(self, seal: Seal | None) -> None:
        """Do as `Transport.begin_send` does."""

    def note_loaded(self) -> None:
        """Note that all workers have loaded the push."""

    def _send_changes(self, chunks: Sequence[int], seal: Seal | None, update: Update, wait: Wait) -> Sequence[int]:
        """Begin a push, and send some chunks as changes. Return the others."""
        return chunks

    def _fill(self, number: int, seal: Seal | None) -> None:
        """Write the bytes of a chunk and their digests into its slot."""
        still_open(self.packer).fill(number, seal)

    def _sends(self, number: int, runs: Sequence[tuple[torch.Tensor, int]]) -> Sequence[tuple[torch.Tensor, int]]:
        """Return the data to send for the runs of a chunk, each with its chain."""
        return runs

    def _keep(self, number: int, runs: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Keep the runs of a chunk that is being sent."""

    def _send_runs(self, chunks: Sequence[int], seal: Seal | None, update: Update, wait: Wait) -> None:
        under_way = UnderWay()
        # A first use of a kernel may synchronise the GPU. The host waits for earlier operations before it.
        first_uses = FIRST_USES if still_open(self.packer).is_loaded and not self._computes else len(chunks)
        waits = 0 if self._has_sent or self.device.type != "cuda" else first_uses
        self._has_sent |= bool(chunks)
        posted: dict[int, Operation] = {}  # by slot
        for at, number in enumerate(chunks):
            if (earlier := posted.pop(number % SLOTS, None)) is not None:
                # Wait on the host: a gather or compute may synchronise the GPU, and so wait without a deadline for a
                # dead member.
                freed = earlier.wait if self._computes else earlier.follow
                freed(wait, update.deadline_after_workers(), "transfer")
            under_way.bound(0 if at < waits else AHEAD, wait, update.deadline_after_workers())
            slot = self._slots[number % SLOTS]
            for section in self.layout[number].values() if self._clears_gaps else ():
                section.clear_gaps(slot)
            self._fill(number, seal)
            runs = [(slot[each.first : each.end], chain) for chain, each in self.layout[number].items()]
            if sends := self._sends(number, runs):
                posted[number % SLOTS] = self._start(number, sends, under_way)
            self._keep(number, runs)
        under_way.bound(0, wait, update.deadline_after_workers())

    def _announce(self, encodes: bool, under_way: UnderWay) -> None:
        """Start telling each chain whether this rank encodes the push."""
        told = torch.tensor([encodes]).to(self.device).view(torch.uint8)
        self._start(len(self.layout), [(told, chain) for chain in keys_of(self.layout)], under_way)

    def _start(self, number: int, sends: Sequence[tuple[torch.Tensor, int]], under_way: UnderWay) -> Operation:
        """Start sends, each along the chain beside it."""
        self._sent_bytes += sum(data.numel() for data, _ in sends)
        to_first = [(data, self._members[chain][0]) for data, chain in sends]
        sending = self.communicator.exchange(number, to_first, [], *self._after)
        under_way.append(sending)
        return sending


class MessageSender(Sender):
    """Sends of messages: whole runs, or their differences from the last push."""

    _clears_gaps = True

    def __init__(self, *options: Any, before: Sender | None, measures: bool) -> None:
        """Go on with the runs of the sender `before`, if all workers have them. `measures`: differences must pay."""
        super().__init__(*options)
        self._encoder: Encoder = before._encoder if isinstance(before, MessageSender) else Encoder(measures)
        self._encoder.reconnect()
        self.pushes = self._encoder.pushes

    def _send_changes(self, chunks: Sequence[int], seal: Seal | None, update: Update, wait: Wait) -> Sequence[int]:
        under_way = UnderWay()
        self._encoder.begin()
        self._announce(self._encoder.encodes, under_way)
        under_way.bound(0, wait, update.deadline_after_workers())
        return chunks

    def _sends(self, number: int, runs: Sequence[tuple[torch.Tensor, int]]) -> Sequence[tuple[torch.Tensor, int]]:
        if not self._encoder.encodes:
            return runs
        return [(self._encoder.message((number, chain), run), chain) for run, chain in runs]

    def _keep(self, number: int, runs: Sequence[tuple[torch.Tensor, int]]) -> None:
        for run, chain in runs:
            self._encoder.keep((number, chain), run, number in self._changing)

    def _send_runs(self, chunks: Sequence[int], seal: Seal | None, update: Update, wait: Wait) -> None:
        super()._send_runs(chunks, seal, update, wait)
        self._encoder.end()


class ChangeSender(Sender):
    """Sends of changed words, before runs or in place of them."""

    _clears_gaps = True

    def __init__(self, *options: Any, before: Sender | None, measures: bool, on_host: bool) -> None:
        """Go on with the bases of the sender `before`, if all workers have their bytes.

        measures: changes must pay.
        on_host: the bases lie in host memory.
        """
        super().__init__(*options)
        self._on_host = on_host
        self._begun = self._tried = self._were_sent = False
        self._bases: Bases | None = None
        self._choice, self._whole_left = Choice(measures), first_whole(measures)
        if isinstance(before, ChangeSender) and before._bases is not None and not (before._whole_left or before._begun):
            self._bases, self._choice, self._whole_left = before._bases, before._choice, 0
            self.pushes = before.pushes
        self._aside: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cuda":
            # torch hands out 32 streams of each priority in turn. Use another priority, or it may hand out the current
            # stream.
            self._aside = torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1))

    def pack(self) -> None:
        super().pack()
        self._bases = self._new_bases(self._bases)

    def _new_bases(self, kept: Bases | None) -> Bases:
        return Bases(self._plan, self.layout, self._slots, still_open(self.packer), self._on_host, self._aside, kept)

    def begin(self, seal: Seal | None) -> None:
        """Begin to compare, if this push sends its changes.

        A comparison makes the bases equal to this push. So if it ends before `send`, the next one sends everything.
        """
        if self._bases is None or self._whole_left:
            return
        if self._begun:
            self._begun, self._whole_left = False, 1
            self._bases.forget()
            return
        self._begun = True
        if not self._computes:  # else the ranks gather together, which must be in the order of `send`
            self._bases.compare(0, seal)

    def note_loaded(self) -> None:
        self._choice.note_loaded(self._tried, self._were_sent)

    def _send_changes(self, chunks: Sequence[int], seal: Seal | None, update: Update, wait: Wait) -> Sequence[int]:
        """Send the changes, if this push does, and return chunks as `Sender` does. Collective among the ranks."""
        under_way = UnderWay()
        self._tried, self._were_sent, self._begun = not self._whole_left, False, False
        if self._whole_left > 1 and self._has_sent:
            self._bases = None
        elif self._bases is None:
            self._bases = self._new_bases(None)
        self._choice.begin()  # when all is allocated, as before the other pushes that it compares
        with self._aside:  # not behind the comparisons
            self._announce(self._tried, under_way)
        coming = iter(chunks)
        if self._tried:
            self._were_sent = self._send_parts(still_open(self._bases), coming, seal, update, wait)
        under_way.bound(0, wait, update.deadline_after_workers())
        self._whole_left = update.ranks.broadcast(self._choice.after(), "transfer")
        return [*coming] if self._were_sent else chunks

    def _fill(self, number: int, seal: Seal | None) -> None:
        if self._tried and number in self._changing:
            # A stream gives its tensors once, and the comparison has read them.
            still_open(self._bases).restore(number)
            still_open(self.packer).seal(number, seal)
        else:
            super()._fill(number, seal)

    def _keep(self, number: int, runs: Sequence[tuple[torch.Tensor, int]]) -> None:
        if self._bases is not None and not self._tried:  # a comparison has made the bases equal
            for run, chain in runs:
                self._bases.keep(number, chain, run)

    def _send_parts(self, bases: Bases, chunks: Iterator[int], seal: Seal | None, update: Update, wait: Wait) -> bool:
        """Send the changes of each part, and take its numbers from `chunks`. Return whether all ranks' found room."""
        under_way, fits, count = UnderWay(), True, len(bases.parts)

        def wait_sent(left: int = 0) -> None:
            under_way.bound(left, wait, update.deadline_after_workers())

        for part in range(count):
            found = bases.find(part, seal)
            _ = [*islice(chunks, len(bases.parts[part].chunks))]  # the progress bar follows
            fits = fits and all(each.body is not None for each in found)
            earlier = len(under_way)
            with self._aside:  # not behind the comparisons
                self._send_heads(2 * part, found, fits, under_way)
                bodies = [(each.body, each.chain) for each in found if each.body is not None and each.body.numel()]
                if fits and bodies:
                    self._start(len(self.layout) + 2 * part + 2, bodies, under_way)
            wait_sent(len(under_way) - earlier)
        wait_sent()
        fits = bool(update.ranks.broadcast(all(update.ranks.gather(fits, "transfer")), "transfer"))
        empty, nothing = torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64, device=self.device)
        self._send_heads(2 * count, [Found(chain, empty, nothing) for chain in keys_of(self.layout)], fits, under_way)
        wait_sent()
        return fits

    def _send_heads(self, number: int, found: Sequence[Found], fits: bool, under_way: UnderWay) -> None:
        """Start sending a head for each of `found`: the length of its body, or `WHOLE`."""
        heads = []
        for chain, body, checksum in found:
            nbytes = body.numel() if fits and body is not None else WHOLE
            heads.append((head(nbytes, checksum, self.pushes, self.device), chain))
        self._start(len(self.layout) + number + 1, heads, under_way)
