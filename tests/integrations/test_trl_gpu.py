"""TRL's trainers on GPUs: engines that sleep while their GPUs train, and a server that is reached over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl_ranks
from engines import Answer, Engines, Remote, assert_same, noted
from ranks import run_ranks
from safetensors.torch import load_file

from weightsync.engines.server import VllmServer
from weightsync.net.child import free_port
from weightsync.tools.processes import visible_gpus

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

CACHE_BYTES = 2**26
AS_TRL = {"enforce_eager": False, "logprobs_mode": "processed_logprobs", "gpu_memory_utilization": 0.2}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


def colocate(rank: int, ranks: int, port: int, method: str, checkpoint: Path, options: dict[str, Any]) -> None:
    trl_ranks.place(rank, ranks, port)
    trl_ranks.start_engines(kv_cache_memory_bytes=CACHE_BYTES)
    engine = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.2}
    trainer = trl_ranks.make(method, checkpoint, vllm_max_model_length=256, **engine, **options)
    llm = trainer.vllm_generation.llm

    def asked() -> Answer:
        if trainer.vllm_generation._llm_weights_sleeping:  # TRL has let the engine drop what it was started with
            return []
        llm.wake_up(tags=["kv_cache"])
        return trl_ranks.ask(llm)

    trl_ranks.train(trainer, "ipc", checkpoint, asked)


def serve(rank: int, port: int, checkpoint: Path, url: str) -> None:
    trl_ranks.serve(rank, 1, port, "GRPO", checkpoint, url, "broadcast", {})


def cold(engines: Engines, checkpoint: Path) -> Answer:
    engines.start(checkpoint, **AS_TRL)
    return engines.ask()


def assert_trained(checkpoint: Path, trained: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, trained))
    assert any(not torch.equal(before[name], after[name].to(before[name].dtype)) for name in before)


@pytest.mark.parametrize(
    ("method", "ranks", "options"),
    [
        pytest.param("GRPO", 1, {}, id="GRPO", marks=pytest.mark.gpu(1)),
        pytest.param("Distillation", 1, {}, id="distillation", marks=pytest.mark.gpu(1)),
        pytest.param(
            "GRPO", 2, {"deepspeed": trl_ranks.ZERO, "adapters": True}, id="ZeRO-3, adapters", marks=pytest.mark.gpu(2)
        ),
        pytest.param(
            "RLOO",
            2,
            {"deepspeed": trl_ranks.ZERO | OFFLOADED, "adapters": True},
            id="ZeRO-3 whose parameters are on CPUs, adapters",
            marks=pytest.mark.gpu(2),
        ),
    ],
)
def test_engines_that_sleep_equal_a_cold_one(
    engines: Remote, tmp_path: Path, method: str, ranks: int, options: dict[str, Any]
) -> None:
    checkpoint = trl_ranks.save(tmp_path / "tiny")
    run_ranks(colocate, ranks, ranks, free_port(), method, checkpoint, options, timeout_s=240)
    assert_trained(checkpoint, tmp_path / "trained")
    trained = engines.call(cold, tmp_path / "trained", timeout_s=240)
    for rank in range(ranks):
        assert_same(noted(tmp_path / f"pushed-{rank}.json"), trained, f"the engine of rank {rank}")


@pytest.mark.gpu(2)
def test_server_over_nccl_equals_a_cold_engine(engines: Remote, tmp_path: Path) -> None:
    checkpoint = trl_ranks.save(tmp_path / "tiny")
    options = ("--max-model-len=256", "--dtype=bfloat16", "--logprobs-mode=processed_logprobs")
    memory = ("--gpu-memory-utilization=0.2", f"--kv-cache-memory-bytes={CACHE_BYTES}")
    with VllmServer(checkpoint, *options, *memory, log=tmp_path / "log", environment=visible_gpus([1])) as server:
        run_ranks(serve, 1, free_port(), checkpoint, server.url, timeout_s=240)
    assert_trained(checkpoint, tmp_path / "trained")
    trained = engines.call(cold, tmp_path / "trained", timeout_s=240)
    assert_same(noted(tmp_path / "pushed-0.json"), trained, "the server")
