"""The Ray actor of one engine of a `weightsync.hybrid.RolloutGroup`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


class RolloutEngine:
    """An `LLM` with the methods for a rollout group.

    Args:
        devices: The engine's GPUs, as in CUDA_VISIBLE_DEVICES. Empty: as the process sees them.
        options: The options of the `LLM`.
    """

    def __init__(self, devices: str, options: dict[str, Any]) -> None:
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the actor is a process of its own
        import vllm

        self._sampling = vllm.SamplingParams
        self.llm = vllm.LLM(**options)

    def generate(
        self, prompts: Sequence[list[int]], sampling: dict[str, Any]
    ) -> list[list[tuple[list[int], list[float]]]]:
        """Return the answers to each prompt: token ids, and the log-probability of each sampled token."""
        params = self._sampling(**{"logprobs": 0, "detokenize": False, **sampling})
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [[_answer(completion) for completion in output.outputs] for output in outputs]

    def sleep(self, level: int) -> None:
        """Put the engine to sleep, as `LLM.sleep` does."""
        self.llm.sleep(level=level)

    def wake_up(self, tags: list[str]) -> None:
        """Wake what these tags name, as `LLM.wake_up` does."""
        self.llm.wake_up(tags)


def _answer(completion: Any) -> tuple[list[int], list[float]]:
    tokens = list(completion.token_ids)
    sampled = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
    return tokens, sampled
