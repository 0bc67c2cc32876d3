"""weightsync in verl: a checkpoint engine that verl finds by its configuration alone.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl
    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=weightsync.integrations.verl_worker.WorkerExtension

verl gives every trainer rank a generator of gathered tensors for each update, and has each vLLM paused meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from weightsync.sync import WeightSync

_SERVER = re.compile(r"vllm_server_\d+_0")
"""The names of verl's actors that have an `AsyncLLM`: of each replica, the one on its first node."""


@CheckpointEngineRegistry.register("weightsync")
class WeightSyncCheckpointEngine(CheckpointEngine):
    """Either end of verl's updates. Only a trainer's end does anything: vLLM's workers are called from there.

    bucket_size, is_master: verl's own, without effect. Each replica still has a buffer of `bucket_size`.
    transport, options: those of `WeightSync`, from `checkpoint_engine.engine_kwargs.weightsync`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, transport: str = "ipc", **options: Any) -> None:
        self._transport, self._options = transport, {"pause": "caller", **options}
        self._sync: WeightSync | None = None

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        return

    def finalize(self) -> None:
        return

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]] | torch.nn.Module, global_steps: int | None = None
    ) -> dict[str, Any]:
        """Push a model, or what `weights` gives, to the replicas that there are. Returns what verl's trackers show.

        verl gives an iterator, and `weightsync.integrations.verl_trainer` the model.
        """
        if self._sync is None:
            backend = "fsdp" if isinstance(weights, torch.nn.Module) else "stream"
            self._sync = WeightSync(backend, self._transport, _replicas, **self._options)
        report = await self._sync.push_async(weights, label=global_steps)
        return report.metrics()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield nothing: vLLM's workers have the weights already."""
        return
        yield


def _replicas() -> list[Any]:
    """Return the actors of the replicas that there are now, since verl adds and removes them."""
    return [ray.get_actor(name) for name in sorted(filter(_SERVER.fullmatch, ray.util.list_named_actors()))]
