"""Real engines of the failure matrix, and a vLLM server as one: what the driver knows of them."""

from __future__ import annotations

import http.client
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import tiny_models
from looks import KNOWN, Look, known_of, look_at

from weightsync.engines import HttpEngine
from weightsync.errors import WeightSyncError
from weightsync.tools.processes import Server, generate

PROMPTS = [[5, 6, 7, 8], [9, 9, 3], [(7 * i * i + 11) % 120 for i in range(40)]]
_START_S = 240.0
_ASK_S = 20.0
_BASE = "the base"


def below(pid: int) -> dict[str, int]:
    """Return the processes of an engine that a process has started: its core, and the core's worker."""
    found: dict[str, int] = {}
    for who, title in (("core", b"EngineCore"), ("worker", b"Worker")):
        named = [child for child in children(pid) if title in Path(f"/proc/{child}/cmdline").read_bytes()]
        if not named:
            break
        found[who] = pid = named[0]
    return found


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, none where it is gone."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


class Cold:
    """A real engine. What it answers at first is what a cold one answers."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.answers: dict[str, Any] = {}
        self.weights, self.version, self.known = "", 0, KNOWN

    def begin_cold(self) -> None:
        """Note what an engine answers that was just started."""
        self.weights, self.version = "A", 0
        cold = self.ask()
        assert self.answers.setdefault("A", cold) == cold

    def ask(self) -> Any:
        raise NotImplementedError

    def unknown(self) -> list[str]:
        """Return the weights whose answers are to be learned."""
        return [weights for weights in self.known if weights not in self.answers]

    def weights_of_workers(self) -> list[str]:
        """Return nothing: a worker of vLLM cannot be asked."""
        return []

    def learn(self, weights: str) -> None:
        """Note what is answered from weights that were just pushed, the first time."""
        if weights not in self.answers:
            found = self.ask()
            assert found not in self.answers.values()
            self.answers[weights] = found


class ServerSide(Cold):
    """A server whose core is a process of its own."""

    victims = ("core", "worker", "server")

    def __init__(self, folder: Path, transport: str, hosts: None) -> None:
        self._log = folder / "server.log"
        super().__init__(tiny_models.save(tiny_models.build("qwen3", "A"), folder / "A"))
        self.known = known_of(transport)
        options: dict[str, dict[str, Any]] = {
            "single_copy": {"quantization": "weightsync_plain"},
            "lora": {"enable_lora": True, "max_lora_rank": 8},
        }
        self._options = options.get(transport, {})
        self._server: Server | None = None
        self.start()

    def start(self) -> None:
        if self._server is None:
            environment = {
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            }
            self._server = Server(self.checkpoint, "auto", self._log, environment, self._options)
        else:  # at the same address
            self._server.stop()
            self._server.launch()
        self._server.wait(_START_S)
        self.address = self._server.url
        self.begin_cold()
        self._given_up = self._log.read_text().count("gave up")

    def pids(self) -> dict[str, int]:
        assert self._server is not None
        assert self._server._child is not None
        server = self._server._child.process.pid
        return {"server": server, **below(server)}

    def kill(self, who: str) -> None:
        os.kill(self.pids()[who], signal.SIGKILL)

    def wait_until_given_up(self, timeout_s: float) -> None:
        """Wait until the worker has given the push up; for nothing where it is not in one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._log.read_text().count("gave up") == self._given_up:
            time.sleep(0.1)

    def learn(self, weights: str) -> None:
        self._given_up = self._log.read_text().count("gave up")
        super().learn(weights)

    def ask(self) -> Any:
        return generate(self.address, PROMPTS)

    def look(self) -> Look | None:
        engine = HttpEngine(self.address, name="the engine", timeout_s=_ASK_S)
        return look_at(engine, lambda: engine.call("GET", "/is_paused")["is_paused"], self.ask, self.answers)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()


class AdapterServer(ServerSide):
    """A server that is pushed adapters. What it answers without one must stay as it was."""

    def begin_cold(self) -> None:
        self.weights, self.version = "A", 0
        base = super().ask()
        assert self.answers.setdefault(_BASE, base) == base

    def ask(self) -> Any:
        """Return what the newest adapter answers."""
        return [self._answer(self._engine(), prompt) for prompt in PROMPTS]

    def look(self) -> Look | None:
        engine = self._engine()
        with suppress(WeightSyncError, OSError, http.client.HTTPException):
            if engine.is_alive() is False:
                return None
            if super().ask() != self.answers[_BASE]:
                return Look("", False, False, "the base answers otherwise")
            if not self._newest(engine):
                return Look("", False, False, "0")
            found = self.ask()
            weights = next((each for each, answer in self.answers.items() if answer == found), "")
            return Look(weights, False, False, self._newest(engine).split("-")[1])
        return None

    def _engine(self) -> HttpEngine:
        return HttpEngine(self.address, name="the engine", timeout_s=_ASK_S)

    @staticmethod
    def _newest(engine: HttpEngine) -> str:
        names = [name for name in engine._adapters() if name.startswith("policy-")]
        return names[-1] if names else ""

    def _answer(self, engine: HttpEngine, prompt: list[int]) -> Any:
        asked = {"model": self._newest(engine), "prompt": prompt, "temperature": 0, "ignore_eos": True}
        body = {**asked, "max_tokens": 4, "logprobs": 1, "return_tokens_as_token_ids": True}
        return engine.call("POST", "/v1/completions", body)["choices"][0]["logprobs"]
