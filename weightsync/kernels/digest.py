"""A digest of bytes that notices the damage of a wrong plan: shifted, swapped, repeated or stale blocks.

Not cryptographic. The bytes are read as 64-bit words w[0], w[1], ... The digest is sum(w[i] * k[i]) modulo 2**64. Every
weight k[i] is odd, so a single wrong word always changes the digest. k[i] depends on i, so the order of words counts.
The order of the additions does not, so a CPU and a GPU agree to the bit.

A digest of all bytes takes a CPU longer than a copy, so there are also samples. A sample takes the same share of each
whole MiB, and all bytes after the last whole MiB. Its digest is the sum over these words alone.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from weightsync.errors import ProtocolError

WHOLE = -1
"""The sample number that stands for all bytes."""
SAMPLES = 16
"""The number of samples. Each of samples 0 to 15 has 64 KiB of each MiB."""
MIB = 1 << 20
_BLOCK_BYTES = 1 << 19
_BLOCK_WORDS = _BLOCK_BYTES // 8
GOLDEN = 0x9E3779B97F4A7C15
STEP = 0xD1B54A32D192ED03
MASK = (1 << 64) - 1


def share(sample: int) -> tuple[int, int]:
    """Return (first byte, number of bytes) that a sample takes of each whole MiB.

    Raises:
        ProtocolError: there is no such sample.
    """
    if sample == WHOLE:
        return 0, MIB
    if 0 <= sample < SAMPLES:
        return sample * (MIB // SAMPLES), MIB // SAMPLES
    raise ProtocolError(f"a digest of sample {sample}; samples go from {WHOLE} to {SAMPLES - 1}")


def digest(data: torch.Tensor, sample: int = WHOLE) -> int:
    """Return the digest of a contiguous 1-D uint8 tensor, or of a sample of it, as an unsigned 64-bit number.

    The last word is padded with zeros.
    """
    if data.is_cuda:
        return Digests([data]).of(sample)[0]
    first, nbytes = share(sample)
    nwords, tail_bytes = divmod(data.numel(), 8)
    blocks = -(-data.numel() // _BLOCK_BYTES)
    total, done = 0, 0
    if nbytes < MIB <= data.numel():
        done = data.numel() // MIB * MIB
        weights = _weights()[first % _BLOCK_BYTES // 8 :][: nbytes // 8]
        scales = _scales(blocks)[first // _BLOCK_BYTES : done // _BLOCK_BYTES : MIB // _BLOCK_BYTES]
        total += _sum(data[:done].view(-1, MIB)[:, first : first + nbytes], weights, scales)
    whole = data.numel() // _BLOCK_BYTES * _BLOCK_BYTES
    if whole > done:
        rows = data[done:whole].view(-1, _BLOCK_BYTES)
        total += _sum(rows, _weights(), _scales(blocks)[done // _BLOCK_BYTES :][: len(rows)])
    if last := nwords * 8 - whole:
        total += _sum(data[whole : whole + last].view(1, -1), _weights()[: last // 8], _scales(blocks)[-1:])
    tail = int.from_bytes(bytes(data[nwords * 8 :].tolist()), "little") if tail_bytes else 0
    return (total + tail * ((nwords * 2 + 1) * GOLDEN | 1)) & MASK


class Digests:
    """The digests of many contiguous 1-D uint8 tensors, the runs. The tensors must keep their addresses.

    groups: the runs, in groups to be digested at different times. All groups share one table.
    of_samples: whether samples are asked for, not just all bytes.
    """

    def __init__(self, *groups: Sequence[torch.Tensor], of_samples: bool = True) -> None:
        self._runs = [run for group in groups for run in group]
        ends = [*accumulate(map(len, groups), initial=0)]
        self._groups = [*map(range, ends, ends[1:])]
        devices = [run.device for run in self._runs]
        # The numbers of the runs on each device.
        self._numbers = {one: [n for n, own in enumerate(devices) if own == one] for one in dict.fromkeys(devices)}
        self._launches: dict[tuple[torch.device, int], Any] = {}  # by device, and by bytes of each MiB
        for device in self._numbers:
            if device.type == "cuda":  # prepare now: at the first use, copying the table would wait for the stream
                from weightsync.kernels.digest_triton import Launches

                for nbytes in (MIB, MIB // SAMPLES)[: 1 + of_samples]:
                    self._launches[device, nbytes] = Launches(self._on(device), nbytes)

    def of(self, sample: int) -> list[int]:
        """Return `digest(run, sample)` of each run. Runs may be on several devices. Waits for their current streams."""
        return self.begin(sample)()

    def begin(self, sample: int) -> Callable[[], list[int]]:
        """Queue the digests of runs on GPUs on their current streams, and make the others. Return the rest of `of`."""
        outs = {
            device: torch.empty(len(own), dtype=torch.int64, device=device) for device, own in self._numbers.items()
        }
        for device, out in outs.items():
            self._write(self._on(device), range(len(out)), sample, out, 0)

        def finish() -> list[int]:
            found = [0] * len(self._runs)
            for device, out in outs.items():
                for number, value in zip(self._numbers[device], out.tolist(), strict=True):
                    found[number] = value & MASK
            return found

        return finish

    def write(self, sample: int, out: torch.Tensor, group: int = 0, seed: int = 0) -> None:
        """Write `digest(run, sample)` plus `seed`, modulo 2**64, of each run of a group, in order, into `out`.

        `out` is an int64 tensor on the device of all of the group's runs. On a GPU the work is queued on the current
        stream without waiting.
        """
        share(sample)
        numbers = self._groups[group]
        runs = [self._runs[number] for number in numbers]
        devices = {out.device, *(run.device for run in runs)}
        if len(devices) > 1 or out.shape != (len(runs),) or out.dtype != torch.int64:
            raise ValueError(
                f"{len(runs)} digests, of runs on {sorted({str(run.device) for run in runs})}, into {out.dtype} of "
                f"shape {tuple(out.shape)} on {out.device}; expected int64, one for each run, all on one device"
            )
        if runs:
            first = bisect_left(self._numbers[out.device], numbers.start)
            self._write(runs, range(first, first + len(runs)), sample, out, seed)

    def compare(self, sample: int, expected: torch.Tensor, group: int = 0, seed: int = 0) -> torch.Tensor:
        """Return a bool for each run of a group: True if its digest differs from its number in `expected`.

        `expected` is as `write` wrote it with this seed. On a GPU the work is queued on the current stream without
        waiting.
        """
        found = torch.empty_like(expected)
        self.write(sample, found, group, seed)
        return found != expected

    def _write(self, runs: Sequence[torch.Tensor], numbers: range, sample: int, out: torch.Tensor, seed: int) -> None:
        """Write the digests of these runs, each plus `seed`. `numbers` are theirs among the runs on the device."""
        first, nbytes = share(sample)
        if out.device.type == "cpu":
            out.copy_(torch.tensor([signed(digest(run, sample) + seed & MASK) for run in runs], dtype=torch.int64))
        else:
            self._launches[out.device, nbytes].run(numbers, first, out, signed(seed & MASK))

    def _on(self, device: torch.device) -> list[torch.Tensor]:
        return [self._runs[number] for number in self._numbers[device]]


def _sum(rows: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor) -> int:
    """Return the sum of all words of `rows`, each times its column's weight and its row's scale."""
    if rows.data_ptr() % 8 or rows.storage_offset() % 8:
        rows = rows.clone()  # torch views bytes as words only at whole words of a storage
    return int((torch.mv(rows.view(torch.int64), weights) * scales).sum())


@functools.cache
def _weights() -> torch.Tensor:
    """Return the weight of each word within a block."""
    index = torch.arange(_BLOCK_WORDS, dtype=torch.int64)
    mixed = index * signed(GOLDEN)
    mixed = (mixed ^ (mixed >> 29)) * signed(STEP)
    return mixed | 1


@functools.lru_cache(maxsize=256)
def _scales(count: int) -> torch.Tensor:
    """Return the scales of the first blocks: powers of an odd number. They are odd and repeat only after very many."""
    values, power = [], 1
    for _ in range(count):
        values.append(signed(power))
        power = power * STEP & MASK
    return torch.tensor(values, dtype=torch.int64)


def signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value
