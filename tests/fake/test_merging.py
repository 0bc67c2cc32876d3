"""Rank 0 merges the plans of 64 workers of a large mixture of experts in seconds, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "merge_plans.py"
LAYERS = 16  # of DeepSeek-V3's 61, for speed


@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_merging_for_64_workers_is_fast_and_small(parallel: str):
    command = [sys.executable, str(SCRIPT), "--parallel", parallel, "--layers", str(LAYERS)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    share = found["tensors"] / 45_000
    # Thrice the time of a quiet core.
    assert found["seconds"]["all"] < 9 * share
    assert found["added_mib"] < 1024 * share
    assert found["bytes"]["load plan, from each worker"] < 10_000
