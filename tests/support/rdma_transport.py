"""A transport over RDMA reads: the sketch of docs/extend/transport.md. A stand-in of NIXL's agent copies memory.

Workers read, and ranks only say how far they have come: `filled` counts chunks, in memory that workers read, too.
"""

import ctypes
from typing import Any

import torch

from weightsync.errors import PeerError, WeightSyncError
from weightsync.planning.transfer_plan import Chain
from weightsync.transports.base import Endpoint, Transport, TransportReceiver
from weightsync.transports.staging import Packer, endpoint, receive_layout, send_layout, slot_bytes, wait_until


class RdmaTransport(Transport):
    name = "rdma"
    agent: Any = None

    def route(self, request: Any) -> tuple[Chain, ...]:
        return tuple(Chain((worker,), own) for worker, own in enumerate(request.reads))

    def prepare(self, plan: Any, tensors: Any, update: Any) -> list[Endpoint]:
        rank, self.unread = update.ranks.rank, 0
        self.layout = send_layout(plan, rank, slots=1)
        self.slot = torch.empty(slot_bytes(self.layout), dtype=torch.uint8)
        self.filled = torch.zeros(1, dtype=torch.int64)
        self.packer = Packer(plan, tensors, self.layout, {0: self.slot})
        self.agent = Agent(f"rank {rank} {id(self)}")
        self.agent.register_memory([self.filled, self.slot])
        told = {"metadata": self.agent.get_agent_metadata().hex(), "filled": self.filled.data_ptr()}
        endpoints = []
        for worker in range(plan.workers):
            places = [self.slot.data_ptr() + runs[worker].first if worker in runs else None for runs in self.layout]
            rows = [[rank, 0, self.name, {**told, "places": places}]]
            endpoints.append(endpoint(receive_layout(plan, worker, slots=1), rows))
        return endpoints

    def send(self, chunks: Any, sample: int | None, update: Any) -> None:
        for number in chunks:
            self.packer.fill(number, sample)
            self.unread = len(self.layout[number])
            self.filled += 1
            wait_until(self.late, "read a chunk", update.wait, update.deadline())

    def late(self) -> list[str]:
        if (agent := self.agent) is None:
            raise WeightSyncError("the transport was closed")
        self.unread -= sum(map(len, agent.get_new_notifs().values()))
        return ["a worker"] if self.unread else []

    def abort(self) -> None:
        self.agent = None


class RdmaReceiver(TransportReceiver):
    def connect(self, storages: Any, fields: dict[str, Any], wait: Any, deadline: Any) -> None:
        self.slot, self.runs = torch.empty(fields["slot_bytes"], dtype=torch.uint8), fields["runs"]
        self.filled, self.chunk = torch.zeros(1, dtype=torch.int64), 0
        self.agent = Agent(f"worker {id(self)}")
        self.agent.register_memory([self.filled, self.slot])
        self.ranks = {rank: row for rank, _, _, row in storages}
        metadata = {rank: bytes.fromhex(row["metadata"]) for rank, row in self.ranks.items()}
        self.peers = {rank: self.agent.add_remote_agent(each) for rank, each in metadata.items()}

    def storage(self, rank: int, storage: int) -> torch.Tensor:
        return self.slot

    def chunks(self, numbers: Any, wait: Any, deadline: Any) -> Any:
        for number in numbers:
            self.chunk += 1
            for rank, first, end in self.runs[number]:
                row, is_filled = self.ranks[rank], lambda rank=rank: self.is_filled(rank, wait, deadline())
                wait_until(is_filled, "fill a chunk", wait, deadline())
                self.read(rank, row["places"][number], self.slot[first:end], b"read", wait, deadline())
            yield number

    def is_filled(self, rank: int, wait: Any, deadline: Any) -> list[str]:
        self.read(rank, self.ranks[rank]["filled"], self.filled, b"", wait, deadline)
        return [] if int(self.filled) >= self.chunk else [f"trainer rank {rank}"]

    def read(self, rank: int, address: int, to: torch.Tensor, tag: bytes, wait: Any, deadline: Any) -> None:
        here, there = ([(each, to.nbytes, 0)] for each in (to.data_ptr(), address))
        descriptors = self.agent.get_xfer_descs(here, "DRAM"), self.agent.get_xfer_descs(there, "DRAM")
        handle = self.agent.initialize_xfer("READ", *descriptors, self.peers[rank], tag)
        states = [self.agent.transfer(handle)]

        def late() -> list[str]:
            states.append(self.agent.check_xfer_state(handle))
            return [f"trainer rank {rank}"] if states[-1] == "PROC" else []

        wait_until(late, "let its memory be read", wait, deadline)
        self.agent.release_xfer_handle(handle)
        if states[-1] != "DONE":
            raise PeerError(f"a read of trainer rank {rank}'s memory ended with {states[-1]}")

    def close(self) -> None:
        self.agent = None


agents: dict[str, "Agent"] = {}


class Agent:
    """What the sketch uses of `nixl_agent`, for agents of one process."""

    def __init__(self, name: str) -> None:
        self.name, self.notices = name, []
        agents[name] = self

    def register_memory(self, tensors: list[torch.Tensor]) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_xfer_descs(self, rows: list[tuple[int, int, int]], memory: str) -> list[tuple[int, int, int]]:
        return rows

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str, tag: bytes) -> Any:
        return here, there, peer, tag

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        here, there, peer, tag = handle
        for (to, nbytes, _), (address, _, _) in zip(here, there, strict=True):
            ctypes.memmove(to, address, nbytes)
        if tag:
            agents[peer].notices.append(tag)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found = [self.notices.pop() for _ in range(len(self.notices))]
        return {"some worker": found}
