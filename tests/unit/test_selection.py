"""What a `TensorSelection` takes, and what is refused when it is made."""

from __future__ import annotations

from collections import UserDict, UserList
from typing import Any

import pytest

from weightsync import ConfigError, TensorSelection, WeightSync


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
