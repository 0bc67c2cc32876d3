"""How bytes reach an engine: shared memory of one host (`ipc`), a collective (`broadcast`), or files (`checkpoint`)."""

from __future__ import annotations

import torch

from weightsync.errors import ConfigError, ProtocolError
from weightsync.transports.base import Source, Transport
from weightsync.transports.broadcast import BroadcastSource, BroadcastTransport
from weightsync.transports.checkpoint import CheckpointSource
from weightsync.transports.ipc import IpcSource, IpcTransport


def make_transport(name: str, *, timeout_s: float) -> Transport:
    """The trainer's end of a transport, by name."""
    match name:
        case "ipc" | "cuda_ipc":
            return IpcTransport(name)
        case "broadcast" | "nccl":
            return BroadcastTransport(name, timeout_s)
        case "checkpoint":
            raise ConfigError(
                'transport="checkpoint" needs a folder: pass transport=CheckpointTransport(folder), from weightsync'
            )
    raise ConfigError(
        f'unknown transport {name!r}; choose "ipc", "broadcast", "single_copy", "lora" or CheckpointTransport(folder)'
    )


def make_source(name: str, device: torch.device) -> Source:
    """The worker's end of a transport, by the name in a `Connect` message."""
    match name:
        case "ipc" | "cuda_ipc":
            return IpcSource(device)
        case "broadcast" | "nccl":
            return BroadcastSource(device)
        case "checkpoint":
            return CheckpointSource(device)
    raise ProtocolError(f"the trainer asks for transport {name!r}, which this side does not know")
