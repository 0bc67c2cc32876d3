"""The use of a trainer's tensors by one engine worker's model, and its compact form for messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from msgspec import Struct

from weightsync.errors import ProtocolError
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Box, Count


class LoadPlan(Struct, frozen=True):
    """The use of the tensors of a manifest by a worker's model.

    used: tensor name -> dtype in the engine.
    partial: tensor name -> the regions that the worker reads. The others are read whole.
    refused: tensor name -> the reason why the engine cannot load it.
    groups: names of the tensors in one engine parameter.
    reloads: tensor names of one module. When any of them changes, all must be pushed.
    missing: parts of the engine's parameters without a tensor.
    hints: tensor names for these parts, guessed from other layers' names, or with another prefix than the trainer's.
    load_paths: load path -> number of modules.
    left_out: tensors of a part of the model that the engine does not run.
    kept: parameters without a tensor. They keep their values. They are a drafter's, or named by the trainer.
    tied: tensors of a parameter shared by several modules of the engine.
    duplicates: tensor name -> another tensor of the same parameter. Their values must be equal.
    """

    used: dict[str, str]
    partial: dict[str, tuple[Box, ...]]
    refused: dict[str, str]
    groups: list[list[str]]
    reloads: list[list[str]]
    missing: list[str]
    hints: list[str]
    load_paths: dict[str, int]
    left_out: list[str]
    kept: list[str]
    tied: list[str]
    duplicates: dict[str, str]


Runs: TypeAlias = list[tuple[Count, Count]]
"""Positions in a manifest: the first and the number of each run of neighbours, in order."""


def runs_of(positions: Iterable[int]) -> Runs:
    """Return positions, in any order, as runs."""
    ordered = sorted({*positions})
    cuts = [0, *(at for at, (low, high) in enumerate(pairwise(ordered), 1) if high > low + 1), len(ordered)]
    return [(ordered[begin], end - begin) for begin, end in pairwise(cuts) if end > begin]


PackedRegions: TypeAlias = list[tuple[tuple[Box, ...], Runs]]
"""Boxes, and the tensors with these boxes."""


def pack_regions(regions: Mapping[str, tuple[Box, ...]], at: Mapping[str, int]) -> PackedRegions:
    """Return the regions of each tensor with positions in place of names. `at` has the position of each name."""
    alike = grouped(regions, regions.__getitem__)
    return [(boxes, runs_of(at[name] for name in names)) for boxes, names in alike.items()]


_MOST_READINGS = 64
"""The most readings of each name. A message of a megabyte could name billions."""


class NameReader:
    """A reader of runs of positions of `names`. It reads a bounded number of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._left = _MOST_READINGS * len(names)

    def read(self, runs: Runs) -> list[str]:
        """Return the names. Raise `ProtocolError` for runs out of order, outside of the names, or too many."""
        found: list[str] = []
        behind = 0
        for first, count in runs:
            self._left -= count
            if first < behind or first + count > len(self._names) or self._left < 0:
                raise ProtocolError(f"a load plan has no {count} of {len(self._names)} tensors from number {first} on")
            found += self._names[first : first + count]
            behind = first + count
        return found

    def read_regions(self, packed: PackedRegions) -> dict[str, tuple[Box, ...]]:
        """Return the regions of each tensor. Tensors with equal boxes share them. Raises as `read` does."""
        return {name: boxes for boxes, runs in packed for name in self.read(runs)}
