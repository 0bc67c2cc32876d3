"""Engines from 8-bit checkpoints, without vLLM: which of the trainer's tensors become pairs of values and scales."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, PlainTrainer
from torch import nn

from weightsync import ManifestError, WeightSync
from weightsync.kernels.quantize import fp8_per_block, fp8_per_channel, int8_per_channel

TIMEOUT_S = 10.0
FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 256, 128


class Layer(nn.Module):
    """Two weights of `ROWS / 2` rows fused into one, and the scales beside it."""

    def __init__(self, dtype: torch.dtype, suffix: str, scales: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype), requires_grad=False)
        self.register_parameter("weight" + suffix, nn.Parameter(torch.zeros(scales), requires_grad=False))
        if suffix == "_scale_inv":
            self.weight_block_size = [128, 128]


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, suffix: str, scales: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype, suffix, scales) for _ in range(3))
        self.norm = nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            half = 1 if ".up." in name else 0
            target = params[name.replace(".gate.", ".").replace(".up.", ".")].data
            if name != "norm":
                rows = target.shape[0] // 2
                target = target[half * rows : (half + 1) * rows]
            assert target.shape == tensor.shape
            target.copy_(tensor)


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    names = [f"layers.{n}.{half}.weight" for n in range(3) for half in ("gate", "up")]
    shape = (ROWS // 2, COLUMNS)
    return {name: torch.randn(shape, generator=draw).bfloat16() for name in names} | {"norm": torch.randn(4)}


SCHEMES = {
    "fp8 per channel": (FP8, "_scale", (ROWS, 1), fp8_per_channel),
    "int8 per channel": (torch.int8, "_scale", (ROWS, 1), int8_per_channel),
    "fp8 per block": (FP8, "_scale_inv", (2, 1), fp8_per_block),
}


def in_8_bits(tensors: dict[str, torch.Tensor], suffix: str, quantise: Any) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name != "norm":
            found[name], found[name + suffix] = quantise(tensor.bfloat16())
    return found


def host(scheme: str) -> ModuleHost:
    dtype, suffix, scales, quantise = SCHEMES[scheme]
    made = ModuleHost(functools.partial(Model, dtype, suffix, scales), in_8_bits(weights(0), suffix, quantise))
    made.dtype = torch.bfloat16
    return made


def push(made: ModuleHost, tensors: dict[str, torch.Tensor], **options: Any) -> Any:
    engine = FakeEngine(made)
    try:
        with WeightSync("fsdp", "broadcast", engine, timeout_s=TIMEOUT_S, **options) as sync:
            return sync.push(PlainTrainer(tensors))
    finally:
        engine.close()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("travels_as", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_engine_quantises_as_the_checkpoint_was(scheme: str, travels_as: torch.dtype):
    _, suffix, _, quantise = SCHEMES[scheme]
    made, new = host(scheme), weights(1)
    report = push(made, {name: tensor.to(travels_as) for name, tensor in new.items()}, bucketer="parameter")
    assert report.roads == {"in place": 1, "straight": 0, "reload": 0, "loader": 3}
    expected = Model(*SCHEMES[scheme][:3])
    expected.load_weights(in_8_bits(new, suffix, quantise).items())
    for name, tensor in expected.state_dict().items():
        if name != "norm":
            assert torch.equal(raw(made.live.state_dict()[name]), raw(tensor)), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_comes_in_8_bits_is_loaded_as_it_is(scheme: str):
    _, suffix, _, quantise = SCHEMES[scheme]
    made, new = host(scheme), in_8_bits(weights(1), suffix, quantise)
    assert push(made, new).roads["loader"] == 0
    expected = Model(*SCHEMES[scheme][:3])
    expected.load_weights(new.items())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(raw(made.live.state_dict()[name]), raw(tensor)), name


def scale_beside_bf16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"layers.1.up.weight_scale": torch.ones(ROWS // 2, 1)}


def in_another_kind(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return in_8_bits(tensors, "_scale", int8_per_channel)


def one_missing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "layers.1.up.weight"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scale_beside_bf16, "layers.1.up.weight_scale comes with it"),
        (in_another_kind, "it comes in int8, and the engine holds it in float8_e4m3fn"),
        (one_missing, "layers.1.up.weight"),
    ],
)
def test_what_no_scheme_covers_is_refused_and_nothing_is_written(change: Any, words: str):
    made = host("fp8 per channel")
    before = {name: raw(tensor).clone() for name, tensor in made.live.state_dict().items()}
    with pytest.raises(ManifestError, match=words):
        push(made, change(weights(1)))
    assert all(torch.equal(raw(tensor), before[name]) for name, tensor in made.live.state_dict().items())


def test_scales_for_activations_are_not_made_up():
    made = host("fp8 per channel")
    for model in (made.live, made.pristine()):
        model.layers[0].register_parameter("input_scale", nn.Parameter(torch.ones(1), requires_grad=False))
    with pytest.raises(ManifestError, match="wants scales for activations"):
        push(made, weights(1))
