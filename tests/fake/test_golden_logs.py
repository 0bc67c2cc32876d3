"""What an engine is asked to do in a push, as golden text, and how many messages a push takes.

A change of these logs is a change of what every engine client must do. What two threads may do in either order stands
on one line, sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, give, trainer_model
from ranks import run_ranks
from recorders import RecordedEngine, sent_messages
from torch import nn

from weightsync import CheckpointTransport, EngineError, LoraTransport, ManifestError, WeightSync, WeightSyncError

TIMEOUT_S = 20.0
PAUSES = ["keep", "wait", "abort"]
TRANSPORTS = ["ipc", "broadcast", "checkpoint"]


class FragileHost(ModuleHost):
    """A host whose loader raises while bytes are loaded, as long as `is_broken`."""

    is_broken = False

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        weights = list(weights)
        if self.is_broken and not any(tensor.is_meta for _, tensor in weights):
            raise MemoryError("no memory left to load this")
        return super().load_weights(model, weights)


@contextmanager
def pushing(
    transport: Any, folder: Path, pause: str = "keep", engines: int = 1
) -> Iterator[tuple[WeightSync, list[FragileHost], list[RecordedEngine]]]:
    """A `WeightSync` that sends the whole model as one chunk."""
    hosts = [FragileHost(TinyEngineModel, checkpoint(1)) for _ in range(engines)]
    with ExitStack() as stack:
        found = [RecordedEngine(host) for host in hosts]
        for engine in found:
            stack.callback(engine.close)
        way = CheckpointTransport(folder) if transport == "checkpoint" else transport
        bucketer = "threshold"
        sync = WeightSync("fsdp", way, found, bucketer=bucketer, pause=pause, timeout_s=TIMEOUT_S)
        yield stack.enter_context(sync), hosts, found


MARK = "mark POISONED: a push is under way, or its trainer has died\n"
FIRST = f"""\
init
pause {{pause}} + start
{MARK}update
finish {{version}} + reset caches
resume
"""
LATER = FIRST.removeprefix("init\n")
WITHDRAWN = f"""\
pause keep + start
{MARK}update
finish None
mark {{before}}
resume
"""
MISFIT = "init\n"
POISONED = f"""\
init
pause {{pause}} + start
{MARK}update
finish None
mark POISONED: the push of version {{version}} failed
"""


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_push_of_each_outcome_calls_the_engine_as_ever(transport: str, pause: str, tmp_path: Path) -> None:
    model = trainer_model(checkpoint(2))
    with pushing(transport, tmp_path, pause) as (sync, (host,), (engine,)):
        sync.push(model)
        assert engine.heard() == FIRST.format(pause=pause, version=1), "the first push"
        sync.push(model)
        assert engine.heard() == LATER.format(pause=pause, version=2), "a push of a model that stays where it is"
        # Where that ends no request, the engine pauses while it is looked whether the model has moved.
        early = WITHDRAWN if pause == "keep" else ""
        model.embed.weight = nn.Parameter(checkpoint(3)["embed.weight"])
        sync.push(model)
        assert engine.heard() == early.format(before=2) + FIRST.format(pause=pause, version=3), (
            "a push of a model that has moved"
        )
        sync.push(model)
        assert engine.heard() == LATER.format(pause=pause, version=4), "and stays there"
        give(model, {"unheard.of": nn.Parameter(torch.zeros(3))})
        with pytest.raises(ManifestError):
            sync.push(model)
        assert engine.heard() == early.format(before=4) + MISFIT, "a push that fails before anything is written"
        assert engine.version() == "4"
        del model.unheard
        host.is_broken = True
        with pytest.raises(WeightSyncError, match="no memory left to load this"):
            sync.push(model)
        assert engine.heard() == POISONED.format(pause=pause, version=5), "a push that fails while it is loaded"
        host.is_broken = False
        report = sync.push(model)
        assert engine.heard() == FIRST.format(pause=pause, version=report.version), "the push that heals"
        assert report.version >= 5
    expected = cold({**checkpoint(2), "embed.weight": checkpoint(3)["embed.weight"]})
    assert torch.equal(host.live.embed.weight, expected.embed.weight)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_push_that_one_of_two_engines_cannot_load_marks_both(transport: str, tmp_path: Path) -> None:
    model = trainer_model(checkpoint(2))
    with pushing(transport, tmp_path, engines=2) as (sync, hosts, engines):
        sync.push(model)
        assert [engine.heard() for engine in engines] == [FIRST.format(pause="keep", version=1)] * 2
        hosts[1].is_broken = True
        with pytest.raises(WeightSyncError, match="no memory left to load this"):
            sync.push(model)
        failed = POISONED.removeprefix("init\n").format(pause="keep", version=2)
        assert [engine.heard() for engine in engines] == [failed] * 2
        hosts[1].is_broken = False
        healed = sync.push(model).version
        assert [engine.heard() for engine in engines] == [FIRST.format(pause="keep", version=healed)] * 2


def test_push_that_one_of_two_engines_does_not_open_leaves_both_generating(tmp_path: Path) -> None:
    model = trainer_model(checkpoint(2))
    with pushing("ipc", tmp_path, engines=2) as (sync, _, (ready, refusing)):
        sync.push(model)
        ready.heard()
        refusing.heard()
        refusing.start_error = EngineError("an update is under way")
        with pytest.raises(EngineError, match="an update is under way"):
            sync.push(model)
        assert ready.heard() == "pause keep + start\nfinish None\nresume\n"
        assert refusing.heard().startswith("pause keep + start\n")
        assert refusing.log[-1] == "resume"
        assert [engine.version() for engine in (ready, refusing)] == ["1", "1"]
        refusing.start_error = None
        pushed = sync.push(model).version
        assert [engine.heard() for engine in (ready, refusing)] == [FIRST.format(pause="keep", version=pushed)] * 2


def test_push_that_one_of_two_engines_refuses_to_plan_calls_neither(tmp_path: Path) -> None:
    misfit = trainer_model({name: tensor for name, tensor in checkpoint(2).items() if name != "embed.weight"})
    give(misfit, {"embed.weight": nn.Parameter(torch.zeros(2, 6))})
    with pushing("broadcast", tmp_path, engines=2) as (sync, _, engines):
        with pytest.raises(ManifestError):
            sync.push(misfit)
        assert [engine.heard() for engine in engines] == [MISFIT] * 2


# ---------------------------------------------------------------------------------------------------------------
# Other strategies


class Plain(nn.Module):
    """Trainer and engine have it under the same names, so that a trainer can work in the engine's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def plain_weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"up.weight": torch.randn(6, 4, generator=draw), "down.weight": torch.randn(4, 6, generator=draw)}


def write(sync: WeightSync, model: Plain, error: Exception | None = None) -> None:
    with sync.writing(), torch.no_grad():
        model.up.weight.add_(1)
        if error is not None:
            raise error


@pytest.mark.parametrize("pause", PAUSES)
def test_writing_of_each_outcome_calls_the_engine_as_ever(pause: str) -> None:
    engine = RecordedEngine(ModuleHost(Plain, plain_weights()))
    with torch.device("meta"):
        model = Plain()
    with WeightSync("fsdp", "single_copy", engine, pause=pause, timeout_s=TIMEOUT_S) as sync:
        sync.attach(model)
        assert engine.heard() == "init\n", "attached"
        for version in (1, 2):
            write(sync, model)
            assert engine.heard() == LATER.format(pause=pause, version=version), "written"
        sync.push(model)
        assert engine.heard() == LATER.format(pause=pause, version=3), "pushed"
        with pytest.raises(WeightSyncError, match="out of patience"):
            write(sync, model, ValueError("out of patience"))
        assert engine.heard() == POISONED.removeprefix("init\n").format(pause=pause, version=4), "failed inside"
        write(sync, model)
        assert sync.last_report is not None
        assert engine.heard() == FIRST.format(pause=pause, version=sync.last_report.version), "the write that heals"
    assert torch.equal(engine.hosts[0].live.up.weight, plain_weights()["up.weight"] + 1 + 1 + 1 + 1)
    engine.close()


def test_push_of_adapters_calls_nothing_but_adapters(tmp_path: Path) -> None:
    import peft

    engine = RecordedEngine(ModuleHost(Plain, plain_weights()))
    model = peft.get_peft_model(Plain(), peft.LoraConfig(r=2, target_modules=["up", "down"]))
    with WeightSync("fsdp", LoraTransport(folder=tmp_path / "adapters"), engine, timeout_s=TIMEOUT_S) as sync:
        heard = []
        for _ in range(4):
            sync.push(model)
            heard.append(engine.heard())
    first, later = "load adapter\n", "load adapter\nunload adapter\n"
    assert heard == [first, first, later, later]
    engine.close()


# ---------------------------------------------------------------------------------------------------------------
# Messages


class Rows(nn.Module):
    """An engine's model of many small tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.empty(4)) for _ in range(count)])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def count_messages(rank: int, transport: str) -> None:
    counts = []
    for size in (10, 1000):
        tensors = {f"rows.{number}": torch.full((4,), float(number)) for number in range(size)}
        engine = None
        if rank == 0:
            engine = RecordedEngine(ModuleHost(lambda size=size: Rows(size), tensors))
        model = trainer_model(tensors)
        with WeightSync("fsdp", transport, engine, bucketer="parameter", timeout_s=TIMEOUT_S) as sync:
            sync.push(model)
            sync.push(model)
            with sent_messages() as sent:
                report = sync.push(model)
            assert report.chunks == size
            counts.append(sent)
        if engine is not None:
            engine.close()
    if rank == 0:
        assert counts[0] == counts[1], f"10 chunks: {dict(counts[0])}; 1,000 chunks: {dict(counts[1])}"
        assert 0 < counts[0].total() <= 20 + 10 * torch.distributed.get_world_size()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_push_of_any_number_of_chunks_sends_as_many_messages(transport: str, ranks: int) -> None:
    run_ranks(count_messages, ranks, transport)
