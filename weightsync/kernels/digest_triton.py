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
    """A table of all chunks on the GPU."""

    def __init__(self, runs: Sequence[torch.Tensor], sampled: bool) -> None:
        self._device = runs[0].device
        self._keep_alive = runs
        rows = [_chunks(run, number, sampled) for number, run in enumerate(runs)]
        self._table = torch.cat(rows).to(self._device)
        self._out = torch.empty(len(runs), dtype=torch.int64, device=self._device)
        self._unit = next(n for n in _UNITS if not any(run.data_ptr() % n for run in runs))

    def of(self, part: int) -> list[int]:
        self._out.zero_()
        if len(self._table):
            with torch.cuda.device(self._device):
                _sum[(len(self._table),)](self._table, self._out, part, **_constants(self._unit))
        return [value & MASK for value in self._out.tolist()]


def warm_up(device: torch.device) -> None:
    """Compile what digests of aligned runs need."""
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


def _chunks(run: torch.Tensor, number: int, sampled: bool) -> torch.Tensor:
    """Rows of [address, bytes to add to it for each part, number of the first word, words, number of the run, bytes
    that are left beyond the last whole word]."""
    sampled_rows = run.numel() // (PARTS * PART_BYTES) if sampled else 0
    rest = run.numel() - sampled_rows * PARTS * PART_BYTES
    in_rest = -(-rest // PART_BYTES)
    table = torch.zeros(sampled_rows + in_rest, _FIELDS, dtype=torch.int64)
    row = torch.arange(sampled_rows + in_rest)
    table[:sampled_rows, 0] = row[:sampled_rows] * (PARTS * PART_BYTES)
    table[:sampled_rows, 1] = PART_BYTES
    table[sampled_rows:, 0] = sampled_rows * PARTS * PART_BYTES + row[:in_rest] * PART_BYTES
    table[:, 0] += run.data_ptr()
    table[:, 2] = row * _WORDS
    table[:, 3] = _WORDS
    table[:, 4] = number
    if in_rest:
        last = rest - (in_rest - 1) * PART_BYTES
        table[-1, 3], table[-1, 5] = last // 8, last % 8
    return table
