"""An engine whose model has a drafter out of the same checkpoint, without vLLM: what is pushed into which of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost
from torch import nn

from weightsync import WeightSync
from weightsync.errors import ManifestError
from weightsync.worker.engine_model import DRAFTER

TIMEOUT_S = 20.0
MODELS_OWN = ("embed.weight", "layer.weight")
DRAFTERS_OWN = ("mtp.fc.weight", "mtp.layer.weight")
COPY = "mtp.embed.weight"
"""In the checkpoint the drafter has an embedding too. The engine has it use the model's."""


class Drafter(nn.Module):
    """Reads what the checkpoint has under "mtp", and says when that is nothing."""

    def __init__(self, embed: nn.Module, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.layer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.embed, self.write = embed, write

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            if name.startswith("mtp."):
                loaded.add(name)
                self.write(params[name.removeprefix("mtp.")].data, tensor)
            elif name == "embed.weight":
                params[name].data.copy_(tensor)
        if not loaded:
            raise ValueError("the weights of mtp are missing")


class Model(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(6, 4), nn.Linear(4, 4, bias=False)
        self.add_module(DRAFTER, Drafter(self.embed, write))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if name in MODELS_OWN and name in params:
                params[name].data.copy_(tensor)


class LastStage(Model):
    """Has no embedding, as the first stage has it. Its drafter has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Identity()  # type: ignore[assignment]
        self.get_submodule(DRAFTER).embed = nn.Embedding(6, 4)


class Host(ModuleHost):
    def __init__(self, tensors: dict[str, torch.Tensor], make: Callable[[], nn.Module], **options: Any) -> None:
        super().__init__(make, {}, **options)
        with torch.no_grad():
            for model in (self.live.get_submodule(DRAFTER), self.live):
                model.load_weights(tensors.items())  # type: ignore[operator]
            for module in self.live.modules():
                self.post_process(module)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys((*MODELS_OWN, *DRAFTERS_OWN), (4, 4)) | {"embed.weight": (6, 4), COPY: (6, 4)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return tensors | {COPY: tensors["embed.weight"].clone()}


def trainer_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, key = name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(key, nn.Parameter(tensor))
    return model


def state(host: Host) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in host.live.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def doubled(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(module.weight.data * 2, requires_grad=False)


PATHS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[nn.Module], None]]] = {
    "in_place": (torch.Tensor.copy_, lambda module: None),
    "reload": (torch.Tensor.copy_, doubled),
    "native_loader": (lambda param, tensor: param.copy_(tensor * 3), lambda module: None),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_push_fills_the_drafter_by_its_own_loader(path: str, caplog: pytest.LogCaptureFixture):
    write, post_process = PATHS[path]
    caplog.set_level("INFO", "weightsync")

    def make() -> nn.Module:
        return Model(write)

    a, b = checkpoint(1), checkpoint(2)
    host = Host(a, make, post_process=post_process)
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        for tensors in (b, a, b):
            report = sync.push(trainer_of(tensors))
            assert report.load_paths[path] >= 2
            assert_equal(state(host), state(Host(tensors, make, post_process=post_process)))
    told = [record.getMessage() for record in caplog.records]
    assert any(f"1 tensors are not loaded, such as {COPY}" in line for line in told)
    assert not any("drafter" in line for line in told)


@pytest.mark.parametrize(
    ("make", "without"),
    [(Model, (*DRAFTERS_OWN, COPY)), (Model, DRAFTERS_OWN), (LastStage, (*DRAFTERS_OWN, COPY))],
)
def test_a_drafter_that_the_trainer_lacks_stays_as_it_was(
    make: Callable[[], nn.Module], without: tuple[str, ...], caplog: pytest.LogCaptureFixture
):
    a, b = checkpoint(1), checkpoint(2)
    host = Host(a, make)
    new = {
        "embed.weight": b["embed.weight"],
        "drafter.embed.weight": b["embed.weight"],
        "layer.weight": b["layer.weight"],
    }
    expected = state(host)
    expected |= {name: tensor for name, tensor in new.items() if name in expected}
    some = {name: tensor for name, tensor in b.items() if name not in without}
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_of(some))
        sync.push(trainer_of(some))
    assert_equal(state(host), expected)
    (told,) = [record.getMessage() for record in caplog.records if "drafter" in record.getMessage()]
    assert told.startswith("2 parameters of the engine's drafter keep their values, such as drafter.fc.weight:")


def refused(sync: WeightSync, tensors: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        sync.push(trainer_of(tensors))


def test_a_drafter_that_the_trainer_has_a_part_of_is_refused():
    host = Host(checkpoint(1), Model)
    some = {name: tensor for name, tensor in checkpoint(2).items() if name != "mtp.fc.weight"}
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        refused(sync, some, r"Missing 1: drafter\.fc\.weight")


def test_what_neither_takes_is_refused():
    host = Host(checkpoint(1), Model)
    more = checkpoint(2) | {"mtp.other.weight": torch.zeros(4), "other.weight": torch.zeros(4)}
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        refused(sync, more, r"Unexpected 2: mtp\.other\.weight, other\.weight")
