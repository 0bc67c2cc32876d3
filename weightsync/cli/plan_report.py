"""`weightsync plan`: what an engine would do with a trainer's tensors, from a config.json alone, or what a push
would take on other machines.

The tensors are those of the Hugging Face model, the load plan is traced from vLLM's loader, and the buckets are those
of a push. Layers that are alike are shown once.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from weightsync.bench.results import text_table
from weightsync.bucketing import Bucket, Bucketer
from weightsync.errors import ConfigError
from weightsync.layout import Box, Manifest, PlannedCopy, TensorMeta, connected, fuse_groups, row_major, strided_boxes
from weightsync.report import format_bytes
from weightsync.senders.base import TensorPolicy
from weightsync.senders.saved import SavedForm
from weightsync.simulate import Topology, bfloat16_bytes, simulation_table

if TYPE_CHECKING:
    from weightsync.vllm.offline import WorkerPlan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SIZE = re.compile(r"[\d.]+[MBT]", re.IGNORECASE)
_MOST_BUCKETS = 6
_LONGEST_REASON = 300
"""Characters of what transformers or vLLM say against a config.json; some list every model that there is."""


def run(
    model: Path,
    tp: int,
    expert_parallel: bool,
    bucketer: Bucketer,
    dtype: str,
    everything: bool,
    console: Console,
) -> bool:
    """Print the report; gives whether the tensors fill the engine's model. `model` is a folder with a config.json, or
    that file. Raises `ConfigError` for what cannot be planned. Loads vLLM and transformers."""
    model_dir = _folder(model)
    if model_dir is None:
        raise ConfigError(f"{model} has no config.json; {_way_out(str(model))}")
    if tp < 1:
        raise ConfigError(f"--tp {tp}: expected a number of workers, at least 1")
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM warns before it has set up its own logging, too
    try:
        from pydantic import ValidationError

        from weightsync.vllm.offline import plan_workers
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; a plan needs vLLM and transformers: pip install 'weightsync[vllm]'") from error
    architecture, offered = checkpoint_tensors(model_dir)
    try:
        workers = plan_workers(model_dir, offered, tp, dtype, expert_parallel=expert_parallel)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"vLLM refuses it: {shorten(reason, _LONGEST_REASON, placeholder=' ...')}") from error
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


def simulate(model: Path, topologies: Sequence[str], console: Console) -> bool:
    """Print what a push of `model`, a folder with a config.json, that file, or a size such as "70B", would take in
    bfloat16 on each of these topologies; gives whether all is well. Raises `ConfigError`."""
    parsed = [Topology.parse(text) for text in topologies]
    model_dir = _folder(model)
    if model_dir is not None:
        nbytes = 2 * sum(prod(tensor.shape) for tensor in checkpoint_tensors(model_dir)[1])
    elif _SIZE.fullmatch(str(model)):
        nbytes = bfloat16_bytes(str(model))
    else:
        raise ConfigError(f"{model} has no config.json, and is no size such as 70B or 1T; {_way_out(str(model))}")
    _line(console, f"{model}, {format_bytes(nbytes)} in bfloat16: predicted, not measured")
    _line(console, "")
    columns = ("GPUs", "hosts", "ranks", "engines", "bucket", "transport", "push", "longest part")
    for line in text_table(columns, simulation_table(nbytes, parsed), ">>>>><><"):
        _line(console, _safe(line))
    return True


def _folder(model: Path) -> Path | None:
    """The folder of the config.json of `model`, which is that folder or that file; None when there is none."""
    folder = model.parent if model.name == "config.json" else model
    return folder if (folder / "config.json").is_file() else None


def _way_out(model: str) -> str:
    """What to do about a `model` that is no folder with a config.json."""
    if _SIZE.fullmatch(model):
        return f"a size goes with --simulate: weightsync plan {model} --simulate hosts=1"
    if _HUB_NAME.fullmatch(model) and not Path(model).exists():
        folder = model.rpartition("/")[2]
        return f"if it is the hub's, download it first: hf download {model} config.json --local-dir {folder}"
    return "expected the folder of a Hugging Face model"


def checkpoint_tensors(model_dir: Path) -> tuple[str, Manifest]:
    """The class of the Hugging Face model of `model_dir`, and the tensors that a trainer of it sends, each tied one
    once. Nothing is allocated. Raises `ConfigError` when transformers makes no model of the config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_dir)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of many kinds, by what is wrong with it
        reason = shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON, placeholder=" ...")
        raise ConfigError(f"transformers makes no model of {model_dir / 'config.json'}: {reason}") from error
    tensors: dict[int, TensorMeta] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    saved = SavedForm(TensorPolicy()).of(model, list(tensors.values()))
    return type(model).__name__, Manifest(tuple(part.meta for parts in saved for part in parts.parts))


def _as_held(manifest: Manifest, workers: Sequence[WorkerPlan]) -> Manifest:
    """The manifest in the dtypes of the parameters that the tensors are copied into."""
    held = {copy.name: worker.params[copy.param].dtype for worker in workers for copy in worker.trace.copies}
    return Manifest(tuple(TensorMeta(t.name, t.shape, held.get(t.name, t.dtype)) for t in manifest))


@dataclass(frozen=True)
class _Row:
    """Part of a parameter (`target`), and what lands there: `region` of the tensor, or of each tensor, `source`. Both
    are as one would index them, and "" for the whole."""

    target: str
    source: str
    tensors: int
    region: str

    @property
    def text(self) -> str:
        return f"{self.source}{self.region}" + (f" of {self.tensors} tensors" if self.tensors > 1 else "")


@dataclass(frozen=True)
class _Entry:
    """One parameter of the engine, or several that are alike: then `name` has stars."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[_Row, ...]


def _show_worker(
    console: Console, worker: WorkerPlan, manifest: Manifest, rank: int, tp: int, everything: bool
) -> None:
    copies: dict[str, list[PlannedCopy]] = defaultdict(list)
    for copy in worker.trace.copies:
        copies[copy.param].append(copy)
    names = list(dict.fromkeys((*copies, *worker.trace.computed)))
    entries = Counter(_entry(name, copies[name], worker, manifest, fold=not everything) for name in names)
    nbytes = sum(prod(copy.box.size) * worker.params[copy.param].itemsize for copy in worker.trace.copies)
    _line(console, "")
    _line(
        console,
        f"[bold]load plan of worker tp={rank}[/bold]: {len(worker.trace.copies)} copies, {format_bytes(nbytes)}, into "
        f"{len(names)} parameters" + ("" if everything else "; those that are alike are shown once"),
    )
    for entry, times in entries.items():
        alike = f"  [cyan]x {times}[/cyan]" if times > 1 else ""
        head = f"  [bold]{entry.name}[/bold]  {_shape(entry.shape)} {entry.dtype}{alike}"
        if len(entry.rows) == 1 and not entry.rows[0].target:
            _line(console, f"{head}  <- {_safe(entry.rows[0].text)}")
            continue
        _line(console, head)
        width = max(len(row.target) for row in entry.rows)
        for row in entry.rows:
            _line(console, f"      {_safe(row.target.ljust(width))} <- {_safe(row.text)}")
    if tp > 1 and not everything:
        others = "worker tp=1 takes" if tp == 2 else f"workers tp=1 to tp={tp - 1} take"
        _line(console, f"  {others} other regions of the same tensors: --all shows them")


def _entry(name: str, copies: Sequence[PlannedCopy], worker: WorkerPlan, manifest: Manifest, fold: bool) -> _Entry:
    param = worker.params[name]
    by_source: dict[str, list[PlannedCopy]] = defaultdict(list)
    for copy in copies:
        by_source[_starred(copy.name) if fold else copy.name].append(copy)
    rows = []
    for source, parts in by_source.items():
        targets = [box for copy in parts for box in _landing(copy, param.shape, param.stride)]
        regions = {
            _boxes([copy.box for copy in parts if copy.name == tensor], manifest[tensor].shape)
            for tensor in dict.fromkeys(copy.name for copy in parts)
        }
        rows.append(
            _Row(
                _boxes(targets, param.shape),
                source,
                len({copy.name for copy in parts}),
                regions.pop() if len(regions) == 1 else "[...]",
            )
        )
    if name in worker.trace.computed:
        sources = worker.trace.computed[name]
        rows.append(_Row("", f"computed by the loader from {', '.join(sources)}", 1, ""))
    elif sum(copy.box.numel for copy in copies) < prod(param.shape):
        constants = sorted({fill.value for fill in worker.trace.fills if fill.param == name})
        rows.append(_Row("the rest", f"constant {constants[0]:g}" if constants else "nothing", 1, ""))
    return _Entry(_starred(name) if fold else name, param.shape, param.dtype, tuple(rows))


def _landing(copy: PlannedCopy, shape: tuple[int, ...], stride: tuple[int, ...]) -> list[Box]:
    """Which region of the parameter a copy fills."""
    boxes = strided_boxes(shape, copy.offset, copy.box.size, copy.stride) if stride == row_major(shape) else None
    return boxes if boxes is not None else [Box.full(shape)]


def _boxes(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Boxes of a tensor of `shape` as one would index them: the one around them all, if they fill it."""
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
    _line(console, "")
    _line(console, f"[bold]what fuses[/bold], and so is never torn apart: {len(fused)} groups; {alone} tensors alone")
    shown = Counter(
        (_braces(names if everything else list(dict.fromkeys(map(_starred, names)))), len(names)) for names in fused
    )
    for (text, size), times in shown.items():
        alike = f"  [cyan]x {times}[/cyan]" if times > 1 else ""
        _line(console, f"  {size} tensors  {text}{alike}")


def _show_buckets(console: Console, buckets: Sequence[Bucket], everything: bool) -> None:
    _line(console, "")
    total = sum(bucket.nbytes for bucket in buckets)
    _line(console, f"[bold]buckets[/bold]: {len(buckets)}, {format_bytes(total)}")
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
        _line(console, "")
        _line(console, f"[bold red]{len(problems)} problems[/bold red]: a push of these tensors would be refused")
    for problem in problems:
        _line(console, f"  {_safe(problem)}")
    return not problems


def _starred(name: str) -> str:
    return _NUMBER.sub("*", name)


def _braces(names: Sequence[str]) -> str:
    """Names that differ in one part as one: "layers.*.self_attn.{q_proj,k_proj,v_proj}.weight"."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    different = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len({name.count(".") for name in names}) > 1 or len(different) > 1:
        return ", ".join(names)
    return ".".join(
        f"{{{','.join(dict.fromkeys(column))}}}" if i in different else column[0] for i, column in enumerate(columns)
    )


def _shape(shape: Iterable[int]) -> str:
    return _safe(f"[{', '.join(map(str, shape))}]")


def _safe(text: str) -> str:
    """Square brackets as they stand, not as markup."""
    return text.replace("[", "\\[")


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)
