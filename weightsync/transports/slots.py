"""Where the bytes of a bucket lie while they travel between communicators' members. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from weightsync.layout import Box, Manifest, Placement, choose_owners, coverage, itemsize, row_major
from weightsync.transports.base import SLOTS, Reads, align

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
class _Cut:
    """A region of a bucket on its way to workers: `own` where its rank holds it, `first` the byte of their slots at
    which it begins, in the dtype that travels."""

    bucket: int
    own: Placement
    box: Box
    first: int
    dtype: str

    @property
    def last(self) -> int:
        """The byte after the last."""
        return self.first + self.box.numel * itemsize(self.dtype)

    def placed(self, storage: int, shift: int) -> Placement:
        offset = (self.first + shift) // itemsize(self.dtype)
        return Placement(self.own.name, self.box, self.own.rank, storage, offset, row_major(self.box.size), self.dtype)


@dataclass(frozen=True)
class Exchange:
    """Each rank sends every worker what that reads of what the rank holds, and nothing else.

    `sent[bucket]` and `received[bucket]` tell of each (rank, worker) between whom anything travels, which run of bytes
    of the rank's slot and of the worker's it is. `cuts` has every worker's, by rank; workers that read the same have
    the same.
    """

    cuts: list[dict[int, list[_Cut]]]
    sent: list[dict[tuple[int, int], Part]]
    received: list[dict[tuple[int, int], Part]]

    def leaving(self, rank: int) -> list[tuple[int, Placement, Placement]]:
        """What this rank sends: the bucket, where the rank holds it, and where it lies in the rank's slot."""
        found = []
        for worker, by_rank in enumerate(self.cuts):
            for cut in by_rank.get(rank, ()):
                shift = self.sent[cut.bucket][rank, worker][0] - self.received[cut.bucket][rank, worker][0]
                found.append((cut.bucket, cut.own, cut.placed(storage_of(worker, cut.bucket), shift)))
        return found

    def arriving(self, worker: int) -> tuple[Placement, ...]:
        """What this worker receives, and where it lies in the worker's slots."""
        return tuple(
            cut.placed(storage_of(worker, cut.bucket), 0) for cuts in self.cuts[worker].values() for cut in cuts
        )

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
    places: dict[str, list[int]] = defaultdict(list)  # in `owned`
    for place, own in enumerate(owned):
        places[own.name].append(place)

    def read_by(wanted: Reads) -> dict[int, list[_Cut]]:
        found: dict[int, list[_Cut]] = defaultdict(list)
        used = [0] * len(buckets)
        apart = {name: _apart(manifest[name].shape, boxes) for name, boxes in wanted.items()}
        for own in [owned[place] for place in sorted(place for name in wanted for place in places[name])]:
            bucket, dtype = number[own.name], manifest[own.name].dtype
            for box in _common(own.box, apart[own.name]):
                cut = _Cut(bucket, own, box, used[bucket], dtype)
                found[own.rank].append(cut)
                used[bucket] = align(cut.last)
        return found

    cuts: list[dict[int, list[_Cut]]] = []
    received: list[dict[tuple[int, int], Part]] = [{} for _ in buckets]
    sent: list[dict[tuple[int, int], Part]] = [{} for _ in buckets]
    seen: dict[Hashable, dict[int, list[_Cut]]] = {}  # the replicas of an engine read the same
    for worker, wanted in enumerate(reads):
        alike = tuple(wanted.items())
        if alike not in seen:
            seen[alike] = read_by(wanted)
        cuts.append(seen[alike])
        for rank, those in cuts[-1].items():
            for bucket, run in groupby(those, lambda cut: cut.bucket):
                side_by_side = list(run)
                received[bucket][rank, worker] = (side_by_side[0].first, align(side_by_side[-1].last))
    for arriving, leaving in zip(received, sent, strict=True):
        filled: dict[int, int] = defaultdict(int)
        for (rank, worker), (first, last) in sorted(arriving.items()):
            leaving[rank, worker] = (filled[rank], filled[rank] + last - first)
            filled[rank] += last - first
    return Exchange(cuts, sent, received)


def storage_of(worker: int, bucket: int) -> int:
    """A number that no other worker's slot has."""
    return worker * SLOTS + bucket % SLOTS


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
