"""Models with layers of linear attention on a GPU, with CUDA graphs: pushed equals cold."""

from __future__ import annotations

import pytest
import tiny_models
from engines import GRAPHS, LINEAR_ATTENTION, TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]


def serve(engines: Engines, model: str, tp: int) -> dict[str, Answer]:
    # A state for each sequence has to fit into the small cache before graphs are captured.
    return engines.serve(model, tp, max_num_seqs=4, additional_config=LINEAR_ATTENTION, **GRAPHS)


def push(engines: Engines, model: str, pushes: str) -> list[Answer]:
    trainer = tiny_models.build(model, "A").cuda()
    found = []
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        for weights in pushes:
            tiny_models.fill(trainer, weights)
            sync.push(trainer)
            found.append(engines.ask())
    return found


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_pushed_equals_cold(engines: Remote, tp: int) -> None:
    # On a new machine Triton first compiles dozens of forms of its kernels, to choose among them.
    cold = engines.call(serve, "qwen3-next", tp, timeout_s=500)
    assert cold["A"] != cold["B"]
    for weights, pushed in zip("BAB", engines.call(push, "qwen3-next", "BAB", timeout_s=240), strict=True):
        assert_same(pushed, cold[weights], weights)
