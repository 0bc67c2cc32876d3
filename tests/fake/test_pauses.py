"""Pauses and sleep: a push refuses sleeping weights before it writes, and counts the pause alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from recorders import RecordedEngine
from torch import nn

from weightsync import ConfigError, EngineError, WeightSync, WeightSyncError
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


@pytest.fixture
def of_roles() -> Iterator[Callable[..., list[RecordedEngine]]]:
    """Make an engine of each of these values of vLLM's `kv_role`, "" without a KV connector."""
    made: list[RecordedEngine] = []

    def make(*roles: str) -> list[RecordedEngine]:
        for role in roles:
            host = ModuleHost(TinyEngineModel, checkpoint(1))
            host.identity = replace(host.identity, kv_role=role)
            made.append(RecordedEngine(host))
            made[-1].name = role or "plain"
        return made

    yield make
    for engine in made:
        engine.close()


def paused_before(engines: list[RecordedEngine]) -> dict[str, set[str]]:
    """Push to these engines. Return for each of them the engines whose pauses had ended before its own began."""
    ended: list[str] = []
    before: dict[str, set[str]] = {}

    def note(engine: RecordedEngine, pause: Callable[[str], None]) -> Callable[[str], None]:
        def noted(mode: str) -> None:
            before[engine.name] = {*ended}
            time.sleep(0.05)
            pause(mode)
            ended.append(engine.name)

        return noted

    for number, engine in enumerate(engines):
        engine.name += f" {number}"
        engine.pause = note(engine, engine.pause)  # type: ignore[method-assign]
    with WeightSync("fsdp", "ipc", engines, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert all(serves(engine, 2) for engine in engines)
    return before


def test_engines_that_prefill_pause_before_engines_that_decode(of_roles: Callable[..., list[RecordedEngine]]) -> None:
    before = paused_before(of_roles("kv_consumer", "kv_producer", "kv_both", "kv_producer", "kv_both", "kv_consumer"))
    producers = {"kv_producer 1", "kv_producer 3"}
    both = {"kv_both 2", "kv_both 4"}
    assert before["kv_producer 1"] | before["kv_producer 3"] <= producers
    assert before["kv_both 2"] == producers
    assert before["kv_both 4"] == producers | {"kv_both 2"}
    assert before["kv_consumer 0"] & before["kv_consumer 5"] >= producers | both


@pytest.mark.parametrize(
    ("roles", "options", "words"),
    [
        (["kv_producer", "kv_consumer"], {"rolling": True}, "leave rolling out"),
        (["", "kv_both"], {"rolling": True}, "leave rolling out"),
        (["kv_producer", "kv_producer"], {}, "kv_role='kv_producer' shares .*Give the engines of both roles"),
        (["", "kv_consumer"], {}, "kv_role='kv_consumer' shares .*Give the engines of both roles"),
        (["kv_consumer"], {"pause": "caller"}, ""),
        (["kv_both", "kv_consumer"], {}, ""),
        (["", "kv_both"], {}, ""),
    ],
)
def test_push_that_would_leave_two_versions_to_share_keys_and_values_is_refused(
    of_roles: Callable[..., list[RecordedEngine]], roles: list[str], options: dict[str, Any], words: str
) -> None:
    engines = of_roles(*roles)
    with WeightSync("fsdp", "ipc", engines, timeout_s=TIMEOUT_S, **options) as sync:
        if words:
            with pytest.raises(ConfigError, match=words):
                sync.push(trainer_model(checkpoint(2)))
        else:
            sync.push(trainer_model(checkpoint(2)))
    assert all(serves(engine, 1 if words else 2) for engine in engines)
    assert not words or {call for engine in engines for call in engine.calls} == {"init"}


@pytest.mark.parametrize("rolling", [None, True])
def test_engine_whose_caches_were_not_reset_answers_nothing_before_a_push_heals_it(
    engines: list[RecordedEngine], rolling: bool | None
) -> None:
    reset = engines[1].reset_caches

    def fail() -> None:
        raise EngineError("the caches were not reset")

    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engines, rolling=rolling, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        engines[1].reset_caches = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="the caches were not reset"):
            sync.push(fill(model, 3))
        engines[1].reset_caches = reset  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="does not answer: it is POISONED"):
            engines[1].hosts[0].check_before_answer()
        if rolling:  # updated before, or not yet
            engines[0].hosts[0].check_before_answer()
        sync.push(fill(model, 2))
        with pytest.raises(WeightSyncError):
            sync.push(nn.Linear(2, 2))  # a failure that poisons nothing
    assert all(serves(engine, 2) and state(engine) == CLEAN for engine in engines)
    for engine in engines:
        engine.hosts[0].check_before_answer()
