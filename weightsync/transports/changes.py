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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch

from weightsync.errors import ProtocolError
from weightsync.kernels.changed_words import NONE, ChangeFinder, Piece, can_compare, table_bytes, words_of
from weightsync.planning.layout import ShardLocation, itemsize
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.transports.base import Seal, align
from weightsync.transports.staging import Layout, Packer, keys_of

HEAD_BYTES = 24
WHOLE = -1
"""The length in a head without a body."""
_PARTS = 8
_QUEUED = 3
"""Parts being compared at once. A GPU compares them while the workers are told to begin. More would delay that."""
_HELD = _QUEUED + 1
"""Parts with changes in memory at once. One is being sent."""
_ROOM = 4
"""The bytes of a part for each byte of room for its changes. Each changed word takes three."""
_FIRST_REST, _LONGEST_REST = 2, 64
"""Numbers of whole pushes after changes without a gain: at first, and at most. The number doubles each time."""


def parts_of(chunks: Sequence[int]) -> list[Sequence[int]]:
    """Return the chunks of each part, the same on ranks and workers."""
    size = max(-(-len(chunks) // _PARTS), 1)
    return [chunks[first : first + size] for first in range(0, len(chunks), size)]


def head(nbytes: int, checksum: torch.Tensor, pushes: int, device: torch.device) -> torch.Tensor:
    """Return a head. On a GPU it is queued on the current stream.

    checksum: int64, on this device.
    """
    numbers = torch.tensor([nbytes, 0, pushes]).to(device, non_blocking=True)
    numbers[1:2] = checksum
    return numbers.view(torch.uint8)


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
    """The changes of a part along a chain. body: None if they find no room. checksum: int64."""

    chain: int
    body: torch.Tensor | None
    checksum: torch.Tensor


class PartComparison(NamedTuple):
    """The comparison of a part.

    groups: its chunks. Those of a group are compared at once.
    finders: the comparison along each chain.
    rooms: the most bytes of the changes along each chain.
    """

    groups: list[list[int]]
    finders: dict[int, ChangeFinder]
    rooms: dict[int, int]

    @property
    def chunks(self) -> list[int]:
        return [chunk for group in self.groups for chunk in group]


class Bases:
    """One rank's bytes of the last push along each chain, and their comparison with its current bytes."""

    def __init__(
        self,
        plan: TransferPlan,
        layout: Layout,
        slots: Sequence[torch.Tensor],
        packer: Packer,
        on_host: bool,
        aside: AbstractContextManager[Any],
        kept: Bases | None,
    ) -> None:
        """Allocate, or take the bytes of `kept` bases with the same runs.

        on_host: keep the bytes in pinned host memory.
        aside: a second stream, for work that does not wait for later comparisons.
        """
        due = plan.due(first=False)
        self._aside = aside
        self._packer, self._layout, self._slots, self._device = packer, layout, slots, slots[0].device
        self._runs: dict[tuple[int, int], torch.Tensor] = {
            (number, chain): (
                _empty(section.nbytes, self._device, on_host) if kept is None else kept._runs[number, chain]
            )
            for number in due
            for chain, section in layout[number].items()
        }
        self._packed: set[int] = set()  # the chunks to compare in their slots
        self.parts = [self._comparison(chunks) for chunks in parts_of(due)]
        most = max((sum(part.rooms.values()) for part in self.parts), default=0)
        self._rooms = torch.empty(_HELD * most, dtype=torch.uint8, device=self._device).chunk(_HELD)
        self._counting: dict[int, dict[int, Callable[[], int]]] = {}  # by part and chain: waits for the number of words

    def _comparison(self, chunks: Sequence[int]) -> PartComparison:
        """Return the comparison of these chunks."""
        pieces = {number: self._pieces(number) for number in chunks}
        # Chunks in their slots are compared one by one, and others between them at once.
        together = groupby(chunks, key=lambda number: number if number in self._packed else -1)
        part = PartComparison([[*own] for _, own in together], {}, {})
        for chain in keys_of(self._layout):
            finder = ChangeFinder(*([each for n in own for each in pieces[n].get(chain, ())] for own in part.groups))
            nbytes = sum(self._runs[n, chain].numel() for n in chunks if chain in pieces[n])
            part.finders[chain], part.rooms[chain] = finder, align(table_bytes(finder.tiles) + nbytes // _ROOM)
        return part

    def _pieces(self, number: int) -> dict[int, list[Piece]]:
        """Return the pieces of a chunk along each chain: in the rank's tensors, or all in its slot."""
        sections, views = self._layout[number], self._packer.views(number)
        places = [place for section in sections.values() for place in section.places]
        if views is None or not all(can_compare(views[place], getattr(torch, place.dtype)) for place in places):
            self._packed.add(number)
            views = None
        found: dict[int, list[Piece]] = {}
        for chain, section in sections.items():
            found[chain] = []
            for place in section.places:
                first, end = _bytes(place)
                base = self._runs[number, chain][first - section.first : end - section.first]
                if views is None:
                    found[chain].append(Piece(self._slot(number)[first:end], base))
                else:
                    found[chain].append(Piece(views[place].reshape(-1), base.view(getattr(torch, place.dtype))))
        return found

    def _slot(self, number: int) -> torch.Tensor:
        """Return the slot of a chunk."""
        return self._slots[number % len(self._slots)]

    def keep(self, number: int, chain: int, run: torch.Tensor) -> None:
        """Keep a run of a whole push, if later pushes send it too."""
        if (base := self._runs.get((number, chain))) is not None:
            base.copy_(run[: base.numel()], non_blocking=True)

    def restore(self, number: int) -> None:
        """Copy the bytes of the last comparison into the chunk's slot."""
        for chain, section in self._layout[number].items():
            own = self._slot(number)[section.first : section.first + section.nbytes]
            own.copy_(self._runs[number, chain], non_blocking=True)

    def forget(self) -> None:
        """Forget the comparisons whose changes have not been found."""
        self._counting.clear()

    def compare(self, first: int, seal: Seal | None) -> None:
        """Begin to compare part number `first` and some after it. Those with chunks in slots are left to `find`.

        Call it once the changes of part `first - 2` and of all before have been sent: their rooms are used again.
        """
        for number, part in enumerate(self.parts[first : first + _QUEUED], first):
            if number not in self._counting and self._packed.isdisjoint(part.chunks):
                self._compare(number, seal)

    def find(self, number: int, seal: Seal | None) -> list[Found]:
        """Find the changes of a part along each chain, and make the bases equal. Waits for the comparison.

        Call it once the changes of part `number - 2` and of all before have been sent: their rooms are used again.
        """
        part = self.parts[number]
        if self._packed.isdisjoint(part.chunks):
            for chunk in part.chunks:
                self._packer.gather(chunk)
            self.compare(number, seal)
        else:
            self._compare(number, seal)
        bodies, found = self._bodies(number), []
        for chain, count in self._counting.pop(number).items():
            finder, size = part.finders[chain], table_bytes(part.finders[chain].tiles) + 3 * count()
            with self._aside:
                body = bodies[chain][:size] if size <= part.rooms[chain] else None
                found.append(Found(chain, body, finder.checksum()))
        return found

    def _compare(self, number: int, seal: Seal | None) -> None:
        """Begin to compare a part. A slot's bytes are compared before the next chunk comes there."""
        part, bodies = self.parts[number], self._bodies(number)
        for at, group in enumerate(part.groups):
            if not self._packed.isdisjoint(part.chunks):
                for chunk in group:
                    self._pack(chunk)
            for chain, finder in part.finders.items():
                finder.find(at, bodies[chain], NONE if seal is None else seal.sample)
        self._counting[number] = {chain: _begin_to_read(finder.words) for chain, finder in part.finders.items()}

    def _pack(self, number: int) -> None:
        """Write a chunk into its slot, if it is compared there."""
        if number not in self._packed:
            self._packer.gather(number)
            return
        for section in self._layout[number].values():
            section.clear_gaps(self._slot(number))
        self._packer.fill(number, None)

    def _bodies(self, number: int) -> dict[int, torch.Tensor]:
        """Return the rooms for the changes of a part along each chain."""
        rooms = self.parts[number].rooms
        memory = self._rooms[number % _HELD][: sum(rooms.values())]
        return dict(zip(rooms, memory.split([*rooms.values()]), strict=True))


def _empty(nbytes: int, device: torch.device, on_host: bool) -> torch.Tensor:
    if on_host and device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _bytes(place: ShardLocation) -> tuple[int, int]:
    """Return the first byte of a place, and the byte after its last pair of words. Gaps follow."""
    size = itemsize(place.dtype)
    return place.offset * size, place.offset * size + 2 * words_of(place.box.numel * size)


def _begin_to_read(number: torch.Tensor) -> Callable[[], int]:
    """Begin to copy a number to the host. Return the rest, a wait for the copy alone and not for later work."""
    if not number.is_cuda:
        return partial(int, number)
    host = torch.empty(1, dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    copied = torch.cuda.current_stream(number.device).record_event()

    def read() -> int:
        copied.synchronize()
        return int(host)

    return read
