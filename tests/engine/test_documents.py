"""What the documents tell users to run, run: the snippet of the README, and the probes of examples/containers."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import tiny_models
import yaml
from engines import NOT_COMPILED
from faults import FaultyTransport

from weightsync import DigestError, WeightSync
from weightsync.engines import VllmServer

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=64", "--dtype=bfloat16")


def test_the_snippet_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    example = runpy.run_path(str(ROOT / "examples/tiny_model.py"))
    example["write_tiny_model"](str(folder))
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found
    text = found[1]
    for there, here in (("Qwen/Qwen3-0.6B", str(folder)), ('"cuda"', '"cpu"')):
        assert there in text
        text = text.replace(there, here)
    snippet = tmp_path / "snippet.py"
    snippet.write_text(text)
    done = subprocess.run(
        [sys.executable, str(snippet)],
        env={**os.environ, **NOT_COMPILED, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^version 1: .*\n.*\S", done.stdout, re.MULTILINE)


def status(url: str) -> int:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        return int(answer.status)


def test_a_poisoned_server_is_alive_and_not_ready(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    documents = yaml.safe_load_all((ROOT / "examples/containers/engines.yaml").read_text(encoding="utf-8"))
    (engines,) = (each for each in documents if each["kind"] == "StatefulSet")
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    *shell, script = container["readinessProbe"]["exec"]["command"]
    assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/health"

    model = tiny_models.build("qwen3", "A")
    folder = tiny_models.save(model, tmp_path / "model")
    transport = FaultyTransport("ipc")
    with VllmServer(folder, *OPTIONS, environment=NOT_COMPILED, log=tmp_path / "log", start_timeout_s=400) as server:

        def is_ready() -> bool:
            words = [*shell, script.replace("localhost:8000", server.url)]
            assert server.url in words[-1]
            return subprocess.run(words, env={**os.environ, "no_proxy": "*"}, timeout=60).returncode == 0

        assert not is_ready()
        with WeightSync("fsdp", transport, server.url, verify="full", timeout_s=60.0) as sync:
            sync.push(model)
            assert is_ready()
            transport.flip_a_byte_of = 0
            with pytest.raises(DigestError):
                sync.push(model)
            assert status(f"{server.url}/health") == 200
            assert not is_ready()
            sync.push(model)
            assert is_ready()
