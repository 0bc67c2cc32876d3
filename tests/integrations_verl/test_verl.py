"""verl's own manager, workers and vLLM servers update their weights through `weightsync.integrations.verl`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import fake_engine
import pytest
import ray
import tiny_models
import torch
import trl_ranks
import verl_ranks
from engines import NOT_COMPILED
from ranks import FORKSERVER
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster() -> Iterator[None]:
    folders = [ROOT, ROOT / "tests/support", ROOT / "tests/integrations", Path(__file__).parent]
    seen = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "VERL_USE_EXTERNAL_MODULES": "verl_cpu"}
    os.environ |= {**NOT_COMPILED, **seen, "VERL_PLATFORM": "cpu"}
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=True)
    yield
    ray.shutdown()


def configure(transport: str) -> RolloutConfig:
    return RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=1,
        max_model_len=256,
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        enforce_eager=True,
        enable_sleep_mode=False,
        free_cache_engine=False,
        checkpoint_engine=CheckpointEngineConfig(
            backend="weightsync",
            custom_backend_module="weightsync.integrations.verl",
            engine_kwargs={"weightsync": {"transport": transport, "timeout_s": 120.0}},
        ),
        engine_kwargs={"vllm": {"worker_extension_cls": "weightsync.integrations.verl_worker.WorkerExtension"}},
    )


async def push_twice(checkpoint: Path, transport: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rollout = configure(transport)
    trainer = verl_ranks.policy(verl_ranks.Policy, rollout.checkpoint_engine)
    replica = verl_ranks.Replica(0, rollout, HFModelConfig(path=str(checkpoint)), gpus_per_node=1)
    await replica.launch_servers()
    manager = CheckpointEngineManager(rollout.checkpoint_engine, trainer, [replica])
    metrics, answers = [], {}
    for step, weights in enumerate("AB", start=1):
        trainer.fill(weights)
        metrics.append(await manager.update_weights(global_steps=step))
        answers[weights] = await verl_ranks.ask(replica.servers[0])
    return metrics, answers


async def push_to_a_stand_in(checkpoint: Path) -> None:
    """Two updates of the same step of the trainer."""
    rollout = configure("ipc")
    trainer = verl_ranks.policy(verl_ranks.TinyPolicy, rollout.checkpoint_engine)
    replica = verl_ranks.Replica(0, rollout, HFModelConfig(path=str(checkpoint)), gpus_per_node=1)
    replica.workers = verl_ranks.group(replica.get_ray_class_with_init_args(), 1).workers
    replica.servers = [ray.remote(verl_ranks.StandIn).options(name="vllm_server_0_0", max_concurrency=50).remote()]
    manager = CheckpointEngineManager(rollout.checkpoint_engine, trainer, [replica])
    for version in (1, 2):
        trainer.fill(version)
        metrics = await manager.update_weights(global_steps=7)
        assert metrics["weightsync/version"] == version
        found, calls, label = await replica.servers[0].state.remote()
        expected = fake_engine.cold(fake_engine.checkpoint(version)).state()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert (calls, label) == (["abort", 7, "resume"] * version, "7")


def test_engine_without_vllm_serves_what_verl_hands_over(cluster: None, tmp_path: Path) -> None:
    asyncio.run(push_to_a_stand_in(trl_ranks.save(tmp_path / "A")))


def test_replica_equals_a_cold_engine(cluster: None, tmp_path: Path) -> None:
    checkpoint = trl_ranks.save(tmp_path / "A")
    other = tiny_models.save(tiny_models.build(verl_ranks.MODEL, "B"), tmp_path / "B")
    metrics, answers = asyncio.run(push_twice(checkpoint, "ipc"))
    assert [each["weightsync/version"] for each in metrics] == [1, 2]
    for weights, folder in (("A", checkpoint), ("B", other)):
        with ProcessPoolExecutor(1, FORKSERVER) as process:
            assert answers[weights] == process.submit(verl_ranks.cold, folder).result(200)
    assert answers["A"] != answers["B"]
