"""`weightsync bench`: run the cases one after the other, each in trainer processes of its own, and print the times."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from weightsync import __version__
from weightsync.errors import ConfigError
from weightsync.report import format_bytes, format_seconds
from weightsync.tools.bench import trainer
from weightsync.tools.bench.cases import (
    ASSUMED,
    ASSUMED_CPU,
    BROADCAST,
    NIXL_READ,
    WEIGHTSYNC,
    Case,
    expand,
    floor,
    refusal,
)
from weightsync.tools.bench.limits import measure
from weightsync.tools.bench.plot import check_plot, draw
from weightsync.tools.bench.shapes import add_shapes, cut_layers, write_config
from weightsync.tools.plan import in_bfloat16
from weightsync.tools.processes import ChildError, installed, run_trainers, vllm_version
from weightsync.tools.tables import print_line, print_table

SCHEMA = 3
_READ = (2, SCHEMA)
LOOPS = ("back_to_back", "in_training")
_COLUMNS = ("back to back", "min - max", "in training", "min - max", "first", "lower bound", "answers", "case")
_EXPLAINED = (
    "\nA push on the trainer's clock, median. In training: generate, one optimizer step, 0.3 s, push. Lower bound: "
    "the bytes\nover this limit, at its speed. Answers: after the last push, against a cold start from the same "
    "weights. From dummy\nweights: against the first push to the same engine.\n\nPhases, medians; they overlap.\n"
)
_PATIENCE_S = 300.0
_SLOWEST_BYTES_PER_S = 20e6
_CAUSES = 8
_DISTRIBUTIONS = ("transformers", "deepspeed", "megatron-core", "nixl")


def run(options: Namespace, console: Console) -> bool:
    """Run the whole command, and return whether every push of weightsync was right.

    Raise `ConfigError` for impossible options, and `ChildError` if the limits cannot be measured.
    """
    if options.plot is not None:
        check_plot(options.plot)
    if options.dry_run and (options.plot or options.results or options.json):
        raise ConfigError("--dry-run has no results: leave --plot, --json and --from out")
    rows = read_results(options.results) if options.results else _measure_cases(options, console)
    if rows:
        _show(console, rows)
    if options.plot is not None:
        draw(rows, options.plot)
    wrong = [row for row in rows if row["case"]["way"] == WEIGHTSYNC and row.get("answers") != 0]
    if wrong:
        print_line(console, f"FAIL: {len(wrong)} of {len(rows)} cases failed or left wrong answers")
    return not wrong


def read_results(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the measured cases of files that --json has written. Raise `ConfigError` for any other file."""
    rows: list[Any] = []
    for file in files:
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--from {file}: {error}") from error
        rows += found if isinstance(found, list) else [found]
        if not found or not all(isinstance(row, dict) and row.get("schema") in _READ for row in rows):
            raise ConfigError(f"--from {file}: expected cases of schema 2 or 3, as weightsync bench --json writes them")
    return rows


def _check(options: Namespace) -> None:
    """Raise `ConfigError` for options that no machine can measure."""
    if options.num_iters < 1 or options.num_iters_warmup < 0:
        raise ConfigError(f"--num-iters {options.num_iters} {options.num_iters_warmup}: expected at least 1, and 0")
    for name in ("jobs", "layers"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise ConfigError(f"--{name} {number}: expected at least 1")
    for name, folder in (("folder", options.folder), ("json", options.json and options.json.parent)):
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"--{name} {getattr(options, name)}: there is no folder {folder}")
    if not options.dry_run and vllm_version() is None:
        raise ConfigError("vLLM is not installed here; install it with: pip install 'weightsync[vllm]'")


def _measure_cases(options: Namespace, console: Console) -> list[dict[str, Any]]:
    """Measure what can be measured here, and return the cases. A dry run returns none."""
    _check(options)
    if options.families is not None:
        options.shape = add_shapes(options.families)
    if options.layers is not None:
        options.shape = cut_layers(options.shape, options.layers)
    there = torch.cuda.device_count()
    gpus = there if options.gpus is None else options.gpus
    if gpus < 0 or (gpus > there and not options.dry_run):
        raise ConfigError(f"--gpus {gpus}: there are {there}")
    cases = expand(options)
    here = frozenset(module for module in ("deepspeed", "megatron", "nixl") if find_spec(module))
    core_in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1").strip() == "0"
    refused = {case: why for case in cases if (why := refusal(case, gpus, here, core_in_process))}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-", dir=options.folder) as name:
        folder = Path(name)
        sizes: dict[str, int] = {}
        for shape in dict.fromkeys(case.shape for case in cases if case not in refused):
            try:
                sizes[shape] = in_bfloat16(write_config(shape, folder / f"{shape}-config")).nbytes
            except ConfigError as error:
                refused |= {case: str(error) for case in cases if case.shape == shape}
        able = [case for case in cases if case not in refused]
        if not able:
            raise ConfigError(f"nothing can be measured here; the first of the reasons: {next(iter(refused.values()))}")
        if options.dry_run:
            _show_dry_run(console, able, sizes, gpus)
        else:
            limits, where = measure(folder, gpus), _environment(gpus)
            for row in _measure_all(able, options, sizes, gpus, limits, folder, console):
                rows.append({"schema": SCHEMA, "environment": where, "limits": limits, **row})
                if options.json is not None:  # after each case, so that a crash loses little
                    options.json.write_text(json.dumps(rows, indent=1))
    for case, why in refused.items():
        print_line(console, f"not measured: {case}: {why}")
    return rows


def _measure_all(
    cases: Sequence[Case],
    options: Namespace,
    sizes: Mapping[str, int],
    gpus: int,
    limits: Mapping[str, float],
    folder: Path,
    console: Console,
) -> Iterator[dict[str, Any]]:
    """Yield each measured case when it is done. `options.jobs` run at once. All end when the caller leaves."""
    over = threading.Event()

    def measure_one(case: Case) -> dict[str, Any]:
        own = Path(tempfile.mkdtemp(dir=folder))  # all cases use the same names of logs and checkpoints
        (own / f"{case.shape}-config").symlink_to(folder / f"{case.shape}-config")
        return _measure(case, options, sizes[case.shape], gpus, limits, own, over)

    with ThreadPoolExecutor(options.jobs) as pool:
        started = {pool.submit(measure_one, case): case for case in cases}
        try:
            for number, done in enumerate(as_completed(started), 1):
                row = done.result()
                print_line(console, f"{number} of {len(cases)}: {started[done]}")
                if "error" in row:
                    causes = ["The first errors there:", *row["causes"]]
                    print_line(console, "\n".join([f"failed: {row['error']}", *causes]))
                yield row
        finally:
            over.set()
            pool.shutdown(cancel_futures=True)


def _measure(
    case: Case,
    options: Namespace,
    nbytes: int,
    gpus: int,
    limits: Mapping[str, float],
    folder: Path,
    over: threading.Event,
) -> dict[str, Any]:
    """Return one measured case as plain values. A case has an "error" if it fails or `over` ends it."""
    timeout_s = _PATIENCE_S + nbytes / _SLOWEST_BYTES_PER_S
    least_s, limit = floor(case, nbytes, limits, gpus)
    row: dict[str, Any] = {"case": asdict(case), "nbytes": nbytes, "floor_s": least_s, "floor_limit": limit}
    graphs = options.cuda_graphs or ("decode" if gpus else "off")
    chosen = {name: getattr(options, name) for name in ("trainer_on_cpu", "max_bytes", "num_iters_warmup", "num_iters")}
    result = folder / "result.json"
    places = {"folder": str(folder), "result": str(result)}
    order = {**chosen, **places, "case": asdict(case), "gpus": gpus, "graphs": graphs, "timeout_s": timeout_s}
    try:
        run_trainers(trainer.__name__, order, case.ranks, folder, 4 * timeout_s, over=over)
    except ChildError as error:
        return {**row, "error": str(error), "causes": _causes(folder)}
    measured = json.loads(result.read_text())
    measured["compared_with"] = "cold start" if case.starts_cold else "first push"
    measured["seconds"] = {loop: medians(measured[loop]) for loop in LOOPS}
    if measured["answers"] == float("inf"):
        measured["answers"] = "other tokens"
    return {**row, "graphs": graphs, "max_bytes": options.max_bytes, **measured}


def _causes(folder: Path) -> list[str]:
    """Return the first messages of exceptions in each log. The end of a log shows only their consequences."""
    found: dict[str, None] = {}
    for log in sorted(folder.glob("*.log")):
        lines = re.findall(r"^.*?(\w+(?:Error|Exception): .+)$", log.read_text(errors="replace"), re.MULTILINE)
        found |= dict.fromkeys(list(dict.fromkeys(lines))[:_CAUSES])
    return list(found)


def medians(pushes: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return median, least and most of each phase."""
    found = {}
    for name in pushes[0]:
        values = [push[name] for push in pushes]
        found[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return found


def _show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    done = [(Case(**row["case"]), row) for row in rows if "error" not in row]
    table = []
    for case, row in done:
        cells = []
        for loop in LOOPS:
            total = row["seconds"][loop]["total_s"]
            cells += [
                format_seconds(total["median"]),
                f"{format_seconds(total['least'])} - {format_seconds(total['most'])}",
            ]
        bound = f"{row['floor_limit']}: {format_seconds(row['floor_s'])}"
        answers = "equal" if row["answers"] == 0 else f"wrong: {row['answers']}"
        answers += "" if case.starts_cold else ", no cold engine compared"
        size = f"{case} ({format_bytes(row['nbytes'])})"
        table.append((*cells, format_seconds(row["first"]["total_s"]), bound, answers, size))
    print_table(console, _COLUMNS, table, ">>>>>><<")
    print_line(console, _EXPLAINED)
    for case, row in done:
        phases = list(dict.fromkeys(name for loop in LOOPS for name in row["seconds"][loop]))
        columns = ("", *(name.removesuffix("_s") for name in phases))
        lines = [
            (loop.replace("_", " "), *(format_seconds(row["seconds"][loop][name]["median"]) for name in phases))
            for loop in LOOPS
        ]
        print_line(console, str(case))
        print_table(console, columns, lines, "<" + ">" * len(phases))
        if row["extra_bytes"]:
            print_line(console, f"GPU memory of workers, more: {', '.join(map(format_bytes, row['extra_bytes']))}")


def _show_dry_run(console: Console, cases: Sequence[Case], sizes: Mapping[str, int], gpus: int) -> None:
    limits = ASSUMED if gpus else {**ASSUMED, BROADCAST: ASSUMED_CPU, NIXL_READ: ASSUMED_CPU}
    rows = []
    for case in cases:
        seconds, limit = floor(case, sizes[case.shape], limits, gpus)
        rows.append(
            (
                f"{limit} at {limits[limit]:g} GB/s",
                format_seconds(seconds),
                f"{case} ({format_bytes(sizes[case.shape])})",
            )
        )
    print_table(console, ("limit, assumed", "lower bound", "case"), rows, "<><")


def _environment(gpus: int) -> dict[str, Any]:
    """Return the machine and the versions of a measurement."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "weightsync": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm_version(),
        **{name: installed(name) for name in _DISTRIBUTIONS},
        "cpu": f"{next(models, platform.machine())}, {os.cpu_count()} cores",
        "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
    }
