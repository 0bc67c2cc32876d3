"""The digest notices what a wrong copy does to bytes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ProtocolError
from weightsync.kernels.digest import MIB, SAMPLES, WHOLE, Digests, digest, share

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]

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


@settings(deadline=None)
@given(st.integers(0, 2 * MIB + 99), st.integers(1, 255))
def test_each_byte_of_a_whole_mib_is_in_one_sample_and_the_rest_in_all(at: int, change: int) -> None:
    data = noise(2 * MIB + 100)
    samples = range(SAMPLES)
    before = [digest(data, sample) for sample in samples]
    data[at] ^= change
    noticed = {sample for sample, old in zip(samples, before, strict=True) if digest(data, sample) != old}
    assert noticed == ({at % MIB >> 16} if at < 2 * MIB else {*samples})


@pytest.mark.parametrize("start", [0, 4, 5])
@pytest.mark.parametrize("sample", [0, 3, 11, SAMPLES - 1])
def test_a_sample_is_digested_as_if_all_other_bytes_were_zero(sample: int, start: int) -> None:
    data = noise(start + 3 * MIB + 700_005)[start:]
    alone = torch.zeros_like(data)
    first, nbytes = share(sample)
    for row in range(3):
        alone[row * MIB + first :][:nbytes] = data[row * MIB + first :][:nbytes]
    alone[3 * MIB :] = data[3 * MIB :]
    assert digest(data, sample) == digest(alone)


def test_samples_together_are_all_bytes() -> None:
    assert [share(sample) for sample in range(SAMPLES)] == [(n << 16, 1 << 16) for n in range(16)]


@pytest.mark.parametrize("sample", [WHOLE - 1, SAMPLES])
def test_a_sample_that_does_not_exist_is_refused(sample: int) -> None:
    data = noise(8)
    for refused in (
        lambda: digest(data, sample),
        lambda: Digests([data]).of(sample),
        lambda: Digests([data]).write(sample, torch.empty(1, dtype=torch.int64)),
        lambda: Digests([]).compare(sample, torch.empty(0, dtype=torch.int64)),
    ):
        with pytest.raises(ProtocolError, match=f"sample {sample}; samples go from -1 to 15"):
            refused()


EVERY_KIND = (WHOLE, 0, 7, SAMPLES - 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_many_at_once_are_as_each_alone_on_a_cpu(device: str, start: int) -> None:
    sizes = [0, 5, 8, 4096, 8 * (BLOCK_WORDS + 3) + 5, MIB, 3 * MIB + 70_007, 9]
    wholes = [noise(start + size, seed) for seed, size in enumerate(sizes)]
    digests = Digests([whole.to(device)[start:] for whole in wholes])
    for sample in EVERY_KIND:
        expected = [digest(whole[start:], sample) for whole in wholes]
        assert digests.of(sample) == expected
        assert [digest(whole.to(device)[start:], sample) for whole in wholes] == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 1, GOLDEN * STEP])
@pytest.mark.parametrize("sample", EVERY_KIND)
def test_digests_are_written_where_the_caller_says(device: str, sample: int, seed: int) -> None:
    sizes = [5, MIB + 9, 4096]
    runs = [noise(size, at) for at, size in enumerate(sizes)]
    slot = torch.full((48,), 255, dtype=torch.uint8, device=device)
    Digests([run.to(device) for run in runs]).write(sample, slot.view(torch.int64)[1:4], seed=seed)
    expected = [digest(run, sample) + seed & MASK for run in runs]
    assert [value & MASK for value in slot.view(torch.int64).tolist()] == [MASK, *expected, MASK, MASK]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample", EVERY_KIND)
def test_runs_that_differ_are_told(device: str, sample: int) -> None:
    runs = [noise(size, seed).to(device) for seed, size in enumerate([5, MIB + 9, 4096])]
    digests = Digests(runs)
    expected = torch.empty(len(runs), dtype=torch.int64, device=device)
    digests.write(sample, expected)
    assert digests.compare(sample, expected).tolist() == [False, False, False]
    assert digests.compare(sample, expected, seed=GOLDEN).tolist() == [True, True, True]
    runs[1][share(sample)[0]] ^= 1
    found = digests.compare(sample, expected)
    assert found.device == expected.device
    assert found.tolist() == [False, True, False]
    assert Digests([]).compare(sample, expected[:0]).tolist() == []


@pytest.mark.parametrize(
    "out", [torch.empty(1, dtype=torch.int64), torch.empty(2), torch.empty(2, dtype=torch.int64, device="meta")]
)
def test_digests_are_not_written_where_they_do_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"2 digests, of runs on .'cpu'., into .*; expected int64, one for each run"):
        Digests([noise(5), noise(6)]).write(WHOLE, out)


@pytest.mark.gpu(1)
def test_a_gpu_is_not_waited_for() -> None:
    """The digest is of what the stream's earlier work leaves, and later work does not change it."""
    old, new = noise(MIB + 5, 1), noise(MIB + 5, 2)
    data, out = old.cuda(), torch.empty(2, dtype=torch.int64, device="cuda")
    digests = Digests([data])
    digests.of(7)  # compiled
    newer = new.cuda()  # which waits
    torch.cuda._sleep(200_000_000)
    digests.write(7, out[:1])
    data.copy_(newer)
    differs = digests.compare(7, out[:1])
    digests.write(7, out[1:])
    assert not torch.cuda.current_stream().query()
    assert [value & MASK for value in out.tolist()] == [digest(old, 7), digest(new, 7)]
    assert differs.tolist() == [True]


@pytest.mark.gpu(1)
def test_a_gpu_takes_no_scratch_memory() -> None:
    data = noise(1 << 28).cuda()
    digests = Digests([data])
    digests.of(WHOLE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    digests.of(WHOLE)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
