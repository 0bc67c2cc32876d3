"""A search for tensors with NaN or infinity, at the speed of memory.

The sum of a tensor is finite if all its elements are, unless the sum overflows. One pass of sums, without temporaries,
therefore clears nearly all tensors. Only tensors without a finite sum are searched element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch


@torch.no_grad()
def find_non_finite(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of the tensors that hold a NaN or an infinity, in order. Waits for their GPUs."""
    sums: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = defaultdict(dict)
    for number, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.numel():
            own = sum_of(tensor)
            sums[own.device, own.dtype][number] = own
    suspects: list[int] = []
    for alike in sums.values():
        are_finite = torch.stack([*alike.values()]).isfinite().tolist()
        suspects += [number for number, is_finite in zip(alike, are_finite, strict=True) if not is_finite]
    return sorted(number for number in suspects if not _is_finite(tensors[number]))


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor of floats, in float32 or wider. Does not wait for its GPU."""
    if tensor.dtype.itemsize == 1:  # float8: torch cannot sum it
        tensor = tensor.to(torch.bfloat16)
    if tensor.dtype is torch.float64:
        return tensor.sum()
    # On a CPU, `sum(dtype=...)` first copies the tensor. float16 needs that copy, or its sum would soon overflow.
    return tensor.sum(dtype=torch.float32) if tensor.is_cuda or tensor.dtype is torch.float16 else tensor.sum().float()


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.bfloat16)
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
