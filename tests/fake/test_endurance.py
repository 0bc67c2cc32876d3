"""Pushes and reconnects leave nothing behind in either process. `make endurance` is the long version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import endurance
import pytest

PUSHES, RECONNECTS = 48, 12


@pytest.mark.forks
def test_pushes_and_reconnects_leave_no_descriptor_thread_or_file_behind(tmp_path: Path) -> None:
    # In a process of its own, since other tests of this one leave threads that end later.
    samples = tmp_path / "samples.json"
    command = [sys.executable, endurance.__file__, str(PUSHES), str(RECONNECTS), "--samples", str(samples)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert samples.exists(), ended.stderr
    for transport, sides in json.loads(samples.read_text()).items():
        # What caches take in the first pushes hides what a hundred of them leak.
        assert [one for one in endurance.grown(sides) if ": memory" not in one] == [], transport


def test_one_descriptor_for_each_reconnect_is_found() -> None:
    flat = {"memory": 1e5, "threads": 4.0, "shm files": 3.0}
    leaking = [{"push": n, **flat, "descriptors": 10.0 + n * RECONNECTS // PUSHES} for n in range(PUSHES)]
    steady = [{"push": n, **flat, "descriptors": 10.0 + n % 2} for n in range(PUSHES)]
    assert [one.split(" by ")[0] for one in endurance.grown({"trainer": leaking, "engine": steady})] == [
        "trainer: descriptors"
    ]
