"""Messages over TCP, with a deadline on every wait.

Trainer rank 0 listens (`Listener`). Every engine worker and every other trainer rank connects to it (`dial`). The
socket of a peer that dies is closed, so no wait lasts longer than the peer. A wait that runs out names the peers that
have not answered.
This module knows nothing about what the messages mean.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol, TypeVar

from weightsync.control.runtime import Deadline, address_facing
from weightsync.control.wire import (
    PREFIX_BYTES,
    PROTOCOL,
    Failure,
    Hello,
    Message,
    Ping,
    Pong,
    Release,
    decode,
    encode,
    frame_length,
)
from weightsync.errors import FencedError, PeerError, ProtocolError, SyncTimeoutError, WeightSyncError, from_fields

M = TypeVar("M", bound=Message)

_REPLICAS = (
    "The replicas of a dense model under data parallelism do not know of each other: give each one's own address as an "
    "engine of its own"
)
_TURN_S = 0.5
"""How long the hub sleeps at most before it looks again at what no socket tells it."""
_HELLO_BYTES = 1 << 16
"""How much a newcomer may send before its `Hello` is complete; strangers fill no memory."""
_PONG_S = 1.0
_KEEPALIVE_S = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A host that loses power closes no connection; the kernel asks after it, and gives it up after half a minute."""


class Connection:
    """One connection. Frames go out whole and come in whole. One thread converses; others may call `answer_pings`."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE_S.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.peer = peer
        self._sock = sock
        self._buffer = bytearray()
        self._inbox: deque[Message] = deque()
        self._reading, self._sending = threading.RLock(), threading.Lock()
        self._owes_pong = False
        self._closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, deadline: Deadline, phase: str) -> None:
        """Send one message, taking in meanwhile what the peer sends: two that send at once do not block each other.
        Raises `PeerError` when the peer is gone, or what it reported before it went, and `SyncTimeoutError` when it
        does not read."""
        with self._sending:
            self._send(message, deadline, phase)
        self._pong(deadline, phase)

    def _send(self, message: Message, deadline: Deadline, phase: str) -> None:
        view = memoryview(encode(message))
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                if not _ready([self], select.POLLIN | select.POLLOUT, deadline.left_s()):
                    raise _timeout([self.peer], phase, deadline) from None
                self._read(phase)
            except OSError as error:
                raise self._gone(phase) from error

    def receive(self, deadline: Deadline, phase: str) -> Message:
        """Return the next message.

        A `Failure` is the last message, and is raised as the error that it carries; see `send`.
        """
        while not self._inbox:
            if not _ready([self], select.POLLIN, deadline.left_s()):
                raise _timeout([self.peer], phase, deadline)
            self.read(phase)
        if isinstance(self._inbox[0], Failure):
            raise self.reported() or from_fields(self._inbox[0].error)
        return self._inbox.popleft()

    def expect(self, kind: type[M], deadline: Deadline, phase: str) -> M:
        """Return the next message, which must be a `kind`. Raises `ProtocolError` for any other."""
        message = self.receive(deadline, phase)
        if not isinstance(message, kind):
            raise ProtocolError(f"{self.peer} sent {type(message).__name__}, expected {kind.__name__}", phase=phase)
        return message

    def check(self, phase: str, wait_s: float = 0.0) -> None:
        """Look for bad news without consuming any message: raises what the peer reported or that it is gone. For
        loops that wait for something else; this call sleeps for `wait_s` before it looks."""
        if wait_s:
            time.sleep(wait_s)
        self.read(phase)
        if (error := self.reported()) is not None:
            raise error

    def read(self, phase: str) -> bool:
        """Take in what has arrived, without waiting; False where nothing had. Raises `PeerError` when the peer has
        closed, or what it reported before it went; `ProtocolError` when what arrived is no message."""
        something = self._read(phase)
        self._pong(Deadline(_PONG_S), phase)
        return something

    def _read(self, phase: str) -> bool:
        with self._reading:
            try:
                data = self._sock.recv(1 << 20)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._gone(phase) from error
            if not data:
                raise self._gone(phase)
            self._take(data)
            return True

    def answer_pings(self) -> None:
        """Answer a peer that asks whether this process is alive. From any thread; never raises."""
        with suppress(WeightSyncError):  # the thread that converses will find it out
            self.read("idle")

    def _pong(self, deadline: Deadline, phase: str) -> None:
        # A thread that is in the middle of a frame answers when that is out.
        if self._owes_pong and self._sending.acquire(blocking=False):
            try:
                self._owes_pong = False
                self._send(Pong(), deadline, phase)
            finally:
                self._sending.release()

    def _take(self, data: bytes) -> None:
        self._buffer += data
        try:
            while len(self._buffer) >= PREFIX_BYTES:
                end = PREFIX_BYTES + frame_length(bytes(self._buffer[:PREFIX_BYTES]))
                if len(self._buffer) < end:
                    break
                message = decode(bytes(self._buffer[PREFIX_BYTES:end]))
                del self._buffer[:end]
                if isinstance(message, Ping):
                    self._owes_pong = True
                else:
                    self._inbox.append(message)
        except ProtocolError as error:
            error.who = error.who or self.peer
            raise

    def pop(self) -> Message | None:
        """Return a message that has already been read, if any."""
        return self._inbox.popleft() if self._inbox else None

    def reported(self) -> WeightSyncError | None:
        """Return the failure that the peer has reported, if it has already been read.

        That this process was fenced off explains whatever else was reported.
        """
        causes = [from_fields(message.error) for message in tuple(self._inbox) if isinstance(message, Failure)]
        return next((cause for cause in causes if isinstance(cause, FencedError)), causes[0] if causes else None)

    def has_mail(self) -> bool:
        """Return whether `pop` would give a message."""
        return bool(self._inbox)

    def unread(self) -> int:
        """Return how many bytes have come of a message that has not arrived whole."""
        return len(self._buffer)

    def is_open(self) -> bool:
        """Return whether the peer still holds its end, as far as can be known without waiting."""
        if self._closed:
            return False
        try:
            while self.read("idle"):
                pass  # that it has gone comes behind all that it has said
        except WeightSyncError:
            return False
        return True

    def answers(self, timeout_s: float) -> bool:
        """Return whether the peer's process is there and runs, which it says within `timeout_s`."""
        deadline = Deadline(timeout_s)
        try:
            self.send(Ping(), deadline, "idle")
            while not any(isinstance(message, Pong) for message in self._inbox):
                if not _ready([self], select.POLLIN, deadline.left_s()):
                    return False
                self.read("idle")
        except WeightSyncError:
            return False
        self._inbox = deque(message for message in self._inbox if not isinstance(message, Pong))
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _hang_up(self._sock)

    def _gone(self, phase: str) -> WeightSyncError:
        """Return why the peer is gone.

        What it said before it went is the better cause, and may not have been read yet.
        """
        with suppress(OSError, ProtocolError), self._reading:
            while data := self._sock.recv(1 << 20):
                self._take(data)
        return self.reported() or PeerError(
            f"{self.peer} closed its connection: it has died or given up", who=self.peer, phase=phase
        )


def dial(host: str, port: int, hello: Hello, peer: str, deadline: Deadline) -> Connection:
    """Connect to a `Listener` and introduce yourself."""
    phase = "connect"
    try:
        sock = socket.create_connection((host, port), timeout=max(deadline.left_s(), 0.001))
    except OSError as error:
        raise PeerError(f"cannot reach {peer} at {host}:{port}: {error}", phase=phase) from error
    connection = Connection(sock, peer)
    try:
        connection.send(hello, deadline, phase)
    except BaseException:
        connection.close()
        raise
    return connection


class Listener:
    """Where trainer rank 0 listens. Peers introduce themselves with a `Hello` that carries this hub's token."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(32)
        self.listening: dict[str, tuple[str, int]] = {}
        self._listeners: list[socket.socket] = []
        self._admitted: set[tuple[str, int]] = set()
        self._arrived: dict[tuple[str, int, int], tuple[Hello, Connection]] = {}
        self._waiting_room: list[Connection] = []
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)

    def listen(self, host: str) -> tuple[str, int]:
        """Listen on the interface from which `host` is reached, once per interface; gives (address, port)."""
        address = address_facing(host)
        if address not in self.listening:
            listener = socket.create_server((address, 0))
            listener.setblocking(False)
            self._listeners.append(listener)
            self.listening[address] = (address, listener.getsockname()[1])
        return self.listening[address]

    def expect(self, role: str) -> None:
        """Admit peers of this role anew, though others of the same numbers have come before."""
        self._admitted = {key for key in self._admitted if key[0] != role}

    def wake(self) -> None:
        """Make a running `admit` or `collect` look at its `check` again; for other threads."""
        self._wake_in.send(b"x")

    def admit(
        self, role: str, group: int, deadline: Deadline, phase: str, check: Callable[[], None]
    ) -> list[tuple[Hello, Connection]]:
        """Wait for every peer of a group, in rank order; they say themselves how many they are. `check` is called at
        every turn and may raise. Whatever is raised here is told to those who have come."""
        try:
            return self._admit(role, group, deadline, phase, check)
        except WeightSyncError as error:
            for _, connection in self._arrived.values():
                with suppress(WeightSyncError):
                    connection.send(Failure(error.to_fields()), Deadline(1.0), phase)
                connection.close()
            self._arrived.clear()
            raise

    def _admit(
        self, role: str, group: int, deadline: Deadline, phase: str, check: Callable[[], None]
    ) -> list[tuple[Hello, Connection]]:
        kind = f"workers of engine {group}" if role == "worker" else "trainer ranks"
        while True:
            present = sorted(key for key in self._arrived if key[:2] == (role, group))
            worlds = {self._arrived[key][0].world for key in present}
            if len(worlds) > 1:
                said = ", ".join(f"number {key[2]} of {self._arrived[key][0].world}" for key in present)
                raise ProtocolError(f"the {kind} do not agree on how many they are: they say {said}", phase=phase)
            if role == "worker" and present and max(key[2] for key in present) >= max(worlds):
                raise ProtocolError(f"{kind}: number {present[-1][2]} of {max(worlds)} came. {_REPLICAS}", phase=phase)
            if present and {len(present)} == worlds:
                self._admitted.add((role, group))
                return [self._arrived.pop(key) for key in present]
            check()
            self._turn([], deadline)
            if deadline.passed():
                known = f"{len(present)} of {worlds.pop() if worlds else 'unknown'}"
                where = ", ".join(f"{host}:{port}" for host, port in self.listening.values())
                raise _timeout([f"{kind} ({known} have connected to {where})"], phase, deadline)

    def collect(
        self,
        peers: Collection[Connection],
        kind: type[M],
        deadline: Deadline,
        phase: str,
        check: Callable[[], None] | None = None,
    ) -> list[M]:
        """One message of `kind` from each of `peers`, in their order. The first `Failure`, or the first peer that
        goes away, is raised at once; so is what `check`, called at every turn, raises."""
        answers: dict[Connection, M] = {}
        watched = list(peers)
        while True:
            for connection in peers:
                if (error := connection.reported()) is not None:
                    raise error
                if connection not in answers and (message := connection.pop()) is not None:
                    if not isinstance(message, kind):
                        raise ProtocolError(
                            f"{connection.peer} sent {type(message).__name__}, expected {kind.__name__}", phase=phase
                        )
                    answers[connection] = message
            owing = [connection for connection in peers if connection not in answers]
            if not owing:
                return [answers[connection] for connection in peers]
            if deadline.passed():
                raise _timeout([connection.peer for connection in owing], phase, deadline)
            if check is not None:
                check()
            for connection in self._turn(watched, deadline):
                try:
                    connection.read(phase)
                except PeerError:
                    if connection not in owing or not connection.has_mail():
                        raise
                    watched.remove(connection)  # what it said before it went may be all that is owed

    def _turn(self, connections: list[Connection], deadline: Deadline) -> list[Connection]:
        """Wait until something can be read or `wake` is called; introduce newcomers; give the readable channels."""
        everyone: list[_Source] = [*connections, *self._listeners, *self._waiting_room, self._wake_out]
        readable = _ready(everyone, select.POLLIN, min(deadline.left_s(), _TURN_S))
        if self._wake_out in readable:
            self._wake_out.recv(4096)
        for newcomer in [connection for connection in self._waiting_room if connection in readable]:
            self._introduce(newcomer)
        for listener in [listener for listener in self._listeners if listener in readable]:
            with suppress(BlockingIOError, ConnectionError):  # the newcomer has gone again
                sock, address = listener.accept()
                self._waiting_room.append(Connection(sock, f"{address[0]}:{address[1]}"))
        return [connection for connection in connections if connection in readable]

    def _introduce(self, connection: Connection) -> None:
        """Read a newcomer's `Hello`.

        A newcomer that does not know the token is turned away without an answer. One that knows the token and cannot
        take part is told why, and the reason is raised.
        """
        try:
            connection.read("connect")
            hello = connection.pop()
        except WeightSyncError:
            hello = Release()
        if hello is None and connection.unread() <= _HELLO_BYTES:
            return
        self._waiting_room.remove(connection)
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self.token):
            connection.close()
            return
        refusal = None
        if hello.protocol != PROTOCOL:
            refusal = (
                f"the trainer speaks wire protocol {PROTOCOL} and {hello.name} speaks {hello.protocol}: install the "
                "same weightsync on both sides"
            )
        elif (hello.role, hello.group) in self._admitted:
            refusal = f"{hello.role} {hello.name} of group {hello.group} came after all had come. {_REPLICAS}"
        elif (hello.role, hello.group, hello.rank) in self._arrived:
            refusal = f"a second {hello.role} says that it is number {hello.rank} of group {hello.group}: {hello.name}"
        if refusal is not None:
            error = ProtocolError(refusal, phase="connect")
            with suppress(WeightSyncError):
                connection.send(Failure(error.to_fields()), Deadline(1.0), "connect")
            connection.close()
            raise error
        connection.peer = (
            f"engine {hello.group} worker {hello.name}" if hello.role == "worker" else f"trainer rank {hello.rank}"
        )
        self._arrived[hello.role, hello.group, hello.rank] = (hello, connection)

    def close(self) -> None:
        for listener in self._listeners:
            _hang_up(listener)
        for connection in (*self._waiting_room, *(connection for _, connection in self._arrived.values())):
            connection.close()
        self._listeners.clear()
        self._waiting_room.clear()
        self._arrived.clear()
        self._wake_in.close()
        self._wake_out.close()


def _hang_up(sock: socket.socket) -> None:
    """Close a socket though a forked child, such as a data loader's worker, may have a copy of its descriptor."""
    with suppress(OSError):  # the other end was faster
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class _Source(Protocol):
    def fileno(self) -> int: ...


def _ready(sources: Collection[_Source], events: int, wait_s: float) -> list[_Source]:
    """Return those of `sources` that can be read or written, or are broken, within `wait_s`.

    `select` cannot look at descriptors over 1023, which a process that holds an engine has.
    """
    poll = select.poll()
    numbered = {source.fileno(): source for source in sources}
    for number in numbered:
        poll.register(number, events)
    return [numbered[number] for number, _ in poll.poll(wait_s * 1000)]


def _timeout(waiting_for: list[str], phase: str, deadline: Deadline) -> SyncTimeoutError:
    names = ", ".join(waiting_for)
    return SyncTimeoutError(
        f"no answer from {names} within {deadline.timeout_s:g} s", phase=phase, waiting_for=waiting_for
    )
