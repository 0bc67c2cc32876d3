"""A difference turns the base into what was encoded, to the bit, and nothing that is spoilt is written."""

from __future__ import annotations

import re
import struct
import zlib
from array import array
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ProtocolError
from weightsync.kernels import delta
from weightsync.kernels.delta import decode, encode

NEVER_DEFLATED = 1e30
WORDS = 3000
"""Of most tests; several blocks of `BLOCK`."""
BLOCK = 512


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with mock.patch.object(delta, "BLOCK_WORDS", BLOCK):
        yield


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def changed(base: torch.Tensor, share: float, seed: int, units: int = 0) -> torch.Tensor:
    """Return `base` with a share of its words at other values, at most `units` away; 0 stands for any values."""
    generator = torch.Generator().manual_seed(seed)
    words = base.clone().view(torch.int16)
    step = torch.randint(-(units or 2**15), (units or 2**15 - 1) + 1, words.shape, generator=generator)
    chosen = torch.rand(words.shape, generator=generator) < share
    return torch.where(chosen, words + step.to(torch.int16), words).view(torch.uint8)


def check(new: torch.Tensor, base: torch.Tensor, bytes_per_s: float = 0.0) -> torch.Tensor | None:
    encoded = encode(new, base, bytes_per_s)
    if encoded is not None:
        assert encoded.numel() < new.numel()
        held = base.clone()
        decode(encoded, held)
        assert torch.equal(held, new)
    return encoded


@given(
    words=st.integers(1, WORDS),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.9, 1.0]),
    units=st.sampled_from([0, 1, 100]),
    seed=st.integers(0, 2**32),
    bytes_per_s=st.sampled_from([0.0, 25e6, NEVER_DEFLATED]),
)
@settings(deadline=None)
def test_any_bytes_come_back(words, share, units, seed, bytes_per_s):
    base = noise(2 * words, seed)
    check(changed(base, share, seed + 1, units), base, bytes_per_s)


def inflated(plane: bytes, nbytes: int) -> bytes:
    return plane if len(plane) == nbytes else zlib.decompress(plane, -15)


def written(encoded: bytes, base: bytes) -> bytes:
    """Apply a difference as docs/internals/wire.md describes it, in plain Python."""
    old = array("H", base)
    starts = range(0, len(old), BLOCK)
    blocks = [old[at : at + BLOCK] for at in starts]
    (*sizes,) = struct.unpack_from("<3q", encoded)
    rows = struct.unpack_from(f"<{len(blocks)}q", encoded, 24)
    at = [24 + 8 * len(blocks)]
    at += [at[0] + sum(sizes[:number]) for number in (1, 2, 3)]
    masks = [-(-len(block) // 8) if row % 2 else row // 2 for row, block in zip(rows, blocks, strict=True)]
    lengths = [sum(masks), sum(row // 2 for row in rows), sum(row // 2 for row in rows)]
    where, low, high = (inflated(encoded[i:j], n) for (i, j), n in zip(pairwise(at), lengths, strict=True))
    value = 0
    for row, block, nbytes in zip(rows, blocks, masks, strict=True):
        own, where = where[:nbytes], where[nbytes:]
        if row % 2:
            places = [8 * number + bit for number, byte in enumerate(own) for bit in range(8) if byte >> bit & 1]
        else:
            places = [sum(own[: number + 1]) + number for number in range(nbytes)]
        for place in places:
            folded = low[value] + 256 * high[value]
            block[place] = (block[place] + (folded // 2 if folded % 2 == 0 else -(folded + 1) // 2)) % 65536
            value += 1
    return b"".join(block.tobytes() for block in blocks)


@given(
    words=st.integers(1, WORDS),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5]),
    units=st.sampled_from([0, 2]),
    bytes_per_s=st.sampled_from([0.0, NEVER_DEFLATED]),
)
@settings(deadline=None, max_examples=50)
def test_it_is_what_the_specification_says(words, share, units, bytes_per_s):
    base = noise(2 * words, words)
    new = changed(base, share, words + 1, units)
    if (encoded := encode(new, base, bytes_per_s)) is not None:
        assert written(bytes(encoded.tolist()), bytes(base.tolist())) == bytes(new.tolist())


@given(st.binary(min_size=2, max_size=200), st.binary(min_size=2, max_size=200))
@settings(deadline=None)
def test_small_changes_anywhere_come_back(old, new):
    nbytes = min(len(old), len(new)) // 2 * 2
    background = noise(2 * WORDS, 1)
    base, after = background.clone(), background.clone()
    base[500 : 500 + nbytes] = torch.tensor(list(old[:nbytes]), dtype=torch.uint8)
    after[500 : 500 + nbytes] = torch.tensor(list(new[:nbytes]), dtype=torch.uint8)
    assert check(after, base) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_a_step_of_any_dtype_comes_back(dtype):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(WORDS, generator=generator, dtype=torch.float64)
    step = 1e-4 * torch.randn(WORDS, generator=generator, dtype=torch.float64)
    base, new = (each.to(dtype).view(torch.uint8) for each in (master, master + step))
    assert check(new, base) is not None


def test_bits_that_compare_equal_and_are_not_come_back():
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")] * 40, dtype=torch.bfloat16)
    other_nans = torch.tensor([0x7FC0, 0x7FC1, -1, 0x7F81, 0x7FFF] * 40, dtype=torch.int16).view(torch.bfloat16)
    for base, new in [(odd, -odd), (odd, other_nans), (other_nans, odd), (other_nans, -other_nans)]:
        check(new.view(torch.uint8), base.view(torch.uint8))


def test_what_has_not_changed_takes_a_head_alone():
    base = noise(2 * WORDS, 0)
    encoded = check(base.clone(), base)
    assert encoded is not None
    assert encoded.numel() == 8 * (3 + -(-WORDS // BLOCK))


@pytest.mark.parametrize("equal", [0, 1, 254, 255, 256, 257, 510, 511])
def test_long_runs_of_equal_words_come_back(equal):
    base = noise(2 * BLOCK, 0)
    new = base.clone()
    new[2 * equal] ^= 1
    encoded = check(new, base, NEVER_DEFLATED)
    assert encoded is not None
    assert encoded.numel() == 8 * 4 + 3 * (1 + equal // 256)


def test_what_is_all_other_bytes_is_not_encoded():
    assert encode(noise(2 * WORDS, 1), noise(2 * WORDS, 2)) is None


def test_planes_of_any_size_are_deflated_where_the_link_is_slow():
    for words in (1 << 12, 1 << 20):
        base = torch.arange(words, dtype=torch.int32).to(torch.int16).view(torch.uint8)
        new = (base.view(torch.int16) + 1).view(torch.uint8)
        slow, fast = (check(new, base, bytes_per_s) for bytes_per_s in (1.0, NEVER_DEFLATED))
        assert fast is None
        assert slow is not None
        assert slow.numel() < words / 20


def test_steps_of_one_unit_shrink_however_many_words_take_them():
    base = noise(2 * WORDS, 0)
    new = (base.view(torch.int16) + torch.randint(0, 2, (WORDS,)).mul(2).sub(1).to(torch.int16)).view(torch.uint8)
    encoded = check(new, base)
    assert encoded is not None
    assert encoded.numel() < new.numel() / 3


@given(
    share=st.sampled_from([0.01, 0.3]),
    bytes_per_s=st.sampled_from([0.0, NEVER_DEFLATED]),
    seed=st.integers(0, 2**32),
    at=st.integers(0, 2**16),
    value=st.integers(0, 255),
)
@settings(deadline=None, max_examples=300)
def test_a_spoilt_difference_writes_nothing_or_words_of_its_base(share, bytes_per_s, seed, at, value):
    base = noise(2 * WORDS, seed)
    encoded = encode(changed(base, share, seed + 1, 3), base, bytes_per_s)
    assert encoded is not None
    encoded[at % encoded.numel()] = value
    guarded = torch.cat([noise(64, 1), base, noise(64, 2)])
    held = guarded[64:-64]
    try:
        decode(encoded, held)
    except ProtocolError:
        assert torch.equal(held, base)
    assert torch.equal(guarded[:64], noise(64, 1))
    assert torch.equal(guarded[-64:], noise(64, 2))


@pytest.mark.parametrize("bytes_per_s", [0.0, NEVER_DEFLATED])
def test_a_difference_that_is_cut_or_goes_on_is_refused(bytes_per_s):
    base = noise(2 * WORDS, 0)
    encoded = encode(changed(base, 0.05, 1, 3), base, bytes_per_s)
    assert encoded is not None
    held = base.clone()
    for other in [*(encoded[:end] for end in range(encoded.numel())), torch.cat([encoded, encoded[:1]])]:
        with pytest.raises(ProtocolError):
            decode(other, held)
        with pytest.raises(ProtocolError):
            decode(other, held[: 2 * BLOCK])
    assert torch.equal(held, base)


def test_a_head_tells_planes_of_more_than_two_gib_apart():
    sizes = [2**31 + 8, 2**31 + 16, 2**32 + 24]
    head = delta._head(sizes, [0])
    encoded = torch.empty(head.numel() + sum(sizes), dtype=torch.uint8)  # mapped, and never touched behind the head
    encoded[: head.numel()] = head
    with pytest.raises(ProtocolError, match=re.escape(f"planes of {sizes} bytes, and room for [0, 0, 0]")):
        decode(encoded, noise(2 * BLOCK, 0))
    with pytest.raises(ProtocolError, match=re.escape(f"a difference of {encoded.numel() - 1} bytes has planes of")):
        decode(encoded[:-1], noise(2 * BLOCK, 0))


def test_a_plane_that_inflates_to_more_than_it_may_is_refused_without_inflating_it():
    bomb = delta._deflate(memoryview(bytes(1 << 24)))
    head = delta._head([0, len(bomb), 0], [2 * BLOCK, *[0] * (WORDS // BLOCK)])
    spoilt = torch.cat([head, torch.frombuffer(bytearray(bomb), dtype=torch.uint8)])
    held = noise(2 * WORDS, 0)
    with pytest.raises(ProtocolError):
        decode(spoilt, held)
    assert torch.equal(held, noise(2 * WORDS, 0))
