"""A trace by example: equal to the whole trace, from fewer tensors, and a wrong shortcut is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.worker import repeated_layers
from weightsync.worker.repeated_layers import trace_by_example
from weightsync.worker.trace import Trace, trace_loader

LAYERS, EXPERTS, WIDTH = 12, 4, 6
Weights = Iterable[tuple[str, torch.Tensor]]


class Experts(nn.Module):
    """Gate and up of all experts in one parameter, as engines hold them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name, self.number, self.top_k = f"layers.{number}.experts", number, 2
        self.w13 = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.zeros(WIDTH))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(3, WIDTH))
        self.layers = nn.ModuleList(Experts(number) for number in range(LAYERS))
        self.seen: list[str] = []

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.seen.append(name)
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            self.embed.data.copy_(tensor)
            return
        _, number, *rest = name.split(".")
        layer: Any = self.layers[int(number)]
        if rest == ["log_scale"]:
            layer.scale.data.copy_(tensor.exp())
        else:
            expert, kind = int(rest[1]), rest[2]
            layer.w13.data[expert].narrow(0, WIDTH * (kind == "up"), WIDTH).copy_(tensor)


def manifest(model: Model) -> Manifest:
    tensors = [TensorMeta("embed", (3, WIDTH), "float32")]
    for number in range(len(model.layers)):
        matrices = [f"layers.{number}.experts.{e}.{kind}" for e in range(EXPERTS) for kind in ("gate", "up")]
        tensors += [TensorMeta(name, (WIDTH, WIDTH), "float32") for name in matrices]
        tensors.append(TensorMeta(f"layers.{number}.log_scale", (WIDTH,), "float32"))
    return Manifest(tuple(tensors))


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_layers, "_WORTH", 1)


def on_meta(make: Callable[[], Model] = Model) -> Model:
    with torch.device("meta"):
        return make()


def parts(trace: Trace) -> Any:
    copies = sorted((copy.param, copy.offset, copy.name, copy.box.start, copy.stride) for copy in trace.copies)
    return copies, set(trace.fills), trace.computed, trace.refused, trace.unknown


def layers_seen(model: Model) -> set[int]:
    return {int(name.split(".")[1]) for name in model.seen if name.startswith("layers.")}


def traced(model: Model) -> set[int]:
    """Trace by example, compare with the whole trace, and return the layers whose tensors the loader was given."""
    found = trace_by_example(model, model.load_weights, manifest(model))
    seen = layers_seen(model)
    assert parts(found) == parts(trace_loader(model, model.load_weights, manifest(model)))
    return seen


def test_layers_that_are_alike_repeat_the_trace_of_three():
    assert traced(on_meta()) == {0, 6, 11}


def test_a_small_model_is_traced_whole(monkeypatch):
    monkeypatch.setattr(repeated_layers, "_WORTH", 100)
    assert traced(on_meta()) == set(range(LAYERS))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "top_k", 3),
        lambda layer: setattr(layer, "name", "layers.4.other"),
        lambda layer: setattr(layer, "number", 5),
        lambda layer: setattr(layer, "more", {"a": [1, 2.0]}),
        lambda layer: setattr(layer.w13, "weight_loader", print),
        lambda layer: setattr(layer, "map", torch.tensor([1, 0], device="cpu")),
        lambda layer: setattr(layer, "scale", nn.Parameter(torch.zeros(WIDTH, dtype=torch.float16, device="meta"))),
        lambda layer: layer.register_buffer("extra", torch.zeros(1, device="meta"), persistent=False),
        lambda layer: layer.add_module("extra", nn.Identity()),
    ],
    ids=["number", "name", "its own number", "values", "loader", "map", "dtype", "buffer", "module"],
)
def test_a_layer_with_other_modules_is_traced_itself(change: Callable[[Any], None]):
    model = on_meta()
    change(model.layers[4])
    assert traced(model) == {0, 4, 6, 11}


def test_a_layer_with_a_tensor_of_another_shape_is_traced_itself():
    model, other = on_meta(), "layers.4.log_scale"
    tensors = (TensorMeta(m.name, (1,), m.dtype) if m.name == other else m for m in manifest(model))
    trace_by_example(model, model.load_weights, Manifest(tuple(tensors)))
    assert layers_seen(model) == {0, 4, 6, 11}


class Moody(Model):
    """A loader with a rule for one layer that no module shows."""

    special = 6

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if f".{self.special}." in name and name.endswith((".gate", ".up")):
            name = name.replace(".gate", ".x").replace(".up", ".gate").replace(".x", ".up")
        super().load(name, tensor)


def test_examples_that_load_differently_leave_all_layers_to_the_whole_trace():
    assert traced(on_meta(Moody)) == set(range(LAYERS))


class Pipelined(Model):
    """The first stage of two: it has no layers from the ninth on."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers[8:]

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed" or int(name.split(".")[1]) < len(self.layers):
            super().load(name, tensor)


def test_layers_of_another_pipeline_stage_are_traced():
    model, whole = on_meta(Pipelined), on_meta()
    found = trace_by_example(model, model.load_weights, manifest(whole))
    assert parts(found) == parts(trace_loader(model, model.load_weights, manifest(whole)))


class NeedsAll(Model):
    def load_weights(self, weights: Weights) -> None:
        given = dict(weights)
        self.seen += given
        for name in ("embed", *(f"layers.{number}.log_scale" for number in range(LAYERS))):
            self.load(name, given[name])
        for name, tensor in given.items():
            if name.endswith((".gate", ".up")):
                self.load(name, tensor)


def test_a_loader_that_needs_all_tensors_is_traced_whole():
    assert traced(on_meta(NeedsAll)) == set(range(LAYERS))


def lose_a_copy(part: Trace) -> Trace:
    return replace(part, copies=part.copies[1:])


def shift_a_copy(part: Trace) -> Trace:
    first = part.copies[0]
    moved = type(first)(first.name, first.box, first.param, first.offset + WIDTH, first.stride)
    return replace(part, copies=[moved, *part.copies[1:]])


def copy_twice(part: Trace) -> Trace:
    return replace(part, copies=[*part.copies, part.copies[0]])


@pytest.mark.parametrize("spoil", [lose_a_copy, shift_a_copy, copy_twice])
def test_a_wrong_repetition_is_found_by_the_proof_that_all_is_filled_once(spoil, monkeypatch):
    right = repeated_layers._moved

    def wrong(part: Trace, places: Any, number: int) -> Trace:
        moved = right(part, places, number)
        return spoil(moved) if number == 3 else moved

    monkeypatch.setattr(repeated_layers, "_moved", wrong)
    model = on_meta()
    assert traced(model) == set(range(LAYERS))
    assert model.seen.count("embed") == 3  # by example, whole, and once more by this test
