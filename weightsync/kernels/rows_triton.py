"""The launches of `rows.RowQuantiser` on a GPU.

A program holds some rows, or one block, in registers, so they are read once for their maximum and their values. The
arithmetic is that of `quantize.py`, rounded as IEEE 754 says. vLLM's kernels are compiled to the same rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from weightsync.kernels.quantize import BLOCK, FP8_MAX, LEAST_OF_BLOCK, BlockForm, Form
from weightsync.kernels.rows import Job, WeightPiece

_FIELDS = tl.constexpr(14)
_BLOCK, _FP8_MAX, _LEAST_OF_BLOCK = tl.constexpr(BLOCK), tl.constexpr(FP8_MAX), tl.constexpr(LEAST_OF_BLOCK)
_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}
_MAXIMA, _QUANTISE, _ALL_AT_ONCE = 0, 1, 2
_VECTOR_BYTES = 16
_TILE_ELEMENTS = 4096
"""The fewest elements of a program, or one row. Programs with less work cost more to start than to run."""
_BLOCK_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _locate(table, piece_of_program, height: tl.constexpr, strips_across):  # type: ignore[no-untyped-def]
    """Return a program's piece, matrix, first row, and strip of columns."""
    program = tl.program_id(0).to(tl.int64)
    piece = table + tl.load(piece_of_program + program).to(tl.int64) * _FIELDS
    number = program - tl.load(piece)
    strips = tl.cdiv(tl.load(piece + 1), height) * strips_across
    rest = number % strips
    return piece, number // strips, rest // strips_across * height, rest % strips_across


@triton.jit  # type: ignore[untyped-decorator]
def _open(fields, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the memory of a piece on one side, and its strides of matrices and rows."""
    memory = tl.load(fields).to(tl.pointer_type(dtype))
    of_matrix, of_row = tl.load(fields + 1), tl.load(fields + 2)
    if aligned:
        memory = tl.multiple_of(memory, 16)
        of_matrix, of_row = tl.multiple_of(of_matrix, 16), tl.multiple_of(of_row, 16)
    return memory, of_matrix, of_row


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    table,
    piece_of_program,
    given,
    columns: tl.constexpr,
    block: tl.constexpr,
    height: tl.constexpr,
    source_dtype: tl.constexpr,
    values_dtype: tl.constexpr,
    step: tl.constexpr,
    largest: tl.constexpr,
    smallest: tl.constexpr,
    multiplies: tl.constexpr,
    per_row: tl.constexpr,
    aligned: tl.constexpr,
):
    piece, matrix, first, _ = _locate(table, piece_of_program, height, 1)
    row = first + tl.arange(0, height)[:, None]
    at = tl.arange(0, block)[None, :]
    is_row = row < tl.load(piece + 1)
    inside = is_row & (at < columns)
    own = given + tl.load(piece + 2) + matrix * tl.load(piece + 3)
    source, source_matrix, source_row = _open(piece + 4, source_dtype, aligned)
    x = tl.load(source + matrix * source_matrix + row * source_row + at, mask=inside, other=0.0).to(tl.float32)
    if step == 0:
        maxima = tl.max(tl.abs(x), axis=1, keep_dims=True)
        if per_row:
            tl.store(own + row, maxima, mask=is_row)
        else:
            tl.atomic_max(own, tl.max(tl.max(maxima, axis=1), axis=0))
    else:
        if step == 2:
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=1, keep_dims=True), largest), smallest)
        elif per_row:
            scale = tl.load(own + row, mask=is_row, other=1.0)
        else:
            scale = tl.load(own + tl.zeros((1, 1), tl.int32))
        if multiplies:
            x = x * tl.div_rn(1.0, scale)
            x = tl.where(x != x, largest, x)
        elif tl.min(tl.min(scale, axis=1), axis=0) > 1e-30:
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
        values, values_matrix, values_row = _open(piece + 7, values_dtype, aligned)
        tl.store(values + matrix * values_matrix + row * values_row + at, x.to(values_dtype), mask=inside)
        if per_row and step == 2:
            scales = tl.load(piece + 10).to(tl.pointer_type(tl.float32))
            tl.store(scales + matrix * tl.load(piece + 11) + row * tl.load(piece + 12), scale, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(  # type: ignore[no-untyped-def]
    table,
    piece_of_program,
    columns: tl.constexpr,
    source_dtype: tl.constexpr,
    values_dtype: tl.constexpr,
    multiplies: tl.constexpr,
    approximates: tl.constexpr,
    aligned: tl.constexpr,
):
    piece, matrix, first, strip = _locate(table, piece_of_program, _BLOCK, tl.cdiv(columns, _BLOCK))
    row = first + tl.arange(0, _BLOCK)[:, None]
    at = strip * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = (row < tl.load(piece + 1)) & (at < columns)
    source, source_matrix, source_row = _open(piece + 4, source_dtype, aligned)
    values, values_matrix, values_row = _open(piece + 7, values_dtype, aligned)
    x = tl.load(source + matrix * source_matrix + row * source_row + at, mask=inside, other=0.0).to(tl.float32)
    maximum = tl.max(tl.max(tl.abs(x), axis=1, keep_dims=True), axis=0, keep_dims=True)
    maximum = tl.maximum(maximum, _LEAST_OF_BLOCK)
    scale = maximum * (1.0 / _FP8_MAX) if multiplies else tl.div_rn(maximum, _FP8_MAX)
    inverse = 1.0 / scale if approximates else tl.div_rn(1.0, scale)
    tl.store(values + matrix * values_matrix + row * values_row + at, (x * inverse).to(values_dtype), mask=inside)
    scales = tl.load(piece + 10).to(tl.pointer_type(tl.float32))
    scales += matrix * tl.load(piece + 11) + first // _BLOCK * tl.load(piece + 12) + strip * tl.load(piece + 13)
    tl.store(scales + tl.zeros((1, 1), tl.int32), scale)


class _RowKind(NamedTuple):
    """The constants of a launch, as its pieces have them."""

    columns: int
    dtype: torch.dtype
    aligned: bool


class RowLaunches:
    """A table of all pieces on the GPU, and one launch for each width, dtype and alignment."""

    def __init__(self, form: Form | BlockForm, jobs: Sequence[Job], first: Sequence[int]) -> None:
        self._form = form
        self._device = jobs[0].values.device
        self._values = _DTYPES[jobs[0].values.dtype]
        tables: dict[_RowKind, list[list[int]]] = defaultdict(list)
        for job, number in zip(jobs, first, strict=True):
            for piece in job.pieces:
                kind, fields = _describe(form, job, piece, number)
                tables[kind].append(fields)
        self._groups = []
        for kind, table in tables.items():
            height, across = self._tile(kind.columns)
            counts = [matrices * -(-fields[0] // height) * across for matrices, *fields in table]
            ends = torch.tensor(counts).cumsum(0)
            starts = (ends - torch.tensor(counts)).tolist()
            rows = [[start, *fields] for start, (_, *fields) in zip(starts, table, strict=True)]
            of_program = torch.arange(len(table), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
            on_gpu = torch.tensor(rows, dtype=torch.int64).to(self._device), of_program.to(self._device)
            self._groups.append((kind, *on_gpu, len(of_program)))

    def _tile(self, columns: int) -> tuple[int, int]:
        """Return the rows of a program, and the programs for the columns of these rows."""
        if isinstance(self._form, BlockForm):
            return BLOCK, -(-columns // BLOCK)
        return max(1, _TILE_ELEMENTS // triton.next_power_of_2(columns)), 1

    def maxima(self, out: torch.Tensor) -> None:
        """Write the largest magnitude for each scale, counted over all jobs. `out` holds zeros."""
        self._launch(_MAXIMA, out)

    def quantise(self, scales: torch.Tensor | None) -> None:
        """Write the values.

        scales: the scales of all jobs. None: each row or block computes its own scale in the same launch, and writes
            it.
        """
        if scales is None:
            self._launch(_ALL_AT_ONCE, torch.empty(0, dtype=torch.float32, device=self._device))
        else:
            self._launch(_QUANTISE, scales)

    def _launch(self, step: int, given: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            for kind, table, of_program, programs in self._groups:
                constants = {
                    "columns": kind.columns,
                    "source_dtype": _DTYPES[kind.dtype],
                    "values_dtype": self._values,
                    "multiplies": self._form.multiplies,
                    "aligned": kind.aligned,
                }
                if isinstance(self._form, BlockForm):
                    own = {"approximates": self._form.approximates, "num_warps": _BLOCK_WARPS}
                    _blocks[(programs,)](table, of_program, **own, **constants)
                    continue
                block, (height, _) = triton.next_power_of_2(kind.columns), self._tile(kind.columns)
                _rows[(programs,)](
                    table,
                    of_program,
                    given,
                    block=block,
                    height=height,
                    step=step,
                    largest=self._form.largest,
                    smallest=self._form.smallest_scale,
                    per_row=self._form.per_row,
                    num_warps=min(32, max(1, height * block // 1024)),
                    **constants,
                )


def _describe(form: Form | BlockForm, job: Job, piece: WeightPiece, number: int) -> tuple[_RowKind, list[int]]:
    """Return a piece's kind, and its number of matrices followed by its fields in a table.

    number: the number of the job's first scale.
    """
    matrix, row, source = piece
    values = job.values[matrix:, row:]
    height = form.height
    scale = job.scale[matrix:] if height is None else job.scale[matrix:, row // height :]
    per_matrix = job.scale[0].numel()
    own = number + matrix * per_matrix + (row if form.per_row else 0)
    fields = [source.shape[1], own, per_matrix, source.data_ptr(), *_steps(source)[:2]]
    fields += [values.data_ptr(), *_steps(values)[:2], scale.data_ptr(), *_steps(scale)]
    return _RowKind(source.shape[2], source.dtype, _aligned(source) and _aligned(values)), [len(source), *fields]


def _steps(tensor: torch.Tensor) -> list[int]:
    """Return the strides of a tensor, 0 for a dimension of one element."""
    return [step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def _aligned(rows: torch.Tensor) -> bool:
    """Return whether a GPU can access 16 bytes at once at the start of every row.

    Length and strides of a row must also be multiples of 16 elements.
    """
    strides = (*_steps(rows)[:2], rows.shape[2])
    return rows.data_ptr() % _VECTOR_BYTES == 0 and not any(stride % 16 for stride in strides)
