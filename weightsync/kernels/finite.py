"""A search for tensors with NaN or infinity, at the speed of memory.

The sum of a tensor is finite if all its elements are, unless the sum overflows. One pass of sums, without temporaries,
therefore clears nearly all tensors. Only tensors without a finite sum are searched element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from weightsync.net.runtime import submit
from weightsync.planning.grouping import grouped

_PART_ELEMENTS = 1 << 26
"""Most elements of a copy in float32. A whole copy of a layer's fused experts may find no room beside them."""


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
    sums = {number: sum_of(each) for number, each in tensors.items() if each.is_floating_point() and each.numel()}
    alike = grouped(sums, lambda number: (sums[number].device, sums[number].dtype))
    return [(own, torch.stack([sums[number] for number in own]).isfinite()) for own in alike.values()]


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor of floats, in float32 or wider. Does not wait for its GPU."""
    if tensor.dtype is torch.float64:
        return tensor.sum()
    # torch cannot sum float8. On a CPU `sum(dtype=...)` copies the tensor, and a sum in float16 would soon overflow.
    if tensor.dtype.itemsize == 1 or (tensor.dtype is torch.float16 and not tensor.is_cuda):
        return torch.stack([*map(torch.sum, _widened(tensor))]).sum()
    return tensor.sum(dtype=torch.float32) if tensor.is_cuda else tensor.sum().float()


@torch.no_grad()
def _is_finite(tensor: torch.Tensor) -> bool:
    bounds = map(torch.aminmax, _widened(tensor) if tensor.dtype.itemsize == 1 else [tensor])
    return all(bool(torch.stack(each).isfinite().all()) for each in bounds)


def _widened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor in float32, in parts. A loop's variable would keep the last part while the next one is made."""
    return (part.float() for part in tensor.reshape(-1).split(_PART_ELEMENTS))
