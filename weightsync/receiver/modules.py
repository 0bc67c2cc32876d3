"""How one module of the engine's model takes new weights: the roads of a loaded module.

*In place*: the bytes go straight into the live parameter, which has the layout that the loader writes.

*Straight*: the weight is quantised into the tensors that the kernel works with (straight.py).

*Reload*, for a module whose weights a kernel keeps in its own format: put the module back to how it looked before any
weight was loaded (Record1), load it as if for the first time, post-process it, and copy the result into the tensors
that were live before (Record2), whose addresses CUDA graphs have captured. This is FlashRL's sequence, one module at
a time; a failure puts the module back as it was.

Which road is right for a module is found out by experiment, never assumed: its post-processing is run once on a
scratch copy with random weights. Only a module that it leaves untouched is loaded in place, only one that it quantises
in a way that gives the same bits is loaded straight, and all others are reloaded. This module knows nothing about vLLM;
what post-processing is comes in as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.kernels.rows import RowQuantiser, Share
from weightsync.receiver.audit import addresses, counterparts, held, same_layout
from weightsync.receiver.straight import Recipe, find_recipe, holds, same_contents
from weightsync.receiver.trace import Fill

PostProcess = Callable[[nn.Module], None]
"""Bring a freshly loaded module into its kernel's format, as the engine does once at its start."""

Parts = Callable[[nn.Module], list[Any]]
"""The objects that hold a module's post-processed state: the module, and its quantisation method if it has one."""


@dataclass
class Unit:
    """Modules that must be loaded together because they share parameters: most often one, two where they are tied.

    `live` and `pristine` are the same modules of the engine's model and of its never loaded copy on `meta`;
    `params` names their parameters, each once. `changed` is what post-processing leaves behind, per part: the
    attributes that it sets; `opaque` when one of these holds something made from the weights that is no plain tensor.
    `recipe` is set where the straight road is right.
    """

    names: list[str]
    live: list[nn.Module]
    pristine: list[nn.Module]
    params: list[str]
    in_place: bool = False
    recipe: Recipe | None = None
    changed: list[list[str]] = field(default_factory=list)
    opaque: bool = False
    keep_alive: Any = None

    @property
    def weight(self) -> str:
        """The name of the parameter that `recipe` quantises, "" without one."""
        if self.recipe is None:
            return ""
        return f"{self.names[0]}.{self.recipe.weight}" if self.names[0] else self.recipe.weight

    def takes_in_place(self, param: str) -> bool:
        """Whether what arrives for `param`, one of `params`, is copied into the live parameter as it is."""
        return self.in_place or (self.recipe is not None and param != self.weight)


def units(live: nn.Module, pristine: nn.Module) -> list[Unit]:
    """Partition a model's modules that own parameters into units, in the model's order."""
    live_modules = dict(live.named_modules())
    names = {id(param): name for name, param in pristine.named_parameters()}
    homes: dict[int, Unit] = {}  # parameter -> the unit it belongs to
    for name, module in pristine.named_modules():
        own = [id(param) for _, param in _parameters(module)]
        if not own:
            continue
        if name not in live_modules:
            raise UnsupportedError(f"the running model has no module {name!r}, but a fresh copy of it does")
        ties = list({id(unit): unit for key in own if (unit := homes.get(key)) is not None}.values())
        home = ties[0] if ties else Unit([], [], [], [])
        for other in ties[1:]:
            home.names += other.names
            home.live += other.live
            home.pristine += other.pristine
            home.params += other.params
            homes.update({key: home for key, unit in homes.items() if unit is other})
        home.names.append(name)
        home.live.append(live_modules[name])
        home.pristine.append(module)
        home.params += [names[key] for key in dict.fromkeys(own) if key not in homes]
        homes.update(dict.fromkeys(own, home))
    return list({id(unit): unit for unit in homes.values()}.values())


def choose_roads(
    all_units: list[Unit],
    post_process: PostProcess,
    parts: Parts,
    device: torch.device,
    share: Share | None,
    seed: int,
) -> None:
    """Decide each unit's road by running `post_process` on a scratch copy of it; units alike are tried once.

    `share` is None for a single worker; otherwise all call this together, with different seeds. Raises
    `UnsupportedError` for a unit on a GPU whose kernel keeps weights where a reload cannot keep their address.
    """
    verdicts: dict[Any, _Verdict] = {}
    unsafe: list[str] = []
    for unit in all_units:
        signature = tuple(
            (
                type(part),
                tuple((key, tuple(p.shape), tuple(p.stride()), p.dtype) for key, p in _parameters(part)),
                # How it is cut between workers, and the like.
                tuple((key, value) for key, value in vars(part).items() if isinstance(value, (bool, int))),
            )
            for module in unit.pristine
            for part in parts(module)
        )
        if signature not in verdicts:
            verdicts[signature] = _try_post_process(unit, post_process, parts, device, share, seed)
        verdict = verdicts[signature]
        unit.changed, unit.opaque = verdict.changed, bool(verdict.opaque)
        unit.in_place = verdict.untouched and all(
            same_layout(mine._parameters.get(key), param)
            for mine, fresh in zip(unit.live, unit.pristine, strict=True)
            for key, param in _parameters(fresh)
        )
        if verdict.recipe is not None and verdict.recipe.fits(dict(_parameters(unit.live[0]))):
            unit.recipe = verdict.recipe
        if not unit.in_place and verdict.opaque and device.type != "cpu":
            unsafe.append(f"{unit.names[0]} ({', '.join(verdict.opaque)})")
    if unsafe:
        raise UnsupportedError(
            f"{len(unsafe)} modules keep weights inside kernel objects, whose addresses CUDA graphs have captured; "
            f"this version cannot reload those in place: {'; '.join(unsafe[:3])}. Use another kernel backend for "
            "them, or start the engine anew from a checkpoint"
        )


@dataclass(frozen=True)
class _Verdict:
    """What post-processing did to a scratch copy: `untouched` when in-place loading is right; `changed` attributes per
    part; `opaque` what it has made from the weights that a reload could not fill again; `recipe` when it did nothing
    but quantise the weight of a single module."""

    untouched: bool
    recipe: Recipe | None
    changed: list[list[str]]
    opaque: list[str]


def _try_post_process(
    unit: Unit, post_process: PostProcess, parts: Parts, device: torch.device, share: Share | None, seed: int
) -> _Verdict:
    first = _Attempt(unit, post_process, parts, device, seed)
    opaque: list[str] = []
    if any(first.changed):
        # What was made of other weights must be the same but for what is in its tensors, and no table of addresses.
        second = _Attempt(unit, post_process, parts, device, seed + 1_000_003)
        own = {id(part) for module in unit.pristine for part in parts(module)}
        opaque = counterparts(first.left, second.left, "", own).differ
        made = counterparts(first.made, second.made, "", own)
        opaque += made.closed
        opaque += [path for path, a, b in made.tensors if a.dtype == torch.int64 and not torch.equal(a, b)]
    recipe = None
    only_quantised = not (first.same or first.made or opaque or unit.pristine[0]._buffers) and len(unit.pristine) == 1
    if only_quantised and (recipe := find_recipe(first.loaded, first.processed, share)) is not None:
        # Where a scale may have a lower bound, and where there is none. One attempt is in memory at a time.
        small = (_Attempt(unit, post_process, parts, device, seed, size) for size in (1e-6, 0.0))
        if not all(holds(recipe, attempt.loaded, attempt.processed, share) for attempt in small):
            recipe = None
    return _Verdict(first.same and not first.made and not opaque, recipe, first.changed, opaque)


class _Attempt:
    """One run of the post-processing over a scratch copy of a unit, with random weights of that size.

    `same` when its parameters are untouched; `changed` attributes per part, and what they were `left` as; `made` those
    among them that hold something made from the weights; `loaded` and `processed` are the first module's parameters
    before and after.
    """

    def __init__(
        self, unit: Unit, post_process: PostProcess, parts: Parts, device: torch.device, seed: int, size: float = 1.0
    ) -> None:
        holders = [part for module in unit.pristine for part in parts(module)]
        saved = [_Snapshot(part) for part in holders]
        fresh = {id(param): _materialise(param, device) for param in _unit_parameters(unit.pristine)}
        try:
            for module in unit.pristine:
                _install(module, module, fresh)
            for param in fresh.values():
                _randomise(param, seed, size)
            copies = {id(param): param.detach().clone() for param in fresh.values()}
            self.loaded = {key: copies[id(param)] for key, param in _parameters(unit.pristine[0])}
            slots = [_slots(module) for module in unit.pristine]
            before = [_attributes(part) for part in holders]
            for module in unit.pristine:
                post_process(module)
            after = [_attributes(part) for part in holders]
            self.changed = [
                [key for key in {**old, **new} if old.get(key, _ABSENT) is not new.get(key, _ABSENT)]
                for old, new in zip(before, after, strict=True)
            ]
            self.left = [
                {key: new[key] for key in keys if key in new} for keys, new in zip(self.changed, after, strict=True)
            ]
            known = {param.untyped_storage().data_ptr() for param in fresh.values()}
            own = {id(part) for part in holders}
            self.made = {
                key: new[key]
                for keys, new in zip(self.changed, after, strict=True)
                for key in keys
                if key in new and not _weightless(new[key], known, own)
            }
            self.same = [_slots(module) for module in unit.pristine] == slots and all(
                same_contents(param.detach(), copies[id(param)]) for param in fresh.values()
            )
            self.processed = {key: param.detach() for key, param in _parameters(unit.pristine[0])}
        finally:
            for snapshot in saved:
                snapshot.restore()


class _Snapshot:
    """A module's (or quantisation method's) attributes, parameters and buffers, to be put back."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.attributes = dict(part.__dict__)
        self.containers = {key: dict(part.__dict__[key]) for key in ("_parameters", "_buffers") if key in part.__dict__}

    def state(self, keys: list[str]) -> dict[str, Any]:
        """The parameters and buffers that were there, and what stood under the attributes `keys`."""
        slots = {key: tensor for container in self.containers.values() for key, tensor in container.items()}
        found = {**slots, **{key: self.attributes.get(key) for key in keys}}
        return {key: value for key, value in found.items() if value is not None}

    def restore(self) -> None:
        self.part.__dict__.clear()
        self.part.__dict__.update(self.attributes)
        for key, content in self.containers.items():
            self.part.__dict__[key].clear()
            self.part.__dict__[key].update(content)


def live_addresses(all_units: list[Unit], model: nn.Module, parts: Parts) -> dict[str, int]:
    """Where every tensor lies that can be reached from the units' live modules, by the path to it.

    An `opaque` unit is left out: its kernel's object is made anew with each reload. `choose_roads` has refused those
    on a GPU, where an address counts; a CPU has no graphs that have captured it.
    """
    outside = {id(module) for module in model.modules()}
    seen: set[int] = set()
    found: dict[str, int] = {}
    for unit in all_units:
        if not unit.opaque:
            for name, module in zip(unit.names, unit.live, strict=True):
                labels = {f"{name}:{n}" if n else name: part for n, part in enumerate(parts(module))}
                found |= addresses(labels, outside, seen)
    return found


class Place(NamedTuple):
    """A live parameter, under `key` in `module`, and its address."""

    path: str
    module: nn.Module
    key: str
    address: int

    def is_kept(self) -> bool:
        param = self.module._parameters.get(self.key)
        return param is not None and param.data_ptr() == self.address


def parameter_places(all_units: list[Unit]) -> list[Place]:
    """Where the live parameters lie, but those of opaque units, by the paths that `live_addresses` gives them."""
    return [
        Place(f"{name}.{key}", module, key, param.data_ptr())
        for unit in all_units
        if not unit.opaque
        for name, module in zip(unit.names, unit.live, strict=True)
        for key, param in _parameters(module)
    ]


class Reload:
    """One unit on its way through the reload road.

    Between construction and `close` the live module stands as it was; what arrives goes into `fresh`, the unit's
    parameters by name in their never loaded form.
    """

    def __init__(self, unit: Unit, fills: list[Fill], device: torch.device) -> None:
        self.unit = unit
        self._fresh = {id(param): _materialise(param, device) for param in _unit_parameters(unit.pristine)}
        self.fresh: dict[str, nn.Parameter] = dict(zip(unit.params, self._fresh.values(), strict=True))
        for fill in fills:
            if fill.param in self.fresh:
                torch.as_strided(self.fresh[fill.param].data, fill.size, fill.stride, fill.offset).fill_(fill.value)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Meanwhile the never loaded copy of the unit has the fresh parameters instead of ones on `meta`."""
        saved = [_Snapshot(module) for module in self.unit.pristine]
        try:
            for module in self.unit.pristine:
                _install(module, module, self._fresh)
            yield
        finally:
            for snapshot in saved:
                snapshot.restore()

    def quantise(self, share: Share | None) -> None:
        """For a unit with a recipe: quantise its freshly loaded weight into the live tensors."""
        unit, recipe = self.unit, self.unit.recipe
        assert recipe is not None
        weight = next(param for key, param in _parameters(unit.pristine[0]) if key == recipe.weight)
        job = recipe.job(dict(_parameters(unit.live[0])), [(0, self._fresh[id(weight)].data)])
        RowQuantiser(recipe.form, [job], share if recipe.shared else None).run()

    def close(self, post_process: PostProcess, parts: Parts) -> None:
        """Post-process the freshly loaded parameters and copy the outcome into the live tensors. When it raises, the
        live modules are put back as they were."""
        unit = self.unit
        holders = [part for module in unit.live for part in parts(module)]
        models = [part for module in unit.pristine for part in parts(module)]
        saved = [_Snapshot(part) for part in holders]
        try:
            for part, model, keys in zip(holders, models, unit.changed, strict=True):
                for key in keys:  # Record1: as if nothing had been loaded yet
                    _put(part, key, model.__dict__.get(key, _ABSENT))
                for container in ("_parameters", "_buffers"):
                    for key in part.__dict__.get(container, {}).keys() - model.__dict__.get(container, {}).keys():
                        del part.__dict__[container][key]
            for module, model in zip(unit.live, unit.pristine, strict=True):
                _install(module, model, self._fresh)
            for module in unit.live:
                post_process(module)
            now = [_Snapshot(part) for part in holders]
            before, after = (
                [s.state(keys) for s, keys in zip(all_, unit.changed, strict=True)] for all_ in (saved, now)
            )
            own = {id(part) for part in holders}
            found = counterparts(before, after, unit.names[0], own)
            if (problems := found.differ + found.closed) and not unit.opaque:
                raise UnsupportedError(
                    f"a reload of {unit.names[0]} made something else than there was, and CUDA graphs have captured "
                    f"that: {'; '.join(problems[:3])}"
                )
        except BaseException:
            for snapshot in saved:
                snapshot.restore()
            raise
        if unit.opaque:
            # What a kernel's object keeps is new. It may point into what it was made from without holding that: a scale
            # that post-processing has made, as oneDNN does, or a fresh parameter.
            unit.keep_alive = [self.fresh, after]
            olds = {id(new): old for _, old, new in found.tensors}
            for part, keys in zip(holders, unit.changed, strict=True):
                parameters = part.__dict__.get("_parameters", {})
                _fill_and_put_back(parameters, list(parameters), olds)
                _fill_and_put_back(part.__dict__, keys, olds)
            return
        for snapshot in saved:  # Record2: all of this stays, with new contents
            snapshot.restore()
        for _, old, new in found.tensors:
            old.data.copy_(new.data)


_ABSENT = object()
_CONTAINERS = frozenset(key for key, item in nn.Module().__dict__.items() if isinstance(item, dict))


def _fill_and_put_back(slots: dict[str, Any], keys: list[str], olds: dict[int, torch.Tensor]) -> None:
    """Give the tensors their old memory again, by id of the new one, with the new contents."""
    for key in keys:
        if (old := olds.get(id(slots.get(key)))) is not None:
            old.data.copy_(slots[key].data)
            slots[key] = old


def _put(part: Any, key: str, value: Any) -> None:
    if value is _ABSENT:
        part.__dict__.pop(key, None)
    else:
        part.__dict__[key] = value


def _attributes(part: Any) -> dict[str, Any]:
    """What is set on a module or method, but for the containers that nn.Module keeps for itself."""
    return {key: value for key, value in part.__dict__.items() if key not in _CONTAINERS}


def _parameters(part: Any) -> list[tuple[str, nn.Parameter]]:
    return [(key, param) for key, param in part.__dict__.get("_parameters", {}).items() if param is not None]


def _slots(module: nn.Module) -> list[tuple[str, int]]:
    """Which parameter and which buffer stands under which name."""
    return [(key, id(tensor)) for key, tensor in (*module._parameters.items(), *module._buffers.items())]


def _install(module: nn.Module, model: nn.Module, fresh: dict[int, nn.Parameter]) -> None:
    """Give `module` the parameters of `fresh` in the slots that `model` has."""
    for key, param in list(model._parameters.items()):
        module._parameters[key] = None if param is None else fresh[id(param)]


def _unit_parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    unique: dict[int, nn.Parameter] = {}
    for module in modules:
        for _, param in _parameters(module):
            unique.setdefault(id(param), param)
    return list(unique.values())


def _materialise(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter like `param`, with memory: same class, same attributes, same layout."""
    data = torch.empty_strided(tuple(param.shape), tuple(param.stride()), dtype=param.dtype, device=device)
    data.__class__ = param.__class__
    data.__dict__ = dict(param.__dict__)
    return data  # type: ignore[return-value]


_STRIP_ELEMENTS = 1 << 22
"""Bounds the scratch memory."""


def _randomise(tensor: torch.Tensor, seed: int, size: float) -> None:
    """With numbers of our own: the engine samples from the default generator. Most of a matrix lies half-way between
    two 8-bit values, if its row is scaled to the row's largest, so that it shows how a kernel divides and rounds."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    with torch.no_grad():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            _bytes(tensor).random_(0, 2, generator=generator)
            return
        data = tensor.data.normal_(generator=generator)
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


def _weightless(value: Any, known: set[int], own: set[int], depth: int = 0, seen: set[int] | None = None) -> bool:
    """Whether an object holds nothing that was made from the weights: only plain values, code, tensors that share
    the memory of the unit's parameters (`known`), and the unit's own modules (`own`)."""
    seen = set() if seen is None else seen
    if id(value) in seen or id(value) in own:
        return True
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 0 or value.untyped_storage().data_ptr() in known
    inside = held(value)
    if inside is None or (inside and (depth > 12 or len(seen) > 5000)):
        return False
    return all(_weightless(item, known, own, depth + 1, seen) for _, item in inside)
