"""A push of tensors that a GPU still copies to the CPU, as after `model.to("cpu", non_blocking=True)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import peft
import pytest
import tiny_models
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model

from weightsync import TensorSelection, WeightSync
from weightsync.sources import open_source
from weightsync.sources.adapter import read_lora


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Return a list of copies, made when this process waits for its GPU."""
    pending: list[Callable[[], Any]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: [pending.pop(0)() for _ in [*pending]])
    return pending


def test_a_push_waits_for_them(copies: list[Callable[[], Any]]) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    model = trainer_model(checkpoint(1))
    with WeightSync("fsdp", "ipc", engine) as sync:
        for number in (2, 3):  # the tensors of the second push are those remembered from the first
            copies.append(partial(model.load_state_dict, checkpoint(number)))
            sync.push(model)
            live, expected = engine.hosts[0].live.parameters(), cold(checkpoint(number)).parameters()
            assert all(map(torch.equal, live, expected))
    engine.close()


@pytest.mark.parametrize("is_iterator", [False, True])
def test_a_stream_is_read_after_them(copies: list[Callable[[], Any]], is_iterator: bool) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint(2).items():
            coming = torch.zeros_like(tensor)
            copies.append(partial(coming.copy_, tensor))
            yield name, coming

    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with WeightSync("stream", "ipc", engine) as sync:
        sync.push(stream() if is_iterator else stream)
        assert all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(2)).parameters()))
    engine.close()


def test_an_adapter_is_read_after_them(copies: list[Callable[[], Any]]) -> None:
    model = peft.get_peft_model(tiny_models.build("qwen3", "A"), peft.LoraConfig(target_modules=["q_proj"]))
    factors = [param for param in model.parameters() if param.requires_grad]
    copies.append(lambda: [factor.data.fill_(2.0) for factor in factors])
    reading, *_ = read_lora(open_source("fsdp", TensorSelection(), "alone"), model, False)
    assert [shard.tensor.unique().tolist() for shard in reading.shards] == [[2.0]] * len(factors)
