"""A reload of one group of modules: FlashRL's sequence, one group at a time.

A kernel may keep a module's weights in a format of its own. So the module is put back to its state before any weight
was loaded (Record1), loaded as if for the first time, and post-processed. The outcome is copied into the tensors that
were live before (Record2), because CUDA graphs have captured their addresses. A failure puts the module back as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.worker.engine_model import EngineModel
from weightsync.worker.module_groups import ModuleGroup, parameters_of
from weightsync.worker.reachable import diff_objects
from weightsync.worker.trace import Fill

ABSENT = object()
_CONTAINERS = frozenset(key for key, item in nn.Module().__dict__.items() if isinstance(item, dict))


class Snapshot:
    """The attributes, parameters and buffers of a module, or of its quantisation method, for a later restore."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.attributes = dict(part.__dict__)
        self.containers = {key: dict(part.__dict__[key]) for key in ("_parameters", "_buffers") if key in part.__dict__}

    def state(self, keys: list[str]) -> dict[str, Any]:
        """Return the saved parameters and buffers, and the saved values of the attributes `keys`."""
        slots = {key: tensor for container in self.containers.values() for key, tensor in container.items()}
        found = {**slots, **{key: self.attributes.get(key) for key in keys}}
        return {key: value for key, value in found.items() if value is not None}

    def restore(self) -> None:
        """Put everything back."""
        self.part.__dict__.clear()
        self.part.__dict__.update(self.attributes)
        for key, content in self.containers.items():
            self.part.__dict__[key].clear()
            self.part.__dict__[key].update(content)


class Reload:
    """One group during a reload.

    Between construction and `close` the live modules are unchanged. Received bytes go into `fresh`: the group's
    parameters by name, as they are before any weight is loaded.
    """

    def __init__(self, group: ModuleGroup, fills: Iterable[Fill], model: EngineModel) -> None:
        self._group, self._model = group, model
        self._fresh = {id(param): materialise(param, model.device) for param in group.pristine_parameters()}
        self.fresh: dict[str, nn.Parameter] = dict(zip(group.params, self._fresh.values(), strict=True))
        for fill in fills:
            fill.apply(self.fresh[fill.param].data)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the fresh parameters into the never loaded copy of the group until the context ends.

        The copy's own parameters are on `meta`.
        """
        with ExitStack() as stack:
            for module in self._group.pristine:
                stack.callback(Snapshot(module).restore)
                install(module, module, self._fresh)
            yield

    def close(self) -> None:
        """Post-process the loaded parameters and copy the outcome into the live tensors.

        Puts the live modules back as they were before it raises.
        """
        group = self._group
        holders = [part for module in group.live for part in self._model.parts(module)]
        templates = [part for module in group.pristine for part in self._model.parts(module)]
        saved = [Snapshot(part) for part in holders]
        with ExitStack() as stack:
            for snapshot in saved:
                stack.callback(snapshot.restore)
            for part, template, keys in zip(holders, templates, group.changed, strict=True):
                _forget_loading(part, template, keys)
            for module, template in zip(group.live, group.pristine, strict=True):
                install(module, template, self._fresh)
            for module in group.live:
                self._model.post_process(module)
            now = [Snapshot(part) for part in holders]
            before, after = (
                [s.state(keys) for s, keys in zip(all_, group.changed, strict=True)] for all_ in (saved, now)
            )
            own = {id(part) for part in holders}
            found = diff_objects(before, after, group.names[0], own)
            if (problems := found.differ + found.closed) and not group.opaque:
                raise UnsupportedError(
                    f"a reload of {group.names[0]} made other objects than CUDA graphs have captured: "
                    f"{'; '.join(problems[:3])}"
                )
            if group.opaque:
                stack.pop_all()  # the live modules keep the new objects
        if group.opaque:
            olds = {id(new): old for _, old, new in found.tensors}
            for part, keys in zip(holders, group.changed, strict=True):
                slots = part.__dict__.get("_parameters", {})
                _fill_and_put_back(slots, list(slots), olds)
                _fill_and_put_back(part.__dict__, keys, olds)
            # A kernel's new object may point into memory without holding it: a scale made by post-processing, as with
            # oneDNN, or a fresh parameter. The modules hold the others, until another module releases them.
            held = {id(param) for module in group.live for _, param in parameters_of(module)}
            states = (self.fresh, *after)
            group.keep_alive = [each for state in states for each in state.values() if id(each) not in held]
            return
        for _, old, new in found.tensors:
            old.data.copy_(new.data)


def _forget_loading(part: Any, template: Any, keys: list[str]) -> None:
    """Give `part` the state of `template`, a never loaded copy, except for its parameters."""
    for key in keys:
        if (value := template.__dict__.get(key, ABSENT)) is ABSENT:
            part.__dict__.pop(key, None)
        else:
            part.__dict__[key] = value
    for container in ("_parameters", "_buffers"):
        for key in part.__dict__.get(container, {}).keys() - template.__dict__.get(container, {}).keys():
            del part.__dict__[container][key]


def _fill_and_put_back(slots: dict[str, Any], keys: list[str], olds: dict[int, torch.Tensor]) -> None:
    """Give the tensors in `slots` their old memory again, with the new contents.

    olds: the old tensors, by id of the new.
    """
    for key in keys:
        if (old := olds.get(id(slots.get(key)))) is not None:
            old.data.copy_(slots[key].data)
            slots[key] = old


def attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of a module or method, without nn.Module's own containers."""
    return {key: value for key, value in part.__dict__.items() if key not in _CONTAINERS}


def install(module: nn.Module, template: nn.Module, fresh: dict[int, nn.Parameter]) -> None:
    """Give `module` the parameters of `fresh`, by id of the template's, in the template's slots."""
    for key, param in list(template._parameters.items()):
        module._parameters[key] = None if param is None else fresh[id(param)]


@contextmanager
def given_memory(params: Collection[str], model: EngineModel) -> Iterator[None]:
    """Give these parameters of the never loaded model memory, until the context ends."""
    pristine = model.pristine()
    places = [(pristine.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in params]
    saved = [(module, key, param) for module, key in places if (param := module._parameters.get(key)) is not None]
    try:
        for module, key, param in saved:
            module._parameters[key] = materialise(param, model.device)
        yield
    finally:
        for module, key, param in saved:
            module._parameters[key] = param


def materialise(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter like `param`, with memory: same class, same attributes, same layout."""
    data = torch.empty_strided(tuple(param.shape), tuple(param.stride()), dtype=param.dtype, device=device)
    data.__class__ = param.__class__
    data.__dict__ = dict(param.__dict__)
    return data  # type: ignore[return-value]
