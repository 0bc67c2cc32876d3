"""What is said of tensors that do not fit."""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync import ConfigError, ManifestError, ModuleBucketer, ParameterBucketer, TensorSelection
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.planning.load_plan import LoadPlan
from weightsync.strategies.compile import _of_engines
from weightsync.strategies.plan_checks import check_duplicates, check_plans, duplicates, make_buckets

ENGINE = {"model.embed.weight", "model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "lm_head.weight"}


def manifest(*names: str) -> Manifest:
    return Manifest(tuple(TensorMeta(name, (8, 4), "float32") for name in names))


def planned(offered: Manifest, **changes: Any) -> LoadPlan:
    """What a worker whose model is `ENGINE` answers."""
    used = dict.fromkeys(ENGINE & {*offered.names}, "float32")
    absent = sorted(ENGINE - {*offered.names})
    answer: dict[str, Any] = {
        "partial": {},
        "refused": {},
        "groups": [],
        "reloads": [],
        "load_paths": {},
        "left_out": [],
        "kept": [],
        "tied": [],
        "duplicates": {},
    }
    return LoadPlan(**(answer | {"used": used, "missing": absent, "hints": absent} | changes))


def problem(offered: Manifest, padded: bool = False, **changes: Any) -> ManifestError:
    with pytest.raises(ManifestError, match="Nothing was written") as raised:
        check_plans(offered, [("the engine", [planned(offered, **changes)])], padded)
    return raised.value


def test_what_fits_is_no_problem():
    offered = manifest(*ENGINE)
    assert check_plans(offered, [("the engine", [planned(offered)])], False) == []


def test_a_part_of_the_model_is_recognised():
    part = [name.removeprefix("model.") for name in ENGINE if name.startswith("model.")]
    error = problem(manifest(*part))
    assert "Push the whole model, not a part of it: nothing is pushed for lm_head.weight" in str(error)
    assert "rename" not in str(error), "a rename gives no head"
    assert "exclude" not in str(error), "to leave them out would not help"
    assert {*error.missing} == ENGINE
    assert {*error.unexpected} == {*part}


def test_a_part_with_all_of_a_tied_models_weights_can_be_renamed():
    tied = sorted(ENGINE - {"lm_head.weight"})
    error = problem(manifest(*(name.removeprefix("model.") for name in tied)), missing=tied, hints=tied)
    assert "Push the whole model, not a part of it, or give WeightSync(selection=TensorSelection(" in str(error)
    assert "rename={'^': 'model.'}" in str(error)


@pytest.mark.parametrize("prefix", ["policy.", "policy.module.", "module._orig_mod.model."])
def test_a_prefix_too_many_is_recognised_beside_a_head_of_another_name(prefix: str):
    error = problem(manifest(*(prefix + name for name in ENGINE), "v_head.weight"))
    (text,) = re.findall(r"rename=(\{.*?\})", str(error))
    selection = TensorSelection(rename=ast.literal_eval(text))
    assert {selection.renamed(prefix + name) for name in ENGINE} == ENGINE
    assert "Push the model inside" in str(error)


def test_a_wrapper_of_each_layer_is_recognised():
    names = {name.replace("layers.", "layers._orig_mod.") for name in ENGINE}
    assert r"rename={'_orig_mod\\.': ''}" in str(problem(manifest(*names)))


def test_other_names_are_not_taken_for_a_part():
    error = problem(manifest("a", "embed.weight"))
    assert "rename" not in str(error)
    assert "exclude" not in str(error)


def test_what_is_too_much_can_be_left_out():
    assert "Unexpected 1: vision.weight. Leave them out with" in str(problem(manifest(*ENGINE, "vision.weight")))


def test_what_the_engine_was_started_without_is_not_too_much():
    offered = manifest(*ENGINE, "vision.weight")
    plans = [planned(offered), planned(offered, left_out=["vision.weight"])]
    assert check_plans(offered, [("the engine", plans)], False) == ["vision.weight"]


def test_layers_that_nothing_came_of_are_named():
    error = problem(manifest(*(ENGINE - {"model.layers.1.a"})))
    assert "Missing 1: model.layers.1.a. The trainer pushes nothing of model.layers.1: it has fewer layers" in str(
        error
    )


def test_tied_embeddings_are_thought_of():
    assert "an output layer of its own" in str(problem(manifest(*(ENGINE - {"lm_head.weight"}))))


def test_a_head_of_the_trainers_own_is_not_to_be_left_out():
    """It was: the engine then answered with the embedding in its place."""
    names = {*ENGINE} - {"lm_head.weight"}
    offered = manifest(*names, "output.weight")
    error = problem(offered, missing=[], hints=[], tied=["model.embed.weight"])
    assert "tie_word_embeddings" in str(error)
    assert "to be excluded only if the trainer ties it to the embedding. Nothing" in str(error)


def test_a_head_that_an_engine_has_no_layer_for_is_left_out_only_if_it_is_tied():
    """Engines of Gemma have no module for it, and answer with the embedding in its place."""
    offered = manifest(*ENGINE)
    used = {meta.name: meta.dtype for meta in offered if meta.name != "lm_head.weight"}
    error = str(problem(offered, missing=[], hints=[], used=used))
    assert "Leave them out with TensorSelection(exclude=...)" in error
    assert "to be excluded only if the trainer ties it to the embedding, or" in error


def test_what_shares_a_place_with_another_is_placed():
    offered = manifest(*ENGINE)
    plan = planned(offered, duplicates={"lm_head.weight": "model.embed.weight"})
    plan.used.pop("lm_head.weight")
    assert check_plans(offered, [("the engine", [plan])], False) == ["lm_head.weight"]
    assert duplicates([plan, planned(offered)]) == (("lm_head.weight", "model.embed.weight"),)


def test_two_tensors_for_one_place_must_be_equal_on_all_ranks():
    pair = ("head", "embed")
    check_duplicates([pair], [{"head": {"0..2": 1}, "embed": {"0..2": 1}}, {"head": {"2..4": 5}, "embed": {"2..4": 5}}])
    check_duplicates([pair], [{"embed": {"all": 7}}, {"head": {"all": 7}}])  # two stages of a pipeline
    with pytest.raises(ManifestError, match=r"head: it differs from embed.*Nothing was written"):
        check_duplicates(
            [pair], [{"head": {"0..2": 1}, "embed": {"0..2": 1}}, {"head": {"2..4": 5}, "embed": {"2..4": 6}}]
        )
    with pytest.raises(ManifestError, match="it is sharded otherwise than embed"):
        check_duplicates([pair], [{"head": {"0..3": 1, "3..4": 1}, "embed": {"0..2": 1, "2..4": 1}}])


@pytest.mark.parametrize(("padded", "advice"), [(False, "the same config.json"), (True, "vocab_size=...")])
def test_what_has_another_shape_is_told_with_the_reason(padded: bool, advice: str):
    refused = {"lm_head.weight": "shape (9, 4): the engine has (8, 4) there"}
    error = problem(manifest(*ENGINE), padded, refused=refused)
    assert error.mismatched == refused
    assert f"lm_head.weight ({refused['lm_head.weight']}). " in str(error)
    assert advice in str(error)


def test_what_is_frozen_has_the_last_buckets_with_all_that_it_is_loaded_with():
    offered = manifest(*ENGINE)
    plans = [planned(offered, reloads=[["model.layers.0.a", "model.layers.0.b"]])]
    frozen = {"model.embed.weight", "model.layers.0.a"}  # and b is not, which is loaded with it
    buckets, last = make_buckets(ModuleBucketer(), offered, plans, [], frozen)
    assert last == {"model.embed.weight"}
    assert [bucket.names for bucket in buckets][-1] == ("model.embed.weight",)
    empty = Manifest((*offered.tensors, TensorMeta("empty", (0, 4), "float32")))
    for everything in (offered, empty):
        with pytest.raises(ConfigError, match="all tensors with elements are frozen"):
            make_buckets(ModuleBucketer(), everything, plans, [], ENGINE)


def test_weights_are_not_torn_from_their_scales():
    pair = ("model.layers.0.a", "model.layers.0.b")
    offered = manifest(*ENGINE)
    with pytest.raises(ConfigError, match=r"into different buckets, such as model\.layers\.0\.a"):
        make_buckets(ParameterBucketer(), offered, [planned(offered)], [pair], set())
    buckets, _ = make_buckets(ModuleBucketer(max_bytes=1), offered, [planned(offered)], [pair], set())
    assert any({*pair} <= {*bucket.names} for bucket in buckets)


@pytest.mark.parametrize("shares", [True, False])
def test_engines_of_one_core_each_hold_the_experts_together(shares: bool):
    offered = manifest(*ENGINE)
    halves = [{"model.embed.weight", "model.layers.0.a", "lm_head.weight"}, {"model.layers.0.b", "model.layers.1.a"}]
    plans = [planned(offered, used=dict.fromkeys(half, "float32"), missing=[], hints=[]) for half in halves]
    hellos = [SimpleNamespace(group=number, shares_experts=shares) for number in range(2)]
    fleet: Any = SimpleNamespace(
        workers=[SimpleNamespace(hello=hello) for hello in hellos],
        handles=[SimpleNamespace(number=n, engine=SimpleNamespace(name=f"engine {n}")) for n in range(2)],
    )
    engines = _of_engines(fleet, plans)
    if shares:
        assert check_plans(offered, engines, False) == []
    else:
        with pytest.raises(ManifestError, match=r"do not fit engine \d's model. Unexpected [23]"):
            check_plans(offered, engines, False)
