"""The ends of transports whose ranks and workers are members of one communicator, and the members of a broadcast.

The communicator begins to meet while the workers plan.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from msgspec import Meta, Struct

from weightsync.errors import PlacementError, ProtocolError, WeightSyncError
from weightsync.net.addresses import HOST, host_port
from weightsync.net.ranks import Ranks
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo, typed
from weightsync.planning.layout import Count
from weightsync.planning.transfer_plan import Chain, choose_chains
from weightsync.transports.base import RouteRequest, Seal, Transport, TransportReceiver, Wait
from weightsync.transports.communicator import Communicator
from weightsync.transports.nccl_group import NcclGroup
from weightsync.transports.staging import still_open
from weightsync.transports.tcp_links import TcpLinks

_Endpoint = TypeVar("_Endpoint", bound=Any)


class MemberTransport(Transport):
    """The trainer's end."""

    least_bytes: ClassVar[Mapping[str, int]]
    """Smallest chunks that workers pass on, by kind of device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._forget()

    def _forget(self) -> None:
        self._rendezvous: Any = None  # rank 0: until the communicator has it
        self._communicator: Any = None
        self._peers: list[str] = []  # the members' names in errors
        self._sender: Any = None

    def _open_rendezvous(self, rendezvous: Any) -> list[Any]:
        """Keep a rendezvous for the communicator. Return its place."""
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._rendezvous = rendezvous
        return [rendezvous.host, rendezvous.port, rendezvous.name]

    def _invitations(self, place: list[Any], **how: str) -> list[dict[str, Any]]:
        """Return each member's invitation to a rendezvous."""
        size = len(self._peers)
        return [{"place": place, "size": size, "rank": rank, **how} for rank in range(size)]

    def route(self, request: RouteRequest) -> tuple[Chain, ...]:
        # The bytes reach the trainer's hosts first, and each host once.
        self.min_chunk_bytes = self.least_bytes[request.ranks[0].device]
        hosts = list(dict.fromkeys(member.boot_id for member in (*request.ranks, *request.workers)))
        own_hosts = [hosts.index(worker.boot_id) for worker in request.workers]
        return choose_chains(request.manifest, request.locations, request.reads, own_hosts)

    def prepare_push(self, sample: int | None) -> int:
        for gpu in () if self._sender is None else self._sender.gpus:
            # Chunks are filled on the current stream. The optimizer's writes may be queued on another.
            torch.cuda.synchronize(gpu)
        return 0

    def send(self, chunks: Sequence[int], seal: Seal | None, update: Update) -> None:
        self.sent_bytes = still_open(self._sender).send(chunks, seal, update)

    def abort(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        if self._communicator is not None:
            self._communicator.abort()
        if self._sender is not None:
            self._sender.packer = None
        self._forget()


class MemberReceiver(TransportReceiver):
    """The worker's end."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._communicator: Any = None
        self._slots: list[torch.Tensor] = []

    def _read_endpoint(self, fields: dict[str, Any], kind: type[_Endpoint]) -> _Endpoint:
        """Return the fields of the endpoint. The worker was invited, and `runs` lie in its slots."""
        if self._communicator is None:
            raise ProtocolError("Connect came without an invitation in PlanRequest")
        told = typed(fields, kind)
        if any(not first <= end <= told.slot_bytes for runs in told.runs for _, first, end in runs):
            raise ProtocolError(f"a run of bytes does not lie in a slot of {told.slot_bytes} bytes")
        return told

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        if storage not in range(len(self._slots)):
            raise ProtocolError(
                f"the plan reads storage {storage} of trainer rank {rank}, and there are {len(self._slots)} slots"
            )
        return self._slots[storage]

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()
        self._communicator, self._slots = None, []


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


def refuse_dialled(library: str, workers: Sequence[MachineInfo]) -> None:
    """Raise `PlacementError` for workers that cannot dial the trainer. These libraries choose ports of their own."""
    if dialled := [f"{worker.peer} at {host_port(*worker.dialled)}" for worker in workers if worker.dialled]:
        raise PlacementError(
            f"{library} connects both ends at any port, and with {HOST}=none no engine can dial the trainer, which has "
            f'dialled {", ".join(dialled)}. Behind NAT use CheckpointTransport(folder), transport="lora", or '
            'transport="broadcast" between CPUs'
        )


def check_machines(name: str, ranks: Sequence[MachineInfo], workers: Sequence[MachineInfo]) -> None:
    """Raise `PlacementError` unless these can be members of one communicator."""
    root = ranks[0]
    if root.device == "cuda":
        refuse_dialled("NCCL", workers)
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
