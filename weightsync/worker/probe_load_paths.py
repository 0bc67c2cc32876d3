"""The effects of post-processing on each module group, by experiment. The load planner chooses load paths by them.

Post-processing runs over a scratch copy of the group with random weights. A group is loaded in place only if
post-processing leaves it untouched, or only rearranges its elements. A group is quantised on the way only if a known
form gives the same bits. All other groups are reloaded. A reload is always correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.worker.engine_model import EngineModel
from weightsync.worker.fused_quantize import AnyForm, Recipe, find_recipes, holds, same_contents
from weightsync.worker.module_groups import ModuleGroup, parameters_of
from weightsync.worker.placement import Placement, find_placement
from weightsync.worker.reachable import children_of, diff_objects, same_layout
from weightsync.worker.reload import ABSENT, Snapshot, attributes_of, install, materialise


def probe_groups(groups: list[ModuleGroup], model: EngineModel) -> None:
    """Note the effects of post-processing in each group. Of equal groups, only one is tried.

    Collective: all workers with parts of the same modules call this.

    Raises:
        UnsupportedError: On a GPU, a kernel keeps weights at an address that a reload cannot keep.
    """
    verdicts: dict[Any, _Verdict] = {}
    unsafe: list[str] = []
    refused: set[AnyForm] = set()
    for group in groups:
        signature = _signature(group, model)
        if signature not in verdicts:
            verdicts[signature] = _try_post_process(group, model, refused)
        verdict = verdicts[signature]
        opaque = [*verdict.opaque, *_released(group, verdict)]
        group.changed, group.opaque = verdict.changed, bool(opaque)
        group.in_place = verdict.layouts is not None and all(
            same_layout(mine._parameters.get(key), param)
            for mine, own in zip(group.live, verdict.layouts, strict=True)
            for key, param in own.items()
        )
        if group.in_place:
            group.placements = {group.param(key): own for key, own in verdict.placements.items()}
        if all(recipe.fits(dict(parameters_of(group.live[0]))) for recipe in verdict.recipes):
            group.recipes = verdict.recipes
        if not group.in_place and opaque and model.device.type != "cpu":
            unsafe.append(f"{group.names[0]} ({', '.join(opaque)})")
    for group in groups:
        if any(recipe.form in refused for recipe in group.recipes):
            group.recipes = ()  # its weights were too few to tell the forms apart
    if unsafe:
        raise UnsupportedError(
            f"{len(unsafe)} modules keep weights inside kernel objects, and CUDA graphs have captured their "
            f"addresses. This version cannot reload them in place: {'; '.join(unsafe[:3])}. Use another kernel "
            "backend, or restart the engine from a checkpoint"
        )


@dataclass(frozen=True)
class _Verdict:
    """The effects of post-processing on a scratch copy.

    layouts: each module's parameters, without memory, in the layouts for in-place loading. None: it is incorrect.
    placements: the rearranged ones among them, of a single module.
    recipes: post-processing only quantised the weights of a single module, in these ways.
    changed: the attributes set by it, for each part.
    opaque: objects made from the weights. A reload could not fill them again.
    kept: the keys of each module's parameters with elements.
    """

    layouts: Sequence[Mapping[str, torch.Tensor]] | None
    placements: Mapping[str, Placement]
    recipes: tuple[Recipe, ...]
    changed: list[list[str]]
    opaque: list[str]
    kept: Sequence[frozenset[str]]


def _released(group: ModuleGroup, verdict: _Verdict) -> list[str]:
    """Return the parameters released by another module, after a tensor was derived from each.

    MLA's attention releases `kv_b_proj` on CPUs with AMX.
    """
    return [
        f"{name}.{key} was released"
        for name, module, kept in zip(group.names, group.live, verdict.kept, strict=True)
        for key, param in parameters_of(module)
        if key in kept and not param.numel()
    ]


def _signature(group: ModuleGroup, model: EngineModel) -> Any:
    """Return a key that is equal for groups with equal post-processing."""
    return tuple(
        (
            type(part),
            tuple((key, tuple(p.shape), tuple(p.stride()), p.dtype) for key, p in parameters_of(part)),
            # For example, the module's split between workers, and its kernel.
            tuple((key, value) for key, value in vars(part).items() if isinstance(value, (bool, int, Enum))),
        )
        for module in group.pristine
        for part in model.parts(module)
    )


def _try_post_process(group: ModuleGroup, model: EngineModel, refused: set[AnyForm]) -> _Verdict:
    first = _Attempt(group, model)
    opaque: list[str] = []
    is_bare, placements = not first.made, first.placements
    if any(first.changed) or placements:
        is_bare, opaque, placements = _compare(first, _Attempt(group, model, other_seed=1_000_003), group, model)
    recipes: tuple[Recipe, ...] = ()
    if is_bare and not opaque and not first.is_untouched and first.keeps_buffers and len(group.pristine) == 1:
        recipes = find_recipes(first.loaded, first.processed, model.all_reduce_max, refused)
        # Weights of about 1e-6 fall below the lower bound that a kernel may set for scales. Weights of 0.0 need the
        # kernel's scale for a row of zeros. The generator keeps one attempt in memory at a time.
        small = (_Attempt(group, model, size=size) for size in (1e-6, 0.0) if recipes)
        for attempt in small:
            if not all(holds(each, attempt.loaded, attempt.processed, model.all_reduce_max) for each in recipes):
                recipes = ()
            del attempt  # before the next one takes its memory
    layouts: Sequence[Mapping[str, torch.Tensor]] | None = None
    if is_bare and not opaque and first.is_untouched:
        layouts = [dict(parameters_of(module)) for module in group.pristine]
    elif is_bare and not opaque and placements:
        layouts = [_laid_out(first.processed)]
    return _Verdict(layouts, placements if layouts else {}, recipes, first.changed, opaque, first.kept)


def _compare(
    first: _Attempt, second: _Attempt, group: ModuleGroup, model: EngineModel
) -> tuple[bool, list[str], dict[str, Placement]]:
    """Compare two attempts with other weights.

    Objects made in them must differ in their tensors alone, and hold no table of addresses.

    Returns whether the made objects need no reload, the opaque objects, and the placements of both. The objects need
    none if they hold nothing of the weights but the parameters themselves, and nothing that sleep may discard.
    """
    own = {id(part) for module in group.pristine for part in model.parts(module)}
    made = diff_objects(first.made, second.made, "", own)
    opaque = diff_objects(first.changed_values, second.changed_values, "", own).differ + made.closed
    opaque += [path for path, a, b in made.tensors if a.dtype == torch.int64 and not torch.equal(a, b)]
    others = [(a, b) for _, a, b in made.tensors if a.untyped_storage().data_ptr() not in first.known]
    is_bare = not (others and model.may_discard) and all(same_contents(a, b) for a, b in others)
    return is_bare, opaque, first.placements if first.placements == second.placements else {}


class _Attempt:
    """One run of post-processing over a scratch copy of a group, with random weights.

    size: the factor of the weights, which are normal with a standard deviation of 1.
    is_untouched: the parameters have their layout and contents, and the buffers are the same objects.
    keeps_buffers: the buffers are the same objects.
    placements: the arrangement of each parameter of a single module, if post-processing only rearranges them.
    changed: the attributes set by it, for each part. `changed_values` has their values.
    made: the attributes among them with an object made in it.
    known: the addresses of the parameters' storages after it.
    kept: the keys of each module's parameters with elements after it.
    loaded, processed: the first module's parameters before and after.
    """

    def __init__(self, group: ModuleGroup, model: EngineModel, size: float = 1.0, other_seed: int = 0) -> None:
        holders = [part for module in group.pristine for part in model.parts(module)]
        fresh = {id(param): materialise(param, model.device) for param in group.pristine_parameters()}
        with ExitStack() as stack:
            for part in holders:
                stack.callback(Snapshot(part).restore)
            for module in group.pristine:
                install(module, module, fresh)
            for param in fresh.values():
                _randomise(param, model.identity.rank + other_seed, size)
            copies = {id(param): param.detach().clone() for param in fresh.values()}
            loaded = [{key: copies[id(param)] for key, param in parameters_of(module)} for module in group.pristine]
            buffers = [dict(module._buffers) for module in group.pristine]
            before = [attributes_of(part) for part in holders]
            for module in group.pristine:
                model.post_process(module)
            after = [attributes_of(part) for part in holders]
            self.changed = [
                [key for key in {**old, **new} if old.get(key, ABSENT) is not new.get(key, ABSENT)]
                for old, new in zip(before, after, strict=True)
            ]
            self.changed_values = [
                {key: new[key] for key in keys if key in new} for keys, new in zip(self.changed, after, strict=True)
            ]
            # vLLM may register a new parameter over the same memory, and may also copy.
            processed = [dict(parameters_of(module)) for module in group.pristine]
            self.known = {param.untyped_storage().data_ptr() for those in processed for param in those.values()}
            self.kept = [frozenset(key for key, param in those.items() if param.numel()) for those in processed]
            own = {id(part) for part in holders}
            self.made = {
                key: value
                for values in self.changed_values
                for key, value in values.items()
                if not _is_weightless(value, self.known, own)
            }
            self.keeps_buffers = all(
                module._buffers.keys() == those.keys() and all(module._buffers[key] is those[key] for key in those)
                for module, those in zip(group.pristine, buffers, strict=True)
            )
            self.is_untouched = self.keeps_buffers and all(map(_are_as_loaded, processed, loaded))
            is_rearranged = self.keeps_buffers and not self.is_untouched and len(loaded) == 1
            self.placements = _find_placements(processed[0], loaded[0]) if is_rearranged else {}
            self.loaded = loaded[0]
            self.processed = {key: param.detach() for key, param in processed[0].items()}


def _are_as_loaded(processed: dict[str, nn.Parameter], loaded: dict[str, torch.Tensor]) -> bool:
    return processed.keys() == loaded.keys() and all(
        same_contents(param.detach(), loaded[key]) for key, param in processed.items()
    )


def _find_placements(processed: Mapping[str, nn.Parameter], loaded: Mapping[str, torch.Tensor]) -> dict[str, Placement]:
    """Return the placement of each parameter. Return nothing if some parameter was changed in another way."""
    found = {key: find_placement(own, processed[key].detach()) for key, own in loaded.items() if key in processed}
    known = {key: own for key, own in found.items() if own is not None}
    return known if known.keys() == loaded.keys() == processed.keys() else {}


def _laid_out(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same layouts without memory."""
    return {
        key: torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
        for key, own in tensors.items()
    }


_STRIP_ELEMENTS = 1 << 22
"""Elements of a strip. A strip bounds the scratch memory."""


def _randomise(tensor: torch.Tensor, seed: int, size: float) -> None:
    """Fill a tensor from a generator of its own: the engine samples from the default generator.

    Most of a matrix lies half-way between two 8-bit values, once a row is scaled to its largest number. Such values
    show how a kernel divides and rounds.
    """
    generator = torch.Generator(tensor.device).manual_seed(seed)
    with torch.no_grad():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            _bytes(tensor).random_(0, 2, generator=generator)
            return
        data = tensor.data.normal_(generator=generator)
        data = data.flatten(0, -2) if data.dim() > 2 and data.is_contiguous() else data
        if data.dim() == 2 and data.shape[1] > 2:
            for rows in data.split(max(1, _STRIP_ELEMENTS // data.shape[1])):
                largest = rows.abs().amax(dim=1, keepdim=True).float()
                count = (len(rows), data.shape[1] // 3)
                steps = torch.randint(0, 126, count, generator=generator, device=data.device, dtype=torch.uint8)
                rows[:, 1::3][:, : count[1]] = largest * (steps + 0.5) / 127
                grid, above = (number.view(torch.float8_e4m3fn).float() for number in (steps, steps + 1))
                rows[:, 2::3][:, : count[1]] = largest * (grid + above) / 896
        data *= size


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.data.untyped_storage())


def _is_weightless(value: Any, known: set[int], own: set[int], depth: int = 0, seen: set[int] | None = None) -> bool:
    """Return whether an object holds nothing made from the weights.

    It may hold plain values, code, tensors in the memory of the group's parameters (`known`), and the group's own
    modules (`own`).
    """
    seen = set() if seen is None else seen
    if id(value) in seen or id(value) in own:
        return True
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 0 or value.untyped_storage().data_ptr() in known
    inside = children_of(value)
    if inside is None or (inside and (depth > 12 or len(seen) > 5000)):
        return False
    return all(_is_weightless(item, known, own, depth + 1, seen) for _, item in inside)
