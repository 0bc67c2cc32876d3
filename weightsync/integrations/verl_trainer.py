"""A trainer of verl's. Its ranks push their own shards, so no tensor is gathered.

    export VERL_USE_EXTERNAL_MODULES=weightsync.integrations.verl_trainer
    trainer.v1.trainer_mode=weightsync_separate_async

Both are in addition to the settings of `weightsync.integrations.verl`. verl's own worker gives a checkpoint engine
gathered tensors only.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, register_trainer


class ShardsWorker(DetachActorWorker):
    """verl's trainer worker. It gives its checkpoint engine the model itself under FSDP or FSDP2."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Push to the replicas, and return metrics for verl's trackers. verl calls this on every rank.

        verl's own method handles other models, and other checkpoint engines than weightsync.
        """
        way = self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode
        if way != "weightsync" or self.config.actor.strategy not in ("fsdp", "fsdp2"):
            return await super().update_weights(global_steps=global_steps, mode=mode)
        with self.actor.engine.eval_mode():  # it loads parameters that verl has offloaded
            return await self.checkpoint_engine.send_weights(self.actor.engine.module, global_steps)


@register_trainer("weightsync_separate_async")
class ShardsTrainer(PPOTrainerSeparateAsync):
    """verl's trainer "separate_async" with `ShardsWorker`s."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef} & self.role_worker_mapping.keys():
            self.role_worker_mapping[role] = ray.remote(ShardsWorker)
