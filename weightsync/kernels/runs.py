"""Runs of memory: neighbouring tensors of one storage, as one tensor.

The experts of a layer are views of two fused parameters. A pass over the memory of a model needs no launch for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

_MOST_BYTES = 2**28
"""The most bytes of a run of several tensors. A search may need a copy of a run in a wider dtype."""


class Run(NamedTuple):
    """Memory of the tensors with the numbers `members`: 1-D, or one tensor with gaps as it is."""

    data: torch.Tensor
    members: list[int]


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that only the tensors of one storage share. A storage without memory has one too."""
    return int(tensor.untyped_storage()._cdata)


@torch.no_grad()
def join_runs(tensors: Sequence[torch.Tensor]) -> list[Run]:
    """Return all memory of these tensors, in few runs. Each tensor is in one run."""
    found: list[Run] = []
    lying: dict[Hashable, list[tuple[int, int, int]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if tensor.is_contiguous():
            first = int(tensor.storage_offset())
            where = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device
            lying[where].append((first, first + tensor.numel(), number))
        else:
            found.append(Run(tensor, [number]))
    for own in lying.values():
        own.sort()
        first, end, members = own[0][0], own[0][0], list[int]()
        most = _MOST_BYTES // tensors[own[0][2]].element_size()
        for low, high, number in own:
            if members and (low > end or max(high, end) - first > most):
                found.append(_run(tensors, first, end, members))
                first, end, members = low, low, []
            end = max(end, high)
            members.append(number)
        found.append(_run(tensors, first, end, members))
    return found


def _run(tensors: Sequence[torch.Tensor], first: int, end: int, members: list[int]) -> Run:
    return Run(tensors[members[0]].as_strided((end - first,), (1,), first), members)
