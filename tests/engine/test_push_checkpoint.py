"""Checkpoints of pushes: a real engine equals a cold one, and one that is started from what was written."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same

from weightsync import CheckpointTransport, WeightSync
from weightsync.checkpoint.safetensors import INDEX

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def load(trainer: Trainer | Engines, model: str, folder: Path, described: Path | None = None, **options: Any) -> None:
    """A trainer in float32 of `model`, which writes to `folder`, with its own config or that of another checkpoint."""
    from transformers import AutoConfig

    trainer.release()
    trainer.model = tiny_models.build(model, "A", torch.float32)
    if isinstance(trainer, Trainer):
        tiny_models.shard(trainer.model)
    config = None if described is None else AutoConfig.from_pretrained(described)
    transport = CheckpointTransport(folder, config=config, max_shard_bytes=1 << 18)
    engine = trainer.engine if isinstance(trainer, Trainer) else trainer.llm
    trainer.sync = WeightSync("fsdp", transport, engine, max_bytes=1 << 16, timeout_s=TIMEOUT_S, **options)


def push(trainer: Trainer | Engines, weights: str) -> int:
    tiny_models.fill(trainer.model, weights)
    return trainer.sync.push(trainer.model).version


def start_and_ask(engines: Engines, folder: Path) -> Answer:
    engines.start(folder)
    return engines.ask()


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
def test_pushed_equals_cold_and_so_does_what_was_written(
    engines: Remote, trainers: Trainers, tmp_path: Path, kind: str
):
    cold_answers = engines.call(Engines.serve, "qwen3", timeout_s=240)
    trainer = engines if kind == "plain" else trainers
    trainer.call(load, "qwen3", tmp_path)
    versions: dict[str, int] = {}  # the engine may have been pushed to before: whose numbers go on
    for weights in "BAB":
        pushed = trainer.call(push, weights)
        versions[weights] = pushed[0] if isinstance(trainer, Trainers) else pushed
        assert_same(engines.call(Engines.ask), cold_answers[weights], f"push {versions[weights]} of {weights}")
    for weights, version in versions.items():
        folder = tmp_path / f"version-{version:08}"
        assert (folder / INDEX).exists()
        found = engines.call(start_and_ask, folder, timeout_s=240)
        assert_same(found, cold_answers[weights], f"cold from version {version}")


def tie_layers(trainer: Engines, name: str) -> None:
    """Give the first layer's tensor to the second layer too."""
    module, _, tensor = name.rpartition(".")
    first, second = (layer.get_submodule(module) for layer in trainer.model.model.layers)
    setattr(second, tensor, getattr(first, tensor))


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("qwen3", "mlp.up_proj.weight"), ("qwen3-moe", "mlp.experts.gate_up_proj")],  # the second is saved in parts
)
def test_an_engine_starts_from_layers_tied_by_hand(engines: Remote, tmp_path: Path, kind: str, tied: str):
    """Its loader ties no layers."""
    untied_answers = engines.call(Engines.serve, kind, timeout_s=240)
    engines.call(load, kind, tmp_path)
    engines.call(tie_layers, tied)
    version = engines.call(push, "B")
    pushed = engines.call(Engines.ask)
    assert pushed != untied_answers["B"]
    assert_same(engines.call(start_and_ask, tmp_path / f"version-{version:08}", timeout_s=240), pushed, "cold from it")


def serve_quantised(engines: Engines, scheme: str) -> tuple[dict[str, Answer], Path]:
    name = f"qwen2-{scheme}"
    engines.save(name, lambda weights, to: quantised_checkpoints.save(tiny_models.build("qwen2", weights), scheme, to))
    return engines.serve(name), engines.checkpoint(name, "B")


def test_an_engine_starts_from_what_a_sender_has_quantised(engines: Remote, tmp_path: Path):
    cold_answers, described = engines.call(serve_quantised, "W8A8-int8", timeout_s=240)
    engines.call(functools.partial(load, quantize="int8"), "qwen2", tmp_path, described)
    version = engines.call(push, "B")
    assert_same(engines.call(Engines.ask), cold_answers["B"], "the push")
    folder = tmp_path / f"version-{version:08}"
    assert_same(engines.call(start_and_ask, folder, timeout_s=240), cold_answers["B"], "cold from it")
