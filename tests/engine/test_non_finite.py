"""Weights that are NaN: what they have left in an engine spoils no request after a push of good ones."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Engines, Remote, assert_same

from weightsync import NonFiniteError, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def push_nan_and_then_good_weights(engines: Engines, model: str) -> None:
    answers = engines.serve(model)
    before = engines.ask()  # of an engine that earlier tests may have pushed to
    trained = tiny_models.build(model, "B")
    name = "model.layers.0.self_attn.v_proj.weight"
    with torch.no_grad():
        trained.get_parameter(name)[0, 0] = float("nan")
    with (
        WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S, non_finite="refuse") as sync,
        pytest.raises(NonFiniteError, match=name),
    ):
        sync.push(trained)
    assert_same(engines.ask(), before, "weights before those that were refused")
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(trained)
        prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 250 for i in range(200)]} for j in range(40)]
        outputs = engines.llm.generate(prompts, engines.sampling(2), use_tqdm=False)  # which fill many blocks
        assert len(outputs) == len(prompts)
        for weights in "BA":
            tiny_models.fill(trained, weights)
            sync.push(trained)
            assert_same(engines.ask(), answers[weights], f"{weights} after NaN")


@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_a_push_of_good_weights_heals_an_engine_that_computed_nan(engines: Remote, model: str):
    engines.call(push_nan_and_then_good_weights, model)
