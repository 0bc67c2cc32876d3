"""`weightsync demo`: train two ranks, push to a live vLLM after each step, prove it equal to an engine started cold.

The processes:

    this process   starts and watches the others
    trainers       `weightsync.tools.demo_trainer`, FSDP2; they push, and rank 0 shows each push
    engine         a vLLM server with random weights at its start, alive through all pushes
    cold engine    a vLLM server started from a checkpoint of the trainer's last weights, without a push
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.tools import demo_trainer, processes
from weightsync.tools.demo_trainer import PROMPTS
from weightsync.tools.processes import Answer, ChildError, Server
from weightsync.tools.tables import print_line, print_table

_START_TIMEOUT_S = 300.0
_STEP_TIMEOUT_S = 120.0
_MOURNING_S = 1.0
"""Seconds after a failure for the process at fault to end, so that its log can be shown too."""
_WAYS = {
    ("ipc", False): "shared memory of this host",
    ("ipc", True): "CUDA IPC, the engine reads the trainers' memory",
    ("broadcast", False): "TCP, from the trainer to the engine",
    ("broadcast", True): "NCCL, from the trainer to the engine",
    ("nixl", False): "NIXL, the engine reads the trainers' memory",
    ("nixl", True): "NIXL, the engine reads the trainers' GPUs",
}


@dataclass(frozen=True)
class Layout:
    """The device of each trainer rank, and the device and environment of the engine."""

    trainers: tuple[str, ...]
    engine: str
    engine_environment: dict[str, str]


def lay_out(gpus: int, transport: str) -> Layout:
    """Return a layout with two trainer ranks if two have room, else with one. Raise `ConfigError` if none has room.

    Over ipc and nixl the engine shares the first trainer's GPU. NCCL needs a GPU for each of its members, so for a
    broadcast the engine has the last GPU to itself.
    """
    if gpus == 0:
        return Layout(("cpu", "cpu"), "cpu", {})
    if transport in ("ipc", "nixl"):
        return Layout(tuple(f"cuda:{i}" for i in range(min(gpus, 2))), "cuda:0", {})
    if gpus == 1:
        raise ConfigError(
            'transport="broadcast" needs a GPU for the trainer and another for the engine, and this machine has one. '
            "Use --transport ipc, or hide the GPU with CUDA_VISIBLE_DEVICES= if the installed vLLM runs on CPUs"
        )
    trainers = tuple(f"cuda:{i}" for i in range(min(gpus - 1, 2)))
    return Layout(trainers, f"cuda:{gpus - 1}", processes.visible_gpus([gpus - 1]))


def run(options: Namespace, console: Console) -> bool:
    """Run the whole demo, and return whether the proof succeeded. All processes have ended then.

    Raise `ConfigError` if the demo cannot work here, and `ChildError` if an engine or a trainer fails.
    """
    transport, steps, layers = options.transport, options.steps, options.layers
    if steps < 1 or layers < 1:
        raise ConfigError(f"--steps {steps} and --layers {layers}: both must be at least 1")
    if processes.vllm_version() is None:
        raise ConfigError("vLLM is not installed here; install it with: pip install 'weightsync[vllm]'")
    started = time.monotonic()
    layout = lay_out(torch.cuda.device_count(), transport)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-")))
        model_dir = processes.tiny_model(folder / "model", layers)
        engine = Server(model_dir, "dummy", folder / "engine.log", layout.engine_environment)
        cleanup.callback(engine.stop)
        _show_header(console, layout, transport, layers, steps, engine.url)
        try:
            engine.wait(_START_TIMEOUT_S)
            print_line(
                console, f"the engine is ready after {time.monotonic() - started:.0f} s, starting the trainers ..."
            )
            first = engine.generate(PROMPTS)
            order = {
                "model": str(model_dir),
                "engine": engine.url,
                "transport": transport,
                "devices": layout.trainers,
                "steps": steps,
                "checkpoint": str(folder / "checkpoint"),
            }
            timeout_s = _START_TIMEOUT_S + steps * _STEP_TIMEOUT_S
            processes.run_trainers(demo_trainer.__name__, order, len(layout.trainers), folder, timeout_s, shows=True)
            pushed = engine.generate(PROMPTS)
            print_line(console, "\nstarting a second engine, cold, from the trainer's last weights ...\n")
            cold = Server(folder / "checkpoint", "auto", folder / "cold.log", layout.engine_environment)
            cleanup.callback(cold.stop)
            cold.wait(_START_TIMEOUT_S)
            expected = cold.generate(PROMPTS)
        except WeightSyncError as error:
            time.sleep(_MOURNING_S)
            death = engine.exit_report()
            raise ChildError(f"{error}\n{death}" if death is not None else str(error)) from error
        passed = _show_proof(console, first, pushed, expected)
        print_line(console, f"took {time.monotonic() - started:.0f} s")
        return passed


def _show_header(console: Console, layout: Layout, transport: str, layers: int, steps: int, url: str) -> None:
    on_gpu = layout.trainers[0] != "cpu"
    ranks = f"{len(layout.trainers)} rank{'s' if len(layout.trainers) > 1 else ''} ({', '.join(layout.trainers)})"
    backend = "nccl" if on_gpu else "gloo"
    print_line(console, f"trainer    {ranks}: Qwen3, {layers} layers, FSDP2 over {backend}, float32")
    print_line(
        console, f"engine     vLLM {processes.vllm_version()} ({layout.engine}), {url}, bfloat16, random weights"
    )
    print_line(console, f"transport  {transport}: {_WAYS[transport, on_gpu]}")
    task = f"to count up; {steps} times: {demo_trainer.OPTIMIZER_STEPS} optimizer steps, then a push"
    print_line(console, f"task       {task}\n\nstarting the engine ...")


def _show_proof(
    console: Console, first: Sequence[Answer], pushed: Sequence[Answer], expected: Sequence[Answer]
) -> bool:
    rows = []
    for prompt, one, other in zip(PROMPTS, pushed, expected, strict=True):
        rows.append((" ".join(map(str, prompt)), "pushed", str(one), ""))
        rows.append(("", "cold", str(other), f"{processes.difference([one], [other]):g}"))
    print_table(console, ("prompt", "engine", "token ids, greedy", "max |Δ logp|"), rows, "<<<>")
    gap = processes.difference(pushed, expected)
    if processes.difference(first, pushed) == 0:
        console.print("[bold red]FAIL[/bold red] the engine answers as it did before the first push")
        return False
    if gap != 0:
        what = "other tokens" if gap == float("inf") else f"log-probabilities that differ by up to {gap:g}"
        console.print(f"[bold red]FAIL[/bold red] the cold engine gives {what}: this is a bug; please report it")
        return False
    count = sum(len(answer.token_ids) for answer in pushed)
    same = f"identical: {count} tokens of {len(PROMPTS)} prompts, same ids, same log-probabilities"
    console.print(f"[bold green]PASS[/bold green] {same}", soft_wrap=True)
    return True
