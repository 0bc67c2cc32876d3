"""What each trainer rank has, which rank 0 is told before a push is planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import distributed

from weightsync.control.runtime import boot_id, describe_device
from weightsync.control.wire import MachineInfo
from weightsync.planning.layout import Manifest, ShardLocation
from weightsync.selection import TensorSelection
from weightsync.sources.base import TensorShard
from weightsync.transports.base import LocalTensor, Transport


class Inventory(Struct):
    """What one rank has. `unmapped` are the tensors that workers cannot read where they lie."""

    manifest: Manifest
    locations: list[ShardLocation]
    unmapped: list[str]
    frozen: list[str]
    machine: MachineInfo


def take_inventory(
    manifest: Manifest,
    shards: Sequence[TensorShard],
    held: dict[ShardLocation, LocalTensor],
    rank: int,
    transport: Transport,
    selection: TensorSelection,
) -> Inventory:
    """Return what this rank has, as rank 0 needs to know it."""
    kind, gpu_uuid = describe_device(_device(held))
    return Inventory(
        manifest=manifest,
        locations=list(held),
        unmapped=sorted({location.name for location, tensor in held.items() if not transport.can_map(tensor)}),
        frozen=sorted({s.meta.name for s in shards if selection.freezes(s.meta.name, s.trains)}),
        machine=MachineInfo(f"trainer rank {rank}", kind, gpu_uuid, boot_id()),
    )


def frozen_everywhere(everyone: Sequence[Inventory]) -> set[str]:
    """Return the tensors that are frozen on every rank that holds any of them."""
    changing = [{location.name for location in own.locations}.difference(own.frozen) for own in everyone]
    return set().union(*(own.frozen for own in everyone)).difference(*changing)


def _device(held: dict[ShardLocation, LocalTensor]) -> torch.device:
    """Return where this rank's tensors are; for one that holds none, where its process group works."""
    if held:
        return next((each.tensor.device for each in held.values() if each.tensor.is_cuda), torch.device("cpu"))
    on_gpu = distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
