"""Messages over TCP, with a deadline on every wait.

Trainer rank 0 listens (`Listener`). Engine workers and the other trainer ranks connect to it (`dial`). If no worker can
dial it, rank 0 dials the workers. The kernel closes the socket of a peer that dies, so every wait for this peer
ends at once. The error of a timeout names the peers that have not answered.
This module knows nothing about the meaning of messages.
"""

from __future__ import annotations

import hmac
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol, TypeVar

from weightsync.errors import FencedError, PeerError, ProtocolError, SyncTimeoutError, WeightSyncError, from_fields
from weightsync.net import timeouts, wire
from weightsync.net.addresses import host_port, reach
from weightsync.net.authentication import SEAL_BYTES, FrameMac, authenticate
from weightsync.net.runtime import Deadline
from weightsync.net.tls import read_certificates, wrap

M = TypeVar("M", bound=wire.Message)

_TRIES = 3
_MESSAGE_BYTES = 512
"""Memory of the smallest message in the inbox."""
_MOST_WAITING = 2
"""Size of the inbox, in messages of the largest size. Messages answer requests, so an honest peer sends fewer."""


class Connection:
    """One connection to a peer. Frames are sent and received whole.

    One thread, the owner, sends and receives messages. Other threads may call `ask`, `answer_pings`, `is_open`,
    `has_failure`, `has_ended` and `reported`.
    """

    def __init__(self, sock: socket.socket, peer: str, sent: FrameMac, received: FrameMac) -> None:
        """Take an authenticated socket, and the seals of sent and of received frames."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that loses power closes no connection. With keepalive the kernel gives it up after half a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, timeouts.KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timeouts.KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, timeouts.KEEPALIVE_PROBES)
        self.peer = peer
        self.most_bytes = wire.MAX_FRAME_BYTES
        """Size of the largest frame that the peer may send."""
        self.dialled: tuple[str, int] | None = None
        """Address and port at which trainer rank 0 has dialled a worker. None: the worker has dialled."""
        self.holds: Callable[[], bool] = lambda: True
        """The value of `holds` in this end's `Pong`."""
        self.peer_holds = True
        """`holds` in the peer's last `Pong`."""
        self._sock, self._sent, self._received = sock, sent, received
        self._buffer = bytearray()
        self._inbox: deque[wire.Message] = deque()
        self._waiting_bytes = 0
        self.broken: ProtocolError | None = None
        """The first invalid frame's error. After it no thread reads this socket. An honest peer sends none."""
        self._reading, self._sending = threading.RLock(), threading.Lock()
        self._owes_pong = self._has_answered = False
        self._asked_at: float | None = None
        self._closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def peer_address(self) -> str:
        """The address of the other end. Raises `OSError` when the connection has broken."""
        return str(self._sock.getpeername()[0])

    def watch_host(self, timeout_s: float) -> None:
        """Give the connection up when the peer's host is silent for `timeout_s`, or for half a minute if that is less.

        The peer must read all sent data by then. Without unread data its kernel alone answers, to keepalive.
        """
        limit_s = min(timeouts.HOST_LOST_S, timeout_s)
        sixth_s = max(1, int(limit_s / 6))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3 * sixth_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, sixth_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * limit_s)))

    def send(self, message: wire.Message, deadline: Deadline, phase: str) -> None:
        """Send one message.

        While the socket's buffer is full this reads from the peer: two ends that send at once would otherwise block
        each other. Raises `SyncTimeoutError` when the peer does not read. When the peer is gone, raises the error that
        it reported, or `PeerError`.
        """
        with self._sending:
            self._send(message, deadline, phase)
        self._pong(deadline, phase)

    def try_send(self, message: wire.Message, deadline: Deadline, phase: str) -> None:
        """Send one message, or nothing if the peer is gone or does not read. Never raises."""
        with suppress(WeightSyncError):
            self.send(message, deadline, phase)

    def _send(self, message: wire.Message, deadline: Deadline, phase: str) -> None:
        frame = wire.encode(message)
        view = memoryview(frame + self._sent.of(frame))
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                if not ready([self], select.POLLIN | select.POLLOUT, deadline.left_s()):
                    raise timed_out([self.peer], phase, deadline) from None
                self._read(phase)
            except OSError as error:
                raise self._gone(phase, error) from error

    def receive(self, deadline: Deadline, phase: str) -> wire.Message:
        """Return the next message.

        Raises the error of a `Failure`, always a peer's last message. Raises also as `send` does.
        """
        while not self._inbox:
            if self.broken is not None:
                raise self.broken
            if not ready([self], select.POLLIN, deadline.left_s()):
                raise timed_out([self.peer], phase, deadline)
            self.read(phase)
        if isinstance(self._inbox[0], wire.Failure):
            raise self.reported() or from_fields(self._inbox[0].error)
        return self._inbox.popleft()

    def expect(self, kind: type[M], deadline: Deadline, phase: str) -> M:
        """Return the next message, which must be a `kind`. Raises `ProtocolError` for another kind."""
        message = self.receive(deadline, phase)
        if not isinstance(message, kind):
            raise ProtocolError(f"{self.peer} sent {type(message).__name__}, expected {kind.__name__}", phase=phase)
        return message

    def check(self, phase: str, wait_s: float = 0.0) -> None:
        """Raise the error that the peer has reported, or `PeerError` when it is gone. Consume no message.

        For loops that wait for something else. The call sleeps for `wait_s` first.
        """
        if wait_s:
            time.sleep(wait_s)
        while self.read(phase):
            pass  # EOF arrives after the peer's last message
        if (error := self.reported()) is not None:
            raise error

    def read(self, phase: str) -> bool:
        """Read arrived bytes without waiting. Return whether there were any.

        Raises `ProtocolError` for an invalid frame. When the peer has closed, raises the error that it reported, or
        `PeerError`.
        """
        something = self._read(phase)
        self._pong(Deadline(timeouts.PONG_SENT_S), phase)
        return something

    def _read(self, phase: str) -> bool:
        with self._reading:
            if self.broken is not None:
                raise self.broken
            try:
                data = self._sock.recv(min(1 << 20, self.most_bytes))
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._gone(phase, error) from error
            if not data:
                raise self._gone(phase)
            self._take(data)
            return True

    def ask(self, may_ask: Callable[[], bool]) -> None:
        """Send a `Ping`, unless the peer owes a `Pong`. From any thread. Never raises.

        may_ask: called under the send lock. False: send no `Ping`. So none follows a message that the owner sends after
        it has made `may_ask` false.
        """
        if self._asked_at is None and not self._sending.locked():
            with self._sending:  # not `acquire` and `try`: a signal between the two would leave the lock held
                if may_ask():
                    self._asked_at = time.monotonic()
                    with suppress(WeightSyncError):  # the owner's next call raises it
                        self._send(wire.Ping(), Deadline(timeouts.PONG_SENT_S), "idle")

    @property
    def ping_unanswered_s(self) -> float:
        """Seconds since the unanswered `Ping` of `ask`, 0.0 when there is none."""
        return 0.0 if (asked_at := self._asked_at) is None else time.monotonic() - asked_at

    def answer_pings(self) -> bool:
        """Read arrived bytes, and answer the peer's `Ping`. From any thread. Never raises.

        Returns whether anything was read or has failed. The owner must then be woken: its `poll` no longer sees these
        bytes.
        """
        with suppress(WeightSyncError):  # the owner's next call raises it
            return self.read("idle")
        return True

    def _pong(self, deadline: Deadline, phase: str) -> None:
        # A thread that is sending a frame holds the lock, and answers after the frame.
        if self._owes_pong and not self._sending.locked():
            with self._sending:
                self._owes_pong = False
                self._send(wire.Pong(self.holds()), deadline, phase)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        try:
            while len(self._buffer) >= wire.PREFIX_BYTES:
                prefix = bytes(self._buffer[: wire.PREFIX_BYTES])
                end = wire.PREFIX_BYTES + wire.frame_length(prefix, self.most_bytes)
                if len(self._buffer) < end + SEAL_BYTES:
                    break
                body = bytes(memoryview(self._buffer)[wire.PREFIX_BYTES : end])  # one copy, since plans are large
                seal = bytes(self._buffer[end : end + SEAL_BYTES])
                del self._buffer[: end + SEAL_BYTES]
                if not hmac.compare_digest(self._received.of(prefix, body), seal):
                    raise ProtocolError("a frame has a wrong seal: it is forged, or not the peer's next frame")
                message = wire.decode(body)
                if isinstance(message, wire.Ping):
                    self._owes_pong = True
                    continue
                if isinstance(message, wire.Pong):  # it may be late: no thread waits for it any more
                    self._has_answered, self._asked_at, self.peer_holds = True, None, message.holds
                    continue
                self._waiting_bytes = end + _MESSAGE_BYTES + (self._waiting_bytes if self._inbox else 0)
                if self._waiting_bytes > _MOST_WAITING * self.most_bytes:
                    raise ProtocolError("the peer has sent more messages than this process has requested")
                self._inbox.append(message)
        except ProtocolError as error:
            error.who = error.who or self.peer
            self.broken = error
            raise

    def pop(self) -> wire.Message | None:
        """Return the next message in the inbox, or None. Does not read the socket."""
        return self._inbox.popleft() if self._inbox else None

    def reported(self) -> WeightSyncError | None:
        """Return the error of a `Failure` in the inbox, or else of an invalid frame, if any. Does not read the socket.

        A `FencedError` comes first, since it is the cause of any other failure.
        """
        causes = [from_fields(message.error) for message in tuple(self._inbox) if isinstance(message, wire.Failure)]
        return next((cause for cause in causes if isinstance(cause, FencedError)), causes[0] if causes else self.broken)

    def has_failure(self) -> bool:
        """Return whether the inbox has a `Failure`."""
        return any(isinstance(message, wire.Failure) for message in tuple(self._inbox))

    def has_mail(self) -> bool:
        """Return whether the inbox has a message."""
        return bool(self._inbox)

    def is_open(self) -> bool:
        """Return whether both ends are open, as far as can be known without waiting."""
        if self._closed:
            return False
        try:
            while self.read("idle"):
                pass  # EOF arrives after the peer's last message
        except WeightSyncError:
            return False
        return True

    def answers(self, timeout_s: float) -> bool:
        """Return whether the peer's process answers a `Ping` within `timeout_s`."""
        deadline = Deadline(timeout_s)
        try:
            self._has_answered = False
            self.send(wire.Ping(), deadline, "idle")
            while not self._has_answered:
                if not ready([self], select.POLLIN, deadline.left_s()):
                    return False
                self.read("idle")
        except WeightSyncError:
            return False
        return True

    def finish(self, message: wire.Message, deadline: Deadline, phase: str) -> None:
        """Send the last message, and EOF behind it. The peer may still send. Never raises."""
        self.try_send(message, deadline, phase)
        with suppress(OSError):  # the peer is gone
            # Not TLS's own shutdown: it takes the connection's state away from a reading thread.
            socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def has_ended(self, wait_s: float) -> bool:
        """Wait for at most `wait_s` until one end has hung up. Return whether it has. Reads nothing."""
        with suppress(ValueError):  # this end has closed its socket
            return bool(ready([self], select.POLLRDHUP, wait_s))
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            hang_up(self._sock)

    def detach(self) -> socket.socket:
        """Return the authenticated socket, in blocking mode, for bytes without frames. Closes this object.

        Raises `ProtocolError` when the peer has sent more than the messages read so far.
        """
        if self._buffer or self._inbox:
            raise ProtocolError(f"{self.peer} has sent more than was expected", who=self.peer)
        self._closed = True
        self._sock.setblocking(True)
        return self._sock

    def _gone(self, phase: str, error: OSError | None = None) -> WeightSyncError:
        """Return the error that the peer reported, or else a `PeerError`.

        Reads the rest of the socket first: a `Failure` that names the cause may be there.
        """
        with suppress(OSError, ProtocolError), self._reading:
            while data := self._sock.recv(1 << 20):
                self._take(data)
        how = "closed its connection: it has died or given up"
        if isinstance(error, TimeoutError):
            how = "does not answer: its host, or the network to it, is down"
        return self.reported() or PeerError(f"{self.peer} {how}", who=self.peer, phase=phase)


def dial(host: str, port: int, token: str, hello: wire.Hello, peer: str, deadline: Deadline) -> Connection:
    """Connect to the `Listener` of this token, and send `hello`. Raises as `reach` and `authenticate` do."""
    limit = Deadline(min(deadline.left_s(), timeouts.GREETING_S))
    certificates = read_certificates(is_listener=False)
    tries = 0
    while True:
        sock = wrap(reach(host, port, name_of(hello), peer, limit), certificates, is_listener=False)
        try:
            connection = Connection(sock, peer, *authenticate(sock, token, f"{peer} at {host_port(host, port)}", limit))
            connection.send(hello, limit, "connect")
            return connection
        except BaseException as error:
            hang_up(sock)
            tries += 1
            if not isinstance(error, PeerError) or tries == _TRIES or limit.passed():
                raise
        time.sleep(timeouts.DIAL_AGAIN_S)  # in a flood of connections the listener may have dropped this one


def name_of(hello: wire.Hello) -> str:
    """Return the peer's name for people, from its `Hello`."""
    if hello.role == "worker":
        return f"engine {hello.group} worker {hello.name}"
    return f"{'member' if hello.role in ('member', 'link') else 'trainer rank'} {hello.rank}"


def hang_up(sock: socket.socket) -> None:
    """Shut a socket down and close it.

    `close` alone sends no EOF while a forked child, such as a data loader's worker, has a copy of the descriptor.
    """
    with suppress(OSError):  # the other end has closed first
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Pollable(Protocol):
    def fileno(self) -> int: ...


def ready(sources: Collection[Pollable], events: int, wait_s: float) -> list[Pollable]:
    """Wait for `events` for at most `wait_s`. Return the sources that have any, or are broken.

    Uses `poll`: `select` takes no descriptor over 1023, and a process with an engine has such descriptors.
    """
    poll = select.poll()
    numbered = {source.fileno(): source for source in sources}
    for number in numbered:
        poll.register(number, events)
    return [numbered[number] for number, _ in poll.poll(wait_s * 1000)]


def timed_out(waiting_for: list[str], phase: str, deadline: Deadline) -> SyncTimeoutError:
    return deadline.expired(f"no answer from {', '.join(waiting_for)}", phase, waiting_for)
