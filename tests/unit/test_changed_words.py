"""Changed words: found in pieces, written into regions, proven by a checksum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from weightsync.kernels.changed_words import (
    CHECKSUM,
    GROUP,
    GROUPS,
    NONE,
    TILE,
    ChangeFinder,
    ChangeWriter,
    Piece,
    Region,
    can_compare,
    table_bytes,
    tiles_of,
    words_of,
)
from weightsync.kernels.digest import SAMPLES, WHOLE

WORDS = (10_000, 512, 5000, TILE, 6, 3 * GROUP - 2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
FLOAT32 = (2, 4)
"""The pieces whose new values are float32."""


def noise(words: int, seed: int) -> torch.Tensor:
    return torch.randn(words, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def some_pieces(share: float, device: str) -> tuple[list[Piece], list[torch.Tensor]]:
    """Return pieces of which this share of the words has changed, and copies of their bases."""
    pieces = []
    for number, words in enumerate(WORDS):
        base = noise(words, number)
        draw = torch.Generator().manual_seed(100 + number)
        new = base.clone()
        new[torch.randperm(words, generator=draw)[: math.ceil(share * words)]] += 8
        new = new.float() if number in FLOAT32 else new
        pieces.append(Piece(new.to(device), base.to(device)))
    return pieces, [piece.base.clone() for piece in pieces]


def regions_of(memory: Sequence[torch.Tensor]) -> list[Region]:
    """Return two regions of each piece, cut in the middle of a tile."""
    cuts = [(number, cut, tensor) for number, tensor in enumerate(memory) for cut in [len(tensor) // 3]]
    halves = [(number, span, tensor) for number, cut, tensor in cuts for span in ((0, cut), (cut, len(tensor)))]
    return [Region(n, first, end, own[first:end].view(torch.uint8)) for n, (first, end), own in halves if end > first]


def check_all(
    share: float, sample: int, find: Callable[..., Any] | None = None, write: Any = None, device: str = "cpu"
) -> int:
    """Find and write the changed words of some pieces, by launches if they are given. Return the bytes of the body."""
    pieces, memory = some_pieces(share, device)
    groups = [pieces[:2], pieces[2:]]
    finder = ChangeFinder(*groups)
    writer = ChangeWriter(WORDS, regions := regions_of(memory))
    if find is not None:
        finder._launches, writer._launches = find(groups), write(writer._first_tiles, regions)
    body = torch.full((table_bytes(finder.tiles) + 3 * TILE * finder.tiles,), 7, dtype=torch.uint8, device=device)
    for group in range(2):
        finder.find(group, body, sample)
    nbytes, checksum = 3 * int(finder.words), int(finder.checksum())
    body = body[: table_bytes(finder.tiles) + nbytes]
    assert (int(writer.check(body, sample)) ^ checksum) & CHECKSUM == 0
    writer.write(body)
    for piece, tensor in zip(pieces, memory, strict=True):
        assert torch.equal(piece.new.bfloat16().view(torch.int16), tensor.view(torch.int16))
        assert torch.equal(piece.base.view(torch.int16), tensor.view(torch.int16))
    return nbytes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("sample", [NONE, WHOLE, 0, 1])
def test_changed_words_are_found_and_written(share: float, sample: int, device: str):
    nbytes = check_all(share, sample, device=device)
    changed = sum(math.ceil(share * words) for words in WORDS)
    assert nbytes >= 3 * changed
    assert share == 1.0 or nbytes <= 3 * (changed + (changed and sum(map(tiles_of, WORDS))))


def found_in(new: torch.Tensor, base: torch.Tensor, sample: int) -> tuple[torch.Tensor, int]:
    finder = ChangeFinder([Piece(new, base)])
    body = torch.zeros(table_bytes(finder.tiles) + 3 * len(new), dtype=torch.uint8)
    finder.find(0, body, sample)
    return body[: table_bytes(finder.tiles) + 3 * int(finder.words)], int(finder.checksum())


def test_a_damaged_body_has_another_checksum():
    base = noise(3 * TILE, 1)
    new = base.clone()
    new[::128] += 1  # an even number in each tile, so that all bytes have a meaning
    memory = base.clone()
    body, checksum = found_in(new, base, 5)  # the sample of no tile
    writer = ChangeWriter([len(memory)], [Region(0, 0, len(memory), memory.view(torch.uint8))])
    for at in range(len(body)):
        damaged = body.clone()
        damaged[at] += 1
        assert (int(writer.check(damaged, 5)) ^ checksum) & CHECKSUM
    assert torch.equal(memory, noise(3 * TILE, 1))


def hostile_bodies(body: torch.Tensor, tiles: int) -> list[torch.Tensor]:
    """Return bodies with impossible tables, or with fewer bytes than their tables say."""
    rest = (len(body) - table_bytes(tiles)) // 3
    found = [body[: table_bytes(tiles)], body[: table_bytes(tiles) + 1], body[:-1]]
    for start in (1, -2, -(1 << 63), 1 << 62, (1 << 63) - 2, rest, rest + rest % 2, 0):
        found.append(body.clone())
        found[-1][GROUPS * tiles : table_bytes(tiles)].view(torch.int64).fill_(start)
    for count in (0, 1, 254, 255):
        found.append(body.clone())
        found[-1][: GROUPS * tiles] = count
    draw = torch.Generator().manual_seed(6)
    noise = torch.randint(0, 256, body.shape, generator=draw, dtype=torch.uint8)
    found.append(torch.cat([body[: table_bytes(tiles)], noise[table_bytes(tiles) :]]))  # also behind a piece's end
    return [*found, noise]


def check_hostile(write: Any = None) -> int:
    """Check and write hostile bodies, by launches if they are given. Return the number of bodies."""
    margin, base = TILE, noise(2 * TILE + 1002, 7)
    new = base.clone()
    new[::5] += 1
    memory = torch.full((len(base) + 2 * margin,), 3, dtype=torch.bfloat16)
    own = memory[margin:-margin]
    regions = [Region(0, first, end, own[first:end].view(torch.uint8)) for first, end in ((0, 9000), (9000, len(own)))]
    writer, plain = ChangeWriter([len(own)], regions), ChangeWriter([len(own)], regions)
    if write is not None:
        writer._launches = write(writer._first_tiles, regions)
    body, checksum = found_in(new, base.clone(), WHOLE)
    bodies = hostile_bodies(body, writer.tiles)
    for hostile in bodies:
        own.copy_(base)
        found = int(writer.check(hostile, WHOLE))
        assert (found ^ checksum) & CHECKSUM
        assert (int(writer.check(hostile, NONE)) ^ int(plain.check(hostile, NONE))) & CHECKSUM == 0
        writer.write(hostile)
        assert (memory[:margin] == 3).all()
        assert (memory[-margin:] == 3).all()
    return len(bodies)


def test_hostile_bodies_are_found_and_write_nowhere_else():
    assert check_hostile() == 17


@pytest.mark.parametrize("sample", [WHOLE, *range(SAMPLES)])
def test_a_word_that_differs_here_is_found_in_its_sample(sample: int):
    base = noise(SAMPLES * TILE, 2)
    new, memory = base.clone(), base.clone()
    new[5] += 1
    memory[3 * TILE + 17] += 1
    body, checksum = found_in(new, base, sample)
    writer = ChangeWriter([len(memory)], [Region(0, 0, len(memory), memory.view(torch.uint8))])
    assert bool((int(writer.check(body, sample)) ^ checksum) & CHECKSUM) == (sample in (WHOLE, 3))


def test_changes_without_room_make_the_bases_equal_too():
    base = noise(2 * TILE, 3)
    new = -base
    finder = ChangeFinder([Piece(new, base)])
    body = torch.zeros(table_bytes(2) + 3000, dtype=torch.uint8)
    finder.find(0, body, NONE)
    assert 3 * int(finder.words) > 3000
    assert torch.equal(base, new)
    assert not body[table_bytes(2) :].any()


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_a_body_is_near_the_limit_of_indices_and_values(share: float):
    base = torch.zeros(1 << 20, dtype=torch.bfloat16)
    new = base.clone()
    new[torch.rand(1 << 20, generator=torch.Generator().manual_seed(4)) < share] = 1
    changed = int((new != 0).sum())
    body, _ = found_in(new, base, NONE)
    rate = changed / len(new)
    entropy = -rate * math.log2(rate) - (1 - rate) * math.log2(1 - rate)
    assert len(body) <= 1.2 * (len(new) * entropy + 16 * changed) / 8


def test_pieces_that_can_be_compared_where_they_lie():
    whole = torch.empty(8, 6, dtype=torch.bfloat16)
    assert can_compare(whole, torch.bfloat16)
    assert can_compare(whole.float(), torch.float16)
    assert not can_compare(whole, torch.float16)
    assert not can_compare(whole.t(), torch.bfloat16)
    assert not can_compare(whole.view(-1)[:5], torch.bfloat16)
    assert not can_compare(whole.view(-1)[1:5], torch.bfloat16)
    assert [words_of(nbytes) for nbytes in (0, 1, 4, 6)] == [0, 2, 2, 4]
