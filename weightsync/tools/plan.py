"""`weightsync plan`: show an engine's use of a trainer's tensors, from a config.json alone.

The tensors are the Hugging Face model's. The load plan is traced from vLLM's loader, and the buckets are made as for a
push. Layers that are alike are shown once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from weightsync.errors import ConfigError
from weightsync.planning.bucketing import Bucket, open_bucketer
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import (
    Box,
    LoadCopy,
    Manifest,
    TensorMeta,
    connected,
    fuse_groups,
    row_major,
    strided_boxes,
)
from weightsync.report import format_bytes
from weightsync.tools import first_push, simulate
from weightsync.tools.bench.shapes import SHAPES, write_config
from weightsync.tools.tables import print_line, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from weightsync.vllm.plan_offline import WorkerPlan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SIZE = re.compile(r"[\d.]+[MBT]", re.IGNORECASE)
_QUANTISATIONS = "quantization_config", "compression_config"
_MOST_BUCKETS = 6
_LONGEST_REASON = 300
"""Characters of transformers' error about a config.json. Some errors list every known model."""


def run(options: Namespace, console: Console) -> bool:
    """Print the report, or a prediction, and return whether the tensors fill the engine's model.

    A report loads vLLM and transformers. Raise `ConfigError` if there can be no plan.
    """
    with tempfile.TemporaryDirectory(prefix="weightsync-plan-") as made:
        model_dir = _folder(options.model_dir, Path(made))
        if options.simulate:
            return _predict(model_dir, options, console)
        return _report(model_dir and _unquantised(model_dir, Path(made), console), options, console)


def _report(model_dir: Path | None, options: Namespace, console: Console) -> bool:
    bucketer = open_bucketer(options.bucketer or "module", options.max_bytes)
    tp, everything = 1 if options.tp is None else options.tp, options.all
    if model_dir is None:
        raise ConfigError(f"{options.model_dir} has no config.json; {_way_out(str(options.model_dir))}")
    if tp < 1:
        raise ConfigError(f"--tp {tp}: expected a number of workers, at least 1")
    architecture, offered, workers = _plan(model_dir, options, tp)
    manifest = _as_held(offered, workers)
    groups = connected(
        (name, (rank, number))
        for rank, worker in enumerate(workers)
        for number, names in enumerate(fuse_groups(worker.trace.copies))
        for name in names
    )
    _line(console, f"[bold]{architecture}[/bold] in vLLM, over {tp} tensor parallel worker{'s' if tp > 1 else ''}")
    _line(console, f"{len(manifest)} tensors, {format_bytes(manifest.nbytes)} in the dtypes that the engine holds")
    for rank, worker in enumerate(workers if everything else workers[:1]):
        _show_worker(console, worker, manifest, rank, tp, everything)
    _show_groups(console, groups, everything)
    _show_buckets(console, bucketer.bucket(manifest, groups), everything)
    return _show_problems(console, workers)


def _plan(model_dir: Path, options: Namespace, tp: int) -> tuple[str, Manifest, list[WorkerPlan]]:
    """Return the model's class, its tensors and each worker's plan. A terminal shows that the work goes on."""
    from rich.console import Console

    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM also warns before it sets up logging
    with Console(stderr=True).status("loading vLLM, up to a minute") as status:
        try:
            from weightsync.vllm.plan_offline import plan_workers
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error}; a plan needs vLLM and transformers: pip install 'weightsync[vllm]'") from error
        status.update(f"making the model of {model_dir} without weights")
        architecture, offered = checkpoint_tensors(model_dir)
        status.update("tracing vLLM's loader")
        dtype, spread = options.dtype or "auto", options.expert_parallel
        return architecture, offered, plan_workers(model_dir, offered, tp, dtype, expert_parallel=spread)


def _predict(model_dir: Path | None, options: Namespace, console: Console) -> bool:
    """Print the seconds of a push in bfloat16 on each topology, also for a size such as "70B". Return True.

    A size says nothing of the tensors, so it has no prediction of a first push.
    """
    in_topology = {"tp": f"tp={options.tp}", "max_bytes": "chunk_mib=N"}
    for name in ("tp", "dtype", "bucketer", "max_bytes", "all"):
        if (value := getattr(options, name)) is not None and value is not False:
            way_out = f"put {in_topology[name]} into the topology" if name in in_topology else "leave it out"
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on --simulate: {way_out}")
    parsed = [simulate.Topology.parse(text) for text in options.simulate]
    model = str(options.model_dir)
    if model_dir is None and not _SIZE.fullmatch(model):
        raise ConfigError(f"{model} has no config.json, and is no size such as 70B or 1T; {_way_out(model)}")
    if model_dir is None and options.expert_parallel:
        raise ConfigError("--expert-parallel has no effect on a size such as 70B: give a model with its config.json")
    manifest = None if model_dir is None else in_bfloat16(model_dir)
    nbytes = simulate.bfloat16_bytes(model) if manifest is None else manifest.nbytes
    print_line(console, f"{model}, {format_bytes(nbytes)} in bfloat16: predicted, not measured\n")
    print_table(console, simulate.COLUMNS, simulate.rows(nbytes, parsed), ">>>>><>><")
    if manifest is not None:
        print_line(console, f"\nThe planning of a first push over broadcast: {len(manifest)} tensors\n")
        found = first_push.rows(first_push.Model.of(manifest), parsed, options.expert_parallel)
        print_table(console, first_push.COLUMNS, found, ">>>><>>><")
    return True


def _folder(model: Path, made: Path) -> Path | None:
    """Return the folder of the config.json of `model`, or None if there is none.

    `model` is the folder, the file, or the name of a shape of `weightsync bench`. A shape is written into `made`.
    """
    folder = model.parent if model.name == "config.json" else model
    if (folder / "config.json").is_file():
        return folder
    name = str(model)
    return write_config(name, made) if name in SHAPES and not _SIZE.fullmatch(name) else None


def _unquantised(folder: Path, made: Path, console: Console) -> Path:
    """Return a folder in `made` with the config.json of `folder` for an unquantised engine. Without need, `folder`.

    The trainer's tensors have no scales. A push makes them on the way.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        parts = [config, config.get("text_config") or {}]  # as vLLM looks for it
        found = [name for part in parts for name in _QUANTISATIONS if part.pop(name, None)]
    except (OSError, ValueError, TypeError, AttributeError):  # transformers tells what is wrong with the file
        found = []
    if not found:
        return folder
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _line(console, "config.json has a quantization_config. The plan is of an unquantised engine: docs/use/quantized.md")
    return made


def _way_out(model: str) -> str:
    """Return a remedy for a `model` that is not a folder with a config.json."""
    if _SIZE.fullmatch(model):
        return f"a size goes with --simulate: weightsync plan {model} --simulate hosts=1"
    if _HUB_NAME.fullmatch(model) and not Path(model).exists():
        folder = model.rpartition("/")[2]
        return f"to download it from the hub: hf download {model} config.json --local-dir {folder}"
    return "expected the folder of a Hugging Face model"


def checkpoint_tensors(model_dir: Path) -> tuple[str, Manifest]:
    """Return the class of the Hugging Face model of `model_dir`, and the tensors that its trainer sends.

    Tied tensors come once. Nothing is allocated. Raises `ConfigError` if transformers cannot make a model of the
    config.json.
    """
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; install it with: pip install transformers") from error

    from weightsync.selection import TensorSelection
    from weightsync.sources.hf_checkpoint import manifest_of, saved_form

    try:
        config = AutoConfig.from_pretrained(model_dir)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # many kinds, for different faults of the file
        reason = shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON, placeholder=" ...")
        raise ConfigError(f"transformers makes no model of {model_dir / 'config.json'}: {reason}") from error
    tensors: dict[int, TensorMeta] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    saved = saved_form(model, list(tensors.values()), TensorSelection())
    return type(model).__name__, manifest_of(saved)


def in_bfloat16(model_dir: Path) -> Manifest:
    """Return the tensors of `checkpoint_tensors` in bfloat16, the dtype that travels."""
    _, manifest = checkpoint_tensors(model_dir)
    return Manifest(tuple(TensorMeta(tensor.name, tensor.shape, "bfloat16") for tensor in manifest))


def _as_held(manifest: Manifest, workers: Sequence[WorkerPlan]) -> Manifest:
    """Return the manifest in the dtypes of the engine's parameters."""
    landed = ((copy.name, worker.params[copy.param]) for worker in workers for copy in worker.trace.copies)
    held = {name: str(param.dtype).removeprefix("torch.") for name, param in landed}
    return Manifest(tuple(TensorMeta(t.name, t.shape, held.get(t.name, t.dtype)) for t in manifest))


_Entry = tuple[str, tuple[tuple[str, str], ...]]
"""One parameter of the engine, or several alike ones, with stars. Each row has a part of it, and its source."""


def _show_worker(
    console: Console, worker: WorkerPlan, manifest: Manifest, rank: int, tp: int, everything: bool
) -> None:
    copies = grouped(worker.trace.copies, lambda copy: copy.param)
    names = list(dict.fromkeys((*copies, *worker.trace.computed)))
    entries = Counter(_entry(name, copies.get(name, ()), worker, manifest, fold=not everything) for name in names)
    nbytes = sum(prod(copy.box.size) * worker.params[copy.param].itemsize for copy in worker.trace.copies)
    size = f"{len(worker.trace.copies)} copies, {format_bytes(nbytes)}, into {len(names)} parameters"
    alike = "" if everything else "; modules that are alike are shown once"
    _line(console, f"\n[bold]load plan of worker tp={rank}[/bold]: {size}{alike}")
    for (head, rows), times in entries.items():
        line = f"  {head}" + _times(times)
        if len(rows) == 1 and not rows[0][0]:
            _line(console, f"{line}  <- {_safe(rows[0][1])}")
            continue
        _line(console, line)
        width = max(len(target) for target, _ in rows)
        for target, text in rows:
            _line(console, f"      {_safe(target.ljust(width))} <- {_safe(text)}")
    if tp > 1 and not everything:
        others = "worker tp=1 takes" if tp == 2 else f"workers tp=1 to tp={tp - 1} take"
        _line(console, f"  {others} other regions of the same tensors: --all shows them")


def _entry(name: str, copies: Sequence[LoadCopy], worker: WorkerPlan, manifest: Manifest, fold: bool) -> _Entry:
    param = worker.params[name]
    by_source = grouped(copies, lambda copy: _starred(copy.name) if fold else copy.name)
    rows: list[tuple[str, str]] = []
    for source, parts in by_source.items():
        targets = [box for copy in parts for box in _landing(copy, tuple(param.shape), param.stride())]
        regions = {
            _boxes([copy.box for copy in parts if copy.name == tensor], manifest[tensor].shape)
            for tensor in dict.fromkeys(copy.name for copy in parts)
        }
        tensors = len({copy.name for copy in parts})
        text = source + (regions.pop() if len(regions) == 1 else "[...]")
        rows.append((_boxes(targets, param.shape), text + (f" of {tensors} tensors" if tensors > 1 else "")))
    if name in worker.trace.computed:
        rows.append(("", f"computed by the loader from {', '.join(worker.trace.computed[name])}"))
    elif sum(copy.box.numel for copy in copies) < prod(param.shape):
        constants = sorted({fill.value for fill in worker.trace.fills if fill.param == name})
        rows.append(("the rest", f"constant {constants[0]:g}" if constants else "nothing"))
    shape = _safe(f"[{', '.join(map(str, param.shape))}]")
    dtype = str(param.dtype).removeprefix("torch.")
    return f"[bold]{_starred(name) if fold else name}[/bold]  {shape} {dtype}", tuple(rows)


def _landing(copy: LoadCopy, shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Box]:
    """Return the region of the parameter that a copy fills."""
    boxes = strided_boxes(shape, copy.offset, copy.box.size, copy.stride) if stride == row_major(shape) else None
    return boxes if boxes is not None else [Box.full(shape)]


def _boxes(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Return boxes of a tensor of `shape` as an index. If they fill the box around them, it is that box's index."""
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    end = tuple(map(max, zip(*(map(sum, zip(box.start, box.size, strict=True)) for box in boxes), strict=True)))
    around = Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))
    if around == Box.full(shape) and sum(box.numel for box in boxes) == around.numel:
        return ""
    pieces = "" if sum(box.numel for box in boxes) == around.numel else f" in {len(boxes)} pieces"
    return f"{around}{pieces}"


def _show_groups(console: Console, groups: Sequence[Sequence[str]], everything: bool) -> None:
    fused = [names for names in groups if len(names) > 1]
    alone = len(groups) - len(fused)
    _line(console, f"\n[bold]fused tensors[/bold], always in one bucket: {len(fused)} groups; {alone} tensors alone")
    shown = Counter(
        (_braces(names if everything else list(dict.fromkeys(map(_starred, names)))), len(names)) for names in fused
    )
    for (text, size), times in shown.items():
        _line(console, f"  {size} tensors  {text}" + _times(times))


def _show_buckets(console: Console, buckets: Sequence[Bucket], everything: bool) -> None:
    total = sum(bucket.nbytes for bucket in buckets)
    _line(console, f"\n[bold]buckets[/bold]: {len(buckets)}, {format_bytes(total)}")
    middle = 0 if everything else max(0, len(buckets) - _MOST_BUCKETS)
    for number, bucket in enumerate(buckets):
        if number == _MOST_BUCKETS - 1 and middle:
            _line(console, f"  ... {middle} more: --all shows them")
        if _MOST_BUCKETS - 1 <= number < _MOST_BUCKETS - 1 + middle:
            continue
        ends = bucket.names[0] if len(bucket.names) == 1 else f"{bucket.names[0]} to {bucket.names[-1]}"
        count = f"{len(bucket.names)} tensor{'s' if len(bucket.names) > 1 else ''}"
        _line(console, f"  {number:>4}  {format_bytes(bucket.nbytes):>9}  {count:>12}  {ends}")


def _show_problems(console: Console, workers: Sequence[WorkerPlan]) -> bool:
    problems: dict[str, None] = {}
    for rank, worker in enumerate(workers):
        problems |= dict.fromkeys(f"{name}: the engine has no place for it" for name in worker.trace.unknown)
        problems |= dict.fromkeys(f"{name}: {reason}" for name, reason in worker.trace.refused.items())
        problems |= dict.fromkeys(f"{name}: no tensor fills it (worker tp={rank})" for name in worker.missing)
        problems |= dict.fromkeys(f"{name}: filled twice (worker tp={rank})" for name in worker.doubled)
    if problems:
        _line(console, f"\n[bold red]{len(problems)} problems[/bold red]: a push of these tensors would be refused")
    for problem in problems:
        _line(console, f"  {_safe(problem)}")
    return not problems


def _starred(name: str) -> str:
    return _NUMBER.sub("*", name)


def _braces(names: Sequence[str]) -> str:
    """Return names with one different part as one: "layers.*.self_attn.{q_proj,k_proj,v_proj}.weight"."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    different = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len({name.count(".") for name in names}) > 1 or len(different) > 1:
        return ", ".join(names)
    return ".".join(
        f"{{{','.join(dict.fromkeys(column))}}}" if i in different else column[0] for i, column in enumerate(columns)
    )


def _times(number: int) -> str:
    return f"  [cyan]x {number}[/cyan]" if number > 1 else ""


def _safe(text: str) -> str:
    """Return `text` with its square brackets as they stand, not as markup."""
    return text.replace("[", "\\[")


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
