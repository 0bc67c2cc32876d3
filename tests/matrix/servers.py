"""A vLLM server as the engine of the failure matrix: what the driver knows of it."""

from __future__ import annotations

import http.client
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import tiny_models
from looks import KNOWN, UNSEEN, Look

from weightsync.control.wire import POISONED
from weightsync.engines import HttpEngine
from weightsync.errors import WeightSyncError
from weightsync.tools.processes import Server, generate

PROMPTS = [[5, 6, 7, 8], [9, 9, 3], [(7 * i * i + 11) % 120 for i in range(40)]]
_START_S = 240.0
_ASK_S = 20.0


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


class ServerSide:
    """A server whose core is a process of its own. What it answers at first is what a cold one answers."""

    victims = ("core", "worker", "server")

    def __init__(self, folder: Path, transport: str, hosts: None) -> None:
        self._log = folder / "server.log"
        self._checkpoint = tiny_models.save(tiny_models.build("qwen3", "A"), folder / "A")
        self._options = {"quantization": "weightsync_plain"} if transport == "single_copy" else {}
        self._server: Server | None = None
        self.answers: dict[str, Any] = {}
        self.weights, self.version = "", 0
        self.start()

    def start(self) -> None:
        if self._server is None:
            environment = {"TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
            self._server = Server(self._checkpoint, "auto", self._log, environment, self._options)
        else:  # at the same address
            self._server.stop()
            self._server.launch()
        self._server.wait(_START_S)
        self.address = self._server.url
        self.weights, self.version = "A", 0
        cold = generate(self.address, PROMPTS)
        assert self.answers.setdefault("A", cold) == cold
        self._given_up = self._log.read_text().count("gave up")

    def pids(self) -> dict[str, int]:
        assert self._server is not None
        assert self._server._child is not None
        found = {"server": self._server._child.process.pid}
        above = found["server"]
        for who, title in (("core", b"EngineCore"), ("worker", b"Worker")):
            named = [pid for pid in children(above) if title in Path(f"/proc/{pid}/cmdline").read_bytes()]
            if not named:
                break
            found[who] = above = named[0]
        return found

    def kill(self, who: str) -> None:
        os.kill(self.pids()[who], signal.SIGKILL)

    def wait_until_given_up(self, timeout_s: float) -> None:
        """Wait until the worker has given the push up; for nothing where it is not in one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._log.read_text().count("gave up") == self._given_up:
            time.sleep(0.1)

    def unknown(self) -> list[str]:
        """Return the weights whose answers are to be learned."""
        return [weights for weights in KNOWN if weights not in self.answers]

    def learn(self, weights: str) -> None:
        """Note what is answered from weights that were just pushed, the first time."""
        self._given_up = self._log.read_text().count("gave up")
        if weights not in self.answers:
            found = generate(self.address, PROMPTS)
            assert found not in self.answers.values()
            self.answers[weights] = found

    def look(self) -> Look | None:
        engine = HttpEngine(self.address, name="the engine", timeout_s=_ASK_S)
        with suppress(WeightSyncError, OSError, http.client.HTTPException):
            if not engine.is_alive():
                return None
            is_paused = bool(engine.call("GET", "/is_paused")["is_paused"])
            version = str(engine.call("GET", "/weight_info")["weight_version"])
            is_poisoned = version.startswith(POISONED)
            if is_paused or is_poisoned:
                return Look(UNSEEN, is_paused and is_poisoned, is_paused, version)
            found = generate(self.address, PROMPTS)
            weights = next((each for each, answer in self.answers.items() if answer == found), "")
            return Look(weights, False, is_paused, version)
        return None

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
