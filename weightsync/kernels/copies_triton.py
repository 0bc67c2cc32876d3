"""The launches of `copies.BatchedCopy` on a GPU.

A copy is cut into tiles of rows and columns. A program copies one tile after another. Each load and store is as wide as
the addresses and strides of both sides allow, up to 16 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from weightsync.kernels.copies import Copy, Dimension, collapse

_FIELDS = tl.constexpr(11)
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_VECTOR_BYTES = 16
_TILE = tl.constexpr(2048)
_COLUMNS = (64, 16)
"""Widths of a tile of `_TILE` units. Nearly all copies of a model fit 64 columns, so one launch makes them. More widths
would need more launches. Launches run one after another, and each leaves the links that it does not use idle."""
_WARPS = 2


def can_launch(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a launch can make this copy: in memory of one GPU, with a cast that gives torch's values."""
    if source.device != target.device:
        return False
    alike = target.dtype == source.dtype and target.element_size() in _UNITS
    return alike or {target.dtype, source.dtype} <= {*_DTYPES}


class _Kind(NamedTuple):
    """The properties that the copies of one launch share.

    reads, writes: the dtypes in which sources are read and targets are written.
    dense: whether the elements of a row are contiguous in source and target.
    step: the number of elements that one access may read or write. Rows start at multiples of it.
    tile_columns: the columns of a tile.
    """

    reads: Any
    writes: Any
    dense: bool
    step: int
    tile_columns: int


@triton.jit(do_not_specialize=["begin", "end"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    table,
    piece_of_tile,
    order,
    begin,
    end,
    reads: tl.constexpr,
    writes: tl.constexpr,
    dense: tl.constexpr,
    step: tl.constexpr,
    tile_columns: tl.constexpr,
    spread: tl.constexpr,
):
    tile_rows: tl.constexpr = _TILE // tile_columns
    for at in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        tile = at
        if spread:
            tile = tl.load(order + at)
        piece = table + tl.load(piece_of_tile + tile).to(tl.int64) * _FIELDS
        number = (tile - tl.load(piece + 10)).to(tl.int32)
        target = tl.load(piece).to(tl.pointer_type(writes))
        source = tl.load(piece + 1).to(tl.pointer_type(reads))
        rows = tl.load(piece + 2).to(tl.int32)
        columns = tl.load(piece + 3)
        outer_to, outer_of = tl.load(piece + 4), tl.load(piece + 5)
        row_to, row_of = tl.load(piece + 6), tl.load(piece + 7)
        if step > 1:
            source = tl.multiple_of(source, step * (reads.primitive_bitwidth // 8))
            target = tl.multiple_of(target, step * (writes.primitive_bitwidth // 8))
            outer_to, outer_of = tl.multiple_of(outer_to, step), tl.multiple_of(outer_of, step)
            row_to, row_of = tl.multiple_of(row_to, step), tl.multiple_of(row_of, step)
            columns = tl.multiple_of(columns, step)  # or Triton would evaluate the mask for each element
        across = tl.cdiv(columns, tile_columns).to(tl.int32)
        down = tl.cdiv(rows, tile_rows)
        outer = number // (across * down)
        number = number % (across * down)
        row = ((number // across) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
        column = (number % across).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        to = outer * outer_to + row[:, None] * row_to
        of = outer * outer_of + row[:, None] * row_of
        if dense:
            to += column[None, :]
            of += column[None, :]
        else:
            to += column[None, :] * tl.load(piece + 8)
            of += column[None, :] * tl.load(piece + 9)
        tl.store(target + to, tl.load(source + of, mask=inside).to(writes), mask=inside)


class CopyLaunches:
    """The tables of all copies on the GPU, as grids of rows and columns, and one launch for each kind of a group.

    groups: see `BatchedCopy`.
    programs: the most programs of a launch that run at once.
    """

    def __init__(self, *groups: Sequence[Copy], programs: int | None = None) -> None:
        self._device = next(copies[0][0].device for copies in groups if copies)
        self._keep_alive, self._programs = groups, programs
        grids: dict[_Kind, list[tuple[int, int, list[int], int]]] = defaultdict(list)
        for number, copies in enumerate(groups):
            for target, source, link in copies:
                for kind, fields, tiles in _cut_into_grids(target, source):
                    grids[kind].append((number, link, fields, tiles))
        self._launches = []
        for kind, rows in grids.items():
            # By numpy, in one thread: torch's threads take 10 ms to begin a small operation on a host of many cores.
            numbers, links, pieces, counts = (np.array(each, dtype=np.int64) for each in zip(*rows, strict=True))
            ends = counts.cumsum()
            of_tile = np.arange(len(rows), dtype=np.int32).repeat(counts)
            bounds = np.append(0, ends)[np.searchsorted(numbers, np.arange(len(groups) + 1))]
            is_spread, order = len({*links.tolist()}) > 1, of_tile
            if is_spread:
                parts = pairwise(bounds.tolist())
                order = np.concatenate([begin + _spread(links[of_tile[begin:end]]) for begin, end in parts])
            table = np.column_stack([pieces, ends - counts])
            on_gpu = [torch.from_numpy(part).to(self._device) for part in (table, of_tile, order.astype(np.int32))]
            self._launches.append((on_gpu, bounds.tolist(), _constants(kind, is_spread)))
            _load(self._device, kind, is_spread)

    def run(self, group: int = 0) -> None:
        with torch.cuda.device(self._device):
            for tables, bounds, constants in self._launches:
                begin, end = bounds[group : group + 2]
                if begin < end:
                    _copy[(min(end - begin, self._programs or end),)](*tables, begin, end, **constants)


@cache
def _load(device: torch.device, kind: _Kind, is_spread: bool) -> None:
    """Compile the kernel, and load it into the GPU by a launch without tiles.

    Loading may wait for the GPU. During a push the GPU may wait for another member of a broadcast.
    """
    table, of_tile = (torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
    with torch.cuda.device(device):
        _copy[(1,)](table, of_tile, of_tile, 0, 0, **_constants(kind, is_spread))


def _constants(kind: _Kind, is_spread: bool) -> dict[str, Any]:
    return {**kind._asdict(), "spread": is_spread, "num_warps": _WARPS}


def _cut_into_grids(target: torch.Tensor, source: torch.Tensor) -> list[tuple[_Kind, list[int], int]]:
    """Cut a copy into grids of at most three dimensions. Return (kind, fields of the table, tiles) of each."""
    *outer, (size, to, of) = collapse(target.shape, target.stride(), source.stride())
    sizes = [target.element_size(), source.element_size()]
    addresses = [target.data_ptr(), source.data_ptr()]
    width = _COLUMNS[0]
    if to == of == 1 and target.dtype == source.dtype:
        width *= max(_UNITS) // sizes[0]
    down, tile_rows = outer[-1][0] if outer else 1, _TILE.value // _COLUMNS[0]
    if down * -(-(size // width) // tile_rows) >= -(-down // tile_rows) * -(-size // width):
        return _grids(target, source, [*outer, (size, to, of)], addresses)
    # A few long rows leave most rows of a tile empty. Cut each long row into rows of the tile's width, and a rest.
    found = _grids(target, source, [*outer, (size // width, width * to, width * of), (width, to, of)], addresses)
    if rest := size % width:
        strides = zip(addresses, sizes, (to, of), strict=True)
        moved = [address + (size - rest) * stride * nbytes for address, nbytes, stride in strides]
        found += _grids(target, source, [*outer, (rest, to, of)], moved)
    return found


def _grids(
    target: torch.Tensor, source: torch.Tensor, dims: Sequence[Dimension], addresses: Sequence[int]
) -> list[tuple[_Kind, list[int], int]]:
    """Return (kind, fields of the table, number of tiles) of each grid of these dimensions at these addresses."""
    outer, (columns, *column_strides) = list(dims[:-1]), dims[-1]
    dense = column_strides == [1, 1]
    sizes = [target.element_size(), source.element_size()]
    if target.dtype == source.dtype:
        unit = sizes[0]
        if dense:  # copied as bytes, in the widest unit that divides all addresses, strides and sizes
            nbytes = [columns * unit, *(stride * unit for _, *strides in outer for stride in strides)]
            unit = max(n for n in _UNITS if not any(value % n for value in (*addresses, *nbytes)))
            columns = nbytes[0] // unit
            outer = [(n, to * sizes[0] // unit, of * sizes[0] // unit) for n, to, of in outer]
        reads = writes = _UNITS[unit]
        units = [unit, unit]
    else:
        reads, writes, units = _DTYPES[source.dtype], _DTYPES[target.dtype], sizes
    step = _VECTOR_BYTES // max(units)  # equal on both sides, or Triton would move the values between threads
    places = zip(addresses, units, ([dim[1 + side] for dim in outer] for side in (0, 1)), strict=True)
    is_unaligned = any(at % (step * size) or any(stride % step for stride in of) for at, size, of in places)
    if not dense or columns % step or is_unaligned:
        step = 1
    width = next((n for n in _COLUMNS if n <= columns), _COLUMNS[-1])
    kind = _Kind(reads, writes, dense, step, width)
    *many, (outers, outer_to, outer_of), (rows, row_to, row_of) = [(1, 0, 0), (1, 0, 0), *outer]
    down = -(-rows // (_TILE.value // width))
    tiles = outers * down * -(-columns // width)
    found = []
    for index in product(*(range(size) for size, *_ in many)):
        moved = [
            address + units[side] * sum(n * dim[1 + side] for n, dim in zip(index, many, strict=True))
            for side, address in enumerate(addresses)
        ]
        strides = [outer_to, outer_of, row_to, row_of, *column_strides]
        found.append((kind, [*moved, rows, columns, *strides], tiles))
    return found


def _spread(links: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an order of all tiles that spreads the tiles of each link evenly."""
    at = np.empty(len(links))
    for link, count in zip(*np.unique(links, return_counts=True), strict=True):
        at[links == link] = np.linspace(0, 1, count)
    return at.argsort(kind="stable")
