"""A transport over plain TCP sockets, as another package would write one: the proof that little is asked of it."""

import socket
from typing import Any

import torch

from weightsync.errors import PeerError, SyncTimeoutError
from weightsync.planning.transfer_plan import Chain
from weightsync.transports.base import Endpoint, Transport, TransportReceiver
from weightsync.transports.staging import Packer, endpoint, receive_layout, send_layout, slot_bytes


def hang_up(self: Any) -> None:
    for each in dict(self.sockets).values():
        each.close()


class TcpTransport(Transport):
    name, sockets, abort = "tcp", (), hang_up

    def route(self, request: Any) -> tuple[Chain, ...]:
        return tuple(Chain((worker,), own) for worker, own in enumerate(request.reads))

    def prepare(self, plan: Any, tensors: Any, update: Any) -> list[Endpoint]:
        self.abort()
        rank, self.workers = update.ranks.rank, range(plan.workers)
        self.layout = send_layout(plan, rank, slots=1)
        self.slot = torch.empty(slot_bytes(self.layout), dtype=torch.uint8)
        self.packer = Packer(plan, tensors, self.layout, {0: self.slot})
        self.sockets = {-1: socket.create_server(("127.0.0.1", 0))}
        storages = [[rank, 0, "tcp", {"address": list(self.sockets[-1].getsockname())}]]
        return [endpoint(receive_layout(plan, worker, slots=1), storages, worker=worker) for worker in self.workers]

    def connect(self, deadline: Any) -> None:
        self.sockets[-1].settimeout(deadline.left_s())
        for _ in self.workers:
            peer = self.sockets[-1].accept()[0]
            self.sockets[peer.recv(1)[0]] = peer

    def send(self, chunks: Any, seal: Any, update: Any) -> None:
        self.sent_bytes = 0
        for number in chunks:
            self.packer.fill(number, seal)
            for worker, run in self.layout[number].items():
                self.sent_bytes += run.end - run.first
                move(self.sockets[worker], "send", self.slot[run.first : run.end], update.wait, update.deadline())


class TcpReceiver(TransportReceiver):
    sockets, close = (), hang_up

    def connect(self, storages: Any, fields: dict[str, Any], wait: Any, deadline: Any) -> None:
        self.close()
        self.slot, self.runs = torch.empty(fields["slot_bytes"], dtype=torch.uint8), fields["runs"]
        self.sockets = {rank: socket.create_connection(row["address"]) for rank, _, _, row in storages}
        for each in self.sockets.values():
            each.sendall(bytes([fields["worker"]]))

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self.slot

    def chunks(self, numbers: Any, wait: Any, deadline: Any) -> Any:
        for number in numbers:
            for rank, first, end in self.runs[number]:
                move(self.sockets[rank], "recv_into", self.slot[first:end], wait, deadline())
            yield number


def move(peer: socket.socket, how: str, data: torch.Tensor, wait: Any, deadline: Any) -> None:
    memory = memoryview(data.numpy())
    while memory:
        wait(0.0)
        try:
            peer.settimeout(0.001)
            memory = memory[getattr(peer, how)(memory) :]
        except OSError as error:
            if not isinstance(error, TimeoutError):
                raise PeerError(f"a socket broke: {error}") from error
            if deadline.passed():
                raise SyncTimeoutError(f"no {how} in {deadline.timeout_s:g} s", waiting_for=["a peer"]) from error
