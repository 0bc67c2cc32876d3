"""A trainer that torchao has prepared for training in float8 leaves a real engine as a cold start does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Engines, Remote, Trainer, Trainers, assert_same
from quantizers import find_quantizers, need_quantizers
from test_float8_training import prepare

from weightsync import WeightSync

pytestmark = pytest.mark.engine
pytest_plugins = ["engine_fixtures"]


def prepare_both(trainer: Trainer, folder: Path) -> None:
    """Wrap and shard a model of each weights. Rank 0 saves them as they were before."""
    find_quantizers()
    trainer.model = {}
    for weights in "AB":
        model = tiny_models.build("qwen3", weights)
        if trainer.rank == 0:
            tiny_models.save(model, folder / weights)
        prepare(model, "float8 gather")
        trainer.model[weights] = tiny_models.shard(model)
    trainer.sync = WeightSync("fsdp", "ipc", trainer.engine, max_bytes=1 << 16, timeout_s=TIMEOUT_S)


def push(trainer: Trainer, weights: str) -> None:
    trainer.sync.push(trainer.model[weights])


def start_and_ask(engines: Engines, checkpoint: Path) -> Any:
    engines.start(checkpoint)
    return engines.ask()


@pytest.mark.skipif(torch.cuda.is_available(), reason="these trainers are on the CPU")
def test_pushed_equals_cold(engines: Remote, engine_calls: tuple[Any, Any], tmp_path: Path):
    need_quantizers()
    with closing(Trainers(2, tmp_path, engine_calls[0])) as trainers:
        trainers.call(prepare_both, tmp_path, timeout_s=240)
        cold = {weights: engines.call(start_and_ask, tmp_path / weights, timeout_s=240) for weights in "BA"}
        assert cold["A"] != cold["B"]
        for weights in "BAB":
            trainers.call(push, weights)
            assert_same(engines.call(Engines.ask), cold[weights], weights)
