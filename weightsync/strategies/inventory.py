"""The inventory of a trainer rank. Rank 0 gathers the inventories before it plans a push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Raw, Struct
from msgspec.structs import replace

from weightsync.errors import ConfigError, first_few
from weightsync.net.ranks import uses_nccl
from weightsync.net.runtime import boot_id, describe_device
from weightsync.net.wire import MachineInfo, Value
from weightsync.planning.layout import Manifest, ShardLocation
from weightsync.sources.base import Reading
from weightsync.strategies.base import Options
from weightsync.transports.base import LocalTensor, Transport


class Inventory(Struct):
    """One rank's tensors. Workers cannot read the `unmapped` tensors at their own addresses.

    manifest: an encoded `Manifest`, for `manifests`.
    unmatched: the selection's patterns without a match on this rank.
    """

    manifest: Raw
    locations: list[ShardLocation]
    unmapped: list[str]
    frozen: list[str]
    machine: MachineInfo
    unmatched: list[str] = []


def take_inventory(
    reading: Reading, held: dict[ShardLocation, LocalTensor], rank: int, transport: Transport, options: Options
) -> Inventory:
    """Return this rank's inventory for rank 0."""
    kind, gpu_uuid = describe_device(device_of(held, options.ranks))
    return Inventory(
        manifest=Value.of(reading.manifest).value,
        locations=list(held),
        unmapped=sorted({location.name for location, tensor in held.items() if not transport.can_map(tensor)}),
        frozen=sorted({s.meta.name for s in reading.shards if options.selection.freezes(s.meta.name, s.trains)}),
        machine=MachineInfo(f"trainer rank {rank}", kind, gpu_uuid, boot_id()),
        unmatched=options.selection.unmatched(),
    )


def settings_of(reading: Reading) -> dict[str, list[str]]:
    """Return the distinct texts in the settings, by a mark of this rank's tensors. Empty: the rank has no tensors."""
    if not reading.shards:
        return {}
    tensors, settings = reading.manifest.tensors, reading.settings()
    texts = {each for each in settings if isinstance(each, str)} if isinstance(settings, list) else ()
    return {f"{len(tensors)} {tensors[0].name} {tensors[-1].name}": sorted(texts)}


def check_settings(everyone: Sequence[dict[str, list[str]]]) -> None:
    """Raise `ConfigError` if ranks with the same mark have different settings.

    The engines would get a mixture. A pipeline stage has its own tensors, and perhaps its own settings.

    everyone: each rank's settings as texts, by a mark, such as `settings_of` makes of its tensors.
    """
    first: dict[str, tuple[int, list[str]]] = {}
    for rank, mark, own in [(rank, *marked) for rank, each in enumerate(everyone) for marked in each.items()]:
        other, theirs = first.setdefault(mark, (rank, own))
        if own != theirs:
            found = first_few([each for each in own if each not in theirs]) or "none"
            expected = first_few([each for each in theirs if each not in own]) or "none"
            raise ConfigError(
                f"the ranks' adapters differ: trainer rank {rank} has {found}, and rank {other} {expected}. Give all "
                "ranks the same active adapters, with the same config and scaling"
            )


def manifests(own: Manifest, everyone: Sequence[Inventory]) -> list[Manifest]:
    """Return the distinct manifests of all ranks, `own` first. It is the manifest of the first rank.

    Most ranks know all tensors. Reading the same manifest from each would take gigabytes.
    """
    read = {bytes(everyone[0].manifest): own}
    for each in everyone[1:]:
        if (encoded := bytes(each.manifest)) not in read:
            read[encoded] = Value(each.manifest).read(Manifest)
    return list(read.values())


def frozen_everywhere(everyone: Sequence[Inventory]) -> set[str]:
    """Return the tensors that are frozen on every rank with a shard of them."""
    changing = [{location.name for location in own.locations}.difference(own.frozen) for own in everyone]
    return set().union(*(own.frozen for own in everyone)).difference(*changing)


def machines(everyone: Sequence[Inventory]) -> list[MachineInfo]:
    """Return each rank's machine, in rank order. A rank without tensors is a CPU rank if no tensor is on a GPU."""
    kinds = {own.machine.device for own in everyone if own.locations}
    return [
        own.machine if own.machine.device in kinds else replace(own.machine, device="cpu", gpu_uuid="")
        for own in everyone
    ]


def device_of(held: dict[ShardLocation, LocalTensor], members: Any) -> torch.device:
    """Return the device of this rank's tensors. Return its process group's device if it has no tensors."""
    if held:
        return next((each.tensor.device for each in held.values() if each.tensor.is_cuda), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl(members) else torch.device("cpu")
