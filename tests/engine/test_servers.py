"""A server of our own: it shares its memory by a file, is started anew from a version, and leaves a stale file."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
import tiny_models
import torch
from engines import IN_CORE, Engines, Remote

from weightsync import CheckpointTransport, PlacementError, WeightSync
from weightsync.engines.server import VllmServer
from weightsync.errors import EngineError, WeightSyncError
from weightsync.fleet import connect
from weightsync.net.runtime import started_ticks
from weightsync.transports import handle_file

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


OPTIONS = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=64", "--dtype=bfloat16")
PLAIN = (*OPTIONS, "--quantization=weightsync_plain")


def metrics(server: VllmServer) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{server.url}/metrics") as answer:
        return answer.read().decode()


def first_norm() -> torch.Tensor:
    """Out of the memory of the engine whose file is found."""
    live = handle_file.open_parameters(handle_file.read(handle_file.find()), 0, torch.device("cpu"))
    return live["model.norm.weight"].clone()


def test_a_server_shares_memory_restarts_from_a_version_and_leaves_a_stale_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import AutoModelForCausalLM

    folder = tiny_models.save(tiny_models.build("llama", "A"), tmp_path / "model")
    of_b = tiny_models.build("llama", "B")
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    monkeypatch.delenv("WEIGHTSYNC_ENGINE", raising=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_models.CONFIGS["llama"](), dtype=torch.bfloat16)
    with VllmServer(folder, *PLAIN, log=tmp_path / "log", environment=IN_CORE, start_timeout_s=400) as server:
        (engine,) = connect(server, 60.0)
        with WeightSync("fsdp", "single_copy", timeout_s=60.0) as sync:  # finds the server by its file
            sync.attach(model)
            with sync.writing(version=7):
                tiny_models.fill(model, "B")
            assert engine.version() == "7"
            assert 'weightsync_engine_version{worker="tp=0 pp=0 dp=0"} 7.0' in metrics(server)
            assert torch.equal(first_norm(), of_b.model.norm.weight)
            engine._session = "of a trainer whose workers are another engine's"
            with pytest.raises(EngineError, match="If the address is a load balancer's"):
                engine.pause("keep")
            engine._session = ""
            assert engine.is_paused() is False
            first = server.pid
            restarting = CheckpointTransport(tmp_path / "versions", restart=True)
            with WeightSync("fsdp", restarting, server, timeout_s=60.0) as other:
                assert other.push(of_b, version=9).version == 9
            assert server.pid != first
            assert engine.version() == "9"
            assert 'weightsync_engine_version{worker="tp=0 pp=0 dp=0"} 9.0' in metrics(server)
            assert torch.equal(first_norm(), of_b.model.norm.weight)
            for words in ("closed its connection", "restarted since `attach`"):
                with pytest.raises(WeightSyncError, match=words), sync.writing():
                    raise AssertionError("the body must not run")
            assert engine.version() == "9"  # nothing was marked
        (worker,) = handle_file.read(handle_file.find()).workers
        os.killpg(server.pid, signal.SIGKILL)
        while started_ticks(worker.pid) is not None:  # the kernel takes a big process apart in its own time
            time.sleep(0.05)
        with pytest.raises(PlacementError, match="stale"), WeightSync("fsdp", "single_copy") as sync:
            sync.attach(model)


def start_with_a_file(engines: Engines, path: Path) -> None:
    os.environ[handle_file.VARIABLE] = str(path)
    try:
        engines.start(engines.checkpoint("llama", "A"))
    finally:
        del os.environ[handle_file.VARIABLE]


def test_engine_whose_kernels_have_packed_its_weights_shares_what_they_left(
    engines: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As they do on a CPU, unless `weightsync_plain` keeps them from it."""
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    engines.call(start_with_a_file, tmp_path / handle_file.FILE)
    assert torch.equal(first_norm(), tiny_models.build("llama", "A").model.norm.weight)
