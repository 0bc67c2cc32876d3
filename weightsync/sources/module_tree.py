"""The modules of a model under their checkpoint names, without their wrappers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from weightsync.sources.peft import wrapped_module

# FSDP1, torch.compile and activation checkpointing put a module under one of these names in a module of their own. The
# `module` of DDP and DeepSpeed is not here: models use that name too.
_WRAPPED_AS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model's own module inside any number of wrappers."""
    return _shells(module)[-1]


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class without the classes that `fully_shard` and `replicate` put in front of it.

    They change a module's class to FSDPLlamaModel(FSDPModule, LlamaModel). transformers and engines do not know such a
    class.
    """
    kind = type(module)
    while len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed."):
        kind = kind.__bases__[1]
    return kind


def as_built(
    module: nn.Module, prefix: str = "", own: Mapping[str, Mapping[str, torch.Tensor]] | None = None
) -> nn.Module:
    """Return the tree of modules without wrappers, and with their classes from before `fully_shard`.

    transformers recognises its own classes only. The modules are new objects and share all attributes with the old
    ones.

    own: tensors that replace a module's own, by the module's prefix and their names in it.
    """
    module = unwrapped(module)
    kind = own_class(module)
    twin = kind.__new__(kind)
    modules = {
        name: None if child is None else as_built(child, f"{prefix}{name}.", own)
        for name, child in module._modules.items()
    }
    vars(twin).update({**vars(module), "_modules": modules})
    if own is not None:
        others = own.get(prefix, {})
        twin._buffers = {name: others.get(name, buffer) for name, buffer in module._buffers.items()}
        # FSDP1 may have turned parameters into plain attributes of the module.
        theirs = {name: tensor for name, tensor in others.items() if name not in twin._buffers}
        twin._parameters = {**module._parameters, **theirs}  # type: ignore[dict-item]
        for name in theirs:
            vars(twin).pop(name, None)
    return twin


def _shells(module: nn.Module) -> list[nn.Module]:
    """Return the module, the module that it wraps, and so on. The last one is the model's own."""
    shells = [module]
    while True:
        names = ("module",) if _holds_a_module(module) else _WRAPPED_AS
        inner = next((module._modules[name] for name in names if name in module._modules), wrapped_module(module))
        if inner is None:
            return shells
        shells.append(inner)
        module = inner


def _holds_a_module(module: nn.Module) -> bool:
    """Return whether the module is a trainer's wrapper with its inner module in the attribute `module`."""
    # If DeepSpeed is not imported, no module is its engine.
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    return isinstance(module, (DistributedDataParallel, DataParallel, AveragedModel, engine))


def modules(model: nn.Module) -> list[nn.Module]:
    """Return `model.modules()` in another order, and faster.

    A module that is registered twice comes twice.
    """
    found = [model]
    for module in found:
        if children := module._modules:
            found += [child for child in children.values() if child is not None]
    return found


def own_tensors(module: nn.Module, buffers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's own parameters and persistent buffers, by their names in it.

    A forward may write non-persistent buffers. No checkpoint has them.
    """
    yield from ((name, param) for name, param in module._parameters.items() if param is not None)
    for name, buffer in module._buffers.items() if buffers else ():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of the unwrapped model with the prefix of its tensors' names, in the order of `state_dict`.

    A module that is registered twice comes twice.
    """
    for at, shells in walk_shells(model):
        yield at, shells[-1]


def walk_shells(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the prefixes of `walk`, each with the module and its wrappers, the outermost first."""
    shells = _shells(model)
    yield prefix, shells
    for name, child in shells[-1]._modules.items():
        if child is not None:
            yield from walk_shells(child, f"{prefix}{name}.")
