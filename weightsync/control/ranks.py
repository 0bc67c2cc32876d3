"""The trainer's ranks as one group on the host: collective steps that fail on every rank together.

The ranks talk to trainer rank 0 over the same kind of connection as the engine's workers. A rank that dies is noticed
at once and by name. A rank that waits keeps no device busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from weightsync.control.connection import Connection, dial
from weightsync.control.listener import Listener
from weightsync.control.runtime import Deadline
from weightsync.control.update import Update
from weightsync.control.wire import PROTOCOL, Failure, Hello, Value
from weightsync.errors import ConfigError, PeerError, SyncTimeoutError, WeightSyncError, foreign

_LOOPBACK = "127.0.0.1"
_VERDICT_S = 5.0
"""How long rank 0's verdict on a failure may take to reach the others."""
_PATIENCE = 8
"""Between two steps rank 0 may wait this many times, for engines and for ranks. Each of its waits has a deadline of its
own, and an error that says more than "no answer from rank 0", so the others give it this many times as long."""
_POLL_S = 0.01
_ALL_PUSH = "every rank must call push, and none may take longer for its part"


class Ranks:
    """All ranks of the default process group, or this process alone when there is none.

    `gather` and `broadcast` are collective. An error on any rank is raised on all, from whichever step they are in.
    `listener` is where the engines' workers connect to rank 0; None on other ranks, and while disconnected.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size = 0, 1
        self.host = _LOOPBACK
        self.timeout_s = timeout_s
        self.listener: Listener | None = None
        self.connections: list[Connection] = []  # rank 0: to ranks 1, 2, ...; elsewhere: to rank 0
        self._connected = False
        self._address = "", 0, ""  # elsewhere than on rank 0: where it listens, and its token

    def begin(self, phase: str) -> None:
        """Begin a step together; the first one connects the ranks. Collective.

        Raises `SyncTimeoutError` when a rank has not come within `timeout_s`.
        """
        if not self._connected:
            self._connect()
            self._connected = True
        elif self.rank == 0:
            self.broadcast(None, phase)
        else:
            with _hint(_ALL_PUSH):
                self.connections[0].expect(Value, Deadline(self.timeout_s), phase)

    def gather(self, value: Any, phase: str) -> list[Any]:
        """Return every rank's value, in rank order, on rank 0; an empty list elsewhere.

        Values are plain, as msgpack carries.
        """
        deadline = Deadline(self.timeout_s)
        if self.rank:
            self.connections[0].send(Value(value), deadline, phase)
            return []
        if self.listener is None or not self.connections:
            return [value]
        with _hint(_ALL_PUSH):
            return [value, *(m.value for m in self.listener.collect(self.connections, Value, deadline, phase))]

    def broadcast(self, value: Any, phase: str, away_s: float = 0.0) -> Any:
        """Return rank 0's value. Collective.

        The other ranks wait `away_s` longer than usual, for what rank 0 does before.
        """
        if self.rank:
            return self.connections[0].expect(Value, Deadline(_PATIENCE * self.timeout_s + away_s), phase).value
        deadline = Deadline(self.timeout_s)
        for connection in self.connections:
            connection.send(Value(value), deadline, phase)
        return value

    def wait(self, seconds: float) -> None:
        """Sleep for that long, during a wait of another kind. Raise when any rank has failed or died."""
        time.sleep(seconds)
        for connection in self.connections:
            connection.check("transfer")

    def agree_on(self, error: WeightSyncError) -> WeightSyncError:
        """Tell the others what went wrong here. Return the error that every rank raises: the first that rank 0 met."""
        deadline = Deadline(_VERDICT_S)
        for connection in self.connections:
            with suppress(WeightSyncError):  # it is gone, and knows
                connection.send(Failure(error.to_fields()), deadline, "fail")
        return self._verdict(error, deadline) if self.rank and self.connections else error

    def _verdict(self, error: WeightSyncError, deadline: Deadline) -> WeightSyncError:
        """Return what rank 0 says the first failure was; `error` when it says the same, or nothing."""
        try:
            while True:
                self.connections[0].receive(deadline, "fail")
        except WeightSyncError:
            verdict = self.connections[0].reported()
        return error if verdict is None or verdict.to_fields() == error.to_fields() else verdict

    def disconnect(self) -> None:
        """Close all connections. The next `begin` makes new ones."""
        for connection in self.connections:
            connection.close()
        self.connections.clear()
        if self.listener is not None:
            self.listener.close()
        self.listener, self._connected = None, False

    def _connect(self) -> None:
        """Connect the ranks: rank 0 says where it listens, over the default group, and the others connect."""
        alone = not dist.is_available() or not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        if self.rank == 0:
            self.listener = Listener()
        if self.size == 1:
            return
        deadline = Deadline(self.timeout_s)
        if self.listener is not None:
            name = os.environ.get("MASTER_ADDR", _LOOPBACK)
            try:
                self.host, port = self.listener.listen(name)
            except (OSError, ConfigError) as error:
                _broadcast_text(f"! {error}", deadline)
                raise PeerError(f"trainer rank 0 cannot listen at MASTER_ADDR={name}: {error}") from error
            _broadcast_text(f"{self.host} {port} {self.listener.token}", deadline)
            admitted = self.listener.admit("rank", 0, deadline, "connect", lambda: None)
            self.connections = [connection for _, connection in admitted]
            return
        text = _broadcast_text("", deadline)
        if text.startswith("!"):
            raise PeerError(f"trainer rank 0 cannot listen: {text[2:]}")
        self.host, port_text, token = text.split()
        self._address = self.host, int(port_text), token
        self.connections = [self.dial("rank", deadline)]

    def dial(self, role: str, deadline: Deadline) -> Connection:
        """Connect to rank 0, on another rank: as one of the ranks, or as a group of its own in any other role."""
        group, world = (0, self.size - 1) if role == "rank" else (self.rank, 1)
        hello = Hello(
            protocol=PROTOCOL,
            role=role,
            group=group,
            rank=self.rank,
            world=world,
            boot_id="",
            device="",
            gpu_uuid="",
            name=f"trainer rank {self.rank}",
            version=0,
            state="",
            update_open=False,
        )
        host, port, token = self._address
        return dial(host, port, token, hello, "trainer rank 0", deadline)


@contextmanager
def collective(
    ranks: Ranks,
    version: int | None = None,
    explain: Callable[[WeightSyncError], WeightSyncError] = lambda error: error,
    reset: Callable[[WeightSyncError], None] = lambda error: None,
) -> Iterator[Update]:
    """Run the body as one step of all ranks: the first failure of any rank is raised on every rank. Collective.

    After a failure `explain` returns the better cause that this rank knows. `reset` is called with the error that all
    ranks raise, and the ranks are disconnected. Neither may raise.
    """
    update = Update(ranks, ranks.timeout_s, version)
    try:
        ranks.begin(update.timeline.phase)
        yield update
    except BaseException as cause:
        if isinstance(cause, Exception):
            error = foreign(cause, who=f"trainer rank {ranks.rank}", phase=update.timeline.phase)
        else:
            error = WeightSyncError("the trainer was interrupted", phase=update.timeline.phase)
        try:
            error = ranks.agree_on(explain(error))
            reset(error)
        finally:
            ranks.disconnect()
        if error is cause or not isinstance(cause, Exception):
            raise
        raise error from cause


@contextmanager
def _hint(hint: str) -> Iterator[None]:
    """Add to a `SyncTimeoutError` of the body what may be the cause."""
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
