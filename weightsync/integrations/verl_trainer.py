"""verl's trainers with workers that push. Under FSDP, ranks push their own shards, so no tensor is gathered.

    export VERL_USE_EXTERNAL_MODULES=weightsync.integrations.verl_trainer
    trainer.v1.trainer_mode=weightsync_separate_async  # or weightsync_sync, weightsync_colocate_async

Both are in addition to the settings of `weightsync.integrations.verl`. verl's own worker gives a checkpoint engine
gathered tensors only, and asks none for the replicas on the trainer's own GPUs.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, register_trainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.device import get_torch_device, set_expandable_segments

from weightsync.integrations.verl import Weights


class ShardsWorker(DetachActorWorker):
    """verl's trainer worker. It gives its checkpoint engine the model itself under FSDP or FSDP2."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Push to replicas, and return metrics for verl's trackers. verl calls this on every rank.

        With mode "naive", these are the replicas on the trainer's own GPUs. verl's own method handles other models of
        the manager's replicas, and other checkpoint engines than weightsync.
        """
        configured = self.config.rollout.checkpoint_engine.backend
        if configured == "weightsync" and mode == "naive":
            return await self._update_own(global_steps)
        way = configured if mode == "auto" else mode
        if way != "weightsync" or self.config.actor.strategy not in ("fsdp", "fsdp2"):
            return await super().update_weights(global_steps=global_steps, mode=mode)
        with self.actor.engine.eval_mode():  # it loads parameters that verl has offloaded
            return await self.checkpoint_engine.send_weights(self.actor.engine.module, global_steps)

    async def _update_own(self, global_steps: int | None) -> Any:
        """Wake the replicas on the trainer's own GPUs, push, and wake their KV cache, as verl's own method does."""
        set_expandable_segments(False)  # CUDA cannot export such memory
        get_torch_device().empty_cache()
        sleeps = self.config.rollout.free_cache_engine
        await self.rollout.resume(tags=["weights"])
        metrics = await self.checkpoint_engine.send_weights_to_own(self._own_weights(), global_steps, sleeps)
        # verl's own update without tensors tells the servers the step, and resets their caches.
        await self.rollout.update_weights(iter(()), global_steps=global_steps)
        if self.actor.engine.is_param_offload_enabled:
            self.actor.engine.to("cpu", model=True, optimizer=False, grad=False)
        get_torch_device().empty_cache()
        await asyncio.to_thread(torch.distributed.barrier)  # a KV cache needs the memory that other ranks free
        await self.rollout.resume(tags=["kv_cache"])
        set_expandable_segments(True)
        return metrics

    def _own_weights(self) -> Weights:
        """Return the model, or verl's generator of gathered tensors.

        FSDP2's shards are read where they lie, on the CPU too. With FSDP1 or adapters, verl must load offloaded
        parameters first. Workers would keep these mapped, and verl could not free them.
        """
        engine, strategy = self.actor.engine, self.config.actor.strategy
        has_adapter = hasattr(getattr(engine.module, "_fsdp_wrapped_module", engine.module), "peft_config")
        needs = [strategy == "fsdp", has_adapter, engine.is_param_offload_enabled]
        has_shards = strategy in ("fsdp", "fsdp2") and sum(needs) <= 1
        weights: Weights = engine.module if has_shards else engine.get_per_tensor_param()[0]
        return weights


class _Trainer(PPOTrainer):
    """A trainer of verl's with `ShardsWorker`s."""

    def __init__(self, config: Any) -> None:
        # verl compares the mode with its own names, and looks for the mode's settings under its own name.
        mode = config.trainer.v1.trainer_mode
        config.trainer.v1.trainer_mode = mode.removeprefix("weightsync_")
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef} & self.role_worker_mapping.keys():
            self.role_worker_mapping[role] = ray.remote(ShardsWorker)


@register_trainer("weightsync_sync")
class SyncTrainer(_Trainer, PPOTrainerSync):
    """verl's trainer "sync" with `ShardsWorker`s."""


@register_trainer("weightsync_colocate_async")
class ColocateAsyncTrainer(_Trainer, PPOTrainerColocateAsync):
    """verl's trainer "colocate_async" with `ShardsWorker`s."""


@register_trainer("weightsync_separate_async")
class SeparateAsyncTrainer(_Trainer, PPOTrainerSeparateAsync):
    """verl's trainer "separate_async" with `ShardsWorker`s."""
