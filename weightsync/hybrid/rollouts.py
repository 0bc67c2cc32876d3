"""Rollouts that go on while workers train, with a bound on their age."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tensordict import TensorDict

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.hybrid.pending import CallFuture
from weightsync.hybrid.rollout_group import RolloutGroup

logger = logging.getLogger(__name__)


@dataclass
class Flight:
    """A batch in flight. `pushes` is the number of pushes before it began."""

    prompts: TensorDict
    answers: CallFuture
    pushes: int
    has_failed: bool = False


class Rollouts:
    """The answers to batches of prompts, in order. Engines generate the next batches while workers train on one.

        for batch in Rollouts(engine, loader, behind=1, n=8, max_tokens=512):
            actor.update(batch)
            sync.push()

    At most `behind` pushes lie between the begin of a batch and its return. If a loop pushes more often, the prompts of
    a batch over this age are asked again. An error leaves the batch in the iterator: mend the group, and go on.

    Args:
        engine: The engines. With `behind` over 0, no worker shares their GPUs.
        prompts: Batches of prompts, as for `RolloutGroup.generate`.
        behind: The most pushes, and the number of batches in flight while workers train.
        **sampling: The arguments of `RolloutGroup.generate`.

    Attributes:
        taken: The number of batches returned. A later run continues with the prompts after them, because batches in
            flight end with this run.
        asked_again: The number of batches over the age.

    Raises:
        ConfigError: `behind` cannot work.
    """

    def __init__(self, engine: RolloutGroup, prompts: Iterable[TensorDict], *, behind: int, **sampling: Any) -> None:
        if behind < 0:
            raise ConfigError(f"behind={behind}; expected 0 or more pushes")
        if behind and engine.takes_turns:
            raise ConfigError(
                f"behind={behind}; workers share the engines' GPUs, and engines sleep while workers train: give the "
                "engines a pool of their own, or behind=0"
            )
        self.taken = self.asked_again = 0
        self._engine, self._prompts, self._behind, self._sampling = engine, iter(prompts), behind, sampling
        self._flying: deque[Flight] = deque()
        self._unbegun: list[TensorDict] = []  # the next batch, if its begin has failed

    def __iter__(self) -> Rollouts:
        return self

    def __next__(self) -> TensorDict:
        while len(self._flying) <= self._behind and self._has_next():
            self._flying.append(self._begin(self._unbegun[0]))
            self._unbegun.clear()
        if not self._flying:
            raise StopIteration
        oldest = self._flying[0]
        if (age := self._engine.pushes - oldest.pushes) > self._behind and not oldest.has_failed:
            logger.info("a batch is %d pushes old, at most %d: its prompts are asked again", age, self._behind)
            self.asked_again += 1
            oldest.has_failed = True
        if oldest.has_failed:
            oldest = self._flying[0] = self._begin(oldest.prompts)
        try:
            batch: TensorDict = oldest.answers.result()
        except WeightSyncError:
            for each in self._flying:  # ask again, once the group is mended: the others may have failed too
                each.has_failed = True
            raise
        self._flying.popleft()
        self.taken += 1
        return batch

    def _has_next(self) -> bool:
        """Return whether there is another batch to begin, in `_unbegun`."""
        self._unbegun += [] if self._unbegun else islice(self._prompts, 1)
        return bool(self._unbegun)

    def _begin(self, prompts: TensorDict) -> Flight:
        return Flight(prompts, self._engine.generate.remote(prompts, **self._sampling), self._engine.pushes)
