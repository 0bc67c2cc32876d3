"""A stream of whole tensors equals cold: what frameworks hand over that gather a sharded model tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Engines, Remote, Trainer, Trainers, assert_same

from weightsync import StreamBackend, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def whole_tensors(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in trainer.model.state_dict().items():
        yield name, tensor.full_tensor()


def load(trainer: Trainer, transport: str, is_known: bool) -> None:
    trainer.release()
    trainer.model = tiny_models.build("qwen3", "A", torch.bfloat16)
    given = {name: tensor.to("meta") for name, tensor in trainer.model.state_dict().items()} if is_known else None
    tiny_models.shard(trainer.model)
    stream = StreamBackend(given)
    trainer.sync = WeightSync(stream, transport, trainer.engine, timeout_s=TIMEOUT_S, max_bytes=1 << 16)


def push(trainer: Trainer, weights: str) -> int:
    tiny_models.fill(trainer.model, weights)
    return trainer.sync.push(whole_tensors(trainer)).chunks


@pytest.mark.parametrize(("transport", "is_known"), [("ipc", False), ("broadcast", True)])
def test_what_two_ranks_gather_tensor_by_tensor_equals_cold(
    engines: Remote, trainers: Trainers, transport: str, is_known: bool
):
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    trainers.call(load, transport, is_known)
    for weights in "BAB":
        assert trainers.call(push, weights)[0] > 3
        assert_same(engines.call(Engines.ask), cold[weights], weights)
