"""Memory in expandable segments of torch's CUDA allocator is mapped rightly, or an error names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

EXPORTER = """
import json, sys, torch
from weightsync.errors import PlacementError
from weightsync.transports.shared_handles import export, is_expandable
data = torch.arange(3_000_000, device="cuda")
try:
    answer = export(data.untyped_storage())
except PlacementError as error:
    answer = str(error)
print(json.dumps([is_expandable(data.untyped_storage()), answer]), flush=True)
sys.stdin.read()
"""

READER = """
import json, sys, torch
from weightsync.errors import PlacementError
from weightsync.transports.shared_handles import open_exported
kind, fields = json.loads(sys.argv[1])
try:
    data = open_exported(kind, fields, torch.device("cuda", 0), "the trainer").view(torch.int64)
    print(torch.equal(data[:3_000_000], torch.arange(3_000_000, device="cuda")))
except PlacementError as error:
    print(error)
"""


@pytest.mark.gpu(1)
@pytest.mark.parametrize("setting", ["expandable_segments:True", "expandable_segments:False"])
def test_memory_of_expandable_segments_is_mapped_or_named(setting: str) -> None:
    on = setting.endswith("True")
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as exporter:
        assert exporter.stdout is not None
        expandable, exported = json.loads(exporter.stdout.readline())
        if isinstance(exported, str):
            found = exported
        else:
            command = [sys.executable, "-c", READER, json.dumps(exported)]
            found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()
        exporter.kill()
    assert expandable is on
    assert found == "True" or (on and "an expandable segment of torch's allocator" in found), found
