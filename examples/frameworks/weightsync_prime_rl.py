"""Push through weightsync where prime-rl writes checkpoints for its inference servers."""

from pathlib import Path
from typing import Any

from prime_rl.transports.weights.filesystem import FileSystemWeightBroadcast
from prime_rl.utils.utils import get_broadcast_dir, get_step_path
from torch import nn

from weightsync import WeightSync


class WeightSyncBroadcast(FileSystemWeightBroadcast):
    def __init__(self, output_dir: Path, config: Any) -> None:
        super().__init__(output_dir, config)
        self.weightsync = WeightSync("fsdp", "broadcast")  # to the servers in $WEIGHTSYNC_ENGINE

    def broadcast_weights(self, model: nn.Module, step: int) -> None:
        self.weightsync.push(model, label=step)
        if self.world.is_master:  # the orchestrator waits for this folder's marker
            folder = get_step_path(get_broadcast_dir(self.output_dir), step)
            folder.mkdir(parents=True, exist_ok=True)
            self._notify_orchestrator(folder)


def setup_weight_broadcast(
    output_dir: Path, config: Any, parallel_dims: Any, lora_config: Any = None
) -> WeightSyncBroadcast:
    if config.type != "filesystem" or lora_config is not None:
        raise ValueError("weightsync pushes with weight_broadcast.type = 'filesystem', and no adapters")
    return WeightSyncBroadcast(output_dir, config)
