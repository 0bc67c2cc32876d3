"""`weightsync bridge`: what an engine's `vllm_bridge_config.json` says, and whether it still holds."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from weightsync import bridge
from weightsync.errors import PlacementError
from weightsync.layout import itemsize
from weightsync.report import format_bytes


def run(path: Path | None, console: Console) -> bool:
    """Print the file, then check it; gives whether its engine lives and its parameters can be mapped. GPU memory is not
    mapped here, since torch counts how often it is. Raises as `bridge.find` and `bridge.read` do."""
    found = bridge.read(bridge.find(path))
    console.print(f"{found.path}: {found.model}, tensor parallel {found.tp_degree}, {found.url or 'no server'}")
    table = Table("worker", "process", "device", "GPU", "parameters", "bytes", "epoch")
    for worker in found.workers:
        rows = worker.ipc_handles.values()
        nbytes = sum(prod(row["shape"]) * itemsize(row["dtype"].removeprefix("torch.")) for row in rows)
        facts = [worker.rank, worker.pid, worker.device, worker.gpu_uuid, len(rows), format_bytes(nbytes), worker.epoch]
        table.add_row(*map(str, facts))
    console.print(table)
    try:
        bridge.check(found)
        on_cpu = [worker.rank for worker in found.workers if worker.device == "cpu"]
        mapped = sum(len(bridge.open_parameters(found, rank, torch.device("cpu"))) for rank in on_cpu)
    except PlacementError as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        return False
    console.print("its engine is alive" + (f", {mapped} parameters can be mapped" if on_cpu else ""))
    return True
