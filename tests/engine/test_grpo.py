"""The example learns from reward alone, which it can only do if every push arrives, whatever the transport."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

import pytest
from engines import Engines, Remote

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def run_example(engines: Engines, folder: Path, *options: str) -> list[float]:
    """The mean reward of each step. In a process that has imported vLLM already."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engines.end()
    sys.path.insert(0, str(EXAMPLES))
    import grpo

    arguments, sys.argv = sys.argv, ["grpo.py", "--output-dir", str(folder), *options]
    try:
        grpo.main()
    finally:
        sys.argv = arguments
        sys.path.remove(str(EXAMPLES))
        cleanup_dist_env_and_memory()
    return [row["reward"] for row in json.loads((folder / "metrics.json").read_text())]


LEARNING = {
    "ipc": ["--transport=ipc"],
    "broadcast": ["--transport=broadcast"],
    "checkpoint": ["--weight-bridge-mode=none"],
    "single_copy": ["--weight-bridge-mode=shared_vllm"],
    "lora": ["--weight-bridge-mode=lora_only", "--answer-length=1", "--prompts=64", "--lora-alpha=64"],
}


@pytest.mark.parametrize("transport", LEARNING)
def test_rewards_rise(engines: Remote, tmp_path: Path, transport: str):
    options = ["--training-steps=20", *LEARNING[transport]]
    found = engines.call(run_example, tmp_path, *options, timeout_s=500)
    assert mean(found[:2]) < 0.2
    assert mean(found[-3:]) > 0.4  # twice of what is ever reached where nothing is pushed, as the next test says


def test_nothing_is_learnt_when_nothing_is_pushed(engines: Remote, tmp_path: Path):
    assert max(engines.call(run_example, tmp_path, "--training-steps", "12", "--sync-every", "0", timeout_s=500)) < 0.2


@pytest.mark.parametrize("transport", ["ipc", "single_copy"])
def test_a_run_can_be_resumed(engines: Remote, tmp_path: Path, transport: str):
    options = ["--transport", transport, "--save-every", "12"]
    first = engines.call(run_example, tmp_path, *options, "--training-steps", "12", timeout_s=500)
    assert mean(first[-2:]) > 0.2
    found = engines.call(run_example, tmp_path, *options, "--resume", "--training-steps", "14", timeout_s=500)
    assert len(found) == 14
    assert abs(found[12] - first[-1]) < 0.15  # a new engine has what the trainer had learnt
