"""Recipes of an engine from an 8-bit checkpoint, for tensors of a trainer in 16 or 32 bits.

The engine's parameters hold the checkpoint's values and scales. The trace of the checkpoint's tensors shows their
places. A weight is quantised directly into both under two conditions. Every tensor of the trainer brings whole rows or
blocks, and post-processing only rearranges both parameters or leaves them alone. The engine's loader takes all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from msgspec.structs import replace

from weightsync.kernels.quantize import BLOCK, BlockForm, Form
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Box, LoadCopy, Manifest, row_major
from weightsync.worker.checkpoint_quantize import QuantizedTensors
from weightsync.worker.engine_model import EngineModel
from weightsync.worker.fused_quantize import SCALES, AnyForm, Recipe, Shape, as_matrices
from weightsync.worker.module_groups import ModuleGroup, parameters_of
from weightsync.worker.placement import Placement
from weightsync.worker.trace import Trace


def find_checkpoint_recipes(
    groups: Iterable[ModuleGroup],
    trace: Trace,
    manifest: Manifest,
    pairs: Mapping[str, QuantizedTensors],
    model: EngineModel,
) -> dict[ModuleGroup, tuple[Recipe, ...]]:
    """Return the recipes of the groups that need no loader.

    trace: the loader's actions for the tensors of the checkpoint.
    manifest: the trainer's tensors.
    """
    copies = grouped(trace.copies if pairs else (), lambda copy: copy.param)
    made = {meta.name for pair in pairs.values() for meta in pair.made}
    odd = {fill.param for fill in trace.fills} | trace.computed.keys()
    found = {}
    for group in groups:
        of_made = {param for param in group.params if any(copy.name in made for copy in copies.get(param, ()))}
        if not of_made or not group.in_place or len(group.live) > 1 or not odd.isdisjoint(group.params):
            continue
        keys = [key for key, _ in parameters_of(group.pristine[0]) if group.param(key) in of_made]
        recipes = [_recipe(group, key, copies, manifest, pairs, model) for key in keys if not key.endswith(SCALES)]
        known = [recipe for recipe in recipes if recipe is not None]
        if {*keys} == {key for recipe in known for key in (recipe.weight, recipe.scale)}:
            found[group] = tuple(known)
    return found


def _recipe(
    group: ModuleGroup,
    weight: str,
    copies: Mapping[str, Sequence[LoadCopy]],
    manifest: Manifest,
    pairs: Mapping[str, QuantizedTensors],
    model: EngineModel,
) -> Recipe | None:
    """Return the recipe of a parameter with values, if all of its rows or blocks come whole."""
    pristine = dict(parameters_of(group.pristine[0]))
    scale = next((weight + end for end in SCALES if weight + end in pristine), "")
    of_values = copies[group.param(weight)]
    forms = {pairs[copy.name].quantise if copy.name in pairs else None for copy in of_values}
    form = forms.pop()
    if forms or not scale or not isinstance(form, (Form, BlockForm)):
        return None
    shape = as_matrices(pristine[weight])
    per_matrix = form.scale_shape(*shape[1:])
    if as_matrices(pristine[scale]) != (shape[0], *per_matrix) or pristine[scale].dtype != torch.float32:
        return None
    # Workers with parts of the same rows find the scales of whole rows together.
    parts = {manifest[copy.name].shape[1] / copy.box.size[1] for copy in of_values} if form.per_row else {1}
    if len(parts) > 1 or not parts <= {1, model.sharing}:
        return None
    shared = parts != {1}
    param, suffix = group.param(scale), scale.removeprefix(weight)
    expected = {
        _copy_of_scale(copy, form, shape, manifest[copy.name].shape, shared, param, copy.name + suffix)
        for copy in of_values
    }
    if expected != {_without_idle_strides(copy) for copy in copies.get(group.param(scale), ())}:
        return None
    values_at, scale_at = (_place(group, key, pristine[key]) for key in (weight, scale))
    recipe = Recipe(form, shared, weight, scale, model.dtype, shape, values_at, scale_at)
    return recipe if recipe.is_possible else None


def _copy_of_scale(
    copy: LoadCopy, form: AnyForm, shape: Shape, full: Sequence[int], shared: bool, param: str, name: str
) -> LoadCopy | None:
    """Return the copy of a tensor's scales, `name`, into `param` beside `copy`, of its values.

    None: `copy` tears rows or blocks of the tensor, or of the parameter.

    shape: the shape of the parameter of values. full: the shape of the tensor. shared: whether `copy` has a part of
        whole rows.
    """
    _, rows, columns = shape
    (top, left), (high, wide) = copy.box.start, copy.box.size
    steps = (BLOCK, BLOCK) if isinstance(form, BlockForm) else (1, wide if shared else full[1])
    matrix, row = divmod(copy.offset // columns, rows)
    cuts = [*zip((top, left), (high, wide), steps, full, strict=True), (row, high, steps[0], rows - row)]
    is_torn = any(first % step or (size % step and size != whole) for first, size, step, whole in cuts)
    has_rows = _without_idle_strides(copy).stride in ((columns, 1), (0, 1))
    if is_torn or wide != columns or copy.offset % columns or not has_rows:
        return None
    down, across = form.scale_shape(rows, columns)
    box = Box((top // steps[0], 0 if form.per_row else left // steps[1]), form.scale_shape(high, wide))
    offset = (matrix * down + row // steps[0]) * across
    return _without_idle_strides(LoadCopy(name, box, param, offset, (across, 1)))


def _without_idle_strides(copy: LoadCopy) -> LoadCopy:
    """Return a copy with stride 0 for each dimension of one element."""
    stride = tuple(step if n > 1 else 0 for n, step in zip(copy.box.size, copy.stride, strict=True))
    return replace(copy, stride=stride)


def _place(group: ModuleGroup, key: str, param: torch.Tensor) -> Placement:
    """Return the place of a parameter's elements in the live tensor, with three dimensions."""
    own = group.placements.get(group.param(key)) or Placement(row_major(param.shape), None)
    more = 3 - param.dim()
    return Placement((0,) * more + own.stride, None if own.swapped is None else own.swapped + more)
