"""The file that tells where an engine's parameters lie, and the server that writes it."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from weightsync import (
    CheckpointTransport,
    ConfigError,
    EngineError,
    PlacementError,
    ProtocolError,
    TensorSelection,
    UnsupportedError,
    WeightSync,
)
from weightsync.engines.server import VllmServer
from weightsync.net.runtime import started_ticks
from weightsync.strategies.restart import check_options
from weightsync.strategies.shared_memory import SingleCopyTransport
from weightsync.tools import handles
from weightsync.transports import handle_file
from weightsync.vllm import serve
from weightsync.vllm.serve import command_line

LIVE: list[dict[str, torch.Tensor]] = []
"""An engine's parameters live as long as it."""


def write(path: Path, parameters: dict[str, torch.Tensor], **changes: Any) -> Path:
    """As an engine with one worker, this process, does."""
    LIVE.append(parameters)
    handles = handle_file.handle_rows(parameters)
    ticks = started_ticks(os.getpid())
    assert ticks is not None
    worker = {
        "rank": 0,
        "pid": os.getpid(),
        "started_ticks": ticks,
        "engine_instance": "e",
        "device": "cpu",
        "gpu_uuid": "",
    }
    workers = [handle_file.WorkerHandles(**{**worker, **changes}, ipc_handles=handles)]
    return handle_file.write(path, "m", "http://127.0.0.1:1", 1, workers)


def change(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


@pytest.fixture
def written(tmp_path: Path) -> Path:
    fused = torch.arange(24.0).view(6, 4)
    norm, packed = torch.ones(3).bfloat16(), torch.empty(0)
    return write(
        tmp_path / handle_file.FILE, {"qkv.weight": fused, "v.weight": fused[4:], "norm": norm, "packed": packed}
    )


def test_another_process_maps_what_the_file_names(written: Path):
    program = (
        "import torch; from pathlib import Path; from weightsync.transports import handle_file\n"
        f"found = handle_file.open_parameters(handle_file.read(Path({str(written)!r})), 0, torch.device('cpu'))\n"
        "print({name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()}); found['v.weight'].zero_()"
    )
    mine = handle_file.open_parameters(handle_file.read(written), 0, torch.device("cpu"))
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
    assert (content["tp_degree"], content["num_params"], content["format"]) == (1, 3, handle_file.FORMAT)
    assert set(content["workers"][0]["ipc_handles"]["norm"]) == {
        "pid", "fd", "inode", "storage_size", "shape", "stride", "offset", "dtype",
    }  # fmt: skip
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [path.name for path in written.parent.iterdir()] == [handle_file.FILE]


def test_gpu_handles_are_named_base64_fields():
    fields = {
        "device": 0, "handle": "00ff", "nbytes": 64, "offset_bytes": 512, "counter_handle": "2f63",
        "counter_offset": 3, "event_handle": "65", "event_sync": True, "gpu_uuid": "GPU-1",
    }  # fmt: skip
    row = handle_file.handle_row(torch.empty(4, 2), fields)
    assert row["ipc_handle_b64"] == "AP8="
    assert handle_file._fields(json.loads(json.dumps(row))) == fields


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pid": 2**22 + 1}, "process 4194305, has ended"),
        ({"started_ticks": 1}, "has ended"),
    ],
)
def test_a_file_of_a_dead_engine_is_stale(tmp_path: Path, changes: dict[str, Any], words: str):
    path = write(tmp_path / handle_file.FILE, {"w": torch.ones(2)}, **changes)
    for call in (handle_file.check, lambda found: handle_file.open_parameters(found, 0, torch.device("cpu"))):
        with pytest.raises(PlacementError, match=words):
            call(handle_file.read(path))
    with pytest.raises(PlacementError, match="stale"):
        SingleCopyTransport(path).engine_url()


def test_a_file_of_before_a_boot_is_stale(written: Path):
    with pytest.raises(PlacementError, match="before this host was booted"):
        handle_file.check(handle_file.read(change(written, boot_id="another")))


def test_another_engines_epoch_is_refused(written: Path):
    SingleCopyTransport(written).check_instances(["e"])
    with pytest.raises(PlacementError, match="belongs to another engine"):
        SingleCopyTransport(written).check_instances(["f"])


def test_what_is_no_such_file_is_refused(written: Path, tmp_path: Path):
    with pytest.raises(ProtocolError, match="format 2"):
        handle_file.read(change(written, format=2))
    with pytest.raises(ProtocolError, match="required field `workers`"):
        handle_file.read(_without(change(written, format=1), "workers"))
    (tmp_path / "text").write_text("{")
    with pytest.raises(ProtocolError, match="JSONDecodeError"):
        handle_file.read(tmp_path / "text")
    with pytest.raises(PlacementError, match="cannot read"):
        handle_file.read(tmp_path / "none")


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
    with pytest.raises(ConfigError, match=r"no .* at .*logs.*run/weightsync"):
        handle_file.find()
    for place in reversed(places):
        place.mkdir(parents=True, exist_ok=True)
        (place / handle_file.FILE).touch()
        assert handle_file.find().resolve() == place / handle_file.FILE
    assert handle_file.find(tmp_path / "here" / handle_file.FILE) == tmp_path / "here" / handle_file.FILE
    with pytest.raises(ConfigError, match="or name the file"):
        handle_file.find(tmp_path / "absent")
    assert handle_file.place_to_write() == places[0] / handle_file.FILE
    monkeypatch.delenv("LOGDIR")
    assert handle_file.place_to_write() == places[2] / handle_file.FILE


def test_an_engine_that_ends_leaves_the_file_of_another_one(written: Path):
    write(written, {}, pid=os.getppid(), started_ticks=1)
    handle_file.remove(written)
    assert written.exists()
    write(written, {})
    for _ in range(2):
        handle_file.remove(written)
        assert not written.exists()


def test_two_engines_on_one_host_have_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    shared = handle_file.place_to_write()
    parent = os.getppid()
    ticks = started_ticks(parent)
    assert write(shared, {"w": torch.ones(2)}, pid=parent, started_ticks=ticks) == shared
    own = write(shared, {"w": torch.ones(2)})
    assert own == tmp_path / f"vllm_bridge_config-{os.getpid()}.json"
    assert write(shared, {"w": torch.ones(2)}) == own
    assert handle_file.read(shared).workers[0].pid == parent
    for find in (handle_file.find, SingleCopyTransport().engine_url):
        with pytest.raises(
            ConfigError, match=rf"2 engines run on this host: {shared} .*, {own} .*Name the file of one"
        ):
            find()
    assert handle_file.find(shared) == shared
    change(shared, boot_id="another")  # of an engine that has ended
    assert handle_file.find() == own
    handle_file.remove(own)
    assert handle_file.find() == shared


def test_the_command_says_whether_a_file_holds(written: Path, tmp_path: Path):
    with open(tmp_path / "out", "w+") as out:
        assert handles.run(Namespace(file=written), Console(file=out, width=200))
        assert not handles.run(Namespace(file=change(written, boot_id="another")), Console(file=out, width=200))
        out.seek(0)
        text = out.read()
    assert text.splitlines()[1].split() == ["worker", "process", "device", "GPU", "parameters", "bytes", "instance"]
    assert "3 parameters can be mapped" in text
    assert "stale" in text


# ---------------------------------------------------------------------------------------------------------------
# weightsync serve


def test_the_server_listens_on_this_host_alone_and_keeps_vllms_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    command, environment = command_line(["m", "--enable-lora", "--max-model-len", "64"])
    assert command[:6] == ["serve", "m", "--host", "127.0.0.1", "--port", "8000"]
    assert command[-3:] == ["--enable-lora", "--max-model-len", "64"]
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "weightsync"}
    assert environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        handle_file.VARIABLE: str(tmp_path / handle_file.FILE),
        handle_file.URL_VARIABLE: "http://127.0.0.1:8000",
    }
    command, environment = command_line(["--dtype", "bfloat16", "--model", "m", "--bridge", "none"])
    assert (command[1], command[-2:]) == ("m", ["--dtype", "bfloat16"])
    assert environment == {"VLLM_SERVER_DEV_MODE": "1", handle_file.VARIABLE: ""}
    assert command_line(["m", "--enable_lora"])[1]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert command_line(["m", "--host", "::1"])[1][handle_file.URL_VARIABLE] == "http://[::1]:8000"
    for option in ("--weight-transfer-config", "--weight_transfer_config"):
        with pytest.raises(ConfigError, match="leave --weight-transfer-config out"):
            command_line(["m", option, "{}"])
    for arguments in (["--dtype", "bfloat16"], ["m", "--model", "other"]):
        with pytest.raises(SystemExit):
            command_line(arguments)


@pytest.mark.parametrize("option", ["--enable-lora", "--enable_lora"])
def test_a_server_of_adapters_keeps_the_metric_that_pushes_of_them_read(option: str, monkeypatch: pytest.MonkeyPatch):
    """Metrics in files would hide it."""
    found = []
    monkeypatch.setattr(serve, "_run", lambda _: found.append(os.environ.get("PROMETHEUS_MULTIPROC_DIR")))
    for arguments in (["m"], ["m", option]):
        with mock.patch.dict(os.environ):
            monkeypatch.setattr(sys, "argv", ["serve", *arguments])
            serve.main()
    assert (found[0] is None, found[1]) == (False, None)


def test_a_server_that_cannot_start_says_why(tmp_path: Path):
    from transformers import PretrainedConfig

    options = ["--weight-transfer-config={}", "--skip-tokenizer-init"]
    server = VllmServer(tmp_path / "nothing", *options, log=tmp_path / "log", start_timeout_s=120)
    assert repr(server) == f"<VllmServer('{tmp_path}/nothing') at http://127.0.0.1:{server.port}, not running>"
    earlier = tmp_path / "versions" / "version-00000004"
    earlier.mkdir(parents=True)
    (earlier.parent / ".incoming-0").mkdir()  # of a trainer that was killed
    config = PretrainedConfig(architectures=["X"])
    transport = CheckpointTransport(tmp_path / "versions", restart=True, keep_last=1, config=config)
    sync = WeightSync("fsdp", transport, server)
    with pytest.raises(EngineError, match=r"(?s)ended with exit code .*leave --weight-transfer-config out") as raised:
        sync.push(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="another trainer writes checkpoints to"):
        WeightSync("fsdp", transport, server).push(torch.nn.Linear(2, 2))
    sync.close()
    assert raised.value.phase == "restart"
    assert server.pid is None
    assert {path.name for path in earlier.parent.iterdir()} == {".lock", earlier.name, "version-00000005"}


@pytest.mark.parametrize("given", [[], ["--served-model-name=policy"], ["--served_model_name", "policy"]])
def test_a_restarted_server_serves_the_name_of_before(given: list[str], tmp_path: Path):
    server = VllmServer("Qwen/Qwen3-0.6B", *given, log=tmp_path / "log")
    started = []

    def note(name: str, command: list[str], environment: dict[str, str], log: Path) -> Any:
        started.append((command, environment.get("WEIGHTSYNC_VERSION")))
        return mock.DEFAULT

    with mock.patch("weightsync.engines.server.Child", side_effect=note), mock.patch.object(VllmServer, "wait"):
        server.start()
        server.restart(tmp_path / "version-00000001", version=1)
        server.restart(tmp_path / "other")
        server.stop()
    assert [version for _, version in started] == [None, "1", "0"]
    served = "Qwen/Qwen3-0.6B", tmp_path / "version-00000001", tmp_path / "other"
    for (command, _), model in zip(started, served, strict=True):
        assert command[3] == str(model)
        assert command[-2:] == ["--served-model-name", "Qwen/Qwen3-0.6B"] or command[-len(given) :] == given != []


def test_another_server_is_not_taken_for_ours(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = VllmServer(tmp_path / "nothing", port=port, log=tmp_path / "log")
        with pytest.raises(EngineError, match=f"port {port} cannot be opened .* or give another port"):
            server.start()
    assert server.pid is None


def test_only_a_server_of_ours_is_ended_and_started_anew(tmp_path: Path):
    transport = CheckpointTransport(tmp_path, restart=True)
    with pytest.raises(ConfigError, match="expected a weightsync"):
        WeightSync("fsdp", transport, "http://localhost:1").push(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="leave quantize out"):
        WeightSync("fsdp", transport, quantize="fp8")
    with pytest.raises(ConfigError, match=r"TensorSelection\(exclude\): no effect with restart=True"):
        WeightSync("fsdp", transport, selection=TensorSelection(exclude=("*",)))
    for options in ((), ("--max-model-len", "64")):  # transformers makes an empty tokenizer for some models
        with pytest.raises(ConfigError, match=r"no tokenizer: give CheckpointTransport\(tokenizer=...\)"):
            WeightSync("fsdp", transport, VllmServer(tmp_path / "nothing", *options)).push(torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_could_not_start_again_is_not_ended(tmp_path: Path):
    server = VllmServer(tmp_path / "nothing", "--skip-tokenizer-init", log=tmp_path / "log")
    transport = CheckpointTransport(tmp_path / "versions", restart=True)
    with (
        mock.patch.object(VllmServer, "restart") as restart,
        pytest.raises(ConfigError, match=r"no config: give CheckpointTransport\(config=...\)"),
    ):
        WeightSync("fsdp", transport, server).push(torch.nn.Linear(2, 2))
    restart.assert_not_called()
    assert not (tmp_path / "versions").exists()


TIERED = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}]}}'


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        (["--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'], True),
        (['--kv_transfer_config={"kv_connector":"LMCacheConnectorV1"}'], True),
        (["--kv-transfer-config.kv_connector", "ExampleConnector"], True),
        (["--kv-transfer-config", "$CONFIG"], True),
        (["--kv-transfer-config", TIERED], True),
        (
            [
                "--kv-transfer-config.kv_connector=OffloadingConnector",
                "--kv-transfer-config.kv_connector_extra_config.spec_name=Own",
            ],
            True,
        ),
        (["--ec-transfer-config", '{"ec_connector": "ECExampleConnector"}'], True),
        (["--load-format", "ipc_cache"], True),
        (["--load_format=dummy"], True),
        (["--load-format", "Tensorizer"], True),  # vLLM ignores the case
        (["--load-format", "sharded_state"], True),
        (["--load-format", "safetensors", "--config-format=mistral"], True),
        (["--config", "serve.yaml"], True),
        (["--load-form", "dummy"], True),
        (["--kv-transfer", '{"kv_connector":"LMCacheConnectorV1"}'], True),
        (["--kv-offloading-backend", "lmcache", "--kv-offloading-size", "1"], True),
        (["--kv-offloading-backend", "native", "--kv-offloading-size", "1"], False),
        (["--chat-template", "./chat.jinja", "--gpu-memory-utilization", ".855"], False),
        (["--chat-template=../a.jinja", "--config-format", "auto", "-tp", "2"], False),
        (["--kv-cache-dtype", "auto", "--load-format", "safetensors"], False),
        (["--load-format", "auto", "--served-model-name", "dummy"], False),
        (["--load-format", "runai_streamer", "--tokenizer-mode", "mistral"], False),
        (["--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'], False),
        (["--kv-transfer-config.kv-connector=NixlConnector"], False),
        (["--max-model-len", "64"], False),
        ([], False),
    ],
)
def test_options_that_serve_another_version_are_refused(options: list[str], is_refused: bool, tmp_path: Path):
    if is_refused:
        transport = CheckpointTransport(tmp_path / "versions", restart=True)
        server = VllmServer(tmp_path / "nothing", *options, log=tmp_path / "log")
        with pytest.raises(UnsupportedError, match="the server is started with --"):
            WeightSync("fsdp", transport, server).push(torch.nn.Linear(2, 2))
        assert not (tmp_path / "versions").exists()
    else:
        check_options(options)
