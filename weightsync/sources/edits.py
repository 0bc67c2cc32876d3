"""Tensors that a push computes from the trainer's own: dequantised, or with adapters added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol, TypeAlias

import torch

from weightsync.planning.layout import Box

Whole: TypeAlias = "Mapping[torch.Tensor, torch.Tensor]"
"""Whole tensors, by this rank's part of each."""


class Edit(Protocol):
    """One step from a tensor of the trainer to a tensor that travels.

    needs_whole: whether a region of the result depends on the whole tensor.
    """

    needs_whole: bool

    @property
    def param(self) -> torch.Tensor:
        """This rank's part of the edited tensor. `inputs` has it if `needs_whole`."""

    def inputs(self) -> list[torch.Tensor]:
        """Return this rank's part of each tensor that `apply` needs whole."""

    def apply(self, values: torch.Tensor, box: Box, whole: Whole) -> torch.Tensor:
        """Return the region `box` of the result from the same region of the tensor. Leave `values` unchanged."""

    def settings(self) -> str:
        """Return a text of the state beside tensors that the result depends on."""


@cache
def stand_in(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one element, the same each time: a model that has not moved is then read as before."""
    return torch.empty((), dtype=dtype, device=device)


def edited(edits: Sequence[Edit], shape: tuple[int, ...], values: torch.Tensor, box: Box, whole: Whole) -> torch.Tensor:
    """Return a region of a tensor of `shape` after its edits, in memory of its own. `values` is the region before."""
    first = max((number + 1 for number, edit in enumerate(edits) if edit.needs_whole), default=0)
    if first:
        full = whole[edits[first - 1].param]
        for edit in edits[:first]:
            full = edit.apply(full, Box.full(shape), whole)
        values = full[region(box)]
    for edit in edits[first:]:
        values = edit.apply(values, box, whole)
    return values


def region(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in the whole tensor."""
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
