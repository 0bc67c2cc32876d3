"""The modules of a model under their checkpoint names, whatever wraps them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# FSDP1, torch.compile and activation checkpointing put a module under one of these names in a module of their own.
# The `module` of DDP and DeepSpeed is not here: it is a name that models use too.
_WRAPPED_AS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(module: nn.Module) -> nn.Module:
    """The model's own module inside any number of wrappers."""
    while True:
        names = ("module",) if _holds_a_module(module) else _WRAPPED_AS
        inner = next((module._modules[name] for name in names if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def _holds_a_module(module: nn.Module) -> bool:
    """Whether the module is a trainer's wrapper around the one that it calls `module`."""
    # Who has not imported DeepSpeed has no engine of it.
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())
    return isinstance(module, (DistributedDataParallel, DataParallel, engine))


def walk(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module of the unwrapped model with the prefix of its tensors' names, in the order of `state_dict`. A
    module that is registered twice comes twice."""
    module = unwrapped(model)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}{name}.")
