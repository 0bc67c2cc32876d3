"""A search for tensors with NaN or infinity, at the speed of memory.

The sum of a tensor is finite if all its elements are, unless the sum overflows. One pass of sums, without temporaries,
therefore clears nearly all tensors. Only tensors without a finite sum are searched element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from weightsync.net.runtime import submit


def find_non_finite(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of the tensors that hold a NaN or an infinity, in order. Waits for their GPUs."""
    return begin_search(tensors)()


def begin_search(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Queue a search of tensors on GPUs on the current streams, and of others in a thread.

    Return the rest of `find_non_finite`.
    """
    queued = _are_finite({number: each for number, each in enumerate(tensors) if each.is_cuda})
    others = {number: each for number, each in enumerate(tensors) if not each.is_cuda}
    begun = submit("finite", partial(_are_finite, others)) if others else None

    def finish() -> list[int]:
        done = queued + (begun.result() if begun else [])
        flags = [pair for numbers, found in done for pair in zip(numbers, found.tolist(), strict=True)]
        return sorted(number for number, is_finite in flags if not (is_finite or _is_finite(tensors[number])))

    return finish


@torch.no_grad()
def _are_finite(tensors: Mapping[int, torch.Tensor]) -> list[tuple[list[int], torch.Tensor]]:
    """Return the numbers of tensors, and for each whether its sum is finite. Tensors of other than floats are left out.

    Does not wait for their GPUs.
    """
    sums: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = defaultdict(dict)
    for number, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            own = sum_of(tensor)
            sums[own.device, own.dtype][number] = own
    return [([*alike], torch.stack([*alike.values()]).isfinite()) for alike in sums.values()]


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor of floats, in float32 or wider. Does not wait for its GPU."""
    if tensor.dtype.itemsize == 1:  # float8: torch cannot sum it
        tensor = tensor.to(torch.bfloat16)
    if tensor.dtype is torch.float64:
        return tensor.sum()
    # On a CPU, `sum(dtype=...)` first copies the tensor. float16 needs that copy, or its sum would soon overflow.
    return tensor.sum(dtype=torch.float32) if tensor.is_cuda or tensor.dtype is torch.float16 else tensor.sum().float()


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.bfloat16)
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
