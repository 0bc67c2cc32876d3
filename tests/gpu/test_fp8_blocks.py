"""Checkpoints in fp8 with a scale for each block, `weight_scale_inv`, as DeepSeek and Qwen publish them."""

from __future__ import annotations

import pytest
import quantised_checkpoints
import tiny_models
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]


def serve_and_push(engines: Engines, model: str, pushes: str) -> tuple[dict[str, Answer], list[Answer]]:
    """Return what cold engines answer, and what one that was started with random weights answers after each push."""
    cold = {}
    for weights in "AB":
        folder = engines.folder / f"{model}-in-blocks-{weights}"
        quantised_checkpoints.save(tiny_models.build(model, weights), "FP8-block", folder)
        engines.start(folder, enforce_eager=False)
        cold[weights] = engines.ask()
    engines.start(folder, enforce_eager=False, load_format="dummy")
    trainer = tiny_models.build(model, "A").cuda()
    found = []
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        for weights in pushes:
            tiny_models.fill(trainer, weights)
            sync.push(trainer)
            found.append(engines.ask())
    return cold, found


@pytest.mark.parametrize("model", ["qwen3-blocks", "qwen3-moe-blocks", "deepseek-v3-blocks"])
def test_pushed_equals_cold(engines: Remote, model: str) -> None:
    cold, found = engines.call(serve_and_push, model, "BAAB", timeout_s=300)
    assert cold["A"] != cold["B"]
    for weights, pushed in zip("BAAB", found, strict=True):
        assert_same(pushed, cold[weights], weights)
