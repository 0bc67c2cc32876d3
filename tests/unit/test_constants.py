"""What an engine's constructors compute and register nowhere, and what of it comes back after sleep."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from weightsync.vllm.constants import NotedConstants, unregistered

LARGE = 2**21  # float32 elements, 8 MiB


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = torch.ones(4)
        self.q_range = torch.tensor(200.0)
        self.impl = SimpleNamespace(alibi_slopes=torch.arange(4.0), scale=0.5, sinks=None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.ones(3))
        self.alias, self.part = self.weight, self.weight.data[2:]
        self.ones, self.empty = torch.ones(5), torch.empty(0)
        self.states = [torch.zeros(LARGE), torch.full((LARGE,), 7.0)]
        self.attention = Attention()


def test_constants_come_back_and_nothing_else_is_written():
    model = Model()
    constructed = {place: tensor.shape for place, tensor in unregistered(Model()).items()}
    assert [f"{at}.{key}{n}" for at, key, n in constructed] == [
        ".part0", ".ones0", ".states0", ".states1", "attention.impl.alibi_slopes0",
    ]  # fmt: skip
    model.made = torch.ones(2)  # of weights, after the constructor
    noted = NotedConstants([model], [""])
    tensors = [model.ones, *model.states, model.attention.impl.alibi_slopes, model.part, model.made, model.table]
    tensors += [model.attention.kv_cache, model.attention.q_range]
    for tensor in tensors:
        tensor.fill_(-1)
    noted.restore(constructed)
    assert [tensor.unique().tolist() for tensor in tensors] == [
        [1.0], [0.0], [-1.0], [0.0, 1.0, 2.0, 3.0], [-1.0], [-1.0], [-1.0], [-1.0], [-1.0],
    ]  # fmt: skip


def test_a_tensor_of_another_shape_than_the_constructors_is_left_alone():
    model = Model()
    noted = NotedConstants([model], [""])
    model.ones.fill_(-1)
    noted.restore({("", "ones", 0): torch.Size([4])})
    assert model.ones.tolist() == [-1.0] * 5
