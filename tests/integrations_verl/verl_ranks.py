"""verl's parts on a CPU: a worker that trains, and a replica whose server and workers are verl's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import fake_engine
import hybrid_workers
import ray
import tiny_models
import torch
import verl_cpu
from engines import ANSWER_TOKENS, PROMPTS
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from weightsync.integrations.verl_trainer import ShardsWorker
from weightsync.integrations.verl_worker import WorkerExtension

Answers = list[tuple[list[int], list[float]]]
MODEL = "qwen3"


class Policy(Worker):
    """What verl's `ActorRolloutRefWorker` is to a checkpoint engine, around a model under FSDP2."""

    def __init__(self, rollout: RolloutConfig) -> None:
        Worker.__init__(self)
        torch.distributed.init_process_group("gloo")
        config = rollout.checkpoint_engine
        import_external_libs(config.custom_backend_module)
        self.model = tiny_models.shard(tiny_models.build(MODEL, "A"))
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=self.rank == 0, bucket_size=1 << 20, **config.engine_kwargs[config.backend]
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]:
        tensors = (
            (name, (param.full_tensor() if isinstance(param, DTensor) else param).detach())
            for name, param in self.model.named_parameters()
        )
        return await self.checkpoint_engine.send_weights(tensors, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fill(self, weights: str) -> None:
        tiny_models.fill(self.model, weights)


@contextmanager
def _loaded() -> Iterator[None]:
    """Load offloaded parameters, as verl's `eval_mode` does. This comes after the copies that offload them."""
    verl_cpu.synchronize()
    yield


class Shards(ShardsWorker):
    """A `Policy` that is weightsync's worker, in a process where no tensor can be gathered."""

    def __init__(self, rollout: RolloutConfig) -> None:
        Policy.__init__(self, rollout)
        self.actor = SimpleNamespace(
            engine=SimpleNamespace(
                module=self.model, eval_mode=_loaded, is_param_offload_enabled=True, to=lambda _, **parts: None
            )
        )
        self.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"), rollout=rollout)
        self.rollout = ServerAdapter(rollout, HFModelConfig(path=rollout.custom["model"]), device_mesh=None)
        # What a push asks of a GPU before it reads tensors on the CPU.
        torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), verl_cpu.synchronize
        torch.cuda.current_stream = lambda: None
        del DTensor.full_tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fill(self, weights: str) -> None:
        """Fill the model as verl's `param_offload` does: nobody waits for the copies to the CPU."""
        verl_cpu.COPIES.append(partial(tiny_models.fill, self.model, weights))


class Replica(vLLMReplica):
    """verl's replica of vLLM, whose processes have no GPU. Its workers are those of `init_hybrid`, or its own."""

    async def launch_servers(self) -> None:
        if self.rollout_mode is None:
            self.rollout_mode = RolloutMode.STANDALONE
            self.workers = group(self.get_ray_class_with_init_args(), 1).workers
        server = self.server_class.options(name=f"vllm_server_{self.replica_rank}_0", max_concurrency=100).remote(
            config=self.config,
            model_config=self.model_config,
            rollout_mode=self.rollout_mode,
            workers=self.workers,
            replica_rank=self.replica_rank,
            node_rank=0,
            gpus_per_node=self.world_size,
            nnodes=1,
            cuda_visible_devices="",
        )
        self.servers = [server]
        await server.launch_server.remote()


class StandIn:
    """What verl calls of its server, and what weightsync does, around the real receiver and without vLLM."""

    def __init__(self, replica: int, workers: list[Any], first_rank: int = 0, lora_as_adapter: bool = False) -> None:
        self.llm, self.workers, self.node_rank = hybrid_workers.LLM(), workers, 0
        self.lora_as_adapter = lora_as_adapter
        job = ray.get_runtime_context().get_job_id()
        self.worker = SimpleNamespace(
            _get_zmq_handle=lambda: f"ipc:///tmp/rl-colocate-zmq-{job}-replica-{replica}-rank-{first_rank}.sock",
            device=torch.device("cpu"),
        )
        self.calls: list[Any] = []

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
        await asyncio.to_thread(getattr(WorkerExtension, method), self.worker, **kwargs)

    async def abort_all_requests(self, reject_request: bool) -> dict[str, Any]:
        self.calls.append("abort")
        return {"aborted_count": 0, "request_ids": []}

    async def resume_engine_generation(self) -> None:
        self.calls.append("resume")

    async def set_global_steps(self, steps: int) -> None:
        self.calls.append(steps)

    async def wake_up(self, tags: list[str]) -> None:
        self.calls += tags

    async def wait_for_requests_to_drain(self) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...
    async def clear_kv_cache(self) -> None: ...
    async def open_submission_gate(self) -> None: ...

    async def state(self) -> tuple[dict[str, torch.Tensor], list[Any], str]:
        return self.llm.host.live.state(), self.calls, self.llm.version


class TinyPolicy(Policy):
    """A `Policy` whose model is that of `StandIn`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fill(self, weights: int) -> None:
        self.model = fake_engine.module_of(fake_engine.checkpoint(weights))


class TinyOffloaded(Shards):
    """A `Shards` with the model of `StandIn`, and gathered tensors that need verl's `param_offload`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fill(self, weights: int) -> None:
        module = fake_engine.module_of(fake_engine.checkpoint(weights))
        self.config.actor.strategy, self.moved = "megatron", []
        self.actor.engine = SimpleNamespace(
            module=[module],
            is_param_offload_enabled=True,
            get_per_tensor_param=lambda: (iter(module.state_dict().items()), None),
            to=lambda device, **parts: self.moved.append((device, parts)),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def moves(self) -> list[Any]:
        return self.moved


def group(made: RayClassWithInitArgs, size: int) -> RayWorkerGroup:
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, made, device_name="cpu", use_gpu=False)


def policy(kind: type[Worker], rollout: RolloutConfig) -> RayWorkerGroup:
    return group(RayClassWithInitArgs(ray.remote(kind), rollout=rollout), 2)


async def ask(server: Any) -> Answers:
    sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0.0, "logprobs": True, "ignore_eos": True}
    answers = [
        await server.generate.remote(list(prompt), dict(sampling), request_id=os.urandom(4).hex()) for prompt in PROMPTS
    ]
    return [(list(answer.token_ids), list(answer.log_probs)) for answer in answers]
