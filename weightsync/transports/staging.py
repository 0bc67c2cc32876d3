"""The layout of chunks in slots, the filling of slots by a rank, and the wait of one end for the other.

A slot has room for one chunk, or for one participant's part of it. The layouts are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weightsync.errors import PlacementError, WeightSyncError
from weightsync.kernels.copies import BatchedCopy, Copy
from weightsync.kernels.digest import Digests
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Box, Manifest, ShardLocation, coverage, itemsize, part_of, row_major
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.planning.wire_types import ByteRange, ChunkLayout, ReadRegions, Storage
from weightsync.transports.base import DIGEST_BYTES, Endpoint, LocalTensor, LocalTensors, Seal, Wait, align, strided

Opened = TypeVar("Opened")


@dataclass(frozen=True)
class SlotSection:
    """Pieces of one rank, side by side in a slot, in their dtypes on the wire. Their digest follows them.

    first: the first byte in the slot.
    nbytes: the size without the digest.
    sources: the rank's own location of each piece.
    places: the location of each piece in the slot.
    """

    first: int
    nbytes: int
    sources: tuple[ShardLocation, ...]
    places: tuple[ShardLocation, ...]

    @property
    def end(self) -> int:
        """The byte after the digest."""
        return self.first + self.nbytes + DIGEST_BYTES

    @property
    def storage(self) -> int:
        """The number of the slot."""
        return self.places[0].storage

    def clear_gaps(self, slot: torch.Tensor) -> None:
        """Zero the gaps between the pieces. The receiver's gaps are zero too, so the digests agree."""
        for place in self.places:
            last = (place.offset + place.box.numel) * itemsize(place.dtype)
            slot[last : align(last)].zero_()


Layout = list[dict[int, SlotSection]]
"""The slot sections of each chunk in one participant's slots: by chain in a sender's, by rank in a receiver's."""


def lay_out(manifest: Manifest, groups: Mapping[int, Sequence[ShardLocation]], storage: int) -> dict[int, SlotSection]:
    """Lay groups of pieces one after another into a slot, in the order of their keys. Empty groups get no section.

    All pieces of a group belong to one rank.
    """
    sections: dict[int, SlotSection] = {}
    first = 0
    for key, pieces in sorted(groups.items()):
        if not pieces:
            continue
        at, places = first, []
        for piece in pieces:
            dtype, box = manifest[piece.name].dtype, piece.box
            size = itemsize(dtype)
            places.append(ShardLocation(piece.name, box, piece.rank, storage, at // size, row_major(box.size), dtype))
            at = align(at + box.numel * size)
        sections[key] = SlotSection(first, at - first, tuple(pieces), tuple(places))
        first = align(sections[key].end)
    return sections


def by_rank(pieces: Iterable[ShardLocation]) -> dict[int, list[ShardLocation]]:
    """Return the pieces of each rank."""
    return grouped(pieces, lambda piece: piece.rank)


def send_layout(plan: TransferPlan, rank: int, slots: int) -> Layout:
    """Return a rank's sections for each chunk, by chain."""
    reads = [_disjoint(plan.manifest, chain.reads) for chain in plan.chains]
    layout = []
    for number, chunk in enumerate(plan.chunks):
        own = [piece for piece in chunk.pieces if piece.rank == rank]
        groups = {chain: _parts_read(own, wanted) for chain, wanted in enumerate(reads)}
        layout.append(lay_out(plan.manifest, groups, number % slots))
    return layout


def receive_layout(plan: TransferPlan, chain: int, slots: int) -> Layout:
    """Return the sections that a chain's workers receive for each chunk, by rank."""
    reads = _disjoint(plan.manifest, plan.chains[chain].reads)
    parts = (_parts_read(chunk.pieces, reads) for chunk in plan.chunks)
    return [lay_out(plan.manifest, by_rank(each), number % slots) if each else {} for number, each in enumerate(parts)]


def _disjoint(manifest: Manifest, reads: ReadRegions) -> dict[str, Sequence[Box]]:
    """Return each tensor's regions without overlaps. Overlapping regions become the whole tensor."""
    found: dict[str, Sequence[Box]] = {**reads}
    for name, boxes in reads.items():
        if len(boxes) > 1:
            shape, once = manifest[name].shape, tuple(dict.fromkeys(boxes))
            found[name] = (Box.full(shape),) if coverage(shape, once)[1] else once
    return found


def _parts_read(pieces: Iterable[ShardLocation], reads: Mapping[str, Sequence[Box]]) -> list[ShardLocation]:
    wanted = [piece for piece in pieces if piece.name in reads]
    parts = (part_of(piece, box) for piece in wanted for box in reads[piece.name])
    return [part for part in parts if part is not None]


def keys_of(layout: Layout) -> list[int]:
    """Return the keys with a section in the layout: ranks of a worker's, chains of a rank's."""
    return sorted({key for those in layout for key in those})


def slot_bytes(layout: Layout) -> int:
    """Return a slot size that fits each of these chunks."""
    return align(max((section.end for sections in layout for section in sections.values()), default=0))


def endpoint(layout: Layout, storages: list[Storage], **fields: Any) -> Endpoint:
    """Return the endpoint of a worker whose slots have this layout.

    It adds to `fields` the "slot_bytes", and the "runs" of each chunk as [rank, first byte in the slot, end]. Given
    "runs" are kept.
    """
    runs = [[[rank, each.first, each.end] for rank, each in sections.items()] for sections in layout]
    return Endpoint(storages, tuple(map(arrival, layout)), {"slot_bytes": slot_bytes(layout), "runs": runs, **fields})


def arrival(sections: Mapping[int, SlotSection]) -> ChunkLayout:
    """Return the layout of a chunk in a worker's slot with these sections."""
    places = tuple(place for section in sections.values() for place in section.places)
    runs = tuple(ByteRange(each.places[0].rank, each.storage, each.first, each.nbytes) for each in sections.values())
    return ChunkLayout(places, runs)


class Packer:
    """A writer of one rank's part of each chunk into slots, in the order of the plan.

    A computed tensor is computed once in each push, and kept until its last chunk.
    """

    def __init__(
        self,
        plan: TransferPlan,
        tensors: LocalTensors,
        layout: Layout,
        slots: Mapping[int, torch.Tensor],
        copy_programs: int | None = None,
    ) -> None:
        """Prepare the copies.

        layout: this rank's sections.
        slots: the memory of each slot, by storage number.
        copy_programs: most GPU programs of a copy.
        """
        self._gather = tensors.gather
        held = grouped(tensors.at, lambda location: location.name)
        self._values: dict[ShardLocation, torch.Tensor] = {}
        self._last: dict[ShardLocation, int] = {}
        self._steps: list[_PackStep] = []
        gathered: dict[str, _PackStep] = {}  # the step that gathers each name
        for number, (chunk, own) in enumerate(zip(plan.chunks, layout, strict=True)):
            names = [] if chunk.in_place else [name for name in chunk.names if name not in gathered]
            slot = slots[next(iter(own.values())).storage] if own else None
            step = _PackStep(names, own.values(), slot, tensors.at, held)
            self._steps.append(step)
            gathered.update(dict.fromkeys(names, step))
            for location, (tensor, _) in step.computed.items():
                self._last[location] = number
                # Compute it in the step that gathers its name: the next gather may free its inputs.
                gathered[location.name].computed.setdefault(location, (tensor, []))
        self._copies = BatchedCopy(*(step.copies for step in self._steps), programs=copy_programs)
        self._digests = Digests(*(step.runs for step in self._steps))
        ends = torch.tensor([end for step in self._steps for end in step.ends], dtype=torch.int64)
        ends = ends.to(next(iter(slots.values())).device if slots else "cpu")
        counts = [len(step.ends) for step in self._steps]
        self._ends, self._written = ends.split(counts), torch.empty_like(ends).split(counts)

    @property
    def is_loaded(self) -> bool:
        """Whether filling slots loads no further kernel into the GPU, apart from those of the first chunks."""
        return self._copies.is_loaded and not any(step.computed for step in self._steps)

    def gather(self, number: int) -> None:
        """Gather what `fill` needs for this chunk. Every rank calls one of the two for each staged chunk."""
        if names := self._steps[number].names:
            self._gather(names)

    def views(self, number: int) -> dict[ShardLocation, torch.Tensor] | None:
        """Return the tensor at each place in the chunk's slot, or None if `fill` computes any tensor."""
        step = self._steps[number]
        return None if step.computed else dict(step.ready)

    def fill(self, number: int, seal: Seal | None) -> None:
        """Copy the rank's current values into the chunk's slot, and write the digests of `seal` after them.

        Every rank calls it for every staged chunk, even without a part in it. On a GPU the copies are queued on the
        current stream.
        """
        step = self._steps[number]
        self.gather(number)
        self._copies.run(number)
        for own, (tensor, parts) in step.computed.items():
            if own not in self._values:
                assert tensor.compute is not None
                self._values[own] = tensor.compute()
            for place, box in parts:
                place.copy_(_part(self._values[own], own.box, box))
            if self._last[own] == number:
                del self._values[own]
        self.seal(number, seal)

    def seal(self, number: int, seal: Seal | None) -> None:
        """Write the digests of `seal` after the bytes in the chunk's slot. None: write none."""
        step = self._steps[number]
        if seal is not None and step.slot is not None:
            self._digests.write(seal.sample, self._written[number], number, seal.seed(number))
            step.slot.view(torch.int64).index_copy_(0, self._ends[number], self._written[number])


class _PackStep:
    """The packing of one rank's part of one chunk.

    names: the tensors to gather for this chunk.
    computed: the slot places of each computed tensor, by location.
    ready: the other tensors, with their places, and their `copies`.
    runs: the bytes of each section, and `ends` the place of each section's digest, in units of digests.
    """

    def __init__(
        self,
        names: Sequence[str],
        sections: Collection[SlotSection],
        slot: torch.Tensor | None,
        at: Mapping[ShardLocation, LocalTensor],
        held: Mapping[str, Sequence[ShardLocation]],
    ) -> None:
        self.names, self.slot = names, slot
        self.computed: dict[ShardLocation, tuple[LocalTensor, list[tuple[torch.Tensor, Box]]]] = {}
        self.ready: list[tuple[ShardLocation, torch.Tensor]] = []
        for source, place in (pair for each in sections for pair in zip(each.sources, each.places, strict=True)):
            assert slot is not None
            own = source if source in at else _holder(source, held.get(source.name, ()))
            tensor = at[own]
            if tensor.compute is None:
                self.ready.append((place, tensor.tensor if own is source else _part(tensor.tensor, own.box, place.box)))
            else:
                target = strided(slot, place.dtype, place.offset, place.box.size, place.stride)
                self.computed.setdefault(own, (tensor, []))[1].append((target, place.box))
        self.copies = [] if slot is None else _stacked(slot, self.ready)
        self.runs = [] if slot is None else [slot[each.first : each.first + each.nbytes] for each in sections]
        self.ends = [(each.end - DIGEST_BYTES) // DIGEST_BYTES for each in sections]


def _stacked(slot: torch.Tensor, ready: Iterable[tuple[ShardLocation, torch.Tensor]]) -> list[Copy]:
    """Return the copies of tensors to their places in a slot. Equal copies at equal steps become one copy.

    The parts of one fused expert parameter are such copies. There are hundreds for each layer.
    """
    stacks: list[tuple[ShardLocation, torch.Tensor, list[int]]] = []  # the first of each stack; length and two steps
    before: tuple[Any, ...] = ()
    to = of = 0
    for place, tensor in ready:
        memory = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), place.dtype
        steps = [place.offset - to, int(tensor.storage_offset()) - of]
        to, of = to + steps[0], of + steps[1]
        if memory == before and steps[1] > 0 and stacks[-1][2][1:] in ([0, 0], steps):
            stacks[-1][2][:] = stacks[-1][2][0] + 1, *steps
        else:
            stacks.append((place, tensor, [1, 0, 0]))
        before = memory
    return [
        (
            strided(slot, place.dtype, place.offset, (count, *tensor.shape), (to, *place.stride)),
            tensor.as_strided((count, *tensor.shape), (of, *tensor.stride())),
            0,
        )
        for place, tensor, (count, to, of) in stacks
    ]


def _holder(piece: ShardLocation, held: Sequence[ShardLocation]) -> ShardLocation:
    for location in held:
        if location.box.intersect(piece.box) == piece.box:
            return location
    raise PlacementError(f"trainer rank {piece.rank} lacks {piece.name}{piece.box}, and the plan reads it there")


def _part(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    at = zip(part.start, box.start, part.size, strict=True)
    return tensor[tuple(slice(inner - outer, inner - outer + size) for inner, outer, size in at)]


def still_open(part: Opened | None) -> Opened:
    """Return a part of a transport. None, after `abort`: raise `WeightSyncError`."""
    if part is None:
        raise WeightSyncError("the transport was closed while it was in use")
    return part


def wait_until(
    late: Callable[[], list[str]],
    what: str,
    wait: Wait,
    deadline: Deadline,
    longest_poll_s: float = timeouts.STAGING_LONGEST_POLL_S,
) -> None:
    """Poll until no peer is late. Raises `SyncTimeoutError` with the late peers' names, and the errors of `wait`."""
    pause_s = timeouts.STAGING_POLL_S
    while waiting_for := late():
        if deadline.passed():
            raise deadline.expired(f"{', '.join(waiting_for)} did not {what}", "transfer", waiting_for)
        wait(pause_s)
        pause_s = min(2 * pause_s, longest_poll_s)
