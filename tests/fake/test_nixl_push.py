"""Pushes over NIXL to stand-ins: what they leave behind, what they say, and what they refuse."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, module_of, trainer_model
from ranks import run_ranks
from recorders import RecordedEngine
from test_forks import in_a_fork
from torch import nn

from weightsync import ConfigError, PeerError, PlacementError, WeightSync, WeightSyncError
from weightsync.transports import nixl_agent, nixl_group
from weightsync.transports.nixl import NixlReceiver, NixlTransport
from weightsync.transports.nixl_agent import Agent, AgentAddress

pytest.importorskip("nixl")

TIMEOUT_S = 20.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedEngine]:
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")  # NIXL refuses "tcp" alone where a GPU is
    engine = RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    yield engine
    engine.close()


def serves(engine: RecordedEngine, seed: int) -> bool:
    return torch.equal(engine.hosts[0].live.embed.weight, cold(checkpoint(seed)).embed.weight)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[AgentAddress]:
    """The addresses that agents have given away."""
    found: list[AgentAddress] = []
    real = Agent.address

    def address(agent: Agent) -> AgentAddress:
        found.append(real(agent))
        return found[-1]

    monkeypatch.setattr(Agent, "address", address)
    return found


def test_addresses_of_agents_are_in_no_log(
    engine: RecordedEngine,
    addresses: list[AgentAddress],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
):
    caplog.set_level(logging.DEBUG)
    with WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert serves(engine, 2)
    said = caplog.text + "".join(capfd.readouterr())
    assert len(addresses) == 2
    for each in addresses:
        for secret in (each.metadata, repr(bytes.fromhex(each.metadata))[2:-1], each.agent, *map(str, each.slots)):
            assert secret not in said


def test_tensors_that_move_are_pushed_from_where_they_lie(engine: RecordedEngine):
    with WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S) as sync:
        for seed in (2, 3):  # each model has memory of its own
            sync.push(trainer_model(checkpoint(seed)))
            assert serves(engine, seed)


class Stage(nn.Module):
    """A pipeline stage with a parameter of these names alone."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(5)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self._parameters:
                self.get_parameter(name).data.copy_(tensor)


def test_workers_that_read_nothing_need_no_memory_of_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")  # NIXL refuses "tcp" alone where a GPU is
    stages = partial(Stage, "weight"), Stage
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                closing(FakeEngine(*(ModuleHost(s, {}, rank=r, world=2) for r, s in enumerate(stages))))
            )
            for _ in range(3)
        ]
        model = module_of({"weight": torch.arange(5.0)})
        with WeightSync("fsdp", "nixl", engines, timeout_s=TIMEOUT_S) as sync:
            sync.push(model)
        for engine in engines:
            assert torch.equal(engine.hosts[0].live.weight, model.weight)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_close_ends_the_agents_and_closes_their_files(engine: RecordedEngine):
    left = None
    for seed in (2, 3, 4):
        with WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S) as sync:
            sync.push(trainer_model(checkpoint(seed)))
            used = open_files()
        assert open_files() < used
        left = open_files() if left is None else left
        until = time.monotonic() + 10
        while open_files() > left:  # the last connections close in threads
            assert time.monotonic() < until
            time.sleep(0.05)


def pushes_around_a_fork(rank: int) -> None:
    """Push before and after a child, forked in between, has freed all that it inherited."""
    os.environ["UCX_TLS"] = "tcp,cuda_copy"
    model = trainer_model(checkpoint(2))
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    sync: WeightSync | None = WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S)
    sync.push(model)

    def leave() -> str:
        nonlocal sync
        sync = None
        engine.sessions.clear()
        gc.collect()
        return "left"

    assert in_a_fork(leave) == "left"
    assert sync.push(model).version == 2
    sync.close()
    engine.close()


def test_a_forked_child_that_frees_an_agent_does_not_end_its_parent():
    run_ranks(pushes_around_a_fork, 1)


def test_a_fork_while_an_agent_is_being_made_protects_the_others(monkeypatch: pytest.MonkeyPatch):
    failed: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", failed.append)

    def fork_meanwhile() -> None:
        said.append(in_a_fork(lambda: str(len(failed))))
        raise ConfigError("no NIXL here")

    said: list[str] = []
    monkeypatch.setattr(nixl_agent, "load_nixl", fork_meanwhile)
    with pytest.raises(ConfigError, match="no NIXL here"):
        Agent("UCX")
    assert said == ["0"]


def test_trainer_that_has_failed_cannot_be_read_any_more(
    engine: RecordedEngine, addresses: list[AgentAddress], monkeypatch: pytest.MonkeyPatch
):
    thief, room = Agent("UCX"), torch.zeros(64, dtype=torch.uint8)
    thief.register([room])
    with WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        for kept in addresses:
            thief.add(kept)
            read_whole(thief, kept, room)
        monkeypatch.setattr(NixlTransport, "send", lambda *_: 1 / 0)
        with pytest.raises(WeightSyncError, match="division by zero"):
            sync.push(trainer_model(checkpoint(3)))
        for kept in addresses:
            with pytest.raises(WeightSyncError, match="cannot be read"):
                read_whole(thief, kept, room)
    thief.close()


def read_whole(agent: Agent, address: AgentAddress, room: torch.Tensor) -> None:
    read = agent.read(address, 0, 0, room, 0)
    until = time.monotonic() + 10
    while not agent.is_read(read, address):
        assert time.monotonic() < until


def test_engine_without_nixl_is_named_before_anything_is_written(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
):
    def meet(*_: Any) -> None:
        raise ConfigError("NIXL is missing here")

    monkeypatch.setattr(NixlReceiver, "meet", meet)
    with WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S) as sync:
        with pytest.raises(ConfigError, match=r"NIXL is missing here \[engine 0 worker tp=0"):
            sync.push(trainer_model(checkpoint(2)))
        assert serves(engine, 1)
        monkeypatch.undo()
        sync.push(trainer_model(checkpoint(2)))
    assert serves(engine, 2)


def test_versions_that_differ_are_refused_before_anything_is_written(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
):
    versions = iter(["1.5.1", "1.5.1", "1.5.1", "1.6.0"])
    with monkeypatch.context() as patched:
        patched.setattr(nixl_group, "nixl_version", lambda: next(versions))
        with (
            WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S) as sync,
            pytest.raises(PlacementError, match=r"has NIXL 1\.5\.1, and .* has NIXL 1\.6\.0|1\.6\.0, and .* 1\.5\.1"),
        ):
            sync.push(trainer_model(checkpoint(2)))
    assert serves(engine, 1)


@pytest.mark.parametrize(
    ("kind", "words"), [("Backend", r"nixlBackendError.*UCX_TLS"), ("RemoteDisconnect", "nixlRemoteDisconnectError")]
)
def test_memory_that_nixl_cannot_read_is_an_error_before_anything_is_written(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
):
    def is_read(agent: Agent, read: int, peer: AgentAddress) -> bool:
        raise PeerError(f"{peer.member}'s memory cannot be read: nixl{kind}Error")

    with monkeypatch.context() as patched:
        patched.setattr(Agent, "is_read", is_read)
        sync = WeightSync("fsdp", "nixl", engine, timeout_s=TIMEOUT_S)
        with pytest.raises(WeightSyncError, match=f"trainer rank 0's memory cannot be read: {words}"):
            sync.push(trainer_model(checkpoint(2)))
    assert serves(engine, 1)
    sync.push(trainer_model(checkpoint(2)))
    assert serves(engine, 2)
    sync.close()
