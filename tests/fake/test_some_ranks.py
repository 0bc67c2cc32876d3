"""Pushes of some of a job's ranks: one alone, each for itself, a process group."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from weightsync import ConfigError, PlacementError, WeightSync

TIMEOUT_S = 30.0


def serves(engine: FakeEngine, seed: int) -> bool:
    return all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(seed)).parameters()))


def new_engine() -> FakeEngine:
    return FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))


def to_shard() -> nn.Module:
    """A model without scalars, which FSDP2 does not shard."""
    return trainer_model({name: tensor for name, tensor in checkpoint(2).items() if tensor.dim()})


def push_alone(rank: int) -> None:
    with closing(new_engine()) as engine:
        for backend in ("fsdp", "stream"):
            with WeightSync(backend, "ipc", engine, ranks="alone", timeout_s=TIMEOUT_S) as sync:
                for number in range(2 if rank else 3):  # as often as each likes
                    seed = 10 * rank + number + 2
                    tensors = checkpoint(seed)
                    sync.push(iter(tensors.items()) if backend == "stream" else trainer_model(tensors))
                    assert serves(engine, seed)


def test_each_rank_pushes_to_an_engine_of_its_own() -> None:
    run_ranks(push_alone, 2)


def push_a_shard_alone(rank: int) -> None:
    model = to_shard()
    fully_shard(model)
    if rank:
        return
    with closing(new_engine()) as engine, WeightSync("fsdp", "ipc", engine, ranks="alone", timeout_s=5.0) as sync:
        with pytest.raises(PlacementError, match="is held by no rank"):
            sync.push(model)
        assert not engine.version().startswith("POISONED")
        assert serves(engine, 1)


def test_a_rank_that_holds_a_part_alone_is_refused() -> None:
    run_ranks(push_a_shard_alone, 2)


def push_in_a_group(rank: int, transport: str) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(ConfigError, match="not in the process group"):
            WeightSync("fsdp", transport, ranks=group)
        return
    model = to_shard()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    engine = new_engine() if rank == 1 else None  # the group's rank 0
    with WeightSync("fsdp", transport, engine, ranks=group, timeout_s=TIMEOUT_S) as sync:
        for number in range(2):
            assert sync.push(model).version == number + 1
            assert engine is None or serves(engine, 2)
    if engine is not None:
        engine.close()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_the_ranks_of_a_group_push_without_the_others(transport: str) -> None:
    run_ranks(push_in_a_group, 3, transport)


@pytest.mark.parametrize("ranks", ["both", 1, [0]])
def test_what_is_no_group_is_refused(ranks: Any) -> None:
    with pytest.raises(ConfigError, match='give a process group, "alone", or None'):
        WeightSync("fsdp", ranks=ranks)
