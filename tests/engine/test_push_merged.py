"""A model that PEFT has wrapped, merged into a real engine: it equals a cold one of the merged model."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
import zero
from engines import TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same
from test_lora import fill_adapters, frozen_copy, local, shard, wrapped

from weightsync import TensorSelection, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of the trainers. The last bits of a product depend on it, so the cold engine's weights are merged there too."""


def cold(engines: Engines, folder: Path, kind: str, base: str) -> Answer:
    """What an engine answers that was started from the merged weights; it runs on."""
    model = wrapped(kind, model=base).to(DEVICE)
    fill_adapters(model, "A")
    engines.start(tiny_models.save(model.merge_and_unload(), folder / "merged"))
    engines._running = ()
    return engines.ask()


def connect(trainer: Trainer | Engines, backend: str, kind: str, base: str, transport: str) -> None:
    model = trainer.model = wrapped(kind, model=base).to(DEVICE)
    if backend == "deepspeed":
        trainer.model = zero.initialize(model, zero.config(3))
    elif isinstance(trainer, Trainer):
        shard(model)
    engine = trainer.engine if isinstance(trainer, Trainer) else trainer.llm
    selection = TensorSelection(only_trained=True)
    trainer.sync = WeightSync(backend, transport, engine, selection=selection, max_bytes=1 << 16, timeout_s=TIMEOUT_S)


def push(trainer: Trainer | Engines, weights: str) -> int:
    """The bytes that it moved; the trainer's own are as they were."""
    with zero.to_fill(trainer.model):
        fill_adapters(trainer.model, weights)
    before = frozen_copy(trainer.model)
    nbytes = trainer.sync.push(trainer.model).nbytes
    assert all(torch.equal(local(param), before[name]) for name, param in trainer.model.named_parameters())
    return nbytes


def release(trainer: Trainer | Engines) -> None:
    engine = trainer.model
    trainer.release()
    if hasattr(engine, "destroy"):
        engine.destroy()


@pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="gloo crashes where GPU tensors are gathered, and NCCL wants two GPUs"
)
@pytest.mark.parametrize(
    ("kind", "base", "transport"),
    [("all of these", "qwen3", "ipc"), ("all of these", "qwen3", "broadcast"), ("rslora", "qwen3-moe", "ipc")],
)
def test_a_real_engine_equals_a_cold_one_of_the_merged_model(
    engines: Remote, trainers: Trainers, tmp_path: Path, kind: str, base: str, transport: str
):
    expected = engines.call(cold, tmp_path, kind, base, timeout_s=240)
    sides = [(engines, "fsdp"), (trainers, "fsdp")]
    if DEVICE == "cpu":  # the DeepSpeed of tests has its models there
        sides.append((trainers, "deepspeed"))
    for side, backend in sides:
        side.call(connect, backend, kind, base, transport)
        whole = side.call(push, "B")
        assert engines.call(Engines.ask) != expected
        partial = side.call(push, "A")
        assert (partial if side is engines else partial[0]) < (whole if side is engines else whole[0])
        assert_same(engines.call(Engines.ask), expected, backend)
        side.call(release)
