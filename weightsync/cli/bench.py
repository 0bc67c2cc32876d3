"""`weightsync bench`: what to measure, a plan of it, the measuring, and the report."""

from __future__ import annotations

import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from weightsync.bench import floors, measure, results
from weightsync.bench.cases import CHECKPOINT_ENGINE, PEERS, Case, Machine, expand, refusal
from weightsync.bench.limits import measure as measure_limits
from weightsync.bench.shapes import write_config
from weightsync.cli.plan_report import checkpoint_tensors
from weightsync.errors import ConfigError
from weightsync.layout import Manifest
from weightsync.memory import SHARED_MEMORY
from weightsync.report import format_bytes
from weightsync.trial import installed, vllm_version

_PLAN_COLUMNS = ("lower bound", "memory: per rank", "per worker", "host", "disk", "case")


def run(options: Namespace, console: Console) -> bool:
    """The whole command; gives whether every push of weightsync was right. Raises `ConfigError` for what cannot work,
    and `ChildError` when the limits cannot be measured."""
    if options.num_iters < 1 or options.num_iters_warmup < 0:
        raise ConfigError(
            f"--num-iters {options.num_iters} and --num-iters-warmup {options.num_iters_warmup}: expected at least 1 "
            "and 0"
        )
    if not options.dry_run and vllm_version() is None:
        raise ConfigError("vLLM is not installed here; install it with: pip install 'weightsync[vllm]'")
    machine = this_machine(options.gpus, assumed=options.dry_run)
    cases, refused, manifests = choose(options, machine)
    if options.dry_run:
        show_plan(console, cases, refused, manifests, machine.gpus)
        return True
    if not cases:
        raise ConfigError(f"nothing can be measured here; the first of {len(refused)} reasons: {refused[0][1]}")
    found = []
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as name:
        folder = Path(name)
        console.print(f"measuring the limits of this machine, then {len(cases)} cases", highlight=False)
        receivers = [case.receivers for case in cases if case.transport == "broadcast" or "nccl" in case.way]
        limits = measure_limits(folder, receivers, machine.gpus)
        total = sum(measure.pushes(case, options.num_iters_warmup, options.num_iters) for case in cases)
        with _progress(console, total) as advance:
            for result in measure.run(
                cases,
                manifests,
                limits,
                machine.gpus,
                options.num_iters_warmup,
                options.num_iters,
                folder,
                advance,
            ):
                found.append(result)
                if result.error is not None:
                    console.print(f"[bold red]failed[/bold red]: {escape(str(result.case))}")
                    console.print(result.error, markup=False, highlight=False, soft_wrap=True)
                if options.output_json is not None:  # after each, so that little is lost when something breaks
                    options.output_json.write_text(results.to_json(found))
    show_results(console, found, refused)
    if options.report is not None:
        _write_report(console, options.report, found, refused)
    wrong = results.failures(found)
    if wrong:
        console.print(f"[bold red]FAIL[/bold red] {len(wrong)} of {len(found)} cases failed or left wrong answers")
    return not wrong


def this_machine(gpus: int | None, *, assumed: bool) -> Machine:
    """What there is to measure with, of GPUs only that many. Raises `ConfigError` when there are fewer, unless they are
    `assumed`."""
    there = torch.cuda.device_count()
    gpus = there if gpus is None else gpus
    if gpus < 0 or (gpus > there and not assumed):
        raise ConfigError(f"--gpus {gpus}: there are {there}")
    gpu_bytes = min((torch.cuda.get_device_properties(n).total_memory for n in range(min(gpus, there))), default=0)
    found = frozenset(name for name in ("deepspeed", "megatron-core", CHECKPOINT_ENGINE) if installed(name))
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk_bytes, shared_bytes = (shutil.disk_usage(path).free for path in (tempfile.gettempdir(), SHARED_MEMORY))
    return Machine(gpus, host_bytes, gpu_bytes, disk_bytes, shared_bytes, found)


def choose(options: Namespace, machine: Machine) -> tuple[list[Case], list[tuple[Case, str]], dict[str, Manifest]]:
    """The cases that this machine can run, those that it cannot with the reason, and each shape's tensors. A dry run
    leaves nothing out for lack of memory."""
    cases = expand(
        backends=options.backend,
        ranks=options.ranks,
        transports=options.transport,
        bucketers=options.bucketer,
        dtypes=options.dtype,
        shapes=options.shape,
        quantizations=[None if scheme == "none" else scheme for scheme in options.quantization],
        engines=options.engines,
        tps=options.tp,
        peers=PEERS if options.peers else (),
    )
    manifests: dict[str, Manifest] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in dict.fromkeys(case.shape for case in cases):
            manifests[shape] = checkpoint_tensors(write_config(shape, Path(folder) / shape))[1]
    able, refused = [], []
    for case in cases:
        why = refusal(case, machine)
        if why is None and not options.dry_run:
            why = too_large(floors.memory(case, manifests[case.shape], machine.gpus), machine)
        if why is None:
            able.append(case)
        else:
            refused.append((case, why))
    return able, refused, manifests


def too_large(needed: floors.Memory, machine: Machine) -> str | None:
    """What there is too little of, None when all fits."""
    wants = {
        "host memory": (needed.host, machine.memory_bytes),
        "disk": (needed.disk, machine.disk_bytes),
        SHARED_MEMORY: (needed.shared, machine.shared_bytes),
    }
    if machine.gpus:  # a GPU may have both a trainer rank and an engine worker
        wants["GPU memory"] = (needed.trainer_rank + needed.engine_worker, machine.gpu_memory_bytes)
    for what, (bytes_wanted, there) in wants.items():
        if bytes_wanted > there:
            return f"needs {format_bytes(bytes_wanted)} of {what}, and there are {format_bytes(there)}"
    return None


def show_plan(
    console: Console,
    cases: Sequence[Case],
    refused: Sequence[tuple[Case, str]],
    manifests: dict[str, Manifest],
    gpus: int,
) -> None:
    """What would be measured, with lower bounds from assumed limits and estimated memory."""
    limits = floors.ASSUMED_GPU if gpus else floors.ASSUMED_CPU
    rows = []
    for case in cases:
        nbytes = floors.wire_manifest(manifests[case.shape]).nbytes
        least = floors.floor(case, nbytes, limits, gpus)
        needed = floors.memory(case, manifests[case.shape], gpus)
        sizes = (needed.trainer_rank, needed.engine_worker, needed.host, needed.disk)
        bound = results.lower_bound(least.seconds, least.limit)
        rows.append((bound, *map(format_bytes, sizes), f"{case} ({format_bytes(nbytes)})"))
    _lines(console, results.text_table(_PLAN_COLUMNS, rows, ">>>>><"))
    speeds = ", ".join(f"{name} {speed:g} GB/s" for name, speed in limits.items())
    _lines(console, [f"lower bounds at {speeds}: assumed, until a run measures them."])
    _show_refused(console, refused)


def show_results(console: Console, found: Sequence[results.Result], refused: Sequence[tuple[Case, str]]) -> None:
    rows = [results.row_of(result) for result in found]
    _lines(console, results.text_table(results.COLUMNS, rows, ">>>>><<"))
    console.print(f"\n{results.EXPLAINED}", markup=False, highlight=False)
    _show_refused(console, refused)


def _show_refused(console: Console, refused: Sequence[tuple[Case, str]]) -> None:
    if refused:
        _lines(console, ["", "not measured:", *(f"  {cases}: {why}" for cases, why in results.reasons(refused))])


def _lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _write_report(
    console: Console, folder: Path, found: Sequence[results.Result], refused: Sequence[tuple[Case, str]]
) -> None:
    from weightsync.bench.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    plots: list[str] = []
    try:
        plots = draw(found, folder)
    except ModuleNotFoundError as error:
        console.print(f"no plots: {error}; pip install 'weightsync[bench]'", markup=False, highlight=False)
    (folder / "report.md").write_text(results.markdown(found, refused, plots))
    console.print(f"wrote {', '.join(str(folder / name) for name in ('report.md', *plots))}", soft_wrap=True)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[measure.Advance]:
    """A bar on a terminal, elsewhere a line for each case."""
    if not console.is_terminal:
        last = ""

        def say(what: str) -> None:
            nonlocal last
            if (begun := what.rpartition(": ")[0] or what) != last:
                console.print(f"{begun} ...", markup=False, highlight=False, soft_wrap=True)
                last = begun

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(what: str) -> None:
            bar.update(task, description=escape(what))
            bar.advance(task)

        yield advance
