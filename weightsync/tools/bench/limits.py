"""The measured best speeds of this machine's memory and links, for the lower bounds of a benchmark."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from weightsync.net.child import free_port
from weightsync.tools.bench.cases import BROADCAST, DEVICE_COPY, FILE_WRITE, MEMCPY, NIXL_READ, PEER_COPY
from weightsync.tools.nixl_reads import read_speed

_BYTES = {"cpu": 128 << 20, "cuda": 4 << 30}
_REPEATS = 5


def measure(folder: Path, gpus: int) -> dict[str, float]:
    """Return GB/s by the names of `cases`. A raw broadcast has one sender, and one receiver in another process."""
    data = torch.ones(_BYTES["cpu"], dtype=torch.uint8)
    path = folder / "limit"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(data.numpy().data)
            os.fsync(file.fileno())

    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    found = {MEMCPY: _copy("cpu", "cpu"), FILE_WRITE: _speed(_BYTES["cpu"], write)}
    torch.set_num_threads(threads)
    path.unlink()
    if gpus:
        found[DEVICE_COPY] = _copy("cuda:0", "cuda:0")
    if gpus > 1:
        found[PEER_COPY] = _copy("cuda:0", "cuda:1")
    if find_spec("nixl"):
        ends = ("cuda:0", "cuda:1") if gpus > 1 else ("cpu", "cpu")
        found[NIXL_READ], _ = read_speed(*map(torch.device, ends))
    if gpus:
        torch.cuda.empty_cache()  # the engines need it
    result = folder / "broadcast"
    torch.multiprocessing.spawn(_broadcast, ("cuda" if gpus > 1 else "cpu", free_port(), str(result)), nprocs=2)
    return {**found, BROADCAST: float(result.read_text())}


def _copy(source: str, target: str) -> float:
    nbytes = _BYTES[torch.device(source).type]
    # torch copies more bytes a second as bfloat16 than as uint8.
    a = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=source)
    b = torch.empty_like(a, device=target)

    def copy() -> None:
        b.copy_(a)
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
            torch.cuda.synchronize(b.device)

    return _speed(nbytes, copy)


def _broadcast(rank: int, kind: str, port: int, result: str) -> None:
    """Run one of two members of a raw broadcast. The sender writes the GB/s to the file `result`."""
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=place, rank=rank, world_size=2)
    data = torch.ones(_BYTES[kind], dtype=torch.uint8, device=device)

    def once() -> None:
        dist.broadcast(data, 0)
        dist.barrier()  # the sender is done when all have it
        if kind == "cuda":
            torch.cuda.synchronize()

    speed = _speed(data.numel(), once)
    if rank == 0:
        Path(result).write_text(str(speed))
    dist.destroy_process_group()


def _speed(nbytes: int, once: Callable[[], object]) -> float:
    """Return the GB/s of the best of several calls, after a first one for warm-up."""
    once()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - started)
    return nbytes / min(seconds) / 1e9
