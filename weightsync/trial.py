"""Processes to try a push on: a tiny model, a vLLM server of our own, and responders that are told what to do in JSON.

For `weightsync demo`, `doctor` and `bench`. Every process is a child of this one with a log file of its own; when it
ends before its time the error shows the end of that log, and `stop` ends it by its own process id.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TextIO
from urllib.parse import urlsplit

from weightsync.deadline import Deadline
from weightsync.errors import EngineError, EngineUnreachableError, SyncTimeoutError, WeightSyncError

VOCABULARY = 128
MAX_TOKENS = 8
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 60.0
_FAREWELL_S = 15.0
_LOG_LINES = 25

# What an engine of ours runs under; what the user has set stays.
_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the model is tiny, and engines that are compared must add up in the same order
    "VLLM_CPU_CI_ENV": "1",  # no warm-up runs
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise an engine on a CPU takes most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" wants a core to spare
    "VLLM_NO_USAGE_STATS": "1",
}


class ChildError(WeightSyncError):
    """A process of ours failed, ended too early or did not answer."""


@dataclass(frozen=True)
class Answer:
    """What an engine generated greedily for one prompt: token ids and the log-probability of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def installed(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; nothing is imported."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_version() -> str | None:
    return installed("vllm", "vllm-cpu")


def tiny_model(folder: Path, layers: int) -> Path:
    """Write the config.json of a Qwen3 with `layers` layers into `folder`; gives `folder`. There are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def engine_options() -> dict[str, Any]:
    """How our engines are configured, as `vllm.LLM` takes it: no tokenizer, no compilation, little memory."""
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.15,
        "seed": 0,
    }


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def visible_gpus(numbers: Sequence[int]) -> dict[str, str]:
    """The environment of a process that is to see only these of the GPUs that this one sees; empty for none."""
    if not numbers:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[n] if names else str(n) for n in numbers)}


class Child:
    """A process of ours, started at once. What it prints goes to its log."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, *, talks: bool = False
    ) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,  # a Ctrl-C reaches us alone, and we end our children in order
            )

    def obituary(self) -> str | None:
        """How the process ended, with the end of its log; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{self.name} ended with exit code {code}. The end of its log:\n{self.log_tail()}"

    def check(self) -> None:
        """Raise `ChildError` when the process has ended."""
        if (obituary := self.obituary()) is not None:
            raise ChildError(obituary)

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(f"  | {line}" for line in lines) or "  | (empty)"

    def stop(self) -> None:
        """End the process, and whatever it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_FAREWELL_S)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # the session that it was started in
        except ProcessLookupError:
            pass  # nothing is left of it
        self._process.wait()


class Responder(Child):
    """A child that takes orders and answers them, both as lines of JSON; see `listen_for_orders`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(name, command, environment, log, talks=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self.answers = self._process.stdin, self._process.stdout
        self._pending = b""

    def send(self, order: dict[str, Any]) -> None:
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            self._ended()

    def read(self) -> dict[str, Any] | None:
        """Take in what has arrived; its answer when that is complete. Raises `ChildError` when it has failed."""
        data = os.read(self.answers.fileno(), 1 << 16)
        if not data:
            self._ended()
        self._pending += data
        line, end, rest = self._pending.partition(b"\n")
        if not end:
            return None
        self._pending = rest
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def stop(self) -> None:
        super().stop()
        for pipe in (self._orders, self.answers):
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # an order that it did not live to read

    def _ended(self) -> NoReturn:
        self._process.wait(_FAREWELL_S)
        self.check()
        raise ChildError(f"{self.name} closed its connection")


def ask(responders: Sequence[Responder], order: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Send `order` to every responder and wait for each one's answer. Raises `ChildError` at the first that fails."""
    for responder in responders:
        responder.send(order)
    return receive(responders, timeout_s)


def receive(responders: Sequence[Responder], timeout_s: float) -> list[dict[str, Any]]:
    """One answer from each responder, in their order. Raises `ChildError` at the first that fails."""
    deadline = Deadline(timeout_s)
    answers: dict[str, dict[str, Any]] = {}
    with selectors.DefaultSelector() as waiting:
        for responder in responders:
            waiting.register(responder.answers, selectors.EVENT_READ, responder)
        while waiting.get_map():
            ready = waiting.select(deadline.left_s())
            for key, _ in ready:
                if (answer := key.data.read()) is not None:
                    answers[key.data.name] = answer
                    waiting.unregister(key.fileobj)
            if not ready and deadline.passed():
                late = [responder for responder in responders if responder.name not in answers]
                raise ChildError(
                    f"no answer from {', '.join(responder.name for responder in late)} within {timeout_s:g} s. The end "
                    f"of the log of {late[0].name}:\n{late[0].log_tail()}"
                )
    return [answers[responder.name] for responder in responders]


def listen_for_orders() -> tuple[TextIO, TextIO]:
    """In a child: where its orders come from, line by line, and where its answers go. What anything else prints goes
    to standard error, which is the child's log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return sys.stdin, answers


class Server(Child):
    """A vLLM server of our own on this host, with the weightsync backend.

    `options` are more of vLLM's, or others, than `engine_options` has: {"tensor_parallel_size": 2}."""

    def __init__(
        self,
        model: Path,
        load_format: str,
        log: Path,
        environment: Mapping[str, str],
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        backend: str = "weightsync",
        name: str = "the vLLM server",
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
        command += [
            f"--model={model}",
            f"--load-format={load_format}",
            f'--weight-transfer-config={{"backend": "{backend}"}}',
        ]
        for key, value in {**engine_options(), **options}.items():
            option = f"--{key.replace('_', '-')}"
            command.append(option if value is True else f"{option}={value}")
        super().__init__(name, command, engine_environment() | {"VLLM_SERVER_DEV_MODE": "1", **environment}, log)

    def wait(self, timeout_s: float) -> None:
        """Return once it answers. Raises `ChildError` when it ends or is not ready in time."""
        deadline = Deadline(timeout_s)
        while not _is_healthy(self.url):
            self.check()
            if deadline.passed():
                raise ChildError(
                    f"{self.name} was not ready after {timeout_s:g} s. The end of its log:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        try:
            return generate(self.url, prompts)
        except WeightSyncError as error:
            raise ChildError(f"{error}\nThe end of the log of {self.name}:\n{self.log_tail()}") from error


def engine_environment() -> dict[str, str]:
    """What an engine of ours needs in its environment, where the user has not set it."""
    return {name: value for name, value in _ENGINE_ENVIRONMENT.items() if name not in os.environ}


def generate(url: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Greedy answers of `MAX_TOKENS` tokens from the server at `url`, one request after the other, so that they do not
    depend on how requests are batched."""
    model = request(url, "GET", "/v1/models", None)["data"][0]["id"]
    answers = []
    for prompt in prompts:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        found = request(url, "POST", "/v1/completions", body)["choices"][0]["logprobs"]
        tokens = tuple(int(token.removeprefix("token_id:")) for token in found["tokens"])
        answers.append(Answer(tokens, tuple(found["token_logprobs"])))
    return answers


def score(url: str, sequences: Sequence[Sequence[int]]) -> list[float]:
    """The log-probability that the server at `url` gives each token of `sequences` but the first of each, in order."""
    model = request(url, "GET", "/v1/models", None)["data"][0]["id"]
    found: list[float] = []
    for tokens in sequences:
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        rows = request(url, "POST", "/v1/completions", body)["choices"][0]["prompt_logprobs"]
        found += [row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows[1:], strict=True)]
    return found


def difference(a: Sequence[Answer], b: Sequence[Answer]) -> float:
    """The largest difference of log-probabilities; infinite where the token ids differ."""
    if [answer.token_ids for answer in a] != [answer.token_ids for answer in b]:
        return float("inf")
    pairs = [zip(one.logprobs, other.logprobs, strict=True) for one, other in zip(a, b, strict=True)]
    return max(abs(x - y) for pair in pairs for x, y in pair)


def _is_healthy(url: str) -> bool:
    try:
        status, _ = _ask(url, "GET", "/health", None, 5.0)
    except OSError:
        return False
    return status == 200


def request(url: str, method: str, path: str, body: dict[str, Any] | None, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
    """The JSON object that the server at `url` answers, None for an empty answer. Raises `EngineError`s."""
    try:
        status, text = _ask(url, method, path, body, timeout_s)
    except TimeoutError as error:
        raise SyncTimeoutError(f"no answer to {path} within {timeout_s:g} s", who=url, waiting_for=[url]) from error
    except (OSError, http.client.HTTPException) as error:
        raise EngineUnreachableError(
            f"{path}: {error}; is the server running, and is this its address?", who=url
        ) from error
    if status != 200:
        raise EngineError(f"{path}: status {status}: {text[:500]}", who=url)
    try:
        answer = json.loads(text or "null")
    except ValueError:
        answer = text
    if not isinstance(answer, dict | None):
        raise EngineError(f"{path}: the answer is not vLLM's: {text[:200]!r}; is it a vLLM?", who=url)
    return answer


def _ask(url: str, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, parts.path.rstrip("/") + path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()
