"""A call of `RolloutGroup.generate`: prompts shared out over the engines, and their answers as rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from weightsync.hybrid.batch import rows, take, union

Prompt = list[int]
Answer = tuple[list[int], list[float]]
"""The token ids of one answer, and the log-probability of each when it was sampled."""
Begun = Callable[[], dict[int, list[Answer]]]
"""A pending call of engines. It returns the answers by the prompt's number, without unanswered prompts."""


class Generation:
    """The answers to prompts. Prompts that a dead engine leaves unanswered are asked again."""

    def __init__(self, prompts: Sequence[Prompt], begin: Callable[[dict[int, Prompt]], Begun]) -> None:
        self._prompts, self._begin = dict(enumerate(prompts)), begin
        self._begun = begin(self._prompts)

    def results(self) -> list[list[Answer]]:
        """Wait for the answers to each prompt, in order. Raise the errors of `begin` and of the pending call."""
        answers = self._begun()
        while left := {number: prompt for number, prompt in self._prompts.items() if number not in answers}:
            answers |= self._begin(left)()
        return [answers[number] for number in self._prompts]


def prompts_of(batch: TensorDict) -> list[Prompt]:
    """Return the token ids of each row of a batch."""
    ids = batch["prompts"].unbind()
    if "prompt_mask" not in batch:
        return [row.tolist() for row in ids]
    return [row[keep.bool()].tolist() for row, keep in zip(ids, batch["prompt_mask"].unbind(), strict=True)]


def batch_of(prompts: TensorDict, answers: list[list[Answer]]) -> TensorDict:
    """Return the rows of the prompts with the columns of the answers. A row is repeated for each of its answers."""
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
    found = {"answers": ids, "answer_mask": mask, "sampled_logprobs": logprobs}
    return union(repeated, TensorDict(found, [len(flat)]))
