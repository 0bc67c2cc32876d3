"""Rank 0 merges the plans of 64 workers of a large mixture of experts in seconds, in little memory, as predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.tools.first_push import Model, predict
from weightsync.tools.simulate import Topology

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "merge_plans.py"
sys.path.insert(0, str(SCRIPT.parent))
from merge_plans import tensors  # noqa: E402  # not a package

LAYERS = 16  # of DeepSeek-V3's 61, for speed


def measure(parallel: str, ranks: int, layers: int) -> Any:
    command = [sys.executable, str(SCRIPT), "--parallel", parallel, "--ranks", str(ranks), "--layers", str(layers)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)


def check_prediction(found: Any, parallel: str, layers: int) -> None:
    """Compare the bytes of real messages with the predicted ones."""
    manifest = Manifest(tuple(TensorMeta(name, shape, "bfloat16") for name, shape, _ in tensors(layers)))
    engines, tp = (8, 8) if parallel == "tp" else (1, 64)
    topology = Topology(ranks=found["ranks"], engines=engines, tp=tp)
    predicted = predict(Model.of(manifest), topology, parallel == "ep").messages
    measured = found["bytes"].values()
    compared = dict(zip(predicted, zip(predicted.values(), measured, strict=True), strict=True))
    if parallel == "ep":  # these workers read all other tensors whole, as with data parallelism
        del compared["Connect"]
    assert {name for name, (guess, real) in compared.items() if abs(guess / real - 1) > 0.2} == set()


@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_merging_for_64_workers_is_fast_and_small_and_as_predicted(parallel: str):
    found = measure(parallel, 8, LAYERS)
    share = found["tensors"] / 45_000
    # Thrice the time of a quiet core.
    assert found["seconds"]["all"] < 9 * share
    assert found["added_mib"] < 1024 * share
    assert found["bytes"]["load plan, from each worker"] < 10_000
    check_prediction(found, parallel, LAYERS)


def test_merging_takes_as_long_for_each_of_256_ranks_as_for_few():
    found = measure("ep", 256, 6)
    assert found["seconds"]["all"] < 6  # a search of each row's shard among those of all ranks takes 8 s
    check_prediction(found, "ep", 6)
    check_prediction(measure("tp", 256, 6), "tp", 6)
