"""The trainer's ranks as one group on the host: collective steps that fail on every rank together.

They talk over the same kind of connection as the engine's workers do, to trainer rank 0, so a rank that dies is
noticed at once and by name, and no device is kept busy by a rank that waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from weightsync.channel import Channel, Hub, dial
from weightsync.deadline import Deadline
from weightsync.errors import PeerError, SyncTimeoutError, WeightSyncError
from weightsync.wire import PROTOCOL, Failure, Hello, Value

_LOOPBACK = "127.0.0.1"
_VERDICT_S = 5.0
"""How long rank 0's verdict on a failure may take to reach the others."""
_PATIENCE = 8
"""Between two steps rank 0 may wait this many times, for engines and for ranks. Each of its waits has a deadline of its
own, and an error that says more than "no answer from rank 0", so the others give it this many times as long."""
_POLL_S = 0.01
_ALL_PUSH = "every rank must call push, and none may take longer for its part"


class RankGroup:
    """All ranks of the default process group, or this process alone when there is none.

    `gather` and `share` are collective; an error on any rank is raised on all, from whichever step they are in.
    """

    def __init__(self, hub: Hub | None, timeout_s: float) -> None:
        """Collective: every trainer rank calls this. `hub` is rank 0's, None elsewhere."""
        alone = not dist.is_available() or not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self.host = _LOOPBACK
        self.channels: list[Channel] = []  # rank 0: to ranks 1, 2, ...; elsewhere: to rank 0
        self._hub = hub
        self._timeout_s = timeout_s
        if self.size > 1:
            self._meet()

    def begin(self, phase: str) -> None:
        """Collective, as each push begins: rank 0 tells the others that it has come, or they would wait for it as long
        as for all that it may do in a push. Raises `SyncTimeoutError` where it has not within `timeout_s`."""
        if self.rank == 0:
            self.share(None, phase)
            return
        with _hint(_ALL_PUSH):
            self.channels[0].expect(Value, Deadline(self._timeout_s), phase)

    def gather(self, value: Any, phase: str) -> list[Any]:
        """Every rank's value, in rank order, on rank 0; an empty list elsewhere. Plain values that msgpack carries."""
        deadline = Deadline(self._timeout_s)
        if self.rank:
            self.channels[0].send(Value(value), deadline, phase)
            return []
        if self._hub is None or not self.channels:
            return [value]
        with _hint(_ALL_PUSH):
            return [value, *(m.value for m in self._hub.collect(self.channels, Value, deadline, phase))]

    def share(self, value: Any, phase: str, away_s: float = 0.0) -> Any:
        """Rank 0's value, on every rank. The others wait `away_s` longer, for what rank 0 has been doing."""
        if self.rank:
            return self.channels[0].expect(Value, Deadline(_PATIENCE * self._timeout_s + away_s), phase).value
        deadline = Deadline(self._timeout_s)
        for channel in self.channels:
            channel.send(Value(value), deadline, phase)
        return value

    def idle(self, seconds: float) -> None:
        """For waits of other kinds: sleep that long; raise when any rank has failed or died."""
        time.sleep(seconds)
        for channel in self.channels:
            channel.check("transfer")

    def fail(self, error: WeightSyncError) -> WeightSyncError:
        """Tell the others what went wrong here; gives the error that every rank raises: the first that rank 0 met."""
        deadline = Deadline(_VERDICT_S)
        for channel in self.channels:
            with suppress(WeightSyncError):  # it is gone, and knows
                channel.send(Failure(error.to_fields()), deadline, "fail")
        return self._verdict(error, deadline) if self.rank and self.channels else error

    def _verdict(self, error: WeightSyncError, deadline: Deadline) -> WeightSyncError:
        """What rank 0 says the first failure was; `error` when it says the same, or nothing."""
        try:
            while True:
                self.channels[0].receive(deadline, "fail")
        except WeightSyncError:
            verdict = self.channels[0].reported()
        return error if verdict is None or verdict.to_fields() == error.to_fields() else verdict

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.channels.clear()

    def _meet(self) -> None:
        """Rank 0 says where it listens, over the default group; the others connect."""
        deadline = Deadline(self._timeout_s)
        if self._hub is not None:
            name = os.environ.get("MASTER_ADDR", _LOOPBACK)
            try:
                self.host, port = self._hub.listen(name)
            except OSError as error:
                _broadcast_text(f"! {error}", deadline)
                raise PeerError(f"trainer rank 0 cannot listen at MASTER_ADDR={name}: {error}") from error
            _broadcast_text(f"{self.host} {port} {self._hub.token.hex()}", deadline)
            admitted = self._hub.admit("rank", 0, deadline, "connect", lambda: None)
            self.channels = [channel for _, channel in admitted]
            return
        text = _broadcast_text("", deadline)
        if text.startswith("!"):
            raise PeerError(f"trainer rank 0 cannot listen: {text[2:]}")
        self.host, port_text, token = text.split()
        hello = Hello(
            protocol=PROTOCOL,
            token=bytes.fromhex(token),
            role="rank",
            group=0,
            rank=self.rank,
            world=self.size - 1,
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


@contextmanager
def _hint(hint: str) -> Iterator[None]:
    """Let what times out say what may be the cause."""
    try:
        yield
    except SyncTimeoutError as error:
        raise SyncTimeoutError(
            f"{error.message}: {hint}", who=error.who, phase=error.phase, waiting_for=error.waiting_for
        ) from error


_TEXT_BYTES = 256


def _broadcast_text(text: str, deadline: Deadline) -> str:
    """Rank 0's short text, over the default process group, as a tensor: nothing is pickled."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    content = text.encode()[:_TEXT_BYTES]
    data = torch.tensor(list(content.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8, device=device)
    try:
        work = dist.broadcast(data, 0, async_op=True)
        while not work.is_completed():
            if deadline.passed():
                who = "trainer rank 0" if dist.get_rank() else "the other trainer ranks"
                raise SyncTimeoutError(
                    f"no answer from {who} within {deadline.timeout_s:g} s: {_ALL_PUSH}",
                    phase="connect",
                    waiting_for=[who],
                )
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:
        raise PeerError(
            f"another trainer rank has ended, or has not called push: the default process group is broken ({error})",
            phase="connect",
        ) from error
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")
