"""What becomes of each tensor in every push over one connection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.kernels.copies import BatchedCopy, Copy
from weightsync.kernels.quantize import Form
from weightsync.kernels.rows import Job, RowQuantiser
from weightsync.layout import CopyStep
from weightsync.receiver.host import ModelHost
from weightsync.receiver.modules import Unit
from weightsync.receiver.straight import pieces_of
from weightsync.receiver.trace import Trace, named_tensors, paddings


@dataclass(frozen=True)
class Routes:
    """The lists are by bucket. `copies` go into live parameters as they are, `quantisers` make live values and scales;
    the tensors in `singly` take more: by `fresh`, which has what of each tensor leads into fresh parameters, or by the
    engine's loader. `nbytes` is what is read, but for what a loader takes whole. `constants` are what the loader sets
    in parameters that are loaded in place, which may never have been loaded; `others` tells where that lies which is no
    module's parameter (buffers)."""

    copies: list[BatchedCopy]
    quantisers: list[list[RowQuantiser]]
    singly: list[list[str]]
    nbytes: list[int]
    fresh: dict[str, list[CopyStep]]
    constants: list[tuple[torch.Tensor, float]]
    others: dict[str, int]


def find_routes(
    host: ModelHost,
    trace: Trace,
    units: Sequence[Unit],
    buckets: Sequence[Sequence[str]],
    steps: Sequence[CopyStep],
    view: Callable[[CopyStep], torch.Tensor],
) -> Routes:
    """Sort out what becomes of each tensor, and make what can be made once. `view` gives what a step reads, in the
    memory where it arrives. Collective among workers that share scales."""
    live = named_tensors(host.live)
    unit_of = {name: unit for unit in units for name in unit.params}
    computed = computed_units(trace, unit_of)
    of_param: dict[str, list[CopyStep]] = defaultdict(list)
    views: dict[str, list[torch.Tensor]] = defaultdict(list)
    for step in steps:
        of_param[step.param].append(step)
        views[step.param].append(view(step))
    fresh: dict[str, list[CopyStep]] = defaultdict(list)
    nbytes = [0 for _ in buckets]
    bucket_of = {name: number for number, names in enumerate(buckets) for name in names}
    direct = _direct(host, units, of_param, views, bucket_of, computed)
    copies: list[list[Copy]] = [[] for _ in buckets]
    jobs: list[dict[tuple[Form, bool], list[Job]]] = [defaultdict(list) for _ in buckets]
    for param, steps in of_param.items():
        unit = unit_of.get(param)
        if unit is not None and id(unit) in computed:
            continue
        for step, seen in zip(steps, views[param], strict=True):
            nbytes[bucket_of[step.name]] += seen.numel() * seen.element_size()
        if unit is None or unit.takes_in_place(param):
            for step, seen in zip(steps, views[param], strict=True):
                target = torch.as_strided(live[param].data, step.size, step.dst_stride, step.dst_offset)
                copies[bucket_of[step.name]].append((target, seen, step.rank))
            continue
        if unit.recipe is None or param not in direct:
            for step in steps:
                fresh[step.name].append(step)
        else:
            job = unit.recipe.job(dict(unit.live[0].named_parameters(recurse=False)), direct[param])
            jobs[bucket_of[steps[0].name]][unit.recipe.form, unit.recipe.shared].append(job)
    by_loader = [names for key, names in sources_of(trace, unit_of).items() if key in computed]
    singly = set(fresh).union(*by_loader)
    constants: list[tuple[torch.Tensor, float]] = []
    for fill in paddings(host.pristine(), trace):
        unit = unit_of.get(fill.param)
        if unit is None or (unit.takes_in_place(fill.param) and id(unit) not in computed):
            place = torch.as_strided(live[fill.param].data, fill.size, fill.stride, fill.offset)
            constants.append((place, fill.value))
    return Routes(
        copies=[BatchedCopy(those) for those in copies],
        quantisers=[
            [RowQuantiser(form, those, host.share if shared else None) for (form, shared), those in of_bucket.items()]
            for of_bucket in jobs
        ],
        singly=[[name for name in names if name in singly] for names in buckets],
        nbytes=nbytes,
        fresh=dict(fresh),
        constants=constants,
        others={param: live[param].data_ptr() for param in of_param if param not in unit_of},
    )


def _direct(
    host: ModelHost,
    units: Sequence[Unit],
    of_param: Mapping[str, list[CopyStep]],
    views: Mapping[str, list[torch.Tensor]],
    bucket_of: Mapping[str, int],
    computed: set[int],
) -> dict[str, list[tuple[int, torch.Tensor]]]:
    """By parameter: the pieces of each weight that can be quantised out of the memory where it arrives. Collective
    among workers that share scales: how rows are cut differs between them, but their exchanges must not."""
    loaded = named_tensors(host.pristine())
    straight = [unit for unit in units if unit.recipe is not None]
    weights = [unit.weight for unit in straight if id(unit) not in computed]
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for weight in weights:
        steps = of_param.get(weight, [])
        if len({bucket_of[step.name] for step in steps}) == 1:
            pieces = pieces_of(steps, views[weight], loaded[weight], host.device)
            if pieces is not None:
                found[weight] = pieces
    together = [unit.weight for unit in straight if unit.recipe is not None and unit.recipe.shared]
    if together and host.share is not None:
        doubts = torch.tensor([float(weight not in found) for weight in together], device=host.device)
        host.share(doubts)
        for weight, doubt in zip(together, doubts.tolist(), strict=True):
            if doubt:
                found.pop(weight, None)
    return found


def sources_of(trace: Trace, unit_of: dict[str, Unit]) -> dict[int, dict[str, None]]:
    """By id of the unit: the names of the tensors that it is loaded from, in order."""
    names: dict[int, dict[str, None]] = defaultdict(dict)
    for copy in trace.copies:
        if (unit := unit_of.get(copy.param)) is not None:
            names[id(unit)][copy.name] = None
    for param, computed_from in trace.computed.items():
        names[id(unit_of[param])].update(dict.fromkeys(computed_from))
    return names


def computed_units(trace: Trace, unit_of: dict[str, Unit]) -> set[int]:
    """The ids of the units that the engine's loader must load itself."""
    return {id(unit_of[param]) for param in trace.computed}
