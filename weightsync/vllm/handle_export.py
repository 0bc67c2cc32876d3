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

from weightsync.net.runtime import describe_device, started_ticks
from weightsync.transports import handle_file


def export_bridge(
    config: VllmConfig, model: nn.Module, device: torch.device, rank: int, engine_instance: str
) -> Path | None:
    """Write `vllm_bridge_config.json` to the path in the environment, or beside it, once the weights are loaded.

    Collective among the engine's workers. Return the path on the worker that wrote the file, else None. Parameters on a
    CPU move to shared memory.
    """
    wanted = os.environ.get(handle_file.VARIABLE)
    if not wanted:
        return None
    handles = handle_file.handle_rows(dict(model.named_parameters()))
    ticks = started_ticks(os.getpid())
    assert ticks is not None
    own = handle_file.WorkerHandles(rank, os.getpid(), ticks, engine_instance, *describe_device(device), handles)
    workers = [handle_file.WorkerHandles(**row) for row in _gather(vars(own))]
    if get_world_group().rank_in_group != 0:
        return None
    parallel = config.parallel_config
    url = os.environ.get(handle_file.URL_VARIABLE)
    return handle_file.write(Path(wanted), config.model_config.model, url, parallel.tensor_parallel_size, workers)


def _gather(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather every worker's row as JSON in tensors. torch would pickle objects."""
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
