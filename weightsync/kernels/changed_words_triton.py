"""The launches of `changed_words` on a GPU.

A program of `_find` has the words of a tile in registers. It compares them, takes room for the changed ones, and writes
one word of each row of eight in a step. A program of `_write` is for the changed words of a tile in one region.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from weightsync.kernels import changed_words, digest
from weightsync.kernels.changed_words import TILE, Piece, Region, table_bytes

_VECTOR_BYTES = 16
_FIND_WARPS, _WRITE_WARPS = 4, 1
_FIELDS = tl.constexpr(4)
_ENTRIES = tl.constexpr(128)
"""Changed words per step of a program of the writing."""
_GROUP, _GROUPS = tl.constexpr(changed_words.GROUP), tl.constexpr(changed_words.GROUPS)
_START_BYTES, _SUMS = tl.constexpr(changed_words.START_BYTES), tl.constexpr(changed_words.SUMS)
_STEP_OF_PLACE, _MIX = tl.constexpr(changed_words.STEP_OF_PLACE), tl.constexpr(changed_words.MIX)
_SAMPLES, _WHOLE = tl.constexpr(digest.SAMPLES), tl.constexpr(digest.WHOLE)
_GOLDEN = tl.constexpr(digest.signed(digest.GOLDEN))
_CASTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class _Kind(NamedTuple):
    """The common properties of the pieces of one launch.

    casts: the dtype of the base, if the new values are float32.
    aligned: whether both sides may be read 16 bytes at a time.
    """

    casts: Any
    aligned: bool


@triton.jit
def _weight(at):  # type: ignore[no-untyped-def]
    mixed = at.to(tl.uint32) * _STEP_OF_PLACE
    return ((mixed ^ (mixed >> 15)) * _MIX) | 1


@triton.jit
def _add(sums, tile, checksum):  # type: ignore[no-untyped-def]
    part = checksum.to(tl.int64) * (tile.to(tl.int64) * _GOLDEN | 1)
    tl.atomic_add(sums + tile % _SUMS, part, sem="relaxed")


@triton.jit
def _bits(mask):  # type: ignore[no-untyped-def]
    """Return the number of set bits among the lowest 8."""
    pairs = mask - ((mask >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return ((fours + (fours >> 4)) & 0xF).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _new_words(source, at, inside, casts: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return new 16-bit words, by number, as unsigned 32-bit integers."""
    if casts is None:
        word = tl.load(source.to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0)
    else:
        value = tl.load(source.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0)
        word = value.to(casts).to(tl.uint16, bitcast=True)
    return word.to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _new_pairs(source, pair, inside, casts: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return pairs of new words, by number."""
    if casts is None:
        both = source.to(tl.pointer_type(tl.uint32))
        if aligned:
            both = tl.multiple_of(both, 16)
        new = tl.load(both + pair, mask=inside, other=0)
    else:
        new = _new_words(source, 2 * pair, inside, casts) | (_new_words(source, 2 * pair + 1, inside, casts) << 16)
    return new


@triton.jit
def _changed(new, old, own_pair):  # type: ignore[no-untyped-def]
    """Return the changed words of each row, as bits: those of the low halves of its pairs, then of the high halves."""
    differs = new ^ old
    # The highest bit of each half with any bit: the addition carries into it from the lower ones.
    halves = (((differs & 0x7FFF7FFF) + 0x7FFF7FFF) | differs) & 0x80008000
    mask = tl.sum(halves >> (15 - own_pair).to(tl.uint32), axis=1)
    return (mask | (mask >> 12)) & 0xFF


@triton.jit
def _sum_of(new, pair):  # type: ignore[no-untyped-def]
    values = (new & 0xFFFF) * _weight(2 * pair) + (new >> 16) * _weight(2 * pair + 1)
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def _write_row_by_row(positions, words, mask, row, own_pair, new):  # type: ignore[no-untyped-def]
    """Write the positions and the words in the masks of a tile. Return their part of the checksum."""
    left = _bits(mask)
    to = tl.cumsum(left, axis=0) - left
    checksum = tl.zeros_like(mask)
    for _ in range(tl.max(left, axis=0)):
        is_left = mask != 0
        lowest = mask & (~mask + 1)
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the exponent
        half, its_pair = bit >> 2, bit & 3
        both = tl.sum(tl.where(own_pair == its_pair[:, None], new, 0), axis=1)
        word = (both >> (16 * half).to(tl.uint32)) & 0xFFFF
        place = row * 8 + 2 * its_pair + half
        tl.store(positions + to, place.to(tl.uint8), mask=is_left)
        tl.store(words + to, word.to(tl.uint16), mask=is_left)
        checksum += tl.where(is_left, (word + 1) * _weight(place), 0)
        mask &= mask - 1
        to += 1
    return tl.sum(checksum, axis=0)


@triton.jit(do_not_specialize=["begin", "tiles", "room", "sample"])  # type: ignore[untyped-decorator]
def _find(  # type: ignore[no-untyped-def]
    table,
    jobs,
    body,
    words,
    sums,
    begin,
    tiles,
    room,
    sample,
    casts: tl.constexpr,
    aligned: tl.constexpr,
):
    job = jobs + 2 * (begin + tl.program_id(0)).to(tl.int64)
    tile, piece = tl.load(job), table + tl.load(job + 1).to(tl.int64) * _FIELDS
    first = (tile - tl.load(piece + 3)) * (_GROUPS * _GROUP)
    pairs = (tl.load(piece + 2) - first) >> 1
    source = tl.load(piece) + first * (2 if casts is None else 4)
    base = (tl.load(piece + 1) + first * 2).to(tl.pointer_type(tl.uint32))
    if aligned:
        base, pairs = tl.multiple_of(base, 16), tl.multiple_of(pairs, 4)
    # A thread reads the 4 pairs of a row at once.
    rows: tl.constexpr = _GROUPS * _GROUP // 8
    row = tl.arange(0, rows)
    own_pair = tl.arange(0, 4)[None, :]
    pair = row[:, None] * 4 + own_pair
    inside = pair < pairs
    old = tl.load(base + pair, mask=inside, other=0)
    new = _new_pairs(source, pair, inside, casts, aligned)
    mask = _changed(new, old, own_pair)
    count = tl.sum(tl.reshape(_bits(mask), [_GROUPS, rows // _GROUPS]), axis=1)
    comes_whole = count >= _GROUP - 1
    total = tl.sum(tl.where(comes_whole, _GROUP, count), axis=0)
    total += total & 1
    start = tl.atomic_add(words, total.to(tl.int64), sem="relaxed")
    tl.store(base + pair, new, mask=inside & (mask != 0)[:, None])
    at = tile.to(tl.int64)
    tl.store(body + at * _GROUPS + tl.arange(0, _GROUPS), tl.minimum(count, _GROUP - 1).to(tl.uint8))
    tl.store((body + _GROUPS * tiles).to(tl.pointer_type(tl.int64)) + at, start)
    if (tile % _SAMPLES == sample) | (sample == _WHOLE):
        _add(sums, tile, _sum_of(new, pair))
    mask = tl.reshape(tl.where(comes_whole[:, None], 0xFF, tl.reshape(mask, [_GROUPS, rows // _GROUPS])), [rows])
    if (total > 0) & (3 * (start + total) <= room):
        positions = body + (_GROUPS + _START_BYTES) * tiles + 3 * start
        own_words = (positions + total).to(tl.pointer_type(tl.uint16))
        checksum = _write_row_by_row(positions, own_words, mask, row, own_pair, new)
        _add(sums, tile, checksum)


@triton.jit(do_not_specialize=["tiles", "room", "sample"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    table,
    jobs,
    body,
    sums,
    tiles,
    room,
    sample,
    writes: tl.constexpr,
):
    job = jobs + tl.program_id(0).to(tl.int64) * 2
    tile, own = tl.load(job), tl.load(job + 1)
    start = tl.load((body + _GROUPS * tiles).to(tl.pointer_type(tl.int64)) + tile)
    counts = tl.load(body + tile.to(tl.int64) * _GROUPS + tl.arange(0, _GROUPS)).to(tl.int32)
    region = table + own.to(tl.int64) * _FIELDS
    begin = (tile - tl.load(region + 3)) * (_GROUPS * _GROUP)  # of the tile, in its piece
    low, high = tl.load(region + 1) - begin, tl.load(region + 2) - begin
    memory = tl.load(region).to(tl.pointer_type(tl.uint16)) + begin
    counts = tl.where(counts == _GROUP - 1, _GROUP, counts)
    up_to = tl.cumsum(counts, axis=0)
    count = tl.sum(counts, axis=0)
    is_sampled = (tile % _SAMPLES == sample) | (sample == _WHOLE)
    if (start >= 0) & (start % 2 == 0) & (start <= room // 3 - count - count % 2):
        total = tl.zeros([_ENTRIES], dtype=tl.uint32)
        positions = body + (_GROUPS + _START_BYTES) * tiles + 3 * start
        words = (positions + count + count % 2).to(tl.pointer_type(tl.uint16))
        for from_entry in range(0, count, _ENTRIES):
            number = from_entry + tl.arange(0, _ENTRIES)
            valid = number < count
            at = tl.load(positions + number, mask=valid, other=0).to(tl.int32)
            word = tl.load(words + number, mask=valid, other=0).to(tl.uint32)
            at += tl.sum((up_to[:, None] <= number[None, :]).to(tl.int32), axis=0) * _GROUP
            valid = valid & (at >= low) & (at < high)
            if writes:
                tl.store(memory + at, word.to(tl.uint16), mask=valid)
            else:
                value = word + 1
                if is_sampled:
                    value += word - tl.load(memory + at, mask=valid, other=0).to(tl.uint32)
                total += tl.where(valid, value * _weight(at), 0)
        if not writes:
            checksum = tl.sum(total, axis=0)
            if is_sampled:
                for row in range(_GROUPS):
                    place = row * _GROUP + tl.arange(0, _GROUP)
                    old = tl.load(memory + place, mask=(place >= low) & (place < high), other=0).to(tl.uint32)
                    checksum += tl.sum(old * _weight(place), axis=0)
            if is_sampled | (count > 0):
                _add(sums, tile, checksum)


class FindLaunches:
    """The pieces of all groups in one table on the GPU, and one launch for each kind of a group."""

    def __init__(self, groups: Sequence[Sequence[Piece]]) -> None:
        pieces = [piece for group in groups for piece in group]
        self._device = pieces[0].new.device
        self._keep_alive = pieces
        nbytes = np.array([piece.base.nbytes for piece in pieces], dtype=np.int64)
        counts = -(-(nbytes // 2) // TILE)
        firsts = counts.cumsum() - counts
        addresses = np.array([(piece.new.data_ptr(), piece.base.data_ptr()) for piece in pieces], dtype=np.int64)
        of_tile = np.arange(len(pieces)).repeat(counts)
        kinds = [*map(_kind, pieces)]
        ends = [*accumulate(map(len, groups), initial=0)]
        of_group = np.append(firsts, counts.sum())[ends]  # the first tile of each group
        self._tiles = len(of_tile)
        self._table = torch.from_numpy(np.column_stack([addresses, nbytes // 2, firsts])).to(self._device)
        self._launches = []
        for kind in dict.fromkeys(kinds):
            own = np.array([each == kind for each in kinds])[of_tile].nonzero()[0]
            jobs = torch.from_numpy(np.column_stack([own, of_tile[own]]).astype(np.int32)).to(self._device)
            self._launches.append((jobs, np.searchsorted(own, of_group).tolist(), kind))
            _load_comparison(self._device, kind)

    def run(self, group: int, body: torch.Tensor, words: torch.Tensor, sums: torch.Tensor, sample: int) -> None:
        rest = self._tiles, body.numel() - table_bytes(self._tiles), sample
        with torch.cuda.device(self._device):
            for jobs, bounds, kind in self._launches:
                begin, end = bounds[group : group + 2]  # the group's first job, and the one after its last
                if begin < end:
                    _find[(end - begin,)](self._table, jobs, body, words, sums, begin, *rest, **_find_constants(kind))


def _find_constants(kind: _Kind) -> dict[str, Any]:
    return {**kind._asdict(), "num_warps": _FIND_WARPS}


@cache
def _load_comparison(device: torch.device, kind: _Kind) -> None:
    """Compile the kernel, and load it into the GPU by a launch without words. See `copies_triton._load`."""
    with torch.cuda.device(device):
        table, jobs, body = (torch.zeros(TILE, dtype=n, device=device) for n in (torch.int64, torch.int32, torch.uint8))
        _find[(1,)](table, jobs, body, table, table, 0, 1, 0, 0, **_find_constants(kind))


@cache
def _load_writing(device: torch.device) -> None:
    with torch.cuda.device(device):
        table, jobs, body = (torch.zeros(TILE, dtype=n, device=device) for n in (torch.int64, torch.int32, torch.uint8))
        for writes in (False, True):
            _write[(1,)](table, jobs, body, table, 1, 0, 0, writes=writes, num_warps=_WRITE_WARPS)


def _kind(piece: Piece) -> _Kind:
    casts = _CASTS[piece.base.dtype] if piece.new.dtype != piece.base.dtype else None
    numbers = piece.new.data_ptr(), piece.base.data_ptr(), piece.base.nbytes
    return _Kind(casts, not any(number % _VECTOR_BYTES for number in numbers))


class WriteLaunch:
    """The regions in a table on the GPU, and the jobs: each a tile, and a region with words of it."""

    def __init__(self, first_tiles: Sequence[int], regions: Sequence[Region]) -> None:
        self._device, self._keep_alive = regions[0].memory.device, regions
        rows = np.array([(each.piece, each.first, each.end, each.memory.data_ptr()) for each in regions], np.int64)
        piece, first, end, address = rows.T
        tile = np.array(first_tiles, dtype=np.int64)[piece]
        counts = -(-end // TILE) - first // TILE
        of_job = np.arange(len(regions)).repeat(counts)
        tiles = np.arange(counts.sum()) - (counts.cumsum() - counts - first // TILE - tile)[of_job]
        # The address of the piece's first word, if the piece lay there as a whole.
        table = np.column_stack([address - 2 * first, first, end, tile])
        self._table = torch.from_numpy(table).to(self._device)
        self._jobs = torch.from_numpy(np.column_stack([tiles, of_job]).astype(np.int32)).to(self._device)
        self._tiles = first_tiles[-1]
        _load_writing(self._device)

    def run(self, body: torch.Tensor, sums: torch.Tensor, sample: int, writes: bool) -> None:
        tables, room = (self._table, self._jobs, body, sums), body.numel() - table_bytes(self._tiles)
        with torch.cuda.device(self._device):
            _write[(len(self._jobs),)](*tables, self._tiles, room, sample, writes=writes, num_warps=_WRITE_WARPS)
