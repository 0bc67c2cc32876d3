"""Experts quantised on their way: one parameter holds all experts of a layer, as vLLM's fused kernels want them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost
from memory_trainer import MemoryTrainer
from test_fused_quantize import assert_same_model, pointers
from torch import nn

from weightsync.kernels.quantize import (
    BlockForm,
    Form,
    fp8_per_block,
    fp8_per_channel,
    fp8_per_tensor,
    int8_per_channel,
)
from weightsync.worker import fused_quantize
from weightsync.worker.load_paths import FusedQuantize, Weight
from weightsync.worker.load_planner import FUSED_QUANTIZE, IN_PLACE, RELOAD

EXPERTS, INTER, HIDDEN = 4, 128, 160
FORMS: dict[str, Form | BlockForm] = {
    "fp8 per channel": fp8_per_channel,
    "fp8 per tensor": fp8_per_tensor,
    "fp8 per block": fp8_per_block,
    "int8": int8_per_channel,
}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

Quantised = dict[str, torch.Tensor]
Arrange = Callable[[Quantised], Quantised]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(EXPERTS, 2 * INTER, HIDDEN))
        self.w2_weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTER))
        self.w2_bias = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.register_buffer("expert_map", torch.arange(EXPERTS))


class Layer(nn.Module):
    """A loader that finds each expert's part of the fused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.norm = nn.Parameter(torch.empty(HIDDEN))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name.split("."):
                case ["experts", number, "gate"]:
                    self.experts.w13_weight.data[int(number), :INTER].copy_(tensor)
                case ["experts", number, "up"]:
                    self.experts.w13_weight.data[int(number), INTER:].copy_(tensor)
                case ["experts", number, "down"]:
                    self.experts.w2_weight.data[int(number)].copy_(tensor)
                case ["experts", number, "bias"]:
                    self.experts.w2_bias.data[int(number)].copy_(tensor)
                case _:
                    self.norm.data.copy_(tensor)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER), "bias": (HIDDEN,)}
    tensors = {
        f"experts.{number}.{key}": torch.randn(shape, generator=draw) * 0.1 * (number + 1)
        for number in range(EXPERTS)
        for key, shape in shapes.items()
    }
    return {**tensors, "norm": torch.randn(HIDDEN, generator=draw)}


class Kernel:
    """What a kernel keeps: the scales, and numbers that no weight changes."""

    def __init__(self, scales: list[nn.Parameter], steps: torch.Tensor) -> None:
        self.scales, self.steps = scales, steps


def as_they_are(tensors: Quantised) -> Quantised:
    return tensors


def up_before_gate(tensors: Quantised) -> Quantised:
    """As FlashInfer's CUTLASS kernel wants it, where each row or block has its own scale."""
    found = dict(tensors)
    for key in ("w13_weight", "w13_weight_scale"):
        if found[key].dim() == 3:
            found[key] = torch.cat([*reversed(found[key].chunk(2, 1))], 1)
    return found


def scales_transposed(tensors: Quantised) -> Quantised:
    """As DeepGEMM wants it."""
    return {k: t.mT.contiguous().mT if "scale" in k and t.dim() == 3 else t for k, t in tensors.items()}


def one_value_lost(tensors: Quantised) -> Quantised:
    bits = tensors["w2_weight"].view(torch.uint8)
    bits[1, 2, 3] ^= 1
    return tensors


def interleaved(tensors: Quantised) -> Quantised:
    gate, up = tensors["w13_weight"].chunk(2, 1)
    return {**tensors, "w13_weight": torch.stack([gate, up], 2).flatten(1, 2)}


def quantise(form: Form | BlockForm, arrange: Arrange, module: nn.Module) -> None:
    if not isinstance(module, Experts) or module.w13_weight.dtype != torch.float32:
        return
    found: Quantised = {}
    for key in ("w13_weight", "w2_weight"):
        values, scales = zip(*map(form, getattr(module, key).data), strict=True)
        found[key] = torch.stack(values)
        found[f"{key}_scale"] = torch.cat(scales) if form is fp8_per_tensor else torch.stack(scales)
    for key, tensor in arrange(found).items():
        setattr(module, key, nn.Parameter(tensor, requires_grad=False))
    module.kernel = Kernel([module.w13_weight_scale, module.w2_weight_scale], torch.full((EXPERTS,), HIDDEN))


CHUNKS: dict[str, dict[str, Any]] = {
    "one chunk": {"buckets": [list(checkpoint(0))]},
    "a chunk each": {},
    "rows": {"max_bytes": HIDDEN * 4 * 24},
    "in place": {"in_place": list(checkpoint(0))},
    "in place, one chunk": {"in_place": list(checkpoint(0)), "buckets": [list(checkpoint(0))]},
}


@EVERY
@pytest.mark.parametrize("arrange", [as_they_are, up_before_gate, scales_transposed], ids=lambda a: a.__name__)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_experts_quantised_on_the_way_are_as_cold(form: Form | BlockForm, arrange: Arrange, chunks: dict[str, Any]):
    process = functools.partial(quantise, form, arrange)
    host = ModuleHost(Layer, checkpoint(0), process)
    kernel, before = host.live.experts.kernel, pointers(host.live)
    trainer = MemoryTrainer(host, tensors=checkpoint(1), **chunks)
    assert trainer.load_paths == {FUSED_QUANTIZE: 1, IN_PLACE: 1}
    trainer.push()
    trainer.push()
    assert_same_model(host.live, ModuleHost(Layer, checkpoint(1), process).live)
    assert pointers(host.live) == before
    assert host.live.experts.kernel is kernel


def check_reload(process: Callable[[nn.Module], None]) -> None:
    """Experts that `process` makes are reloaded, and right."""
    host = ModuleHost(Layer, checkpoint(0), process)
    trainer = MemoryTrainer(host, tensors=checkpoint(1))
    assert trainer.load_paths == {RELOAD: 1, IN_PLACE: 1}
    trainer.push()
    assert_same_model(host.live, ModuleHost(Layer, checkpoint(1), process).live)


@EVERY
@pytest.mark.parametrize("arrange", [one_value_lost, interleaved], ids=lambda a: a.__name__)
def test_experts_made_in_any_other_way_are_reloaded(form: Form | BlockForm, arrange: Arrange):
    check_reload(functools.partial(quantise, form, arrange))


@EVERY
def test_a_form_that_is_not_the_kernels_is_found_out(form: Form | BlockForm, monkeypatch: pytest.MonkeyPatch):
    """The kernel rounds otherwise for weights that are small. Only an attempt with small weights shows it."""

    def otherwise_if_small(tensors: Quantised) -> Quantised:
        if tensors["w13_weight_scale"].max() < 5e-6:
            tensors["w13_weight_scale"].mul_(2)
        return tensors

    process = functools.partial(quantise, form, otherwise_if_small)
    host = ModuleHost(Layer, checkpoint(0), process)
    assert MemoryTrainer(host, tensors=checkpoint(1)).load_paths == {RELOAD: 1, IN_PLACE: 1}
    monkeypatch.setattr("weightsync.worker.probe_load_paths.holds", lambda *_: True)
    host = ModuleHost(Layer, checkpoint(0), process)
    assert MemoryTrainer(host, tensors=checkpoint(1)).load_paths[FUSED_QUANTIZE] == 1, "the attempt decides"


def test_a_shortcut_that_writes_elsewhere_is_found_by_the_experiment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_quantize.Recipe, "placed", lambda recipe, piece: [piece])
    check_reload(functools.partial(quantise, fp8_per_channel, up_before_gate))


@EVERY
@pytest.mark.parametrize("cut", ["not", "between experts", "in experts"])
def test_experts_are_put_together_only_if_what_shares_a_scale_comes_apart(
    form: Form | BlockForm, cut: str, monkeypatch: pytest.MonkeyPatch
):
    process = functools.partial(quantise, form, as_they_are)
    host = ModuleHost(Layer, checkpoint(0), process)
    tensors = checkpoint(1)
    half = len(tensors) // 2
    options: dict[str, dict[str, Any]] = {
        "not": {"buckets": [list(tensors)]},
        "between experts": {"buckets": [list(tensors)[:half], list(tensors)[half:]]},
        "in experts": {"max_bytes": HIDDEN * 4 * 24},
    }
    trainer = MemoryTrainer(host, tensors=tensors, **options[cut])
    seen: set[str] = set()
    original = FusedQuantize.put_together

    def note(path: FusedQuantize, weight: Weight) -> torch.Tensor:
        seen.add(weight.param)
        return original(path, weight)

    monkeypatch.setattr(FusedQuantize, "put_together", note)
    trainer.push()
    comes_apart = form in (fp8_per_tensor, fp8_per_block) and cut == "in experts"
    assert seen == ({"experts.w13_weight", "experts.w2_weight"} if comes_apart else set())
    assert_same_model(host.live, ModuleHost(Layer, tensors, process).live)


def test_a_few_jobs_take_all_experts(monkeypatch: pytest.MonkeyPatch):
    """Not one for each expert: a table of a large model would have tens of thousands of entries."""
    tensors = checkpoint(1)
    host = ModuleHost(Layer, checkpoint(0), functools.partial(quantise, fp8_per_channel, as_they_are))
    trainer = MemoryTrainer(host, tensors=tensors, buckets=[list(tensors)])
    seen: list[int] = []
    original = fused_quantize.Recipe.job

    def job(recipe: Any, live: Any, pieces: Any) -> Any:
        found = original(recipe, live, pieces)
        seen.append(len(found.pieces))
        return found

    monkeypatch.setattr(fused_quantize.Recipe, "job", job)
    trainer.connect()
    assert seen == [1, 1]


class Two(nn.Module):
    """Two modules of experts, with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.second.experts.is_second = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.first.load_weights([(name, tensor)])
            self.second.load_weights([(name, tensor)])


@pytest.mark.parametrize("form", [fp8_per_block, fp8_per_channel], ids=["fp8 per block", "fp8 per channel"])
def test_a_form_of_blocks_that_one_module_refuses_serves_no_other_one(form: Form | BlockForm):
    """A module with few weights may not tell such forms apart, and an engine has one function for all modules."""

    def process(module: nn.Module) -> None:
        quantise(form, one_value_lost if hasattr(module, "is_second") else as_they_are, module)

    host = ModuleHost(Two, checkpoint(0), process)
    trainer = MemoryTrainer(host, tensors=checkpoint(1))
    quantised = {FUSED_QUANTIZE: 1, RELOAD: 1} if form is fp8_per_channel else {RELOAD: 2}
    assert trainer.load_paths == {**quantised, IN_PLACE: 2}
    trainer.push()
    assert_same_model(host.live, ModuleHost(Two, checkpoint(1), process).live)
