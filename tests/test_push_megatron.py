"""Pushed equals cold out of Megatron-core: tensor, pipeline and expert parallel trainers into real engines."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Engines, Remote, Trainer, Trainers, assert_same
from megatron_models import Mesh
from safetensors.torch import load_file
from torch import nn

from weightsync import PushReport, WeightSync
from weightsync.errors import ManifestError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

MESHES = {
    "qwen3": [Mesh(tp=2), Mesh(pp=2), Mesh(tp=2, pp=2)],
    "qwen3-moe": [Mesh(ep=2)],
}
SERVED = [(model, tp) for model in MESHES for tp in (1, 2)]
PADDING = 5  # to the next multiple of 8


@pytest.fixture(scope="module")
def four_ranks(
    tmp_path_factory: pytest.TempPathFactory, engine_calls: tuple[Connection, Connection]
) -> Iterator[Trainers]:
    ranks = Trainers(4, tmp_path_factory.mktemp("four-trainers"), engine_calls[0])
    yield ranks
    ranks.close()


# ---------------------------------------------------------------------------------------------------------------
# What runs in the trainers' processes


def load(trainer: Trainer, model: str, mesh: Mesh, transport: str, options: dict[str, Any]) -> None:
    trainer.release()
    config = tiny_models.CONFIGS[model]()
    trainer.model = megatron_models.build(config, mesh, torch.bfloat16, PADDING)
    options = {"vocab_size": config.vocab_size, **options}
    trainer.sync = WeightSync("megatron", transport, trainer.engine, timeout_s=TIMEOUT_S, **options)


def push(trainer: Trainer, model: str, checkpoint: Path) -> PushReport:
    config = tiny_models.CONFIGS[model]()
    megatron_models.load(trainer.model, config, load_file(checkpoint / "model.safetensors"))
    return trainer.sync.push(trainer.model)


def push_refused(trainer: Trainer, model: str, checkpoint: Path) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        push(trainer, model, checkpoint)
    return caught.value


def lose_layers(trainer: Trainer) -> None:
    if trainer.rank == 1:
        trainer.model[0].decoder.layers = nn.ModuleList()


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(("model", "tp"), SERVED, ids=[f"{model}-tp{tp}" for model, tp in SERVED])
def test_pushed_equals_cold(
    engines: Remote, trainers: Trainers, four_ranks: Trainers, model: str, tp: int, transport: str
):
    cold = engines.call(Engines.serve, model, tp, timeout_s=240)
    checkpoints = {weights: engines.call(Engines.checkpoint, model, weights) for weights in "AB"}
    for mesh in MESHES[model]:
        ranks = four_ranks if mesh.tp * mesh.pp == 4 else trainers
        ranks.call(load, model, mesh, transport, {"max_bytes": 1 << 16})
        for weights in "BA":
            *_, report = ranks.call(push, model, checkpoints[weights])
            assert report.buckets > 1
            assert_same(engines.call(Engines.ask), cold[weights], f"{mesh}, {weights}")
        ranks.call(Trainer.release)


def test_what_does_not_fit_is_refused_and_nothing_is_written(engines: Remote, trainers: Trainers):
    cold = engines.call(Engines.serve, "qwen3-moe", 2, timeout_s=240)
    checkpoint = engines.call(Engines.checkpoint, "qwen3-moe", "B")

    # Without `vocab_size` the embedding and the output layer travel with their padding.
    trainers.call(load, "qwen3-moe", Mesh(tp=2), "broadcast", {"vocab_size": None})
    for error in trainers.call(push_refused, "qwen3-moe", checkpoint):
        assert set(error.mismatched) == {"model.embed_tokens.weight", "lm_head.weight"}
        assert "(256, 128)" in str(error)
        assert "vocab_size=" in str(error)

    trainers.call(load, "qwen3-moe", Mesh(pp=2), "broadcast", {})
    trainers.call(lose_layers)
    for error in trainers.call(push_refused, "qwen3-moe", checkpoint):
        assert "nothing came of model.layers.1: did every pipeline stage push" in str(error)
        assert all(name.startswith("model.layers.1.") for name in error.missing)

    assert_same(engines.call(Engines.ask), cold["A"], "after pushes that were refused")
