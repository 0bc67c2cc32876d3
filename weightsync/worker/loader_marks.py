"""A check for loaders with a memory of their own: flags and tensors on modules, beside parameters and buffers.

A loader may scale a parameter once, and note that it has or drop the factor. It may also sum a weight over a dimension
for the forward. The first would not be done again, and the sum would stay as it is. Numbers are mostly sizes of what a
loader makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weightsync.errors import UnsupportedError, first_few
from weightsync.worker.reload import attributes_of

_KINDS = (bool, torch.Tensor, type(None))


@contextmanager
def refuse_marks(model: nn.Module) -> Iterator[None]:
    """Raise `UnsupportedError` if the context sets such an attribute of a module. Take it back before."""
    before = [(module, attributes_of(module)) for module in model.modules()]
    try:
        yield
    finally:
        found = [mark for module, old in before for mark in _take_back(module, old)]
    if found:
        raise UnsupportedError(
            f"the engine's loader sets {first_few(found)}, apart from the parameters, and a push would leave that as "
            "it is; restart the engine from a checkpoint"
        )


def _take_back(module: nn.Module, old: dict[str, Any]) -> list[str]:
    now = attributes_of(module).items()
    new = [key for key, value in now if isinstance(value, _KINDS) and value is not old.get(key)]
    for key in new:
        del vars(module)[key]
    vars(module).update({key: old[key] for key in new if key in old})
    return [f"{type(module).__name__}.{key}" for key in new]
