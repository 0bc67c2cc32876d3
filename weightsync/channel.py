"""Messages over TCP, with a deadline on every wait.

Trainer rank 0 listens (`Hub`); every engine worker and every other trainer rank connects to it (`dial`). A peer that
dies closes its socket, so nobody waits for the dead, and a wait that runs out says who was still owed an answer.
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
from typing import TypeVar

from weightsync.errors import PeerError, ProtocolError, SyncTimeoutError, WeightSyncError, from_fields
from weightsync.wire import PREFIX_BYTES, PROTOCOL, Failure, Hello, Message, decode, encode, frame_length

M = TypeVar("M", bound=Message)

_TURN_S = 0.5
"""How long the hub sleeps at most before it looks again at what no socket tells it."""


class Deadline:
    """A moment in the future. `Deadline(30.0)` is 30 seconds from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._end


class Channel:
    """One connection. Frames go out whole and come in whole; not safe for use by two threads at once."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._sock = sock
        self._buffer = bytearray()
        self._inbox: deque[Message] = deque()
        self._closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, deadline: Deadline, phase: str) -> None:
        """Send one message. Raises `PeerError` when the peer is gone, `SyncTimeoutError` when it does not read."""
        view = memoryview(encode(message))
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                if not select.select([], [self._sock], [], deadline.left_s())[1]:
                    raise _timeout([self.peer], phase, deadline) from None
            except OSError as error:
                raise self._gone(phase) from error

    def receive(self, deadline: Deadline, phase: str) -> Message:
        """The next message. A `Failure` is raised as the error that it carries; see also `send`."""
        while not self._inbox:
            if not select.select([self._sock], [], [], deadline.left_s())[0]:
                raise _timeout([self.peer], phase, deadline)
            self.read(phase)
        message = self._inbox.popleft()
        if isinstance(message, Failure):
            raise from_fields(message.error)
        return message

    def expect(self, kind: type[M], deadline: Deadline, phase: str) -> M:
        """The next message, which must be a `kind`: anything else is a `ProtocolError`."""
        message = self.receive(deadline, phase)
        if not isinstance(message, kind):
            raise ProtocolError(f"{self.peer} sent {type(message).__name__}, expected {kind.__name__}", phase=phase)
        return message

    def check(self, phase: str, wait_s: float = 0.0) -> None:
        """Look for bad news without consuming any message: raises what the peer reported or that it is gone. For
        loops that wait for something else; `wait_s` is how long this call may sleep while it looks."""
        if select.select([self._sock], [], [], wait_s)[0]:
            self.read(phase)
        for message in self._inbox:
            if isinstance(message, Failure):
                raise from_fields(message.error)

    def read(self, phase: str) -> None:
        """Take in what has arrived, without waiting. Raises `PeerError` when the peer has closed."""
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone(phase) from error
        if not data:
            raise self._gone(phase)
        self._buffer += data
        while len(self._buffer) >= PREFIX_BYTES:
            end = PREFIX_BYTES + frame_length(self._buffer[:PREFIX_BYTES])
            if len(self._buffer) < end:
                break
            self._inbox.append(decode(bytes(self._buffer[PREFIX_BYTES:end])))
            del self._buffer[:end]

    def pop(self) -> Message | None:
        """A message that has already been read, if any."""
        return self._inbox.popleft() if self._inbox else None

    def is_open(self) -> bool:
        """Whether the peer still holds its end, as far as can be known without waiting."""
        if self._closed:
            return False
        try:
            self.check("idle")
        except PeerError:
            return False
        except WeightSyncError:
            pass
        return True

    def own_host(self) -> str:
        """This end's address."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sock.close()

    def _gone(self, phase: str) -> PeerError:
        return PeerError(f"{self.peer} closed its connection: it has died or given up", who=self.peer, phase=phase)


def dial(host: str, port: int, hello: Hello, peer: str, deadline: Deadline) -> Channel:
    """Connect to a `Hub` and introduce yourself."""
    phase = "connect"
    try:
        sock = socket.create_connection((host, port), timeout=max(deadline.left_s(), 0.001))
    except OSError as error:
        raise PeerError(f"cannot reach {peer} at {host}:{port}: {error}", phase=phase) from error
    channel = Channel(sock, peer)
    channel.send(hello, deadline, phase)
    return channel


class Hub:
    """Where trainer rank 0 listens. Peers introduce themselves with a `Hello` that carries this hub's token."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(32)
        self.listening: dict[str, tuple[str, int]] = {}
        self._listeners: list[socket.socket] = []
        self._arrived: dict[tuple[str, int, int], tuple[Hello, Channel]] = {}
        self._waiting_room: list[Channel] = []
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)

    def listen(self, host: str) -> tuple[str, int]:
        """Listen on the interface from which `host` is reached, once per interface; gives (address, port)."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only asks the routing table
            address = probe.getsockname()[0]
        if address not in self.listening:
            listener = socket.create_server((address, 0))
            listener.setblocking(False)
            self._listeners.append(listener)
            self.listening[address] = (address, listener.getsockname()[1])
        return self.listening[address]

    def wake(self) -> None:
        """Make a running `admit` or `collect` look at its `check` again; for other threads."""
        self._wake_in.send(b"x")

    def admit(
        self, role: str, group: int, deadline: Deadline, phase: str, check: Callable[[], None]
    ) -> list[tuple[Hello, Channel]]:
        """Wait for every peer of a group, in rank order. The first to arrive says how many there are. `check` is
        called at every turn and may raise."""
        while True:
            present = sorted((key, value) for key, value in self._arrived.items() if key[:2] == (role, group))
            world = present[0][1][0].world if present else None
            if world is not None and len(present) == world:
                for key, _ in present:
                    del self._arrived[key]
                return [value for _, value in present]
            check()
            self._turn([], deadline)
            if deadline.passed():
                kind = f"{'workers of engine ' + str(group) if role == 'worker' else 'trainer ranks'}"
                raise _timeout([f"{kind} ({len(present)} of {world or 'unknown'} have connected)"], phase, deadline)

    def collect(
        self,
        peers: Collection[Channel],
        kind: type[M],
        deadline: Deadline,
        phase: str,
        check: Callable[[], None] | None = None,
    ) -> list[M]:
        """One message of `kind` from each of `peers`, in their order. The first `Failure`, or the first peer that
        goes away, is raised at once."""
        answers: dict[Channel, M] = {}
        while True:
            for channel in peers:
                if channel not in answers and (message := channel.pop()) is not None:
                    if isinstance(message, Failure):
                        raise from_fields(message.error)
                    if not isinstance(message, kind):
                        raise ProtocolError(
                            f"{channel.peer} sent {type(message).__name__}, expected {kind.__name__}", phase=phase
                        )
                    answers[channel] = message
            owing = [channel for channel in peers if channel not in answers]
            if not owing:
                return [answers[channel] for channel in peers]
            if deadline.passed():
                raise _timeout([channel.peer for channel in owing], phase, deadline)
            if check is not None:
                check()
            for channel in self._turn(list(peers), deadline):
                try:
                    channel.read(phase)
                except PeerError:
                    # What it said before it went is the better cause; only silence is reported as its going.
                    if channel in owing and not channel._inbox:
                        raise

    def _turn(self, channels: list[Channel], deadline: Deadline) -> list[Channel]:
        """Wait until something can be read or `wake` is called; introduce newcomers; give the readable channels."""
        everyone = [*channels, *self._listeners, *self._waiting_room, self._wake_out]
        readable = select.select(everyone, [], [], min(deadline.left_s(), _TURN_S))[0]
        for source in readable:
            if source is self._wake_out:
                self._wake_out.recv(4096)
            elif source in self._listeners:
                sock, address = source.accept()
                self._waiting_room.append(Channel(sock, f"{address[0]}:{address[1]}"))
            elif source in self._waiting_room:
                self._introduce(source)
        return [channel for channel in channels if channel in readable]

    def _introduce(self, channel: Channel) -> None:
        """Read a newcomer's `Hello`. Whoever does not know the token is turned away without an answer."""
        try:
            channel.read("connect")
            hello = channel.pop()
        except WeightSyncError:
            hello = Failure()
        if hello is None:
            return
        self._waiting_room.remove(channel)
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token, self.token):
            channel.close()
            return
        if hello.protocol != PROTOCOL:
            error = ProtocolError(
                f"the trainer speaks wire protocol {PROTOCOL} and {hello.name} speaks {hello.protocol}: install the "
                "same weightsync on both sides"
            )
            channel.send(Failure(error.to_fields()), Deadline(1.0), "connect")
            channel.close()
            return
        channel.peer = (
            f"engine {hello.group} worker {hello.name}" if hello.role == "worker" else f"trainer rank {hello.rank}"
        )
        self._arrived[hello.role, hello.group, hello.rank] = (hello, channel)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for channel in self._waiting_room:
            channel.close()
        self._listeners.clear()
        self._wake_in.close()
        self._wake_out.close()


class Call(threading.Thread):
    """An engine call that runs beside the conversation with the engine's workers, and wakes the hub at its end."""

    def __init__(self, hub: Hub, name: str, function: Callable[..., None], *args: object) -> None:
        super().__init__(name=f"weightsync-{name}", daemon=True)
        self.error: WeightSyncError | None = None
        self._hub, self._function, self._args = hub, function, args
        self.start()

    def run(self) -> None:
        try:
            self._function(*self._args)
        except WeightSyncError as error:
            self.error = error
        except Exception as error:
            self.error = WeightSyncError(f"{type(error).__name__}: {error}")
        try:
            self._hub.wake()
        except OSError:
            pass  # the hub has been closed: nobody is left to wake


def _timeout(waiting_for: list[str], phase: str, deadline: Deadline) -> SyncTimeoutError:
    names = ", ".join(waiting_for)
    return SyncTimeoutError(
        f"no answer from {names} within {deadline.timeout_s:g} s", phase=phase, waiting_for=waiting_for
    )
