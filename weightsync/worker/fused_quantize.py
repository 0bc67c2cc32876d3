"""Quantisation of a weight directly into the tensors of its kernel.

It serves modules with no other post-processing: one matrix becomes 8-bit values and scales, in a form that weightsync
knows. An experiment finds these modules: post-processing and the form run on the same random weights, and must leave
the same bits. Any other module is reloaded. A reload is always correct.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weightsync.kernels.quantize import Form, fp8_per_channel, fp8_per_tensor, int8_per_channel
from weightsync.kernels.rows import MAX_COLUMNS, AllReduceMax, Job, RowQuantiser
from weightsync.planning.layout import CopyOp

logger = logging.getLogger(__name__)

_PER_ROW: dict[torch.dtype, Form] = {torch.float8_e4m3fn: fp8_per_channel, torch.int8: int8_per_channel}
_WIDE = (torch.bfloat16, torch.float16, torch.float32)

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
Tensors = Mapping[str, torch.Tensor]
Rows = tuple[int, torch.Tensor]
"""(number of the first row, rows of a weight from there on)."""


@dataclass(frozen=True)
class Recipe:
    """The way in which one module's weight is quantised.

    form: turns the parameter `weight` of shape (rows, columns), as it is loaded, into values and scale.
    shared: whether the workers of the engine agree on its scales.
    weight, values, scale: the keys of the parameters.
    layouts: the layouts of values and scale.
    """

    form: Form
    shared: bool
    weight: str
    values: str
    scale: str
    layouts: tuple[Layout, Layout]

    @property
    def row_by_row(self) -> bool:
        """Whether a row can be quantised before the other rows have arrived."""
        return self.form.per_row and not self.shared

    def jobs(self, live: Tensors, parts: Sequence[Rows]) -> list[Job]:
        """Return the jobs to fill a module's parameters `live` from `parts` of its weight, all rows or some."""
        values, scale = _dense_rows(live[self.values].data), live[self.scale].data.view(-1)
        assert values is not None  # `layouts` guarantees it
        if not self.row_by_row:
            return [Job(tuple(parts), values, scale)]
        return [
            Job(((0, rows),), values[first : first + len(rows)], scale[first : first + len(rows)])
            for first, rows in parts
        ]

    def fits(self, live: Tensors) -> bool:
        """Return whether a live module's parameters have the recipe's layouts."""
        found = [live.get(self.values), live.get(self.scale)]
        return tuple(None if tensor is None else _layout(tensor) for tensor in found) == self.layouts


def find_recipe(loaded: Tensors, processed: Tensors, all_reduce_max: AllReduceMax | None) -> Recipe | None:
    """Return the recipe that turned a module's parameters from `loaded` into `processed`. None: no known form does.

    With `all_reduce_max` this is collective among workers, and their answers agree. Give it if and only if there are
    several workers with different weights.
    """
    new = {key: tensor for key, tensor in processed.items() if not same_contents(loaded.get(key), tensor)}
    gone = [key for key, tensor in loaded.items() if not same_contents(tensor, processed.get(key))]
    if (candidate := _candidate(loaded, gone, new)) is None:
        return None
    recipes = [candidate] if all_reduce_max is None else [candidate, replace(candidate, shared=True)]
    return next((recipe for recipe in recipes if holds(recipe, loaded, processed, all_reduce_max)), None)


def holds(recipe: Recipe, loaded: Tensors, processed: Tensors, all_reduce_max: AllReduceMax | None) -> bool:
    """Return whether the recipe leaves the same bits as post-processing.

    With `all_reduce_max` this is collective among workers, and all get the same answer.
    """
    mine = {key: torch.empty_like(processed[key]) for key in (recipe.values, recipe.scale)}
    jobs = recipe.jobs(mine, [(0, loaded[recipe.weight])])
    try:
        RowQuantiser(recipe.form, jobs, all_reduce_max if recipe.shared else None).run()
        differs = not all(same_contents(tensor, processed[key]) for key, tensor in mine.items())
    except Exception:
        shape = tuple(loaded[recipe.weight].shape)
        logger.warning("weights of shape %s are reloaded: they cannot be quantised here", shape, exc_info=True)
        differs = True
    if all_reduce_max is None:
        return not differs
    doubt = torch.tensor([float(differs)], device=loaded[recipe.weight].device)
    all_reduce_max(doubt)
    return not doubt.item()


def rows_of(op: CopyOp, source: torch.Tensor, weight: torch.Tensor, device: torch.device) -> Rows | None:
    """Return the rows of a `weight` that `op` would copy into it from `source`, a view of received memory.

    None unless these are whole dense rows in the weight's dtype on `device`, the device of the job.
    """
    columns = weight.shape[1]
    is_dense = source.dim() == 2 and source.shape[1] == columns and source.stride(1) == 1
    is_readable = is_dense and source.dtype == weight.dtype and source.device == device
    is_placed = op.dst_stride in ((columns, 1), (0, 1)) and op.dst_offset % columns == 0
    return (op.dst_offset // columns, source) if is_readable and is_placed else None


def _candidate(loaded: Tensors, gone: Sequence[str], new: Tensors) -> Recipe | None:
    """Return the only possible recipe for these tensors, by shapes and dtypes. All workers find the same one."""
    values = [key for key, tensor in new.items() if tensor.dtype in _PER_ROW]
    scales = [key for key in new if key not in values]
    if len(gone) != 1 or len(values) != 1 or len(scales) != 1:
        return None
    weight, value, scale = loaded[gone[0]], new[values[0]], new[scales[0]]
    if weight.dim() != 2 or weight.dtype not in _WIDE or weight.shape[1] > MAX_COLUMNS or scale.dtype != torch.float32:
        return None
    rows = _dense_rows(value)
    if rows is None or rows.shape != weight.shape or not scale.is_contiguous():
        return None
    if scale.numel() == len(weight) > 1:
        form = _PER_ROW[value.dtype]
    elif scale.numel() == 1 and value.dtype == torch.float8_e4m3fn:
        form = fp8_per_tensor
    else:
        return None
    return Recipe(form, False, gone[0], values[0], scales[0], (_layout(value), _layout(scale)))


def _dense_rows(values: torch.Tensor) -> torch.Tensor | None:
    """Return a 2-D tensor, or its transpose, such that rows are contiguous."""
    if values.dim() != 2:
        return None
    return next((view for view in (values, values.t()) if view.stride(1) == 1), None)


def same_contents(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether both have the same layout and the same bytes."""
    return (
        a is not None
        and b is not None
        and _layout(a) == _layout(b)
        and _same_bytes(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bytes as whole words where possible: a GPU takes a byte of scratch memory for each number."""
    if a.storage_offset() % 8 or b.storage_offset() % 8:
        return torch.equal(a, b)
    whole = a.numel() // 8 * 8
    return torch.equal(a[:whole].view(torch.int64), b[:whole].view(torch.int64)) and torch.equal(a[whole:], b[whole:])


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype
