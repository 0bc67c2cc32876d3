"""Values overwritten by a start with random weights and missing from every checkpoint.

vLLM's dummy loader fills every parameter and every persistent buffer. Some buffers are computed by a constructor and
are in no checkpoint: the scaling of a picture's pixels, or the bounds of an activation. An engine loaded from a
checkpoint has the constructor's values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from weightsync.errors import UnsupportedError, first_few
from weightsync.vllm import compat
from weightsync.worker.trace import named_tensors


def overwritten_buffers(live: nn.Module) -> dict[str, torch.Tensor]:
    """Return the running model's buffers that the dummy loader fills, without the scales of caches.

    From vLLM 0.33 on it also fills integers of 8 bits.
    """
    return {
        f"{path}.{key}".removeprefix("."): buffer
        for path, module in live.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
        and (buffer.is_floating_point() or buffer.dtype in (torch.int8, torch.uint8))
        and key not in module._non_persistent_buffers_set
        and key not in compat.CACHE_SCALES
    }


def lost_values(
    live: nn.Module, filled: Collection[str], construct: Callable[[], nn.Module]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the buffers not filled by a push, each with its constructor's value.

    Args:
        live: The running model.
        filled: Names of the tensors that a push fills.
        construct: Returns the model as it is built. Values computed from numbers are real. Tensors that are only
            allocated are on `meta`.

    Raises:
        UnsupportedError: The constructor computes no value of a buffer.
    """
    tensors = named_tensors(live)  # one name for each tensor shared by several modules
    filled_too = {id(tensors[name]) for name in filled if name in tensors}
    lost = {name: buffer for name, buffer in overwritten_buffers(live).items() if id(buffer) not in filled_too}
    if not lost:
        return []
    values: Mapping[str, torch.Tensor] = dict(construct().named_buffers())
    unknown = [
        name
        for name, buffer in lost.items()
        if name not in values or values[name].is_meta or values[name].shape != buffer.shape
    ]
    if unknown:
        raise UnsupportedError(
            f'the start with load_format="dummy" has overwritten {len(unknown)} buffers, and no tensor of the trainer '
            f"fills them: {first_few(unknown)}. Start the engine from the checkpoint"
        )
    return [(buffer, values[name].to(buffer.dtype)) for name, buffer in lost.items()]
