"""Pushed equals cold, from DeepSpeed: two ranks, ZeRO 0 to 3, in the trainers' processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import zero
from engines import TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same

from weightsync import PushReport, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

MODEL = "qwen3"
TRANSPORTS = ("ipc", "broadcast")


def load(trainer: Trainer, stage: int, transport: str, options: dict[str, Any]) -> None:
    trainer.release()
    # What one rank holds of a norm persists on both; all else is gathered as needed.
    settings = zero.config(stage, param_persistence_threshold=tiny_models.CONFIGS[MODEL]().hidden_size)
    trainer.model = zero.initialize(tiny_models.build(MODEL, "A"), settings)
    trainer.sync = WeightSync("deepspeed", transport, trainer.engine, timeout_s=TIMEOUT_S, **options)


def fill(trainer: Trainer, weights: str) -> None:
    model = trainer.model.module
    with zero.prepare().zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        tiny_models.fill(model, weights)


def push(trainer: Trainer) -> PushReport:
    return trainer.sync.push(trainer.model)


def step(trainer: Trainer) -> float:
    """An optimizer step on other tokens on each rank; gives the loss."""
    tokens = torch.arange(24).view(2, 12) * (trainer.rank + 3) % 251
    loss = trainer.model(input_ids=tokens, labels=tokens).loss
    trainer.model.backward(loss)
    trainer.model.step()
    return loss.item()


def save(trainer: Trainer, folder: Path) -> None:
    """What DeepSpeed gathers, as a checkpoint."""
    state = zero.gathered(trainer.model)
    if trainer.rank == 0:
        model = tiny_models.build(MODEL, "A")
        model.load_state_dict(state)
        tiny_models.save(model, folder)


def end(trainer: Trainer) -> None:
    engine = trainer.model
    trainer.release()
    engine.destroy()


def ask_cold(engines: Engines, checkpoint: Path) -> Answer:
    engines.start(checkpoint)
    return engines.ask()


def check(engines: Remote, trainers: Trainers, tp: int, stage: int, transport: str) -> None:
    cold = engines.call(Engines.serve, MODEL, tp, timeout_s=240)
    assert cold["A"] != cold["B"]
    trainers.call(load, stage, transport, {"bucketer": "module", "max_bytes": 1 << 16})
    for number, weights in enumerate("BA"):
        trainers.call(fill, weights)
        trainers.call(push)
        assert_same(engines.call(Engines.ask), cold[weights], f"push {number} ({weights})")
    trainers.call(end)


# Every engine starts once: the one with two workers, the one of the weights after a step, then the one with one worker.


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [1, 3])
def test_pushed_equals_cold_with_two_workers(engines: Remote, trainers: Trainers, stage: int, transport: str):
    check(engines, trainers, 2, stage, transport)


def test_steps_between_pushes_arrive(engines: Remote, trainers: Trainers, tmp_path: Path):
    trainers.call(load, 3, "ipc", {})
    trainers.call(step)
    trainers.call(save, tmp_path / "one")
    cold = engines.call(ask_cold, tmp_path / "one", timeout_s=240)
    started = engines.call(Engines.serve, MODEL, timeout_s=240)
    trainers.call(push)
    once = engines.call(Engines.ask)
    assert once != started["A"]
    assert_same(once, cold, "after one step")
    trainers.call(step)
    trainers.call(push)
    assert engines.call(Engines.ask) != once
    trainers.call(fill, "B")
    trainers.call(push)
    assert_same(engines.call(Engines.ask), started["B"], "other weights after two steps")
    trainers.call(end)


def run(trainer: Trainer, stage: int, transport: str, pushes: bool) -> tuple[list[float], bytes]:
    """The losses of a few steps, and this rank's whole model, optimizer and all, after them."""
    load(trainer, stage, transport, {})
    losses = []
    for _ in range(3):
        losses.append(step(trainer))
        if pushes:
            push(trainer)
    optimizer = trainer.model.optimizer.optimizer
    tensors = [*zero.gathered(trainer.model).values()]
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors += [param.detach(), *(value for value in optimizer.state[param].values())]
    end(trainer)
    return losses, b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_pushes_ends_as_one_that_does_not(engines: Remote, trainers: Trainers, stage: int, transport: str):
    engines.call(Engines.serve, MODEL, timeout_s=240)
    alone = trainers.call(run, stage, transport, False)
    assert len(set(alone[0][0])) == 3, "the model does not learn, so this shows nothing"
    assert trainers.call(run, stage, transport, True) == alone


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", range(4))
def test_pushed_equals_cold(engines: Remote, trainers: Trainers, stage: int, transport: str):
    check(engines, trainers, 1, stage, transport)
