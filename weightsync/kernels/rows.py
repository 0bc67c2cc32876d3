"""Quantisation of many modules' weights at once, from received rows into the tensors that kernels read.

A row is read once. Its 8-bit values and its scale are written directly, so no weight is copied. If rows or workers
share a scale, a first pass finds the largest magnitudes. On a GPU one launch for each pass and width covers all
modules. On a CPU plain torch does the same, and tests compare the GPU with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from weightsync.kernels.quantize import BlockForm, Form, row_maxima

MAX_COLUMNS = 1 << 16
"""Most columns of a row on a GPU: a row must fit into registers."""

AllReduceMax = Callable[[torch.Tensor], None]
"""A function that replaces each number of a vector by the largest of all workers in its place.

Collective: every worker calls it."""


class WeightPiece(NamedTuple):
    """Rows of one or more matrices of a weight.

    matrix, row: the first matrix, and the first row in each matrix.
    source: the rows, of shape (matrices, rows, columns). Rows are dense.
    """

    matrix: int
    row: int
    source: torch.Tensor


@dataclass(frozen=True)
class Job:
    """One module's weight, a matrix or the matrices of all experts.

    pieces: the sources. Together they are the whole weight, unless each row or block of the form has its own scale.
        A piece then holds whole rows or blocks.
    values: the 8-bit target, of shape (matrices, rows, columns). Rows are dense.
    scale: the float32 target. `Form.scale_shape` has the shape for each matrix.
    """

    pieces: tuple[WeightPiece, ...]
    values: torch.Tensor
    scale: torch.Tensor


class RowQuantiser:
    """A quantisation of the same memory, prepared once for all runs."""

    def __init__(self, form: Form | BlockForm, jobs: Sequence[Job], share: AllReduceMax | None = None) -> None:
        self._form, self._jobs, self._share = form, list(jobs), share
        device = self._jobs[0].values.device
        self._counts = [job.scale.numel() for job in self._jobs]
        self._launches = None
        if device.type == "cuda":
            from weightsync.kernels.rows_triton import RowLaunches

            first = list(accumulate(self._counts, initial=0))[:-1]  # the number of each job's first scale
            self._launches = RowLaunches(form, self._jobs, first)

    def run(self) -> None:
        """Quantise the current contents of the sources. With `share`, collective: every worker runs the same jobs."""
        form, launches = self._form, self._launches
        if isinstance(form, BlockForm) or (form.per_row and self._share is None):
            self._quantise_alone() if launches is None else launches.quantise(None)
            return
        maxima = torch.zeros(sum(self._counts), dtype=torch.float32, device=self._jobs[0].values.device)
        self._find_maxima(maxima) if launches is None else launches.maxima(maxima)
        if self._share is not None:
            self._share(maxima)
        scales = form.scale(maxima)
        own = [each.view(job.scale.shape) for each, job in zip(scales.split(self._counts), self._jobs, strict=True)]
        torch._foreach_copy_([job.scale for job in self._jobs], own)
        self._quantise(own, form) if launches is None else launches.quantise(scales)

    def _quantise_alone(self) -> None:
        for job in self._jobs:
            for first, row, source in job.pieces:
                for matrix, rows in enumerate(source, first):
                    job.values[matrix, row : row + len(rows)], scale = self._form(rows)
                    at = row // (self._form.height or 1)
                    job.scale[matrix, at : at + len(scale)] = scale

    def _find_maxima(self, out: torch.Tensor) -> None:
        for job, of_job in zip(self._jobs, out.split(self._counts), strict=True):
            maxima = of_job.view(job.scale.shape)
            for first, row, source in job.pieces:
                for matrix, rows in enumerate(source, first):
                    found = row_maxima(rows)
                    if self._form.per_row:
                        maxima[matrix, row : row + len(rows)] = found
                    else:
                        maxima[matrix].clamp_min_(found.amax())

    def _quantise(self, scales: Sequence[torch.Tensor], form: Form) -> None:
        for job, own in zip(self._jobs, scales, strict=True):
            for first, row, source in job.pieces:
                for matrix, rows in enumerate(source, first):
                    part = slice(row, row + len(rows))
                    scale = own[matrix, part] if form.per_row else own[matrix]
                    job.values[matrix, part] = form.values(rows, scale)
