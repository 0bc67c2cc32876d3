"""One worker's load plan: the tensors that its model takes, their regions in its parameters, and the misfits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from posixpath import commonpath

import torch
from msgspec import structs
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Box, LoadCopy, Manifest, coverage, fuse_groups, itemsize
from weightsync.planning.load_plan import LoadPlan
from weightsync.planning.prefixes import find_rename
from weightsync.worker import ties
from weightsync.worker.checkpoint_quantize import QuantizedTensors, collapse, expert_padding, renamed, trace_quantized
from weightsync.worker.engine_model import DRAFTER, EngineModel
from weightsync.worker.fused_checkpoint import find_checkpoint_recipes
from weightsync.worker.module_groups import Addresses, Kernels, ModuleGroup, find_groups, moved_views
from weightsync.worker.placement import place
from weightsync.worker.probe_load_paths import probe_groups
from weightsync.worker.repeated_layers import trace_by_example
from weightsync.worker.trace import Feed, Trace, named_tensors, run_loader, trace_loader, uncovered, writers

IN_PLACE, FUSED_QUANTIZE, RELOAD, NATIVE_LOADER = LOAD_PATHS = ("in_place", "fused_quantize", "reload", "native_loader")


@dataclass(frozen=True)
class TracedLoad:
    """A load plan with the worker's own records of it.

    keep: patterns of the parameters that no push fills.
    answer: the plan as the trainer is told.
    trace: the loader's actions, in terms of the trainer's tensors.
    placed: the trace's copies with their places in live tensors.
    pairs: the tensors to quantise for the loader.
    load_path: the load path of each group of modules, in the model's order.
    group_of: the group of each parameter.
    sources: the names of the tensors loaded into each group.
    filled: the parameters and buffers written by the loader.
    buffers: the buffers among them.
    """

    manifest: Manifest
    keep: Sequence[str]
    answer: LoadPlan
    trace: Trace
    placed: Sequence[LoadCopy]
    pairs: Mapping[str, QuantizedTensors]
    load_path: Mapping[ModuleGroup, str]
    group_of: Mapping[str, ModuleGroup]
    sources: Mapping[ModuleGroup, Sequence[str]]
    filled: set[str]
    buffers: set[str]


class LoadPlanner:
    """The planner of one model. It lives as long as the engine, and finds groups and addresses once."""

    def __init__(self, model: EngineModel) -> None:
        self.traced: TracedLoad | None = None
        """The last plan. None before the first `make`, and after one that has failed."""
        self.addresses = Addresses(model, [])
        self.kernels = Kernels(model, [])
        self.outlived: list[object] = []
        """The objects that earlier groups kept alive. Kernels may use them until all weights are loaded anew."""
        self._model = model
        self._constructed: frozenset[str] = frozenset()
        """The parameters of the model before its loader has made any."""
        self._groups: list[ModuleGroup] = []

    def make(self, manifest: Manifest, keep: Sequence[str] = ()) -> TracedLoad:
        """Trace the model's loader for these tensors. Writes nothing into the running model.

        keep: patterns of the parameters that no push fills.

        Raises:
            UnsupportedError: The model has modules that cannot be reloaded.
        """
        self.traced = None
        self._constructed = self._constructed or frozenset(dict(self._model.pristine().named_parameters()))
        self.traced = self._make(manifest, keep)
        return self.traced

    def _make(self, manifest: Manifest, keep: Sequence[str]) -> TracedLoad:
        pristine = self._model.pristine()
        seen, pairs, unfit = trace_quantized(pristine, manifest, self._trace)
        # The drafter's own copies of shared modules are left out: a cold start reads the model's tensors.
        shared = ties.shared_parameters(pristine, without=f"{DRAFTER}.")
        duplicates = ties.find_duplicates(seen, manifest, shared)
        seen = ties.without(seen, duplicates)
        seen.fills += expert_padding(pristine, seen)
        for view, param in moved_views(self._model.live, pristine).items():
            seen.copies += [structs.replace(copy, param=view) for copy in seen.copies if copy.param == param]
            if param in seen.computed:
                seen.computed[view] = seen.computed[param]
        self._refuse_made(seen)
        self._refuse_left()
        self._find_groups()
        landed, trace = renamed(seen, pairs), collapse(seen, pairs, *self._find_fused(seen, manifest, pairs))
        group_of = {name: group for group in self._groups for name in group.params}
        if computed := [name for name in trace.computed if name not in group_of]:
            raise UnsupportedError(
                f"the engine's loader computes {len(computed)} buffers, and this version only copies into buffers: "
                f"{', '.join(computed[:5])}"
            )
        placed = self._place(trace, group_of)
        load_path = _load_paths(self._groups, {group_of[param] for param in trace.computed})
        sources = _sources(trace, group_of)
        filled = trace.filled()
        missing, doubled = uncovered(pristine, seen)
        kept = [] if self._fills_drafter(trace) else [param for param in missing if _is_drafters(param)]
        # A module is loaded as a whole: a group with a filled parameter keeps none.
        chosen = [param for param in matching(missing, keep) if filled.isdisjoint(group_of[param].params)]
        self._model.find_lost(filled, chosen)
        missing = {param: boxes for param, boxes in missing.items() if param not in {*kept, *chosen}}
        held = named_tensors(pristine)
        counts = Counter(load_path.values())
        answer = LoadPlan(
            used=_used(manifest, trace, pairs, held, self._model.dtype),
            partial=_partial(manifest, trace),
            refused=trace.refused | unfit | _doubled(pristine, landed, doubled, held) | _not_kept(trace, keep),
            groups=[list(names) for names in fuse_groups(landed.copies)],
            reloads=[names for group, names in sources.items() if load_path[group] != IN_PLACE],
            missing=[_region(param, boxes, held) for param, boxes in missing.items()],
            hints=_hints(landed, missing) or self._fitting_names(manifest, trace, missing),
            load_paths={name: counts[name] for name in LOAD_PATHS},
            left_out=self._left_out(manifest, trace),
            kept=[*kept, *chosen, *self._model.unreachable_params],
            tied=sorted({*ties.fill_of_shared(landed, shared).values()}),
            duplicates=duplicates,
        )
        buffers = filled.intersection(dict(pristine.named_buffers()))
        return TracedLoad(manifest, keep, answer, trace, placed, pairs, load_path, group_of, sources, filled, buffers)

    def _trace(self, manifest: Manifest) -> Trace:
        """Trace the loaders. If the trainer ties names that the engine keeps apart, the one tensor fills both."""
        trace = self._trace_models(manifest)
        if manifest.tied and uncovered(self._model.pristine(), trace)[0]:
            trace = ties.under_first_names(self._trace_models(ties.with_other_names(manifest)), manifest)
        return trace

    def _trace_models(self, manifest: Manifest) -> Trace:
        """Trace the loader of the model, and the drafter's loader for the drafter's own parameters."""
        trace, drafted = self._trace_model(manifest), self._trace_drafter(manifest)
        read = drafted.read()
        own = {param: names for param, names in drafted.computed.items() if _is_drafters(param)}
        return Trace(
            copies=trace.copies + [copy for copy in drafted.copies if _is_drafters(copy.param)],
            fills=trace.fills + [fill for fill in drafted.fills if _is_drafters(fill.param)],
            computed=trace.computed | own,
            refused=trace.refused | drafted.refused,
            unknown=[name for name in trace.unknown if name not in read],
        )

    def _trace_model(self, manifest: Manifest) -> Trace:
        pristine = self._model.pristine()
        return trace_by_example(pristine, partial(self._model.load_weights, pristine), manifest)

    def _trace_drafter(self, manifest: Manifest) -> Trace:
        """Trace the drafter's loader. It notes harmlessly which tensors it has of its own."""
        pristine = self._model.pristine()
        drafter = pristine._modules.get(DRAFTER)
        if drafter is None:
            return Trace()
        return trace_loader(pristine, partial(self._model.load_weights, drafter), manifest, may_lack=True)

    def _place(self, trace: Trace, group_of: Mapping[str, ModuleGroup]) -> list[LoadCopy]:
        """Return the copies with their places in live tensors. Groups with another copy are reloaded from now on."""
        pristine = named_tensors(self._model.pristine())
        unlike = {fill.param for fill in trace.fills}
        found: list[LoadCopy] = []
        for copy in trace.copies:
            group = group_of.get(copy.param)
            placement = None if group is None or group.checkpoint_recipes else group.placements.get(copy.param)
            if placement is None:
                found.append(copy)
            elif placed := place(copy, tuple(pristine[copy.param].shape), placement):
                found += placed
            else:
                unlike.add(copy.param)
        of_unlike = {group_of[param] for param in unlike if param in group_of}
        if others := {group for group in of_unlike if group.placements and not group.checkpoint_recipes}:
            for group in others:
                group.in_place, group.placements = False, {}
            return self._place(trace, group_of)
        return found

    def _find_fused(
        self, seen: Trace, manifest: Manifest, pairs: Mapping[str, QuantizedTensors]
    ) -> tuple[set[str], set[str]]:
        """Set the groups' recipes for tensors of `pairs`. Return the parameters of their values and of their scales."""
        found = find_checkpoint_recipes(self._groups, seen, manifest, pairs, self._model)
        for group in self._groups:
            group.checkpoint_recipes = found.get(group, ())
        recipes = [(group, recipe) for group, those in found.items() for recipe in those]
        values = {group.param(recipe.weight) for group, recipe in recipes}
        return values, {group.param(recipe.scale) for group, recipe in recipes}

    def _fills_drafter(self, trace: Trace) -> bool:
        """Return whether the trainer has any tensor of the drafter alone.

        An embedding for another pipeline stage's model does not count. This worker's model has a gap there.
        """
        own = [param.removeprefix(f"{DRAFTER}.") for param in trace.filled() if _is_drafters(param)]
        modules = {param.rpartition(".")[0] for param in own}
        named = self._model.pristine().named_modules()
        return not modules <= {name for name, module in named if not module._parameters}

    def _left_out(self, manifest: Manifest, trace: Trace) -> list[str]:
        """Return the tensors not loaded by a cold start.

        They are tensors of missing towers, or of layers outside of the engine's forward. They are a drafter's own
        copies of modules shared with the model by vLLM. Or the loader's own table leaves them out.
        """
        known = _seen(trace)
        if known.issuperset(manifest.names):
            return []
        passed = self._trace_drafter(manifest).read()
        with self._model.with_missing_towers(self._model.pristine()) as towers:
            more = self._trace_model(manifest) if towers else trace
        passed |= _seen(more)
        beginnings = _beginnings(more, towers)
        return [
            name
            for name in manifest.names
            if name not in known and (name in passed or name.startswith(beginnings) or self._model.passes_over(name))
        ]

    def _fitting_names(self, manifest: Manifest, trace: Trace, missing: Mapping[str, list[Box]]) -> list[str]:
        """Return the checkpoint names of tensors with a prefix too many or too few. Empty: the fault is another one."""
        known = trace.read().union(trace.refused)
        strangers = [name for name in manifest.names if name not in known]
        if not (missing and strangers):
            return []
        pristine = self._model.pristine()

        def find(new: Mapping[str, str]) -> set[str]:
            feed = Feed([structs.replace(manifest[old], name=name) for old, name in new.items()])
            try:
                seen = run_loader(pristine, partial(self._model.load_weights, pristine), feed, may_lack=True)
            except Exception:  # the loader does not know a name
                return set()
            return set() if seen.filled().isdisjoint(missing) else seen.read()

        beginnings = [f"{child}." for child in dict.fromkeys(["model", *pristine._modules])]
        found = find_rename(strangers, beginnings, find)
        return [*found[1].values()] if found else []

    def locate(self) -> None:
        """Note the current addresses of the live tensors."""
        self.addresses = Addresses(self._model, self._groups)

    def _refuse_made(self, trace: Trace) -> None:
        """Raise `UnsupportedError` if the loader has made a parameter missing from the running model."""
        pristine = self._model.pristine()
        made = trace.filled() - self._constructed
        absent = sorted(made - named_tensors(self._model.live).keys())
        for name in absent:  # or the next plan would report them as missing
            path, _, key = name.rpartition(".")
            if key in pristine.get_submodule(path)._parameters:
                pristine.get_submodule(path)._parameters[key] = None
        if absent:
            raise UnsupportedError(
                f"the running model lacks {absent[0]}, made by the engine's loader when a checkpoint has it; start "
                "the engine from such a checkpoint"
            )

    def _refuse_left(self) -> None:
        """Raise `UnsupportedError` if the engine's checkpoint has made a parameter, and the trainer has no such tensor.

        Loaders make a bias, or a module, for a tensor of the checkpoint. Post-processing makes other parameters.
        """
        pristine = dict(self._model.pristine().named_modules())
        for path, module in self._model.live.named_modules():
            made = module._parameters if path not in pristine else {"bias": module._parameters.get("bias")}
            for key, param in made.items():
                if param is not None and (path not in pristine or pristine[path]._parameters.get(key) is None):
                    raise UnsupportedError(
                        f"the running model has {path}.{key}, made by the engine's loader from a tensor of its "
                        "checkpoint, and the trainer has no such tensor. Push one, or start the engine from a "
                        "checkpoint without it"
                    )

    def _find_groups(self) -> None:
        """Group the modules. Group them again after a trace has made new parameters."""
        pristine = self._model.pristine()
        grouped = {name for group in self._groups for name in group.params}
        if grouped == dict(pristine.named_parameters()).keys():
            return
        found = find_groups(self._model.live, pristine)
        self.outlived += [group.keep_alive for group in self._groups]
        probe_groups(found, self._model)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # the scratch copies are as large as the largest parameters
        self._groups, self.kernels = found, Kernels(self._model, found)
        self.locate()


def _load_paths(groups: Sequence[ModuleGroup], computed: set[ModuleGroup]) -> dict[ModuleGroup, str]:
    def path(group: ModuleGroup) -> str:
        if group in computed:
            return NATIVE_LOADER
        if group.all_recipes:
            return FUSED_QUANTIZE
        return IN_PLACE if group.in_place else RELOAD

    return {group: path(group) for group in groups}


def _sources(trace: Trace, group_of: Mapping[str, ModuleGroup]) -> dict[ModuleGroup, list[str]]:
    names: dict[ModuleGroup, dict[str, None]] = {group_of[param]: {} for param in trace.computed}
    for param, name in trace.landed():
        if (group := group_of.get(param)) is not None:
            names.setdefault(group, {})[name] = None
    return {group: list(those) for group, those in names.items()}


def _seen(trace: Trace) -> set[str]:
    """Return the tensors read or refused by the loader."""
    return trace.read().union(trace.refused, trace.unknown)


def _is_drafters(param: str) -> bool:
    return param.startswith(f"{DRAFTER}.")


def _beginnings(trace: Trace, modules: Sequence[str]) -> tuple[str, ...]:
    """Return, for each of `modules`, the prefix of its tensors' names, if no tensor outside of `modules` has it."""
    landed = [*trace.landed()]
    elsewhere = [name for param, name in landed if not param.startswith(tuple(f"{module}." for module in modules))]
    shared = []
    for module in modules:
        paths = [name.split(".")[:-1] for param, name in landed if param.startswith(f"{module}.")]
        if paths and (path := commonpath("/".join(path) for path in paths)):
            shared.append(path.replace("/", ".") + ".")
    return tuple(path for path in shared if not any(name.startswith(path) for name in elsewhere))


def _used(
    manifest: Manifest,
    trace: Trace,
    pairs: Mapping[str, QuantizedTensors],
    held: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> dict[str, str]:
    """Return the wanted dtype of each tensor."""
    used: dict[str, str] = {}
    dtypes = {param: str(held[param].dtype).removeprefix("torch.") for param in {copy.param for copy in trace.copies}}
    for copy in trace.copies:
        kept = dtypes[copy.param]
        if (before := used.setdefault(copy.name, kept)) != kept:
            used[copy.name] = max(before, kept, key=itemsize)
    for names in trace.computed.values():
        used.update({name: manifest[name].dtype for name in names})  # arithmetic needs the trainer's full precision
    used.update(dict.fromkeys(pairs.keys() & used.keys(), str(dtype).removeprefix("torch.")))
    return used


def _doubled(
    pristine: nn.Module, landed: Trace, doubled: Mapping[str, list[Box]], held: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the fault of each tensor with the same target region as another one."""
    refused: dict[str, str] = {}
    for param, boxes in doubled.items():
        names = writers(pristine, landed, param, boxes)
        refused |= dict.fromkeys(names, f"{_region(param, boxes, held)} is written twice, by {', '.join(names)}")
    return refused


def matching(params: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the parameters with a name like one of these shell patterns."""
    return [param for param in params if any(fnmatchcase(param, pattern) for pattern in patterns)]


def _not_kept(trace: Trace, keep: Sequence[str]) -> dict[str, str]:
    """Return the fault of each tensor for a parameter that no push fills."""
    chosen = {*matching(trace.filled(), keep)} if keep else set()
    return {
        name: f"TensorSelection.keep leaves {param} alone, `exclude` this tensor"
        for param, name in trace.landed()
        if param in chosen
    }


def _partial(manifest: Manifest, trace: Trace) -> dict[str, tuple[Box, ...]]:
    """Return the regions read of each tensor that is not read whole, as with tensor parallelism."""
    whole = set().union(*trace.computed.values())
    found: dict[str, tuple[Box, ...]] = {}
    for name, copies in grouped(trace.copies, lambda copy: copy.name).items():
        boxes, shape = tuple(copy.box for copy in copies), manifest[name].shape
        if name not in whole and boxes[0].size != shape and coverage(shape, boxes)[0]:
            found[name] = boxes
    return found


def _region(param: str, boxes: Sequence[Box], held: Mapping[str, torch.Tensor]) -> str:
    """Return a readable name for part of a parameter: "model.layers.0.self_attn.qkv_proj.weight rows 64..96 of 128"."""
    shape = held[param].shape
    if any(box.size == tuple(shape) for box in boxes) or not shape:
        return param
    rows = ", ".join(f"{box.start[0]}..{box.start[0] + box.size[0]}" for box in boxes[:3])
    return f"{param} rows {rows} of {shape[0]}"


def _hints(trace: Trace, missing: Mapping[str, list[Box]]) -> list[str]:
    """Return the names of tensors for the missing parameters, inferred from other layers' names."""
    if not missing:
        return []
    alike = grouped(trace.copies, lambda copy: _without_numbers(copy.param))
    hints: dict[str, None] = {}
    for param in missing:
        for copy in alike.get(_without_numbers(param), ()):
            name = copy.name
            for theirs, ours in zip(copy.param.split("."), param.split("."), strict=True):
                if theirs != ours:
                    name = name.replace(f".{theirs}.", f".{ours}.", 1)
            hints[name] = None
    offered = {copy.name for copy in trace.copies}
    return [name for name in hints if name not in offered]


def _without_numbers(name: str) -> tuple[str, ...]:
    return tuple("#" if part.isdigit() else part for part in name.split("."))
