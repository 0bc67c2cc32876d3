"""One tensor under two names, in the trainer or in the engine."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.planning.merge import merge_manifests
from weightsync.worker.ties import find_duplicates, shared_parameters, under_first_names, with_other_names, without
from weightsync.worker.trace import Trace, trace_loader, uncovered

EMBED, HEAD = TensorMeta("embed.weight", (8, 4), "float32"), TensorMeta("head.weight", (8, 4), "float32")
TIED = Manifest((EMBED,), (("head.weight", "embed.weight"),))


class Engine(nn.Module):
    """An engine with an embedding and an output layer. Its loader passes over what `skips` names."""

    def __init__(self, tied: bool, skips: str = "", factor: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, device="meta")
        self.head = nn.Linear(4, 8, bias=False, device="meta")
        self.skips, self.factor = skips, factor
        if tied:
            self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            if name != self.skips:
                with torch.no_grad():
                    params[name].copy_(weight if self.factor is None else weight * self.factor)


def traced(engine: Engine, manifest: Manifest) -> Trace:
    return trace_loader(engine, engine.load_weights, manifest)


def filled_from(trace: Trace) -> dict[str, list[str]]:
    """Return the tensors that are copied into each parameter."""
    found: dict[str, list[str]] = {}
    for copy in trace.copies:
        found.setdefault(copy.param, []).append(copy.name)
    return found


def test_a_tied_tensor_fills_both_parameters_of_an_untied_engine():
    engine = Engine(tied=False)
    assert [*uncovered(engine, traced(engine, TIED))[0]] == ["head.weight"]
    trace = under_first_names(traced(engine, with_other_names(TIED)), TIED)
    assert filled_from(trace) == {"embed.weight": ["embed.weight"], "head.weight": ["embed.weight"]}
    assert uncovered(engine, trace) == ({}, {})


@pytest.mark.parametrize("skips", ["", "head.weight"])
def test_it_fills_a_parameter_once_that_the_engine_ties_too(skips: str):
    trace = under_first_names(traced(Engine(True, skips), with_other_names(TIED)), TIED)
    assert filled_from(trace) == {"embed.weight": ["embed.weight"]}


def test_a_parameter_that_the_loader_computes_from_the_other_name_is_refused():
    trace = under_first_names(traced(Engine(False, factor=2.0), with_other_names(TIED)), TIED)
    assert "computes head.weight from head.weight" in trace.refused["embed.weight"]


@pytest.mark.parametrize("skips", ["", "head.weight"])
def test_a_tensor_for_a_parameter_that_another_fills_is_its_duplicate(skips: str):
    engine, manifest = Engine(True, skips), Manifest((EMBED, HEAD))
    trace, shared = traced(engine, manifest), shared_parameters(engine, "drafter.")
    assert shared == {"embed.weight": ["head.weight"]}
    duplicates = find_duplicates(trace, manifest, shared)
    assert duplicates == {"head.weight": "embed.weight"}
    assert filled_from(without(trace, duplicates)) == {"embed.weight": ["embed.weight"]}


def test_two_parameters_have_no_duplicates():
    engine, manifest = Engine(False), Manifest((EMBED, HEAD))
    assert find_duplicates(traced(engine, manifest), manifest, shared_parameters(engine, "drafter.")) == {}


def test_a_tensor_of_another_shape_is_no_duplicate():
    manifest = Manifest((EMBED, TensorMeta("head.weight", (9, 4), "float32")))
    engine = Engine(True, "head.weight")
    assert find_duplicates(traced(engine, manifest), manifest, shared_parameters(engine, "drafter.")) == {}


def test_ranks_keep_the_other_names_that_no_rank_has_a_tensor_under():
    stage = Manifest((TensorMeta("layer.weight", (2,), "float32"),))
    assert merge_manifests([TIED, stage]).tied == (("head.weight", "embed.weight"),)
    assert merge_manifests([TIED, Manifest((HEAD,))]).tied == ()


def test_a_module_that_stands_in_two_places_ties_nothing():
    """The layers of MLA have one. A tensor of another layer, which no parameter is for, has its name and shape."""
    engine = Engine(False)
    engine.inner = nn.ModuleDict({"embed": engine.embed})
    assert shared_parameters(engine, "drafter.") == {}


def test_a_tensor_with_the_name_of_the_one_that_fills_is_no_duplicate():
    """A layer that predicts one token more has an embedding too, which the loader passes over."""
    engine = Engine(True)
    manifest = Manifest((EMBED, TensorMeta("layers.2.embed.weight", (8, 4), "float32")))
    trace = traced(engine, Manifest((EMBED,)))
    assert find_duplicates(trace, manifest, shared_parameters(engine, "drafter.")) == {}


def test_padding_is_no_row_that_the_engine_has():
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 4, device="meta")
            self.embed.org_vocab_size = 251

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, loaded in weights:
                if loaded.shape[0] != self.embed.org_vocab_size:
                    raise AssertionError  # without a word, as vLLM's does

    model = Padded()
    trace = trace_loader(model, model.load_weights, Manifest((TensorMeta("embed.weight", (256, 4), "float32"),)))
    assert trace.refused == {"embed.weight": "shape (256, 4): the engine has (251, 4) there"}
