"""Where the bytes of a bucket lie while they travel between communicators' members. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.layout import Box, Manifest, Placement, choose_owners, coverage, itemsize, row_major
from weightsync.transports.base import Reads, align

SLOTS = 2

Part = tuple[int, int]
"""The first byte of a run of bytes, and the one after its last."""


def slot_layout(
    manifest: Manifest, buckets: Sequence[Sequence[str]], placements: Sequence[Placement]
) -> tuple[list[Placement], list[Placement], list[dict[int, Part]]]:
    """Which rank gives which region, where it lies in its bucket's slot in the dtype that travels, and each rank's part
    of each bucket. What rank 0 holds it gives itself."""
    number = {name: i for i, names in enumerate(buckets) for name in names}
    at_root = {(p.name, p.box) for p in placements if p.rank == 0}
    owned = choose_owners([p for p in placements if p.rank == 0 or (p.name, p.box) not in at_root])
    owned.sort(key=lambda p: (number[p.name], p.rank))
    used = [0] * len(buckets)
    parts: list[dict[int, Part]] = [{} for _ in buckets]
    in_slots = []
    for placement in owned:
        bucket, dtype = number[placement.name], manifest[placement.name].dtype
        first = used[bucket]
        used[bucket] = align(first + placement.box.numel * itemsize(dtype))
        parts[bucket][placement.rank] = (parts[bucket].get(placement.rank, (first, 0))[0], used[bucket])
        stride = row_major(placement.box.size)
        in_slots.append(
            Placement(placement.name, placement.box, 0, bucket % SLOTS, first // itemsize(dtype), stride, dtype)
        )
    return owned, in_slots, parts


@dataclass(frozen=True)
class Cut:
    """A region on its way to one worker: `own` where its rank holds it, `sent` and `received` where it lies in the
    slots of that rank and of the worker."""

    bucket: int
    own: Placement
    sent: Placement
    received: Placement


@dataclass(frozen=True)
class Exchange:
    """Each rank sends every worker what that reads of what the rank holds, and nothing else.

    `sent[bucket]` and `received[bucket]` tell of each (rank, worker) between whom anything travels, which run of bytes
    of the rank's slot and of the worker's it is.
    """

    cuts: list[Cut]
    sent: list[dict[tuple[int, int], Part]]
    received: list[dict[tuple[int, int], Part]]

    def slot_bytes(self, worker: int) -> int:
        """The largest bucket that this worker receives."""
        return max((last for parts in self.received for (_, w), (_, last) in parts.items() if w == worker), default=0)

    def loads(self) -> list[Counter[Hashable]]:
        """Of each bucket, what each rank sends and each worker receives."""
        found: list[Counter[Hashable]] = []
        for parts in self.sent:
            load: Counter[Hashable] = Counter()
            for (rank, worker), (first, last) in parts.items():
                load["rank", rank] += last - first
                load["worker", worker] += last - first
            found.append(load)
        return found

    def busiest_bytes(self) -> int:
        """What the busiest rank sends, or the busiest worker receives."""
        return max(sum(self.loads(), Counter()).values(), default=0)


def exchange_layout(
    manifest: Manifest, buckets: Sequence[Sequence[str]], placements: Iterable[Placement], reads: Sequence[Reads]
) -> Exchange:
    """Who sends what to whom, in the dtypes that travel. Of what several ranks hold, one of them sends."""
    number = {name: i for i, names in enumerate(buckets) for name in names}
    owned = sorted(choose_owners(placements), key=lambda p: (number[p.name], p.rank))
    received: list[dict[tuple[int, int], Part]] = [{} for _ in buckets]
    found: list[tuple[int, Placement, Box, int, int]] = []  # with the worker, and the first byte in its slot
    places: dict[str, list[int]] = defaultdict(list)  # in `owned`
    for place, own in enumerate(owned):
        places[own.name].append(place)
    for worker, wanted in enumerate(reads):
        used = [0] * len(buckets)
        apart = {name: _apart(manifest[name].shape, boxes) for name, boxes in wanted.items()}
        for own in [owned[place] for place in sorted(place for name in wanted for place in places[name])]:
            bucket, size = number[own.name], itemsize(manifest[own.name].dtype)
            for box in _common(own.box, apart[own.name]):
                first = used[bucket]
                used[bucket] = align(first + box.numel * size)
                begin, _ = received[bucket].setdefault((own.rank, worker), (first, first))
                received[bucket][own.rank, worker] = (begin, used[bucket])
                found.append((bucket, own, box, worker, first))
    sent: list[dict[tuple[int, int], Part]] = [{} for _ in buckets]
    for arriving, leaving in zip(received, sent, strict=True):
        filled: dict[int, int] = defaultdict(int)
        for (rank, worker), (first, last) in sorted(arriving.items()):
            leaving[rank, worker] = (filled[rank], filled[rank] + last - first)
            filled[rank] += last - first
    cuts = []
    for bucket, own, box, worker, first in found:
        dtype, key = manifest[own.name].dtype, (own.rank, worker)
        storage = worker * SLOTS + bucket % SLOTS  # no other worker has one of this number
        offset = first // itemsize(dtype)
        there = Placement(own.name, box, own.rank, storage, offset, row_major(box.size), dtype)
        shift = (sent[bucket][key][0] - received[bucket][key][0]) // itemsize(dtype)
        here = Placement(own.name, box, own.rank, storage, offset + shift, row_major(box.size), dtype)
        cuts.append(Cut(bucket, own, here, there))
    return Exchange(cuts, sent, received)


def merge(
    buckets: Sequence[tuple[str, ...]],
    loads: Sequence[Mapping[Any, int]],
    frozen: frozenset[str],
    max_bytes: int,
) -> tuple[tuple[str, ...], ...]:
    """Neighbouring buckets made one as long as no member has more than `max_bytes` of it to hold; `loads` are the bytes
    of each bucket by member. What is frozen is kept apart."""
    merged: list[list[str]] = []
    held: Counter[Hashable] = Counter()
    for names, load in zip(buckets, loads, strict=True):
        together = held + Counter(load)
        alike = bool(merged) and frozen.issuperset(names) == frozen.issuperset(merged[-1])
        if alike and max(together.values(), default=0) <= max_bytes:
            merged[-1] += names
            held = together
        else:
            merged.append(list(names))
            held = Counter(load)
    return tuple(tuple(names) for names in merged)


def _apart(shape: Sequence[int], boxes: Sequence[Box]) -> Sequence[Box]:
    """The boxes, each once; the whole tensor where some overlap."""
    once = tuple(dict.fromkeys(boxes))
    return (Box.full(shape),) if coverage(shape, once)[1] else once


def _common(box: Box, others: Iterable[Box]) -> Iterator[Box]:
    return (part for other in others if (part := box.intersect(other)) is not None)
