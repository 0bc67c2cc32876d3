"""Pushed equals cold: an engine that was pushed to answers as one that was started from these weights, to the bit."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import tiny_models
from engines import PROMPTS, TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, answer_of, assert_same
from weightsync import PushReport, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

BUCKETS: dict[str, dict[str, Any]] = {
    "one bucket": {"bucketer": "threshold", "max_bytes": 1 << 30},
    "a bucket for each module": {"bucketer": "module", "max_bytes": 1},
    "a bucket for each parameter": {"bucketer": "parameter"},
}
SERVED = [
    *((model, 1) for model in tiny_models.CONFIGS),
    ("qwen3", 2),
    ("gemma2", 2),
    ("phi3", 2),
    ("qwen3-moe", 2),
]

# ---------------------------------------------------------------------------------------------------------------
# What runs in the other processes. A trainer is either two ranks with FSDP2, or a plain module beside the engine.


def load(
    trainer: Trainer | Engines, model: str, transport: str, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    trainer.model = tiny_models.build(model, "A", dtype)
    if isinstance(trainer, Trainer):
        tiny_models.shard(trainer.model)
        engine = trainer.engine
    else:
        engine = trainer.llm
    trainer.sync = WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S, **options)


def push(trainer: Trainer | Engines, weights: str) -> PushReport:
    tiny_models.fill(trainer.model, weights)
    return trainer.sync.push(trainer.model)


def close(trainer: Trainer | Engines) -> None:
    trainer.sync.close()
    trainer.sync = trainer.model = None


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(("model", "tp"), SERVED, ids=[f"{model}-tp{tp}" for model, tp in SERVED])
def test_pushed_equals_cold(engines: Remote, trainers: Trainers, model: str, tp: int, transport: str, kind: str):
    cold = engines.call(Engines.serve, model, tp, timeout_s=240)
    trainer = engines if kind == "plain" else trainers
    for (buckets, options), pushes in zip(BUCKETS.items(), ("BBA", "BA", "B"), strict=True):
        trainer.call(load, model, transport, options)
        for number, weights in enumerate(pushes):
            report = trainer.call(push, weights)
            what = f"push {number} ({weights}) in {buckets}"
            assert_same(engines.call(Engines.ask), cold[weights], what)
        trainer.call(close)
