"""The kernels for GPUs, in Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_kernels_for_gpus_in_tritons_interpreter():
    """Those of digests too. What a GPU makes of them, and how fast, only a GPU shows."""
    script = Path(__file__).parents[1] / "unit" / "interpreted_kernels.py"
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:5] == [
        *("48 copies", "24 casts", "28 digests", "19 bodies of changes", "10 quantised experts")
    ]
