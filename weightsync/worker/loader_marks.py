"""A check for loaders with a memory of their own: tensors and numbers on modules, beside parameters and buffers.

A loader may scale a parameter once and note that it has, or sum a weight over a dimension for the forward. The first
would not be done again, and the second would stay as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weightsync.errors import UnsupportedError, first_few
from weightsync.worker.reload import ABSENT

_OF_TORCH = {"_parameters", "_buffers", "_modules"}
_KINDS = (bool, int, float, str, torch.Tensor)


@contextmanager
def refuse_marks(model: nn.Module) -> Iterator[None]:
    """Raise `UnsupportedError` if the context sets such an attribute of a module. Take it back before."""
    before = [(module, _marks(module)) for module in model.modules()]
    yield
    found: list[str] = []
    for module, old in before:
        for key, value in _marks(module).items():
            if value is not (was := old.get(key, ABSENT)) and (isinstance(value, torch.Tensor) or value != was):
                found.append(f"{type(module).__name__}.{key}")
                vars(module).pop(key) if was is ABSENT else vars(module).update({key: was})
    if found:
        raise UnsupportedError(
            f"the engine's loader sets {first_few(found)}, apart from the parameters, and a push would leave that as "
            "it is; restart the engine from a checkpoint"
        )


def _marks(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OF_TORCH and isinstance(value, _KINDS)}
