"""Messages over TCP, with a deadline on every wait.

Trainer rank 0 listens (`Listener`). Every engine worker and every other trainer rank connects to it (`dial`). The
socket of a peer that dies is closed, so no wait lasts longer than the peer. A wait that runs out names the peers that
have not answered.
This module knows nothing about what the messages mean.
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
from weightsync.net import timeouts
from weightsync.net.addresses import host_port, reach
from weightsync.net.authentication import SEAL_BYTES, FrameMac, authenticate
from weightsync.net.runtime import Deadline
from weightsync.net.tls import read_certificates, wrap
from weightsync.net.wire import (
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    Failure,
    Hello,
    Message,
    Ping,
    Pong,
    decode,
    encode,
    frame_length,
)

M = TypeVar("M", bound=Message)

_TRIES = 3
_MESSAGE_BYTES = 512
"""What the smallest message takes in memory while it waits."""
_MOST_WAITING = 2
"""How many of the largest messages may wait. Each is asked for, so no peer of good faith has so many under way."""
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: timeouts.KEEPALIVE_IDLE_S,
    socket.TCP_KEEPINTVL: timeouts.KEEPALIVE_INTERVAL_S,
    socket.TCP_KEEPCNT: timeouts.KEEPALIVE_PROBES,
}
"""A host that loses power closes no connection; the kernel asks after it, and gives it up after half a minute."""


class Connection:
    """One connection. Frames go out whole and come in whole.

    One thread converses. Others may call `ask`, `answer_pings`, `is_open` and `reported`.
    """

    def __init__(self, sock: socket.socket, peer: str, sent: FrameMac, received: FrameMac) -> None:
        """Take a socket on which both ends have greeted each other, and the seals of what is sent and what comes."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.peer = peer
        self.most_bytes = MAX_FRAME_BYTES
        """The largest frame that may come."""
        self.holds: Callable[[], bool] = lambda: True
        """What this end says of itself in a `Pong`."""
        self.peer_holds = True
        """What the peer has said last."""
        self._sock, self._sent, self._received = sock, sent, received
        self._buffer = bytearray()
        self._inbox: deque[Message] = deque()
        self._waiting_bytes = 0
        self._broken: ProtocolError | None = None
        """What was wrong with a frame that has come. Nothing behind it is read, by whichever thread."""
        self._reading, self._sending = threading.RLock(), threading.Lock()
        self._owes_pong = self._has_answered = False
        self._asked_at: float | None = None
        self._closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def watch_host(self, timeout_s: float) -> None:
        """Give the connection up when the peer's host is silent for `timeout_s`, or half a minute.

        The peer must read what it is sent by then. Its kernel alone answers while nothing is sent.
        """
        limit_s = min(timeouts.HOST_LOST_S, timeout_s)
        sixth_s = max(1, int(limit_s / 6))
        options = {
            socket.TCP_KEEPIDLE: 3 * sixth_s,
            socket.TCP_KEEPINTVL: sixth_s,
            socket.TCP_USER_TIMEOUT: max(1, int(1000 * limit_s)),
        }
        for option, value in options.items():
            self._sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message, deadline: Deadline, phase: str) -> None:
        """Send one message, taking in meanwhile what the peer sends: two that send at once do not block each other.
        Raises `PeerError` when the peer is gone, or what it reported before it went, and `SyncTimeoutError` when it
        does not read."""
        with self._sending:
            self._send(message, deadline, phase)
        self._pong(deadline, phase)

    def _send(self, message: Message, deadline: Deadline, phase: str) -> None:
        frame = encode(message)
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

    def receive(self, deadline: Deadline, phase: str) -> Message:
        """Return the next message.

        A `Failure` is the last message, and is raised as the error that it carries; see `send`.
        """
        while not self._inbox:
            if self._broken is not None:
                raise self._broken
            if not ready([self], select.POLLIN, deadline.left_s()):
                raise timed_out([self.peer], phase, deadline)
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
        self._pong(Deadline(timeouts.PONG_SENT_S), phase)
        return something

    def _read(self, phase: str) -> bool:
        with self._reading:
            if self._broken is not None:
                raise self._broken
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
        """Ask the peer whether it is alive, unless it owes the answer. From any thread; never raises.

        may_ask: what the thread that converses sends behind its change is not followed by a question.
        """
        if self._asked_at is None and not self._sending.locked():
            with self._sending:  # and no `acquire`: a signal might come before its `try`
                if may_ask():
                    self._asked_at = time.monotonic()
                    with suppress(WeightSyncError):  # the thread that converses will find it out
                        self._send(Ping(), Deadline(timeouts.PONG_SENT_S), "idle")

    @property
    def seconds_since_read(self) -> float:
        """For how long the peer has owed the answer to `ask`."""
        return 0.0 if (asked_at := self._asked_at) is None else time.monotonic() - asked_at

    def answer_pings(self) -> bool:
        """Answer a peer that asks whether this process is alive. From any thread; never raises.

        Return whether anything was taken in, which the thread that converses may be about to wait for.
        """
        with suppress(WeightSyncError):  # the thread that converses will find it out
            return self.read("idle")
        return True

    def _pong(self, deadline: Deadline, phase: str) -> None:
        # A thread that is in the middle of a frame answers when that is out.
        if self._owes_pong and not self._sending.locked():
            with self._sending:
                self._owes_pong = False
                self._send(Pong(self.holds()), deadline, phase)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        try:
            while len(self._buffer) >= PREFIX_BYTES:
                prefix = bytes(self._buffer[:PREFIX_BYTES])
                end = PREFIX_BYTES + frame_length(prefix, self.most_bytes)
                if len(self._buffer) < end + SEAL_BYTES:
                    break
                body = bytes(memoryview(self._buffer)[PREFIX_BYTES:end])  # a plan has no room for a copy more
                seal = bytes(self._buffer[end : end + SEAL_BYTES])
                del self._buffer[: end + SEAL_BYTES]
                if not hmac.compare_digest(self._received.of(prefix, body), seal):
                    raise ProtocolError("a frame has come that this peer has not sent, or not as the next one")
                message = decode(body)
                if isinstance(message, Ping):
                    self._owes_pong = True
                    continue
                if isinstance(message, Pong):  # which may come late, when no answer is awaited any more
                    self._has_answered, self._asked_at, self.peer_holds = True, None, message.holds
                    continue
                self._waiting_bytes = end + _MESSAGE_BYTES + (self._waiting_bytes if self._inbox else 0)
                if self._waiting_bytes > _MOST_WAITING * self.most_bytes:
                    raise ProtocolError("more messages have come than anyone has asked for")
                self._inbox.append(message)
        except ProtocolError as error:
            error.who = error.who or self.peer
            self._broken = error
            raise

    def pop(self) -> Message | None:
        """Return a message that has already been read, if any."""
        return self._inbox.popleft() if self._inbox else None

    def reported(self) -> WeightSyncError | None:
        """Return the failure that the peer has reported, if it has already been read.

        That this process was fenced off explains whatever else was reported.
        """
        causes = [from_fields(message.error) for message in tuple(self._inbox) if isinstance(message, Failure)]
        return next(
            (cause for cause in causes if isinstance(cause, FencedError)), causes[0] if causes else self._broken
        )

    @property
    def broken(self) -> ProtocolError | None:
        """Return what was wrong with a frame that has come, if so. The peer did not send it."""
        return self._broken

    def was_told(self) -> bool:
        """Return whether the peer has reported a failure that has already been read."""
        return any(isinstance(message, Failure) for message in tuple(self._inbox))

    def has_mail(self) -> bool:
        """Return whether `pop` would give a message."""
        return bool(self._inbox)

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
            self._has_answered = False
            self.send(Ping(), deadline, "idle")
            while not self._has_answered:
                if not ready([self], select.POLLIN, deadline.left_s()):
                    return False
                self.read("idle")
        except WeightSyncError:
            return False
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            hang_up(self._sock)

    def _gone(self, phase: str, error: OSError | None = None) -> WeightSyncError:
        """Return why the peer is gone.

        What it said before it went is the better cause, and may not have been read yet.
        """
        with suppress(OSError, ProtocolError), self._reading:
            while data := self._sock.recv(1 << 20):
                self._take(data)
        how = "closed its connection: it has died or given up"
        if isinstance(error, TimeoutError):
            how = "does not answer: its host, or the network to it, is down"
        return self.reported() or PeerError(f"{self.peer} {how}", who=self.peer, phase=phase)


def dial(host: str, port: int, token: str, hello: Hello, peer: str, deadline: Deadline) -> Connection:
    """Connect to the `Listener` that has this token, and say hello. Raises as `reach` and `authenticate` do."""
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
        time.sleep(timeouts.DIAL_AGAIN_S)  # a flood of strangers may have taken its place


def name_of(hello: Hello) -> str:
    """Return who has introduced itself so, for people."""
    return f"engine {hello.group} worker {hello.name}" if hello.role == "worker" else f"trainer rank {hello.rank}"


def hang_up(sock: socket.socket) -> None:
    """Close a socket though a forked child, such as a data loader's worker, may have a copy of its descriptor."""
    with suppress(OSError):  # the other end was faster
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Pollable(Protocol):
    def fileno(self) -> int: ...


def ready(sources: Collection[Pollable], events: int, wait_s: float) -> list[Pollable]:
    """Return those of `sources` that can be read or written, or are broken, within `wait_s`.

    `select` cannot look at descriptors over 1023, which a process that holds an engine has.
    """
    poll = select.poll()
    numbered = {source.fileno(): source for source in sources}
    for number in numbered:
        poll.register(number, events)
    return [numbered[number] for number, _ in poll.poll(wait_s * 1000)]


def timed_out(waiting_for: list[str], phase: str, deadline: Deadline) -> SyncTimeoutError:
    names = ", ".join(waiting_for)
    return SyncTimeoutError(
        f"no answer from {names} within {deadline.timeout_s:g} s", phase=phase, waiting_for=waiting_for
    )
