"""The members of a broadcast: their chains, their invitations, and their communicator.

The communicator begins to meet while the workers plan.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from weightsync.errors import PlacementError, WeightSyncError
from weightsync.net.ranks import Ranks
from weightsync.net.runtime import Deadline
from weightsync.net.wire import MachineInfo, typed
from weightsync.planning.layout import Count
from weightsync.planning.transfer_plan import Chain, choose_chains
from weightsync.transports.base import RouteRequest, Wait
from weightsync.transports.communicator import Communicator
from weightsync.transports.nccl_group import NcclGroup
from weightsync.transports.tcp_links import TcpLinks


class Invitation(Struct, frozen=True, forbid_unknown_fields=True):
    """A member's data about its communicator.

    place: [host, port, name] of the rendezvous.
    rank, size: the member's number, and the count of members.
    device: the kind of the members' devices.
    """

    place: tuple[str, Count, str]
    size: Count
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda)\Z")]
    rank: Count


def kind_of(device: str) -> type[Communicator]:
    """Return the communicator of members on this kind of device."""
    return NcclGroup if device == "cuda" else TcpLinks


def meet(
    known: Communicator | None,
    invitation: dict[str, Any],
    device: torch.device,
    deadline: Deadline,
    rendezvous: Any = None,
) -> Communicator:
    """Return the communicator of an invitation. A new one begins to meet its members."""
    told = typed(invitation, Invitation)
    if known is not None:
        if known.place == [*told.place]:
            return known
        known.abort()
    if device.type != told.device:  # a rank without tensors, or one that `prepare` refuses
        device = torch.device("cuda", torch.cuda.current_device()) if told.device == "cuda" else torch.device("cpu")
    made = kind_of(told.device)([*told.place], rendezvous, told.rank, told.size, device)
    made.meet(deadline)
    return made


def wait_unless_aborted(aborted: threading.Event, ranks: Ranks) -> Wait:
    """Return the wait of a rank that connects. It raises once `aborted` is set or a rank has failed."""

    def wait(seconds: float) -> None:
        if aborted.wait(seconds):
            raise WeightSyncError("the push was aborted")
        if ranks.rank:  # on rank 0 another thread uses these connections
            ranks.wait(0.0)

    return wait


def route_chains(request: RouteRequest) -> tuple[Chain, ...]:
    """Return the chains of workers. The bytes reach the trainer's hosts first, and each host once."""
    workers = request.workers
    hosts = list(dict.fromkeys(member.boot_id for member in (*request.ranks, *workers)))
    own_hosts = [hosts.index(worker.boot_id) for worker in workers]
    return choose_chains(request.manifest, request.locations, request.reads, own_hosts)


def check_machines(name: str, ranks: Sequence[MachineInfo], workers: Sequence[MachineInfo]) -> None:
    """Raise `PlacementError` unless these can be members of one communicator."""
    root = ranks[0]
    if name == "nccl" and root.device != "cuda":
        raise PlacementError('transport="nccl" takes GPU tensors only, and trainer rank 0 holds CPU tensors')
    if other := [worker.peer for worker in workers if worker.device != root.device]:
        raise PlacementError(
            f"a broadcast needs one kind of device: trainer rank 0 sends from {root.device}, and "
            f"{', '.join(other)} receives on {workers[0].device}"
        )
    seen: dict[str, str] = {}
    for member in (*ranks, *workers):
        if member.gpu_uuid and member.gpu_uuid in seen:
            raise PlacementError(
                f"NCCL refuses {member.peer} and {seen[member.gpu_uuid]} on one GPU, {member.gpu_uuid}; use "
                'transport="ipc" for engines on the trainer\'s GPUs'
            )
        seen[member.gpu_uuid] = member.peer
