"""The other way into a vLLM worker than the plug-in: a mix-in class for `worker_extension_cls`.

For vLLM 0.20-0.24, for frameworks that own the engine's workers, and for trainers to which every millisecond counts:
each call into an engine takes one, and an update is one call here, where the plug-in has three.
"""

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

    def weightsync_update(self, update_info: dict[str, Any]) -> None:
        conversation = self._weightsync()
        conversation.start()
        try:
            conversation.update(update_info)
        finally:
            conversation.finish()
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
