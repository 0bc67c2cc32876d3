"""A transport that fails where a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo
from weightsync.planning.transfer_plan import Chain, TransferPlan
from weightsync.transports import open_transport
from weightsync.transports.base import ByteRange, Endpoint, LocalTensor, LocalTensors, RouteRequest, Seal, Transport


class FaultyTransport(Transport):
    """A built-in transport's trainer end, of which a test replaces single steps.

    before_chunk: called with each chunk's number, before anything of it is sent.
    flip_a_byte_of: the chunk of which the next push changes a byte on the way, once.
    change_endpoints: called once, with the endpoints that the next `prepare` returns.
    """

    def __init__(self, name: str) -> None:
        self.inner = open_transport(name)
        self.name = self.inner.name
        self.before_chunk: Callable[[int], None] | None = None
        self.flip_a_byte_of: int | None = None
        self.change_endpoints: Callable[[list[Endpoint]], None] | None = None

    def invite(self, ranks: Sequence[MachineInfo], workers: Sequence[MachineInfo], host: str) -> list[dict[str, Any]]:
        return self.inner.invite(ranks, workers, host)

    def meet(self, invitation: dict[str, Any], device: torch.device, deadline: Deadline) -> None:
        self.inner.meet(invitation, device, deadline)

    def route(self, request: RouteRequest) -> tuple[Chain, ...]:
        return self.inner.route(request)

    def can_map(self, tensor: LocalTensor) -> bool:
        return self.inner.can_map(tensor)

    def prepare(self, plan: TransferPlan, tensors: LocalTensors, update: Update) -> list[Endpoint]:
        endpoints = self.inner.prepare(plan, tensors, update)
        if self.change_endpoints is not None:
            change, self.change_endpoints = self.change_endpoints, None
            change(endpoints)
        return endpoints

    def connect(self, deadline: Deadline) -> None:
        self.inner.connect(deadline)

    def in_place(self) -> list[ByteRange]:
        return self.inner.in_place()

    def prepare_push(self, sample: int | None) -> int:
        return self.inner.prepare_push(sample)

    def send(self, chunks: Sequence[int], seal: Seal | None, update: Update) -> None:
        if self.flip_a_byte_of is not None:
            chunk, self.flip_a_byte_of = self.flip_a_byte_of, None
            self._let_a_byte_flip(chunk)
        self.inner.send(_Watched(chunks, self), seal, update)

    def on_commit(self, version: int) -> None:
        self.inner.on_commit(version)

    def after_commit(self) -> None:
        self.inner.after_commit()

    def abort(self) -> None:
        self.inner.abort()

    def _let_a_byte_flip(self, chunk: int) -> None:
        """Change a byte of this chunk after its digest was taken."""
        inner: Any = self.inner
        packer: Any = (inner._writer if inner.name == "checkpoint" else inner._sender).packer
        fill = packer.fill

        def fill_and_flip(number: int, seal: Seal | None) -> None:
            fill(number, seal)
            if number == chunk:
                del packer.fill
                packer._steps[number].runs[0][0] ^= 4

        packer.fill = fill_and_flip


class _Watched(Sequence[int]):
    """The numbers of chunks, each of which is told to a test when it is its turn."""

    def __init__(self, numbers: Sequence[int], transport: FaultyTransport) -> None:
        self._numbers, self._transport = numbers, transport

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: Any) -> Any:
        return self._numbers[at]

    def __iter__(self) -> Iterator[int]:
        for number in self._numbers:
            if self._transport.before_chunk is not None:
                self._transport.before_chunk(number)
            yield number
