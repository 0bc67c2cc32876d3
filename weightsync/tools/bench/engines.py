"""The engines of a case at rank 0 of its trainer: servers, or `LLM`s in its process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch

from weightsync.engines import HttpEngine
from weightsync.tools.bench.cases import EXTENSION, HTTP, NATIVE, Case
from weightsync.tools.processes import MAX_TOKENS, Answer, Server, engine_environment, engine_options, visible_gpus

PROMPTS = ([5, 6, 7, 8], [40, 41], list(range(20, 60)), [100, 101, 7, 3, 55, 2])
_KV_CACHE_BYTES = 256 << 20
# As `CompilationConfig` has it: mode 0 is no torch.compile.
_GRAPHS: dict[str, dict[str, Any]] = {
    "off": {},
    "decode": {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {"enforce_eager": False},
}


class BenchServer(Server):
    """A server of weightsync's, in a process of its own."""

    @property
    def target(self) -> str:
        """The engine, as an argument of `WeightSync`."""
        return self.url

    def reload(self, folder: Path) -> None:
        """Have vLLM read the weights of a checkpoint."""
        engine = HttpEngine(self.url, name=self.url, timeout_s=600.0)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        engine.call("POST", "/collective_rpc", body)
        engine.reset_caches()

    def extra_bytes(self, start: bool) -> list[int]:
        """Return nothing: a server does not report its memory."""
        return []


class BenchLlm:
    """An `LLM` in this process, with the methods of `BenchServer`."""

    def __init__(self, case: Case, model: Path, place: Mapping[str, str], options: Mapping[str, Any]) -> None:
        os.environ.update(engine_environment())
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to workers, for their memory
        from vllm import LLM

        way: dict[str, Any] = {"worker_extension_cls": "weightsync.vllm.extension.WeightSyncWorkerExtension"}
        if case.client != EXTENSION:
            way = {"weight_transfer_config": {"backend": NATIVE.get(case.way, ("weightsync",))[0]}}
        with patch.dict(os.environ, place):  # for the engine alone: this process already uses its own GPU
            options = {**engine_options(), **options, **way, "load_format": case.load_format}
            self.target = LLM(str(model), disable_log_stats=True, **options)
        self._held: list[int] = []

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Return greedy answers, one request after the other."""
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
        answers = []
        for prompt in prompts:
            output = self.target.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0].outputs[0]
            chosen = zip(output.token_ids, output.logprobs, strict=True)
            answers.append(Answer(tuple(output.token_ids), tuple(entry[token].logprob for token, entry in chosen)))
        return answers

    def reload(self, folder: Path) -> None:
        self.target.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self.target.reset_prefix_cache()

    def extra_bytes(self, start: bool) -> list[int]:
        """Return each worker's peak of GPU memory, minus its memory at the call with `start`."""
        if not torch.cuda.is_available():
            return []
        peaks: list[int] = self.target.collective_rpc(_reset_peak if start else _peak)
        if start:
            self._held = peaks
        return [peak - held for peak, held in zip(peaks, self._held, strict=True)]

    def stop(self) -> None:
        self.target.llm_engine.engine_core.shutdown()


Engines: TypeAlias = Sequence[BenchServer | BenchLlm]
"""The engines of a case on rank 0. Other ranks have none."""


def start_engines(case: Case, model: Path, gpus: Sequence[Sequence[int]], graphs: str, folder: Path) -> Engines:
    """Start the engines of `case` from `model`, a checkpoint or a config.json, and return when they answer."""
    options = {
        **_GRAPHS[graphs],
        "tensor_parallel_size": case.tp,
        "data_parallel_size": case.data_parallel_size,
        "enable_expert_parallel": case.expert_parallel,
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "gpu_memory_utilization": 0.1,  # this much must be free at the start
        "max_num_seqs": 16,
    }
    if case.quantization != "none":
        options["quantization"] = case.quantization
    engines: list[BenchServer | BenchLlm] = []
    for number in range(case.engines):
        place = visible_gpus(gpus[number]) if gpus else {}
        if case.client == HTTP:
            server = BenchServer(model, case.load_format, folder / f"engine{number}.log", place, options)
            server.wait(server.start_timeout_s)
            engines.append(server)
        else:
            engines.append(BenchLlm(case, model, place, options))
    return engines


def _reset_peak(worker: Any) -> int:
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(worker: Any) -> int:
    return torch.cuda.max_memory_allocated()
