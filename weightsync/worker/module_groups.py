"""Modules of the engine's model in groups to load together, and the addresses of their live tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.planning.layout import connected
from weightsync.worker.engine_model import EngineModel
from weightsync.worker.fused_quantize import Recipe
from weightsync.worker.placement import Placement
from weightsync.worker.reachable import addresses, same_layout


@dataclass(eq=False)
class ModuleGroup:
    """Modules with shared parameters, to be loaded together. Most groups have one module.

    live, pristine: the same modules of the engine's model and of its never loaded copy on `meta`.
    params: the names of their parameters, each once.
    in_place: post-processing leaves loaded parameters as they are, or only rearranges them.
    placements: by parameter, the arrangement where it is another one than the loader's.
    recipes: post-processing only quantises weights, in these ways.
    checkpoint_recipes: for the current plan, the ways to quantise weights as the checkpoint has them.
    changed: the attributes set by post-processing, for each part of each module.
    opaque: one of these attributes holds an object made from the weights, or another module releases a parameter. No
        copy can fill these again.
    keep_alive: objects that an opaque group's kernels may point to.
    """

    names: list[str]
    live: list[nn.Module]
    pristine: list[nn.Module]
    params: list[str]
    in_place: bool = False
    placements: dict[str, Placement] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    checkpoint_recipes: tuple[Recipe, ...] = ()
    changed: list[list[str]] = field(default_factory=list)
    opaque: bool = False
    keep_alive: Any = None

    @property
    def all_recipes(self) -> tuple[Recipe, ...]:
        """The ways to quantise weights on the way."""
        return self.checkpoint_recipes or self.recipes

    def param(self, key: str) -> str:
        """Return the name of the first module's parameter `key`. The root module has no name."""
        return f"{self.names[0]}.{key}".lstrip(".")

    def takes_in_place(self, param: str) -> bool:
        """Return whether bytes for `param`, one of `params`, are copied into the live parameter."""
        quantised = [self.param(recipe.weight) for recipe in self.all_recipes]
        return param not in quantised and (self.in_place or bool(quantised))

    def pristine_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the never loaded modules, each once, in the order of `params`."""
        return list({id(param): param for module in self.pristine for _, param in parameters_of(module)}.values())


def parameters_of(part: Any) -> list[tuple[str, nn.Parameter]]:
    """Return a module's own parameters, by key. Any other object has none."""
    return [(key, param) for key, param in part.__dict__.get("_parameters", {}).items() if param is not None]


def find_groups(live: nn.Module, pristine: nn.Module) -> list[ModuleGroup]:
    """Partition the modules with parameters of their own into groups, in the model's order."""
    live_modules = dict(live.named_modules())
    owners = {name: module for name, module in pristine.named_modules() if parameters_of(module)}
    if absent := [name for name in owners if name not in live_modules]:
        raise UnsupportedError(f"the running model has no module {absent[0]!r}, but a fresh copy of it does")
    param_names = {id(param): name for name, param in pristine.named_parameters()}
    owned = ((name, id(param)) for name, module in owners.items() for _, param in parameters_of(module))
    groups = []
    for names in connected(owned):
        group = ModuleGroup(list(names), [live_modules[name] for name in names], [owners[name] for name in names], [])
        group.params += [param_names[id(param)] for param in group.pristine_parameters()]
        groups.append(group)
    return groups


def moved_views(live: nn.Module, pristine: nn.Module) -> dict[str, str]:
    """Return buffers that were built as views of a parameter and in `live` no longer share its memory.

    Each is returned with the name of its parameter. A kernel may have packed the parameter, and the model may use both.

    Raises:
        UnsupportedError: A buffer has another layout than it was built with.
    """
    params = {param.untyped_storage()._cdata: name for name, param in pristine.named_parameters()}
    here = dict(live.named_parameters()) | dict(live.named_buffers())
    found: dict[str, str] = {}
    for name, buffer in pristine.named_buffers():
        param = params.get(buffer.untyped_storage()._cdata)
        if param not in here or name not in here:
            continue
        if here[name].untyped_storage().data_ptr() != here[param].untyped_storage().data_ptr():
            if not same_layout(here[name], buffer):
                raise UnsupportedError(f"{name} was made as a view of {param}, and now has another layout")
            found[name] = param
    return found


class LiveTensor(NamedTuple):
    """A live parameter or buffer, under `key` in `module`, and its address."""

    path: str
    module: nn.Module
    key: str
    address: int

    def is_kept(self) -> bool:
        """Return whether the tensor still has its address."""
        tensor = self.module._parameters.get(self.key, self.module._buffers.get(self.key))
        return tensor is not None and tensor.data_ptr() == self.address


class Addresses:
    """The addresses that CUDA graphs may have captured. A push must not move these tensors.

    Opaque groups are left out, because each reload makes their kernels' objects anew. They exist on CPUs alone, without
    graphs.
    """

    def __init__(self, model: EngineModel, groups: Iterable[ModuleGroup]) -> None:
        self._model = model
        self._groups = [group for group in groups if not group.opaque]
        self._before: dict[str, int] = {}
        self._parameters = [
            LiveTensor(f"{name}.{key}", module, key, param.data_ptr())
            for group in self._groups
            for name, module in zip(group.names, group.live, strict=True)
            for key, param in parameters_of(module)
        ]

    def note(self) -> None:
        """Note the address of every tensor in reach of a module, before a push that reloads modules.

        The engine replaces some tensors between pushes, such as the last choices of a router.
        """
        self._before = self._walk()

    def check(self, buffers: Iterable[LiveTensor], everything: bool) -> None:
        """Raise `UnsupportedError` if a parameter, or one of `buffers`, has moved since it was found.

        With `everything`, check all noted addresses. This takes longer, and only a reload moves other tensors.
        """
        paths = [place.path for place in (*self._parameters, *buffers) if not place.is_kept()]
        if everything:
            now = self._walk()
            paths += [path for path, address in self._before.items() if now.get(path) != address and path not in paths]
        if paths:
            raise UnsupportedError(
                f"{len(paths)} tensors of the engine have moved in the push, and CUDA graphs have captured their "
                f"addresses: {', '.join(paths[:5])}. Restart the engine from a checkpoint, and with another "
                "quantisation or kernel backend if the error returns"
            )

    def _walk(self) -> dict[str, int]:
        outside = {id(module) for module in self._model.live.modules()}
        seen: set[int] = set()
        found: dict[str, int] = {}
        for group in self._groups:
            for name, module in zip(group.names, group.live, strict=True):
                labels = {f"{name}:{n}" if n else name: part for n, part in enumerate(self._model.parts(module))}
                found |= addresses(labels, outside, seen)
        return found


class Kernels:
    """The kernels of the running modules. A load plan is for the formats of these kernels."""

    def __init__(self, model: EngineModel, groups: Iterable[ModuleGroup]) -> None:
        self._chosen = [
            (f"{name}.{key}", vars(part), key, _choice(value))
            for group in groups
            for name, module in zip(group.names, group.live, strict=True)
            for part in model.parts(module)[1:]
            for key, value in vars(part).items()
            if isinstance(value, Enum) or any(key in made for made in group.changed)
        ]

    def check(self) -> None:
        """Raise `UnsupportedError` if a module has another kernel now: its parameters may have another format."""
        if other := [path for path, attributes, key, choice in self._chosen if _choice(attributes.get(key)) != choice]:
            raise UnsupportedError(
                f"{len(other)} kernels of the engine have changed since the first push: {', '.join(other[:5])}. "
                "Nothing was written. Restart the engine from a checkpoint"
            )


def _choice(value: Any) -> Any:
    return value if isinstance(value, Enum) else type(value)


def live_tensor(model: nn.Module, name: str) -> LiveTensor:
    """Return the current place of a model's tensor."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return LiveTensor(name, module, key, getattr(module, key).data_ptr())
