"""The engines of a case, as rank 0 of its trainer has them: servers, or `LLM`s in its process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
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

Places = Sequence[Mapping[str, str]]
"""What is added to the environment of each engine: the GPUs that it sees."""


class Engines(Protocol):
    """All engines of a case. `targets` is what `WeightSync` is given."""

    targets: list[Any]

    def answers(self) -> list[list[Answer]]:
        """Return what each engine answers to `PROMPTS`, greedily, one prompt after the other."""

    def reload(self, folder: Path) -> None:
        """Have vLLM read the weights of a checkpoint."""

    def extra_bytes(self, start: bool) -> list[int]:
        """Return how far each worker's GPU memory has peaked above what it held at the call with `start`."""

    def stop(self) -> None:
        """End all of them."""


def start_engines(case: Case, model: Path, gpus: Sequence[Sequence[int]], graphs: str, folder: Path) -> Engines:
    """Start the engines of `case` from the checkpoint `model`, and return when they answer."""
    options = {
        **_GRAPHS[graphs],
        "tensor_parallel_size": case.tp,
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "gpu_memory_utilization": 0.1,  # what must be free at the start
        "max_num_seqs": 16,
    }
    if case.quantization != "none":
        options["quantization"] = case.quantization
    places = [visible_gpus(gpus[number]) if gpus else {} for number in range(case.engines)]
    if case.client == HTTP:
        return _Servers(model, places, options, folder)
    return _Llms(case, model, places, options)


class _Servers:
    def __init__(self, model: Path, places: Places, options: dict[str, Any], folder: Path) -> None:
        self._servers: list[Server] = []
        for number, place in enumerate(places):
            self._servers.append(Server(model, "auto", folder / f"engine{number}.log", place, options))
            self._servers[-1].wait(self._servers[-1].start_timeout_s)
        self.targets = [server.url for server in self._servers]

    def answers(self) -> list[list[Answer]]:
        return [server.generate(PROMPTS) for server in self._servers]

    def reload(self, folder: Path) -> None:
        for url in self.targets:
            engine = HttpEngine(url, name=url, timeout_s=600.0)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            engine.call("POST", "/collective_rpc", body)
            engine.reset_caches()

    def extra_bytes(self, start: bool) -> list[int]:
        return []  # a server does not say

    def stop(self) -> None:
        for server in self._servers:
            server.stop()


class _Llms:
    def __init__(self, case: Case, model: Path, places: Places, options: dict[str, Any]) -> None:
        os.environ.update(engine_environment())
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to workers, for their memory
        from vllm import LLM

        if case.client == EXTENSION:
            options["worker_extension_cls"] = "weightsync.vllm.extension.WeightSyncWorkerExtension"
        else:
            options["weight_transfer_config"] = {"backend": NATIVE.get(case.way, ("weightsync",))[0]}
        self.targets = []
        for place in places:
            with patch.dict(os.environ, place):  # of the engine alone: this process has begun to use its own GPU
                self.targets.append(LLM(str(model), disable_log_stats=True, **{**engine_options(), **options}))
        self._held: list[int] = []

    def answers(self) -> list[list[Answer]]:
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
        found = []
        for llm in self.targets:
            rows = []
            for prompt in PROMPTS:
                output = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0].outputs[0]
                chosen = zip(output.token_ids, output.logprobs, strict=True)
                rows.append(Answer(tuple(output.token_ids), tuple(entry[token].logprob for token, entry in chosen)))
            found.append(rows)
        return found

    def reload(self, folder: Path) -> None:
        for llm in self.targets:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            llm.reset_prefix_cache()

    def extra_bytes(self, start: bool) -> list[int]:
        if not torch.cuda.is_available():
            return []
        peaks: list[int] = [n for llm in self.targets for n in llm.collective_rpc(_reset_peak if start else _peak)]
        if start:
            self._held = peaks
        return [peak - held for peak, held in zip(peaks, self._held, strict=True)]

    def stop(self) -> None:
        for llm in self.targets:
            llm.llm_engine.engine_core.shutdown()


def _reset_peak(worker: Any) -> int:
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(worker: Any) -> int:
    return torch.cuda.max_memory_allocated()
