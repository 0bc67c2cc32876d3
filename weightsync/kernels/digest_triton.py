"""The launch of `digest.Digests` on a GPU: equal digests, many runs of bytes at once, no scratch memory.

A program reads a chunk of at most 64 KiB within one block. It computes the weights of its words itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl

from weightsync.kernels.digest import GOLDEN, MIB, STEP, signed

_FIELDS = 6
_CHUNK_BYTES = 1 << 16
_UNITS = {8: tl.int64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
_WARPS = 8

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@triton.jit(do_not_specialize=["out", "moved"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    table,
    out,
    moved,
    fields: tl.constexpr,
    chunk_words: tl.constexpr,
    unit: tl.constexpr,
    kind: tl.constexpr,
    golden: tl.constexpr,
    step: tl.constexpr,
):
    chunk = table + tl.program_id(0).to(tl.int64) * fields
    by = tl.load(chunk + 1) * moved
    address = tl.load(chunk) + by
    first, words = tl.load(chunk + 2) + (by >> 3), tl.load(chunk + 3)
    tail = tl.load(chunk + 5)
    at = tl.arange(0, chunk_words).to(tl.int64)
    source = address.to(tl.pointer_type(kind))
    if unit == 8:
        word = tl.load(source + at, mask=at < words, other=0)
    else:
        per_word: tl.constexpr = 8 // unit
        word = tl.zeros([chunk_words], dtype=tl.int64)
        for n in tl.static_range(per_word):
            bits = tl.load(source + at * per_word + n, mask=at < words, other=0).to(tl.int64)
            word += bits << (8 * unit * n)
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
    """A table on the GPU of all chunks of the runs, for samples of `nbytes` of each MiB."""

    def __init__(self, runs: Sequence[torch.Tensor], nbytes: int) -> None:
        self._device = runs[0].device
        self._keep_alive = runs
        chunk_bytes = min(nbytes, _CHUNK_BYTES)
        # By numpy, in one thread: torch's threads take 10 ms to begin a small operation on a host of many cores.
        address = np.array([run.data_ptr() for run in runs])
        table = _chunks(address, np.array([run.numel() for run in runs]), nbytes < MIB, chunk_bytes)
        unit = np.stack([table[:, 0] % n == 0 for n in _UNITS]).argmax(0)
        by_unit = [(table[unit == place], n) for place, n in enumerate(_UNITS)]
        self._tables = [
            (torch.from_numpy(own).to(self._device), _constants(n, chunk_bytes)) for own, n in by_unit if len(own)
        ]
        with torch.cuda.device(self._device):
            for own, constants in self._tables:
                _sum.warmup(own, own, 0, **constants, grid=(1,))  # compile now, not during a push

    def run(self, first: int, out: torch.Tensor) -> None:
        """Write each run's digest of the sample that begins `first` bytes into each MiB into `out`."""
        out.zero_()
        with torch.cuda.device(self._device):
            for table, constants in self._tables:
                _sum[(len(table),)](table, out, first, **constants)


def _constants(unit: int, chunk_bytes: int) -> dict[str, Any]:
    return {
        "fields": _FIELDS,
        "chunk_words": chunk_bytes // 8,
        "unit": unit,
        "kind": _UNITS[unit],
        "golden": signed(GOLDEN),
        "step": signed(STEP),
        "num_warps": _WARPS,
    }


def _chunks(address: Numbers, nbytes: Numbers, sampled: bool, chunk_bytes: int) -> Numbers:
    """Return one row for each chunk of runs with these addresses and sizes.

    Fields of a row: address in sample 0, whether the chunk moves with the sample, first word, words, run, and tail
    bytes. The first word and the run are numbers, words is a count. Tail bytes follow the last whole word.
    """
    whole = nbytes // MIB if sampled else np.zeros_like(nbytes)
    rest = nbytes - whole * MIB
    counts = whole - (-rest // chunk_bytes)
    number = np.arange(len(address)).repeat(counts)
    row = np.arange(len(number)) - (counts.cumsum() - counts)[number]
    before, rest, address = whole[number], rest[number], address[number]
    moves = row < before
    at = np.where(moves, row * MIB, before * MIB + (row - before) * chunk_bytes)
    size = np.where(moves, chunk_bytes, (rest - (row - before) * chunk_bytes).clip(max=chunk_bytes))
    return np.stack([address + at, moves, at // 8, size // 8, number, size % 8], axis=1)
