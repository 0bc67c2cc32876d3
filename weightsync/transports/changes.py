"""Changed words in place of runs, for `encoding=` between GPUs: a rank's bases, and the choice for each push.

A push with changes goes in parts of some chunks. While a part travels, the rank compares the next one with its bases.
Each part is a head and a body along each chain. Only the rank knows a body's length, so the head tells it:

    head    bytes of the body, checksum, number of pushes before this one: 3 integers of 8 bytes

A rank whose changes find no room sends heads of `WHOLE`, without bodies. A last head tells each worker whether the
changes of all ranks have found room. Otherwise everything follows. So a worker writes nothing before it has all of
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from weightsync.errors import ProtocolError
from weightsync.kernels.changed_words import NONE, ChangeFinder, Piece, can_compare, table_bytes, words_of
from weightsync.planning.layout import ShardLocation, itemsize
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.transports.base import align
from weightsync.transports.staging import Layout, Packer, SlotSection, keys_of

HEAD_BYTES = 24
WHOLE = -1
"""The length in a head without a body."""
_PARTS = 8
BODIES = 3
"""Parts in memory at once: one on its way, the others being compared."""
_ROOM = 4
"""The bytes of a part for each byte of room for its changes. Each changed word takes three."""
_FIRST_REST, _LONGEST_REST = 2, 64
"""Numbers of pushes."""


def parts_of(chunks: Sequence[int]) -> list[Sequence[int]]:
    """Return the chunks of each part, the same on ranks and workers."""
    size = max(-(-len(chunks) // _PARTS), 1)
    return [chunks[first : first + size] for first in range(0, len(chunks), size)]


def head(nbytes: int, checksum: int, pushes: int, device: torch.device) -> torch.Tensor:
    """Return a head."""
    return torch.tensor([nbytes, checksum, pushes]).to(device).view(torch.uint8)


def read_head(data: torch.Tensor, room: int, pushes: int) -> tuple[int, int]:
    """Return the length and the checksum of a body. The length may be `WHOLE`.

    room: the most bytes of the body.
    pushes: the number of pushes loaded by this worker.

    Raises `ProtocolError` for an impossible length, or for changes of other bytes than the last push's.
    """
    nbytes, checksum, base = data.view(torch.int64).tolist()
    if not WHOLE <= nbytes <= room:
        raise ProtocolError(f"a head announces {nbytes} bytes of changes, expected at most {room}")
    if base != pushes:
        raise ProtocolError(
            f"changes since push {base} came, and push {pushes} was the last here. Push again: the next push sends "
            "everything"
        )
    return nbytes, checksum


def first_whole(measures: bool) -> int:
    """Return how many pushes at the beginning send everything. The first one also warms up, so another is measured."""
    return 2 if measures else 1


class Choice:
    """Rank 0's choice for the pushes to come: their changes, or everything.

    If it `measures`, changes must pay. After a push whose changes took longer than everything, or found no room, 2
    pushes send everything, then 4, up to 64. All ranks learn of the choice while a push ends, so the pushes after the
    next one follow it.
    """

    def __init__(self, measures: bool) -> None:
        self._whole_left = first_whole(measures)
        self._measures, self._rest, self._next = measures, _FIRST_REST, 0
        self._whole_s = float("inf")
        self._started = 0.0

    def begin(self) -> None:
        """Begin a push."""
        self._started = time.perf_counter()

    def after(self) -> int:
        """Return how many pushes after this one send everything."""
        self._whole_left, self._next = max(self._whole_left - 1, self._next), 0
        return self._whole_left

    def note_loaded(self, has_tried: bool, were_sent: bool) -> None:
        """Note that all workers have loaded a push. It `has_tried` its changes, and they `were_sent` alone."""
        seconds = time.perf_counter() - self._started
        if not has_tried:
            self._whole_s = seconds
        elif were_sent and seconds <= self._whole_s:
            self._rest = _FIRST_REST
        elif self._measures and not self._whole_left:
            self._next, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)


class Found(NamedTuple):
    """The changes of a part along a chain. body: None if they find no room."""

    chain: int
    body: torch.Tensor | None
    checksum: int


class Bases:
    """One rank's bytes of the last push along each chain, and their comparison with its current bytes.

    parts: the chunks of each part.
    """

    def __init__(
        self,
        plan: TransferPlan,
        layout: Layout,
        slots: Sequence[torch.Tensor],
        packer: Packer,
        on_host: bool,
        kept: Bases | None,
    ) -> None:
        """Allocate, or take the bytes of `kept` bases with the same runs.

        on_host: keep the bytes in pinned host memory.
        """
        due = plan.due(first=False)
        self.parts = parts_of(due)
        self._packer, self._layout, self._slots, self._device = packer, layout, slots, slots[0].device
        self._runs: dict[tuple[int, int], torch.Tensor] = {
            (number, chain): (
                _empty(section.nbytes, self._device, on_host) if kept is None else kept._runs[number, chain]
            )
            for number in due
            for chain, section in layout[number].items()
        }
        self._packed: set[int] = set()  # the chunks to compare in their slots
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for number in due:
            own = {(number, chain): section for chain, section in layout[number].items()}
            views = packer.views(number)
            found = None if views is None else {key: _in_place(own[key], self._runs[key], views) for key in own}
            if found is None or None in found.values():
                self._packed.add(number)
                slot = slots[number % len(slots)]
                found = {key: _in_slot(own[key], self._runs[key], slot) for key in own}
            pieces.update((key, each) for key, each in found.items() if each is not None)
        chains = keys_of(layout)
        # Chunks in their slots are compared one by one, and others between them at once.
        self._groups = [
            [[*own] for _, own in groupby(part, key=lambda number: number if number in self._packed else -1)]
            for part in self.parts
        ]
        self._comparisons = [
            {
                chain: ChangeFinder(*([p for n in own for p in pieces.get((n, chain), ())] for own in groups))
                for chain in chains
            }
            for groups in self._groups
        ]
        nbytes = [
            {chain: sum(self._runs[n, chain].numel() for n in part if (n, chain) in pieces) for chain in chains}
            for part in self.parts
        ]
        self._rooms = [
            {chain: align(table_bytes(finder.tiles) + own[chain] // _ROOM) for chain, finder in finders.items()}
            for finders, own in zip(self._comparisons, nbytes, strict=True)
        ]
        most = max((sum(rooms.values()) for rooms in self._rooms), default=0)
        self._bodies = [torch.empty(most, dtype=torch.uint8, device=self._device) for _ in range(BODIES)]

    def keep(self, number: int, chain: int, run: torch.Tensor) -> None:
        """Keep a run of a whole push, if later pushes send it too."""
        if (base := self._runs.get((number, chain))) is not None:
            base.copy_(run[: base.numel()], non_blocking=True)

    def restore(self, number: int) -> None:
        """Copy the bytes of the last comparison into the chunk's slot."""
        for chain, section in self._layout[number].items():
            at = self._slots[number % len(self._slots)][section.first :]
            at[: section.nbytes].copy_(self._runs[number, chain], non_blocking=True)

    def find(self, part: int, sample: int | None) -> Callable[[], list[Found]]:
        """Begin to compare the chunks of a part, and make the bases equal. Return the rest, which waits for the GPU.

        The bodies of the third part before this one must have been sent. The rest returns the changes along each chain.
        """
        finders, rooms = self._comparisons[part], self._rooms[part]
        split = self._bodies[part % BODIES][: sum(rooms.values())].split([*rooms.values()])
        bodies = dict(zip(finders, split, strict=True))
        sums = torch.zeros(len(finders), 2, dtype=torch.int64, device=self._device)
        for at, group in enumerate(self._groups[part]):
            for number in group:
                if number in self._packed:
                    for section in self._layout[number].values():
                        section.clear_gaps(self._slots[number % len(self._slots)])
                    self._packer.fill(number, None)
                else:
                    self._packer.gather(number)
            for (chain, finder), own in zip(finders.items(), sums, strict=True):
                finder.find(at, bodies[chain], own, NONE if sample is None else sample)
        rest = _begin_to_read(sums)

        def finish() -> list[Found]:
            found = []
            for (chain, finder), (nbytes, checksum) in zip(finders.items(), rest(), strict=True):
                nbytes += table_bytes(finder.tiles)
                fits = nbytes <= rooms[chain]
                found.append(Found(chain, bodies[chain][:nbytes] if fits else None, checksum))
            return found

        return finish


def _empty(nbytes: int, device: torch.device, on_host: bool) -> torch.Tensor:
    if on_host and device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _in_place(
    section: SlotSection, base: torch.Tensor, views: Mapping[ShardLocation, torch.Tensor]
) -> list[Piece] | None:
    """Return the pieces of a section, compared in the rank's tensors, or None if one cannot be."""
    pieces = []
    for place in section.places:
        dtype, view, (first, end) = getattr(torch, place.dtype), views[place], _bytes(place)
        if not can_compare(view, dtype):
            return None
        pieces.append(Piece(view.reshape(-1), base[first - section.first : end - section.first].view(dtype)))
    return pieces


def _in_slot(section: SlotSection, base: torch.Tensor, slot: torch.Tensor) -> list[Piece]:
    """Return the pieces of a section, compared in its slot."""
    spans = [_bytes(place) for place in section.places]
    return [Piece(slot[first:end], base[first - section.first : end - section.first]) for first, end in spans]


def _bytes(place: ShardLocation) -> tuple[int, int]:
    """Return the first byte of a place, and the byte after its last pair of words. Gaps follow."""
    size = itemsize(place.dtype)
    return place.offset * size, place.offset * size + 2 * words_of(place.box.numel * size)


def _begin_to_read(numbers: torch.Tensor) -> Callable[[], list[list[int]]]:
    """Begin to copy a tensor to the host. Return the rest, a wait for the copy alone and not for later work."""
    if not numbers.is_cuda:
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    copied = torch.cuda.current_stream(numbers.device).record_event()

    def read() -> list[list[int]]:
        copied.synchronize()
        values: list[list[int]] = host.tolist()
        return values

    return read
