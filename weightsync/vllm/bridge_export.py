"""The engine's side of `vllm_bridge_config.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_world_group

from weightsync import bridge
from weightsync.machine import describe_device, started_ticks


def export_bridge(config: VllmConfig, model: nn.Module, device: torch.device, rank: int, epoch: str) -> Path | None:
    """Collective: every worker of the engine calls this, once the weights are loaded. Write the file that the
    environment asks for; gives its path where this worker has written it. Parameters on a CPU move to shared memory."""
    wanted = os.environ.get(bridge.VARIABLE)
    if not wanted:
        return None
    handles = bridge.handle_rows(dict(model.named_parameters()))
    ticks = started_ticks(os.getpid())
    assert ticks is not None
    own = bridge.Worker(rank, os.getpid(), ticks, epoch, *describe_device(device), handles)
    workers = [bridge.Worker(**row) for row in _gather(vars(own))]
    if get_world_group().rank_in_group != 0:
        return None
    path = Path(wanted)
    parallel = config.parallel_config
    url = os.environ.get(bridge.URL_VARIABLE)
    bridge.write(path, config.model_config.model, url, parallel.tensor_parallel_size, workers)
    return path


def _gather(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Every worker's row, as JSON in tensors: nothing is pickled."""
    group = get_world_group().cpu_group
    content = torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([content.numel()]), group=group)
    longest = int(max(sizes))
    padded = torch.cat([content, torch.zeros(longest - content.numel(), dtype=torch.uint8)])
    all_padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(all_padded, padded, group=group)
    texts = (data[: int(size)].numpy().tobytes() for data, size in zip(all_padded, sizes, strict=True))
    return [json.loads(text) for text in texts]
