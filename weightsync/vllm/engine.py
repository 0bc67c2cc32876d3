"""vLLM's engine class of the weight transfer backend "weightsync" (vLLM 0.25 and later)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightsync.errors import UnsupportedError
from weightsync.net.wire import InitInfo
from weightsync.transports import handle_file
from weightsync.vllm import compat
from weightsync.vllm.adapters import offer
from weightsync.vllm.handle_export import export_bridge
from weightsync.vllm.vllm_model import VllmModel
from weightsync.worker.session import WorkerSession


@dataclass
class UpdateInfo:
    """The argument of `update_weights`: see `WorkerSession.update`."""

    session: str


class WeightSyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight transfer engine. It passes vLLM's four phases on to the worker's session."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    """One update fills the model and its drafter. There is no update of the drafter alone."""

    def __init__(self, config: Any, vllm_config: Any, *of_worker: Any) -> None:
        if len(of_worker) != 2:
            raise UnsupportedError(
                "vLLM before 0.25 has no place for weightsync's plug-in; start the engine with weightsync's worker "
                "extension (worker_extension_cls), and without weight_transfer_config"
            )
        device, model = of_worker
        super().__init__(config, vllm_config, device, model)
        drafter = compat.drafter_of(compat.worker_under_way()) if vllm_config.speculative_config else None
        host = VllmModel(vllm_config, device, model, drafter)
        self.session = WorkerSession(host)
        self.session.receiver.await_kernels()  # loading a kernel would break vLLM's capture of CUDA graphs
        with suppress(UnsupportedError):  # `plug_into` makes the engine outside of a worker, without these methods
            worker = compat.worker_under_way()
            if vllm_config.lora_config is not None:
                offer(worker)
            host.note_start(worker)
        rank = host.identity.in_engine(vllm_config.parallel_config.data_parallel_size).rank
        self._bridge = export_bridge(vllm_config, model, host.device, rank, self.session.engine_instance)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.session.init(asdict(init_info))

    def start_weight_update(self) -> None:
        self.session.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class's method would wait for the device of the calling thread.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.session.update(vars(update_info))

    def finish_weight_update(self) -> None:
        self.session.finish()

    def shutdown(self) -> None:
        self.session.close()
        if self._bridge is not None:
            handle_file.remove(self._bridge)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise. This is abstract in vLLM up to 0.27, and the trainer's side is `weightsync.WeightSync`."""
        raise NotImplementedError("call weightsync.WeightSync(...).push(model) in the trainer")
