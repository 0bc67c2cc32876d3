"""The launches of `rows.RowQuantiser` on a GPU.

A program holds one row in registers, so the row is read once for its maximum and its values. The arithmetic is that of
`quantize.py`, rounded as IEEE 754 says. vLLM's kernels are compiled to the same rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from weightsync.kernels.quantize import Form
from weightsync.kernels.rows import Job

_FIELDS = 8
_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}
_MAXIMA, _QUANTISE, _ALL_AT_ONCE = 0, 1, 2
_VECTOR_BYTES = 16


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    table,
    piece_of_row,
    given,
    fields: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    source_dtype: tl.constexpr,
    values_dtype: tl.constexpr,
    step: tl.constexpr,
    largest: tl.constexpr,
    smallest: tl.constexpr,
    multiplies: tl.constexpr,
    per_row: tl.constexpr,
    aligned: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    piece = table + tl.load(piece_of_row + program).to(tl.int64) * fields
    row = program - tl.load(piece)
    own = tl.load(piece + 1)
    if per_row:
        own += row
    source = tl.load(piece + 2).to(tl.pointer_type(source_dtype))
    source_stride = tl.load(piece + 3)
    if aligned:
        source = tl.multiple_of(source, 16)
        source_stride = tl.multiple_of(source_stride, 16)
    at = tl.arange(0, block)
    inside = at < columns
    x = tl.load(source + row * source_stride + at, mask=inside, other=0.0).to(tl.float32)
    if step == 0:
        if per_row:
            tl.store(given + own, tl.max(tl.abs(x), axis=0))
        else:
            tl.atomic_max(given + own, tl.max(tl.abs(x), axis=0))
    else:
        if step == 1:
            scale = tl.load(given + own)
        else:
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), largest), smallest)
        if multiplies:
            x = x * tl.div_rn(1.0, scale)
            x = tl.where(x != x, largest, x)
        elif scale > 1e-30:
            # The quotient to the last bit, in three operations: Markstein, IBM J. Res. Dev. 34 (1990), p. 111.
            inverse = tl.div_rn(1.0, scale)
            quotient = x * inverse
            x = tl.where(quotient == 0, quotient, tl.fma(tl.fma(-quotient, scale, x), inverse, quotient))
        else:
            x = tl.div_rn(x, scale)
        if tl.int8 == values_dtype:
            x = libdevice.rint(x)
            x = tl.where(x != x, 0.0, x)
        x = tl.minimum(tl.maximum(x, -largest), largest)
        values = tl.load(piece + 4).to(tl.pointer_type(values_dtype))
        values_stride = tl.load(piece + 5)
        if aligned:
            values = tl.multiple_of(values, 16)
            values_stride = tl.multiple_of(values_stride, 16)
        tl.store(values + row * values_stride + at, x.to(values_dtype), mask=inside)
        if per_row:
            scales = tl.load(piece + 6).to(tl.pointer_type(tl.float32))
            tl.store(scales + row * tl.load(piece + 7), scale)


class RowLaunches:
    """A table of all rows on the GPU, and one launch for each width, dtype and alignment."""

    def __init__(self, form: Form, jobs: Sequence[Job], first: Sequence[int]) -> None:
        self._form = form
        self._device = jobs[0].values.device
        kinds: dict[tuple[int, torch.dtype, bool], list[tuple[int, list[int]]]] = defaultdict(list)
        for number, (job, start) in enumerate(zip(jobs, first, strict=True)):
            for row, source in job.sources:
                values = job.values[row : row + len(source)]
                scale = job.scale[row : row + len(source)] if form.per_row else job.scale
                fields = [
                    start + row if form.per_row else number,
                    source.data_ptr(),
                    source.stride(0),
                    values.data_ptr(),
                    values.stride(0),
                    scale.data_ptr(),
                    scale.stride(0),
                ]
                kind = (source.shape[1], source.dtype, _aligned(source) and _aligned(values))
                kinds[kind].append((len(source), fields))
        self._groups = []
        for kind, parts in kinds.items():
            table, counts, programs = [], [], 0
            for count, fields in parts:
                table.append([programs, *fields])
                counts.append(count)
                programs += count
            of_row = torch.arange(len(table), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
            rows = torch.tensor(table, dtype=torch.int64).to(self._device), of_row.to(self._device)
            self._groups.append((kind, *rows, programs))
        self._values = _DTYPES[jobs[0].values.dtype]

    def maxima(self, out: torch.Tensor) -> None:
        """Write the largest magnitude of each row, counted over all jobs, or of each job. `out` holds zeros."""
        self._launch(_MAXIMA, out)

    def quantise(self, scales: torch.Tensor | None) -> None:
        """Write the values, and with a scale for each row the scales.

        scales: one for each row of all jobs, or one for each job. None: each row's own scale is computed in the same
        launch.
        """
        if scales is None:
            self._launch(_ALL_AT_ONCE, torch.empty(0, dtype=torch.float32, device=self._device))
        else:
            self._launch(_QUANTISE, scales)

    def _launch(self, step: int, given: torch.Tensor) -> None:
        form = self._form
        with torch.cuda.device(self._device):
            for (columns, dtype, aligned), table, of_row, programs in self._groups:
                block = triton.next_power_of_2(columns)
                _rows[(programs,)](
                    table,
                    of_row,
                    given,
                    fields=_FIELDS,
                    columns=columns,
                    block=block,
                    source_dtype=_DTYPES[dtype],
                    values_dtype=self._values,
                    step=step,
                    largest=form.largest,
                    smallest=form.smallest_scale,
                    multiplies=form.multiplies,
                    per_row=form.per_row,
                    aligned=aligned,
                    num_warps=min(32, max(1, block // 1024)),
                )


def _aligned(rows: torch.Tensor) -> bool:
    """Return whether a GPU can access 16 bytes at once at the start of every row.

    Length and stride of a row must also be multiples of 16 elements.
    """
    return rows.data_ptr() % _VECTOR_BYTES == 0 and rows.stride(0) % 16 == 0 and rows.shape[1] % 16 == 0
