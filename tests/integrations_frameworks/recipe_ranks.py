"""What trainer ranks do in the tests of recipes: the frameworks' own classes, around tiny models on CPUs."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tiny_models
from engines import ANSWER_TOKENS, PROMPTS
from sources import importable
from torch import distributed as dist

from weightsync.engines import HttpEngine

MODEL = "qwen3"


def answer(url: str) -> list[Any]:
    """Return the tokens that a server gives, and their log-probabilities."""
    server = HttpEngine(url, name=url, timeout_s=60.0)
    asked = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "logprobs": 5, "ignore_eos": True}
    body = {**asked, "return_tokens_as_token_ids": True}
    return [server.call("POST", "/v1/completions", {**body, "prompt": p})["choices"][0]["logprobs"] for p in PROMPTS]


def push_twice(rank: int, model: Any, push: Callable[[int], None], url: str) -> None:
    """Push other weights than the engine has, and then those that it was started from."""
    cold = answer(url)
    for step, weights in enumerate("AB", start=1):
        tiny_models.fill(model, weights)
        dist.barrier()  # rank 0 has asked
        push(step)
        if rank == 0:
            assert (answer(url) == cold) == (weights == "B"), f"the answers after a push of {weights}"


def skyrl(rank: int, url: str, colocated: bool) -> None:
    importable("skyrl")
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.trainer import RayPPOTrainer
    from weightsync_skyrl import Experiment, Policy, Trainer

    with mock.patch.object(RayPPOTrainer, "build_models", autospec=True) as build:
        Trainer.build_models(object.__new__(Trainer), "policy", "critic", "reference")
    (_, actor, *others), _ = build.call_args
    assert others == ["critic", "reference"]
    assert issubclass(actor.__ray_metadata__.modified_class, Policy)
    with mock.patch.object(RayPPOTrainer, "__init__", autospec=True, return_value=None):
        names = inspect.signature(BasePPOExp.get_trainer).parameters.keys() - {"self"}
        assert type(object.__new__(Experiment).get_trainer(**dict.fromkeys(names))) is Trainer

    config = SkyRLTrainConfig()
    config.trainer.placement.colocate_all = colocated
    worker = object.__new__(Policy)  # its own start wants an accelerator
    worker.cfg, worker._is_lora = config.trainer, False
    worker.offload_to_cpu = lambda **_: None  # the model is on the CPU
    worker.model = SimpleNamespace(model=tiny_models.shard(tiny_models.build(MODEL, "A")))
    client = RemoteInferenceClient(url, [url], data_parallel_size=1, model_name="policy")

    async def sync(call: Callable[..., Any]) -> None:
        """As SkyRL's WorkerDispatch does where engines have GPUs of their own."""
        if rank == 0 and not colocated:
            await client.pause_generation()
        dist.barrier()
        await call(client, config.generator.inference_engine, model_id=None)
        dist.barrier()
        if rank == 0 and not colocated:
            await client.resume_generation()
            await client.teardown()

    asyncio.run(worker.init_weight_sync_state(client, config.generator.inference_engine))
    push_twice(rank, worker.model.model, lambda _: asyncio.run(sync(worker.broadcast_to_inference_engines)), url)
    worker.weightsync.close()


def prime_rl(rank: int, sources: Path, outputs: Path, url: str) -> None:
    importable("prime_rl", sources)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ["WEIGHTSYNC_ENGINE"] = url
    from prime_rl.transports.weights import setup_weight_broadcast
    from prime_rl.utils import client

    broadcast = setup_weight_broadcast(outputs, SimpleNamespace(type="filesystem"), None, None)
    model = tiny_models.shard(tiny_models.build(MODEL, "A"))
    push_twice(rank, model, lambda step: broadcast.broadcast_weights(model, step=step), url)
    broadcast.weightsync.close()
    dist.barrier()
    assert broadcast.is_stable(1)
    assert broadcast.is_stable(2)
    # The orchestrator's own call, by which its engines would load the folder.
    pool = object.__new__(client.InferencePool)
    pool._admin_clients = [mock.Mock(side_effect=AssertionError)]
    asyncio.run(pool.update_weights(outputs, step=1))
