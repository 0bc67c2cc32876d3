"""Which machine this process runs on, and on which of its devices."""

from __future__ import annotations

from pathlib import Path

import torch


def boot_id() -> str:
    """Identifies this boot of this host: equal for two processes exactly when they can share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def describe_device(device: torch.device) -> tuple[str, str]:
    """("cuda", the GPU's UUID), which does not depend on CUDA_VISIBLE_DEVICES, or ("cpu", "")."""
    if device.type == "cuda":
        return "cuda", str(torch.cuda.get_device_properties(device).uuid)
    return "cpu", ""
