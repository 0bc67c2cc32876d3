"""A trainer and an engine with different torches, each way round: pushed equals cold. `make test-versions` runs this.

The other torch is that of an environment in .versions. As a program, this file is the trainer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import tiny_models
from engines import ANSWER_TOKENS, NOT_COMPILED, PROMPTS

from weightsync import WeightSync
from weightsync.engines import HttpEngine
from weightsync.net.child import Child, free_port
from weightsync.net.runtime import Deadline

ROOT = Path(__file__).resolve().parents[2]
TORCH = "from importlib.metadata import version; print(version('torch'))"


def has_another_torch(python: Path) -> bool:
    return subprocess.check_output([python, "-c", TORCH], cwd="/", text=True).strip() != version("torch")


@pytest.fixture(scope="module")
def other() -> Path:
    """The Python of an environment with another torch than this process's."""
    installed = sorted((ROOT / ".versions").glob("*/.installed"))
    found = [python for each in installed if has_another_torch(python := each.parent / "bin/python")]
    if not found:
        pytest.skip("no environment in .versions has another torch than this one")
    return found[-1]


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("trains", [True, False], ids=["trainer", "engine"])
def test_the_other_torch_is_that_of_the(other: Path, tmp_path: Path, trains: bool, transport: str) -> None:
    trainer, engine = (other, sys.executable) if trains else (sys.executable, other)
    checkpoint = tiny_models.save(tiny_models.build("qwen3", "A"), tmp_path / "A")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    environment = NOT_COMPILED | {"PYTHONPATH": paths}
    url = f"http://127.0.0.1:{free_port()}"
    options = ["--max-model-len=256", "--dtype=bfloat16", "--enforce-eager", "--skip-tokenizer-init", "--bridge=none"]
    serve = [str(engine), "-m", "weightsync.vllm.serve", str(checkpoint), f"--port={url.rpartition(':')[2]}", *options]
    server = Child("the server", serve, environment, tmp_path / "log")
    try:
        alive, deadline = HttpEngine(url, name=url, timeout_s=20.0).is_alive, Deadline(150)
        while not alive():
            assert server.exit_report() is None, server.exit_report()
            assert not deadline.passed(), server.log_end()
            time.sleep(0.5)
        push = [str(trainer), __file__, url, str(checkpoint), transport]
        ran = subprocess.run(
            push, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == 0, ran.stderr
    finally:
        server.stop()


def push_twice(url: str, model: str, transport: str) -> None:
    """Push other weights than the server has, and then those that it was started from."""
    server = HttpEngine(url, name=url, timeout_s=60.0)
    asked = {"model": model, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 5, "ignore_eos": True}
    asked["return_tokens_as_token_ids"] = True

    def answers() -> list[object]:
        return [
            server.call("POST", "/v1/completions", {**asked, "prompt": p})["choices"][0]["logprobs"] for p in PROMPTS
        ]

    cold, trained = answers(), tiny_models.build("qwen3", "A")
    with WeightSync("fsdp", transport, url, timeout_s=60.0) as sync:
        for weights in "BA":
            tiny_models.fill(trained, weights)
            sync.push(trained)
            assert (answers() == cold) == (weights == "A"), f"the answers after a push of {weights}"


if __name__ == "__main__":
    push_twice(*sys.argv[1:])
