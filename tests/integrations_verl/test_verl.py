"""verl's own manager, workers and vLLM servers update their weights through `weightsync.integrations.verl`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import tiny_models
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


async def push_twice(checkpoint: Path, transport: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    config = CheckpointEngineConfig(
        backend="weightsync",
        custom_backend_module="weightsync.integrations.verl",
        engine_kwargs={"weightsync": {"transport": transport, "timeout_s": 120.0}},
    )
    extension = {"worker_extension_cls": "weightsync.integrations.verl_worker.WorkerExtension"}
    rollout = RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=1,
        max_model_len=256,
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        enforce_eager=True,
        enable_sleep_mode=False,
        free_cache_engine=False,
        checkpoint_engine=config,
        engine_kwargs={"vllm": extension},
    )
    trainer = verl_ranks.policy(config, 2)
    replica = verl_ranks.Replica(0, rollout, HFModelConfig(path=str(checkpoint)), gpus_per_node=1)
    await replica.launch_servers()
    manager = CheckpointEngineManager(config, trainer, [replica])
    metrics, answers = [], {}
    for step, weights in enumerate("AB", start=1):
        trainer.fill(weights)
        metrics.append(await manager.update_weights(global_steps=step))
        answers[weights] = await verl_ranks.ask(replica.servers[0])
    return metrics, answers


@pytest.mark.parametrize("transport", ["ipc"])
def test_replica_equals_a_cold_engine(cluster: None, tmp_path: Path, transport: str) -> None:
    import trl_ranks

    checkpoint = trl_ranks.save(tmp_path / "A")
    other = tiny_models.save(tiny_models.build(verl_ranks.MODEL, "B"), tmp_path / "B")
    metrics, answers = asyncio.run(push_twice(checkpoint, transport))
    assert [each["weightsync/version"] for each in metrics] == [1, 2]
    for weights, folder in (("A", checkpoint), ("B", other)):
        with ProcessPoolExecutor(1, FORKSERVER) as process:
            assert answers[weights] == process.submit(verl_ranks.cold, folder).result(200)
    assert answers["A"] != answers["B"]
