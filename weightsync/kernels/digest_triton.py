"""The launch of `digest.Digests` on a GPU: the same numbers, of many runs of bytes at once, and no scratch memory.

A program takes 64 KiB, a part of one block, and works out the weights of its words itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from weightsync.kernels.digest import GOLDEN, MASK, PART_BYTES, PARTS, STEP, signed

_FIELDS = 6
_WORDS = PART_BYTES // 8
_UNITS = {8: tl.int64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
_WARPS = 8


@triton.jit(do_not_specialize=["part"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    table,
    out,
    part,
    fields: tl.constexpr,
    chunk_words: tl.constexpr,
    unit: tl.constexpr,
    kind: tl.constexpr,
    golden: tl.constexpr,
    step: tl.constexpr,
):
    chunk = table + tl.program_id(0).to(tl.int64) * fields
    address = tl.load(chunk) + tl.load(chunk + 1) * part
    first, words = tl.load(chunk + 2), tl.load(chunk + 3)
    tail = tl.load(chunk + 5)
    at = tl.arange(0, chunk_words).to(tl.int64)
    source = address.to(tl.pointer_type(kind))
    if unit == 8:
        word = tl.load(source + at, mask=at < words, other=0)
    else:
        per_word: tl.constexpr = 8 // unit
        word = tl.zeros([chunk_words], dtype=tl.int64)
        for n in tl.static_range(per_word):
            piece = tl.load(source + at * per_word + n, mask=at < words, other=0).to(tl.int64)
            word += piece << (8 * unit * n)
    index = (first & 0xFFFF) + at
    weight = index * golden
    weight = ((weight ^ (weight >> 29)) * step) | 1
    total = tl.sum(word * weight, axis=0)
    scale = first * 0 + 1
    power = first * 0 + step
    block = first >> 16
    while block > 0:
        if block & 1:
            scale *= power
        power *= power
        block >>= 1
    total *= scale
    if tail > 0:
        byte = tl.arange(0, 8)
        end = (address + words * 8).to(tl.pointer_type(tl.uint8))
        value = tl.sum(tl.load(end + byte, mask=byte < tail, other=0).to(tl.int64) << (8 * byte).to(tl.int64), axis=0)
        total += value * (((first + words) * 2 + 1) * golden | 1)
    tl.atomic_add(out + tl.load(chunk + 4), total)


class Launch:
    """A table of all chunks on the GPU, for the runs whose addresses are multiples of the same."""

    def __init__(self, runs: Sequence[torch.Tensor], sampled: bool) -> None:
        self._device = runs[0].device
        self._keep_alive = runs
        self._out = torch.empty(len(runs), dtype=torch.int64, device=self._device)
        address = torch.tensor([run.data_ptr() for run in runs])
        table = _chunks(address, torch.tensor([run.numel() for run in runs]), sampled)
        unit = torch.stack([table[:, 0] % n == 0 for n in _UNITS]).int().argmax(0)
        self._tables = [(own.to(self._device), n) for place, n in enumerate(_UNITS) if len(own := table[unit == place])]

    def begin(self, part: int) -> None:
        """Ordered on the current stream; returns at once."""
        self._out.zero_()
        with torch.cuda.device(self._device):
            for table, unit in self._tables:
                _sum[(len(table),)](table, self._out, part, **_constants(unit))

    def found(self) -> list[int]:
        """What was begun last; waits for the current stream."""
        return [value & MASK for value in self._out.tolist()]


def warm_up(device: torch.device) -> None:
    """Compile what digests of aligned runs need, which are nearly all."""
    numbers = torch.zeros(_FIELDS, dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        _sum.warmup(numbers, numbers, 0, **_constants(8), grid=(1,))


def _constants(unit: int) -> dict[str, Any]:
    return {
        "fields": _FIELDS,
        "chunk_words": _WORDS,
        "unit": unit,
        "kind": _UNITS[unit],
        "golden": signed(GOLDEN),
        "step": signed(STEP),
        "num_warps": _WARPS,
    }


def _chunks(address: torch.Tensor, nbytes: torch.Tensor, sampled: bool) -> torch.Tensor:
    """Of runs with these addresses and sizes: rows of [address, bytes to add to it for each part, number of
    the first word, words, number of the run, bytes that are left beyond the last whole word]."""
    spread = PARTS * PART_BYTES
    in_samples = nbytes // spread if sampled else torch.zeros_like(nbytes)
    rest = nbytes - in_samples * spread
    in_rest = -(-rest // PART_BYTES)
    counts = in_samples + in_rest
    row = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    number = torch.arange(len(address)).repeat_interleave(counts)
    before, rest, address = in_samples[number], rest[number], address[number]
    is_sample = row < before
    at = torch.where(is_sample, row * spread, before * spread + (row - before) * PART_BYTES)
    size = torch.where(is_sample, PART_BYTES, (rest - (row - before) * PART_BYTES).clamp(max=PART_BYTES))
    return torch.stack([address + at, is_sample * PART_BYTES, row * _WORDS, size // 8, number, size % 8], dim=1)
