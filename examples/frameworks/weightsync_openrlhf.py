"""Train with OpenRLHF, and push through weightsync: `python weightsync_openrlhf.py` takes OpenRLHF's own arguments."""

import runpy
from typing import Any

import ray
from openrlhf.trainer.ray import ppo_actor, vllm_engine

from weightsync import WeightSync


def class_of(actor: Any) -> Any:
    """Return the class that `ray.remote` was given."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__


class Rollout(class_of(vllm_engine.RolloutRayActor)):
    async def __init__(self, *args: Any, **options: Any) -> None:
        await super().__init__(*args, weight_transfer_config={"backend": "weightsync"}, **options)


class Policy(class_of(ppo_actor.PolicyModelActor)):
    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: Any = None
    ) -> None:
        # OpenRLHF opens no group of its own to engines that it is not told of.
        super().init_model_from_pretrained(strategy, pretrain, max_steps)
        transport = "ipc" if self.trainer.use_cuda_ipc else "broadcast"
        self.weightsync = WeightSync("deepspeed", transport, vllm_engines)

    def broadcast_to_vllm(self) -> None:
        self.weightsync.push(self.actor.model)


def install() -> None:
    """Let OpenRLHF make these classes. Call it before openrlhf.cli.train_ppo_ray is imported."""
    vllm_engine.RolloutRayActor = ray.remote(Rollout)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(Policy)


if __name__ == "__main__":
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
