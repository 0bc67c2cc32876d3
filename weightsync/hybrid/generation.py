"""A call of `RolloutGroup.generate`: prompts shared out over the engines, and their answers as rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from weightsync.errors import PeerError, WeightSyncError
from weightsync.hybrid.batch import rows, take, union, unpack
from weightsync.hybrid.pending import Pending

Answer = tuple[list[int], list[float]]
"""The token ids of one answer, and the log-probability of each when it was sampled."""


class Share(NamedTuple):
    """The numbers of an engine's prompts, and its answers at Ray."""

    engine: str
    numbers: list[int]
    ref: Any


class Generation:
    """Answers of engines in progress. If an engine leaves the group, its prompts are asked again.

    Args:
        count: The number of prompts.
        begin: Asks the prompts of these numbers.
        leave_out: Ends the dead engine of an error, or raises the error.
        timeout_s: The timeout of each wait.

    Attributes:
        numbers: The numbers of each engine's prompts, in the order of `results`. It changes when prompts are asked
            again.
    """

    def __init__(
        self,
        count: int,
        begin: Callable[[list[int]], list[Share]],
        leave_out: Callable[[PeerError], None],
        timeout_s: float,
    ) -> None:
        self._begin, self._leave_out, self._timeout_s = begin, leave_out, timeout_s
        self.numbers: list[list[int]] = []
        self._ask(begin([*range(count)]))

    @property
    def refs(self) -> list[Any]:
        return self._pending.refs

    def results(self) -> list[Any]:
        """Wait for the answers of each engine. Raise the errors of `begin` and of the engines."""
        while True:
            try:
                return self._pending.results()
            except PeerError as error:
                lost = [share for share in self._shares if share.engine == error.who]
                if not lost:
                    raise
                self._leave_out(error)
                others = [share for share in self._shares if share not in lost]
                self._ask([*others, *self._begin([*chain(*(share.numbers for share in lost))])])

    def late(self) -> tuple[str, list[str]]:
        return self._pending.late()

    def failure(self) -> WeightSyncError | None:
        return self._pending.failure()

    def _ask(self, shares: list[Share]) -> None:
        self._shares = shares
        self.numbers[:] = [share.numbers for share in shares]
        # An engine that is asked again has two shares.
        names = {share.ref: share.engine for share in shares}
        self._pending = Pending("generate", names, self._timeout_s)


def prompts_of(batch: TensorDict) -> list[list[int]]:
    """Return the token ids of each row of a batch."""
    ids = batch["prompts"].unbind()
    if "prompt_mask" not in batch:
        return [row.tolist() for row in ids]
    return [row[keep.bool()].tolist() for row, keep in zip(ids, batch["prompt_mask"].unbind(), strict=True)]


def batch_of(packed: Any, version: int, numbers: list[list[int]], results: list[list[list[Answer]]]) -> TensorDict:
    """Return the rows of the prompts with the columns of the answers. A row is repeated for each of its answers.

    Args:
        packed: The prompts as they travel.
        version: The value of the column "version".
        numbers: The numbers of each engine's prompts.
        results: Each engine's answers to its prompts.
    """
    prompts = unpack(packed)
    by_number = dict(zip(chain(*numbers), chain(*results), strict=True))
    answers = [by_number[number] for number in range(rows(prompts))]
    repeated = take(prompts, [row for row in range(rows(prompts)) for _ in answers[row]])
    flat: list[Any] = [answer for each in answers for answer in each]
    longest = max(len(tokens) for tokens, _ in flat)
    ids = torch.zeros(len(flat), longest, dtype=torch.long)
    mask = torch.zeros(len(flat), longest, dtype=torch.bool)
    logprobs = torch.zeros(len(flat), longest)
    for row, (tokens, sampled) in enumerate(flat):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[row, : len(tokens)] = True
        logprobs[row, : len(tokens)] = torch.tensor(sampled)
    versions = torch.full((len(flat),), version)
    found = {"answers": ids, "answer_mask": mask, "sampled_logprobs": logprobs, "version": versions}
    return union(repeated, TensorDict(found, [len(flat)]))
