"""A reload without vLLM: it holds one module at a time, and nothing that the engine works with moves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from enum import Enum

import pytest
import torch
from fake_engine import ModuleHost
from memory_trainer import MemoryTrainer
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.net.wire import POISONED
from weightsync.worker import reload
from weightsync.worker.module_groups import find_groups
from weightsync.worker.probe_load_paths import probe_groups
from weightsync.worker.reachable import Counterparts, addresses, diff_objects

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
    original = reload.materialise

    def counted(param: nn.Parameter, device: torch.device) -> nn.Parameter:
        nonlocal most
        fresh = original(param, device)
        alive.add(fresh)
        most = max(most, len(alive))
        return fresh

    monkeypatch.setattr(reload, "materialise", counted)
    made = repacked_host(restless=False)
    new = Repacked().state_dict()
    for max_bytes in (1, 20, 1 << 30):
        MemoryTrainer(made, tensors=new, max_bytes=max_bytes).push()
    assert most == (1 if max_bytes < 1 << 30 else len(made.live.layers))
    assert torch.equal(made.live.layers[3].weight, new["layers.3.weight"].t())


def test_a_push_that_moves_a_tensor_fails_and_poisons():
    made = repacked_host(restless=True)
    trainer = MemoryTrainer(made, tensors=Repacked().state_dict())
    with pytest.raises(UnsupportedError, match=r"layers\.0\.workspaces\.own"):
        trainer.push()
    assert trainer.receivers[0].state == POISONED


class Backend(Enum):
    PLAIN, SWAPPED = 1, 2


class TwoBackends(Repacked):
    """Equal layers, of which the last one has another kernel: it wants the halves of its weight swapped."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            layer.backend = Backend.SWAPPED if number == 3 else Backend.PLAIN


def swap(module: nn.Module) -> None:
    if getattr(module, "backend", None) is Backend.SWAPPED:
        module.weight.data.copy_(module.weight.data.roll(ROWS // 2, 0))


def test_layers_with_other_kernels_are_tried_apart():
    made = ModuleHost(TwoBackends, TwoBackends().state_dict(), swap)
    new = TwoBackends().state_dict()
    MemoryTrainer(made, tensors=new).push()
    assert torch.equal(made.live.layers[0].weight, new["layers.0.weight"])
    assert torch.equal(made.live.layers[3].weight, new["layers.3.weight"].roll(ROWS // 2, 0))


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
    del module.kernel.attribute
    assert paths.items() - addresses({"layer": module}, set(), set()).items() == {
        ("layer.kernel.attribute", paths["layer.kernel.attribute"])
    }


class Rebuilt:
    """A kernel's object, which is made anew for new weights. With `number` it keeps a number that depends on them."""

    def __init__(self, weight: torch.Tensor, number: bool) -> None:
        self.packed = {"weight": weight.t().contiguous()}
        self.strides = torch.tensor(weight.t().stride())
        packed = self.packed["weight"]
        self.run = lambda x: x @ packed
        self.largest = weight.abs().max().item() if number else 1.0


def rebuild(module: nn.Module, number: bool) -> None:
    if isinstance(module, nn.Linear):
        module.kernel = Rebuilt(module.weight.data, number)
        module.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def rebuilt_host(number: bool) -> ModuleHost:
    return ModuleHost(Repacked, Repacked().state_dict(), functools.partial(rebuild, number=number))


def test_an_object_that_is_made_anew_keeps_its_tensors_and_gets_their_contents():
    made = rebuilt_host(number=False)
    kernels = [layer.kernel for layer in made.live.layers]
    before = addresses({"model": made.live}, set(), set())
    assert "model.layers.0.kernel.run.packed" in before or "model.layers.0.kernel.packed.weight" in before
    new = Repacked().state_dict()
    trainer = MemoryTrainer(made, tensors=new)
    for _ in range(2):
        trainer.push()
    assert addresses({"model": made.live}, set(), set()) == before
    for number, (layer, kernel) in enumerate(zip(made.live.layers, kernels, strict=True)):
        assert layer.kernel is kernel
        assert torch.equal(kernel.packed["weight"], new[f"layers.{number}.weight"].t())
        assert torch.equal(kernel.run(torch.eye(COLUMNS)), kernel.packed["weight"])


def test_what_cannot_be_filled_again_is_made_anew_on_a_cpu():
    """On a GPU it is refused: a CUDA graph has captured the number."""
    made = rebuilt_host(number=True)
    new = Repacked().state_dict()
    MemoryTrainer(made, tensors=new).push()
    for number, layer in enumerate(made.live.layers):
        assert layer.kernel.largest == new[f"layers.{number}.weight"].abs().max().item()
    groups = find_groups(made.live, made.pristine())
    probe_groups(groups, made)
    assert all(group.opaque for group in groups)


class Pointing:
    """Knows where the scale lies, and does not hold it: as an object of a library in C++ does."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = weakref.ref(scale)


def point(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.scale = nn.Parameter(module.weight.data.abs().amax(1), requires_grad=False)
        module.kernel = Pointing(module.scale)


def test_what_a_new_object_points_to_stays():
    made = ModuleHost(Repacked, Repacked().state_dict(), point)
    new = Repacked().state_dict()
    trainer = MemoryTrainer(made, tensors=new)
    for _ in range(2):
        trainer.push()
    for number, layer in enumerate(made.live.layers):
        for scale in (layer.kernel.scale(), layer.scale):
            assert torch.equal(scale, new[f"layers.{number}.weight"].abs().amax(1))


class Handle:
    """A tensor of it holds the address of something that is freed with it."""

    def __init__(self) -> None:
        self.pointer = torch.zeros(1, dtype=torch.int64)

    def __del__(self) -> None:
        pass


def test_counterparts_say_what_differs():
    found = diff_objects(Handle(), Handle(), "handle", set())
    assert found == Counterparts([], [], ["handle, a Handle, has a finaliser"])
    old, new = Rebuilt(torch.randn(3, 4), True), Rebuilt(torch.randn(4, 3), True)
    found = diff_objects(old, new, "kernel", set())
    assert [path for path, *_ in found.tensors] == ["kernel.strides"]
    assert any(text.startswith("kernel.largest is now") for text in found.differ)
    assert any("packed" in text and "is now (3, 4)" in text for text in found.differ)
    assert diff_objects({"a": old}, {"a": old}, "same", set()) == Counterparts()
    assert diff_objects(old, new, "kernel", {id(old)}) == Counterparts()
    spread = torch.zeros(1).expand(3)
    assert diff_objects(spread, torch.ones(1).expand(3), "x", set()).closed == [
        "x has elements that share their memory"
    ]
