"""The members of a NIXL transfer: their agents, and how the agents get to know each other.

All members meet first over authenticated connections to rank 0 (tcp_links.py). Each tells rank 0 the address of its
agent. Rank 0 passes it on to the members beside it in their chains, and to no others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from weightsync.errors import PeerError, PlacementError, ProtocolError
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline
from weightsync.net.wire import typed
from weightsync.planning.layout import Count
from weightsync.transports.base import Wait
from weightsync.transports.communicator import PeerBuffer
from weightsync.transports.nixl_agent import Agent, AgentAddress, nixl_version
from weightsync.transports.staging import still_open
from weightsync.transports.tcp_links import TcpLinks, TcpRendezvous

_TRIAL_BYTES = 256
"""Bytes of a trial read. Each slot has as many."""


_Acquaintances = list[tuple[int, AgentAddress]]
"""Agents, by their members' numbers."""


class Introduction(Struct, frozen=True, array_like=True):
    """A member's agent, as told to rank 0.

    version: NIXL's.
    address, contact: its agent's, for reads and for counts alone.
    before, behind: the numbers of the members to read from, and of its own readers.
    """

    version: str
    address: AgentAddress
    contact: AgentAddress
    before: list[Count]
    behind: list[Count]


def introduce(everyone: Sequence[Introduction], names: Sequence[str]) -> list[_Acquaintances]:
    """Return each member's acquaintances: agents, by their members' numbers. Pure.

    A reader gets an address for reads. The member that it reads from gets one for counts alone.

    Args:
        everyone: All members' introductions.
        names: Their names in errors.

    Raises:
        PlacementError: The members have several versions of NIXL.
    """
    for name, other in zip(names, everyone, strict=True):
        if other.version != everyone[0].version:
            raise PlacementError(
                f"{names[0]} has NIXL {everyone[0].version}, and {name} has NIXL {other.version}. Install the same "
                "version beside the trainer and beside every engine"
            )
    addresses = [replace(each.address, member=name) for name, each in zip(names, everyone, strict=True)]
    contacts = [replace(each.contact, member=name) for name, each in zip(names, everyone, strict=True)]
    return [
        [
            *((member, addresses[member]) for member in own.before if number in everyone[member].behind),
            *((member, contacts[member]) for member in own.behind if number in everyone[member].before),
        ]
        for number, own in enumerate(everyone)
    ]


class NixlGroup(TcpLinks):
    """This member's agent, and its connection to the first member.

    agent: None until the members have met.
    peers: the agents beside this one, by their members' numbers.
    """

    def __init__(self, *args: Any, backend: str, names: Sequence[str]) -> None:
        super().__init__(*args)
        self._backend, self._names = backend, names
        self.agent: Agent | None = None
        self.peers: dict[int, AgentAddress] = {}
        self._beside: tuple[Sequence[torch.Tensor], list[int], list[int]] = (), [], []

    def share(
        self,
        slots: Sequence[torch.Tensor],
        before: Sequence[int],
        behind: Sequence[int],
        wait: Wait,
        deadline: Deadline,
    ) -> None:
        """Register slots, and get to know the members before this one and behind it. Every member calls it."""
        self._beside = slots, [*before], [*behind]
        self.link([], [], wait, deadline)

    def _join(self, deadline: Deadline) -> None:
        super()._join(deadline)
        for name, member in zip(self._names[1:], self._to_first, strict=False):
            member.peer = name  # in errors
        self._missing = "all have connected to {host}, but not told each other of their NIXL agents"
        self._use_gpu()
        self.agent = Agent(self._backend)

    def _connect(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], deadline: Deadline) -> None:
        slots, before, behind = self._beside
        self._use_gpu()
        agent = still_open(self.agent)
        agent.register(slots)
        own = Introduction(nixl_version(), agent.address(), agent.contact(), before, behind)
        introduced = partial(introduce, names=self._names)
        told: _Acquaintances = self._tell_first(own, Introduction, introduced, _Acquaintances, deadline)
        self.peers = dict(told)
        if missing := {*before, *behind} - {*self.peers}:
            raise ProtocolError(f"members {sorted(missing)} do not know that this member is beside them")
        for peer in self.peers.values():
            agent.add(peer)
        self._missing = "they cannot read each other's memory. UCX's ports must be open: see UCX_NET_DEVICES"
        for member in before:
            self._try_read(agent, self.peers[member], deadline)

    def _try_read(self, agent: Agent, peer: AgentAddress, deadline: Deadline) -> None:
        """Read a few bytes of a member's slot. UCX connects the two by it, and what it cannot read is an error now."""
        try:
            read = agent.read(peer, 0, 0, agent.slots[0][:_TRIAL_BYTES], 0)
            while not agent.is_read(read, peer):
                self._check()
                if deadline.passed():
                    what = f"{peer.member}'s memory could not be read by NIXL"
                    raise deadline.expired(what, "connect", [peer.member], self._missing)
                time.sleep(timeouts.MEMBER_POLL_S)
        except PeerError as error:
            if "Disconnect" in error.message:  # it has died
                raise
            raise PlacementError(
                f"{error.message}. UCX needs a way for both processes: see UCX_TLS and UCX_NET_DEVICES, and run "
                "`weightsync doctor` on both hosts"
            ) from error

    def _use_gpu(self) -> None:
        """Give this thread the GPU's context. NIXL registers a GPU's memory there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _break(self) -> None:
        super()._break()
        if self.agent is not None:
            self.agent.close()


class NixlInvitation(Struct, frozen=True, forbid_unknown_fields=True):
    """A member's data about its group. `place` is [host, port, name] of the rendezvous, `backend` is NIXL's."""

    place: tuple[str, Count, str]
    size: Count
    rank: Count
    backend: str


def meet(
    known: NixlGroup | None,
    invitation: dict[str, Any],
    device: torch.device,
    deadline: Deadline,
    rendezvous: TcpRendezvous | None = None,
    names: Sequence[str] = (),
) -> NixlGroup:
    """Return a new group, which begins to meet its members. Rank 0 has its rendezvous and the members' names."""
    if known is not None:
        known.abort()
    nixl_version()
    told = typed(invitation, NixlInvitation)
    group = NixlGroup([*told.place], rendezvous, told.rank, told.size, device, backend=told.backend, names=names)
    group.meet(deadline)
    return group
