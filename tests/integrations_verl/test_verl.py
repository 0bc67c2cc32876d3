"""verl's own manager, workers and vLLM servers update their weights through `weightsync.integrations.verl`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import fake_engine
import pytest
import ray
import torch
import trl_ranks
import verl_ranks
from engines import NOT_COMPILED
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base import Worker
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, get_trainer_cls
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

from weightsync.integrations.verl_trainer import ShardsWorker

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
        load_format="auto",  # verl's own way is to start from random weights
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


async def push_twice(
    checkpoint: Path, kind: type[Worker], transport: str
) -> tuple[list[int], list[verl_ranks.Answers]]:
    """Push other weights than a replica has, and then those that it was started from."""
    rollout = configure(transport)
    trainer = verl_ranks.policy(kind, rollout.checkpoint_engine)
    replica = verl_ranks.Replica(0, rollout, HFModelConfig(path=str(checkpoint)), gpus_per_node=1)
    await replica.launch_servers()
    manager = CheckpointEngineManager(rollout.checkpoint_engine, trainer, [replica])
    versions, answers = [], [await verl_ranks.ask(replica.servers[0])]
    for step, weights in enumerate("BA", start=1):
        trainer.fill(weights)
        metrics = await manager.update_weights(global_steps=step)
        versions.append(metrics["weightsync/version"])
        answers.append(await verl_ranks.ask(replica.servers[0]))
    return versions, answers


def stand_in(rank: int, rollout: RolloutConfig, checkpoint: Path) -> verl_ranks.Replica:
    replica = verl_ranks.Replica(rank, rollout, HFModelConfig(path=str(checkpoint)), gpus_per_node=1)
    replica.workers = verl_ranks.group(replica.get_ray_class_with_init_args(), 1).workers
    server = ray.remote(verl_ranks.StandIn).options(name=f"vllm_server_{rank}_0", max_concurrency=50)
    replica.servers = [server.remote(rank)]
    return replica


async def push_to_stand_ins(checkpoint: Path) -> None:
    """Two updates of the same step of the trainer, and one to a replica that has taken the place of a dead one."""
    rollout = configure("ipc")
    trainer = verl_ranks.policy(verl_ranks.TinyPolicy, rollout.checkpoint_engine)
    manager = CheckpointEngineManager(rollout.checkpoint_engine, trainer, [stand_in(0, rollout, checkpoint)])
    for version, updates in ((1, 1), (2, 2), (3, 1)):
        if version == 3:
            (old,) = manager.replicas
            manager.remove_replicas([old])
            ray.kill(old.servers[0])
            manager.add_replicas([stand_in(1, rollout, checkpoint)])
        trainer.fill(version)
        metrics = await manager.update_weights(global_steps=7)
        assert metrics["weightsync/version"] == version
        found, calls, label = await manager.replicas[0].servers[0].state.remote()
        expected = fake_engine.cold(fake_engine.checkpoint(version)).state()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert (calls, label) == (["abort", 7, "resume"] * updates, "7")


def test_engines_without_vllm_serve_what_verl_hands_over(cluster: None, tmp_path: Path) -> None:
    asyncio.run(push_to_stand_ins(trl_ranks.save(tmp_path / "A")))


@pytest.mark.parametrize("kind", [verl_ranks.Policy, verl_ranks.Shards])
def test_replica_equals_a_cold_engine(cluster: None, tmp_path: Path, kind: type[Worker]) -> None:
    versions, (cold, other, pushed) = asyncio.run(push_twice(trl_ranks.save(tmp_path / "A"), kind, "ipc"))
    assert versions == [1, 2]
    assert cold != other
    assert pushed == cold


def test_trainer_is_found_by_its_name_and_has_workers_that_push_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    def verls(trainer: PPOTrainerSeparateAsync) -> None:
        trainer.role_worker_mapping = {Role.Actor: "verl's", Role.RefPolicy: "verl's", Role.Critic: "verl's"}

    monkeypatch.setattr(PPOTrainerSeparateAsync, "_init_resource_pool_mgr", verls)
    kind = get_trainer_cls("weightsync_separate_async")
    trainer = kind.__new__(kind)
    trainer._init_resource_pool_mgr()
    actor = trainer.role_worker_mapping.pop(Role.Actor)
    assert issubclass(actor.__ray_metadata__.modified_class, ShardsWorker)
    assert set(trainer.role_worker_mapping.values()) == {"verl's"}
