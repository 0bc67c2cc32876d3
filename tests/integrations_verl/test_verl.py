"""verl's own manager, workers and vLLM servers update their weights through `weightsync.integrations.verl`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

from weightsync import ConfigError, EngineUnreachableError
from weightsync.integrations.verl import WeightSyncCheckpointEngine, find_servers
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


def configure(
    transport: str, decode_servers: int = 0, *, model: Path, tensor_parallel: int = 1, sleeps: bool = False
) -> RolloutConfig:
    return RolloutConfig(
        name="vllm",
        tensor_model_parallel_size=tensor_parallel,
        custom={"model": str(model)},
        load_format="auto",  # verl's own way is to start from random weights
        max_model_len=256,
        max_num_batched_tokens=1024,
        max_num_seqs=8,
        enforce_eager=True,
        enable_sleep_mode=False,
        free_cache_engine=sleeps,
        checkpoint_engine=CheckpointEngineConfig(
            backend="weightsync",
            custom_backend_module="weightsync.integrations.verl",
            engine_kwargs={"weightsync": {"transport": transport, "timeout_s": 120.0}},
        ),
        engine_kwargs={"vllm": {"worker_extension_cls": "weightsync.integrations.verl_worker.WorkerExtension"}},
        disaggregation={"enabled": decode_servers > 0, "decode_replicas": max(decode_servers, 1)},
    )


async def push_twice(
    checkpoint: Path, kind: type[Worker], transport: str, is_own: bool
) -> tuple[list[int], list[verl_ranks.Answers]]:
    """Push other weights than a replica has, and then those that it was started from.

    With `is_own`, the replica has the trainer's own workers, as on the same GPUs.
    """
    rollout = configure(transport, model=checkpoint, tensor_parallel=2 if is_own else 1)
    trainer = verl_ranks.policy(kind, rollout)
    replica = verl_ranks.Replica(0, rollout, HFModelConfig(path=str(checkpoint)), gpus_per_node=2 if is_own else 1)
    await (replica.init_hybrid(trainer) if is_own else replica.launch_servers())
    engine = replace(rollout.checkpoint_engine, backend="naive") if is_own else rollout.checkpoint_engine
    manager = CheckpointEngineManager(engine, trainer, [replica])
    versions, answers = [], [await verl_ranks.ask(replica.servers[0])]
    for step, weights in enumerate("BA", start=1):
        trainer.fill(weights)
        metrics = await manager.update_weights(global_steps=step)
        versions.append(metrics.get("weightsync/version", step))
        answers.append(await verl_ranks.ask(replica.servers[0]))
    return versions, answers


def stand_in(
    rank: int, checkpoint: Path, *names: str, workers: Sequence[Any] = (), lora_as_adapter: bool = False
) -> verl_ranks.Replica:
    """Return a replica with a worker and a server of each of these names: one that prefills, and any that decode."""
    rollout = configure("ipc", len(names) - 1, model=checkpoint)
    replica = verl_ranks.Replica(rank, rollout, HFModelConfig(path=str(checkpoint)), gpus_per_node=len(names))
    replica.workers = workers or verl_ranks.group(replica.get_ray_class_with_init_args(), len(names)).workers
    for at, (name, worker) in enumerate(zip(names, replica.workers, strict=True)):
        server = ray.remote(verl_ranks.StandIn).options(name=name, max_concurrency=50)
        replica.servers.append(server.remote(rank, [worker], at, lora_as_adapter))
    return replica


async def served(replica: verl_ranks.Replica, version: int) -> list[tuple[list[object], str]]:
    """Return what each server of a replica was called for, and its version. Fail unless it has these weights."""
    expected = fake_engine.cold(fake_engine.checkpoint(version)).state()
    found = [await server.state.remote() for server in replica.servers]
    for state, _, _ in found:
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    return [(calls, label) for _, calls, label in found]


async def push_to_stand_ins(checkpoint: Path) -> None:
    """Update a replica twice in one step, then another in its place, and at last one with prefill and decode apart."""
    first = stand_in(0, checkpoint, "vllm_server_0_0")
    trainer = verl_ranks.policy(verl_ranks.TinyPolicy, first.config)
    manager = CheckpointEngineManager(first.config.checkpoint_engine, trainer, [first])

    async def update(version: int) -> None:
        trainer.fill(version)
        metrics = await manager.update_weights(global_steps=7)
        assert metrics["weightsync/version"] == version

    for version in (1, 2):
        await update(version)
        assert await served(first, version) == [(["abort", 7, "resume"] * version, "7")]
    # The first one lives on, and nobody has paused it. No update may write into it.
    manager.remove_replicas([first])
    second = stand_in(1, checkpoint, "vllm_server_1_0")
    manager.add_replicas([second])
    await update(3)
    assert await served(second, 3) == [(["abort", 7, "resume"], "7")]
    assert await served(first, 2) == [(["abort", 7, "resume"] * 2, "7")]
    manager.remove_replicas([second])
    ray.kill(second.servers[0])
    apart = stand_in(2, checkpoint, "vllm_server_2_0", "vllm_server_decode_2_0")
    manager.add_replicas([apart])
    await update(4)
    prefill, decode = await served(apart, 4)
    assert (prefill[1], decode[1]) == ("7", "7")
    # A replica that cannot be found is no reason to leave it out.
    await asyncio.to_thread(ray.kill, apart.servers[1])
    workers = [worker._actor_id.hex() for worker in apart.workers]
    with pytest.raises(EngineUnreachableError, match=f"no server was found of {workers[1]}. Answered"):
        find_servers(workers)
    assert find_servers(workers[:1]) == apart.servers[:1]
    # verl's stream has no adapter, and this server expects one beside it.
    manager.remove_replicas([apart])
    manager.add_replicas([stand_in(3, checkpoint, "vllm_server_3_0", lora_as_adapter=True)])
    with pytest.raises(ray.exceptions.RayTaskError, match=r"lora.merge=true"):
        await update(5)


async def push_to_own(checkpoint: Path) -> None:
    """Update the replicas on the trainer's own GPUs, beside one on another GPU. Then lose one of them."""
    rollout = configure("ipc", model=checkpoint, sleeps=True)
    trainer = verl_ranks.policy(verl_ranks.TinyOffloaded, rollout)
    own = [stand_in(at, checkpoint, f"vllm_server_{at}_0", workers=[trainer.workers[at]]) for at in range(2)]
    other = stand_in(2, checkpoint, "vllm_server_2_0")
    naive = CheckpointEngineManager(replace(rollout.checkpoint_engine, backend="naive"), trainer, own)
    for version in (1, 2):
        trainer.fill(version)
        await naive.update_weights(global_steps=7)
        for replica in own:
            assert await served(replica, version) == [(["weights", 7, "kv_cache"] * version, "7")]
        assert trainer.moves() == [[("cpu", {"model": True, "optimizer": False, "grad": False})]] * 2
    assert (await other.servers[0].state.remote())[1] == []
    standalone = CheckpointEngineManager(rollout.checkpoint_engine, trainer, [other])
    trainer.fill(3)
    await standalone.update_weights(global_steps=8)
    assert await served(other, 3) == [(["abort", 8, "resume"], "8")]
    await asyncio.to_thread(ray.kill, own[1].servers[0])
    trainer.fill(4)
    with pytest.raises(ray.exceptions.RayError):
        await naive.update_weights(global_steps=9)
    await served(own[0], 2)


def test_replicas_on_the_trainers_gpus_are_updated_all_or_none(cluster: None, tmp_path: Path) -> None:
    asyncio.run(push_to_own(trl_ranks.save(tmp_path / "A")))


def test_engines_without_vllm_serve_what_verl_hands_over(cluster: None, tmp_path: Path) -> None:
    asyncio.run(push_to_stand_ins(trl_ranks.save(tmp_path / "A")))


def test_an_update_that_verls_manager_does_not_lead_is_refused() -> None:
    async def update() -> None:
        await WeightSyncCheckpointEngine(bucket_size=1).send_weights(iter([("a", torch.ones(1))]))

    with pytest.raises(ConfigError, match="has not told this trainer of its replicas"):
        asyncio.run(update())
    for transport in ("single_copy", "lora"):
        with pytest.raises(ConfigError, match=f"transport='{transport}'; verl's trainers push"):
            WeightSyncCheckpointEngine(bucket_size=1, transport=transport)


@pytest.mark.parametrize(
    ("kind", "is_own"), [(verl_ranks.Policy, False), (verl_ranks.Shards, False), (verl_ranks.Shards, True)]
)
def test_replica_equals_a_cold_engine(cluster: None, tmp_path: Path, kind: type[Worker], is_own: bool) -> None:
    versions, (cold, other, pushed) = asyncio.run(push_twice(trl_ranks.save(tmp_path / "A"), kind, "ipc", is_own))
    assert versions == [1, 2]
    assert cold != other
    assert pushed == cold


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_trainer_is_found_by_its_name_and_has_workers_that_push(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    def verls(trainer: PPOTrainer) -> None:
        trainer.role_worker_mapping = {Role.Actor: "verl's", Role.RefPolicy: "verl's", Role.Critic: "verl's"}

    monkeypatch.setattr(get_trainer_cls(mode), "_init_resource_pool_mgr", verls)
    kind = get_trainer_cls(f"weightsync_{mode}")
    assert issubclass(kind, get_trainer_cls(mode))
    trainer = kind.__new__(kind)
    trainer._init_resource_pool_mgr()
    actor = trainer.role_worker_mapping.pop(Role.Actor)
    assert issubclass(actor.__ray_metadata__.modified_class, ShardsWorker)
    assert set(trainer.role_worker_mapping.values()) == {"verl's"}
