"""A trainer and an engine under one controller take turns on one GPU: see tests/support/hybrid_turns.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="GPU machines may lack Ray")
from hybrid_turns import measure  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.mark.gpu(1)
def test_pushed_after_sleep_equals_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(support.parents[1]), str(support), os.environ.get("PYTHONPATH", "")])
    )
    ray.init(num_gpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=400 * 10**6)
    try:
        found = measure(tmp_path, "small", levels=[1, 2], turns=2)
    finally:
        ray.shutdown()
    assert found["equal"] == {"answers": True, "sampled_logprobs": True}
    assert found["changed"]
    for turn in found["turns"]:
        in_use = {stage: gib["all"] for stage, gib in turn["gib"].items()}
        assert in_use["asleep"] < in_use["generated"], turn
        assert in_use["updated"] < in_use["pushed"], turn
