"""For vLLM 0.20-0.24, and for frameworks that own the engine's workers: a mix-in class for `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

from weightsync.receiver.conversation import Conversation
from weightsync.vllm.host import VllmHost


class WeightSyncWorkerExtension:
    """Adds `weightsync_*` methods, which `collective_rpc` calls, to a vLLM worker.

    `LLM(..., worker_extension_cls="weightsync.vllm.extension.WeightSyncWorkerExtension")`; a framework with an
    extension of its own inherits from this one as well.
    """

    def weightsync_init(self, init_info: dict[str, Any]) -> None:
        self._weightsync().init(init_info)

    def weightsync_start(self) -> None:
        self._weightsync().start()

    def weightsync_update(self, update_info: dict[str, Any]) -> None:
        self._weightsync().update(update_info)

    def weightsync_finish(self) -> None:
        self._weightsync().finish()
        # Adapters were made for the weights that have just been replaced.
        reset = getattr(self.model_runner, "reset_lora_state", None)  # type: ignore[attr-defined]
        if reset is not None:
            reset()

    def _weightsync(self) -> Conversation:
        conversation: Conversation | None = self.__dict__.get("weightsync_conversation")
        if conversation is None:
            worker: Any = self
            host = VllmHost(worker.vllm_config, worker.device, worker.model_runner.model)
            conversation = self.weightsync_conversation = Conversation(host)
        return conversation
