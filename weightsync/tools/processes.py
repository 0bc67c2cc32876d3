"""Processes to try a push on: a tiny model, a vLLM server, and responders that take orders in JSON.

Every process is a child of this one with a log of its own. An error of one shows the end of that log.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import selectors
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from weightsync.control.runtime import Deadline
from weightsync.engines import HttpEngine
from weightsync.engines.child import Child
from weightsync.engines.server import VllmServer
from weightsync.errors import EngineError, WeightSyncError
from weightsync.tools.bench.shapes import SHAPES

VOCABULARY = 128
MAX_TOKENS = 8
_ANSWER_TIMEOUT_S = 60.0
_FAREWELL_S = 15.0

# Settings for a tiny engine. A variable that the user has set keeps its value.
_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # engines that are compared must add up in the same order
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
    """Return the version of the first of these distributions that is installed. Nothing is imported."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def vllm_version() -> str | None:
    return installed("vllm", "vllm-cpu")


def tiny_model(folder: Path, layers: int) -> Path:
    """Write the config.json of a Qwen3 with `layers` layers into `folder`, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES["tiny"], "vocab_size": VOCABULARY, "num_hidden_layers": layers, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def engine_options() -> dict[str, Any]:
    """Return how our engines are configured, as `vllm.LLM` takes it: no tokenizer, no compilation, little memory."""
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.15,
        "seed": 0,
    }


def engine_environment() -> dict[str, str]:
    """Return what an engine of ours needs in its environment, where the user has not set it."""
    return {name: value for name, value in _ENGINE_ENVIRONMENT.items() if name not in os.environ}


def visible_gpus(numbers: Sequence[int]) -> dict[str, str]:
    """Return the environment of a process that is to see only these of the GPUs of this process. Empty for none."""
    if not numbers:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[n] if names else str(n) for n in numbers)}


class Responder(Child):
    """A child that takes orders and answers them, both as lines of JSON. See `listen_for_orders`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(name, command, environment, log, talks=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders, self.answers = self.process.stdin, self.process.stdout
        self._pending = b""

    def send(self, order: dict[str, Any]) -> None:
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            self._ended()

    def read(self) -> dict[str, Any] | None:
        """Read what has arrived, and return the answer when it is complete. Raise `ChildError` when it has failed."""
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
        self.process.wait(_FAREWELL_S)
        raise ChildError(self.obituary() or f"{self.name} closed its connection")


def ask(responders: Sequence[Responder], order: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Send `order` to every responder and return each one's answer. Raise `ChildError` at the first that fails."""
    for responder in responders:
        responder.send(order)
    return receive(responders, timeout_s)


def receive(responders: Sequence[Responder], timeout_s: float) -> list[dict[str, Any]]:
    """Return one answer from each responder, in their order. Raise `ChildError` at the first that fails."""
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
                names = ", ".join(responder.name for responder in late)
                raise ChildError(f"no answer from {names} within {timeout_s:g} s. {late[0].log_end()}")
    return [answers[responder.name] for responder in responders]


def listen_for_orders() -> tuple[TextIO, TextIO]:
    """Return, in a child, where its orders come from and where its answers go, line by line.

    What other code prints goes to standard error, which is the child's log.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return sys.stdin, answers


class Server(VllmServer):
    """A vLLM server on this host with the weightsync backend, launched at once.

    `options` are more of vLLM's than `engine_options` has, or others: {"tensor_parallel_size": 2}.
    """

    def __init__(
        self,
        model: Path,
        load_format: str,
        log: Path,
        environment: Mapping[str, str],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        words = ["--bridge=none", f"--load-format={load_format}"]
        for key, value in {**engine_options(), **options}.items():
            word = f"--{key.replace('_', '-')}"
            if value is not False:
                text = json.dumps(value) if isinstance(value, dict) else value
                words.append(word if value is True else f"{word}={text}")
        super().__init__(model, *words, log=log, environment=engine_environment() | dict(environment))
        self.launch()

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Return as `generate` does. An error shows the end of the server's log."""
        try:
            return generate(self.url, prompts)
        except EngineError as error:
            assert self._child is not None
            raise EngineError(f"{error.message}. {self._child.log_end()}", who=self.url) from error


def generate(url: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Return greedy answers of `MAX_TOKENS` tokens from the server at `url`.

    One request follows the other, so that answers do not depend on how requests are batched.
    """
    engine = HttpEngine(url, name=url, timeout_s=_ANSWER_TIMEOUT_S)
    asked = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    answers = []
    for prompt in prompts:
        found = _complete(engine, prompt, asked)["logprobs"]
        tokens = tuple(int(token.removeprefix("token_id:")) for token in found["tokens"])
        answers.append(Answer(tokens, tuple(found["token_logprobs"])))
    return answers


def score(url: str, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability that the server gives each token of `sequences` but the first of each, in order."""
    engine = HttpEngine(url, name=url, timeout_s=_ANSWER_TIMEOUT_S)
    found: list[float] = []
    for tokens in sequences:
        rows = _complete(engine, tokens, {"max_tokens": 1, "prompt_logprobs": 0})["prompt_logprobs"]
        found += [row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows[1:], strict=True)]
    return found


def _complete(engine: HttpEngine, prompt: Sequence[int], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the only choice of a completion, by vLLM's default model."""
    body = {"prompt": list(prompt), "temperature": 0, **asked}
    choice: dict[str, Any] = engine.call("POST", "/v1/completions", body)["choices"][0]
    return choice


def difference(a: Sequence[Answer], b: Sequence[Answer]) -> float:
    """Return the largest difference of log-probabilities. It is infinite where the token ids differ."""
    if [answer.token_ids for answer in a] != [answer.token_ids for answer in b]:
        return float("inf")
    pairs = [zip(one.logprobs, other.logprobs, strict=True) for one, other in zip(a, b, strict=True)]
    return max(abs(x - y) for pair in pairs for x, y in pair)
