"""On GPUs, with small models: a push leaves the engine as its cold start did. `weightsync bench` does the work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def check(tmp_path: Path, *options: str) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "weightsync", "bench", "--num-iters", "2", "--client", "llm"]
    command += ["--way", "weightsync", "--json", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())
    assert found["answers"] == 0
    assert found["environment"]["gpus"]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "options",
    [
        ["--shape", "tiny"],
        ["--shape", "tiny-moe"],
        ["--trainer-on-cpu"],
        ["--dtype", "float32"],
        ["--client", "extension"],
        ["--shape", "small", "--quantization", "fp8_per_channel"],
    ],
    ids=" ".join,
)
def test_ipc_on_one_gpu_leaves_the_engine_as_its_cold_start(tmp_path: Path, options: list[str]) -> None:
    check(tmp_path, "--gpus", "1", *options)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "options",
    [
        ["--backend", "fsdp", "--ranks", "2", "--tp", "2"],
        ["--transport", "broadcast"],
        ["--transport", "nixl"],
        ["--transport", "broadcast", "--encoding", "delta", "--changed", "0.01"],
        ["--transport", "broadcast", "--encoding", "delta", "--changed", "0.01", "--dtype", "float32"],
        ["--transport", "broadcast", "--encoding", "delta", "--changed", "0.01", "--quantization", "fp8_per_channel"],
    ],
    ids=" ".join,
)
def test_two_gpus_leave_the_engine_as_its_cold_start(tmp_path: Path, options: list[str]) -> None:
    check(tmp_path, "--gpus", "2", *options)
