"""Engines that every rank has for itself, in its own process: rank 0 has them all pushed to, or no rank succeeds."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from ranks import run_ranks
from recorders import RecordedEngine

from weightsync import ConfigError, EngineError, EngineUnreachableError, WeightSync
from weightsync.engines.async_llm import AsyncEngine
from weightsync.engines.base import SpmdPart
from weightsync.fleet.engines_of_ranks import OwnEngine, RankEngine
from weightsync.net import timeouts

TIMEOUT_S = 30.0


class AsyncRecordedEngine(RecordedEngine, AsyncEngine):
    """A `RecordedEngine` that stands for an `AsyncLLM`."""


def own_engine(kind: type[RecordedEngine] = RecordedEngine) -> RecordedEngine:
    return kind(ModuleHost(TinyEngineModel, checkpoint(1)))


def serves(engine: RecordedEngine, seed: int) -> bool:
    engine.hosts[0].check_before_answer()
    return torch.equal(engine.hosts[0].live.embed.weight, cold(checkpoint(seed)).embed.weight)


def push_into_each(rank: int, transport: str) -> None:
    engine = own_engine(AsyncRecordedEngine if rank == 2 else RecordedEngine)
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        for seed in (2, 3):
            report = sync.push(trainer_model(checkpoint(seed)))
            assert len(report.workers) == 3
            assert serves(engine, seed)
            assert engine.version() == str(report.version)
        assert {"pause keep", "reset caches", "resume", "finish 2"} <= set(engine.calls)
        # An `LLM` of another rank is emptied at each pause, too. The pause of an `AsyncLLM` does so by itself.
        assert engine.calls.count("reset caches") == 2 + (engine.calls.count("pause keep") if rank == 1 else 0)
        dist.barrier()  # none closes while another looks
    engine.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_engine_of_every_rank_is_pushed_to(transport: str) -> None:
    run_ranks(push_into_each, 3, transport)


def push_while_the_last_rank_generates(rank: int) -> None:
    engine: Any = own_engine()
    if rank == 2:
        engine.is_paused = lambda: False
    elif rank == 1:
        engine.is_paused = lambda: True  # rank 0's engine does not report it
    with WeightSync("fsdp", "ipc", engine, pause="caller", timeout_s=TIMEOUT_S) as sync:
        with pytest.raises(EngineError, match=r"the engine generates\. Pause it before each push"):
            sync.push(trainer_model(checkpoint(2)))
        assert serves(engine, 1)
        dist.barrier()
        if rank == 2:
            engine.is_paused = lambda: True
        sync.push(trainer_model(checkpoint(3)))
        assert serves(engine, 3)
        dist.barrier()  # none closes while another looks
    engine.close()


def test_engine_of_another_rank_that_the_caller_has_not_paused_is_refused() -> None:
    run_ranks(push_while_the_last_rank_generates, 3)


def push_into_parts(rank: int, transport: str) -> None:
    """Four ranks with the workers of two engines, two ranks each."""
    part, worker = divmod(rank, 2)
    engine = RecordedEngine(ModuleHost(partial(TinyEngineModel, worker, 2), checkpoint(1), rank=worker, world=2))
    engine.part = SpmdPart(part, 2)
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync:
        for seed in (2, 3):
            report = sync.push(trainer_model(checkpoint(seed)))
            assert len(report.workers) == 4
            expected = cold(checkpoint(seed), rank=worker, tp=2).state()
            found = engine.hosts[0].live.state()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert engine.version() == str(report.version)
        dist.barrier()  # none closes while another looks
        engine.start_error = EngineError("not now", who=engine.name) if rank == 3 else None
        with pytest.raises(EngineError, match="not now"):
            sync.push(trainer_model(checkpoint(4)))
        assert engine.version() == "2"
        engine.start_error = None
        dist.barrier()
        sync.push(trainer_model(checkpoint(4)))
        assert engine.version() == "3"
        dist.barrier()
    engine.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_engines_whose_workers_are_in_several_ranks_are_pushed_to(transport: str) -> None:
    run_ranks(push_into_parts, 4, transport)


def fail_on_one(rank: int) -> None:
    """An engine of another rank refuses; then its rank's process hangs up; then all is well."""
    engine = own_engine()
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        dist.barrier()
        engine.start_error = EngineError("not now", who=engine.name) if rank == 1 else None
        with pytest.raises(EngineError, match="not now"):
            sync.push(trainer_model(checkpoint(3)))
        assert serves(engine, 2)
        dist.barrier()
        engine.start_error = None
        sync.push(trainer_model(checkpoint(3)))
        assert serves(engine, 3)
        dist.barrier()
        if rank == 1:
            sync._strategy._roster.others.close()
        dist.barrier()
        with pytest.raises(EngineUnreachableError, match="process, trainer rank 1, is gone"):
            sync.push(trainer_model(checkpoint(4)))
        dist.barrier()
        sync.push(trainer_model(checkpoint(4)))
        assert serves(engine, 4)
        dist.barrier()
    engine.close()


def test_failure_of_another_ranks_engine_is_everybodys_and_the_next_push_heals() -> None:
    run_ranks(fail_on_one, 2)


def refuse(rank: int, transport: str, given: list[Any], words: str) -> None:
    engine = own_engine() if given[rank] == "own" else given[rank]
    with WeightSync("fsdp", transport, engine, timeout_s=TIMEOUT_S) as sync, pytest.raises(ConfigError, match=words):
        sync.push(trainer_model(checkpoint(2))) if transport == "ipc" else sync.attach(trainer_model(checkpoint(2)))


@pytest.mark.parametrize(
    ("transport", "given", "words"),
    [
        ("ipc", ["http://a:1", "http://a:2"], "trainer rank 1 was given the engine http://a:2, and rank 0 was not"),
        ("ipc", ["own", "http://a:2"], "rank 1 was given the engine http://a:2"),
        ("single_copy", ["own", "own"], "an engine of its own, .*, but single_copy reaches the engines of rank 0"),
    ],
)
def test_engine_that_no_push_would_reach_is_refused_on_every_rank(transport: str, given: list[Any], words: str) -> None:
    run_ranks(refuse, 2, transport, given, words)


def name_it_twice(rank: int) -> None:
    """Every rank names the same server, as in a program that all ranks run."""
    sync = WeightSync("fsdp", "ipc", "http://127.0.0.1:9/" if rank else "http://127.0.0.1:9", timeout_s=5.0)
    with sync, pytest.raises(EngineUnreachableError, match="nothing answers there"):
        sync.push(trainer_model(checkpoint(2)))


def test_server_that_every_rank_names_is_one_engine() -> None:
    run_ranks(name_it_twice, 2)


@pytest.mark.parametrize(("method", "arguments"), [("init", [{}]), ("update", [{}]), ("reset_caches", [])])
def test_call_that_workers_are_released_from_may_take_several_waits(
    method: str, arguments: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "OTHER_RANK_GRACE_S", 0.0)
    answer: Future[Any] = Future()
    calls: Any = SimpleNamespace(send=lambda *_: answer)
    Timer(0.2, answer.set_result, [None]).start()
    getattr(RankEngine(calls, 0, OwnEngine("an LLM", "127.0.0.1", None), timeout_s=0.01), method)(*arguments)
