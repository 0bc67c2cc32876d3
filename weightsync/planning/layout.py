"""The source and the destination of bytes: regions, shard locations, load plans, and their intersection.

Pure arithmetic over shapes. This module knows nothing about tensors, devices, processes, trainers or engines.

Coordinates. Every named tensor counts as contiguous and row-major in its full, unsharded checkpoint shape. A `Box` is a
rectangular region of it. Offsets and strides of storages and parameters are in elements. A strided view is written
`(offset, size, stride)`, as for `torch.as_strided`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from weightsync.errors import ConfigError, ManifestError, PlacementError
from weightsync.planning.grouping import grouped

View = tuple[int, Sequence[int], Sequence[int]]
"""Offset, size and stride of a strided view, in elements."""

Count = Annotated[int, Meta(ge=0)]
"""A number that is refused on arrival if it is negative."""

MAX_BOXES = 4096
"""The most boxes of a view. A plan with more of them would not pay."""

_ITEMSIZE = {
    name: nbytes
    for nbytes, names in {
        1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
        2: "uint16 int16 float16 bfloat16",
        4: "uint32 int32 float32",
        8: "uint64 int64 float64",
    }.items()
    for name in names.split()
}


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of the dtype with torch's name `dtype`.

    Raises `ConfigError` for an unknown dtype.
    """
    if dtype not in _ITEMSIZE:
        raise ConfigError(f"dtype {dtype!r} is not covered; expected one of {', '.join(sorted(_ITEMSIZE))}")
    return _ITEMSIZE[dtype]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of `shape`."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


class Box(Struct, frozen=True, array_like=True, gc=False):
    """A rectangular region of a tensor: `size[d]` elements from `start[d]` on, for every dimension d.

    A 0-dimensional tensor has one box, `Box((), ())`, of one element.
    """

    start: tuple[Count, ...]
    size: tuple[Count, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None if it is empty. Boxes of different dimensions have no common region."""
        if len(self.start) != len(other.start):
            return None
        if self == other and 0 not in self.size:
            return self
        start, size = [], []
        for a, a_size, b, b_size in zip(self.start, self.size, other.start, other.size, strict=True):
            low, high = max(a, b), min(a + a_size, b + b_size)
            if low >= high:
                return None
            start.append(low)
            size.append(high - low)
        return Box(tuple(start), tuple(size))

    def __str__(self) -> str:
        """Return the box as an index, such as "[0:4, 8:16]"."""
        return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(self.start, self.size, strict=True))}]"


class TensorMeta(Struct, frozen=True, array_like=True, gc=False):
    """Name, full shape and dtype of one tensor that a push delivers. `dtype` has torch's name: "bfloat16"."""

    name: str
    shape: tuple[Count, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return self.numel * itemsize(self.dtype)


class Manifest(Struct, frozen=True, array_like=True, dict=True):
    """The tensors that a push delivers, in the trainer's export order.

    Attributes:
        tensors: The tensors. A rank may know of none.
        tied: (other name, name) of each tensor with another name in the trainer's model. The other name does not
            travel.

    Raises:
        ManifestError: A name occurs twice.
    """

    tensors: tuple[TensorMeta, ...]
    tied: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len(self._by_name) < len(self.tensors):
            doubled = [name for name, times in Counter(self.names).items() if times > 1]
            raise ManifestError(
                f"{len(doubled)} names are offered more than once, first {doubled[0]!r}: every tensor travels once, "
                "under one name",
                mismatched=dict.fromkeys(doubled, "offered twice"),
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the same order."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def _by_name(self) -> dict[str, TensorMeta]:
        return {tensor.name: tensor for tensor in self.tensors}

    def __getitem__(self, name: str) -> TensorMeta:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[TensorMeta]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class ShardLocation(Struct, frozen=True, array_like=True, gc=False):
    """The place of region `box` of tensor `name` on one trainer rank.

    Element `i` of the box (a multi-index) is at element `offset + sum(i[d] * stride[d])` of the rank's storage number
    `storage`, as `dtype`.
    """

    name: str
    box: Box
    rank: Count
    storage: int
    offset: Count
    stride: tuple[Count, ...]
    dtype: str


class LoadCopy(Struct, frozen=True, gc=False):
    """One copy of the engine's loader: region `box` of tensor `name` into its parameter `param`.

    Element `i` of the box lands at element `offset + sum(i[d] * stride[d])` of the parameter's storage.
    """

    name: str
    box: Box
    param: str
    offset: int
    stride: tuple[int, ...]


class CopyOp(Struct, frozen=True, gc=False):
    """One strided copy of `size` elements, from the storage with chunk `chunk` into the storage of `param`."""

    chunk: int
    name: str
    size: tuple[int, ...]
    rank: int
    storage: int
    src_offset: int
    src_stride: tuple[int, ...]
    src_dtype: str
    param: str
    dst_offset: int
    dst_stride: tuple[int, ...]


# Views as boxes


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements `start` to `stop` of a flattened tensor of `shape`, as boxes in that order.

    ZeRO-3 partitions and FSDP1 flat parameters cut rows in the middle. For a matrix the boxes are the end of a row, the
    whole rows, and the beginning of a row. Empty boxes are left out. Raises `ConfigError` for an interval outside of
    the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ConfigError(f"elements {start} to {stop} are not in a tensor of shape {tuple(shape)}")
    boxes = strided_boxes(shape, start, (stop - start,), (1,))
    assert boxes is not None  # an interval is at most two boxes for each dimension
    return boxes


def affine_boxes(shape: Sequence[int], src: View, dst: View) -> list[tuple[Box, int, tuple[int, ...]]] | None:
    """Return the copy `dst.copy_(src)` in boxes.

    `src` views a contiguous tensor of `shape`, `dst` some other storage. Each item is a box of the tensor with its
    offset and strides in the storage of `dst`. The tensor's dimensions have one stride each. Together the items move
    exactly the elements that the copy moves. A dimension with one element of the box has stride 0.

    Returns None if the two sizes differ, or if the source is not made of boxes. Such a source has every second row, an
    element read twice, or more than `MAX_BOXES`.
    """
    (src_offset, size, src_stride), (dst_offset, dst_size, dst_stride) = src, dst
    if tuple(size) != tuple(dst_size):
        return None
    pieces = _affine(shape, src_offset, zip(size, src_stride, dst_stride, strict=True))
    return None if pieces is None else [(box, dst_offset + offset, stride) for box, offset, stride in pieces]


def strided_boxes(shape: Sequence[int], offset: int, size: Sequence[int], stride: Sequence[int]) -> list[Box] | None:
    """Return the region of a contiguous tensor of `shape` that a strided view covers, as disjoint boxes.

    Returns None if an element is under the view twice or outside of the tensor, or for more than `MAX_BOXES` boxes.
    """
    pieces = _affine(shape, offset, zip(size, stride, stride, strict=True), steps=True)
    return None if pieces is None else [box for box, _, _ in pieces]


_Dim = tuple[int, int, int]
"""One dimension of a copy between two views: its length, the source's stride, the destination's stride."""

_Piece = tuple[Box, int, tuple[int, ...]]
"""A box of the source, with its offset and strides in the destination, relative to the destination's offset."""


def _affine(shape: Sequence[int], offset: int, dims: Iterable[_Dim], *, steps: bool = False) -> list[_Piece] | None:
    """Return the copy `dims` from `offset` of a contiguous tensor of `shape`, in pieces.

    With `steps`, rows that are not neighbours become pieces of their own.
    """
    dims = list(dims)
    if any(length == 0 for length, _, _ in dims):
        return []
    dims = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: -dim[1])
    inside = offset >= 0 and offset + _span(dims) < prod(shape)
    overlaps = any(stride <= _span(dims[at + 1 :]) for at, (_, stride, _) in enumerate(dims))
    return None if overlaps or not inside else _box_pieces(tuple(shape), offset, dims, steps)


def _box_pieces(shape: tuple[int, ...], offset: int, dims: list[_Dim], steps: bool) -> list[_Piece] | None:
    """Return the pieces of `_affine` for sorted dims inside of the tensor.

    `dims` are longer than 1, and ordered by falling source stride. The tensor is seen as rows. Dims that stride over
    whole rows choose rows. The others move within a row, and choose boxes of it. Any other dim is cut into such
    parts.
    """
    if not shape:
        return [(Box((), ()), 0, ())]
    row = prod(shape[1:])
    across = [dim for dim in dims if dim[1] >= row]
    within = dims[len(across) :]
    for at, (length, stride, _) in enumerate(across):
        if stride % row:  # each step lands in another column: take steps one by one
            return _cut(shape, offset, dims, steps, at, [(i, []) for i in range(min(length, MAX_BOXES + 1))])
    start, column = divmod(offset, row)
    if column + _span(within) >= row:
        return _cut(shape, offset, dims, steps, len(across), _row_parts(row, column, within))
    if (runs := _runs(across, row, steps)) is None:
        return None
    if (columns := _box_pieces(shape[1:], column, within, steps)) is None:
        return None
    length, row_stride, starts = runs
    if len(starts) * len(columns) > MAX_BOXES:
        return None
    return [
        (
            Box((start + first, *box.start), (length, *box.size)),
            row_offset + column_offset,
            (row_stride, *column_stride),
        )
        for first, row_offset in starts
        for box, column_offset, column_stride in columns
    ]


def _span(dims: Iterable[_Dim]) -> int:
    """Return the distance from the first element of the dims to the last."""
    return sum((length - 1) * stride for length, stride, _ in dims)


_Part = tuple[int, list[_Dim]]
"""A part of a dim: its first index, and the dims that walk through it."""


def _row_parts(row: int, column: int, within: list[_Dim]) -> list[_Part]:
    """Cut the first of `within`. It begins at `column` and passes the end of the row.

    Each part stays in one row, or is whole rows. A part is a single index if a dim further in passes the end. Stops
    after `MAX_BOXES` parts, because the caller gives up on more.
    """
    length, stride, dst_stride = within[0]
    further = _span(within[1:])
    parts: list[_Part] = []
    first = 0
    while first < length and len(parts) <= MAX_BOXES:
        here = (column + first * stride) % row
        count = min(max(1, (row - 1 - here - further) // stride + 1), length - first)
        part = [(count, stride, dst_stride)]
        if count * stride == row:
            rows = (length - first) // count
            part = [(rows, row, count * dst_stride), *part]
            count *= rows
        parts.append((first, part))
        first += count
    return parts


def _cut(
    shape: tuple[int, ...], offset: int, dims: list[_Dim], steps: bool, at: int, parts: list[_Part]
) -> list[_Piece] | None:
    """Return the pieces of `dims` with dim number `at` cut into `parts`."""
    _, stride, dst_stride = dims[at]
    pieces: list[_Piece] = []
    for first, part in parts:
        part_dims = [*dims[:at], *(dim for dim in part if dim[0] > 1), *dims[at + 1 :]]
        more = _box_pieces(shape, offset + first * stride, part_dims, steps)
        if more is None or len(pieces) + len(more) > MAX_BOXES:
            return None
        pieces += [(box, first * dst_stride + dst_offset, strides) for box, dst_offset, strides in more]
    return pieces


def _runs(across: list[_Dim], row: int, steps: bool) -> tuple[int, int, list[tuple[int, int]]] | None:
    """Return the rows that the dims `across` choose, as equal runs of neighbours.

    The result has the length of a run, its destination stride, and the first row and destination offset of each run.
    Returns None if no two rows are neighbours, unless `steps`, and for more than `MAX_BOXES` runs.
    """
    length, run_stride, starts = 1, 0, [(0, 0)]
    for count, stride, dst_stride in reversed(across):
        step = stride // row
        if length == step == 1:
            length, run_stride = count, dst_stride
        elif length == step and dst_stride == run_stride * length:
            length *= count
        elif (length == 1 and not steps) or count * len(starts) > MAX_BOXES:
            return None
        else:  # the next run is not a neighbour, here or in the destination
            starts = [(i * step + first, i * dst_stride + offset) for i in range(count) for first, offset in starts]
    return length, run_stride, starts


# Coverage


def coverage(shape: Sequence[int], regions: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """Return the rest of a tensor of `shape` outside of `regions`, and the parts that several regions cover.

    Both, (missing, doubled), are disjoint boxes. Parts of regions outside of the tensor do not count.
    """
    whole = Box.full(shape)
    missing, doubled = _coverage(whole, tuple(part for r in regions if (part := whole.intersect(r)) is not None))
    return list(missing), list(doubled)


@lru_cache(maxsize=256)  # the layers of a model are cut alike
def _coverage(whole: Box, parts: tuple[Box, ...]) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    cells = _cells(whole, parts, 0)
    return tuple(box for box, times in cells if times == 0), tuple(box for box, times in cells if times == 2)


def _cells(whole: Box, regions: Sequence[Box], dim: int) -> list[tuple[Box, int]]:
    """Cut `whole`, from dimension `dim` on, into boxes under no region (0), under one (1), or under more (2).

    Sweep along `dim`, stop at the begin and end of each region, and join equal neighbouring slabs.
    """
    if dim == len(whole.start):
        return [(Box((), ()), min(len(regions), 2))]
    begin: dict[int, set[int]] = defaultdict(set)
    end: dict[int, set[int]] = defaultdict(set)
    for number, region in enumerate(regions):
        begin[region.start[dim]].add(number)
        end[region.start[dim] + region.size[dim]].add(number)
    bounds = {whole.start[dim], whole.start[dim] + whole.size[dim]}
    active: set[int] = set()
    slabs: list[tuple[int, int, list[tuple[Box, int]]]] = []
    for low, high in pairwise(sorted({*bounds, *begin, *end})):
        active = (active - end[low]) | begin[low]
        cells = _cells(whole, [regions[number] for number in active], dim + 1)
        if slabs and slabs[-1][2] == cells:
            low = slabs.pop()[0]
        slabs.append((low, high, cells))
    return [
        (Box((low, *box.start), (high - low, *box.size)), times) for low, high, cells in slabs for box, times in cells
    ]


# From locations to copies


def copy_ops(
    copies: Iterable[LoadCopy], arrivals: Iterable[Sequence[ShardLocation]], prefer_rank: int | None = None
) -> list[CopyOp]:
    """Return the copies of one engine worker: its load copies, each reading from the chunks.

    `arrivals` has the locations of each chunk, by the chunk's number. If several ranks have the same box in one chunk,
    `prefer_rank` is read if it is one of them. Otherwise the rank with the fewest bytes read so far is read. The same
    arguments give the same copies.

    Raises `PlacementError`, after looking at everything, if part of a load copy comes from no rank or comes twice.
    `problems` lists each tensor and region.
    """
    if not (copies := [*copies]):
        return []
    held: dict[str, dict[tuple[int, Box], list[ShardLocation]]] = defaultdict(lambda: defaultdict(list))
    for chunk, locations in enumerate(arrivals):
        for location in locations:
            held[location.name][chunk, location.box].append(location)
    ops: list[CopyOp] = []
    problems: list[str] = []
    read_bytes: Counter[int] = Counter()
    for copy in copies:
        parts: list[Box] = []
        for (chunk, box), replicas in held.get(copy.name, {}).items():
            part = box if box == copy.box else copy.box.intersect(box)
            if part is None:
                continue
            parts.append(part)
            source = _least_loaded([p for p in replicas if p.rank == prefer_rank] or replicas, read_bytes)
            read_bytes[source.rank] += part.numel * itemsize(source.dtype)
            ops.append(
                CopyOp(
                    chunk=chunk,
                    name=copy.name,
                    size=part.size,
                    rank=source.rank,
                    storage=source.storage,
                    src_offset=source.offset + _distance(part, box, source.stride),
                    src_stride=source.stride,
                    src_dtype=source.dtype,
                    param=copy.param,
                    dst_offset=copy.offset + _distance(part, copy.box, copy.stride),
                    dst_stride=copy.stride,
                )
            )
        missing, doubled = ((), ()) if parts == [copy.box] else _coverage(copy.box, tuple(parts))
        problems += [f"{copy.name}{box} is held by no rank" for box in missing]
        problems += [f"{copy.name}{box} is held twice, in two chunks or in boxes that overlap" for box in doubled]
    if problems:
        unique = list(dict.fromkeys(problems))
        raise PlacementError(
            f"the trainer's shards do not fit the engine's load plan in {len(unique)} regions: "
            f"{'; '.join(unique[:5])}{'; ...' if len(unique) > 5 else ''}. Every region must come in one chunk, from "
            "one rank, or as the same box from several",
            problems=unique,
        )
    return ops


def part_of(location: ShardLocation, box: Box) -> ShardLocation | None:
    """Return the part of `location` within `box` of its tensor, or None if there is none."""
    common = location.box.intersect(box)
    if common is None:
        return None
    if common == location.box:
        return location
    return replace(location, box=common, offset=location.offset + _distance(common, location.box, location.stride))


def choose_owners(locations: Iterable[ShardLocation]) -> list[ShardLocation]:
    """Return one location of each box, in order of first appearance.

    If several ranks hold a box, the rank with the fewest bytes so far owns it.
    """
    held = grouped(locations, lambda location: (location.name, location.box))
    if all(len(replicas) == 1 for replicas in held.values()):
        return [location for (location,) in held.values()]
    owners: list[ShardLocation] = []
    owned_bytes: Counter[int] = Counter()
    for replicas in held.values():
        owner = _least_loaded(replicas, owned_bytes)
        owned_bytes[owner.rank] += owner.box.numel * itemsize(owner.dtype)
        owners.append(owner)
    return owners


def _least_loaded(replicas: list[ShardLocation], nbytes: Counter[int]) -> ShardLocation:
    return replicas[0] if len(replicas) == 1 else min(replicas, key=lambda p: (nbytes[p.rank], p.rank))


def _distance(part: Box, box: Box, stride: tuple[int, ...]) -> int:
    """Return the distance from the first element of `box` to the first of `part`. `stride` has the strides of `box`."""
    if part.start == box.start:
        return 0
    return sum((a - b) * step for a, b, step in zip(part.start, box.start, stride, strict=True))


# Groups


def fuse_groups(copies: Iterable[LoadCopy]) -> list[tuple[str, ...]]:
    """Return the names of tensors that must be loaded together.

    They land in the same engine parameter (q, k and v in `qkv_proj`), directly or by a chain. Groups and names are in
    order of first appearance.
    """
    return connected((copy.name, copy.param) for copy in copies)


def connected(labelled: Iterable[tuple[str, Hashable]]) -> list[tuple[str, ...]]:
    """Partition the names of `(name, label)` pairs. Names that share a label, directly or by a chain, are together.

    Groups and names are in order of first appearance.
    """
    joined: dict[Hashable, Hashable] = {}  # each label, to another label of its group
    first: dict[str, Hashable] = {}  # the first label of each name

    def root(label: Hashable) -> Hashable:
        while (above := joined.setdefault(label, label)) != label:
            joined[label] = label = joined[above]
        return label

    for name, label in labelled:
        if (known := first.setdefault(name, label)) != label:
            joined[root(label)] = root(known)
    return [tuple(names) for names in grouped(first, lambda name: root(first[name])).values()]
