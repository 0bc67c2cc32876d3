"""A reload without vLLM: it holds one module at a time, and nothing that the engine works with moves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, PlainTrainer
from torch import nn

from weightsync import UnsupportedError, WeightSync
from weightsync.receiver import modules
from weightsync.receiver.audit import addresses, moved
from weightsync.receiver.receiver import POISONED

TIMEOUT_S = 10.0
ROWS, COLUMNS = 6, 4


class Repacked(nn.Module):
    """Each layer's weight is transposed after it was loaded; with `restless` a workspace in a dict is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(4))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


def repack(module: nn.Module, restless: bool) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(module.weight.data.t().contiguous(), requires_grad=False)
        held = module.__dict__.setdefault("workspaces", {})
        if restless or "own" not in held:
            held["own"] = torch.zeros(3)


def repacked_host(restless: bool) -> ModuleHost:
    made = ModuleHost(Repacked, Repacked().state_dict(), functools.partial(repack, restless=restless))
    for module in made.pristine().modules():
        if isinstance(module, nn.Linear):
            module.workspaces = {"own": torch.zeros(3)}
    return made


def test_scratch_memory_is_that_of_one_module(monkeypatch: pytest.MonkeyPatch):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    original = modules._materialise

    def counted(param: nn.Parameter, device: torch.device) -> nn.Parameter:
        nonlocal most
        fresh = original(param, device)
        alive.add(fresh)
        most = max(most, len(alive))
        return fresh

    monkeypatch.setattr(modules, "_materialise", counted)
    made = repacked_host(restless=False)
    new = Repacked().state_dict()
    for options in ({"bucketer": "module", "max_bytes": 1}, {"bucketer": "threshold", "max_bytes": 1 << 30}):
        engine = FakeEngine(made)
        with WeightSync("fsdp", "broadcast", engine, timeout_s=TIMEOUT_S, **options) as sync:
            sync.push(PlainTrainer(dict(new)))
        engine.close()
    assert most == 1
    assert torch.equal(made.live.layers[3].weight, new["layers.3.weight"].t())


def test_a_push_that_moves_a_tensor_fails_and_poisons():
    made = repacked_host(restless=True)
    engine = FakeEngine(made)
    try:
        with (
            WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync,
            pytest.raises(UnsupportedError, match=r"layers\.0\.workspaces\.own"),
        ):
            sync.push(PlainTrainer(dict(Repacked().state_dict())))
        assert engine.conversations[0].receiver.state == POISONED
    finally:
        engine.close()


class Kernel:
    """Keeps tensors in the ways that kernels do."""

    def __init__(self) -> None:
        in_closure, in_partial = torch.zeros(1), torch.zeros(2)
        self.attribute = torch.zeros(3)
        self.nested = {"list": [torch.zeros(4)]}
        self.function = lambda: in_closure
        self.partial = functools.partial(max, in_partial)
        self.bound = self.nested["list"].append
        self.method = Inner().run
        self.itself = self


class Inner:
    def __init__(self) -> None:
        self.held = torch.zeros(5)

    def run(self) -> torch.Tensor:
        return self.held


def test_every_place_that_can_hold_a_tensor_is_looked_into():
    module = nn.Linear(2, 3)
    module.register_buffer("mask", torch.zeros(6))
    module.kernel = Kernel()
    paths = addresses({"layer": module}, set(), set())
    assert paths.keys() == {
        "layer.weight",
        "layer.bias",
        "layer.mask",
        "layer.kernel.attribute",
        "layer.kernel.nested.list.0",
        "layer.kernel.function.in_closure",
        "layer.kernel.partial.argument0",
        "layer.kernel.method.self.held",
    }
    assert moved(paths, paths | {"layer.new": 1}) == []
    assert moved(paths, paths | {"layer.mask": 1}) == ["layer.mask"]
    del module.kernel.attribute
    assert moved(paths, addresses({"layer": module}, set(), set())) == ["layer.kernel.attribute"]
