"""`weightsync doctor`: check a push's needs of a machine, one by one, then push to a live engine.

Each check prints one line: pass, "FAIL" with the remedy, or "skip" with the reason. The doctor connects to a given
engine from both sides, as a push does, and releases it.

With weights the last three checks are pushes: the engine's own (A), others (B), and A again. The second A must give
exactly the first answers. If one fails, a line "afterwards" gives the weights that the engine is left with.

With `--quantization`, the engine with pushed B is also compared with an engine started from B, and with an unquantised
one. The second difference matters for importance ratios.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from weightsync import __version__
from weightsync.engines.calls import EXTENSION_SINCE, PLUG_INS_SINCE
from weightsync.errors import ConfigError, EngineUnreachableError, WeightSyncError
from weightsync.fleet import connect
from weightsync.kernels.copies import BatchedCopy
from weightsync.kernels.digest import digest
from weightsync.net.listener import Listener
from weightsync.net.wire import POISONED, PROTOCOL
from weightsync.planning.bucketing import DEFAULT_MAX_BYTES
from weightsync.report import format_bytes
from weightsync.sync import WeightSync
from weightsync.tools import processes
from weightsync.tools.connections import connections
from weightsync.tools.findings import Finding, Findings, found
from weightsync.tools.nixl_reads import check_nixl
from weightsync.tools.processes import Answer, Server, generate
from weightsync.transports.base import SLOTS
from weightsync.transports.shared_handles import SHARED_MEMORY, export, open_exported

_PROMPTS = ([5, 6, 7, 8], [40, 41], [100, 101, 102])
_LAST_VLLM = (0, 33)
"""The last release that the plug-in supports."""
_WEIGHTS = ("*.safetensors", "*.bin")
_START_TIMEOUT_S = 300.0
_CHILD_TIMEOUT_S = 60.0
_PROBE_ELEMENTS = 1 << 20
_IDENTITY = "identity push"


def run(options: Namespace, console: Console) -> bool:
    """Print every check's outcome, and return whether none failed. A given engine serves `--model` at the end.

    Returns False, too, if no engine could be looked at and `--no-engine` was not given. Raise `ConfigError` for a call
    that cannot work, before anything is printed.
    """
    url, model_dir, transport = options.engine, options.model, options.transport
    no_engine, quantization = options.no_engine, options.quantization
    if url is None and model_dir is not None:
        raise ConfigError("--model needs --engine: the doctor pushes the weights of --model to it")
    if url is not None and no_engine:
        raise ConfigError("--engine and --no-engine exclude each other")
    if quantization is not None and (url is not None or no_engine):
        raise ConfigError("--quantization starts engines of the doctor's own: leave it out here")
    checks: list[Callable[[], Findings]] = [_versions, _gpus, _shared_memory, _handles, check_nixl, _settings, _port]
    checks.append(_plug_in)
    if url is not None:
        connect(url, _CHILD_TIMEOUT_S)  # raises for a wrong URL, without contacting a server
        if model_dir is not None:
            _check_checkpoint(model_dir)
        checks.append(lambda: _your_engine(url, model_dir, transport))
    elif no_engine:
        checks.append(lambda: iter([Finding("skip", "engine", "--no-engine was given")]))
    else:
        checks.append(lambda: _own_engine(transport, quantization))
    failed = 0
    skipped: set[str] = set()
    for check in checks:
        for finding in check():
            failed += finding.status == "FAIL"
            skipped |= {finding.check} if finding.status == "skip" else set()
            colour = {"pass": "green", "FAIL": "bold red", "skip": "yellow"}[finding.status]
            line = f"[{colour}]{finding.status}[/{colour}]  {finding.check:<22} {escape(finding.text)}"
            console.print(line, soft_wrap=True, highlight=False)
    unseen = {"engine": "no engine was looked at", _IDENTITY: "the engine's first answers were not compared"}
    well = next((f"nothing failed, but {unseen[name]}" for name in unseen if name in skipped), "all is well")
    console.print(f"\n{failed} check{'s' * (failed != 1)} failed" if failed else f"\n{well}")
    return failed == 0 and ("engine" not in skipped or no_engine)


def _versions() -> Findings:
    yield Finding("pass", "python", platform.python_version())
    yield Finding("pass", "weightsync", f"{__version__}, wire protocol {PROTOCOL}: the engine's must be the same")
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", for CPUs"
    yield Finding("pass", "torch", torch.__version__ + cuda)
    yield Finding("pass", "msgspec", msgspec.__version__)
    transformers, vllm = processes.installed("transformers"), processes.vllm_version()
    missing = "not installed here; vLLM brings it"
    yield Finding("pass" if transformers else "skip", "transformers", transformers or missing)
    if vllm is None:
        yield Finding("skip", "vllm", "not installed here; it is needed where the engine runs")
        return
    release = tuple(int(part) for part in vllm.split(".")[:2])
    if EXTENSION_SINCE <= release < PLUG_INS_SINCE:
        yield Finding("skip", "vllm", f"{vllm} has no plug-ins; start engines with weightsync's worker extension")
        return
    known = f"{vllm}; weightsync works with {'.'.join(map(str, PLUG_INS_SINCE))} to {'.'.join(map(str, _LAST_VLLM))}"
    yield found("vllm", PLUG_INS_SINCE <= release <= _LAST_VLLM, vllm, known)


def _gpus() -> Findings:
    count = torch.cuda.device_count()
    if count == 0:
        yield Finding("skip", "GPUs", "none that torch can use")
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        yield Finding("pass", f"GPU {number}", f"{properties.name}, {format_bytes(properties.total_memory)}")
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    apart = ", ".join(f"{a} and {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b))
    if apart:
        yield Finding("skip", "peer access", f"none between GPUs {apart}: no ipc between these, use broadcast")
    elif pairs:
        yield Finding("pass", "peer access", "between all GPUs")


def _shared_memory() -> Findings:
    try:
        stat = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        yield Finding("FAIL", SHARED_MEMORY, f"{error}; CPU tensors go through it over ipc: mount a tmpfs there")
        return
    free, wanted = stat.f_bavail * stat.f_frsize, SLOTS * DEFAULT_MAX_BYTES
    text = f"{format_bytes(free)} free of {format_bytes(stat.f_blocks * stat.f_frsize)}"
    what_to_do = "start the container with a larger --shm-size, or push with a smaller max_bytes"
    too_little = f"{text}; each rank stages CPU tensors in up to {format_bytes(wanted)}: {what_to_do}"
    yield found(SHARED_MEMORY, free >= wanted, text, too_little)


def _handles() -> Findings:
    """Check that another process can read memory of this one, as the transport ipc does."""
    yield _read_elsewhere(torch.device("cpu"), "shared memory")
    if not torch.cuda.device_count():
        yield Finding("skip", "CUDA IPC", "no GPU")
        return
    kernels = _kernels(torch.device("cuda", 0))
    yield kernels
    if kernels.status == "pass":
        yield _read_elsewhere(torch.device("cuda", 0), "CUDA IPC")


def _kernels(device: torch.device) -> Finding:
    """Check weightsync's kernels. They are compiled at their first use."""
    source = torch.arange(_PROBE_ELEMENTS, dtype=torch.int32, device=device)
    target = torch.zeros_like(source)
    try:
        BatchedCopy([(target, source, 0)]).run()
        right = digest(target.view(torch.uint8)) == digest(source.view(torch.uint8).cpu())
    except Exception as error:
        text = f"{type(error).__name__}: {error}; Triton, and a C compiler for it, must be installed"
        return Finding("FAIL", "GPU kernels", text)
    return found("GPU kernels", right, "compiled, and right", "a copy by weightsync's kernel has other bytes")


def _read_elsewhere(device: torch.device, check: str) -> Finding:
    tensor = torch.arange(_PROBE_ELEMENTS, dtype=torch.int64, device=device)
    handle = msgspec.msgpack.encode(export(tensor.untyped_storage())).hex()
    command = [sys.executable, "-m", __name__, str(device), handle]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("FAIL", check, f"the reading process has not ended within {_CHILD_TIMEOUT_S:g} s")
    if child.returncode != 0:
        why = (child.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return Finding("FAIL", check, f"the reading process ended with exit code {child.returncode}: {why}")
    wrong = "another process maps this process's memory and finds other bytes in it"
    return found(
        check, child.stdout.split()[-1:] == [str(int(tensor.sum()))], "mapped and read by another process", wrong
    )


def _read_for_parent(device: str, handle: str) -> None:
    """Map exported memory of another process, and print the sum of its numbers."""
    kind, fields = msgspec.msgpack.decode(bytes.fromhex(handle))
    data = open_exported(kind, fields, torch.device(device), "the doctor")
    sys.stdout.write(str(int(data[: _PROBE_ELEMENTS * 8].view(torch.int64).sum())))


def _settings() -> Findings:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    wrong = [name for name in names if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "")]
    what_to_do = "CUDA IPC cannot export such memory; turn it off for the trainer, or use broadcast"
    on = f"on, by {', '.join(wrong)}: {what_to_do}"
    yield found("expandable_segments", not wrong, "not set in the environment", on)
    nccl = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    yield Finding("pass", "NCCL variables", ", ".join(nccl) or "none set")


def _port() -> Findings:
    listener = Listener()
    try:
        address = listener.listen("127.0.0.1")
        socket.create_connection(address, timeout=5.0).close()
        yield Finding("pass", "loopback port", f"opened and reached, such as {address[1]}")
    except OSError as error:
        text = f"{error}; engine workers connect to the trainer on a free TCP port"
        yield Finding("FAIL", "loopback port", text)
    finally:
        listener.close()


def _plug_in() -> Findings:
    plug_ins = [
        e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "weightsync"
    ]
    allowed = os.environ.get("VLLM_PLUGINS")
    missing = "this Python has no entry point weightsync in vllm.general_plugins: install weightsync with pip"
    if plug_ins and allowed is not None and "weightsync" not in [name.strip() for name in allowed.split(",")]:
        plug_ins, missing = [], f"VLLM_PLUGINS={allowed} leaves weightsync out: add it to the list"
    yield found("vLLM plug-in", bool(plug_ins), "".join(plug_ins[:1]), missing)


def _own_engine(transport: str, quantization: str | None) -> Findings:
    if processes.vllm_version() is None or processes.installed("transformers") is None:
        yield Finding("skip", "engine", "vLLM is not installed here; name a running one with --engine URL --model DIR")
        return
    from weightsync.tools.bench.models import save_checkpoint
    from weightsync.tools.demo import lay_out

    try:
        layout = lay_out(torch.cuda.device_count(), transport)
    except ConfigError as error:
        yield Finding("skip", "engine", str(error))
        return
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-doctor-")))
        config = processes.tiny_model(folder / "config", layers=2)
        save_checkpoint(str(config), "A", folder / "A", torch.device("cpu"))

        def start(weights: str, scheme: str | None) -> Server:
            options = {} if scheme is None else {"quantization": scheme}
            log = folder / f"{weights}-{scheme}.log"
            engine = Server(folder / weights, "auto", log, layout.engine_environment, options)
            cleanup.callback(engine.stop)
            engine.wait(_START_TIMEOUT_S)
            return engine

        try:
            started = time.monotonic()
            engine = start("A", quantization)
            scheme = f" in {quantization}" if quantization else ""
            seconds = time.monotonic() - started
            yield Finding("pass", "engine", f"vLLM on {layout.engine}{scheme} answers after {seconds:.0f} s")
            yield from _given_engine(engine.url, folder / "A", transport)
            if quantization is None:
                return
            trainer = _load(folder / "A")
            _move_rows(trainer, "B")
            trainer.save_pretrained(folder / "B")
            with WeightSync("fsdp", transport, engine.url, progress=False) as sync:
                sync.push(trainer)
            pushed = generate(engine.url, _PROMPTS)
            rollouts = [[*prompt, *answer.token_ids] for prompt, answer in zip(_PROMPTS, pushed, strict=True)]
            quantised = processes.score(engine.url, rollouts)
            engine.stop()  # two engines may not fit
            cold = start("B", quantization)
            ends = "answers {} as the engine with B pushed"
            yield _same("cold start", generate(cold.url, _PROMPTS), pushed, "an engine started from B", ends)
            cold.stop()
            yield _gap(quantised, processes.score(start("B", None).url, rollouts))
        except WeightSyncError as error:
            yield Finding("FAIL", "engine", str(error))


def _gap(quantised: list[float], plain: list[float]) -> Finding:
    gaps = [abs(a - b) for a, b in zip(quantised, plain, strict=True)]
    sizes = f"by {sum(gaps) / len(gaps):.4f} on average and {max(gaps):.4f} at most"
    text = f"log-probabilities of {len(gaps)} tokens differ from an unquantised engine's {sizes}, with random weights"
    return Finding("pass", "rollout gap", text)


def _check_checkpoint(model_dir: Path) -> None:
    """Raise `ConfigError` if transformers could not read `model_dir` as a checkpoint."""
    if processes.installed("transformers") is None:
        raise ConfigError("--model needs transformers: pip install transformers")
    expected = "expected the folder of the engine's checkpoint"
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"{model_dir} has no config.json; {expected}")
    if not any(next(model_dir.glob(pattern), None) for pattern in _WEIGHTS):
        raise ConfigError(f"{model_dir} has no weights (no {' and no '.join(_WEIGHTS)}); {expected}")


def _your_engine(url: str, model_dir: Path | None, transport: str) -> Findings:
    failed = False
    for finding in connections(url):
        failed |= finding.status == "FAIL"
        yield finding
    if model_dir is None or failed:
        untried = "only a push tries the connections of a broadcast: name the checkpoint with --model DIR"
        why = "the engine is not connected" if failed else untried
        yield Finding("skip", "push", why)
    else:
        yield from _given_engine(url, model_dir, transport)


def _given_engine(url: str, model_dir: Path, transport: str) -> Findings:
    try:
        own = generate(url, _PROMPTS)
        before = connect(url, _CHILD_TIMEOUT_S)[0].version()
        model = _load(model_dir)
    except EngineUnreachableError as error:
        problem = Finding("FAIL", "engine", str(error))
    except WeightSyncError as error:
        problem = Finding("FAIL", "generate", f"the engine fails before any push; look into its log: {error}")
    except Exception as error:  # many kinds, for different faults of the files
        text = f"transformers does not load {model_dir}: {type(error).__name__}: {error}"
        problem = Finding("FAIL", "model", text)
    else:
        yield from _pushes(url, model, transport, own, before)
        return
    yield problem
    yield Finding("skip", "afterwards", "nothing was pushed")


def _load(model_dir: Path) -> Any:
    """Return the model of a checkpoint, on the GPU with the most free memory if it fits there, else on the CPU."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    nbytes = sum(p.nbytes for p in model.parameters())
    free = {number: torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())}
    number = max(free, key=lambda n: free[n], default=None)
    return model if number is None or free[number] <= 1.2 * nbytes else model.to(torch.device("cuda", number))


def _pushes(url: str, model: nn.Module, transport: str, own: list[Answer], before: str | None) -> Findings:
    """Push A, B and A. `own` are the engine's answers before, from its version `before`.

    After a failed push, another push makes the engine serve A, unless no push has changed its weights.
    """
    served = pushing = "A"
    try:
        with WeightSync("fsdp", transport, url, progress=False) as sync:
            report = sync.push(model)
            start = generate(url, _PROMPTS)
            pushed = f"{format_bytes(report.nbytes)} in {report.total_s:.2f} s"
            yield _identity(own, start, pushed, before)
            pushing = _move_rows(model, "B")
            sync.push(model)
            served = "B"
            same = "a push of other weights has not changed the answers: please report it"
            yield found(
                "A to B",
                processes.difference(start, generate(url, _PROMPTS)) != 0,
                "other weights, other answers",
                same,
            )
            pushing = _move_rows(model, "A")
            sync.push(model)
            served = "A"
            yield _same("B to A", start, generate(url, _PROMPTS), "the first weights again", "give {} their answers")
        return
    except WeightSyncError as error:
        yield Finding("FAIL", "push", str(error))
    if served == "A" and _is_whole(url, own):
        yield Finding("pass", "afterwards", "no push was left half-way: the engine serves its weights from before")
        return
    try:
        if pushing == "B":
            _move_rows(model, "A")
        with WeightSync("fsdp", transport, url, progress=False) as sync:
            sync.push(model)
        yield Finding("pass", "afterwards", "the engine has the weights of --model again")
    except WeightSyncError as error:
        yield Finding("FAIL", "afterwards", f"the engine does not serve the weights of --model, restart it: {error}")


def _is_whole(url: str, own: list[Answer]) -> bool:
    """Return whether no push has failed half-way.

    The engine's version shows it. An engine without versions must answer as before: a paused one would not answer.
    """
    (engine,) = connect(url, _CHILD_TIMEOUT_S)
    try:
        version = engine.version()
        return (
            processes.difference(own, generate(url, _PROMPTS)) == 0
            if version is None
            else not version.startswith(POISONED)
        )
    except WeightSyncError:
        return False


def _identity(own: Sequence[Answer], start: Sequence[Answer], pushed: str, before: str | None) -> Finding:
    """Return the finding of a first push of A. An engine that was pushed to may have served other weights before."""
    finding = _same(_IDENTITY, own, start, pushed, "and the engine gives {} its first answers")
    if finding.status == "pass" or before in (None, "default"):
        return finding
    why = f"the answers changed: version {before} had other weights than --model, or the push is wrong"
    return Finding("skip", _IDENTITY, f"{pushed}; {why}")


def _same(check: str, expected: Sequence[Answer], found: Sequence[Answer], subject: str, predicate: str) -> Finding:
    """Return a pass if the answers are equal. `predicate` has a place for "exactly" or "not"."""
    gap = processes.difference(expected, found)
    if gap == 0:
        return Finding("pass", check, f"{subject} {predicate.format('exactly')}")
    how = "other token ids" if gap == float("inf") else f"log-probabilities differ by up to {gap:g}"
    return Finding("FAIL", check, f"{subject} {predicate.format('not')}: {how}; please report it")


@torch.no_grad()
def _move_rows(model: nn.Module, to: str) -> str:
    """Turn weights A into B in place, or back, exactly: move the rows of every parameter in a ring. Return `to`."""
    for parameter in model.parameters():
        if parameter.dim() > 0:
            parameter.copy_(parameter.roll(1 if to == "B" else -1, 0))
    return to


if __name__ == "__main__":
    _read_for_parent(*sys.argv[1:])
