"""Pauses and sleep: a push refuses sleeping weights before it writes, and counts the pause alone."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from recorders import RecordedEngine
from torch import nn

from weightsync import WeightSync
from weightsync.errors import EngineAsleepError
from weightsync.net.wire import CLEAN

TIMEOUT_S = 20.0


@pytest.fixture
def engines() -> Iterator[list[RecordedEngine]]:
    engines = [RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(2)]
    yield engines
    for engine in engines:
        engine.close()


def serves(engine: RecordedEngine, seed: int) -> bool:
    return torch.equal(engine.hosts[0].live.embed.weight, cold(checkpoint(seed)).embed.weight)


def fill(model: nn.Module, seed: int) -> nn.Module:
    """Let a model hold another checkpoint, in the same memory."""
    model.load_state_dict(checkpoint(seed))
    return model


def state(engine: RecordedEngine) -> str:
    return engine.sessions[0].receiver.state


def test_first_push_into_sleeping_weights_touches_nothing(engines: list[RecordedEngine]) -> None:
    engines[0].hosts[0].sleeps = True
    with WeightSync("fsdp", "ipc", engines[0], timeout_s=TIMEOUT_S) as sync:
        with pytest.raises(EngineAsleepError, match=r'wake_up\(tags=\["weights"\]\)'):
            sync.push(trainer_model(checkpoint(2)))
        assert engines[0].calls == ["init"]
        engines[0].hosts[0].sleeps = False
        sync.push(trainer_model(checkpoint(2)))
    assert serves(engines[0], 2)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_later_push_into_sleeping_weights_leaves_the_engine_as_it_was(
    engines: list[RecordedEngine], transport: str
) -> None:
    asleep = engines[0]
    with WeightSync("fsdp", transport, asleep, timeout_s=TIMEOUT_S) as sync:
        model = trainer_model(checkpoint(2))
        sync.push(model)
        asleep.hosts[0].sleeps = True
        asleep.heard()
        with pytest.raises(EngineAsleepError, match="nothing was written"):
            sync.push(fill(model, 3))
        assert asleep.heard().splitlines()[-3:] == ["finish None", "mark 1", "resume"]
        assert serves(asleep, 2)
        assert (state(asleep), asleep.version()) == (CLEAN, "1")
        asleep.hosts[0].sleeps = False
        assert sync.push(fill(model, 3)).version == 2
    assert serves(asleep, 3)


def test_awake_engines_beside_a_sleeping_one_generate_on(engines: list[RecordedEngine]) -> None:
    asleep, awake = engines
    with WeightSync("fsdp", "ipc", engines, timeout_s=TIMEOUT_S) as sync:
        model = trainer_model(checkpoint(2))
        sync.push(model)
        asleep.hosts[0].sleeps = True
        with pytest.raises(EngineAsleepError):
            sync.push(fill(model, 3))
        assert (state(asleep), asleep.version()) == (CLEAN, "1")
        assert serves(asleep, 2)
        assert (state(awake), awake.version()) == (CLEAN, "1")
        assert serves(awake, 2)
        assert awake.calls[-1] == "resume"
        asleep.hosts[0].sleeps = False
        sync.push(fill(model, 3))
    for engine in engines:
        assert serves(engine, 3)
        assert engine.version() == "2"


def test_pause_is_counted_from_when_the_engine_says_that_it_is_paused(engines: list[RecordedEngine]) -> None:
    """An `LLM` in a Ray actor generates on until its turn comes."""
    busy, model = engines[0], trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", busy, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        busy.pause = lambda mode: time.sleep(1.0)  # type: ignore[method-assign]
        report = sync.push(model)
    assert report.total_s - report.pause_s >= 1.0
