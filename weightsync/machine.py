"""Which machine this process runs on, and on which of its devices."""

from __future__ import annotations

import socket
from pathlib import Path

import torch


def boot_id() -> str:
    """Identifies this boot of this host: equal for two processes exactly when they can share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def address_facing(host: str) -> str:
    """This host's address on the interface from which `host` is reached. Raises `OSError` when there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])


def describe_device(device: torch.device) -> tuple[str, str]:
    """("cuda", the GPU's UUID), which does not depend on CUDA_VISIBLE_DEVICES, or ("cpu", "")."""
    if device.type == "cuda":
        return "cuda", str(torch.cuda.get_device_properties(device).uuid)
    return "cpu", ""


def started_ticks(pid: int) -> int | None:
    """When a process of this host was started, in clock ticks since boot; None when there is none of this number, or it
    has ended. Two processes that have the same number after each other differ in it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
