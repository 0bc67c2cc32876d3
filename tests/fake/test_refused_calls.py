"""Calls of several ranks that are refused: engines stay connected, and what was sent once is not sent again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from ranks import run_ranks

from weightsync import ConfigError, NonFiniteError, TensorSelection, WeightSync

TIMEOUT_S = 60.0
FROZEN = TensorSelection(frozen=("embed.*",))


def serves(engine: FakeEngine, seed: int) -> bool:
    live = engine.hosts[0].live.parameters()
    return all(a.equal(b) for a, b in zip(live, cold(checkpoint(seed)).parameters(), strict=True))


def push_old_version(sync: WeightSync, model: Any, rank: int) -> None:
    sync.push(model, version=1)


def catch_up_with_changed_rank(sync: WeightSync, model: Any, rank: int) -> None:
    if rank == torch.distributed.get_world_size() - 1:
        model.load_state_dict(checkpoint(2))
    sync.catch_up(model)


def push_different_versions(sync: WeightSync, model: Any, rank: int) -> None:
    sync.push(model, version=40 + rank)


def push_and_catch_up(sync: WeightSync, model: Any, rank: int) -> None:
    sync.catch_up(model) if rank == 1 else sync.push(model)


def push_nan(sync: WeightSync, model: Any, rank: int) -> None:
    with torch.no_grad():
        next(iter(model.parameters()))[0] += float("nan")
    try:
        sync.push(model)
    finally:
        model.load_state_dict(checkpoint(2))


REFUSED: dict[str, tuple[Callable[[WeightSync, Any, int], None], type[Exception], str]] = {
    "old version": (push_old_version, ConfigError, "version 1 is not newer than"),
    "catch_up of what has changed": (catch_up_with_changed_rank, ConfigError, "no version to catch up with"),
    "versions that differ": (push_different_versions, ConfigError, "out of step"),
    "calls that differ": (push_and_catch_up, ConfigError, "out of step"),
    "nan": (push_nan, NonFiniteError, "1 tensors hold NaN"),
}


@pytest.mark.parametrize(("transport", "world"), [("ipc", 1), ("ipc", 3), ("broadcast", 2)])
def test_a_refused_call_keeps_engines_connected(transport: str, world: int) -> None:
    run_ranks(_refused, world, transport)


def _refused(rank: int, transport: str) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    model = trainer_model(checkpoint(2))
    logging.getLogger("weightsync").setLevel(logging.ERROR)
    with WeightSync("fsdp", transport, engine, selection=FROZEN, non_finite="refuse", timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        later = sync.push(model).nbytes
        for name, (call, kind, text) in REFUSED.items():
            if torch.distributed.get_world_size() == 1 and "differ" in name:
                continue
            with pytest.raises(kind, match=text):
                call(sync, model, rank)
            assert engine is None or engine.log[-1] == "resume", f"{name}: the engine is paused"
            report = sync.push(model)
            assert report.nbytes == later, f"{name}: what was frozen has travelled anew"
        assert report.version == 2 + len(REFUSED) - (2 if torch.distributed.get_world_size() == 1 else 0)
    if engine is not None:
        assert serves(engine, 2)
        engine.close()


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_rank_that_begins_anew_makes_all_connect_anew(is_refused: bool) -> None:
    run_ranks(_begun_anew, 2, is_refused)


def _begun_anew(rank: int, is_refused: bool) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    model = trainer_model(checkpoint(2))
    sync = WeightSync("fsdp", "ipc", engine, selection=FROZEN, timeout_s=TIMEOUT_S)
    whole = sync.push(model, version=1).nbytes
    if is_refused:
        with pytest.raises(ConfigError, match="version 1 is not newer than 1"):
            sync.push(model, version=1)
    if rank == 1:
        sync.close()
        sync = WeightSync("fsdp", "ipc", None, selection=FROZEN, timeout_s=TIMEOUT_S)
    model.load_state_dict(checkpoint(3))
    assert sync.push(model, version=2).nbytes == whole
    assert engine is None or serves(engine, 3)
    sync.close()
    if engine is not None:
        engine.close()
