"""What this machine's memory and links carry at best, measured: what the floors of a benchmark rest on.

The raw broadcast is one sender and its receivers, each a process that runs this file, which do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from weightsync.bench.floors import DEVICE_COPY, FILE_WRITE, HOST_COPY, MEMCPY, PEER_COPY, broadcast_to
from weightsync.checkpoint.files import memory_of
from weightsync.trial import Responder, free_port, listen_for_orders, receive

_HOST_BYTES = 128 * 2**20
_GPU_BYTES = 4 * 2**30
_PINNED_BYTES = 2**30
_BROADCAST_BYTES = {"cpu": 64 * 2**20, "cuda": _GPU_BYTES}
_REPEATS = 5
_TIMEOUT_S = 120.0


def measure(folder: Path, receivers: Iterable[int], gpus: int) -> dict[str, float]:
    """GB/s by the names of `floors`: memory and files of `folder` always; the raw broadcast to each of these numbers
    of receivers, over NCCL where there are GPUs for it, else over gloo; copies of GPU memory and to it where there
    are GPUs. Raises `ChildError` when a process fails."""
    found = _of_memory() | {FILE_WRITE: _of_files(folder)}
    if gpus:
        found[DEVICE_COPY] = _of_gpus(0, 0)
        found[HOST_COPY] = _of_host_and_gpu()
    if gpus > 1:
        found[PEER_COPY] = _of_gpus(0, 1)
    if gpus:
        torch.cuda.empty_cache()  # the engines want it
    for number in sorted(set(receivers)):
        found[broadcast_to(number)] = _of_broadcast(number, gpus > 0, folder)
    return found


def _of_memory() -> dict[str, float]:
    source = torch.ones(_HOST_BYTES // 2, dtype=torch.bfloat16)  # of which torch copies more a second than of bytes
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(os.cpu_count() or 1)
        return {MEMCPY: _speed(_HOST_BYTES, lambda: target.copy_(source))}
    finally:
        torch.set_num_threads(threads)


def _of_files(folder: Path) -> float:
    data = torch.ones(_HOST_BYTES, dtype=torch.uint8)
    path = folder / "limit"

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(memory_of(data))
            os.fsync(file.fileno())

    try:
        return _speed(_HOST_BYTES, write)
    finally:
        path.unlink(missing_ok=True)


def _of_gpus(source: int, target: int) -> float:
    a = torch.ones(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    b = torch.empty(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{target}")

    def copy() -> None:
        b.copy_(a)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    return _speed(_GPU_BYTES, copy)


def _of_host_and_gpu() -> float:
    source = torch.ones(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device="cuda:0")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(0)

    return _speed(_PINNED_BYTES, copy)


def _of_broadcast(receivers: int, on_gpus: bool, folder: Path) -> float:
    environment = {"WORLD_SIZE": str(receivers + 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as cleanup:
        members = []
        for rank in range(receivers + 1):
            command = [sys.executable, "-m", __name__, f"--device={f'cuda:{rank}' if on_gpus else 'cpu'}"]
            log = folder / f"broadcast{rank}.log"
            members.append(Responder(f"broadcast rank {rank}", command, {**environment, "RANK": str(rank)}, log))
            cleanup.callback(members[-1].stop)
        speed: float = receive(members, _TIMEOUT_S)[0]["gb_per_s"]
        return speed


def _speed(nbytes: int, once: Callable[[], object]) -> float:
    """GB/s at the best of several, after one that does not count: a limit is what nothing disturbs."""
    once()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - started)
    return nbytes / min(seconds) / 1e9


def main() -> None:
    """One member of a raw broadcast."""
    parser = argparse.ArgumentParser(description="a member of the raw broadcast that `weightsync bench` measures")
    parser.add_argument("--device", required=True)
    device = torch.device(parser.parse_args().device)
    _, answers = listen_for_orders()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    data = torch.ones(_BROADCAST_BYTES[device.type], dtype=torch.uint8, device=device)

    def once() -> None:
        dist.broadcast(data, 0)
        dist.barrier()  # the sender is done when all have it
        if device.type == "cuda":
            torch.cuda.synchronize()

    answers.write(json.dumps({"gb_per_s": _speed(data.numel(), once)}) + "\n")
    answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
