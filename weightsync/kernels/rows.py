"""Quantisation of many modules' weights at once, from received rows into the tensors that kernels read.

A row is read once. Its 8-bit values and its scale are written directly, so no weight is copied. If rows or workers
share a scale, a first pass finds the largest magnitudes. On a GPU one launch for each pass and width covers all
modules. On a CPU plain torch does the same, and tests compare the GPU with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from weightsync.kernels.quantize import Form, row_maxima

MAX_COLUMNS = 1 << 16
"""Most columns of a row on a GPU: a row must fit into registers."""

AllReduceMax = Callable[[torch.Tensor], None]
"""A function that replaces each number of a vector by the largest of all workers in its place.

Collective: every worker calls it."""


@dataclass(frozen=True)
class Job:
    """One module's weight.

    sources: (first row, rows of the source), together all rows of the weight.
    values: the 8-bit target, of shape (rows, columns).
    scale: the float32 target, of shape (rows,), or (1,) if all rows share one scale.

    Rows are dense, in sources and in values.
    """

    sources: tuple[tuple[int, torch.Tensor], ...]
    values: torch.Tensor
    scale: torch.Tensor


class RowQuantiser:
    """A quantisation of the same memory, prepared once for all runs."""

    def __init__(self, form: Form, jobs: Sequence[Job], share: AllReduceMax | None = None) -> None:
        self._form, self._jobs, self._share = form, list(jobs), share
        device = self._jobs[0].values.device
        counts = [len(job.values) for job in self._jobs]
        *first, self._rows = accumulate(counts, initial=0)  # each job's first row, counted over all
        self._launches = None
        if device.type == "cuda":
            from weightsync.kernels.rows_triton import RowLaunches

            self._launches = RowLaunches(form, self._jobs, first)

    def run(self) -> None:
        """Quantise the current contents of the sources. With `share`, collective: every worker runs the same jobs."""
        if self._launches is None:
            self._run_in_torch()
        elif self._form.per_row and self._share is None:
            self._launches.quantise(None)
        else:
            count = self._rows if self._form.per_row else len(self._jobs)
            maxima = torch.zeros(count, dtype=torch.float32, device=self._jobs[0].values.device)
            self._launches.maxima(maxima)
            if self._share is not None:
                self._share(maxima)
            scales = self._form.scale(maxima)
            if not self._form.per_row:
                torch._foreach_copy_([job.scale for job in self._jobs], list(scales.split(1)))
            self._launches.quantise(scales)

    def _run_in_torch(self) -> None:
        in_order = [sorted(job.sources, key=lambda part: part[0]) for job in self._jobs]
        by_job = [torch.cat([row_maxima(source).flatten() for _, source in parts]) for parts in in_order]
        maxima = torch.cat(by_job if self._form.per_row else [rows.amax().reshape(1) for rows in by_job])
        if self._share is not None:
            self._share(maxima)
        counts = [len(job.values) if self._form.per_row else 1 for job in self._jobs]
        for job, own in zip(self._jobs, maxima.split(counts), strict=True):
            scale = self._form.scale(own)
            job.scale.copy_(scale)
            for row, source in job.sources:
                part = slice(row, row + len(source))
                job.values[part] = self._form.values(source, scale[part, None] if self._form.per_row else scale)
