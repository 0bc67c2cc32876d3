"""Ranks that each have an `LLM` of their own, as `torchrun` programs do by vLLM's "external_launcher"."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same
from ranks import run_ranks

from weightsync import WeightSync
from weightsync.net.child import free_port

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

RANKS = 2


def push_and_ask(rank: int, folder: Path, port: int, cold: dict[str, Answer]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    engines = Engines(folder, folder, multiprocessing.Pipe()[0])
    engines.start(engines.checkpoint("qwen3", "A"), distributed_executor_backend="external_launcher")
    before = engines.ask()
    model = tiny_models.shard(tiny_models.build("qwen3", "A"))
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        tiny_models.fill(model, "B")
        report = sync.push(model)
        assert len(report.workers) == RANKS
        pushed = engines.ask()
        torch.distributed.barrier()  # none closes while another looks
    assert engines.llm.get_weight_version() == str(report.version)
    assert_same(before, cold["A"], f"the engine of rank {rank} before the push")
    assert_same(pushed, cold["B"], f"the engine of rank {rank}")


def test_engines_of_all_ranks_equal_cold_ones(engines: Remote, tmp_path: Path) -> None:
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    for weights in "AB":
        tiny_models.save(tiny_models.build("qwen3", weights), tmp_path / f"qwen3-{weights}")
    spawn = multiprocessing.get_context("spawn")
    run_ranks(push_and_ask, RANKS, tmp_path, free_port(), cold, timeout_s=240, context=spawn)
