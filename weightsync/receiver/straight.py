"""The third road: a weight is quantised straight into the tensors that its kernel works with.

It is for modules whose post-processing does nothing but that: one matrix becomes 8-bit values and scales by a form that
weightsync knows, and all else stays. Whether it does is found out by experiment: post-processing and the straight way
run on the same random weights, and must leave the same bits. A module that fails takes the reload road, which is always
right. This module knows nothing about vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weightsync.kernels.quantize import Form, fp8_per_channel, fp8_per_tensor, int8_per_channel
from weightsync.kernels.rows import MAX_COLUMNS, Job, RowQuantiser, Share
from weightsync.layout import CopyStep

logger = logging.getLogger(__name__)

_PER_ROW: dict[torch.dtype, Form] = {torch.float8_e4m3fn: fp8_per_channel, torch.int8: int8_per_channel}
_WIDE = (torch.bfloat16, torch.float16, torch.float32)

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """Of one module: parameter `weight` of shape (rows, columns) as it is loaded becomes, in `form`, the parameters
    `values` and `scale`, whose layout is `layouts`. `shared` when the workers of the engine agree on its scales."""

    form: Form
    shared: bool
    weight: str
    values: str
    scale: str
    layouts: tuple[Layout, Layout]

    def job(self, live: Tensors, pieces: Sequence[tuple[int, torch.Tensor]]) -> Job:
        """What fills the parameters `live` of a module from `pieces` of its weight."""
        values = _dense_rows(live[self.values].data)
        assert values is not None  # `layouts` says so
        return Job(tuple(pieces), values, live[self.scale].data.view(-1))

    def fits(self, live: Tensors) -> bool:
        """Whether a live module has its parameters where the recipe wants them."""
        found = [live.get(self.values), live.get(self.scale)]
        return tuple(None if tensor is None else _layout(tensor) for tensor in found) == self.layouts


def find_recipe(loaded: Tensors, processed: Tensors, share: Share | None) -> Recipe | None:
    """How a module's parameters went from `loaded` to `processed`; None when it is not in any of the ways known here.

    With `share`, collective among workers, which all get answers that agree: give it if and only if there are several,
    and weights that differ between them.
    """
    new = {key: tensor for key, tensor in processed.items() if not same_contents(loaded.get(key), tensor)}
    gone = [key for key, tensor in loaded.items() if not same_contents(tensor, processed.get(key))]
    if (candidate := _candidate(loaded, gone, new)) is None:
        return None
    recipes = [candidate] if share is None else [candidate, replace(candidate, shared=True)]
    return next((recipe for recipe in recipes if holds(recipe, loaded, processed, share)), None)


def holds(recipe: Recipe, loaded: Tensors, processed: Tensors, share: Share | None) -> bool:
    """Whether the recipe leaves the bits that post-processing has left. With `share`, collective among workers, which
    all get the same answer."""
    mine = {key: torch.empty_like(processed[key]) for key in (recipe.values, recipe.scale)}
    job = recipe.job(mine, [(0, loaded[recipe.weight])])
    try:
        RowQuantiser(recipe.form, [job], share if recipe.shared else None).run()
        differs = not all(same_contents(tensor, processed[key]) for key, tensor in mine.items())
    except Exception:
        logger.warning(
            "weights of shape %s are reloaded: they cannot be quantised straight", job.values.shape, exc_info=True
        )
        differs = True
    if share is None:
        return not differs
    doubt = torch.tensor([float(differs)], device=loaded[recipe.weight].device)
    share(doubt)
    return not doubt.item()


def pieces_of(
    steps: Sequence[CopyStep], sources: Sequence[torch.Tensor], weight: torch.Tensor, device: torch.device
) -> list[tuple[int, torch.Tensor]] | None:
    """The pieces of a `weight`, as (first row, rows), that `steps` would copy into it from `sources`, views as these
    say; None unless they are whole dense rows in its dtype, on the `device` where a job will run."""
    columns = weight.shape[1]
    pieces = []
    for step, source in zip(steps, sources, strict=True):
        dense = source.dim() == 2 and source.shape[1] == columns and source.stride(1) == 1
        readable = dense and source.dtype == weight.dtype and source.device == device
        placed = step.dst_stride in ((columns, 1), (0, 1)) and step.dst_offset % columns == 0
        if not (readable and placed):
            return None
        pieces.append((step.dst_offset // columns, source))
    return pieces if sum(len(source) for _, source in pieces) == len(weight) else None


def _candidate(loaded: Tensors, gone: Sequence[str], new: Tensors) -> Recipe | None:
    """The only recipe that these tensors can belong to, by their shapes and dtypes, which all workers have alike."""
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
    """A 2-D tensor, or its transpose, with rows that are contiguous."""
    if values.dim() != 2:
        return None
    return next((view for view in (values, values.t()) if view.stride(1) == 1), None)


def same_contents(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether both have the same layout and the same bytes."""
    return (
        a is not None
        and b is not None
        and _layout(a) == _layout(b)
        and _same_bytes(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compared as whole words where they can be: a GPU takes a byte of scratch memory for each number."""
    if a.storage_offset() % 8 or b.storage_offset() % 8:
        return torch.equal(a, b)
    whole = a.numel() // 8 * 8
    return torch.equal(a[:whole].view(torch.int64), b[:whole].view(torch.int64)) and torch.equal(a[whole:], b[whole:])


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype
