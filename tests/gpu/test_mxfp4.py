"""GPT-OSS in MXFP4, as it is published: the trainer has its experts in bfloat16, and the engine in 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
import quantised_checkpoints
import tiny_models
from engines import GRAPHS, TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]


def serve(engines: Engines, model: str, kernel: str, tp: int = 1, **options: Any) -> dict[str, Answer]:
    name = f"{model}-mxfp4"
    engines.save(name, lambda weights, to: quantised_checkpoints.save_mxfp4(tiny_models.build(model, weights), to))
    return engines.serve(name, tp, moe_backend=kernel, **GRAPHS, **options)


def serve_two_workers(engines: Engines, has_whole_experts: bool) -> dict[str, Answer]:
    return serve(engines, "gpt-oss-20b", "auto", 2, enable_expert_parallel=has_whole_experts)


def push(engines: Engines, name: str, pushes: str) -> list[tuple[Answer, dict[str, int]]]:
    model = tiny_models.build(name, "A").cuda()
    found = []
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        for weights in pushes:
            tiny_models.fill(model, weights)
            load_paths = sync.push(model).load_paths
            found.append((engines.ask(), load_paths))
    return found


@pytest.mark.parametrize(
    ("model", "kernel"),
    [("gpt-oss-wide", "auto"), ("gpt-oss-wide", "marlin"), ("gpt-oss", "marlin"), ("gpt-oss-20b", "auto")],
    ids=["vLLM's choice", "Marlin", "padded for Marlin", "20 B"],
)
def test_pushed_equals_cold(engines: Remote, model: str, kernel: str) -> None:
    check(engines, model, engines.call(serve, model, kernel, timeout_s=300), workers=1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("has_whole_experts", [False, True], ids=["tensor parallel", "expert parallel"])
def test_two_workers_that_were_pushed_to_equal_cold_ones(engines: Remote, has_whole_experts: bool) -> None:
    check(engines, "gpt-oss-20b", engines.call(serve_two_workers, has_whole_experts, timeout_s=300), workers=2)


def check(engines: Remote, model: str, cold: dict[str, Answer], workers: int) -> None:
    assert cold["A"] != cold["B"]
    for weights, (pushed, load_paths) in zip("BAAB", engines.call(push, model, "BAAB", timeout_s=240), strict=True):
        assert_same(pushed, cold[weights], f"{weights} of {model}")
        assert load_paths["native_loader"] == 2 * workers
