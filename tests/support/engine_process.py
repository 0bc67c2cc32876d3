"""A stand-in engine in a process of its own, with the routes of a vLLM server: `python engine_process.py PORT`."""

from __future__ import annotations

import ctypes
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint
from torch import nn

from weightsync.engines import HttpEngine
from weightsync.errors import EngineError
from weightsync.net.child import free_port
from weightsync.worker.session import WorkerSession

START_S = 60.0


class EngineProcess:
    """The process, as a test has it. It serves `checkpoint(0)` at first, and listens at `url`."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"engine-{self.port}.log"
        self._client = HttpEngine(self.url, name=self.url, timeout_s=60.0)
        self.launch()

    def launch(self) -> None:
        """Start the process, again where it was killed, and return when it answers."""
        with self.log.open("ab") as file:
            command = [sys.executable, __file__, str(self.port)]
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        end = time.monotonic() + START_S
        while not self._client.is_alive():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the stand-in engine did not start: {self.log.read_text()}")
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self) -> dict[str, Any]:
        """Return the "version" it reports, and a fingerprint of the "weights" it answers from, or why it is "mute"."""
        return self._client.call("GET", "/answer")

    def trim(self) -> None:
        """Have the process trim its memory."""
        self._client.call("GET", "/trim")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. After SIGSTOP no thread of the process runs any more."""
        self.process.send_signal(number)
        while number == signal.SIGSTOP and not all(map(_is_stopped, self._threads())):
            time.sleep(0.001)

    def _threads(self) -> list[str]:
        found = []
        for path in Path("/proc").glob(f"{self.process.pid}/task/*/stat"):
            with suppress(OSError):  # the thread has ended
                found.append(path.read_text())
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _is_stopped(stat: str) -> bool:
    """Return whether a thread of this `stat` is stopped or has ended."""
    return stat.rpartition(")")[2].split()[0] in "TZX"


def fingerprint(module: nn.Module) -> str:
    """Return a digest of every tensor that a module has."""
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        found.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trim() -> None:
    """Give back to the system what glibc's allocator keeps for later, so that a process has what it uses."""
    ctypes.CDLL(None).malloc_trim(0)


class _StandIn(FakeEngine):
    """An engine of one worker, whose calls all run in one thread, as those of vLLM's workers do."""

    def __init__(self) -> None:
        super().__init__(ModuleHost(TinyEngineModel, checkpoint(0)))
        self._worker = ThreadPoolExecutor(1)

    def finish(self, version: str | None) -> None:
        super().finish(version)
        self.log.clear()  # it lives long

    def _on_all(self, call: Callable[[WorkerSession], None]) -> None:
        self._worker.submit(call, self.sessions[0]).result()

    def answer(self) -> dict[str, Any]:
        """Answer from the weights, in the thread that would load others."""
        return self._worker.submit(self._answer).result()

    def _answer(self) -> dict[str, Any]:
        host, version = self.hosts[0], self.version()
        try:
            host.check_before_answer()
        except EngineError as error:
            return {"version": version, "mute": str(error)}
        return {"version": version, "weights": fingerprint(host.live)}


class _Routes(BaseHTTPRequestHandler):
    def __init__(self, engine: _StandIn, *args: Any) -> None:
        self._engine = engine
        super().__init__(*args)

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    def _reply(self, body: dict[str, Any]) -> None:
        try:
            status, found = 200, self._call(urlsplit(self.path).path, body)
        except Exception as error:
            status, found = 500, {"error": f"{type(error).__name__}: {error}"}
        content = json.dumps(found or {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _call(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        engine = self._engine
        match route:
            case "/init_weight_transfer_engine":
                return engine.init(body["init_info"])
            case "/start_weight_update":
                return engine.start()
            case "/update_weights":
                return engine.update(body["update_info"])
            case "/finish_weight_update":
                return engine.finish(body["weight_version"])
            case "/update_weight_version":
                return engine.set_version(body["new_version"])
            case "/weight_info":
                return {"weight_version": engine.version()}
            case "/version":
                return {"version": "0.32.0"}
            case "/answer":
                return engine.answer()
            case "/get_world_size":
                return {"world_size": 1}
            case "/trim":
                return trim()
            case "/sleep" | "/wake_up" | "/reset_prefix_cache" | "/reset_encoder_cache" | "/health":
                return None
        raise ValueError(f"no route {route}")

    def log_message(self, *args: Any) -> None:
        return


def main() -> None:
    torch.set_num_threads(1)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), partial(_Routes, _StandIn())).serve_forever()


if __name__ == "__main__":
    main()
