"""`weightsync doctor`: what a push needs of a machine, checked one by one, and then pushes to a live engine.

Each check gives one line: pass, "FAIL" with what to do, or "skip" with the reason. With an engine the last three are
pushes: the weights that it has (identity), others (B), and its own again (A), which must come back exactly. A line
"afterwards" says what an engine that is not the doctor's own was left with, when something failed. With a
quantised one B is also compared with an engine that was started cold from it, and how far rollouts are from what the
unquantised policy would give them is told, for whoever needs importance ratios.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from weightsync import __version__
from weightsync.channel import Hub
from weightsync.deadline import Deadline
from weightsync.engines import connect
from weightsync.errors import ConfigError, EngineUnreachableError, WeightSyncError
from weightsync.kernels.copies import BatchedCopy
from weightsync.kernels.digest import digest
from weightsync.layout import Box, Manifest, Placement, TensorMeta
from weightsync.ranks import RankGroup
from weightsync.report import format_bytes
from weightsync.sync import DEFAULT_MAX_BYTES, WeightSync
from weightsync.transports.base import SLOTS, Region, Shipment
from weightsync.transports.ipc import IpcSource, IpcTransport
from weightsync.trial import (
    Answer,
    ChildError,
    Responder,
    Server,
    ask,
    difference,
    generate,
    installed,
    listen_for_orders,
    score,
    tiny_model,
    vllm_version,
)
from weightsync.wire import POISONED, PROTOCOL

_PROMPTS = ([5, 6, 7, 8], [40, 41], [100, 101, 102])
_VLLM_VERSIONS = ((0, 25), (0, 33))
"""The first and the last release that the plug-in works in."""
_WEIGHTS = ("*.safetensors", "*.bin")
_START_TIMEOUT_S = 300.0
_CHILD_TIMEOUT_S = 60.0
_PROBE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One line: `status` is "pass", "FAIL" or "skip", `text` what was found, what to do, or why it was left out."""

    status: str
    check: str
    text: str


Check = Callable[[], Iterator[Finding]]


def run(
    url: str | None,
    model_dir: Path | None,
    transport: str,
    no_engine: bool,
    quantization: str | None,
    console: Console,
) -> bool:
    """Print every check's outcome; gives whether none failed. Raises `ConfigError` for a call that cannot work, before
    anything is printed. An engine that was given serves the weights of `model_dir` at the end."""
    if (url is None) != (model_dir is None):
        raise ConfigError("--engine and --model go together: the doctor pushes the weights of --model to --engine")
    if url is not None and no_engine:
        raise ConfigError("--engine and --no-engine exclude each other")
    if quantization is not None and (url is not None or no_engine):
        raise ConfigError(
            "--quantization starts engines of the doctor's own; to check a quantised one that runs, give --engine and "
            "--model alone"
        )
    checks: list[Check] = [_versions, _gpus, _shared_memory, _handles, _settings, _port, _plug_in]
    if url is not None and model_dir is not None:
        connect(url, _CHILD_TIMEOUT_S)  # which refuses what is no URL, and contacts nothing
        _check_checkpoint(model_dir)
        checks.append(lambda: _given_engine(url, model_dir, transport))
    elif no_engine:
        checks.append(lambda: iter([Finding("skip", "engine", "--no-engine was given")]))
    else:
        checks.append(lambda: _own_engine(transport, quantization))
    failed = 0
    for check in checks:
        for finding in check():
            failed += finding.status == "FAIL"
            colour = {"pass": "green", "FAIL": "bold red", "skip": "yellow"}[finding.status]
            console.print(
                f"[{colour}]{finding.status}[/{colour}]  {finding.check:<22} {escape(finding.text)}",
                soft_wrap=True,
                highlight=False,
            )
    console.print(f"\n{failed} check{'s' if failed != 1 else ''} failed" if failed else "\nall is well")
    return failed == 0


def _versions() -> Iterator[Finding]:
    yield Finding("pass", "python", platform.python_version())
    yield Finding("pass", "weightsync", f"{__version__}, wire protocol {PROTOCOL}: the engine's must be the same")
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", for CPUs"
    yield Finding("pass", "torch", torch.__version__ + cuda)
    yield Finding("pass", "msgpack", ".".join(map(str, msgpack.version)))
    transformers = installed("transformers")
    yield (
        Finding("pass", "transformers", transformers)
        if transformers
        else Finding("skip", "transformers", "not installed here; vLLM brings it")
    )
    found = vllm_version()
    if found is None:
        yield Finding("skip", "vllm", "not installed here; it is needed where the engine runs")
        return
    (low, high), release = _VLLM_VERSIONS, tuple(int(part) for part in found.split(".")[:2])
    known = f"weightsync works with {'.'.join(map(str, low))} to {'.'.join(map(str, high))}"
    yield Finding("pass", "vllm", found) if low <= release <= high else Finding("FAIL", "vllm", f"{found}; {known}")


def _gpus() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    if count == 0:
        yield Finding("skip", "GPUs", "none that torch can use")
        return
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        yield Finding("pass", f"GPU {number}", f"{properties.name}, {format_bytes(properties.total_memory)}")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a} and {b}" for a, b in pairs if a < b and not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        yield Finding(
            "skip", "peer access", f"none between GPUs {', '.join(apart)}: no ipc between these, use broadcast"
        )
    elif pairs:
        yield Finding("pass", "peer access", "between all GPUs")


def _shared_memory() -> Iterator[Finding]:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("FAIL", "/dev/shm", f"{error}; CPU tensors go through it over ipc: mount a tmpfs there")
        return
    free, wanted = stat.f_bavail * stat.f_frsize, SLOTS * DEFAULT_MAX_BYTES
    text = f"{format_bytes(free)} free of {format_bytes(stat.f_blocks * stat.f_frsize)}"
    if free < wanted:
        yield Finding(
            "FAIL",
            "/dev/shm",
            f"{text}; each rank stages CPU tensors in up to {format_bytes(wanted)}: start the container with a larger "
            "--shm-size, or push with a smaller max_bytes",
        )
    else:
        yield Finding("pass", "/dev/shm", text)


def _handles() -> Iterator[Finding]:
    """Memory of this process, read by another one: the way of transport "ipc"."""
    yield _read_elsewhere(torch.device("cpu"), "shared memory")
    if not torch.cuda.device_count():
        yield Finding("skip", "CUDA IPC", "no GPU")
        return
    kernels = _kernels(torch.device("cuda", 0))
    yield kernels
    if kernels.status == "pass":
        yield _read_elsewhere(torch.device("cuda", 0), "CUDA IPC")


def _kernels(device: torch.device) -> Finding:
    """Those of weightsync, which are compiled where they are first used."""
    source = torch.arange(_PROBE_ELEMENTS, dtype=torch.int32, device=device)
    target = torch.zeros_like(source)
    try:
        BatchedCopy([(target, source, 0)]).run()
        found = digest(target.view(torch.uint8))
    except Exception as error:
        return Finding(
            "FAIL",
            "GPU kernels",
            f"{type(error).__name__}: {error}; Triton, and a C compiler for it, must be installed",
        )
    if found != digest(source.view(torch.uint8).cpu()):
        return Finding("FAIL", "GPU kernels", "a copy by weightsync's kernel is not what was copied")
    return Finding("pass", "GPU kernels", "compiled, and right")


def _read_elsewhere(device: torch.device, check: str) -> Finding:
    tensor = torch.arange(_PROBE_ELEMENTS, dtype=torch.int64, device=device)
    meta = TensorMeta("probe", tuple(tensor.shape), "int64")
    placement = Placement("probe", Box.full(meta.shape), 0, 1, 0, (1,), "int64")
    transport = IpcTransport("ipc")
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-doctor-"))
        cleanup.callback(transport.abort)
        command = [sys.executable, "-m", __name__]
        child = Responder("the reading process", command, {}, Path(folder) / "log")
        cleanup.callback(child.stop)
        try:
            group = RankGroup(None, _CHILD_TIMEOUT_S)
            shipment = Shipment(
                Manifest((meta,)), (("probe",),), (placement,), ({"probe": (placement.box,)},), "127.0.0.1"
            )
            transport.prepare(shipment, {placement: Region(tensor)}, group)
            transport.stage(0, None, time.sleep, Deadline(_CHILD_TIMEOUT_S))
            order = {"device": str(device), "storages": msgpack.packb(transport.storages(0)).hex()}
            (answer,) = ask([child], order, _CHILD_TIMEOUT_S)
        except WeightSyncError as error:
            return Finding("FAIL", check, str(error))
    if answer["sum"] != int(tensor.sum()):
        return Finding("FAIL", check, "another process maps this one's memory and finds other bytes in it")
    return Finding("pass", check, "mapped and read by another process")


def _read_for_parent() -> None:
    """The reading process: map what the order names, and answer with the sum of its numbers."""
    orders, answers = listen_for_orders()
    order = json.loads(orders.readline())
    try:
        device = torch.device(order["device"])
        storages = msgpack.unpackb(bytes.fromhex(order["storages"]))
        source = IpcSource(device)
        source.connect(storages, {}, time.sleep, Deadline(_CHILD_TIMEOUT_S))
        data = source.storage(storages[0][0], storages[0][1])[: _PROBE_ELEMENTS * 8].view(torch.int64)
        answers.write(json.dumps({"sum": int(data.sum())}) + "\n")
        del data
        source.close()
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def _settings() -> Iterator[Finding]:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    wrong = [name for name in names if "expandable_segments:true" in os.environ.get(name, "").lower()]
    if wrong:
        yield Finding(
            "FAIL",
            "expandable_segments",
            f"on, by {wrong[0]}: CUDA IPC cannot export such memory; turn it off for the trainer, or use broadcast",
        )
    else:
        yield Finding("pass", "expandable_segments", "not set in the environment")
    nccl = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    yield Finding("pass", "NCCL variables", ", ".join(nccl) or "none set")


def _port() -> Iterator[Finding]:
    try:
        hub = Hub()
        address = hub.listen("127.0.0.1")
        socket.create_connection(address, timeout=5.0).close()
        hub.close()
    except OSError as error:
        yield Finding("FAIL", "loopback port", f"{error}; engine workers connect to the trainer on a free TCP port")
    else:
        yield Finding("pass", "loopback port", f"opened and reached, such as {address[1]}")


def _plug_in() -> Iterator[Finding]:
    found = [e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "weightsync"]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        text = "this Python has no entry point weightsync in vllm.general_plugins: install weightsync with pip"
        yield Finding("FAIL", "vLLM plug-in", text)
    elif allowed is not None and "weightsync" not in [name.strip() for name in allowed.split(",")]:
        yield Finding("FAIL", "vLLM plug-in", f"VLLM_PLUGINS={allowed} keeps it out: add weightsync to the list")
    else:
        yield Finding("pass", "vLLM plug-in", found[0])


def _own_engine(transport: str, quantization: str | None) -> Iterator[Finding]:
    if vllm_version() is None or installed("transformers") is None:
        yield Finding("skip", "engine", "vLLM is not installed here; name a running one with --engine URL --model DIR")
        return
    from transformers.utils import logging as hf_logging

    from weightsync.cli.demo import lay_out
    from weightsync.cli.demo_trainer import build

    try:
        layout = lay_out(torch.cuda.device_count(), transport)
    except ConfigError as error:
        yield Finding("skip", "engine", str(error))
        return
    with ExitStack() as cleanup:
        hf_logging.disable_progress_bar()
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-doctor-")))
        model: Any = build(str(tiny_model(folder / "config", layers=2)))
        model.to(torch.bfloat16).save_pretrained(folder / "model")
        trainer = model.to(layout.trainers[0])

        def start(weights: str, log: str, scheme: str | None) -> Server:
            options = {} if scheme is None else {"quantization": scheme}
            engine = Server(folder / weights, "auto", folder / log, layout.engine_environment, options)
            cleanup.callback(engine.stop)
            engine.wait(_START_TIMEOUT_S)
            return engine

        try:
            started = time.monotonic()
            engine = start("model", "engine.log", quantization)
            scheme = f" in {quantization}" if quantization else ""
            seconds = time.monotonic() - started
            yield Finding("pass", "engine", f"vLLM on {layout.engine}{scheme} answers after {seconds:.0f} s")
            try:
                own = engine.generate(_PROMPTS)
            except ChildError as error:
                yield Finding("FAIL", "generate", f"the engine fails before any push: {error}")
                return
            yield from _pushes(engine.url, trainer, transport, own)
            if quantization is None:
                return
            _move_rows(trainer, "B")
            trainer.save_pretrained(folder / "B")
            with WeightSync("fsdp", transport, engine.url, progress=False) as sync:
                sync.push(trainer)
            pushed = generate(engine.url, _PROMPTS)
            rollouts = [[*prompt, *answer.token_ids] for prompt, answer in zip(_PROMPTS, pushed, strict=True)]
            quantised = score(engine.url, rollouts)
            engine.stop()  # two of them may not fit
            cold = start("B", "cold.log", quantization)
            yield _same(
                "cold start",
                generate(cold.url, _PROMPTS),
                pushed,
                "an engine that was started from B answers exactly as the one that B was pushed to",
                "an engine that was started from B answers otherwise than the one that B was pushed to: report it",
            )
            cold.stop()
            yield _gap(quantised, score(start("B", "plain.log", None).url, rollouts))
        except WeightSyncError as error:
            yield Finding("FAIL", "engine", str(error))


def _gap(quantised: list[float], plain: list[float]) -> Finding:
    gaps = [abs(a - b) for a, b in zip(quantised, plain, strict=True)]
    return Finding(
        "pass",
        "rollout gap",
        f"log-probabilities of {len(gaps)} tokens differ from an unquantised engine's by {sum(gaps) / len(gaps):.4f} "
        f"on average and {max(gaps):.4f} at most (random weights; for information: importance ratios correct for it)",
    )


def _check_checkpoint(model_dir: Path) -> None:
    """Raise `ConfigError` where `model_dir` is no checkpoint that transformers could read."""
    if installed("transformers") is None:
        raise ConfigError("--model is read with transformers, which is not installed: pip install transformers")
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"{model_dir} has no config.json; expected the folder of the checkpoint that the engine serves"
        )
    if not any(next(model_dir.glob(pattern), None) for pattern in _WEIGHTS):
        raise ConfigError(
            f"{model_dir} has no weights (no {' and no '.join(_WEIGHTS)}); expected the checkpoint that the engine "
            "serves"
        )


def _given_engine(url: str, model_dir: Path, transport: str) -> Iterator[Finding]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    nothing_pushed = Finding("skip", "afterwards", "nothing was pushed")
    try:
        own = generate(url, _PROMPTS)
    except EngineUnreachableError as error:
        yield Finding("FAIL", "engine", str(error))
        yield nothing_pushed
        return
    except WeightSyncError as error:
        yield Finding("FAIL", "generate", f"the engine fails before any push; its log says why: {error}")
        yield nothing_pushed
        return
    hf_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    except Exception as error:  # of many kinds, by what is wrong with the files
        yield Finding("FAIL", "model", f"transformers does not load {model_dir}: {type(error).__name__}: {error}")
        yield nothing_pushed
        return
    device = _roomiest(sum(p.numel() * p.element_size() for p in model.parameters()))
    yield from _pushes(url, model.to(device), transport, own)


def _roomiest(nbytes: int) -> torch.device:
    """The GPU with the most free memory if a model of `nbytes` fits there, else the CPU."""
    free = {number: torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())}
    number = max(free, key=lambda n: free[n], default=None)
    return torch.device("cuda", number) if number is not None and free[number] > 1.2 * nbytes else torch.device("cpu")


def _pushes(url: str, model: nn.Module, transport: str, own: list[Answer]) -> Iterator[Finding]:
    """Identity, A to B, B to A; `own` are the engine's answers before. Whatever fails, the last thing tried is to have
    the engine serve A, unless no push has changed it."""
    served = pushing = "A"
    try:
        with WeightSync("fsdp", transport, url, progress=False) as sync:
            report = sync.push(model)
            start = generate(url, _PROMPTS)
            yield _same(
                "identity push",
                own,
                start,
                f"{format_bytes(report.nbytes)} in {report.total_s:.2f} s, and the answers are unchanged",
                "the answers changed: the engine did not serve exactly the weights of --model before; it does now",
            )
            pushing = _move_rows(model, "B")
            sync.push(model)
            served = "B"
            if difference(start, generate(url, _PROMPTS)) == 0:
                yield Finding("FAIL", "A to B", "other weights were pushed, the answers are the same: please report it")
            else:
                yield Finding("pass", "A to B", "other weights, other answers")
            pushing = _move_rows(model, "A")
            sync.push(model)
            served = "A"
            yield _same(
                "B to A",
                start,
                generate(url, _PROMPTS),
                "the first weights again, and exactly their answers",
                "the first weights again, and other answers than they gave before: please report it",
            )
        return
    except WeightSyncError as error:
        yield Finding("FAIL", "push", str(error))
    if served == "A" and _is_whole(url, own):
        yield Finding("pass", "afterwards", "no push was left half-way: the engine serves what it did before")
        return
    try:
        if pushing == "B":
            _move_rows(model, "A")
        with WeightSync("fsdp", transport, url, progress=False) as sync:
            sync.push(model)
        yield Finding("pass", "afterwards", "the engine has been given the weights of --model again")
    except WeightSyncError as error:
        yield Finding("FAIL", "afterwards", f"the engine does not serve the weights of --model, restart it: {error}")


def _is_whole(url: str, own: list[Answer]) -> bool:
    """Whether no push has failed half-way: the engine says so, or, where it has no version to say it with, answers as
    before the pushes, which it would not while it is paused."""
    (engine,) = connect(url, _CHILD_TIMEOUT_S)
    try:
        version = engine.version()
        if version is None:
            return difference(own, generate(url, _PROMPTS)) == 0
    except WeightSyncError:
        return False
    return not version.startswith(POISONED)


def _same(check: str, expected: list[Answer], found: list[Answer], good: str, bad: str) -> Finding:
    gap = difference(expected, found)
    if gap == 0:
        return Finding("pass", check, good)
    how = "other token ids" if gap == float("inf") else f"log-probabilities differ by up to {gap:g}"
    return Finding("FAIL", check, f"{bad} ({how})")


@torch.no_grad()
def _move_rows(model: nn.Module, to: str) -> str:
    """Turn weights A into B in place, or back, exactly: the rows of every parameter, moved in a ring. Gives `to`."""
    for parameter in model.parameters():
        if parameter.dim() > 0:
            parameter.copy_(parameter.roll(1 if to == "B" else -1, 0))
    return to


if __name__ == "__main__":
    _read_for_parent()
