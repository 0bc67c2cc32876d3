"""The file that tells where an engine's parameters lie, and the server that writes it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from rich.console import Console

from weightsync import CheckpointTransport, ConfigError, EngineError, PlacementError, ProtocolError, WeightSync, bridge
from weightsync.cli import bridge_report
from weightsync.engines import connect
from weightsync.errors import WeightSyncError
from weightsync.machine import started_ticks
from weightsync.server import VllmServer
from weightsync.transports.single_copy import SingleCopyTransport
from weightsync.vllm.serve import command_line

LIVE: list[dict[str, torch.Tensor]] = []
"""An engine's parameters live as long as it."""


def write(path: Path, parameters: dict[str, torch.Tensor], **changes: Any) -> Path:
    """As an engine with one worker, this process, does."""
    LIVE.append(parameters)
    handles = bridge.handle_rows(parameters)
    ticks = started_ticks(os.getpid())
    assert ticks is not None
    worker = {"rank": 0, "pid": os.getpid(), "started_ticks": ticks, "epoch": "e", "device": "cpu", "gpu_uuid": ""}
    bridge.write(path, "m", "http://127.0.0.1:1", 1, [bridge.Worker(**{**worker, **changes}, ipc_handles=handles)])
    return path


def change(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


@pytest.fixture
def written(tmp_path: Path) -> Path:
    fused = torch.arange(24.0).view(6, 4)
    norm, packed = torch.ones(3).bfloat16(), torch.empty(0)
    return write(tmp_path / bridge.FILE, {"qkv.weight": fused, "v.weight": fused[4:], "norm": norm, "packed": packed})


def test_another_process_maps_what_the_file_names(written: Path):
    program = (
        "import torch; from pathlib import Path; from weightsync import bridge\n"
        f"found = bridge.open_parameters(bridge.read(Path({str(written)!r})), 0, torch.device('cpu'))\n"
        "print({name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()}); found['v.weight'].zero_()"
    )
    mine = bridge.open_parameters(bridge.read(written), 0, torch.device("cpu"))
    assert mine["v.weight"].tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "'norm': (torch.bfloat16, [1.0, 1.0, 1.0])" in done.stdout
    assert mine["qkv.weight"][3:].tolist() == [[12, 13, 14, 15], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_the_file_has_the_fields_that_are_documented_and_is_the_users_own(written: Path):
    content = json.loads(written.read_text())
    assert content["param_names"] == ["qkv.weight", "v.weight", "norm"]
    assert content["param_mappings"]["norm"] == {
        "vllm_name": "norm", "shape": [3], "dtype": "torch.bfloat16", "device": "cpu",
    }  # fmt: skip
    assert (content["tp_degree"], content["num_params"], content["format"]) == (1, 3, bridge.FORMAT)
    assert set(content["workers"][0]["ipc_handles"]["norm"]) == {
        "path", "inode", "storage_size", "shape", "stride", "offset", "dtype",
    }  # fmt: skip
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [path.name for path in written.parent.iterdir()] == [bridge.FILE]


def test_gpu_handles_are_named_base64_fields():
    fields = {
        "device": 0, "handle": b"\0\xff", "nbytes": 64, "offset_bytes": 512, "counter_handle": b"/c",
        "counter_offset": 3, "event_handle": b"e", "event_sync": True, "gpu_uuid": "GPU-1",
    }  # fmt: skip
    row = bridge.handle_row(torch.empty(4, 2), fields)
    assert row["ipc_handle_b64"] == "AP8="
    assert bridge._fields(json.loads(json.dumps(row))) == fields


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pid": 2**22 + 1}, "process 4194305, has ended"),
        ({"started_ticks": 1}, "has ended"),
    ],
)
def test_a_file_of_a_dead_engine_is_stale(tmp_path: Path, changes: dict[str, Any], words: str):
    path = write(tmp_path / bridge.FILE, {"w": torch.ones(2)}, **changes)
    for call in (bridge.check, lambda found: bridge.open_parameters(found, 0, torch.device("cpu"))):
        with pytest.raises(PlacementError, match=words):
            call(bridge.read(path))
    with pytest.raises(PlacementError, match="stale"):
        SingleCopyTransport(path).engine_url()


def test_a_file_of_before_a_boot_is_stale(written: Path):
    with pytest.raises(PlacementError, match="before this one was booted"):
        bridge.check(bridge.read(change(written, boot_id="another")))


def test_another_engines_epoch_is_refused(written: Path):
    SingleCopyTransport(written).check_epochs(["e"])
    with pytest.raises(PlacementError, match="another engine's"):
        SingleCopyTransport(written).check_epochs(["f"])


def test_what_is_no_such_file_is_refused(written: Path, tmp_path: Path):
    with pytest.raises(ProtocolError, match="format 2"):
        bridge.read(change(written, format=2))
    with pytest.raises(ProtocolError, match="KeyError: 'workers'"):
        bridge.read(_without(change(written, format=1), "workers"))
    (tmp_path / "text").write_text("{")
    with pytest.raises(ProtocolError, match="not JSON"):
        bridge.read(tmp_path / "text")
    with pytest.raises(PlacementError, match="cannot read"):
        bridge.read(tmp_path / "none")


def _without(path: Path, field: str) -> Path:
    content = json.loads(path.read_text())
    del content[field]
    path.write_text(json.dumps(content))
    return path


def test_files_are_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    places = [tmp_path / name for name in ("logs", "here", "run/weightsync")]
    monkeypatch.setenv("LOGDIR", str(places[0]))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    places[1].mkdir()
    monkeypatch.chdir(places[1])
    with pytest.raises(ConfigError, match=r"looked for .*logs.*run/weightsync"):
        bridge.find()
    for place in reversed(places):
        place.mkdir(parents=True, exist_ok=True)
        (place / bridge.FILE).touch()
        assert bridge.find().resolve() == place / bridge.FILE
    assert bridge.find(tmp_path / "here" / bridge.FILE) == tmp_path / "here" / bridge.FILE
    with pytest.raises(ConfigError, match="elsewhere"):
        bridge.find(tmp_path / "absent")
    assert bridge.place_to_write() == places[0] / bridge.FILE
    monkeypatch.delenv("LOGDIR")
    assert bridge.place_to_write() == places[2] / bridge.FILE


def test_the_command_says_whether_a_file_holds(written: Path, tmp_path: Path):
    with open(tmp_path / "out", "w+") as out:
        assert bridge_report.run(written, Console(file=out, width=200))
        assert not bridge_report.run(change(written, boot_id="another"), Console(file=out, width=200))
        out.seek(0)
        text = out.read()
    assert "3 parameters can be mapped" in text
    assert "stale" in text


# ---------------------------------------------------------------------------------------------------------------
# python -m weightsync.vllm.serve


def test_the_server_listens_on_this_host_alone_and_keeps_vllms_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    command, environment = command_line(["m", "--enable-lora", "--max-model-len", "64"])
    assert command[:6] == ["serve", "m", "--host", "127.0.0.1", "--port", "8000"]
    assert command[-3:] == ["--enable-lora", "--max-model-len", "64"]
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "weightsync"}
    assert environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        bridge.VARIABLE: str(tmp_path / bridge.FILE),
        bridge.URL_VARIABLE: "http://127.0.0.1:8000",
    }
    command, environment = command_line(["--dtype", "bfloat16", "--model", "m", "--bridge", "none"])
    assert (command[1], command[-2:]) == ("m", ["--dtype", "bfloat16"])
    assert environment == {"VLLM_SERVER_DEV_MODE": "1", bridge.VARIABLE: ""}
    assert command_line(["m", "--enable_lora"])[1]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    for option in ("--weight-transfer-config", "--weight_transfer_config"):
        with pytest.raises(ConfigError, match="leave --weight-transfer-config out"):
            command_line(["m", option, "{}"])
    with pytest.raises(SystemExit):
        command_line(["--dtype", "bfloat16"])


OPTIONS = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=64", "--dtype=bfloat16")
PLAIN = (*OPTIONS, "--quantization=weightsync_plain")


def first_norm() -> torch.Tensor:
    """Out of the memory of the engine whose file is found."""
    live = bridge.open_parameters(bridge.read(bridge.find()), 0, torch.device("cpu"))
    return live["model.norm.weight"].clone()


@pytest.mark.engine
def test_a_server_shares_its_memory_starts_anew_from_a_version_and_leaves_a_stale_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import AutoModelForCausalLM

    folder = tiny_models.save(tiny_models.build("llama", "A"), tmp_path / "model")
    of_b = tiny_models.build("llama", "B")
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    monkeypatch.delenv("WEIGHTSYNC_ENGINE", raising=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_models.CONFIGS["llama"](), dtype=torch.bfloat16)
    with VllmServer(folder, *PLAIN, log=tmp_path / "log", start_timeout_s=400) as server:
        (engine,) = connect(server, 60.0)
        with WeightSync("fsdp", "single_copy", timeout_s=60.0) as sync:  # finds the server by its file
            sync.attach(model)
            with sync.writing(version=7):
                tiny_models.fill(model, "B")
            assert engine.version() == "7"
            assert torch.equal(first_norm(), of_b.model.norm.weight)
            first = server.pid
            restarting = CheckpointTransport(tmp_path / "versions", restart=True)
            with WeightSync("fsdp", restarting, server, timeout_s=60.0) as other:
                assert other.push(of_b, version=9).version == 9
            assert server.pid != first
            assert engine.version() == "9"
            assert torch.equal(first_norm(), of_b.model.norm.weight)
            for words in ("closed its connection", "started anew since `attach`"):
                with pytest.raises(WeightSyncError, match=words), sync.writing():
                    raise AssertionError("the body must not run")
            assert engine.version() == "9"  # nothing was marked
        (worker,) = bridge.read(bridge.find()).workers
        os.killpg(server.pid, signal.SIGKILL)
        while started_ticks(worker.pid) is not None:  # the kernel takes a big process apart in its own time
            time.sleep(0.05)
        with pytest.raises(PlacementError, match="stale"), WeightSync("fsdp", "single_copy") as sync:
            sync.attach(model)


@pytest.mark.engine
def test_a_server_whose_kernels_have_packed_its_weights_shares_what_they_left(tmp_path: Path, monkeypatch: Any):
    """As they do on a CPU, unless `weightsync_plain` keeps them from it."""
    folder = tiny_models.save(tiny_models.build("llama", "A"), tmp_path / "model")
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    with VllmServer(folder, *OPTIONS, log=tmp_path / "log", start_timeout_s=400):
        assert torch.equal(first_norm(), tiny_models.build("llama", "A").model.norm.weight)


def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    server = VllmServer(tmp_path / "nothing", "--no-such-option", log=tmp_path / "log", start_timeout_s=120)
    transport = CheckpointTransport(tmp_path / "versions", restart=True)
    with pytest.raises(EngineError, match=r"(?s)ended with exit code .*no-such-option") as raised:
        WeightSync("fsdp", transport, server).push(torch.nn.Linear(2, 2))
    assert raised.value.phase == "restart"
    assert server.pid is None


def test_another_server_is_not_taken_for_ours(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = VllmServer(tmp_path / "nothing", port=port, log=tmp_path / "log")
        with pytest.raises(EngineError, match=f"port {port} cannot be had .* or give another port"):
            server.start()
    assert server.pid is None


def test_only_a_server_of_ours_is_ended_and_started_anew(tmp_path: Path):
    transport = CheckpointTransport(tmp_path, restart=True)
    with pytest.raises(ConfigError, match="must be a weightsync"):
        WeightSync("fsdp", transport, "http://localhost:1").push(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="leave quantize out"):
        WeightSync("fsdp", transport, quantize="fp8")
    assert list(tmp_path.iterdir()) == []
