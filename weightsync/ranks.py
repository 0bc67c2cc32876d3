"""The trainer's ranks as one group on the host: collective steps that fail on every rank together.

They talk over the same kind of connection as the engine's workers do, to trainer rank 0, so a rank that dies is
noticed at once and by name, and no device is kept busy by a rank that waits.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from weightsync.channel import Channel, Deadline, Hub, dial
from weightsync.errors import PeerError, WeightSyncError
from weightsync.wire import PROTOCOL, Failure, Hello, Value

_LOOPBACK = "127.0.0.1"
_VERDICT_S = 5.0
"""How long rank 0's verdict on a failure may take to reach the others."""


class RankGroup:
    """All ranks of the default process group, or this process alone when there is none.

    `gather` and `share` are collective; an error on any rank is raised on all, from whichever step they are in.
    """

    def __init__(self, hub: Hub | None, timeout_s: float) -> None:
        """Collective: every trainer rank calls this. `hub` is rank 0's, None elsewhere."""
        alone = not dist.is_available() or not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self.host = self.own_host = _LOOPBACK
        self.channels: list[Channel] = []  # rank 0: to ranks 1, 2, ...; elsewhere: to rank 0
        self._hub = hub
        self._timeout_s = timeout_s
        if self.size > 1:
            self._meet()

    def gather(self, value: Any, phase: str) -> list[Any]:
        """Every rank's value, in rank order, on rank 0; an empty list elsewhere. Plain values that msgpack carries."""
        deadline = Deadline(self._timeout_s)
        if self.rank:
            self.channels[0].send(Value(value), deadline, phase)
            return []
        if self._hub is None or not self.channels:
            return [value]
        return [value, *(m.value for m in self._hub.collect(self.channels, Value, deadline, phase))]

    def share(self, value: Any, phase: str) -> Any:
        """Rank 0's value, on every rank."""
        deadline = Deadline(self._timeout_s)
        if self.rank:
            return self.channels[0].expect(Value, deadline, phase).value
        for channel in self.channels:
            channel.send(Value(value), deadline, phase)
        return value

    def idle(self, seconds: float) -> None:
        """For waits of other kinds: sleep at most that long; raise when any rank has failed or died."""
        if not self.channels:
            time.sleep(seconds)
        for channel in self.channels:
            channel.check("transfer", seconds / len(self.channels))

    def fail(self, error: WeightSyncError) -> WeightSyncError:
        """Tell the others what went wrong here; gives the error that every rank raises, the first cause."""
        deadline = Deadline(_VERDICT_S)
        for channel in self.channels:
            try:
                channel.send(Failure(error.to_fields()), deadline, "fail")
            except WeightSyncError:
                continue  # it is gone, and knows
        if self.rank and isinstance(error, PeerError) and self.channels:
            return self._verdict(error, deadline)
        return error

    def _verdict(self, error: WeightSyncError, deadline: Deadline) -> WeightSyncError:
        """A broken connection is a consequence as often as a cause: rank 0 may know better."""
        try:
            while True:
                self.channels[0].receive(deadline, "fail")
        except WeightSyncError as cause:
            return error if isinstance(cause, (PeerError, TimeoutError)) else cause

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.channels.clear()

    def _meet(self) -> None:
        """Rank 0 says where it listens, over the default group; the others connect."""
        deadline = Deadline(self._timeout_s)
        if self._hub is not None:
            self.host, port = self._hub.listen(os.environ.get("MASTER_ADDR", _LOOPBACK))
            _broadcast_text(f"{self.host} {port} {self._hub.token.hex()}")
            admitted = self._hub.admit("rank", 0, deadline, "connect", lambda: None)
            self.channels = [channel for _, channel in admitted]
            self.own_host = self.host
            return
        self.host, port_text, token = _broadcast_text("").split()
        hello = Hello(
            protocol=PROTOCOL,
            token=bytes.fromhex(token),
            role="rank",
            group=0,
            rank=self.rank,
            world=self.size - 1,
            pid=os.getpid(),
            boot_id="",
            device="",
            gpu_uuid="",
            name=f"trainer rank {self.rank}",
            version=0,
            state="",
            update_open=False,
        )
        channel = dial(self.host, int(port_text), hello, "trainer rank 0", deadline)
        self.channels = [channel]
        self.own_host = channel.own_host()


_TEXT_BYTES = 256


def _broadcast_text(text: str) -> str:
    """Rank 0's short ASCII text, over the default process group, as a tensor: nothing is pickled."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    data = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    data[: len(text)] = torch.tensor(list(text.encode("ascii")), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, 0)
    return bytes(data.cpu().tolist()).rstrip(b"\0").decode("ascii")
