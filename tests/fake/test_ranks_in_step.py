"""Ranks that make different calls: every rank raises at once, nothing is written, and the next call is in step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from ranks import run_ranks

from weightsync import ConfigError, LoraTransport, SyncTimeoutError, WeightSync, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.ranks import CollectiveCall, Ranks

RANKS = 3
LONG_S = 60.0
SOON_S = 20.0

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "version": (
        lambda sync, model: sync.push(model, version=40),
        lambda sync, model: sync.push(model, version=41),
        r"rank 0 calls push\(version=40\), call 2, and rank 2 calls push\(version=41\), call 2",
    ),
    "label": (
        lambda sync, model: sync.push(model, label="step 4"),
        lambda sync, model: sync.push(model, label="step 5"),
        r"label='step 4'\), call \d, and rank 2 calls push\(version=None, label='step 5'\)",
    ),
    "a version that is none": (
        lambda sync, model: sync.push(model, version=40),
        lambda sync, model: sync.push(model, version="41"),
        "version='41'; it must be a whole number",
    ),
    "a label that is refused": (
        lambda sync, model: sync.push(model),
        lambda sync, model: sync.push(model, label="POISONED"),
        "it must not begin with POISONED",
    ),
    "catch_up": (
        lambda sync, model: sync.catch_up(model),
        lambda sync, model: sync.push(model),
        r"rank 0 calls catch_up\(version=None\), call \d, and rank 2 calls push",
    ),
    "attach": (
        lambda sync, model: sync.push(model),
        lambda sync, model: sync.attach(model),
        "rank 2 calls attach",
    ),
    "writing": (
        lambda sync, model: sync.push(model),
        lambda sync, model: sync.writing().__enter__(),
        "rank 2 calls writing",
    ),
}


def serves(engine: FakeEngine, seed: int) -> bool:
    live = engine.hosts[0].live.parameters()
    return all(a.equal(b) for a, b in zip(live, cold(checkpoint(seed)).parameters(), strict=True))


def test_ranks_that_call_otherwise_than_rank_0_raise_on_every_rank() -> None:
    run_ranks(_otherwise, RANKS)


def _otherwise(rank: int) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=LONG_S) as sync:
        sync.push(model, version=7, label="step 0")
        for name, (of_rank_0, of_rank_2, text) in CALLS.items():
            started = time.monotonic()
            if name != "catch_up":  # which has its own word on a model that has changed
                model.load_state_dict(checkpoint(3))
            with pytest.raises(ConfigError, match=text) as caught:
                (of_rank_2 if rank == 2 else of_rank_0)(sync, model)
            assert time.monotonic() - started < SOON_S
            said: list[Any] = [None] * RANKS
            dist.all_gather_object(said, str(caught.value))
            assert said == [said[0]] * RANKS
            if engine is not None:
                assert serves(engine, 2)
            # Every rank is in step again.
            model.load_state_dict(checkpoint(2))
            sync.push(model, label="step 0")
            if engine is not None:
                assert (engine.version(), engine.log[-1]) == ("step 0", "resume")
    if engine is not None:
        engine.close()


def test_all_ranks_out_of_step_are_named() -> None:
    run_ranks(_all_otherwise, RANKS)


def _all_otherwise(rank: int) -> None:
    timeouts.RANK_ANSWER_S = LONG_S  # a busy machine may take a second for a call
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=LONG_S) as sync:
        with pytest.raises(ConfigError, match="out of step") as caught:
            sync.push(model, version=40 + rank)
        assert sorted(caught.value.calls) == [
            f"trainer rank {rank}: push(version={40 + rank}), call 1" for rank in range(RANKS)
        ]
        sync.push(model, version=50)
    if engine is not None:
        assert serves(engine, 2)
        engine.close()


def test_ranks_of_adapters_that_call_otherwise_raise_too() -> None:
    run_ranks(_adapters, 2)


def _adapters(rank: int) -> None:
    sync = WeightSync("fsdp", LoraTransport(), "http://127.0.0.1:1" if rank == 0 else None, timeout_s=LONG_S)
    with sync, pytest.raises(ConfigError, match=r"version=40\), call 1, and rank 1 calls push\(version=41\)"):
        sync.push(trainer_model(checkpoint(2)), version=40 + rank)


def test_a_rank_that_leaves_out_a_call_with_a_version_is_in_step_in_its_next() -> None:
    run_ranks(_left_out, 2)


def _left_out(rank: int) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    model = trainer_model(checkpoint(2))
    sync = WeightSync("fsdp", "ipc", engine, timeout_s=LONG_S)
    for version in range(1, 7):
        if version in (2, 3, 5):
            dist.barrier()  # as those of the job's own
            sync._ranks.timeout_s = 1.0
            if rank == 0:
                with pytest.raises(SyncTimeoutError, match="trainer rank 1"):
                    sync.push(model, version=version)
            dist.barrier()
            sync._ranks.timeout_s = LONG_S
        else:
            model.load_state_dict(checkpoint(version))
            sync.push(model, version=version)
            if engine is not None:
                assert serves(engine, version)
    sync.close()
    if engine is not None:
        engine.close()


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_leaves_out_calls_without_a_version_is_in_step_again(absent: int) -> None:
    run_ranks(_left_out_without_version, 2, absent)


def _left_out_without_version(rank: int, absent: int) -> None:
    group = Ranks(1.0)
    group.begin("connect", CollectiveCall("push"))
    group.gather(None, "plan")
    failed = 0
    for step in range(6):
        dist.barrier()
        if step == 1 and rank == absent:  # the loop of this rank leaves out the call
            dist.barrier()
            continue
        try:
            group.begin("connect", CollectiveCall("push"))
            group.gather(None, "plan")
            group.broadcast(None, "plan")
            failed = 0
        except WeightSyncError as error:
            group.agree_on(error)
            group.disconnect()
            failed += 1
        dist.barrier()
    assert failed == 0, f"the last {failed} calls failed"
    group.disconnect()
