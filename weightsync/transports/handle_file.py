"""`vllm_bridge_config.json`: the locations of a running engine's parameters, for programs on the same host.

The engine writes one file for all of its workers, after it has loaded its weights. A trainer with single_copy finds its
engine by this file. Any other program may map the parameters with `open_parameters`. The file is invalid once a named
process has ended, so call `check` first.
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
from glob import escape, glob
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
"""Environment variable of an engine: the path of the file to write."""
URL_VARIABLE = "WEIGHTSYNC_BRIDGE_URL"
"""Environment variable of an engine: the address of its server."""

# The names in the file, and in `weightsync.transports.shared_handles`. Names with `_b64` have bytes in base64.
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
class WorkerHandles:
    """One worker of the engine.

    Attributes:
        engine_instance: A new value for each start of the engine.
        ipc_handles: The location of each of its parameters, in the form of `handle_rows`.
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
    """The content of the file. `url` is None for an engine without a server."""

    path: Path
    boot_id: str
    model: str
    url: str | None
    tp_degree: int
    workers: tuple[WorkerHandles, ...]


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of the engine's file.

    Args:
        path: The file. None: the first that exists of $LOGDIR/vllm_bridge_config.json, the file in the working
            directory, and the file in this user's runtime directory.

    Raises:
        ConfigError: The file does not exist, or several engines have written theirs to this place.
    """
    candidates = [Path(path)] if path is not None else [*_in_logdir(), Path(FILE), _runtime_folder() / FILE]
    for candidate in candidates:
        living = [] if path is not None else _living(candidate)
        if len(living) > 1:
            engines = ", ".join(f"{one.path} ({one.url or one.model})" for one in living)
            raise ConfigError(f"{len(living)} engines run on this host: {engines}. Name the file of one, or the engine")
        if living:
            return living[0].path
        if os.path.exists(candidate):  # `Path.exists` raises for a file in an unreadable folder
            return candidate
    raise ConfigError(
        f"no {FILE} at {', '.join(map(str, candidates))}. Start the engine with `weightsync serve "
        f"MODEL`, or with {VARIABLE}=PATH in its environment, or name the file"
    )


def place_to_write() -> Path:
    """Return the default path for an engine's file: in $LOGDIR, or else in this user's runtime directory.

    Makes the runtime directory.
    """
    if in_logdir := _in_logdir():
        return in_logdir[0]
    folder = _runtime_folder()
    with suppress(OSError):  # such as a dangling link
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own_folder(folder):
        raise ConfigError(
            f"{folder} is not this user's alone: it is a link, cannot be made, or another user owns it or may write "
            f"to it. Remove it, or set LOGDIR, or {VARIABLE} to a path"
        )
    return folder / FILE


def _living(path: Path) -> list[Bridge]:
    """Return the files of running engines at `path`, and at the names beside it that `write` chooses."""
    found = []
    # `Path.glob` raises for an unreadable folder.
    for candidate in [str(path), *sorted(glob(f"{escape(str(path.with_suffix('')))}-*{path.suffix}"))]:
        with suppress(WeightSyncError):
            check(bridge := read(Path(candidate)))
            found.append(bridge)
    return found


def write(path: Path, model: str, url: str | None, tp_degree: int, workers: list[WorkerHandles]) -> Path:
    """Write the file, readable by this user alone, and return its path.

    Where another running engine has written `path`, the name ends in this process's id. A concurrent reader sees the
    old file or the complete new one.
    """
    with suppress(WeightSyncError):
        check(other := read(path))
        if other.workers[0].pid != os.getpid():
            path = path.with_stem(f"{path.stem}-{os.getpid()}")
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
    return path


def read(path: Path) -> Bridge:
    """Read a file of an engine's parameters.

    Raises:
        PlacementError: The file cannot be read, is a link, or is no plain file. Or another user owns it or may write
            it.
        ProtocolError: The file has another format.
    """
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PlacementError(
                    f"{path} is not trusted, because another user owns it or may write to it: remove it"
                )
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot read {path}: {error}") from error
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ProtocolError(f"{path} has format {content['format']!r}, this weightsync reads {FORMAT}")
        return msgspec.convert({**content, "path": path}, Bridge)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{path} is no {FILE} of format {FORMAT}: {type(error).__name__}: {error}") from error


def remove(path: Path) -> None:
    """Remove the file of this process's engine. Keep a file that another engine has written in its place."""
    with suppress(WeightSyncError):  # the file is gone, or another engine's
        if any(worker.pid == os.getpid() for worker in read(path).workers):
            path.unlink(missing_ok=True)


def check(bridge: Bridge) -> None:
    """Raise `PlacementError` if the file is stale: from before this host's boot, or with a process that has ended."""
    if bridge.boot_id != boot_id():
        raise PlacementError(
            f"{bridge.path} is stale: it was written on another host, or before this host was booted; start the engine"
        )
    for worker in bridge.workers:
        if started_ticks(worker.pid) != worker.started_ticks:
            raise PlacementError(
                f"{bridge.path} is stale: its engine's worker {worker.rank}, process {worker.pid}, has ended; start "
                "the engine, to write a new file"
            )


def open_parameters(bridge: Bridge, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the live parameters of one worker by the engine's names, as views of the engine's memory.

    Call it once in a process: torch counts opens and releases of GPU memory.

    Args:
        bridge: The content of the file.
        rank: The number of the worker.
        device: The device that maps GPU memory.

    Raises:
        PlacementError: The file is stale, or the memory cannot be mapped.
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
    """Return the file's entries of parameters, by name. CPU parameters move to shared memory.

    Parameters without bytes are left out. vLLM's CPU kernels leave such parameters after packing weights.
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
    """Return the file's entry of a parameter. `fields` describe its exported storage."""
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
