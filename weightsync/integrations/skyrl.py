"""weightsync as the engine of SkyRL's weight senders, for a SkyRL on vLLM's interface for trainers.

    from weightsync.integrations.skyrl import build_trainer_engine

This line stands at the end of SkyRL's skyrl/backends/skyrl_train/weight_sync/weight_senders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weightsync.integrations.vllm_trainer import WeightSyncTrainerEngine, WeightSyncTrainerInitInfo


def build_trainer_engine(
    *,
    ie_cfg: Any,
    colocate_all: bool,
    rank: int,
    source_factory: Callable[..., Any],
    server_urls: Sequence[str],
    **_: Any,
) -> Any:
    """Return the engine that pushes SkyRL's weights. It takes the place of SkyRL's function. Every rank calls it.

    Colocated engines are paused by each push, and others by SkyRL. Raises as `WeightSync` does.
    """
    from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities
    from skyrl.train.utils.utils import str_to_torch_dtype

    class Engine(SkyrlTrainerCapabilities, WeightSyncTrainerEngine):
        skyrl_handles_prefix_cache_reset = True  # by each push

    transport, pause = ("ipc", "keep") if colocate_all else ("broadcast", "caller")
    info = WeightSyncTrainerInitInfo(rank=rank, transport=transport, engine=list(server_urls), options={"pause": pause})
    return Engine.trainer_init(info, client=None, source=source_factory(str_to_torch_dtype(ie_cfg.model_dtype), "nccl"))
