"""An `AsyncLLM` that its own event loop pushes to, paused and resumed by the caller."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import tiny_models
from engines import ANSWER_TOKENS, PROMPTS, TIMEOUT_S, Engines, Remote, answer_of, assert_same

from weightsync import EngineError, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def push_within_the_loop(engines: Engines, model: str) -> dict[str, Any]:
    import vllm

    async def main() -> dict[str, Any]:
        arguments = vllm.AsyncEngineArgs(**engines.options(engines.checkpoint(model, "A")))
        llm = vllm.AsyncLLMEngine.from_engine_args(arguments)

        async def answer(prompt: list[int]) -> Any:
            request = llm.generate({"prompt_token_ids": prompt}, engines.sampling(ANSWER_TOKENS), str(time.time_ns()))
            return answer_of([output async for output in request][-1])

        try:
            trained = tiny_models.build(model, "A")
            with WeightSync("fsdp", "ipc", llm, timeout_s=TIMEOUT_S, pause="caller") as sync:
                refusal = ""
                try:
                    await sync.push_async(trained)
                except EngineError as error:
                    refusal = str(error)
                await llm.pause_generation(mode="keep")
                tiny_models.fill(trained, "B")
                request = asyncio.create_task(answer(PROMPTS[0]))
                await sync.push_async(trained, label="step 7")
                is_paused, version = await llm.is_paused(), await llm.get_weight_version()
                await llm.resume_generation()
                first = await request
                return {
                    "refusal": refusal,
                    "is_paused": is_paused,
                    "version": version,
                    "answers": [first, *[await answer(prompt) for prompt in PROMPTS[1:]]],
                }
        finally:
            llm.shutdown()

    return asyncio.run(main())


def test_the_loop_of_an_engine_pushes_to_it_while_the_caller_holds_the_pause(engines: Remote):
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    found = engines.call(push_within_the_loop, "qwen3", timeout_s=240)
    assert "the engine generates" in found["refusal"]
    assert found["is_paused"]
    assert found["version"] == "step 7"
    assert_same(found["answers"], cold["B"], "the AsyncLLM after a push from its own loop")
