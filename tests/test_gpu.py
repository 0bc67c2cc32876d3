"""On GPUs, with small models: a push leaves the engine as its cold start did. The benchmark script does the work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "push_on_gpus.py"


def run(tmp_path: Path, case: str, shape: str, *options: str) -> dict[str, dict[str, object]]:
    out = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), case, "--shape", shape, "--no-native", "--num-iters", "2", *options]
    subprocess.run([*command, "--folder", str(tmp_path / "model"), "--output-json", str(out)], check=True, timeout=280)
    found: dict[str, dict[str, object]] = json.loads(out.read_text())
    return found


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "options", [["tiny"], ["tiny-moe"], ["tiny", "--on-cpu"], ["tiny", "--dtype", "float32"]], ids=" ".join
)
def test_ipc_on_one_gpu(tmp_path: Path, options: list[str]) -> None:
    found = run(tmp_path, "ipc", *options)
    assert found["after A"]["logprobs_equal"]
    assert not found["after A, B"]["logprobs_equal"]
    assert found["after A, B, A"]["logprobs_equal"]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", ["fsdp", "broadcast"])
def test_two_gpus(tmp_path: Path, case: str) -> None:
    found = run(tmp_path, case, "tiny")
    assert found["after A"]["logprobs_equal"]
    assert not found["after A, B"]["logprobs_equal"]
    assert found["after A, B, A"]["logprobs_equal"]
