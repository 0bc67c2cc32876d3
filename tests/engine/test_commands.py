"""The commands that start engines, as a user starts them: `weightsync demo`, `doctor` and `bench`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import IN_CORE, NOT_COMPILED

pytestmark = pytest.mark.engine


def weightsync(
    *arguments: str, timeout_s: float, cwd: Path | None = None, environment: dict[str, str] = IN_CORE
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightsync", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)


def test_doctor_compares_an_engine_of_its_own_with_cold_and_unquantised_ones():
    """Without --quantization it stops before the comparisons."""
    run = weightsync("doctor", "--quantization", "weightsync_int8", timeout_s=500)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the engine gives exactly its first answers" in run.stdout
    assert "other weights, other answers" in run.stdout
    assert "exactly their answers" in run.stdout
    assert "in weightsync_int8 answers" in run.stdout
    assert "answers exactly as the engine with B pushed" in run.stdout
    (gap,) = re.findall(r"by ([0-9.]+) on average and ([0-9.]+) at most", run.stdout)
    assert 0 < float(gap[0]) <= float(gap[1]) < 0.5


def test_demo_proves_pushed_equal_to_cold():
    run = weightsync("demo", "--steps", "1", "--layers", "2", timeout_s=500)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "PASS identical: 32 tokens of 4 prompts" in run.stdout


def run(tmp_path, *options: str, environment: dict[str, str]):
    arguments = ["--gpus", "0", "--way", "weightsync", "--json", "out.json", "--num-iters", "2", *options]
    done = weightsync("bench", *arguments, timeout_s=560, cwd=tmp_path, environment=environment)
    return done, json.loads((tmp_path / "out.json").read_text())


def check_measured(found, printed: str):
    assert found["answers"] == 0
    assert found["nbytes"] == 722_432
    assert len(found["back_to_back"]) == len(found["in_training"]) == 2
    for seconds in (found["first"], *found["back_to_back"], *found["in_training"]):
        assert 0 < seconds["load_s"] < seconds["total_s"]
    assert found["floor_s"] < found["seconds"]["back_to_back"]["total_s"]["least"]
    assert "equal" in printed
    assert "in training" in printed


def test_bench_measures_both_loops_checks_answers_and_reports_a_failed_case(tmp_path):
    options = ["--dtype", "float32", "--quantization", "none", "no_such_scheme"]
    done, (found, failed) = run(tmp_path, *options, environment=IN_CORE)
    assert done.returncode == 1
    check_measured(found, done.stdout)
    assert "no_such_scheme" in failed["error"]
    assert "FAIL: 1 of 2 cases" in done.stdout


def test_bench_measures_an_llm_in_the_process_of_rank_0(tmp_path):
    options = ["--client", "extension", "--backend", "fsdp", "--ranks", "2", "--transport", "broadcast"]
    options += ["--load-format", "auto", "dummy"]
    done, (cold, dummy) = run(tmp_path, *options, environment=NOT_COMPILED)  # in this process, it would be one of ranks
    assert done.returncode == 0, done.stdout + done.stderr
    for found in (cold, dummy):
        check_measured(found, done.stdout)
    assert [found["compared_with"] for found in (cold, dummy)] == ["cold start", "first push"]
    assert done.stdout.count("equal, no cold engine compared") == 1
