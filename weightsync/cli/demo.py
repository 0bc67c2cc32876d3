"""`weightsync demo`: train two ranks, push to a live vLLM after each step, prove it equal to an engine started cold.

Who takes part:

    this process   starts and watches the others, and shows what they do
    trainers       `weightsync.cli.demo_trainer`, FSDP2; they push
    engine         a vLLM server, which starts with random weights and lives through all pushes
    cold engine    a vLLM that starts from the trainer's last weights, as a checkpoint, and never sees a push
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from weightsync.cli import demo_trainer
from weightsync.errors import ConfigError
from weightsync.report import PushReport, format_bytes, format_seconds
from weightsync.trial import (
    MAX_TOKENS,
    Answer,
    ChildError,
    Responder,
    Server,
    ask,
    difference,
    engine_environment,
    engine_options,
    free_port,
    receive,
    tiny_model,
    visible_gpus,
    vllm_version,
)

PROMPTS = ([5, 6, 7, 8], [40, 41], [100, 101, 102], [9, 3, 77, 1])
"""What the engines are asked; the first is shown after each push."""
_START_TIMEOUT_S = 300.0
_STEP_TIMEOUT_S = 120.0
_MOURNING_S = 1.0
"""After a failure: time for the process that caused it to end, so that its log can be shown too."""
_HEADING = "version   loss     bytes       push   generation paused"
_ROW = "{:>7} {:>6.2f} {:>9} {:>10} {:>19}"


@dataclass(frozen=True)
class Layout:
    """Which device each trainer rank trains on, and what the engine's environment says about its own."""

    trainers: tuple[str, ...]
    engine: str
    engine_environment: dict[str, str]


def lay_out(gpus: int, transport: str) -> Layout:
    """Two trainer ranks where there is room for two. Raises `ConfigError` when there is none.

    Over ipc the engine shares the first trainer's GPU. NCCL needs a GPU for each of its members, so for a broadcast the
    engine has the last GPU to itself.
    """
    if gpus == 0:
        return Layout(("cpu", "cpu"), "cpu", {})
    if transport == "ipc":
        return Layout(tuple(f"cuda:{i}" for i in range(min(gpus, 2))), "cuda:0", {})
    if gpus == 1:
        raise ConfigError(
            'transport="broadcast" needs a GPU for the trainer and another for the engine, and this machine has one: '
            "use --transport ipc, or hide the GPU with CUDA_VISIBLE_DEVICES= if the installed vLLM runs on CPUs"
        )
    trainers = tuple(f"cuda:{i}" for i in range(min(gpus - 1, 2)))
    return Layout(trainers, f"cuda:{gpus - 1}", visible_gpus([gpus - 1]))


def run(transport: str, steps: int, layers: int, console: Console) -> bool:
    """The whole demo; gives whether the proof succeeded. Raises `ConfigError` for what cannot work here, and
    `ChildError` when an engine or a trainer fails. All processes have ended when it returns."""
    if steps < 1 or layers < 1:
        raise ConfigError(f"--steps {steps} and --layers {layers}: both must be at least 1")
    if vllm_version() is None:
        raise ConfigError("vLLM is not installed here; install it with: pip install 'weightsync[vllm]'")
    started = time.monotonic()
    layout = lay_out(torch.cuda.device_count(), transport)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-")))
        model_dir = tiny_model(folder / "model", layers)
        engine = Server(model_dir, "dummy", folder / "engine.log", layout.engine_environment)
        cleanup.callback(engine.stop)
        trainers = _start_trainers(model_dir, engine.url, transport, layout, folder, cleanup)
        cold = Responder(
            "the cold engine",
            [sys.executable, "-m", "weightsync.vllm.cold"],
            engine_environment() | layout.engine_environment,
            folder / "cold.log",
        )
        cleanup.callback(cold.stop)
        try:
            _show_header(console, layout, transport, layers, steps, engine.url)
            with _busy(console, "starting the trainers and the engine"):
                parameters = receive(trainers, _START_TIMEOUT_S)[0]["parameters"]
                engine.wait(_START_TIMEOUT_S)
            console.print(
                f"ready after {time.monotonic() - started:.0f} s: {parameters / 1e6:.2f} M parameters, "
                f"prompt {' '.join(map(str, PROMPTS[0]))}\n"
            )
            first, pushed = _train_and_push(console, trainers, engine, steps)
            with _busy(console, "starting a second engine, cold, from the trainer's last weights"):
                ask(trainers, {"do": "save", "folder": str(folder / "checkpoint")}, _STEP_TIMEOUT_S)
                receive([cold], _START_TIMEOUT_S)
                expected = _ask_cold(cold, folder / "checkpoint")
        except ChildError as error:
            time.sleep(_MOURNING_S)
            deaths = [text for child in (engine, cold) if (text := child.obituary()) not in (None, str(error))]
            raise ChildError("\n".join([str(error), *map(str, deaths)])) from error
        passed = _show_proof(console, first, pushed, expected)
        console.print(f"took {time.monotonic() - started:.0f} s")
        return passed


def _train_and_push(
    console: Console, trainers: Sequence[Responder], engine: Server, steps: int
) -> tuple[list[Answer], list[Answer]]:
    """What the engine answers before the first push, and after the last."""
    console.print(_HEADING)
    first = before = engine.generate(PROMPTS)
    for step in range(steps):
        with console.status(f"step {step + 1} of {steps}"):
            losses = ask(trainers, {"do": "train"}, _STEP_TIMEOUT_S)
            pushes = ask(trainers, {"do": "push"}, _STEP_TIMEOUT_S)
            after = engine.generate(PROMPTS)
        _show_push(console, PushReport.from_dict(pushes[0]["report"]), losses[0]["loss"], before[0], after[0])
        before = after
    return first, before


def _start_trainers(
    model_dir: Path, url: str, transport: str, layout: Layout, folder: Path, cleanup: ExitStack
) -> list[Responder]:
    port = free_port()
    trainers = []
    for rank, device in enumerate(layout.trainers):
        command = [sys.executable, "-m", demo_trainer.__name__, f"--model={model_dir}", f"--engine={url}"]
        command += [f"--transport={transport}", f"--device={device}"]
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(layout.trainers)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "HF_HUB_OFFLINE": "1",
        }
        trainers.append(Responder(f"trainer rank {rank}", command, environment, folder / f"trainer{rank}.log"))
        cleanup.callback(trainers[-1].stop)
    return trainers


def _ask_cold(cold: Responder, checkpoint: Path) -> list[Answer]:
    order = {"model": str(checkpoint), "options": engine_options(), "prompts": PROMPTS, "max_tokens": MAX_TOKENS}
    (answer,) = ask([cold], order, _START_TIMEOUT_S)
    return [Answer(tuple(token_ids), tuple(logprobs)) for token_ids, logprobs in answer["answers"]]


@contextmanager
def _busy(console: Console, what: str) -> Iterator[None]:
    """Say what is being waited for: as a spinner on a terminal, as a line elsewhere."""
    if not console.is_terminal:
        console.print(f"{what} ...")
        yield
        return
    with console.status(what):
        yield


def _show_header(console: Console, layout: Layout, transport: str, layers: int, steps: int, url: str) -> None:
    on_gpu = layout.trainers[0] != "cpu"
    way = {
        ("ipc", False): "shared memory of this host",
        ("ipc", True): "CUDA IPC, the engine reads the trainers' memory",
        ("broadcast", False): "gloo, from the trainer to the engine",
        ("broadcast", True): "NCCL, from the trainer to the engine",
    }[transport, on_gpu]
    grid = Table.grid(padding=(0, 2))
    ranks = f"{len(layout.trainers)} rank{'s' if len(layout.trainers) > 1 else ''}"
    backend = "nccl" if on_gpu else "gloo"
    rows = {
        "trainer": f"{ranks} ({', '.join(layout.trainers)}): Qwen3, {layers} layers, FSDP2 over {backend}, float32",
        "engine": f"vLLM {vllm_version()} ({layout.engine}), {url}, bfloat16, random weights",
        "transport": f"{transport}: {way}",
        "task": f"to count up; {steps} times: {demo_trainer.OPTIMIZER_STEPS} optimizer steps, then a push",
    }
    for name, text in rows.items():
        grid.add_row(f"[bold]{name}[/bold]", text)
    console.print(grid)
    console.print()


def _show_push(console: Console, report: PushReport, loss: float, before: Answer, after: Answer) -> None:
    took, paused = format_seconds(report.total_s), format_seconds(report.pause_s)
    console.print(_ROW.format(report.version, loss, format_bytes(report.nbytes), took, paused), highlight=False)
    console.print(f"{'':>7} engine before  [dim]{_tokens(before)}[/dim]", highlight=False)
    console.print(f"{'':>7} engine after   [bold green]{_tokens(after)}[/bold green]", highlight=False)


def _show_proof(
    console: Console, first: Sequence[Answer], pushed: Sequence[Answer], expected: Sequence[Answer]
) -> bool:
    table = Table(
        title="The engine that was pushed to, and one started cold from the same weights", title_justify="left"
    )
    for column in ("prompt", "engine", "token ids, greedy", "max |Δ logp|"):
        table.add_column(column, overflow="fold")
    for prompt, one, other in zip(PROMPTS, pushed, expected, strict=True):
        gap = difference([one], [other])
        table.add_row(" ".join(map(str, prompt)), "pushed", _tokens(one), "")
        table.add_row(
            "", "cold", _tokens(other), "other tokens" if gap == float("inf") else f"{gap:g}", end_section=True
        )
    console.print()
    console.print(table)
    count = sum(len(answer.token_ids) for answer in pushed)
    gap = difference(pushed, expected)
    if difference(first, pushed) == 0:
        console.print("[bold red]FAIL[/bold red] the engine answers as it did before the first push")
        return False
    if gap != 0:
        what = "other tokens" if gap == float("inf") else f"log-probabilities that differ by up to {gap:g}"
        console.print(f"[bold red]FAIL[/bold red] the cold engine gives {what}: this is a bug; please report it")
        return False
    console.print(
        f"[bold green]PASS[/bold green] identical: {count} tokens of {len(PROMPTS)} prompts, same ids, same "
        "log-probabilities"
    )
    return True


def _tokens(answer: Answer) -> str:
    return " ".join(map(str, answer.token_ids))
