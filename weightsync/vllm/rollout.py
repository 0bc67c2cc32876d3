"""The Ray actors of one engine of a `weightsync.hybrid.RolloutGroup`."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from weightsync.errors import EngineError
from weightsync.vllm.llm_object import died

Answer = tuple[list[int], list[float]]

_ABORTED, _FAILED = "abort", "error"
"""vLLM's finish reasons of answers cut short."""


class RolloutEngine:
    """An `LLM` with the methods for a rollout group. A push waits for the answers to all prompts.

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
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)  # None: of another process
        self._executor = getattr(core, "model_executor", None)
        if self._executor is not None:
            self._executor.register_failure_callback(_end_actor)

    def generate(self, prompts: Sequence[list[int]], sampling: dict[str, Any]) -> list[list[Answer]]:
        """Return the answers to each prompt: token ids, and the log-probability of each sampled token."""
        params = self._sampling(**_with_logprobs(sampling))
        try:
            outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        except Exception:
            # A worker's death ends this call before vLLM's thread ends the actor.
            if getattr(self._executor, "is_failed", False) or died(self.llm):
                _end_actor()
            raise
        return [[_answer(completion) for completion in output.outputs] for output in outputs]

    def sleep(self, level: int) -> None:
        """Put the engine to sleep, as `LLM.sleep` does."""
        self.llm.sleep(level=level)

    def wake_up(self, tags: list[str]) -> None:
        """Wake what these tags name, as `LLM.wake_up` does."""
        self.llm.wake_up(tags)


class AsyncRolloutEngine:
    """An `AsyncLLM` with the methods for a rollout group. A push pauses its requests, and they go on after the push.

    With `pause="abort"` a push ends the requests, and they begin anew after the push.

    The arguments are those of `RolloutEngine`.
    """

    # `AsyncLLM` needs a running event loop. Ray awaits this function in the actor's.
    async def __init__(self, devices: str, options: dict[str, Any]) -> None:  # type: ignore[misc]
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        import vllm

        self._sampling = vllm.SamplingParams
        self._final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self.llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**options))
        self._answering: set[asyncio.Future[Any]] = set()
        self._waiting: asyncio.Future[Any] | None = None  # a sleep's wait for the answers

    async def generate(self, prompts: Sequence[list[int]], sampling: dict[str, Any]) -> list[list[Answer]]:
        """Return the answers as `RolloutEngine.generate` does."""
        answers = asyncio.gather(*(self._answers(prompt, sampling) for prompt in prompts))
        self._answering.add(answers)
        try:
            return await answers
        except Exception:
            if self.llm.errored:
                _end_actor()
            raise
        finally:
            self._answering.discard(answers)

    async def sleep(self, level: int) -> None:
        """Put the engine to sleep when it has answered, as a `RolloutEngine` does.

        A paused engine answers nothing, and sleeps at once. Its requests begin anew when it has woken.
        """
        # Not by vLLM's mode "wait", which lets a paused engine go on, and sleeps in spite of a later `wake_up`.
        if self._answering and not await self.llm.is_paused():
            self._waiting = asyncio.ensure_future(asyncio.wait(self._answering))
            await self._waiting
        await self.llm.sleep(level)

    async def wake_up(self, tags: list[str]) -> None:
        """Wake what these tags name, as `AsyncLLM.wake_up` does. A `sleep` that still waits is given up."""
        if self._waiting is not None:
            self._waiting.cancel()
        await self.llm.wake_up(tags)

    async def _answers(self, prompt: list[int], sampling: dict[str, Any]) -> list[Answer]:
        # Cumulative outputs, vLLM's default, have some of the `n` completions each.
        params = self._sampling(**_with_logprobs(sampling), output_kind=self._final_only)
        # A pause by "abort" ends requests. vLLM queues new ones until it resumes.
        while True:
            async for output in self.llm.generate({"prompt_token_ids": prompt}, params, str(uuid.uuid4())):
                last = output
            if all(completion.finish_reason != _ABORTED for completion in last.outputs):
                return [_answer(completion) for completion in last.outputs]


_end_actor = partial(os._exit, 1)
"""End the actor with its vLLM: the group looks for dead actors, and asks other engines then."""


def _with_logprobs(sampling: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": 0, "detokenize": False, **sampling}


def _answer(completion: Any) -> Answer:
    """Return a whole answer. Raise `EngineError` if vLLM has cut it short."""
    tokens = list(completion.token_ids)
    if completion.finish_reason in (_ABORTED, _FAILED):
        raise EngineError(
            f"vLLM cut an answer short after {len(tokens)} tokens, with the finish reason "
            f"{completion.finish_reason!r}; expected a whole answer: ask again, and see the engine's log"
        )
    sampled = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
    return tokens, sampled
