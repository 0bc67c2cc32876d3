"""A compiled push: the tensors, their chunks, and the sender and receivers of each chunk.

Every trainer rank holds the same `TransferPlan`, and derives its own part of each push from it. This module is pure: it
knows nothing about tensors, sockets or processes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from weightsync.errors import ConfigError
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Box, Manifest, ShardLocation, choose_owners, itemsize, part_of
from weightsync.planning.load_plan import LoadPlan, NameReader, PackedRegions, pack_regions
from weightsync.planning.wire_types import ReadRegions

T = TypeVar("T")

_LAST_NUMBER = re.compile(r".*\.\d+(?=\.)")

_ABOUT = 1.25
"""The most that a participant may hold, as a multiple of the model. Above it, all workers become one chain. Workers
that read different parts also read common ones, such as norms, and some heads of keys and values.
"""

CHUNKS_PER_HOP = 32
"""The number of chunks for each hop of a chain, unless chunks would be smaller than `min_chunk_bytes`.

The last of `hops + 1` workers receives its first chunk `hops` chunk times late. A push of `32 * hops` chunks loses one
32nd of its time to this.
"""

_MOST_CHUNKS = 1 << 20
"""The most chunks of a plan. The list of more would take longer than any push."""

_FINENESS = 8
"""The least number of parts in a chunk. Larger parts would leave much of each chunk empty."""


class Chain(Struct, frozen=True, array_like=True):
    """Workers with the same bytes to receive. Every rank sends to the first worker, and each worker passes all on.

    Attributes:
        workers: Their numbers, in the order of the bytes' path. Workers of one host follow each other.
        reads: The union of their regions.
    """

    workers: tuple[int, ...]
    reads: ReadRegions


class Chunk(Struct, frozen=True, array_like=True, dict=True):
    """Regions that travel as one.

    pieces: the source of the bytes, in the trainer's dtypes.
    in_place: workers read the trainer's memory and choose among replicas. The chunk's size is not bounded.
    frozen: it travels in the first push alone.
    """

    pieces: tuple[ShardLocation, ...]
    in_place: bool = False
    frozen: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors with a region in the chunk, each once."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))


class TransferPlan(Struct, frozen=True, array_like=True):
    """The tensors of a push, their chunks, and the workers. Equal on every rank: rank 0 makes it and broadcasts it.

    Attributes:
        manifest: All tensors, in the dtypes that travel.
        chains: The paths of the bytes, together to every worker. Without any, workers map the ranks' memory.
        chunks: In their order of travel. Frozen chunks come last. Together they hold every region of every non-empty
            tensor once, apart from replicas in chunks that are read in place.
        workers: The number of workers.
        load_paths: The number of the engines' modules for each load path.
        duplicates: Pairs of tensors that share a place in some engine's memory. They must be equal in each push. The
            first of each pair travels only for other engines.
        hops: The chunks are cut for a chain of so many hops.
    """

    manifest: Manifest
    chains: tuple[Chain, ...]
    chunks: tuple[Chunk, ...]
    workers: int
    load_paths: dict[str, int]
    duplicates: tuple[tuple[str, str], ...] = ()
    hops: int = 0

    def is_laid_out_as(self, other: TransferPlan) -> bool:
        """Return whether alike workers find the same bytes at the same places in both plans' chunks."""
        mine, theirs = ([plan.manifest, plan.chunks, [c.reads for c in plan.chains]] for plan in (self, other))
        return mine == theirs

    @property
    def frozen_chunks(self) -> int:
        """Number of chunks at the end that travel in the first push alone."""
        return sum(chunk.frozen for chunk in self.chunks)

    def due(self, first: bool) -> range:
        """Return the numbers of the next push's chunks. `first` means the first push over this plan."""
        return range(len(self.chunks) - (0 if first else self.frozen_chunks))

    def nbytes(self, first: bool) -> int:
        """Return the bytes of the tensors that travel in the next push, each counted once."""
        if first or not self.frozen_chunks:
            return self.manifest.nbytes
        names = {name for number in self.due(first) for name in self.chunks[number].names}
        return sum(self.manifest[name].nbytes for name in names)


class PackedPlan(Struct, frozen=True, array_like=True):
    """A transfer plan for the other ranks, with positions in place of the names that each chain reads.

    plan: the plan without its chains.
    chains: the workers and the regions of each chain.
    """

    plan: TransferPlan
    chains: tuple[tuple[tuple[int, ...], PackedRegions], ...]

    @classmethod
    def of(cls, plan: TransferPlan) -> PackedPlan:
        at = {name: position for position, name in enumerate(plan.manifest.names)}
        chains = tuple((chain.workers, pack_regions(chain.reads, at)) for chain in plan.chains)
        return cls(replace(plan, chains=()), chains)

    def read(self) -> TransferPlan:
        names = self.plan.manifest.names
        chains = (Chain(workers, NameReader(names).read_regions(regions)) for workers, regions in self.chains)
        return replace(self.plan, chains=tuple(chains))


def choose_chains(
    manifest: Manifest, locations: Sequence[ShardLocation], reads: Sequence[ReadRegions], hosts: Sequence[int]
) -> tuple[Chain, ...]:
    """Return one chain for all workers that read alike.

    If a participant would then hold much more than the model, return one chain for all workers. `hosts` has the number
    of each worker's host. Bytes reach hosts in the order of these numbers, each host once.
    """
    order = sorted(range(len(reads)), key=lambda worker: (hosts[worker], worker))
    groups: list[list[int]] = []
    for worker in order:
        own = reads[worker]
        alike = next((group for group in groups if reads[group[0]] is own or reads[group[0]] == own), None)
        if alike is None:
            groups.append([worker])
        else:
            alike.append(worker)
    chains = tuple(chain_of(workers, reads) for workers in groups)
    if len(chains) <= 1:
        return chains
    by_name = grouped(choose_owners(locations), lambda piece: piece.name)
    load = _total(map(load_chains(manifest, chains), by_name.values()))
    most_bytes = _ABOUT * manifest.nbytes
    return chains if _peak(load) <= most_bytes else (chain_of(order, reads),)


def chain_of(workers: Sequence[int], reads: Sequence[ReadRegions]) -> Chain:
    """Return a chain of these workers. Worker number `n` reads `reads[n]`."""
    boxes: dict[str, tuple[Box, ...]] = {}
    for regions in {id(reads[worker]): reads[worker] for worker in workers}.values():
        for name, own in regions.items():
            known = boxes.setdefault(name, own)
            if len(own) > 1 or known != own:
                boxes[name] = tuple(dict.fromkeys((*known, *own)))
    return Chain(tuple(workers), boxes)


Held = dict[Hashable, int]
"""The bytes held by each participant while something travels."""

Load = Callable[[Sequence[ShardLocation]], Held]
"""A function from pieces of one tensor to their load."""

Shards = dict[tuple[str, int], list[ShardLocation]]
"""The shards of a tensor, by name and rank. Hundreds of ranks may share a tensor, and each has few shards of it."""


def load_chains(manifest: Manifest, chains: Sequence[Chain]) -> Load:
    """Return the load of chains: the bytes from a piece's rank to the first worker of each, and to each worker."""
    readers: dict[str, list[int]] = defaultdict(list)
    for number, chain in enumerate(chains):
        for name, boxes in chain.reads.items():
            readers[name] += number, id(boxes)  # alike tensors, such as experts, share their boxes
    kinds: dict[tuple[int, ...], _Kind] = {}
    known: dict[Hashable, Held] = {}  # of tensors in one piece: experts are alike

    def load(pieces: Sequence[ShardLocation]) -> Held:
        name = pieces[0].name
        size = itemsize(manifest[name].dtype)
        readers_of_name = tuple(readers.get(name, ()))
        if len(pieces) > 1:
            return load_kind(name, readers_of_name, size, pieces)
        like = readers_of_name, size, pieces[0].rank, pieces[0].box
        if like not in known:
            known[like] = load_kind(name, readers_of_name, size, pieces)
        return known[like]

    def load_kind(name: str, readers_of_name: tuple[int, ...], size: int, pieces: Sequence[ShardLocation]) -> Held:
        found: Held = {}
        if (kind := kinds.get(readers_of_name)) is None:
            kind = kinds[readers_of_name] = _Kind([chain.reads.get(name, ()) for chain in chains])
        totals = [0] * len(kind.chains)
        for piece in pieces:
            sent = 0
            for number, elements in enumerate(kind.elements(piece.box)):
                totals[number] += elements
                sent += elements * len(kind.chains[number])
            if sent:
                found["rank", piece.rank] = found.get(("rank", piece.rank), 0) + sent * size
        for those, elements in zip(kind.chains, totals, strict=True):
            if elements:
                found |= dict.fromkeys(those, elements * size)
        return found

    return load


class _Kind:
    """Tensors of which each chain reads the same boxes.

    chains: the participants that read alike.
    """

    def __init__(self, reads: Sequence[tuple[Box, ...]]) -> None:
        alike = grouped(range(len(reads)), reads.__getitem__)
        self.chains: list[list[Hashable]] = [[("chain", number) for number in those] for those in alike.values()]
        self._boxes = list(alike)
        self._known: dict[Box, list[int]] = {}

    def elements(self, box: Box) -> list[int]:
        """Return the elements of a box read by each of `chains`."""
        if (found := self._known.get(box)) is None:
            common = ([part for each in boxes if (part := box.intersect(each)) is not None] for boxes in self._boxes)
            found = [min(sum([part.numel for part in parts]), box.numel) for parts in common]
            self._known[box] = found
        return found


def load_staged(manifest: Manifest) -> Load:
    """Return the load of staging: the bytes that a rank copies into its own memory."""

    def load(pieces: Sequence[ShardLocation]) -> Held:
        size = itemsize(manifest[pieces[0].name].dtype)
        return _total({piece.rank: piece.box.numel * size} for piece in pieces)

    return load


def _total(loads: Iterable[Held]) -> Held:
    total: Held = {}
    for load in loads:
        for participant, nbytes in load.items():
            total[participant] = total.get(participant, 0) + nbytes
    return total


def make_chunks(
    manifest: Manifest,
    chains: Sequence[Chain],
    buckets: Sequence[Sequence[str]],
    frozen: frozenset[str],
    in_place: frozenset[str],
    locations: Sequence[ShardLocation],
    max_bytes: int | None,
    together: Mapping[str, str],
    min_chunk_bytes: int = 1,
    hops: int | None = None,
) -> tuple[Chunk, ...]:
    """Cut the tensors into chunks, in the order of the buckets, but with buckets of different ranks in turn.

    Neighbouring buckets share a chunk as long as no participant holds more than `max_bytes` of it. A bucket larger than
    an eighth of a chunk is cut by rows, so that chunks are full. With `max_bytes` None every bucket is one chunk.

    Chunks that workers pass on are smaller, or the last worker would wait long for its first chunk. They are not
    smaller than `min_chunk_bytes`. `hops` are those of the longest chain, unless given.

    The names in `in_place` are one chunk. `in_place` is empty if there are chains. The names in `frozen` have the last
    chunks to themselves. `together` maps the name of a quantised weight to the name of its scales. The scales travel
    with the weight's first chunk.

    Raises `ConfigError` for a `max_bytes` that makes too many chunks.
    """
    load = load_chains(manifest, chains) if chains else load_staged(manifest)
    travelling = [location for location in locations if location.box.numel and location.name not in in_place]
    by_name = grouped(choose_owners(travelling), lambda piece: piece.name)
    tensors = {name: _Part(pieces, load(pieces)) for name, pieces in by_name.items()}
    owned = (shard for tensor in tensors.values() for shard in tensor.pieces)
    shards: Shards = grouped(owned, lambda shard: (shard.name, shard.rank))
    hops = longest_way(chains) if hops is None else hops
    whole = 0 if max_bytes is None else _peak(_total(part.held for part in tensors.values()))
    if max_bytes is not None and whole > _MOST_CHUNKS * max_bytes:
        raise ConfigError(f'max_bytes={max_bytes} for {whole} bytes: over {_MOST_CHUNKS} chunks. Give more: "256MiB"')
    if max_bytes is not None and hops:
        max_bytes = min(max_bytes, max(whole // (CHUNKS_PER_HOP * hops), min_chunk_bytes))
    chunks: list[Chunk] = []
    for is_frozen in (False, True):
        alike = [bucket for bucket in buckets if bucket and (bucket[0] in frozen) is is_frozen]
        alike = _alternating(alike, lambda bucket: _senders(bucket, tensors))
        lying = tuple(p for p in locations if p.box.numel and p.name in in_place and (p.name in frozen) is is_frozen)
        if lying:
            chunks.append(Chunk(lying, in_place=True, frozen=is_frozen))
        atoms = [atom for bucket in alike for atom in _atoms(bucket, tensors, load, max_bytes, together)]
        chunks += [Chunk(_joined(pieces, shards), frozen=is_frozen) for pieces in _fill(atoms, max_bytes)]
    return tuple(chunks)


def count_load_paths(plans: Sequence[LoadPlan] | Sequence[TransferPlan]) -> dict[str, int]:
    """Return the number of the engines' modules on each load path, of all plans together."""
    return {path: sum(plan.load_paths[path] for plan in plans) for path in plans[0].load_paths}


def longest_way(chains: Sequence[Chain]) -> int:
    """Return the hops from the first worker of a chain to its last, the most of any chain."""
    return max((len(chain.workers) for chain in chains), default=1) - 1


def slices(box: Box, count: int) -> list[Box]:
    """Cut a box by rows into about `count` boxes of equal size. With fewer rows than `count`, cut the rows too."""
    if count <= 1 or box.numel <= 1:
        return [box]
    rows = box.size[0]
    if rows >= count:
        bounds = [rows * number // count for number in range(count + 1)]
        return [
            Box((box.start[0] + low, *box.start[1:]), (high - low, *box.size[1:])) for low, high in pairwise(bounds)
        ]
    inner = slices(Box(box.start[1:], box.size[1:]), -(-count // rows))
    return [Box((box.start[0] + row, *part.start), (1, *part.size)) for row in range(rows) for part in inner]


class _Part(NamedTuple):
    """Pieces of one chunk, and their load."""

    pieces: list[ShardLocation]
    held: Held


def _atoms(
    bucket: Sequence[str], tensors: Mapping[str, _Part], load: Load, max_bytes: int | None, together: Mapping[str, str]
) -> list[_Part]:
    """Return the parts of a bucket that are not cut further: a small bucket, a small expert, or slices of tensors."""
    held = _total(tensors[name].held for name in bucket if name in tensors)
    if max_bytes is None or _peak(held) * _FINENESS <= max_bytes:
        whole = [piece for name in bucket if name in tensors for piece in tensors[name].pieces]
        return [_Part(whole, held)] if whole else []
    scales = {together[name] for name in bucket if name in together}
    atoms: list[_Part] = []
    names = [name for name in bucket if name in tensors and name not in scales]
    units: list[list[str]] = []
    for _, of_expert in groupby(names, _expert_of):
        unit = [*of_expert]
        is_small = _peak(_total(tensors[name].held for name in unit)) * _FINENESS <= max_bytes
        units += [unit] if is_small else [[name] for name in unit]
    for unit in _alternating(units, lambda unit: _senders(unit, tensors)):
        parts: list[_Part] = []
        for name in unit:
            first, *others = _cut(tensors[name], load, max_bytes)
            if (scale := tensors.get(together.get(name, ""))) is not None:
                first = _Part(first.pieces + scale.pieces, _total((first.held, scale.held)))
            parts += (first, *others)
        if len(unit) > 1:
            parts = [_Part([piece for part in parts for piece in part.pieces], _total(part.held for part in parts))]
        atoms += parts
    return atoms


def _expert_of(name: str) -> str:
    """Return a tensor's name up to its last number. An engine may give an expert's projections one scale."""
    found = _LAST_NUMBER.match(name)
    return found[0] if found else name


def _senders(names: Iterable[str], tensors: Mapping[str, _Part]) -> frozenset[int]:
    return frozenset(piece.rank for name in names if name in tensors for piece in tensors[name].pieces)


def _alternating(items: Sequence[T], senders: Callable[[T], frozenset[int]]) -> list[T]:
    """Return tensors or buckets in an order in which their ranks alternate. Those of one rank keep their order.

    A rank sends the experts that it holds whole, or the layers of its pipeline stage, alone. So a chunk has tensors of
    many ranks, or the ranks would send one after another.
    """
    ranks = [*map(senders, items)]
    if len({*ranks}) <= 1:
        return [*items]
    counts, seen = Counter(ranks), Counter[frozenset[int]]()
    places = []
    for own in ranks:
        places.append((seen[own] + 0.5) / counts[own])
        seen[own] += 1
    return [items[number] for number in sorted(range(len(items)), key=places.__getitem__)]


def _cut(tensor: _Part, load: Load, max_bytes: int) -> list[_Part]:
    """Cut a tensor into slices of at most an eighth of `max_bytes`, or into rows if these are larger.

    A row larger than `max_bytes` is cut too.
    """
    peak = _peak(tensor.held)
    rows = [piece.box.size[0] for piece in tensor.pieces if piece.box.size]
    count = max(-(-peak // max_bytes), min([-(-peak * _FINENESS // max_bytes), *rows]))
    if count <= 1:
        return [tensor]
    while True:
        cut = [_Part(pieces, load(pieces)) for pieces in _sliced(tensor.pieces, count)]
        is_finest = all(piece.box.numel <= 1 for part in cut for piece in part.pieces)
        if is_finest or max(_peak(part.held) for part in cut) <= max_bytes:
            return cut
        count += max(1, count // 8)  # rows do not divide evenly


def _sliced(pieces: Iterable[ShardLocation], count: int) -> list[list[ShardLocation]]:
    """Return slices of a tensor, each with a part of every piece, so that all ranks have a share of each slice."""
    cut: defaultdict[int, list[ShardLocation]] = defaultdict(list)
    for piece in pieces:
        for number, box in enumerate(slices(piece.box, count)):
            part = part_of(piece, box)
            assert part is not None
            cut[number].append(part)
    return list(cut.values())


def _fill(atoms: Iterable[_Part], max_bytes: int | None) -> list[list[ShardLocation]]:
    chunks: list[list[ShardLocation]] = []
    held: Held = {}
    is_full = True  # the first chunk begins with the first atom
    for pieces, more in atoms:
        if max_bytes is None or is_full or any(held.get(who, 0) + size > max_bytes for who, size in more.items()):
            chunks.append(list(pieces))
            held, is_full = dict(more), max_bytes is not None and _peak(more) > max_bytes
        else:
            chunks[-1] += pieces
            held |= {who: held.get(who, 0) + size for who, size in more.items()}
    return chunks


def _joined(pieces: Sequence[ShardLocation], shards: Shards) -> tuple[ShardLocation, ...]:
    """Join neighbouring rows of a shard that were cut and are in one chunk.

    Rows of two shards stay apart, even if they are neighbours in memory: a rank packs each piece from one shard.
    """
    if all(piece in shards[piece.name, piece.rank] for piece in pieces):
        return tuple(pieces)
    found: dict[tuple[Box, ShardLocation], ShardLocation] = {}  # by the shard and the next row
    for piece in pieces:
        own = shards[piece.name, piece.rank]
        shard = next(each.box for each in own if each.box.intersect(piece.box) == piece.box)
        joined, rows = piece, sum(piece.box.size[:1])
        if rows and (before := found.pop((shard, _row(piece, 0)), None)) is not None:
            rows += before.box.size[0]
            joined = replace(before, box=Box(before.box.start, (rows, *piece.box.size[1:])))
        found[shard, _row(joined, rows) if rows else joined] = joined
    return tuple(found.values())


def _row(piece: ShardLocation, number: int) -> ShardLocation:
    """Return row `number` of a piece. The number may be behind the last row."""
    box = Box((piece.box.start[0] + number, *piece.box.start[1:]), (1, *piece.box.size[1:]))
    return replace(piece, box=box, offset=piece.offset + number * piece.stride[0])


def _peak(held: Held) -> int:
    """Return the bytes of the participant with the most."""
    return max(held.values(), default=0)
