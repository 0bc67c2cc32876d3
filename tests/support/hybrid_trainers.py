"""Workers that hold a trainer's model, and a user's own engine, for tests of `weightsync.hybrid` with real engines."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path
from typing import Any

import megatron_models
import tiny_models
import torch
from hybrid_protocols import ALL_MICRO_DP, PP_ONLY
from safetensors.torch import load_file
from tensordict import TensorDict

from weightsync import MegatronBackend
from weightsync.hybrid import Dispatch, Place, Worker, register


class Fsdp(Worker):
    def init_model(self, model: str, weights: str) -> None:
        torch.set_num_threads(1)
        self.model = tiny_models.shard(tiny_models.build(model, weights))

    @register(Dispatch.ONE_TO_ALL)
    def change(self, weights: str) -> None:
        tiny_models.fill(self.model, weights)


class Megatron(Worker):
    """Two tensor-parallel ranks, or the ranks of another mesh."""

    backend = MegatronBackend(vocab_size=251)

    def init_model(self, model: str, folder: Path, tp: int = 2, pp: int = 1) -> None:
        torch.set_num_threads(1)
        self.folder, self.config = folder, tiny_models.CONFIGS[model]()
        self.model = megatron_models.build(self.config, megatron_models.Mesh(tp, pp), torch.bfloat16, padding=5)

    @register(Dispatch.ONE_TO_ALL)
    def change(self, weights: str) -> None:
        megatron_models.load(self.model, self.config, load_file(self.folder / weights / "model.safetensors"))

    def place(self) -> Place:
        from megatron.core import parallel_state

        tp = parallel_state.get_tensor_model_parallel_rank()
        collects = parallel_state.is_pipeline_last_stage() and tp == 0
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return Place(parallel_state.get_data_parallel_rank(), collects, tp, stage)

    @register(PP_ONLY)
    def names(self) -> list[str]:
        return [name for chunk in self.model for name, _ in chunk.named_parameters()]

    @register(ALL_MICRO_DP)
    def generate(self, batch: TensorDict) -> TensorDict:
        """Return of each row the rank that it went to."""
        return TensorDict({"rank": torch.full(batch.batch_size, self.rank)}, batch.batch_size)


class AsyncRollout:
    """An actor around vLLM's `AsyncLLM`, as a user writes one."""

    async def __init__(self, devices: str, options: dict[str, Any]) -> None:
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        import vllm

        self._sampling = vllm.SamplingParams
        self.engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**options))

    async def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[Any]:
        return await asyncio.gather(*(self._answers(prompt, sampling) for prompt in prompts))

    async def _answers(self, prompt: list[int], sampling: dict[str, Any]) -> list[Any]:
        params = self._sampling(**{"logprobs": 0, "detokenize": False, **sampling})
        async for output in self.engine.generate({"prompt_token_ids": prompt}, params, str(uuid.uuid4())):
            last = output
        return [
            (list(each.token_ids), [at[token].logprob for token, at in zip(each.token_ids, each.logprobs, strict=True)])
            for each in last.outputs
        ]
