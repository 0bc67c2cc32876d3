"""A search for tensors with NaN or infinity, at the speed of memory.

The sum of a tensor is finite if all its elements are, unless the sum overflows. One pass of sums, without temporaries,
therefore clears nearly all tensors. Only tensors without a finite sum are searched element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch


class NonFiniteSearch:
    """A search under way. Its sums are queued on the current streams, so it can overlap with other work."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._sums: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)
        for number, tensor in enumerate(tensors):
            if tensor.is_floating_point() and tensor.numel():
                self._sums[tensor.device][number] = sum_of(tensor)

    @torch.no_grad()
    def found(self) -> list[int]:
        """Return the numbers of the tensors that hold a NaN or an infinity, in order. Waits for their GPUs."""
        suspects: list[int] = []
        for of_device in self._sums.values():
            are_finite = torch.stack([each.double() for each in of_device.values()]).isfinite().tolist()
            suspects += [number for number, is_finite in zip(of_device, are_finite, strict=True) if not is_finite]
        return sorted(number for number in suspects if not _is_finite(self._tensors[number]))


def find_non_finite(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of the tensors that hold a NaN or an infinity, in order. Waits for their GPUs."""
    return NonFiniteSearch(tensors).found()


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
