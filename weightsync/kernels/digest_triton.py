"""The launch of `digest.Digests` on a GPU: equal digests, many runs of bytes at once, no scratch memory.

A program reads a chunk of at most 64 KiB within one block. It computes the weights of its words itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl

from weightsync.kernels.digest import GOLDEN, MIB, STEP, signed

_FIELDS, _CHUNK_BYTES = tl.constexpr(3), tl.constexpr(1 << 16)
_GOLDEN, _STEP = tl.constexpr(signed(GOLDEN)), tl.constexpr(signed(STEP))
_UNITS = {8: tl.int64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
_WARPS = 8

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@triton.jit(do_not_specialize=["out", "begin", "first_run", "moved", "sampled"])  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    table,
    run_of_program,
    out,
    begin,
    first_run,
    moved,
    sampled,
    unit: tl.constexpr,
    kind: tl.constexpr,
):
    program = tl.program_id(0) + begin
    number = tl.load(run_of_program + program)
    run = table + number.to(tl.int64) * _FIELDS
    nbytes = tl.load(run + 1)
    row = program - tl.load(run + 2)
    whole = (nbytes >> 20) * sampled
    moves = row < whole
    by = tl.where(moves, (row << 20) + moved, (whole << 20) + (row - whole) * _CHUNK_BYTES)
    size = tl.minimum(nbytes - by, _CHUNK_BYTES)
    address = tl.load(run) + by
    first, words, tail = by >> 3, size >> 3, size & 7
    source = address.to(tl.pointer_type(kind))
    at = tl.arange(0, _CHUNK_BYTES // 8).to(tl.int64)
    if unit == 8:
        word = tl.load(source + at, mask=at < words, other=0)
    else:
        per_word: tl.constexpr = 8 // unit
        word = tl.zeros([_CHUNK_BYTES // 8], dtype=tl.int64)
        for n in tl.static_range(per_word):
            bits = tl.load(source + at * per_word + n, mask=at < words, other=0).to(tl.int64)
            word += bits << (8 * unit * n)
    index = (first & 0xFFFF) + at
    weight = index * _GOLDEN
    weight = ((weight ^ (weight >> 29)) * _STEP) | 1
    total = tl.sum(word * weight, axis=0)
    scale = first * 0 + 1
    power = first * 0 + _STEP
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
        total += value * (((first + words) * 2 + 1) * _GOLDEN | 1)
    tl.atomic_add(out + (number - first_run), total)


class Launches:
    """A table on the GPU of many runs, and the launches for samples of `nbytes` of each MiB.

    A program digests one chunk of a run. A launch is for some neighbours among the runs.
    """

    def __init__(self, runs: Sequence[torch.Tensor], nbytes: int) -> None:
        self._device = runs[0].device
        self._keep_alive = runs
        self._is_sampled = nbytes < MIB
        # By numpy, in one thread: torch's threads take 10 ms to begin a small operation on a host of many cores.
        address, sizes = (np.array(each) for each in zip(*((run.data_ptr(), run.numel()) for run in runs), strict=True))
        whole = sizes // MIB * self._is_sampled
        programs = whole - (whole * MIB - sizes) // _CHUNK_BYTES.value
        unit = np.stack([address % n == 0 for n in _UNITS]).argmax(0)
        first = np.zeros_like(sizes)
        self._launches: list[tuple[int, torch.Tensor, Numbers]] = []  # unit, run of each program, programs up to a run
        for place, n in enumerate(_UNITS):
            own = programs * (unit == place)
            if own.any():
                ends = own.cumsum()
                first += (ends - own) * (unit == place)
                of_program = np.arange(len(runs), dtype=np.int32).repeat(own)
                self._launches.append((n, torch.from_numpy(of_program).to(self._device), np.append(0, ends)))
                _load(self._device, n)
        self._table = torch.from_numpy(np.stack([address, sizes, first], axis=1)).to(self._device)

    def run(self, runs: range, first: int, out: torch.Tensor, seed: int) -> None:
        """Write the digest of each of these runs, plus `seed`, into `out`.

        The sample begins `first` bytes into each MiB.
        """
        out.fill_(seed)
        with torch.cuda.device(self._device):
            for unit, of_program, programs in self._launches:
                begin, end = int(programs[runs.start]), int(programs[runs.stop])
                if begin < end:
                    arguments = self._table, of_program, out, begin, runs.start, first, int(self._is_sampled)
                    _sum[(end - begin,)](*arguments, **_constants(unit))


@cache
def _load(device: torch.device, unit: int) -> None:
    """Compile the kernel, and load it into the GPU by a launch for a run without bytes. See `copies_triton._load`.

    Load torch's kernel for the seed too.
    """
    table = torch.zeros(_FIELDS.value, dtype=torch.int64, device=device)
    of_program = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        _sum[(1,)](table, of_program, torch.full_like(table, 1), 0, 0, 0, 0, **_constants(unit))


def _constants(unit: int) -> dict[str, Any]:
    return {"unit": unit, "kind": _UNITS[unit], "num_warps": _WARPS}
