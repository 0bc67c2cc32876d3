"""The measured speed of raw reads by NIXL between two processes of this machine, and the way that UCX takes for them.

This process holds the memory, and a child reads it. UCX prints its choices on the child's standard output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch

from weightsync.errors import WeightSyncError
from weightsync.tools.findings import Finding, Findings
from weightsync.transports.nixl_agent import BACKEND, Agent, AgentAddress, nixl_version

_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_REPEATS = 5
_TIMEOUT_S = 120.0
_ROW = re.compile(r"\|\s*\d+\.\.inf\s*\|\s*(.+?)\s*\|\s*(.+?)\s*\|")


def check_nixl() -> Findings:
    """Check that another process reads memory of this one by NIXL, and say how and how fast."""
    if find_spec("nixl") is None:
        yield Finding("skip", "NIXL", 'not installed; transport="nixl" needs it: pip install "weightsync[nixl]"')
        return
    try:
        cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        yield Finding("pass", "NIXL", f"{nixl_version()}; RDMA cards: {', '.join(cards) or 'none'}")
        ucx = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_")]
        yield Finding("pass", "UCX variables", ", ".join(ucx) or "none set")
        gpus = torch.cuda.device_count()
        for ends in [("cpu", "cpu"), *([("cuda:0", f"cuda:{min(1, gpus - 1)}")] if gpus else [])]:
            speed, way = read_speed(*map(torch.device, ends))
            yield Finding("pass", "NIXL reads", f"{speed:.1f} GB/s from {ends[0]} to {ends[1]}, {way}")
    except WeightSyncError as error:
        yield Finding("FAIL", "NIXL", str(error))


def read_speed(source: torch.device, target: torch.device) -> tuple[float, str]:
    """Return the GB/s of the best of several reads between processes with these devices, and UCX's way.

    Raises:
        WeightSyncError: NIXL is missing, the memory cannot be registered, or the reader has failed.
    """
    agent = Agent(os.environ.get(BACKEND, "UCX"))
    try:
        agent.register([torch.ones(_BYTES[source.type], dtype=torch.uint8, device=source)])
        address = msgspec.msgpack.encode(agent.address()).hex()
        command = [sys.executable, "-m", __name__, str(target)]
        loud = {**os.environ, "UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
        try:
            child = subprocess.run(
                command, input=address, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=loud
            )
        except subprocess.TimeoutExpired:
            raise WeightSyncError(f"the reading process has not ended within {_TIMEOUT_S:g} s") from None
    finally:
        agent.close()
    told = re.search(r"^GB/s ([\d.]+)$", child.stdout, re.MULTILINE)
    if told is None or child.returncode:
        why = (child.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise WeightSyncError(f"the reading process ended with exit code {child.returncode}: {why}")
    return float(told[1]), way_of_reads(child.stdout)


def way_of_reads(log: str) -> str:
    """Return UCX's way for large reads from its log of protocols, such as "zero-copy by cma/memory"."""
    way, is_read = "an unknown way", False
    for line in log.splitlines():
        if "by ucp_" in line:  # the title of an operation's table
            is_read = "by ucp_get" in line
        elif is_read and (row := _ROW.search(line)):
            way = " by ".join(row.groups())
    return way


def _read_for_parent(device: torch.device) -> None:
    address = msgspec.msgpack.decode(bytes.fromhex(sys.stdin.read()), type=AgentAddress)
    agent = Agent(os.environ.get(BACKEND, "UCX"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    room = torch.zeros(_BYTES[device.type], dtype=torch.uint8, device=device)
    agent.register([room])
    agent.add(address)
    seconds = []
    for count in range(1 + _REPEATS):
        room.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        read = agent.read(address, 0, 0, room, count)
        while not agent.is_read(read, address):
            continue
        seconds.append(time.perf_counter() - started)
        if not bool((room == 1).all()):
            raise WeightSyncError("a read ended, and another process's memory has other bytes here")
    sys.stdout.write(f"\nGB/s {room.nbytes / min(seconds[1:]) / 1e9}\n")
    sys.stdout.flush()
    agent.close()


if __name__ == "__main__":
    _read_for_parent(torch.device(sys.argv[1]))
