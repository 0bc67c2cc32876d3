"""The changed 16-bit words of memory, found in one pass and written into another copy of it.

A trainer compares its pieces with their bases, the bytes of the last push. It notes the changed words, and makes the
bases equal. Then it collects the noted words in a body. A worker has the same bytes, in regions at any addresses, and
writes the changed words there.

    body      counts, words
    counts    for each group of 256 words: the number of words in the body, 1 byte. 255 stands for 256
    words     for each tile of 8192 words: positions in groups, then the low bytes, then the high bytes of the new words

A tile belongs to one piece. The tiles of a body are numbered through its pieces, in their order. A group with 255 or
more changed words has all 256 in the body.

A checksum proves the body and the bases. It is the sum of (new + 1) * weight over the words in the body. One tile in
16, by turns, also adds the sum of new * weight over all of its words. So the unchanged words are proven too. Weights
are odd, and depend on the tile and the place in it. The low 32 bits of the sum count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from weightsync.kernels.digest import GOLDEN, SAMPLES, WHOLE

TILE = 8192
GROUP = 256
GROUPS = TILE // GROUP
NONE = -2
"""The sample of a push without a proof of unchanged words."""
CHECKSUM = 0xFFFFFFFF
"""The bits of a checksum."""
SUMS = 256
"""The parts of a checksum on a GPU, each of every 256th tile. Additions to one address wait for each other."""
STEP_OF_PLACE, MIX = 0x9E3779B1, 0x85EBCA77
"""The factors of a weight, which is made of a place in a tile."""


class Piece(NamedTuple):
    """A piece of a rank's bytes: `new` values, and the `base` with the same number of elements on the same device.

    Both are contiguous. `base` has the dtype on the wire, and a multiple of 4 bytes. `new` has that dtype too, or
    float32 for a base of 16-bit floats.
    """

    new: torch.Tensor
    base: torch.Tensor


class Region(NamedTuple):
    """Words `first` to `end` of a piece, and their memory: contiguous, 1-D, uint8.

    piece: the number of the piece.
    """

    piece: int
    first: int
    end: int
    memory: torch.Tensor


def can_compare(new: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether this tensor can be the `new` of a piece with this dtype on the wire."""
    if not new.is_contiguous() or new.numel() * dtype.itemsize % 4 or new.data_ptr() % 4:
        return False
    casts = new.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)
    return new.dtype == dtype or casts


def words_of(nbytes: int) -> int:
    """Return the words of a piece of so many bytes, its padding to whole pairs of words included."""
    return -(-nbytes // 4) * 2


def tiles_of(words: int) -> int:
    """Return the number of tiles of a piece with so many words."""
    return -(-words // TILE)


def table_bytes(tiles: int) -> int:
    """Return the bytes of a body before its words."""
    return GROUPS * tiles


class ChangeFinder:
    """The comparison of pieces, in groups to be compared at different times. All groups have one body.

    Group 0 is compared first, and each group is collected before the next one is compared.

    tiles: the number of tiles of all groups.
    words: int64. The number of words for the body, of the groups compared since group 0.
    """

    def __init__(self, *groups: Sequence[Piece]) -> None:
        self._groups = groups
        tiles = (sum(tiles_of(_words(piece.base).numel()) for piece in pieces) for pieces in groups)
        self._first_tiles = [*accumulate(tiles, initial=0)]
        self.tiles = self._first_tiles[-1]
        device = next((piece.new.device for pieces in groups for piece in pieces), None)
        self.words = torch.zeros(1, dtype=torch.int64, device=device)
        self._sums = torch.zeros(SUMS, dtype=torch.int64, device=device)
        self._counts = torch.zeros(table_bytes(self.tiles), dtype=torch.uint8, device=device)
        self._noted: dict[int, torch.Tensor] = {}  # on a CPU, by tile: the places of its words
        self._launches: Any = None
        if device is not None and device.type == "cuda":
            from weightsync.kernels.changed_words_triton import FindLaunches

            self._launches = FindLaunches(groups)

    def compare(self, group: int, sample: int) -> None:
        """Note the changed words of a group, and make the bases equal.

        sample: the number of the sample, `WHOLE`, or `NONE`.
        """
        if group == 0:
            self.words.zero_()
            self._sums.zero_()
        if self._launches is not None:
            self._launches.compare(group, self._counts, self.words, self._sums, sample)
            return
        tile = self._first_tiles[group]
        for new, base in self._groups[group]:
            fresh, old = _words(new.to(base.dtype)), _words(base)
            for these, those in zip(fresh.split(TILE), old.split(TILE), strict=True):
                at, self._counts[tile * GROUPS :][:GROUPS] = _note(these, those)
                self._noted[tile] = at
                self.words += len(at)
                if sample in (WHOLE, tile % SAMPLES):
                    self._sums[0] += _checksum(tile, torch.arange(len(these)), _unsigned(these))
                tile += 1
            old.copy_(fresh)

    def collect(self, group: int, body: torch.Tensor) -> None:
        """Write the noted words of a group into the body. The new values are still those compared.

        body: uint8. Words without room in it are left out.
        """
        begin, end = self._first_tiles[group : group + 2]
        body[begin * GROUPS : end * GROUPS] = self._counts[begin * GROUPS : end * GROUPS]
        if self._launches is not None:
            self._launches.collect(group, body, self._sums)
            return
        start = table_bytes(self.tiles) + 3 * (int(self.words) - sum(len(self._noted[n]) for n in range(begin, end)))
        split = [these for new, base in self._groups[group] for these in _words(new.to(base.dtype)).split(TILE)]
        for tile, these in enumerate(split, begin):
            at = self._noted[tile]
            value, size = _unsigned(these[at]), 3 * len(at)
            if start + size <= body.numel():
                body[start:][:size] = torch.cat([at % GROUP, value & 0xFF, value >> 8]).to(torch.uint8)
            self._sums[0] += _checksum(tile, at, value + 1)
            start += size

    def checksum(self) -> torch.Tensor:
        """Return the checksum, once all groups are collected. Its low bits count."""
        return self._sums.sum()


class ChangeWriter:
    """The check and the writing of one body, into memory with the bytes of the pieces.

    words: the number of words of each piece.
    regions: of the pieces. They cover each word once.
    """

    def __init__(self, words: Sequence[int], regions: Sequence[Region]) -> None:
        self._first_tiles = [*accumulate(map(tiles_of, words), initial=0)]
        self.tiles = self._first_tiles[-1]
        self._regions = regions
        self._launches: Any = None
        if regions and regions[0].memory.is_cuda:
            from weightsync.kernels.changed_words_triton import WriteLaunch

            self._launches = WriteLaunch(self._first_tiles, regions)

    def check(self, body: torch.Tensor, ends: torch.Tensor, sample: int) -> torch.Tensor:
        """Return an int64 tensor: the checksum of the body over the memory as it is, and the number of changed words.

        On a GPU the work is queued on the current stream.

        ends: of the body.
        """
        sums = torch.zeros(SUMS, dtype=torch.int64, device=body.device)
        self._run(body, ends, sums, sample, writes=False)
        return torch.stack([sums.sum(), ends[-1]])

    def write(self, body: torch.Tensor, ends: torch.Tensor) -> None:
        """Write the changed words. On a GPU the work is queued on the current stream. `ends` are the body's."""
        self._run(body, ends, torch.zeros(SUMS, dtype=torch.int64, device=body.device), NONE, writes=True)

    def ends(self, body: torch.Tensor) -> torch.Tensor:
        """Return for each tile the number of words in the body up to its end."""
        counts = body[: table_bytes(self.tiles)].view(-1, GROUPS)
        return (counts.sum(1) + (counts == GROUP - 1).sum(1)).cumsum(0)

    def _run(self, body: torch.Tensor, ends: torch.Tensor, sums: torch.Tensor, sample: int, writes: bool) -> None:
        if self._launches is not None:
            self._launches.run(body, ends, sums, sample, writes)
            return
        for region in self._regions:
            memory, begin = _words(region.memory), self._first_tiles[region.piece]
            for tile in range(begin + region.first // TILE, begin + -(-region.end // TILE)):
                at, new = _read(body, tile, self.tiles, int(ends[tile]))
                first = (tile - begin) * TILE - region.first  # of the tile, in the region
                inside = (at + first >= 0) & (at + first < memory.numel())
                at, new = at[inside], new[inside]
                if writes:
                    memory[at + first] = new
                    continue
                sums[0] += _checksum(tile, at, _unsigned(new) + 1)
                if sample in (WHOLE, tile % SAMPLES):
                    whole = torch.arange(max(-first, 0), min(TILE, memory.numel() - first))
                    sums[0] += _checksum(tile, whole, _unsigned(memory[whole + first]))
                    sums[0] += _checksum(tile, at, _unsigned(new) - _unsigned(memory[at + first]))


def _note(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of a tile's words that come into the body, and the counts of its groups."""
    comes = torch.zeros(TILE, dtype=torch.bool)
    comes[: len(new)] = new != old
    groups = comes.view(GROUPS, GROUP)
    groups[groups.sum(1) >= GROUP - 1] = True
    return comes.nonzero().view(-1), groups.sum(1).clamp(max=GROUP - 1).to(torch.uint8)


def _read(body: torch.Tensor, tile: int, tiles: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions in a tile and the new words. Return none if they do not lie in the body."""
    counts = body[tile * GROUPS :][:GROUPS].long()
    counts += counts == GROUP - 1
    count, words = int(counts.sum()), body[table_bytes(tiles) :]
    if 3 * end > words.numel():
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int16)
    places, low, high = words[3 * (end - count) :][: 3 * count].long().view(3, count)
    return torch.arange(GROUPS).repeat_interleave(counts) * GROUP + places, (low | high << 8).to(torch.int16)


def _checksum(tile: int, at: torch.Tensor, values: torch.Tensor) -> int:
    mixed = at * STEP_OF_PLACE & CHECKSUM
    weight = ((mixed ^ (mixed >> 15)) * MIX & CHECKSUM) | 1
    total = int((values * weight & 0xFFFFFFFF).sum()) & 0xFFFFFFFF
    return total * (tile * GOLDEN | 1) & CHECKSUM


def _words(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(-1).view(torch.int16)


def _unsigned(words: torch.Tensor) -> torch.Tensor:
    return words.long() & 0xFFFF
