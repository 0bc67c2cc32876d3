"""Trainers that torchao has prepared for 8 bits: the bfloat16 values in its wrappers travel."""

from __future__ import annotations

from typing import Any

import tiny_models
import torch
from quantizers import find_quantizers, need_quantizers
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from weightsync import TensorSelection
from weightsync.sources import open_source


def prepare(model: nn.Module, way: str) -> None:
    """Let torchao wrap the weights of the linear layers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.moe_training import config
    from torchao.quantization import quantize_

    if way == "float8 gather":
        gather = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=gather, module_filter_fn=lambda module, name: "lm_head" not in name)
    else:
        kind = config.Float8TrainingOpConfig if way == "float8 product" else config.MXFP8TrainingOpConfig
        quantize_(model, kind(), filter_fn=lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name)


def pieces_of(source: Any, model: nn.Module) -> dict[str, list[tuple[Any, torch.Tensor]]]:
    found: dict[str, list[tuple[Any, torch.Tensor]]] = {}
    for shard in source.read(model).shards:
        assert type(shard.tensor) is torch.Tensor
        region = tuple(slice(a, a + n) for a, n in zip(shard.box.start, shard.box.size, strict=True))
        found.setdefault(shard.meta.name, []).append((region, shard.tensor))
    return found


def check_each(rank: int) -> None:
    find_quantizers()
    for way in ("float8 gather", "float8 product", "mxfp8 product"):
        model = tiny_models.build("qwen3", "A")
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        prepare(model, way)
        assert any(type(param) is not nn.Parameter for param in model.parameters())
        check(model, expected)
        for layer in model.model.layers:
            fully_shard(layer)
        check(fully_shard(model), expected)


def check(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    source = open_source("fsdp", TensorSelection())
    for _ in range(2):
        pieces = pieces_of(source, model)
        assert pieces.keys() == expected.keys()
        for name, views in pieces.items():
            assert all(torch.equal(view, expected[name][region]) for region, view in views), name
        step(model, expected)
    assert source.read(model) is source.read(model)


def step(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Double every weight in place, as an optimizer writes."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.mul_(2)
            expected[name] *= 2


def test_the_values_inside_of_wrappers_travel():
    need_quantizers()
    run_ranks(check_each, 2)
