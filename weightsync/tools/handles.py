"""`weightsync handles`: print an engine's handle file, and check whether it is still valid."""

from __future__ import annotations

from argparse import Namespace
from math import prod

import torch
from rich.console import Console

from weightsync.errors import PlacementError
from weightsync.planning.layout import itemsize
from weightsync.report import format_bytes
from weightsync.tools.tables import print_line, print_table
from weightsync.transports import handle_file


def run(options: Namespace, console: Console) -> bool:
    """Print the file, and return whether its engine lives and its parameters can be mapped.

    GPU memory is not mapped here, because torch counts its mappings. Raise as `handle_file.find` and `read` do.
    """
    found = handle_file.read(handle_file.find(options.file))
    print_line(console, f"{found.path}: {found.model}, tensor parallel {found.tp_degree}, {found.url or 'no server'}")
    table = []
    for worker in found.workers:
        rows = worker.ipc_handles.values()
        nbytes = sum(prod(row["shape"]) * itemsize(row["dtype"].removeprefix("torch.")) for row in rows)
        facts = [
            worker.rank,
            worker.pid,
            worker.device,
            worker.gpu_uuid,
            len(rows),
            format_bytes(nbytes),
            worker.engine_instance,
        ]
        table.append([*map(str, facts)])
    columns = ("worker", "process", "device", "GPU", "parameters", "bytes", "instance")
    print_table(console, columns, table, ">><<>><")
    try:
        handle_file.check(found)
        on_cpu = [worker.rank for worker in found.workers if worker.device == "cpu"]
        mapped = sum(len(handle_file.open_parameters(found, rank, torch.device("cpu"))) for rank in on_cpu)
    except PlacementError as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
        return False
    print_line(console, "its engine is alive" + (f", {mapped} parameters can be mapped" if on_cpu else ""))
    return True
