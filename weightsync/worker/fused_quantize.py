"""Quantisation of weights directly into the tensors of their kernel.

It serves modules with no other post-processing. Each weight, a matrix or the matrices of all experts, becomes 8-bit
values and scales, in a known form. A kernel may want the outcome rearranged (`placement.py`). An experiment finds these
modules: post-processing and the form run on the same random weights, and must leave the same bits. Any other module is
reloaded. A reload is always correct.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from weightsync.kernels.quantize import (
    BlockForm,
    Form,
    block_forms,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
)
from weightsync.kernels.rows import MAX_COLUMNS, AllReduceMax, Job, RowQuantiser, WeightPiece
from weightsync.planning.layout import CopyOp
from weightsync.worker.engine_model import any_worker
from weightsync.worker.placement import Placement, as_bits, find_placement, same_bits

logger = logging.getLogger(__name__)

SCALES = ("_scale", "_scale_inv")
"""The endings of a scale's key, after the key of its weight."""
_BITS = 8
"""Random bits of a value, or of a scale, made from random weights."""
_WIDE = (torch.bfloat16, torch.float16, torch.float32)

AnyForm = Form | BlockForm
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
Shape = tuple[int, int, int]
"""(matrices, rows, columns) of a weight."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """The quantisation of one weight of a module.

    form: turns each matrix of the parameter `weight`, as it is loaded, into values and scales.
    shared: whether the workers of the engine agree on its scales.
    weight: the key of the parameter, and afterwards of its values.
    scale: the key of the scales.
    wide: the dtype of the weight before it is quantised.
    shape: the shape of the weight.
    values_at, scale_at: the places of values and scales, each with three dimensions, in the live tensors.
    layouts: the layouts of the live tensors, if post-processing makes them.
    """

    form: AnyForm
    shared: bool
    weight: str
    scale: str
    wide: torch.dtype
    shape: Shape
    values_at: Placement
    scale_at: Placement
    layouts: tuple[Layout, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether rows lie dense, and only whole rows are swapped, with their scales."""
        moved = self.values_at.swapped if self.form.height else None
        return self.values_at.stride[2] == 1 and self.values_at.swapped in (None, 1) and self.scale_at.swapped == moved

    @property
    def height(self) -> int | None:
        """The rows to quantise before the other rows have arrived. None: all rows of all matrices come first."""
        return None if self.shared else self.form.height

    def job(self, live: Tensors, pieces: Iterable[WeightPiece]) -> Job:
        """Return the job to fill a module's parameters `live` from `pieces` of some matrices, all rows or some."""
        values = _at(live[self.weight], self.values_at, self.shape)
        scale = _at(live[self.scale], self.scale_at, (self.shape[0], *self.form.scale_shape(*self.shape[1:])))
        parts = [part for piece in pieces for part in self.placed(piece)]
        first = min(part.matrix for part in parts)
        own = slice(first, max(part.matrix + len(part.source) for part in parts))
        moved = tuple(part._replace(matrix=part.matrix - first) for part in parts)
        return Job(moved, values[own], scale[own])

    def placed(self, piece: WeightPiece) -> Iterator[WeightPiece]:
        """Yield a piece's rows at their places. A kernel may want the halves of each matrix swapped."""
        if self.values_at.swapped is None:
            yield piece
            return
        matrix, row, source = piece
        half = self.shape[1] // 2
        first = min(max(half - row, 0), source.shape[1])
        if first:
            yield WeightPiece(matrix, row + half, source[:, :first])
        if first < source.shape[1]:
            yield WeightPiece(matrix, row + first - half, source[:, first:])

    def fits(self, live: Tensors) -> bool:
        """Return whether a live module's parameters have the recipe's layouts."""
        found = [live.get(self.weight), live.get(self.scale)]
        return tuple(None if tensor is None else _layout(tensor) for tensor in found) == self.layouts

    def can_cut(self, row: int, rows: int) -> bool:
        """Return whether rows can be quantised without the other rows of their matrix."""
        height = self.height
        return height is not None and row % height == 0 and (rows % height == 0 or row + rows == self.shape[1])


def find_recipes(
    loaded: Tensors, processed: Tensors, all_reduce_max: AllReduceMax | None, refused: set[AnyForm]
) -> tuple[Recipe, ...]:
    """Return the recipes that turned a module's parameters from `loaded` into `processed`. (): no known forms do.

    With `all_reduce_max` this is collective among workers, and their answers agree. Give it if and only if there are
    several workers with different weights.

    refused: forms of blocks with other bits than vLLM's in some module. vLLM has one function for all modules. More
        forms are added.
    """
    new = {key for key, tensor in processed.items() if not same_contents(loaded.get(key), tensor)}
    gone = [key for key, tensor in loaded.items() if not same_contents(tensor, processed.get(key))]
    scales = {key: next((key + end for end in SCALES if key + end in new), "") for key in gone}
    if new != {*scales, *scales.values()}:
        return ()
    found: list[Recipe] = []
    for keys in scales.items():
        for form, shared in _candidates(keys, loaded, processed, all_reduce_max is not None):
            if form in refused:
                continue
            if (recipe := _find_recipe(form, shared, keys, loaded, processed, all_reduce_max)) is not None:
                found.append(recipe)
                break
            if isinstance(form, BlockForm):
                refused.add(form)
    return tuple(found) if len(found) == len(scales) else ()


def holds(recipe: Recipe, loaded: Tensors, processed: Tensors, all_reduce_max: AllReduceMax | None) -> bool:
    """Return whether the recipe leaves the same bits as post-processing.

    With `all_reduce_max` this is collective among workers, and all get the same answer.
    """
    theirs = {key: processed[key] for key in (recipe.weight, recipe.scale)}
    mine = {key: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for key, t in theirs.items()}
    job = recipe.job(mine, [WeightPiece(0, 0, loaded[recipe.weight].view(recipe.shape))])
    is_run = _run(recipe.form, job, all_reduce_max if recipe.shared else None)
    is_same = is_run and all(same_contents(mine[key], tensor) for key, tensor in theirs.items())
    return not any_worker(not is_same, all_reduce_max, job.values.device)


def pieces_of(op: CopyOp, source: torch.Tensor, shape: Shape, like: torch.Tensor) -> list[WeightPiece] | None:
    """Return the rows copied by `op` into a weight of this shape.

    `source` is a view of received memory. None unless these are whole dense rows in the dtype of `like` on its device.
    """
    _, rows, columns = shape
    dims = [dim for dim in zip(op.size, op.dst_stride, source.stride(), strict=True) if dim[0] > 1]
    is_readable = source.dtype == like.dtype and source.device == like.device
    steps = [op.dst_offset, *(to for _, to, _ in dims[:-1])]
    if not is_readable or not dims or dims.pop() != (columns, 1, 1) or any(step % columns for step in steps):
        return None
    run = next((dim for dim in reversed(dims) if dim[1] == columns), (1, columns, 0))
    rest = [dim for dim in dims if dim is not run]
    matrix_dim = next((dim for dim in rest if dim[1] == rows * columns), (1, rows * columns, 0))
    others = [dim for dim in rest if dim is not matrix_dim]
    found = []
    for index in product(*(range(size) for size, _, _ in others)):
        first = op.dst_offset + sum(n * to for n, (_, to, _) in zip(index, others, strict=True))
        offset = source.storage_offset() + sum(n * of for n, (_, _, of) in zip(index, others, strict=True))
        size, stride = (matrix_dim[0], run[0], columns), (matrix_dim[2], run[2], 1)
        pieces = _cut(source.as_strided(size, stride, offset), first // columns, rows)
        if pieces is None:
            return None
        found += pieces
    return found


def _cut(source: torch.Tensor, first: int, rows: int) -> list[WeightPiece] | None:
    """Return rows of matrices with so many `rows` as pieces. A run of rows goes on in the next matrix.

    first: the number of the first row, counted over all matrices. None: it would have to be a run in each matrix.
    """
    matrix, row = divmod(first, rows)
    if row + source.shape[1] <= rows:
        return [WeightPiece(matrix, row, source)]
    if len(source) > 1:
        return None
    run = source[0]
    head = -first % rows
    whole = (len(run) - head) // rows * rows
    parts = [run[:head][None], run[head : head + whole].unflatten(0, (-1, rows)), run[head + whole :][None]]
    starts = [first, first + head, first + head + whole]
    return [WeightPiece(*divmod(at, rows), part) for at, part in zip(starts, parts, strict=True) if part.numel()]


def _candidates(
    keys: tuple[str, str], loaded: Tensors, processed: Tensors, is_shared: bool
) -> Iterator[tuple[AnyForm, bool]]:
    """Yield the possible forms of a weight, by shapes and dtypes, and whether workers share its scales.

    All workers find the same ones.
    """
    weight, values, scale = loaded[keys[0]], *(processed[key] for key in keys)
    is_known = weight.dtype in _WIDE and weight.dim() in (2, 3) and weight.is_contiguous() and weight.numel()
    is_known = is_known and scale.dtype == torch.float32 and values.numel() == weight.numel()
    if not is_known or weight.shape[-1] > MAX_COLUMNS:
        return
    matrices, rows, columns = as_matrices(weight)
    blocks = block_forms if weight.is_cuda else (fp8_per_block,)
    # One block has the scale of a whole matrix, but not the scale's number of dimensions.
    floats = (*blocks, fp8_per_tensor) if scale.dim() == weight.dim() else (fp8_per_tensor, *blocks)
    for form in (fp8_per_channel, int8_per_channel, *floats):
        if form.dtype == values.dtype and scale.numel() == matrices * prod(form.scale_shape(rows, columns)):
            yield from [(form, False), (form, True)] if is_shared and isinstance(form, Form) else [(form, False)]


def _find_recipe(
    form: AnyForm,
    shared: bool,
    keys: tuple[str, str],
    loaded: Tensors,
    processed: Tensors,
    all_reduce_max: AllReduceMax | None,
) -> Recipe | None:
    """Return the recipe with this form, if it leaves the same bits as post-processing."""
    weight, (theirs, their_scale) = loaded[keys[0]], (processed[key] for key in keys)
    shape = as_matrices(weight)
    values = torch.empty(shape, dtype=form.dtype, device=weight.device)
    scale = weight.new_empty((shape[0], *form.scale_shape(*shape[1:])), dtype=torch.float32)
    job = Job((WeightPiece(0, 0, weight.view(shape)),), values, scale)
    is_run = _run(form, job, all_reduce_max if shared else None)
    places = (_find_place(values, theirs), _find_place(scale, their_scale)) if is_run else (None, None)
    recipe, (values_at, scale_at) = None, places
    if values_at is not None and scale_at is not None:
        layouts = _layout(theirs), _layout(their_scale)
        recipe = Recipe(form, shared, *keys, weight.dtype, shape, values_at, scale_at, layouts)
    is_found = recipe is not None and recipe.is_possible
    return None if any_worker(not is_found, all_reduce_max, weight.device) else recipe


def _find_place(mine: torch.Tensor, theirs: torch.Tensor) -> Placement | None:
    """Return the place of each element of `mine`, of three dimensions, in a tensor of the kernel."""
    if theirs.numel() != mine.numel() or theirs.dim() > mine.dim():
        return None
    if theirs.is_contiguous() and (found := find_placement(mine, theirs.view(mine.shape), _BITS)) is not None:
        return found
    return find_placement(mine, theirs[(None,) * (mine.dim() - theirs.dim())], _BITS)


def _run(form: AnyForm, job: Job, share: AllReduceMax | None) -> bool:
    """Quantise, and return whether the device could."""
    try:
        RowQuantiser(form, [job], share).run()
    except Exception:
        shape = tuple(job.values.shape)
        logger.warning("weights of shape %s are reloaded: they cannot be quantised here", shape, exc_info=True)
        return False
    return True


def as_matrices(weight: torch.Tensor) -> Shape:
    """Return the shape of a weight as matrices."""
    matrices = weight.shape[0] if weight.dim() == 3 else 1
    return matrices, weight.shape[-2], weight.shape[-1]


def _at(live: torch.Tensor, place: Placement, shape: Shape) -> torch.Tensor:
    """Return a live tensor in the loader's order, apart from swapped halves, as a view."""
    return live.data.as_strided(shape, place.stride)


def same_contents(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether both have the same layout and the same bytes."""
    return a is not None and b is not None and _layout(a) == _layout(b) and same_bits(as_bits(a), as_bits(b))


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype
