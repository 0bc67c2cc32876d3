"""A chunk that never reaches its slot, where zeros or the chunk of a layer alike lie: the push raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost
from torch import nn

from weightsync import CheckpointTransport, DigestError, ModuleBucketer, WeightSync
from weightsync.transports.base import Seal
from weightsync.transports.nixl_agent import Agent, AgentAddress
from weightsync.transports.staging import Packer

LAYERS = 6
LATE = 4
"""A chunk whose slot has had another one in the same push, over each transport."""
LOST = r"chunk \d+ from trainer rank 0 arrived with another digest: its 256 bytes changed on the way, or never came"


class Layers(nn.Sequential):
    """Layers alike, each of which is one chunk."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(ModuleHost(Layers, Layers().state_dict()))
    yield engine
    engine.close()


def lose_a_fill(at: int, patched: pytest.MonkeyPatch) -> None:
    """Leave the `at`-th chunk from now on out of its slot."""
    fill: Callable[..., None] = Packer.fill
    seen: list[int] = []

    def fill_others(self: Packer, number: int, seal: Seal | None) -> None:
        seen.append(number)
        if len(seen) != at + 1:
            fill(self, number, seal)

    patched.setattr(Packer, "fill", fill_others)


def lose_a_read(at: int, patched: pytest.MonkeyPatch) -> None:
    """Let the `at`-th read from now on succeed without data."""
    read, is_read = Agent.read, Agent.is_read
    seen: list[int] = []

    def read_others(self: Agent, peer: AgentAddress, slot: int, first: int, room: torch.Tensor, count: int) -> int:
        seen.append(slot)
        if len(seen) != at + 1:
            return read(self, peer, slot, first, room, count)
        self.tell(peer, count)
        return -1

    patched.setattr(Agent, "read", read_others)
    patched.setattr(Agent, "is_read", lambda self, ask, peer: ask == -1 or is_read(self, ask, peer))


LOSSES = {
    "ipc": lose_a_fill,
    "broadcast": lose_a_fill,
    "checkpoint": lose_a_fill,
    "nixl": lose_a_fill,
    "nixl read": lose_a_read,
}


@pytest.mark.parametrize("verify", ["sampled", "full"])
@pytest.mark.parametrize(("transport", "lose"), LOSSES.items(), ids=LOSSES)
def test_push_of_a_chunk_that_never_came_raises(
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    transport: str,
    lose: Callable[[int, pytest.MonkeyPatch], None],
    verify: Literal["sampled", "full"],
) -> None:
    if transport.startswith("nixl"):
        pytest.importorskip("nixl")
    model = Layers()
    way: Any = CheckpointTransport(tmp_path) if transport == "checkpoint" else transport.split()[0]
    with WeightSync("fsdp", way, engine, bucketer=ModuleBucketer(256), verify=verify, timeout_s=20.0) as sync:
        assert sync.push(model).chunks == LAYERS
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        with monkeypatch.context() as patched:
            lose(LATE, patched)
            with pytest.raises(DigestError, match=LOST):
                sync.push(model)
        assert str(engine.version()).startswith("POISONED")
        sync.push(model)
        assert all(map(torch.equal, engine.hosts[0].live.parameters(), model.parameters()))


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_push_that_finds_the_last_pushs_chunk_in_its_slot_raises(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    model = Layers()
    with WeightSync("fsdp", transport, engine, max_bytes=2**20, timeout_s=20.0) as sync:
        assert sync.push(model).chunks == 1
        with torch.no_grad():
            model[0].weight.add_(1)
        with monkeypatch.context() as patched:
            lose_a_fill(0, patched)
            with pytest.raises(DigestError, match="or never came"):
                sync.push(model)


def test_first_push_that_finds_zeros_in_a_slot_raises(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        WeightSync("fsdp", "ipc", engine, bucketer=ModuleBucketer(256), timeout_s=20.0) as sync,
        monkeypatch.context() as patched,
    ):
        lose_a_fill(0, patched)
        with pytest.raises(DigestError, match=LOST):
            sync.push(Layers())
