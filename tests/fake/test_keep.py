"""Parts of an engine that pushes leave alone: `TensorSelection.keep`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from unittest import mock

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, fail_once_after
from torch import nn

from weightsync import ConfigError, ManifestError, TensorSelection, UnsupportedError, WeightSync, WeightSyncError
from weightsync.net.wire import POISONED
from weightsync.strategies.restart import CheckpointTransport


class Engine(nn.Module):
    """A text model beside a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 2)
        self.text = nn.Linear(6, 4, bias=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            dict(self.named_parameters())[name].data.copy_(tensor)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(6, 4, bias=False)


def push(model: nn.Module, keep: Sequence[str], host: ModuleHost, **selection: Sequence[str]) -> None:
    engine = FakeEngine(host)
    try:
        chosen = TensorSelection(keep=keep, **selection)
        with WeightSync("fsdp", "ipc", engine, selection=chosen, timeout_s=10.0) as sync:
            sync.push(model)
            with torch.no_grad():
                model.text.weight.mul_(2)
            sync.push(model)
    finally:
        engine.close()


def test_the_engine_keeps_what_the_selection_names():
    host = ModuleHost(Engine, Engine().state_dict())
    before, model = {name: param.clone() for name, param in host.live.named_parameters()}, Text()
    push(model, ["tower.*"], host)
    assert torch.equal(host.live.text.weight, model.text.weight)
    for name in ("tower.weight", "tower.bias"):
        assert torch.equal(host.live.get_parameter(name), before[name])


@pytest.mark.parametrize(
    ("make", "keep", "words"),
    [
        (Text, [], r"Missing 2: tower.weight, tower.bias. TensorSelection\(keep=...\)"),
        (Text, ["tower.bias"], "Missing 1: tower.weight"),
        (Text, ["tower.*", "visual.*"], r"keep=\['visual.\*'\]: no module of the engine"),
        (Engine, ["tower.*"], r"tower.weight \(TensorSelection.keep leaves tower.weight alone"),
        (Engine, ["text.*"], "text.weight"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(make: type[nn.Module], keep: list[str], words: str):
    host = ModuleHost(Engine, Engine().state_dict())
    before = host.live.text.weight.clone()
    with pytest.raises(ManifestError, match=words):
        push(make(), keep, host)
    assert torch.equal(host.live.text.weight, before)


def test_a_module_that_is_pushed_in_part_keeps_nothing():
    host = ModuleHost(Engine, Engine().state_dict())
    with pytest.raises(ManifestError, match=r"Missing 1: tower\.bias"):
        push(Engine(), ["tower.bias"], host, exclude=["tower.bias"])


def test_a_worker_whose_part_was_never_loaded_refuses():
    host = ModuleHost(Engine, Engine().state_dict())
    lost = mock.patch.object(host, "find_lost", side_effect=UnsupportedError("made up"))
    with lost as find_lost, pytest.raises(UnsupportedError, match="made up"):
        push(Text(), ["tower.*"], host)
    assert find_lost.call_args.args == ({"text.weight"}, ["tower.weight", "tower.bias"])


def test_every_push_asks_whether_the_part_is_still_there():
    host = ModuleHost(Engine, Engine().state_dict())
    model, asked = Text(), list[list[str]]()
    filled = torch.full_like(model.text.weight, 3)

    def check_kept(kept: Sequence[str]) -> None:
        asked.append(list(kept))
        if len(asked) == 2:
            raise UnsupportedError("lost")
        model.text.weight.data.copy_(filled)

    with mock.patch.object(host, "check_kept", check_kept), pytest.raises(UnsupportedError, match="lost"):
        push(model, ["tower.*"], host)
    assert asked == [["tower.weight", "tower.bias"]] * 2
    assert torch.equal(host.live.text.weight, filled), "a refused push has written"


def test_what_a_failed_push_has_written_is_not_kept():
    host, selection = ModuleHost(Engine, Engine().state_dict()), TensorSelection(keep=["tower.*"])
    whole, text = Engine(), Text()
    with closing(FakeEngine(host)) as engine:
        (session,) = engine.sessions
        with WeightSync("fsdp", "ipc", engine, timeout_s=10.0) as sync:
            fail_once_after(session.receiver, 0)
            with pytest.raises(WeightSyncError, match="no memory left"):
                sync.push(whole)
        with WeightSync("fsdp", "ipc", engine, selection=selection, timeout_s=10.0) as sync:
            with pytest.raises(UnsupportedError, match=r"earlier push had tensors for tower\.bias, tower\.weight"):
                sync.push(text)
            assert session.receiver.state == POISONED
        with WeightSync("fsdp", "ipc", engine, timeout_s=10.0) as sync:
            sync.push(whole)
        with WeightSync("fsdp", "ipc", engine, selection=selection, timeout_s=10.0) as sync:
            sync.push(text)
    assert torch.equal(host.live.tower.weight, whole.tower.weight)
    assert torch.equal(host.live.text.weight, text.text.weight)


@pytest.mark.parametrize("transport", ["lora", CheckpointTransport("unused")])
def test_transports_without_a_use_for_it_refuse(transport: object):
    with pytest.raises(ConfigError, match="keep"):
        WeightSync("fsdp", transport, selection=TensorSelection(keep=["tower.*"]))
