"""A weight source that finds the tensors with NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch

from weightsync.kernels.finite import begin_search, find_non_finite, sum_of
from weightsync.kernels.runs import Run
from weightsync.sources.base import DerivedSource, Model, Reading, ShardSource

_TURNS = 16
"""A GPU reads for a check at the speed of a copy. Checking every tensor would double the time of a push."""


class FiniteSource(DerivedSource):
    """The tensors of `source`, checked for NaN and infinity. See `ShardSource`.

    Tensors in the trainer's memory are checked by `non_finite`. Computed tensors are checked when they are computed.

    takes_turns: Check all tensors on GPUs the first time, and then a sixteenth each time, in turn.
    """

    def __init__(self, source: ShardSource, *, takes_turns: bool = False) -> None:
        super().__init__(source)
        self._takes_turns = takes_turns

    def _forget(self) -> None:
        super()._forget()
        self._sums: list[tuple[str, torch.Tensor]] = []
        self._looks = 0
        self._search: tuple[list[Run], Callable[[], list[int]]] | None = None

    def _derive(self, given: Reading) -> Reading:
        shards = [
            shard
            if shard.compute is None
            else replace(shard, compute=partial(self._watched, number, shard.meta.name, shard.compute))
            for number, shard in enumerate(given.shards)
        ]
        return replace(given, shards=shards)

    def read(self, model: Model) -> Reading:
        self._sums, self._search = [], None
        return super().read(model)

    def begin_search(self, left_out: Collection[str] = ()) -> None:
        """Queue the search of `non_finite` on GPUs: the current streams do it."""
        runs, lying = ([], []) if self._reading is None else (self._reading.runs, self._reading.lying)
        due = [run for number, run in enumerate(runs) if self._is_due(number, run.data)]
        if left_out:
            due = [run for run in due if any(lying[number].meta.name not in left_out for number in run.members)]
        self._search = due, begin_search([run.data for run in due])

    def non_finite(self, left_out: Collection[str] = ()) -> list[str]:
        """Return the names of tensors with NaN or infinity among the last shards. Waits for their GPU.

        For computed tensors, the values computed since the last call count. Tensors in the trainer's memory named in
        `left_out` are not checked. `begin_search` may have been called with the same names.
        """
        if self._search is None:
            self.begin_search(left_out)
        assert self._search is not None
        (due, search), self._search = self._search, None
        lying = [] if self._reading is None else self._reading.lying
        near = [lying[number] for run in (due[number] for number in search()) for number in run.members]
        near = [shard for shard in near if shard.meta.name not in left_out]
        found = [near[number].meta.name for number in find_non_finite([shard.tensor for shard in near])]
        sums, self._sums = self._sums, []
        found += [sums[number][0] for number in find_non_finite([each for _, each in sums])]
        self._looks += 1
        return list(dict.fromkeys(found))

    def _is_due(self, number: int, tensor: torch.Tensor) -> bool:
        """Return whether it is the turn of a run, or of a computed tensor, to be checked."""
        if not (self._takes_turns and self._looks and tensor.is_cuda):
            return True
        return number % _TURNS == self._looks % _TURNS

    def _watched(self, number: int, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        values = compute()
        if values.is_floating_point() and values.numel() and self._is_due(number, values):
            self._sums.append((name, sum_of(values)))
        return values
