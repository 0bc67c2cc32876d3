"""A mix-in class for `worker_extension_cls`: the way into a vLLM worker without the plug-in.

It serves vLLM before 0.25, and frameworks that own the engine's workers. It is also the faster way: an update is one
call into the engine here, and three calls with the plug-in.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from weightsync.errors import UnsupportedError
from weightsync.vllm import compat
from weightsync.vllm.adapters import adapter_modules
from weightsync.vllm.vllm_model import VllmModel
from weightsync.worker.session import WorkerSession


class WeightSyncWorkerExtension:
    """The `weightsync_*` methods of a vLLM worker, for `collective_rpc`.

    Use: `LLM(..., worker_extension_cls="weightsync.vllm.extension.WeightSyncWorkerExtension")`. A framework with an
    extension of its own also inherits from this one.
    """

    def weightsync_init(self, init_info: dict[str, Any]) -> None:
        """Connect this worker to the trainer of `init_info`, and plan. Blocks until the trainer releases it."""
        self._weightsync().init(init_info)

    def weightsync_update(self, update_info: dict[str, Any]) -> None:
        """Run this worker's part of one push. Blocks until the trainer releases it."""
        session = self._weightsync()
        session.start()
        try:
            session.update(update_info)
        finally:
            session.finish()
        # Adapters were made for the replaced weights.
        reset = getattr(self.model_runner, "reset_lora_state", None)  # type: ignore[attr-defined]
        if reset is not None:
            reset()

    def weightsync_adapter_modules(self, path: str, number: int) -> dict[str, Any]:
        """Return the modules of this worker that vLLM has bound to the adapter in the folder `path`."""
        return adapter_modules(self, path, number)

    def _weightsync(self) -> WorkerSession:
        session: WorkerSession | None = self.__dict__.get("weightsync_session")
        if session is None:
            worker: Any = self
            drafter = compat.drafter_of(worker)
            # Without the wrapper for CUDA graphs, which hides the model's class.
            model = worker.model_runner.get_model()
            host = VllmModel(worker.vllm_config, worker.model_runner.device, model, drafter)
            with suppress(UnsupportedError):  # of a model that no push reaches: the push raises it
                host.note_start(worker)
            session = self.weightsync_session = WorkerSession(host)
        return session
