"""Weights that another thread writes while a push reads them: the push raises, and the engine mixes no versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_trainer import with_adapter
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from torch import nn

from weightsync import CheckpointTransport, DigestError, ModuleBucketer, WeightSync
from weightsync.transports.base import Seal
from weightsync.transports.staging import Packer

TIMEOUT_S = 20.0


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    yield engine
    engine.close()


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)


def through_data(model: nn.Module) -> None:
    next(iter(model.parameters())).data[0, 0] += 1


def of_a_factor(model: nn.Module) -> None:
    next(param for param in model.parameters() if param.requires_grad).data[0, 0] += 1


WRITES: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], None], list[str]]] = {
    "a step": (lambda: trainer_model(checkpoint(2)), step, ["full", "sampled"]),
    "data": (lambda: trainer_model(checkpoint(2)), through_data, ["full"]),
    "data of a factor": (with_adapter, of_a_factor, ["full"]),
    "a step with an adapter": (with_adapter, step, ["full", "sampled"]),
}


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "checkpoint"])
@pytest.mark.parametrize(("make", "write", "seen_by"), WRITES.values(), ids=WRITES)
def test_weights_that_are_written_while_they_are_read_are_no_version(
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    transport: str,
    make: Callable[[], Any],
    write: Callable[[nn.Module], None],
    seen_by: list[str],
) -> None:
    model = make()
    fill = Packer.fill
    written: list[int] = []

    def fill_and_write(self: Packer, number: int, seal: Seal | None) -> None:
        fill(self, number, seal)
        if not written:
            written.append(number)
            write(model)

    for verify in seen_by:
        way = CheckpointTransport(tmp_path / verify) if transport == "checkpoint" else transport
        options: Any = {"bucketer": ModuleBucketer(64), "verify": verify, "timeout_s": TIMEOUT_S}
        with WeightSync("fsdp", way, engine, **options) as sync:
            sync.push(model)
            before = engine.version()
            written.clear()
            with monkeypatch.context() as patched:
                patched.setattr(Packer, "fill", fill_and_write)
                with pytest.raises(DigestError, match=r"a thread wrote .* while a push read it"):
                    sync.push(model)
            assert written
            assert str(engine.version()).startswith("POISONED")
            report = sync.push(model)
            assert report.version > int(before or 0)
        saved = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
        expected = cold({name: tensor.detach() for name, tensor in saved.state_dict().items()})
        assert all(map(torch.equal, engine.hosts[0].live.parameters(), expected.parameters()))
        model = make()


def test_nothing_is_looked_at_with_verify_none(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trainer_model(checkpoint(2))
    fill = Packer.fill

    def fill_and_write(self: Packer, number: int, seal: Seal | None) -> None:
        fill(self, number, seal)
        step(model)

    monkeypatch.setattr(Packer, "fill", fill_and_write)
    with WeightSync("fsdp", "ipc", engine, verify="none", timeout_s=TIMEOUT_S) as sync:
        assert sync.push(model).version == 1
