"""What each trainer rank has, which rank 0 is told before a push is planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from weightsync.net.ranks import uses_nccl
from weightsync.net.runtime import boot_id, describe_device
from weightsync.net.wire import MachineInfo
from weightsync.planning.layout import Manifest, ShardLocation
from weightsync.sources.base import TensorShard
from weightsync.strategies.base import Options
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
    options: Options,
) -> Inventory:
    """Return what this rank has, as rank 0 needs to know it."""
    kind, gpu_uuid = describe_device(_device(held, options.ranks))
    return Inventory(
        manifest=manifest,
        locations=list(held),
        unmapped=sorted({location.name for location, tensor in held.items() if not transport.can_map(tensor)}),
        frozen=sorted({s.meta.name for s in shards if options.selection.freezes(s.meta.name, s.trains)}),
        machine=MachineInfo(f"trainer rank {rank}", kind, gpu_uuid, boot_id()),
    )


def frozen_everywhere(everyone: Sequence[Inventory]) -> set[str]:
    """Return the tensors that are frozen on every rank that holds any of them."""
    changing = [{location.name for location in own.locations}.difference(own.frozen) for own in everyone]
    return set().union(*(own.frozen for own in everyone)).difference(*changing)


def machines(everyone: Sequence[Inventory]) -> list[MachineInfo]:
    """Return each rank's machine, in rank order. A rank that holds nothing has no GPU where no rank's tensors have."""
    kinds = {own.machine.device for own in everyone if own.locations}
    return [
        own.machine if own.machine.device in kinds else replace(own.machine, device="cpu", gpu_uuid="")
        for own in everyone
    ]


def _device(held: dict[ShardLocation, LocalTensor], members: Any) -> torch.device:
    """Return where this rank's tensors are; for one that holds none, where its process group works."""
    if held:
        return next((each.tensor.device for each in held.values() if each.tensor.is_cuda), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl(members) else torch.device("cpu")
