"""What a trainer's loop is inside of when it pushes changes no byte: neither of this push, nor of the next outside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_trainer import LinearTrainer, with_adapter
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold
from safetensors.torch import load_file
from torch import nn
from torch._functorch import eager_transforms
from torch._functorch.vmap import vmap_increment_nesting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from weightsync import CheckpointTransport, TensorSelection, WeightSync, save
from weightsync.sources import open_source
from weightsync.sources.quantize import FORMS, QuantizingSource
from weightsync.tools.testing import check_source

TIMEOUT_S = 30.0


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # or `get_default_device` of torch 2.8 fails from now on


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "a mode of functions": Watching,
    "a mode of operators": lambda: FlopCounterMode(display=False),
    "fake tensors": FakeTensorMode,
    "torch.func.grad": eager_transforms.grad_increment_nesting,
    "torch.func.jvp": eager_transforms.jvp_increment_nesting,
    "torch.func.vmap": lambda: vmap_increment_nesting(2, "error"),
}
TRANSPORTS = ["ipc", "broadcast", "checkpoint"]


def train_plain(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Change every parameter, and return them."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=draw))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def train(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Change every parameter, and return the weights that a cold engine starts from."""
    train_plain(model, seed)
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_push_is_the_same_inside_of_every_mode(
    transport: str, mode: Callable[[], AbstractContextManager[Any]], tmp_path: Path
) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    model = with_adapter()
    way = CheckpointTransport(tmp_path) if transport == "checkpoint" else transport
    with WeightSync("fsdp", way, engine, timeout_s=TIMEOUT_S, verify="full") as sync:
        for seed, inside in enumerate([mode, nullcontext, mode]):
            expected = cold(train(model, seed))
            with inside():
                sync.push(model)
            assert all(map(torch.equal, engine.hosts[0].live.parameters(), expected.parameters()))
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_quantised_alike_under_another_default_dtype(form: str, dtype: torch.dtype) -> None:
    model = LinearTrainer()
    expected = {}
    for name, tensor in train_plain(model, 3).items():
        expected[name] = tensor
        if TensorSelection().quantizes(name) and tensor.dim() == 2:
            expected[name], expected[f"{name}_scale"] = FORMS[form](tensor.bfloat16())

    def source(selection: TensorSelection) -> QuantizingSource:
        return QuantizingSource(open_source("fsdp", selection), form, selection, lambda values: None)

    with default_dtype(dtype):
        check_source(source, model, expected)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_checkpoint_is_the_same_too(mode: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    model = with_adapter()
    expected = train(model, 2)
    with mode():
        save(model, tmp_path / "saved")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
