"""What the workers of an engine say of an adapter's modules, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.engines import LoraAdapter
from weightsync.engines.bound_modules import check_bound
from weightsync.errors import EngineError, UnsupportedError, from_fields

ADAPTER = LoraAdapter("policy-1-ab", 7, "/run/policy-1-ab")
FIRST, SECOND = "model.layers.0.q_proj", "model.layers.1.q_proj"


def stage(unbound: list[str], modules: list[str] | None = None) -> dict[str, Any]:
    return {"unbound": unbound, "twice": [], "modules": modules or []}


@pytest.mark.parametrize(
    "answers",
    [
        [stage([])],
        [stage([]), stage([])],
        [stage([SECOND], [FIRST]), stage([FIRST], [SECOND])],  # each stage of a pipeline has one of them
    ],
)
def test_an_adapter_is_bound_where_some_worker_binds_each_module(answers: list[dict[str, Any]]):
    check_bound(ADAPTER, answers, "engine 0")


def test_modules_that_no_worker_binds_are_named_with_those_of_the_engine():
    answers = [stage([FIRST, "head"], [SECOND, "a"]), stage([SECOND, "head"], [FIRST, "a"])]
    with pytest.raises(UnsupportedError, match=r"1 modules of the adapter policy-1-ab .*: head\. The engine") as raised:
        check_bound(ADAPTER, answers, "engine 0")
    assert raised.value.who == "engine 0"
    for error in (raised.value, from_fields(raised.value.to_fields())):
        assert (error.adapter_modules, error.engine_modules) == (["head"], [SECOND, "a", FIRST])


def test_two_modules_that_are_bound_to_one_are_refused():
    answers = [{"twice": ["a.q_proj", "b.q_proj"]}]
    with pytest.raises(
        UnsupportedError, match=r"share a module of the engine with another module: a\.q_proj, b\.q_proj"
    ):
        check_bound(ADAPTER, answers, "engine 0")


@pytest.mark.parametrize("answers", [[], [stage([]), {"error": "OSError: no file"}]])
def test_a_worker_that_cannot_tell_proves_nothing(answers: list[dict[str, Any]]):
    with pytest.raises(EngineError, match=r"cannot take the adapter policy-1-ab: (no worker answers|OSError: no file)"):
        check_bound(ADAPTER, answers, "engine 0")
