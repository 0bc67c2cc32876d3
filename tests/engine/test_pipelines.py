"""Engines whose layers are spread over stages: each worker takes those of its own stage, and asks for no other's."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
from engines import EXTENSION, TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

STAGES = {"pipeline_parallel_size": 2}
WAYS: dict[str, dict[str, Any]] = {"plug-in": {}, "extension": EXTENSION}


def cold(engines: Engines, model: str, options: dict[str, Any]) -> dict[str, Answer]:
    """Answers of engines that start from the weights "B" and "A"; the latter goes on running."""
    answers = {}
    for weights in "BA":
        engines.start(engines.checkpoint(model, weights), **STAGES, **options)
        # On a CPU, vLLM makes what later stages receive into in a warm-up, and has none where it does not compile.
        engines.llm.collective_rpc("execute_dummy_batch")
        answers[weights] = engines.ask()
    return answers


def connect(trainer: Trainer, model: str, transport: str) -> None:
    trainer.release()
    trainer.model = tiny_models.shard(tiny_models.build(model, "A"))
    trainer.sync = WeightSync("fsdp", transport, trainer.engine, timeout_s=TIMEOUT_S)


def push(trainer: Trainer, weights: str) -> None:
    tiny_models.fill(trainer.model, weights)
    trainer.sync.push(trainer.model)


# A tied embedding belongs to the first stage, and as the head to the last.
@pytest.mark.parametrize(("model", "way"), [("qwen3", "plug-in"), ("llama-tied", "extension")])
def test_pushed_equals_cold(engines: Remote, trainers: Trainers, model: str, way: str):
    answers = engines.call(cold, model, WAYS[way], timeout_s=240)
    assert answers["A"] != answers["B"]
    for transport in ("ipc", "broadcast"):
        trainers.call(connect, model, transport)
        for weights in "BA":
            trainers.call(push, weights)
            assert_same(engines.call(Engines.ask), answers[weights], f"push of {weights} over {transport}")
