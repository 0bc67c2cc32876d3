"""The engine that vLLM calls: weight transfer backend "weightsync" (vLLM 0.25 and later)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightsync.receiver.conversation import Conversation
from weightsync.vllm.bridge_export import export_bridge
from weightsync.vllm.host import VllmHost


@dataclass
class InitInfo:
    """What `init_weight_transfer_engine` is sent; see `Conversation.init`."""

    session: str
    engine: int
    host: str
    port: int
    token: str
    timeout_s: float


@dataclass
class UpdateInfo:
    """What `update_weights` is sent; see `Conversation.update`."""

    session: str


class WeightSyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Hands vLLM's four phases to the conversation with the trainer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        host = VllmHost(vllm_config, device, model)
        self.conversation = Conversation(host)
        self._bridge = export_bridge(vllm_config, model, host.device, host.identity.rank, self.conversation.epoch)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.conversation.init(vars(init_info))

    def start_weight_update(self) -> None:
        self.conversation.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's: it would wait for the device of whatever thread this is.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.conversation.update(vars(update_info))

    def finish_weight_update(self) -> None:
        self.conversation.finish()

    def shutdown(self) -> None:
        self.conversation.close()
        if self._bridge is not None:
            self._bridge.unlink(missing_ok=True)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM up to 0.27. The trainer's side is `weightsync.WeightSync`."""
        raise NotImplementedError("call weightsync.WeightSync(...).push(model) in the trainer")
