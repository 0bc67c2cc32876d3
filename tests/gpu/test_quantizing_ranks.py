"""On GPUs, ranks that quantise a policy together, whose largest values meet over NCCL."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import quantised_checkpoints
import tiny_models
import torch
from ranks import run_ranks
from test_killed_peers import GRACE_S, PROMPTS, TIMEOUT_S, small
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from weightsync import WeightSync, WeightSyncError
from weightsync.net.child import free_port
from weightsync.tools.processes import Server, generate, visible_gpus


def columns(parameter: Any) -> Shard:
    """Let each rank have a part of every row, so that none knows a row's largest value."""
    return Shard(parameter.ndim - 1)


def trained(folder: Path, device: torch.device, weights: str) -> Any:
    model = small(folder)
    tiny_models.fill(model, weights)
    model = model.to(device)
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=columns)
    return fully_shard(model, shard_placement_fn=columns)


def push_and_die(rank: int, port: int, folder: Path, url: str) -> None:
    """Push B and A from two ranks. Then rank 1 dies in a push, which rank 0 has to notice in time."""
    dist.destroy_process_group()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    first, second = (trained(folder, device, weights) for weights in "BA")
    sync = WeightSync("fsdp", "ipc", url, quantize="fp8", timeout_s=TIMEOUT_S, max_bytes=2**20)
    sync.push(first)
    sync.push(second)
    if rank == 0:
        (folder / "answers.txt").write_text(repr(generate(url, PROMPTS)))
    dist.barrier()
    source: Any = sync._strategy._source
    if rank == 1:
        with mock.patch.object(source, "_read", side_effect=lambda *_: os._exit(0)):
            sync.push(first)
    since = time.monotonic()
    with pytest.raises(WeightSyncError) as raised:
        sync.push(first)
    seconds = time.monotonic() - since
    (folder / "raised.txt").write_text(f"after {seconds:.1f} s: {raised.value}")
    assert seconds < TIMEOUT_S + GRACE_S
    os._exit(0)  # NCCL would wait for the other rank


@pytest.mark.gpu(2)
def test_ranks_that_quantise_equal_a_cold_engine_and_miss_who_dies(tmp_path: Path) -> None:
    model = small(tmp_path / "config")
    checkpoint = quantised_checkpoints.save(model, "FP8-dynamic", tmp_path / "A")
    server = Server(checkpoint, "auto", tmp_path / "log", visible_gpus([0]), {"kv_cache_memory_bytes": 2**26})
    try:
        server.wait(240)
        cold = generate(server.url, PROMPTS)
        run_ranks(push_and_die, 2, free_port(), tmp_path / "config", server.url, timeout_s=120)
    finally:
        server.stop()
    print((tmp_path / "config" / "raised.txt").read_text())
    assert (tmp_path / "config" / "answers.txt").read_text() == repr(cold)
