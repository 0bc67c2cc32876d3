"""A lossless encoding of bytes of any dtype as the difference from a base that the reader has.

Bytes are read as 16-bit words, in blocks. The changed words of each block are written as three planes: their positions,
and the low and the high bytes of their differences. Positions are either the number of equal words before each changed
word, or a mask of one bit for each word. The shorter form is written. A step of an optimizer changes bfloat16 values by
a few units in the last place, so the planes of differences deflate well. docs/internals/wire.md has the layout.

Pure, for bytes in CPU memory. GPUs find and write changes by `changed_words`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from weightsync.errors import ProtocolError

BLOCK_WORDS = 1 << 20
"""Words of a block. A block bounds the scratch memory to a few times 2 MiB, which a CPU's cache holds."""
_MOST_EQUAL = 255
"""Most equal words before a changed word. After more of them an equal word is written, with the difference 0."""
_PLANES = 3
_TRIED_BYTES = 1 << 16


def encode(new: torch.Tensor, base: torch.Tensor, bytes_per_s: float = 0.0) -> torch.Tensor | None:
    """Return the difference of `new` from `base`, or None if it is not shorter than `new`.

    Both are contiguous 1-D uint8 tensors of the same even size. A plane is deflated if that saves more bytes per second
    than `bytes_per_s`, the speed of the link.
    """
    words, old = (each.view(torch.int16).split(BLOCK_WORDS) for each in (new, base))
    parts = [_changed(these, those) for these, those in zip(words, old, strict=True)]
    differences = torch.cat([part.differences for part in parts]).view(torch.uint8).view(-1, 2)
    planes = [torch.cat([part.positions for part in parts]), *differences.t().contiguous()]
    stored = [_deflated(plane, bytes_per_s) for plane in planes]
    encoded = torch.cat([_head([*map(len, stored)], [part.row for part in parts]), *stored])
    return encoded if encoded.numel() < new.numel() else None


def decode(encoded: torch.Tensor, base: torch.Tensor) -> None:
    """Turn `base` in place into the `new` of the `encode(new, base)` that returned `encoded`.

    Raises `ProtocolError`, before anything is written, if `encode` returns `encoded` for no bytes of this size.
    """
    blocks = base.view(torch.int16).split(BLOCK_WORDS)
    parts = _parse(encoded, [block.numel() for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        if part.differences.numel():
            where = part.where(block.numel())
            block.index_copy_(0, where, block.index_select(0, where) + _signed(part.differences))


class _Block(NamedTuple):
    """The changed words of one block. `differences` are folded: 0, -1, 1, -2 ... become 0, 1, 2, 3 ..."""

    is_mask: bool
    positions: torch.Tensor
    differences: torch.Tensor

    @property
    def row(self) -> int:
        """The number in the head for this block: twice the count of changed words, plus 1 for a mask."""
        return 2 * self.differences.numel() + self.is_mask

    def where(self, words: int) -> torch.Tensor:
        """Return the numbers of the changed words in a block of `words`."""
        if self.is_mask:
            return _unpacked(self.positions)[:words].nonzero().view(-1)
        return (self.positions.to(torch.int64) + 1).cumsum(0) - 1

    def fits(self, words: int) -> bool:
        """Return whether there is one position for each difference, and all positions lie in a block of `words`."""
        count = self.differences.numel()
        if not self.is_mask:
            return int(self.positions.sum()) + count <= words
        bits = _unpacked(self.positions)
        return int(bits.sum()) == count and not bits[words:].any()


def _changed(words: torch.Tensor, old: torch.Tensor) -> _Block:
    difference = words - old
    mask = difference != 0
    where = mask.nonzero().view(-1)
    changed = _folded(difference.index_select(0, where))
    equal = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
    fillers = equal >> 8
    count = where.numel() + int(fillers.sum())
    if count > -(-words.numel() // 8):
        return _Block(True, _packed(mask), changed)
    if count == where.numel():
        return _Block(False, equal.to(torch.uint8), changed)
    at = (fillers + 1).cumsum(0) - 1
    positions = torch.full((count,), _MOST_EQUAL, dtype=torch.uint8)
    positions[at] = (equal & 0xFF).to(torch.uint8)
    differences = torch.zeros(count, dtype=torch.int16)
    differences[at] = changed
    return _Block(False, positions, differences)


def _folded(differences: torch.Tensor) -> torch.Tensor:
    """Return signed words folded into unsigned words: a small magnitude of either sign becomes a small number."""
    return (differences << 1) ^ (differences >> 15)


def _signed(folded: torch.Tensor) -> torch.Tensor:
    return ((folded >> 1) & 0x7FFF) ^ -(folded & 1)


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """Return one bit for each bool, padded to whole bytes. The first bool is the lowest bit."""
    return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))


def _unpacked(bits: torch.Tensor) -> torch.Tensor:
    """Return one byte for each bit."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little"))


def _deflated(plane: torch.Tensor, bytes_per_s: float) -> torch.Tensor:
    """Return the plane deflated if that pays, judged by its first bytes. Return it unchanged otherwise."""
    if not plane.numel():
        return plane
    data = plane.numpy().data
    first = data[:_TRIED_BYTES]
    started = time.thread_time()
    deflated = _deflate(first)
    if len(first) - len(deflated) <= (time.thread_time() - started) * bytes_per_s:
        return plane
    if len(data) > len(first):
        deflated = _deflate(data)
    return torch.frombuffer(bytearray(deflated), dtype=torch.uint8) if len(deflated) < len(data) else plane


def _deflate(data: memoryview) -> bytes:
    # The planes repeat only as runs. A search for other matches takes longer and ends in longer codes.
    deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return deflater.compress(data) + deflater.flush()


def _inflated(stored: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return a plane of `nbytes`. A plane that is stored in exactly `nbytes` is not deflated."""
    if stored.numel() == nbytes:
        return stored
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflater.decompress(stored.numpy().data, nbytes + 1)
    except zlib.error as error:
        raise ProtocolError(f"a plane of a difference cannot be inflated: {error}") from None
    if len(data) != nbytes or not inflater.eof or inflater.unused_data:
        raise ProtocolError(f"a plane of a difference does not inflate to {nbytes} bytes")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _head(sizes: list[int], rows: list[int]) -> torch.Tensor:
    return torch.tensor([*sizes, *rows]).view(torch.uint8)


def _parse(encoded: torch.Tensor, blocks: list[int]) -> Iterator[_Block]:
    """Return the blocks of a difference. Raise `ProtocolError` if any number in it is out of bounds."""
    nhead = 8 * (_PLANES + len(blocks))
    if encoded.numel() < nhead:
        raise ProtocolError(f"a difference of {encoded.numel()} bytes has no room for the head of {nhead}")
    numbers = encoded[:nhead].clone().view(torch.int64).tolist()
    sizes, rows = numbers[:_PLANES], numbers[_PLANES:]
    counts = [row >> 1 for row in rows]
    if any(not 0 <= count <= words for count, words in zip(counts, blocks, strict=True)):
        raise ProtocolError("a difference has more changed words in a block than the block has words")
    if min(sizes) < 0 or nhead + sum(sizes) != encoded.numel():
        raise ProtocolError(f"a difference of {encoded.numel()} bytes has planes of {sizes} bytes")
    at = [-(-words // 8) if row & 1 else row >> 1 for row, words in zip(rows, blocks, strict=True)]
    lengths = [sum(at), sum(counts), sum(counts)]
    if any(size > length for size, length in zip(sizes, lengths, strict=True)):
        raise ProtocolError(f"a difference has planes of {sizes} bytes, and room for {lengths}")
    positions, *bytewise = map(_inflated, encoded[nhead:].split(sizes), lengths)
    differences = torch.stack(bytewise, 1).view(torch.int16).view(-1)
    split = zip(rows, positions.split(at), differences.split(counts), strict=True)
    found = [_Block(bool(row & 1), where, words) for row, where, words in split]
    if not all(block.fits(words) for block, words in zip(found, blocks, strict=True)):
        raise ProtocolError("a difference has changed words outside of a block, or not the number in its head")
    return iter(found)
