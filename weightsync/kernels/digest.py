"""A digest of bytes that notices what a wrong plan does to them: shifted, swapped, repeated or stale blocks.

Not cryptographic. The bytes are read as 64-bit words w[0], w[1], ...; the digest is sum(w[i] * k[i]) modulo 2**64,
where every weight k[i] is odd (so no single wrong word goes unnoticed) and depends on i (so order counts). Sums may
be taken in any order, so a CPU and a GPU agree to the bit.

It takes a CPU about twice as long as a copy. So there are digests of a sample too: of 64 KiB in each MiB, one of 16
parts, and of what is left beyond the last whole MiB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.errors import ProtocolError

WHOLE = -1
"""In place of a part: all bytes."""
PARTS = 16
PART_BYTES = 1 << 16
_BLOCK_WORDS = 1 << 16
GOLDEN = 0x9E3779B97F4A7C15
STEP = 0xD1B54A32D192ED03
MASK = (1 << 64) - 1


def digest(data: torch.Tensor, part: int = WHOLE) -> int:
    """The digest of a contiguous 1-D uint8 tensor, or of one of `PARTS` samples of it, an unsigned 64-bit number. The
    last word is padded with zeros."""
    if data.is_cuda:
        return Digests([data]).of(part)[0]
    _check(part)
    if part != WHOLE:
        data = _sample(data, part)
    words = data.numel() // 8
    body = data[: words * 8]
    if body.data_ptr() % 8 or body.storage_offset() % 8:
        body = body.clone()  # only whole words of a storage can be viewed as words
    body = body.view(torch.int64)
    whole = words // _BLOCK_WORDS
    sums = torch.mv(body[: whole * _BLOCK_WORDS].view(whole, _BLOCK_WORDS), _weights())
    rest = body[whole * _BLOCK_WORDS :]
    if rest.numel():
        sums = torch.cat([sums, torch.mv(rest[None], _weights()[: rest.numel()])])
    total = (sums * _scales(len(sums))).sum()
    tail = int.from_bytes(bytes(data[words * 8 :].tolist()), "little")
    return (int(total) + tail * ((words * 2 + 1) * GOLDEN | 1)) & MASK


class Digests:
    """Of many contiguous 1-D uint8 tensors, for as long as they stay where they are: those of a GPU at once."""

    def __init__(self, runs: Sequence[torch.Tensor]) -> None:
        self._runs = list(runs)
        self._on_cpu: list[int] = []  # numbers of runs
        self._on_gpu: dict[torch.device, list[int]] = {}
        for number, run in enumerate(self._runs):
            (self._on_gpu.setdefault(run.device, []) if run.is_cuda else self._on_cpu).append(number)
        self._launches: dict[tuple[torch.device, bool], Any] = {}  # by device, and whether of all bytes
        self._begun: int | None = None  # this part is on its way on the GPUs

    def begin(self, part: int) -> None:
        """Let GPUs begin with what `of` of this part, the next to be asked for, will wait for: what the runs hold when
        the current stream comes to it. Returns at once."""
        _check(part)
        for device, numbers in self._on_gpu.items():
            if (device, part == WHOLE) not in self._launches:
                from weightsync.kernels.digest_triton import Launch

                own = [self._runs[number] for number in numbers]
                self._launches[device, part == WHOLE] = Launch(own, sampled=part != WHOLE)
            self._launches[device, part == WHOLE].begin(max(part, 0))
        self._begun = part

    def of(self, part: int) -> list[int]:
        """`digest(run, part)` of each, of what they hold now. On a GPU it waits for the current stream."""
        if self._begun != part:
            self.begin(part)
        self._begun = None
        found = [0] * len(self._runs)
        for number in self._on_cpu:
            found[number] = digest(self._runs[number], part)
        for device, numbers in self._on_gpu.items():
            for number, value in zip(numbers, self._launches[device, part == WHOLE].found(), strict=True):
                found[number] = value
        return found


def warm_up(device: torch.device) -> None:
    """Compile now what the first digest on this device would wait for."""
    if device.type == "cuda":
        from weightsync.kernels import digest_triton

        digest_triton.warm_up(device)


def _check(part: int) -> None:
    if not WHOLE <= part < PARTS:
        raise ProtocolError(f"a digest of part {part}; there are {PARTS}")


def _sample(data: torch.Tensor, part: int) -> torch.Tensor:
    """A copy, of at most 1 MiB and a sixteenth; all of what is less than 1 MiB, without one."""
    whole = data.numel() // (PARTS * PART_BYTES)
    if whole == 0:
        return data
    rows = data[: whole * PARTS * PART_BYTES].view(whole, PARTS, PART_BYTES)
    return torch.cat([rows[:, part].flatten(), data[whole * PARTS * PART_BYTES :]])


@functools.cache
def _weights() -> torch.Tensor:
    """Within a block."""
    index = torch.arange(_BLOCK_WORDS, dtype=torch.int64)
    mixed = index * signed(GOLDEN)
    mixed = (mixed ^ (mixed >> 29)) * signed(STEP)
    return mixed | 1


@functools.lru_cache(maxsize=256)
def _scales(count: int) -> torch.Tensor:
    """Of the first blocks: powers of an odd number, which are odd and do not repeat for long."""
    values, power = [], 1
    for _ in range(count):
        values.append(signed(power))
        power = power * STEP & MASK
    return torch.tensor(values, dtype=torch.int64)


def signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return value - (1 << 64) if value >> 63 else value
