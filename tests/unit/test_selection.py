"""What a `TensorSelection` takes, and what is refused when it is made."""

from __future__ import annotations

import logging
from collections import UserDict, UserList
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from weightsync import ConfigError, TensorSelection, WeightSync
from weightsync.config import read_selection
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.selection import UNQUANTIZED


def test_lists_and_maps_of_a_configuration_are_taken() -> None:
    """OmegaConf's are neither tuples, lists nor dicts."""
    selection = TensorSelection(frozen=UserList(["a.*"]), exclude=["b"], dtypes=UserDict({"c": "float32"}))
    assert (selection.frozen, selection.exclude) == (("a.*",), ("b",))
    assert selection.freezes("a.b", trains=True)
    assert selection.wire_dtype("c") == "float32"


@pytest.mark.parametrize("name", ["exclude", "frozen", "unquantized"])
@pytest.mark.parametrize("given", ["a.*", None, 3, ("a.*", 3), {"a.*"}])
def test_patterns_are_a_sequence_of_strings(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*expected a sequence of patterns"):
        TensorSelection(**{name: given})


def test_dtypes_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"dtypes=.*expected pattern to dtype"):
        TensorSelection(dtypes=["float32"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "words"), [({"excluded": ("a",)}, "has no excluded"), ("a.*", "expected a Tensor")])
def test_weight_sync_takes_a_selection_or_its_options(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WeightSync("fsdp", selection=given)
    WeightSync("fsdp", selection={"exclude": ("a",)}).close()  # type: ignore[arg-type]


NAMES = [f"model.layers.{n}.{part}.weight" for n in range(3) for part in ("mlp.gate_proj", "norm")] + ["lm_head.weight"]


def warned(caplog: pytest.LogCaptureFixture, ranks: list[list[str]], scales: tuple[str, ...] = (), **given: Any) -> str:
    """Return the warning of a selection of these tensors. `ranks` has the names of each rank."""
    selections = [TensorSelection(**given) for _ in ranks]
    for selection, names in zip(selections, ranks, strict=True):
        kept = [selection.renamed(name) for name in names if not selection.excludes(name)]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        manifest = Manifest(tuple(TensorMeta(name, (2,), "float32") for name in kept), (("tied", "lm_head.weight"),))
        selections[0].warn_of_idle(manifest, [each.unmatched() for each in selections], scales)
    return caplog.text


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"exclude": ("*.nrom.weight",)}, "model.layers.*.norm.weight"),
        ({"frozen": ("*.nrom.weight",)}, "model.layers.*.norm.weight"),
        ({"dtypes": {"*.mlp.gate.weight": "float32"}}, "model.layers.*.mlp.gate_proj.weight"),
        ({"unquantized": (*UNQUANTIZED, "lm_haed.weight")}, "lm_head.weight"),
        ({"rename": {"^lm_haed": "head"}}, "lm_head.weight"),
        ({"exclude": ("*.norm.*", "model.layers.7.*", "*.norm.weight")}, "model.layers.*.mlp.gate_proj.weight"),
    ],
)
def test_patterns_without_a_match_are_told_with_near_names(
    caplog: pytest.LogCaptureFixture, given: dict[str, Any], near: str
) -> None:
    idle = [each for each in (*next(iter(given.values())),) if "norm" not in each and each not in UNQUANTIZED]
    told = warned(caplog, [NAMES], **given)
    assert f"without effect: {', '.join(idle)}. The trainer's nearest names are" in told
    assert near in told


@pytest.mark.parametrize(
    "given",
    [
        {"exclude": ("*.norm.*",), "frozen": ("lm_head.*",), "dtypes": {"tied": "float32"}},
        {"exclude": ("*.norm.*", "*.layers.0.norm.weight"), "rename": {"^model": "decoder", "^decoder": "d"}},
        {"rename": str.upper, "frozen": ("LM_HEAD.WEIGHT",)},
        {"unquantized": UNQUANTIZED},
        {"unquantized": (*UNQUANTIZED, "lm_head.*")},
    ],
)
def test_patterns_with_a_match_are_not_told(caplog: pytest.LogCaptureFixture, given: dict[str, Any]) -> None:
    assert warned(caplog, [NAMES], **given) == ""


def test_a_pattern_that_matches_on_another_rank_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [[name for name in NAMES if f"layers.{rank}" in name] for rank in range(3)]
    given = {"exclude": ("*.layers.1.mlp.*", "*.layers.4.*"), "rename": {r"layers\.0": "first"}}
    told = warned(caplog, ranks, **given)
    assert "without effect: *.layers.4.*. " in told


def test_a_dtype_of_scales_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    names, scales = [*NAMES, "q.weight_scale"], ("q.weight_scale",)
    assert "effect: q.weight_scale." in warned(caplog, [names], scales, dtypes={"q.weight_scale": "bfloat16"})
    assert warned(caplog, [names], scales, dtypes={"*": "bfloat16"}) == ""


def test_a_dtype_behind_another_for_the_same_tensors_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The first pattern counts."""
    dtypes = {"*.mlp.*": "bfloat16", "*gate*": "float32", "*": "float16", "lm_head.*": "float32"}
    assert "effect: *gate*, lm_head.*. " in warned(caplog, [NAMES], dtypes=dtypes)
    assert (
        warned(caplog, [NAMES], dtypes=dict(reversed(dtypes.items())) | {"*.norm.*": "float32"}).count("effect: ") == 1
    )


def test_the_selection_says_nothing_of_what_it_has_matched() -> None:
    selection, other = TensorSelection(exclude=("a",)), TensorSelection(exclude=("a",))
    assert selection.excludes("a")
    assert selection == other
    assert repr(selection) == repr(other)
    assert asdict(selection) == asdict(other)
    with pytest.raises(ConfigError, match=r"its fields are exclude, .*, rename$"):
        WeightSync("fsdp", selection={"excluded": ("a",)})  # type: ignore[arg-type]


def test_of_a_long_list_of_patterns_the_first_are_told(caplog: pytest.LogCaptureFixture) -> None:
    told = warned(caplog, [NAMES] * 64, exclude=tuple(f"adapters.{number}" for number in range(2000)))
    assert "without effect: adapters.0, adapters.1" in told
    assert "more. The trainer's nearest names are" in told


class OfLayers(TensorSelection):
    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__(exclude=[f"*.layers.{layer}.*" for layer in layers])


def test_a_selection_of_a_users_own_class_is_copied_without_its_matches() -> None:
    given = OfLayers([1])
    assert given.excludes("model.layers.1.bias")
    own = read_selection(given)
    assert type(own) is OfLayers
    assert own == given
    assert own.unmatched() == ["*.layers.1.*"]
    assert given.unmatched() == []
