"""What verl's vLLM workers are extended by, for `weightsync.integrations.verl`."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from weightsync.vllm.extension import WeightSyncWorkerExtension


class WorkerExtension(WeightSyncWorkerExtension, vLLMColocateWorkerExtension):
    """verl's own extension, with the methods that weightsync calls."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive verl's empty update, whose sender waits for that.

        verl's method would run vLLM's post-processing again, over weights that weightsync has brought into a kernel's
        format.
        """
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm)
        receiver.receive_weights(on_bucket_received=_refuse)


def _refuse(weights: list[Any], is_last: bool) -> None:
    if weights:
        raise NotImplementedError(f"verl sent {weights[0][0]} itself, and weightsync is to send all weights")
