"""The changed 16-bit words of memory, found in one pass and written into another copy of it.

A trainer compares its pieces with their bases, the bytes of the last push. It writes the changed words into a body, and
makes the bases equal. A worker has the same bytes, in regions at any addresses, and writes the changed words there.

    body      counts, starts, words
    counts    for each group of 256 words: the number of words in the body, 1 byte. 255 stands for 256
    starts    for each tile of 8192 words: the place of its words, as a number of words, 8 bytes
    words     for each tile: the positions in groups, 1 byte, then the new words. If they are odd in number, each of the
              two ends with room for one more

A tile belongs to one piece. The tiles of a body are numbered through its pieces, in their order. Their words lie in any
order, so that no tile waits for another one. A group with 255 or more changed words has all 256 in the body.

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
START_BYTES = 8
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
    lies_in_pairs = new.is_contiguous() and not (new.numel() * dtype.itemsize % 4 or new.data_ptr() % 4)
    casts = new.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)
    return lies_in_pairs and (new.dtype == dtype or casts)


def words_of(nbytes: int) -> int:
    """Return the words of a piece of so many bytes, its padding to whole pairs of words included."""
    return -(-nbytes // 4) * 2


def tiles_of(words: int) -> int:
    """Return the number of tiles of a piece with so many words."""
    return -(-words // TILE)


def table_bytes(tiles: int) -> int:
    """Return the bytes of a body before its words."""
    return (GROUPS + START_BYTES) * tiles


class ChangeFinder:
    """The comparison of pieces, in groups to be compared at different times. All groups have one body.

    Group 0 is compared first.

    tiles: the number of tiles of all groups.
    words: int64. The number of words with room in the body, of the groups compared since group 0.
    """

    def __init__(self, *groups: Sequence[Piece]) -> None:
        self._groups = groups
        tiles = (sum(tiles_of(_words(piece.base).numel()) for piece in pieces) for pieces in groups)
        self._first_tiles = [*accumulate(tiles, initial=0)]
        self.tiles = self._first_tiles[-1]
        device = next((piece.new.device for pieces in groups for piece in pieces), None)
        self.words = torch.zeros(1, dtype=torch.int64, device=device)
        self._sums = torch.zeros(SUMS, dtype=torch.int64, device=device)
        self._launches: Any = None
        if device is not None and device.type == "cuda":
            from weightsync.kernels.changed_words_triton import FindLaunches

            self._launches = FindLaunches(groups)

    def find(self, group: int, body: torch.Tensor, sample: int) -> None:
        """Write the changed words of a group into the body, and make the bases equal.

        On a GPU the work is queued on the current stream.

        body: uint8, aligned to 8 bytes. Words without room in it are left out.
        sample: the number of the sample, `WHOLE`, or `NONE`.
        """
        if group == 0:
            self.words.zero_()
            self._sums.zero_()
        if self._launches is not None:
            self._launches.run(group, body, self.words, self._sums, sample)
            return
        tile, (counts, starts, words) = self._first_tiles[group], _split(body, self.tiles)
        for new, base in self._groups[group]:
            fresh, old = _words(new.to(base.dtype)), _words(base)
            for these, those in zip(fresh.split(TILE), old.split(TILE), strict=True):
                at, counts[tile] = _note(these, those)
                values, starts[tile] = _unsigned(these), self.words
                if (own := _of_tile(words, int(self.words), len(at))) is not None:
                    own[0].copy_(at % GROUP)
                    own[1].copy_(these[at])
                self.words += len(at) + len(at) % 2
                self._sums[0] += _checksum(tile, at, values[at] + 1)
                if sample in (WHOLE, tile % SAMPLES):
                    self._sums[0] += _checksum(tile, torch.arange(len(these)), values)
                tile += 1
            old.copy_(fresh)

    def checksum(self) -> torch.Tensor:
        """Return the checksum, once all groups are found. Its low bits count."""
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

    def check(self, body: torch.Tensor, sample: int) -> torch.Tensor:
        """Return the checksum of the body over the memory as it is, int64. Its low bits count.

        On a GPU the work is queued on the current stream.

        body: uint8, aligned to 8 bytes, with a table at least. Words that do not lie in it are left out.
        """
        sums = torch.zeros(SUMS, dtype=torch.int64, device=body.device)
        self._run(body, sums, sample, writes=False)
        return sums.sum()

    def write(self, body: torch.Tensor) -> None:
        """Write the changed words. On a GPU the work is queued on the current stream."""
        self._run(body, torch.zeros(SUMS, dtype=torch.int64, device=body.device), NONE, writes=True)

    def _run(self, body: torch.Tensor, sums: torch.Tensor, sample: int, writes: bool) -> None:
        if self._launches is not None:
            self._launches.run(body, sums, sample, writes)
            return
        for region in self._regions:
            memory, begin = _words(region.memory), self._first_tiles[region.piece]
            for tile in range(begin + region.first // TILE, begin + -(-region.end // TILE)):
                at, new = _read(body, tile, self.tiles)
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


def _split(body: torch.Tensor, tiles: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the counts, the starts and the words of a body."""
    counts, starts, words = body.tensor_split([GROUPS * tiles, table_bytes(tiles)])
    return counts.view(-1, GROUPS), starts.view(torch.int64), words


def _of_tile(words: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the positions and the new words of a tile in a body's words, or None if they do not lie there."""
    room = count + count % 2
    if start % 2 or not 0 <= start <= len(words) // 3 - room:
        return None
    first, middle = 3 * start, 3 * start + room
    return words[first : first + count], words[middle : middle + 2 * count].view(torch.int16)


def _note(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of a tile's words that come into the body, and the counts of its groups."""
    comes = torch.zeros(TILE, dtype=torch.bool)
    comes[: len(new)] = new != old
    groups = comes.view(GROUPS, GROUP)
    groups[groups.sum(1) >= GROUP - 1] = True
    return comes.nonzero().view(-1), groups.sum(1).clamp(max=GROUP - 1).to(torch.uint8)


def _read(body: torch.Tensor, tile: int, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions in a tile and the new words. Return none if they do not lie in the body."""
    all_counts, starts, words = _split(body, tiles)
    counts, start = all_counts[tile].long(), int(starts[tile])
    counts += counts == GROUP - 1
    if (own := _of_tile(words, start, int(counts.sum()))) is None:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int16)
    positions, new = own
    return torch.arange(GROUPS).repeat_interleave(counts) * GROUP + positions, new


def _checksum(tile: int, at: torch.Tensor, values: torch.Tensor) -> int:
    mixed = at * STEP_OF_PLACE & CHECKSUM
    weight = ((mixed ^ (mixed >> 15)) * MIX & CHECKSUM) | 1
    total = int((values * weight & 0xFFFFFFFF).sum()) & 0xFFFFFFFF
    return total * (tile * GOLDEN | 1) & CHECKSUM


def _words(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(-1).view(torch.int16)


def _unsigned(words: torch.Tensor) -> torch.Tensor:
    return words.long() & 0xFFFF
