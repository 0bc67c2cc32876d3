"""The extension of verl's vLLM workers for `weightsync.integrations.verl`."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from weightsync.errors import ConfigError
from weightsync.vllm.extension import WeightSyncWorkerExtension


class WorkerExtension(WeightSyncWorkerExtension, vLLMColocateWorkerExtension):
    """verl's own extension, with weightsync's methods."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive verl's empty update. Its sender waits for the end.

        verl's method would run vLLM's post-processing again, over weights already in a kernel's format. Raises
        `ConfigError` for an update with tensors.
        """
        names: list[str] = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm)
        receiver.receive_weights(on_bucket_received=lambda weights, is_last: names.extend(name for name, _ in weights))
        if names:
            raise ConfigError(
                f"verl itself has sent {len(names)} tensors, such as {names[0]}, and the worker drops them: choose "
                "checkpoint_engine.backend=weightsync, or leave out weightsync's worker extension"
            )
