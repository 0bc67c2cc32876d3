"""The example for TRL, as its own first lines and docs/use/trl.md start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import NOT_COMPILED

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/trl_grpo.py"


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["accelerate.commands.launch", "--num_processes", "1"], id="accelerate launch"),
        pytest.param(["torch.distributed.run", "--nproc-per-node", "2"], id="torchrun, two ranks"),
    ],
)
def test_the_engine_learns_what_is_rewarded(tmp_path: Path, launcher: list[str]) -> None:
    command = [sys.executable, "-m", *launcher, str(EXAMPLE)]
    ran = subprocess.run(
        command, cwd=tmp_path, env=os.environ | NOT_COMPILED, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    first, last, pushes = re.search(r"^reward (.+) -> (.+) with (\d+) pushes$", ran.stdout, re.MULTILINE).groups()
    assert pushes == "30"
    assert ran.stderr.count("pushed version") == 30, "the log has a line for each push"
    assert float(last) > float(first) + 0.1  # without pushes both are 0.49
