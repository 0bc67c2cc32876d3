"""Train with SkyRL, and push through weightsync. `main` is an entry point of SkyRL's."""

import sys
from typing import Any

import ray
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.utils import initialize_ray, validate_cfg

from weightsync import WeightSync


class Policy(FSDPPolicyWorkerBase):
    async def init_weight_sync_state(self, inference_engine_client: Any, inference_engine_cfg: Any) -> None:
        if self._is_lora:
            raise NotImplementedError("SkyRL sends adapters itself: train them without this entry point")
        # SkyRL pauses engines that have GPUs of their own before it asks for a broadcast.
        transport, pause = ("ipc", "keep") if self.cfg.placement.colocate_all else ("broadcast", "caller")
        self.weightsync = WeightSync("fsdp", transport, inference_engine_client.server_urls, pause=pause)

    async def broadcast_to_inference_engines(self, *_: Any, model_id: str | None = None) -> None:
        if self.cfg.placement.colocate_all:  # engines would keep the policy's GPU memory mapped
            self.offload_to_cpu(offload_optimizer=False, offload_model=True)
        await self.weightsync.push_async(self.model.model)


class Trainer(RayPPOTrainer):
    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803
        super().build_models(ray.remote(num_gpus=1)(Policy), CriticWorker, RefWorker)


class Experiment(BasePPOExp):
    def get_trainer(self, *arguments: Any, **named: Any) -> RayPPOTrainer:
        return Trainer(*arguments, **named)


@ray.remote(num_cpus=1)
def run(config: SkyRLTrainConfig) -> None:
    Experiment(config).run()


def main() -> None:
    arguments = [each for each in sys.argv[1:] if not each.startswith("trainer.override_entrypoint=")]
    config = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(config)
    initialize_ray(config)
    ray.get(run.remote(config))
