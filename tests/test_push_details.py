"""What a push must not forget: constants that only the loader knows, other engines' dtypes, the engine's dice."""

from __future__ import annotations

import functools
from contextlib import ExitStack, closing

import pytest
import torch
from fake_engine import ROWS, EngineModel, FakeEngine, ModuleHost, checkpoint, cold, trainer_model
from torch import nn

from weightsync import WeightSync
from weightsync.layout import Manifest, TensorMeta
from weightsync.receiver.receiver import Receiver

TIMEOUT_S = 10.0


class OneWeight(nn.Module):
    """An engine's model that holds its one tensor in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4, dtype=dtype))

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            dict(self.named_parameters())[name].data.copy_(tensor)


def test_padding_is_set_in_an_engine_that_never_loaded_any() -> None:
    host = ModuleHost(EngineModel, checkpoint(1))
    with torch.no_grad():
        host.live.embed.weight.fill_(7.0)  # as `load_format="dummy"` leaves it
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert torch.equal(host.live.embed.weight, cold(checkpoint(2)).embed.weight)
    assert not host.live.embed.weight[ROWS:].any()


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_each_engine_gets_all_that_its_dtype_holds(dtypes: tuple[torch.dtype, ...], transport: str) -> None:
    old, new = torch.zeros(8, 4), torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    hosts = [ModuleHost(functools.partial(OneWeight, dtype), {"weight": old}) for dtype in dtypes]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(FakeEngine(host))) for host in hosts]
        sync = stack.enter_context(WeightSync("fsdp", transport, engines, timeout_s=TIMEOUT_S))
        sync.push(trainer_model({"weight": new}))
    for host, dtype in zip(hosts, dtypes, strict=True):
        assert torch.equal(host.live.weight, new.to(dtype))


def test_planning_leaves_the_engines_random_numbers_alone() -> None:
    tensors = checkpoint(2)
    manifest = Manifest(tuple(TensorMeta(name, tuple(t.shape), "float32") for name, t in tensors.items()))
    receiver = Receiver(ModuleHost(EngineModel, checkpoint(1)))
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    receiver.plan(manifest)
    assert torch.equal(torch.rand(4), expected)
