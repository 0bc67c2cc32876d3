"""The digest notices what a wrong copy does to bytes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ProtocolError
from weightsync.kernels.digest import PARTS, WHOLE, Digests, digest

BLOCK_WORDS = 1 << 16
BLOCKS_AT_ONCE = 256
MASK = (1 << 64) - 1
GOLDEN, STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def weight(index: int) -> int:
    """The weight of a word by its number in its block, in Python's integers."""
    mixed = index * GOLDEN & MASK
    mixed ^= ((mixed >> 29) | (MASK << 35 if mixed >> 63 else 0)) & MASK  # an arithmetic shift
    return mixed * STEP & MASK | 1


def reference(data: bytes) -> int:
    words = len(data) // 8
    total = 0
    for number in range(words):
        block, index = divmod(number, BLOCK_WORDS)
        word = int.from_bytes(data[number * 8 : number * 8 + 8], "little")
        total += word * weight(index) * pow(STEP, block, 1 << 64)
    total += int.from_bytes(data[words * 8 :], "little") * ((words * 2 + 1) * GOLDEN | 1)
    return total & MASK


@given(st.binary(max_size=200))
def test_it_is_what_plain_python_computes(data):
    assert digest(tensor(data)) == reference(data)


def test_it_is_what_plain_python_computes_over_several_blocks():
    data = noise(8 * (2 * BLOCK_WORDS + 3) + 5)
    assert digest(data) == reference(bytes(data.tolist()))


@pytest.mark.parametrize("words", [BLOCK_WORDS * BLOCKS_AT_ONCE - 1, BLOCK_WORDS * (BLOCKS_AT_ONCE + 1) + 1])
def test_large_data_is_the_sum_of_its_parts(words):
    """Zeros before a part only choose its weights, so two parts can be looked at alone."""
    data = torch.zeros(8 * words, dtype=torch.uint8)
    data[800:808], data[-8:] = 3, 5
    first, last = int.from_bytes(b"\x03" * 8, "little"), int.from_bytes(b"\x05" * 8, "little")
    block, index = divmod(words - 1, BLOCK_WORDS)
    expected = first * weight(100) + last * weight(index) * pow(STEP, block, 1 << 64)
    assert digest(data) == expected & MASK


def test_values_that_must_never_change():
    """Trainer and engine may have different versions of this package."""
    assert digest(tensor(b"")) == 0
    assert digest(tensor(b"\x01")) == GOLDEN | 1
    assert digest(tensor(bytes(range(32)))) == 0x059182B29D51AA40
    assert digest(torch.arange(100_003, dtype=torch.int64).to(torch.uint8)) == 0x5BF61D80DDD4B2A0


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1001])
def test_a_view_at_any_address_has_the_digest_of_its_bytes(start, length):
    data = noise(1024)
    assert digest(data[start : start + length]) == digest(data[start : start + length].clone())


@pytest.mark.parametrize("start", range(9))
def test_a_view_of_memory_that_is_not_aligned_itself(start):
    """The address is then a multiple of 8 where the offset in the storage is not."""
    whole = noise(1024)
    data = torch.frombuffer(bytearray(bytes(whole.tolist())), dtype=torch.uint8, offset=4)
    assert digest(data[start : start + 801]) == digest(whole[4 + start : 4 + start + 801])


@given(st.binary(min_size=1, max_size=300), st.data())
def test_no_single_wrong_word_goes_unnoticed(data, draw):
    at = draw.draw(st.integers(0, len(data) - 1))
    wrong = draw.draw(st.integers(0, 255).filter(lambda value: value != data[at]))
    assert digest(tensor(data)) != digest(tensor(data[:at] + bytes([wrong]) + data[at + 1 :]))


def test_every_single_bit_counts():
    data = noise(8 * 40 + 3)
    right = digest(data)
    for at in range(data.numel()):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert digest(data) != right
            data[at] ^= 1 << bit
    assert digest(data) == right


@pytest.mark.parametrize("nbytes", [2, 8, 64, 256, 4096, 8 * BLOCK_WORDS])
def test_swapped_blocks_are_noticed(nbytes):
    data = noise(4 * nbytes)
    swapped = torch.cat([data[nbytes : 2 * nbytes], data[:nbytes], data[2 * nbytes :]])
    assert digest(swapped) != digest(data)
    apart = torch.cat([data[3 * nbytes :], data[nbytes : 3 * nbytes], data[:nbytes]])
    assert digest(apart) != digest(data)


@pytest.mark.parametrize("by", [1, 2, 3, 8, 16, 255, 4096])
def test_shifted_bytes_are_noticed(by):
    data = noise(20_000)
    assert digest(data.roll(by)) != digest(data)
    assert digest(torch.cat([torch.zeros(by, dtype=torch.uint8), data[:-by]])) != digest(data)


@pytest.mark.parametrize("nbytes", [8, 256, 4096, 8 * BLOCK_WORDS])
def test_a_repeated_and_a_stale_block_are_noticed(nbytes):
    data = noise(3 * nbytes)
    repeated = data.clone()
    repeated[nbytes : 2 * nbytes] = data[:nbytes]
    assert digest(repeated) != digest(data)
    stale = data.clone()
    stale[nbytes : 2 * nbytes] = noise(nbytes, seed=1)
    assert digest(stale) != digest(data)


def test_permuted_rows_of_weights_are_noticed():
    """Real values: bfloat16 of one scale, of which many bits are alike."""
    weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
    found = set()
    shuffle = random.Random(0)
    for _ in range(200):
        rows = list(range(64))
        a, b = shuffle.sample(rows, 2)
        rows[a], rows[b] = rows[b], rows[a]
        found.add(digest(weights[rows].view(torch.uint8).flatten()))
    found.discard(digest(weights.view(torch.uint8).flatten()))
    assert len(found) > 190  # a pair may be drawn twice


PART_BYTES = 1 << 16


@given(st.integers(0, 2 * PARTS * PART_BYTES + 99), st.integers(1, 255))
def test_each_byte_of_a_whole_mib_is_in_one_part_and_the_rest_in_all(at: int, change: int) -> None:
    data = noise(2 * PARTS * PART_BYTES + 100)
    before = [digest(data, part) for part in range(PARTS)]
    data[at] ^= change
    noticed = [part for part in range(PARTS) if digest(data, part) != before[part]]
    expected = [at // PART_BYTES % PARTS] if at < 2 * PARTS * PART_BYTES else [*range(PARTS)]
    assert noticed == expected


def test_a_part_is_digested_as_if_it_were_all() -> None:
    data = noise(2 * PARTS * PART_BYTES + 5)
    first, second = (data[start + 3 * PART_BYTES :][:PART_BYTES] for start in (0, PARTS * PART_BYTES))
    assert digest(data, 3) == digest(torch.cat([first, second, data[-5:]]))
    assert digest(data, WHOLE) == digest(data)
    with pytest.raises(ProtocolError, match="part 16"):
        digest(data, PARTS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_many_at_once_are_as_each_alone_on_a_cpu(device: str, start: int) -> None:
    sizes = [0, 5, 8, 4096, 8 * (BLOCK_WORDS + 3) + 5, PARTS * PART_BYTES, 3 * PARTS * PART_BYTES + 70_007, 9]
    wholes = [noise(start + size, seed) for seed, size in enumerate(sizes)]
    digests = Digests([whole.to(device)[start:] for whole in wholes])
    for part in (WHOLE, 0, 7, PARTS - 1):
        expected = [digest(whole[start:], part) for whole in wholes]
        assert digests.of(part) == expected
        assert [digest(whole.to(device)[start:], part) for whole in wholes] == expected
    with pytest.raises(ProtocolError, match="part 16"):
        digests.of(PARTS)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("part", [WHOLE, 7])
def test_what_is_begun_is_of_what_a_gpu_finds_then(part: int) -> None:
    old, new = noise(PARTS * PART_BYTES + 5, 1), noise(PARTS * PART_BYTES + 5, 2)
    data = old.cuda()
    digests = Digests([data])
    digests.begin(part)
    data.copy_(new)
    assert digests.of(part) == [digest(old, part)]
    assert digests.of(part) == [digest(new, part)]
    digests.begin(part)
    assert digests.of(3) == [digest(new, 3)], "begun in vain"


@pytest.mark.gpu(1)
def test_a_gpu_takes_no_scratch_memory() -> None:
    data = noise(1 << 28).cuda()
    digests = Digests([data])
    digests.of(WHOLE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    digests.of(WHOLE)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
