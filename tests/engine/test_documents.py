"""What the documents tell users to run, run: the snippet of the README, and the probes of examples/containers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import tiny_models
import torch
import yaml
from engines import NOT_COMPILED
from faults import FaultyTransport

from weightsync import DigestError, WeightSync
from weightsync.engines import VllmServer

pytestmark = pytest.mark.engine

SPAWN = multiprocessing.get_context("spawn")
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=64", "--dtype=bfloat16")


def run_script(script: Path) -> None:
    """Run a script as a program. Its output goes to files beside it: `stdout` and `stderr`."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        with script.with_name(name).open("wb") as file:
            os.dup2(file.fileno(), fd)
    runpy.run_path(str(script), run_name="__main__")
    gc.collect()  # frees the engine, which ends its processes. A process of multiprocessing waits for these at its end


def test_the_snippet_of_the_readme_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for name, value in NOT_COMPILED.items():
        monkeypatch.setenv(name, value)
    if torch.cuda.is_available():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = SPAWN.Process(target=run_script, args=(snippet,))
    program.start()
    program.join(400)
    program.kill()
    shown, errors = ((tmp_path / name).read_text() for name in ("stdout", "stderr"))
    assert program.exitcode == 0, errors[-2000:]
    assert re.search(r"^version 1: .*\n.*\S", shown, re.MULTILINE)


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
