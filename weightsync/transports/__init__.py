"""The built-in transports: `ipc` (shared memory of one host), `nccl` and `nixl` (any hosts), `files` (a shared folder).

A transport of another package has an entry point in the group "weightsync.transports". Users give its name to
`WeightSync(transport=...)`. The entry point refers to a pair of functions, such as `ENDS` in the modules here. The
first makes the trainer's end from the name. The second makes a worker's end from its device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeAlias

import torch

from weightsync.errors import ConfigError, ProtocolError
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo, typed
from weightsync.planning.layout import ShardLocation
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.planning.wire_types import ByteRange, ChunkLayout, ReadRegions, Storage
from weightsync.transports.base import (
    Endpoint,
    LocalTensor,
    LocalTensors,
    RouteRequest,
    Seal,
    Transport,
    TransportReceiver,
    Wait,
)

__all__ = [
    "ByteRange",
    "Chain",
    "ChunkLayout",
    "Deadline",
    "Endpoint",
    "LocalTensor",
    "LocalTensors",
    "MachineInfo",
    "ReadRegions",
    "RouteRequest",
    "Seal",
    "ShardLocation",
    "Storage",
    "TransferPlan",
    "Transport",
    "TransportReceiver",
    "Update",
    "Wait",
    "typed",
]

Ends: TypeAlias = tuple[Callable[[str], Transport], Callable[[torch.device], TransportReceiver]]

GROUP = "weightsync.transports"
_BUILT_IN = {
    "ipc": "weightsync.transports.ipc",
    "cuda_ipc": "weightsync.transports.ipc",
    "broadcast": "weightsync.transports.nccl",
    "nccl": "weightsync.transports.nccl",
    "nixl": "weightsync.transports.nixl",
    "checkpoint": "weightsync.transports.files",
}


def open_transport(transport: object) -> Transport:
    """Return the trainer's end of a transport. An instance is returned as it is.

    Raises `ConfigError` for an unknown name, and for an object that is no `Transport`.
    """
    if isinstance(transport, Transport):
        return transport
    if not isinstance(transport, str) or (found := _find(transport)) is None:
        raise ConfigError(
            f'transport={transport!r}; choose "ipc", "broadcast", "nixl", "single_copy", "lora", '
            f"CheckpointTransport(folder), an entry point in the group {GROUP!r}, or an instance of "
            "weightsync.transports.base.Transport"
        )
    return found[0](transport)


def open_receiver(name: str, device: torch.device) -> TransportReceiver:
    """Return the worker's end of a transport that a message names. Raises `ProtocolError` for an unknown name."""
    if (found := _find(name)) is None:
        raise ProtocolError(
            f"the trainer asks for transport {name!r}, and this engine has none of that name; install its package "
            "beside the engine too"
        )
    return found[1](device)


def _find(name: str) -> Ends | None:
    if name in _BUILT_IN:
        ends: Ends = import_module(_BUILT_IN[name]).ENDS
        return ends
    return next((point.load() for point in entry_points(group=GROUP, name=name)), None)
