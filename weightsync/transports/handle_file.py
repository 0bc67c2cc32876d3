"""`vllm_bridge_config.json`: where a running engine's parameters lie, for programs on the same host.

The engine writes it once it has loaded its weights, one file for all of its workers. A trainer with single_copy finds
its engine by it; any other program may map the parameters with `open_parameters`. What it says is worth nothing once a
process that it names has ended, so `check` comes before everything else.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightsync.checkpoint.own_files import is_own_folder, open_plain
from weightsync.errors import ConfigError, PlacementError, ProtocolError, WeightSyncError
from weightsync.net.runtime import boot_id, started_ticks
from weightsync.transports.base import strided
from weightsync.transports.shared_handles import export, open_exported

FILE = "vllm_bridge_config.json"
FORMAT = 1
VARIABLE = "WEIGHTSYNC_BRIDGE"
"""Set in an engine's environment, it names the file that the engine writes."""
URL_VARIABLE = "WEIGHTSYNC_BRIDGE_URL"
"""Beside it: the address at which the engine serves."""

# What each is called in the file, and in `weightsync.transports.shared_handles`. Bytes are base64, under a name that
# says so.
_NAMES = {
    "device_index": "device",
    "ipc_handle_b64": "handle",
    "storage_size": "nbytes",
    "storage_offset": "offset_bytes",
    "ref_counter_handle_b64": "counter_handle",
    "ref_counter_offset": "counter_offset",
    "event_handle_b64": "event_handle",
    "event_sync_required": "event_sync",
    "gpu_uuid": "gpu_uuid",
    "pid": "pid",
    "fd": "fd",
    "inode": "inode",
}


@dataclass(frozen=True)
class Worker:
    """One worker of the engine.

    engine_instance: another one for each start of the engine.
    ipc_handles: where each of its parameters lies, as `handle_rows` has it.
    """

    rank: int
    pid: int
    started_ticks: int
    engine_instance: str
    device: str
    gpu_uuid: str
    ipc_handles: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Bridge:
    """What the file says. `url` is None for an engine that is no server."""

    path: Path
    boot_id: str
    model: str
    url: str | None
    tp_degree: int
    workers: tuple[Worker, ...]


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the engine's file: `path` if given, else the first that exists.

    It looks for $LOGDIR/vllm_bridge_config.json, the file in the working directory, and the file in this user's runtime
    directory. Raises `ConfigError` when there is none.
    """
    candidates = [Path(path)] if path is not None else [*_in_logdir(), Path(FILE), _runtime_folder() / FILE]
    for candidate in candidates:
        if os.path.exists(candidate):  # `Path.exists` raises where a folder may not be read
            return candidate
    raise ConfigError(
        f"no {FILE}; looked for {', '.join(map(str, candidates))}. Start the engine with `python -m "
        f"weightsync.vllm.serve MODEL`, or with {VARIABLE}=PATH in its environment; name the file if it is elsewhere"
    )


def place_to_write() -> Path:
    """Return where an engine writes that was told no path: $LOGDIR, or else this user's runtime directory.

    Makes the runtime directory.
    """
    if in_logdir := _in_logdir():
        return in_logdir[0]
    folder = _runtime_folder()
    with suppress(OSError):  # such as a link that leads nowhere
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own_folder(folder):
        raise ConfigError(
            f"{folder} is not this user's alone: it is a link, cannot be made, or another user has it or may write to "
            f"it. Remove it, or set LOGDIR, or {VARIABLE} to a path"
        )
    return folder / FILE


def write(path: Path, model: str, url: str | None, tp_degree: int, workers: list[Worker]) -> None:
    """Write the file whole, readable by this user alone. A program that reads meanwhile sees the old one."""
    first = workers[0]
    mappings = {
        name: {"vllm_name": name, "shape": row["shape"], "dtype": row["dtype"], "device": first.device}
        for name, row in first.ipc_handles.items()
    }
    content = {
        "format": FORMAT,
        "boot_id": boot_id(),
        "model": model,
        "url": url,
        "tp_degree": tp_degree,
        "dp_shard_degree": 1,
        "num_params": len(mappings),
        "param_names": list(mappings),
        "param_mappings": mappings,
        "shared_weights_enabled": True,
        "single_copy_enabled": True,
        "workers": [vars(worker) for worker in workers],
    }
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE}-")  # mode 0600
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path) -> Bridge:
    """Read a file of an engine's parameters.

    Raises `PlacementError` for a file that cannot be read, is a link or no plain file, or is another user's or may be
    written by one. Raises `ProtocolError` for one of another format.
    """
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PlacementError(
                    f"{path} belongs to another user, or may be written by one, so what it says is not trusted"
                )
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot read {path}: {error}") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{path} is not JSON: {error}") from error
    try:
        if content["format"] != FORMAT:
            raise ProtocolError(f"{path} has format {content['format']!r}, this weightsync reads {FORMAT}")
        return msgspec.convert({**content, "path": path}, Bridge)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{path} is no {FILE} of format {FORMAT}: {type(error).__name__}: {error}") from error


def remove(path: Path) -> None:
    """Remove the file of the engine of this process. What another engine has written there since stays."""
    with suppress(WeightSyncError):  # it is gone, or is none of this engine's
        if any(worker.pid == os.getpid() for worker in read(path).workers):
            path.unlink(missing_ok=True)


def check(bridge: Bridge) -> None:
    """Raise `PlacementError` where the file is stale: written before this host was booted, or by an engine of which a
    process has ended."""
    if bridge.boot_id != boot_id():
        raise PlacementError(
            f"{bridge.path} is stale: it was written on another host, or before this one was booted; start the engine"
        )
    for worker in bridge.workers:
        if started_ticks(worker.pid) != worker.started_ticks:
            raise PlacementError(
                f"{bridge.path} is stale: worker {worker.rank} of the engine that wrote it, process {worker.pid}, has "
                "ended; start the engine, which writes a new one"
            )


def open_parameters(bridge: Bridge, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the live parameters of worker `rank`, under the engine's own names, as views of its memory.

    A process calls this once, because torch counts how often GPU memory is opened and released. Raises as `check` does,
    and `PlacementError` for memory that cannot be mapped.
    """
    check(bridge)
    worker = next((worker for worker in bridge.workers if worker.rank == rank), None)
    if worker is None:
        raise PlacementError(f"the engine has workers {[w.rank for w in bridge.workers]}, and no {rank}")
    opened: dict[str, torch.Tensor] = {}
    found = {}
    for name, row in worker.ipc_handles.items():
        kind = "cuda" if "ipc_handle_b64" in row else "fd"
        key = json.dumps([row.get("ipc_handle_b64"), row.get("storage_offset"), row.get("pid"), row.get("fd")])
        if key not in opened:
            opened[key] = open_exported(kind, _fields(row), device, f"engine worker {rank}")
        dtype = row["dtype"].removeprefix("torch.")
        found[name] = strided(opened[key], dtype, row["offset"], row["shape"], row["stride"])
    return found


def handle_rows(parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return where parameters lie, as the file has it. Those on a CPU move to shared memory.

    Parameters without bytes are left out: vLLM's CPU kernels leave such behind when they have packed what was there.
    """
    exported: dict[int, dict[str, Any]] = {}
    rows = {}
    for name, tensor in parameters.items():
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        if storage._cdata not in exported:
            exported[storage._cdata] = export(storage)[1]
        rows[name] = handle_row(tensor, exported[storage._cdata])
    return rows


def handle_row(tensor: torch.Tensor, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the file's entry of a parameter. `fields` are those of its exported storage."""
    row: dict[str, Any] = {}
    for name, ours in _NAMES.items():
        if ours in fields:
            value = fields[ours]
            row[name] = base64.b64encode(bytes.fromhex(value)).decode() if name.endswith("_b64") else value
    layout = {"shape": list(tensor.shape), "stride": list(tensor.stride()), "offset": int(tensor.storage_offset())}
    return {**row, **layout, "dtype": str(tensor.dtype)}


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    return {
        ours: base64.b64decode(row[name]).hex() if name.endswith("_b64") else row[name]
        for name, ours in _NAMES.items()
        if name in row
    }


def _in_logdir() -> list[Path]:
    folder = os.environ.get("LOGDIR")
    return [Path(folder) / FILE] if folder else []


def _runtime_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "weightsync" if runtime else Path(tempfile.gettempdir()) / f"weightsync-{os.getuid()}"
