"""What no vLLM answers by HTTP, names that no file can hold, and one server under two names."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model
from fake_server import FakeServer
from recorders import RecordedEngine

import weightsync
from weightsync import CheckpointTransport, ConfigError, EngineError, LoraTransport, WeightSync
from weightsync.checkpoint.locked_folder import VersionFolder
from weightsync.engines import LoraAdapter, http
from weightsync.errors import EngineUnreachableError
from weightsync.fleet import connect
from weightsync.net.runtime import spawn
from weightsync.net.wire import MAX_VERSION, Failure, encode
from weightsync.strategies.lora import AdapterFolder

TIMEOUT_S = 20.0
ADAPTER = LoraAdapter("policy-1-0123abcd", 1, "/a")


class RawServer:
    """Answers each request by the bytes that `parts` gives, until the other end has had enough."""

    def __init__(self, parts: Callable[[], Iterator[bytes]]) -> None:
        self.parts = parts
        self.sent_bytes = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                with sock, suppress(OSError):
                    sock.recv(1 << 16)
                    for part in self.parts():
                        sock.sendall(part)
                        self.sent_bytes += len(part)

    def close(self) -> None:
        self._listening.close()


def answers(text: str, status: str = "200 OK") -> Callable[[], Iterator[bytes]]:
    content = text.encode()
    return lambda: iter([f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content])


def ask(server: RawServer, method: str, *arguments: Any) -> Any:
    (engine,) = connect(server.url, TIMEOUT_S)
    return getattr(engine, method)(*arguments)


HALF_MIB = b"x" * (1 << 19)


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ("", HALF_MIB),
        ("Content-Length: 1000000000000\r\n", HALF_MIB),
        ("Transfer-Encoding: chunked\r\n", b"80000\r\n" + HALF_MIB + b"\r\n"),
        ("Transfer-Encoding: chunked\r\n\r\n-1\r\n", HALF_MIB),
    ],
    ids=["no length", "a large length", "chunks", "a chunk of -1 bytes"],
)
@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
def test_an_endless_answer_ends_in_an_error(head: str, part: bytes, status: str) -> None:
    head = f"HTTP/1.1 {status}\r\n{head}\r\n"
    with closing(RawServer(lambda: itertools.chain([head.encode()], itertools.repeat(part)))) as server:
        with pytest.raises(EngineError, match=r"/weight_info.* has over \d+ bytes"):
            ask(server, "version")
        assert server.sent_bytes < 3 * http._MOST_BYTES


DEEP = "[" * 100_000
ODD = ["", "null", "[]", "{}", "1", '"x"', "NaN", "{", DEEP, '{"a":' * 50_000, "9" * 5_000, '{"error": ' + DEEP]
KEYS = "weight_version", "is_paused", "data", "version", "vllm_config", "success"
VALUES = None, [], {}, [1], [{}], [None], 1.5, [{"id": 1}], {"weight_transfer_config": 1}, "9" * 5000 + ".1"
ODD += [json.dumps({key: value}) for key in KEYS for value in VALUES]
CALLS: list[tuple[Any, ...]] = [
    ("version",), ("is_paused",), ("has_adapter", ADAPTER), ("adapters_in_use",), ("resume",), ("pause", "keep"),
    ("load_adapter", ADAPTER), ("init", {}), ("finish", "1"), ("is_alive",), ("reset_caches",),
]  # fmt: skip


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "409 Conflict", "500 Internal Server Error"])
def test_an_odd_answer_is_an_error_of_ours_or_none(status: str) -> None:
    with closing(RawServer(answers(""))) as server:
        for text in ODD:
            server.parts = answers(text, status)
            for method, *arguments in CALLS:
                with suppress(weightsync.WeightSyncError):
                    ask(server, method, *arguments)


BROKEN_OFF = {
    "less than its length": b"Content-Length: 100\r\n\r\n{}",
    "nothing of its length": b"Content-Length: 100\r\n\r\n",
    "no end of its head": b"Date: today\r\n",
    "part of a chunk": b"Transfer-Encoding: chunked\r\n\r\n10\r\n{}",
    "a chunk of negative length": b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("content", BROKEN_OFF.values(), ids=BROKEN_OFF)
def test_an_answer_that_breaks_off_is_no_success(content: bytes) -> None:
    with closing(RawServer(lambda: iter([b"HTTP/1.1 200 OK\r\n" + content]))) as server:
        for method, *arguments in (("finish", "1"), ("start",), ("pause", "keep"), ("version",)):
            with pytest.raises(EngineUnreachableError, match="without an answer"):
                ask(server, method, *arguments)
        assert not ask(server, "is_alive")


def test_the_text_of_an_error_travels_whatever_is_in_it() -> None:
    text = '{"error": {"message": "no \\ud800 room"}}'
    with closing(RawServer(answers(text, "500 No"))) as server, pytest.raises(EngineError) as raised:
        ask(server, "start")
    assert "no ? room" in raised.value.to_fields().message
    encode(Failure(raised.value.to_fields()))


def test_the_text_of_an_error_is_cut_off() -> None:
    text = json.dumps({"error": {"message": "x" * 100_000}})
    with closing(RawServer(answers(text, "500 No"))) as server, pytest.raises(EngineError) as raised:
        ask(server, "start")
    assert len(str(raised.value)) < 3000


def test_metrics_without_numbers_are_no_answer() -> None:
    row = 'vllm:lora_requests_info{running_lora_adapters="a"} many\n'
    with closing(RawServer(answers(row))) as server, pytest.raises(EngineError, match="not vLLM's"):
        ask(server, "adapters_in_use")


# ---------------------------------------------------------------------------------------------------------------
# Names


def test_a_tensor_that_no_safetensors_file_can_hold_is_refused(tmp_path: Path) -> None:
    model = trainer_model({"__metadata__": torch.ones(2), "w": torch.ones(2)})
    with pytest.raises(ConfigError, match="a tensor is named __metadata__"):
        weightsync.save(model, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


STRANGE = ("version-99999999999999999999", f"version-{MAX_VERSION + 1}", "version-000000007", "version-0000000\u0661")


def test_versions_that_no_push_has_named_are_none(tmp_path: Path) -> None:
    for name in (*STRANGE, "version-00000003"):
        (tmp_path / name).mkdir()
    (tmp_path / "version-00000009").write_text("")
    folder = VersionFolder(tmp_path)
    assert folder.newest() == 3
    folder.close()
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
    with WeightSync("fsdp", CheckpointTransport(tmp_path, keep_last=1), engine, timeout_s=60.0) as sync:
        assert sync.push(trainer_model(checkpoint(2))).version == 4
        for version in (MAX_VERSION + 1, 10**30):
            with pytest.raises(ConfigError, match=f"version={version}; the largest version is {MAX_VERSION}"):
                sync.push(trainer_model(checkpoint(2)), version=version)
        assert sync.push(trainer_model(checkpoint(2)), version=MAX_VERSION).version == MAX_VERSION
        with pytest.raises(ConfigError, match=f"version {MAX_VERSION} was the last"):
            sync.push(trainer_model(checkpoint(2)))
    assert {path.name for path in tmp_path.iterdir() if path.name in STRANGE} == set(STRANGE)
    engine.close()


def test_adapters_that_no_push_has_named_have_no_version(tmp_path: Path) -> None:
    folder = AdapterFolder(LoraTransport(folder=tmp_path))
    assert folder.version("policy-7-0123abcd") == 7
    for number in ("99999999999999999999", str(MAX_VERSION + 1), "\u0661"):
        assert folder.version(f"policy-{number}-0123abcd") is None
    folder.close()


# ---------------------------------------------------------------------------------------------------------------
# One server under two names


class OneAtATime(RecordedEngine):
    """Does one call after the other, as vLLM's core does."""

    late: int | None = None
    """The number of the engine whose first `init` comes after the other ones."""

    def __init__(self, *hosts: ModuleHost) -> None:
        super().__init__(*hosts)
        self._turn = threading.Lock()

    def init(self, init_info: dict[str, Any]) -> None:
        if init_info["engine"] == self.late:
            self.late = None
            time.sleep(0.3)
        with self._turn:
            super().init(init_info)

    def update(self, update_info: dict[str, Any]) -> None:
        with self._turn:
            super().update(update_info)


class FirstNameLate(OneAtATime):
    late = 0


class LastNameLate(OneAtATime):
    late = 2


@pytest.mark.parametrize("kind", [FirstNameLate, LastNameLate, RecordedEngine])
def test_one_server_under_two_names_is_found_out(kind: type[RecordedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.net.timeouts.DOUBT_S", 0.5)
    with ExitStack() as stack:
        servers = [FakeServer(kind(ModuleHost(TinyEngineModel, checkpoint(1))), 0) for _ in range(2)]
        for server in servers:
            spawn("server", server.serve_forever)
            stack.enter_context(closing(server))
        (port, other) = (server.server_port for server in servers)
        urls = [f"http://localhost:{port}", f"http://127.0.0.1:{other}", f"http://127.0.0.1:{port}"]
        with WeightSync("fsdp", "ipc", urls, timeout_s=60.0) as sync:
            started = time.monotonic()
            with pytest.raises(ConfigError, match="are one engine, under two names or addresses"):
                sync.push(trainer_model(checkpoint(2)))
            assert time.monotonic() - started < 25.0
        assert [server.engine.version() for server in servers] == ["default", "default"]
        assert "pause keep" not in servers[0].engine.calls
        with WeightSync("fsdp", "ipc", urls[:2], timeout_s=60.0) as sync:
            sync.push(trainer_model(checkpoint(2)))
        assert [server.engine.version() for server in servers] == ["1", "1"]


def test_an_engine_whose_workers_come_late_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.net.timeouts.DOUBT_S", 0.1)
    engines = [OneAtATime(ModuleHost(TinyEngineModel, checkpoint(1))) for _ in range(3)]
    init = engines[1].init

    def late(init_info: dict[str, Any]) -> None:
        time.sleep(1.0)
        init(init_info)

    monkeypatch.setattr(engines[1], "init", late)
    for number, engine in enumerate(engines):
        engine.name = f"engine {number}"
    with WeightSync("fsdp", "ipc", engines, timeout_s=60.0) as sync:
        for version in (1, 2):
            sync.push(trainer_model(checkpoint(version)))
            assert [engine.version() for engine in engines] == [str(version)] * 3
    for engine in engines:
        engine.close()
