"""A communicator over TCP: one connection from each sender to each of its receivers.

Members meet at the listener of the first one, and keep these connections. To link, each tells the first the address of
its own listener, and gets those of all:

    member      Hello
    member      its address and its new receivers
    first       for each member: its address and its new receivers
    member      dials each of its new senders, and admits each of its new receivers

If no worker can dial a rank, the first member dials workers, which then send the same `Hello`. To link, ranks dial
their receivers. Workers dial each other as above.

All connections begin as those to trainer rank 0 do, with the handshake of net/authentication.py and with TLS if
certificates are set. Then the bytes travel plain, or encrypted by TLS:

    message     number, length: 2 little-endian integers of 8 bytes, followed by the bytes

Listeners close once the members have met, and once they are linked.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from weightsync.errors import PeerError, ProtocolError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.addresses import ANYWHERE, address_facing, reach
from weightsync.net.connection import Connection, dial
from weightsync.net.listener import Listener, await_dial
from weightsync.net.runtime import Deadline, spawn
from weightsync.net.tls import TlsSocket
from weightsync.net.wire import PROTOCOL, Failure, Hello, Value
from weightsync.transports.communicator import UNCONNECTED, Communicator, PeerBuffer, ThreadWork

_Told = TypeVar("_Told")
_Answer = TypeVar("_Answer")
_HEAD = struct.Struct("<QQ")


class _Place(NamedTuple):
    """Address and port of a member's listener, and its new receivers. No port: no member dials it.

    is_dialled: the member is a worker that cannot dial ranks.
    """

    host: str
    port: int
    receivers: list[int]
    is_dialled: bool


class TcpRendezvous:
    """The first member's listener. Its token is the rendezvous's name.

    dials: address and port of each member that the first one dials.
    """

    dials: Sequence[tuple[str, int]] = ()

    def __init__(self, host: str) -> None:
        self.listener = Listener()
        self.host, self.port = self.listener.listen(host)
        self.name = self.listener.token

    def close(self) -> None:
        self.listener.close()


class TcpLinks(Communicator):
    """A communicator of CPUs."""

    rendezvous_at = TcpRendezvous

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._outward: dict[int, _Link] = {}
        self._inward: dict[int, _Link] = {}
        self._to_first: list[Connection] = []  # on the first member: to every other one, in their order
        self._is_dialled = self.place[0] in ANYWHERE
        self._listener: Listener | None = None  # while it listens for other members

    def _join(self, deadline: Deadline) -> None:
        host, port, _ = self.place
        patient = _patient(deadline)
        if self._is_dialled:
            hello = self._hello("member", 0, self.size - 1)
            with closing(Listener(self.place[2])) as self._listener:
                self._to_first = [await_dial(self._listener, host, port, hello, patient, self._check)]
        elif self._rendezvous is None:
            self._to_first = [self._dial(host, port, "member", 0, self.size - 1, patient)]
        else:
            with closing(self._rendezvous.listener) as listener:
                for place in self._rendezvous.dials:
                    spawn("dial", partial(listener.dial, *place, lambda: True))
                members = listener.admit("member", 0, patient, "connect", self._check)
                self._to_first = [member for _, member in members]
        for connection in self._to_first:  # idle until the next link, which may be hours away
            connection.watch_host(deadline.timeout_s)

    def _connect(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], deadline: Deadline) -> None:
        patient = _patient(deadline)
        receivers = sorted({member for _, member in sends if member not in self._outward})
        senders = {member for _, member in receives if member not in self._inward}
        with closing(Listener(self.place[2])) as self._listener:
            own = _Place(*self._listen(self._listener, bool(receivers)), receivers, self._is_dialled)
            everyone = self._tell_first(own, _Place, self._places, list[_Place], patient)
            self._missing = UNCONNECTED
            for member, place in enumerate(everyone):
                if self.rank in (those := _dialers(everyone, member)):
                    link = self._dial(place.host, place.port, "link", member, len(those), patient)
                    (self._inward if member in senders else self._outward)[member] = _Link(link.detach())
            if _dialers(everyone, self.rank):
                for hello, link in self._listener.admit("link", self.rank, patient, "connect", self._check):
                    (self._outward if hello.rank in receivers else self._inward)[hello.rank] = _Link(link.detach())

    def _listen(self, listener: Listener, sends: bool) -> tuple[str, int]:
        """Listen for members that dial this one. Return the address and port to offer. Port 0: no member dials."""
        host, port, _ = self.place
        if not self._is_dialled:
            return listener.listen(host) if sends else ("", 0)
        listener.listen_at(host, [port])
        return address_facing(self._to_first[0].peer_address), port

    def _places(self, told: list[_Place]) -> list[list[_Place]]:
        """Return the places as each member knows them. Ranks dial a worker at the address at which this one has."""
        hosts = [None, *(connection.dialled and connection.dialled[0] for connection in self._to_first)]
        outside = [own._replace(host=host or own.host) for own, host in zip(told, hosts, strict=True)]
        return [told if own.is_dialled else outside for own in told]

    def _tell_first(
        self, own: _Told, kind: Any, answers: Callable[[list[_Told]], list[_Answer]], answer: Any, deadline: Deadline
    ) -> _Answer:
        """Tell the first member a value of this `kind`. Return its `answer`, of that kind.

        answers: makes the answer to each member, of all values in the order of the members. An error reaches them all.
        """
        if self.rank:
            (first,) = self._to_first
            first.send(Value.of(own), deadline, "connect")
            told: _Answer = first.expect(Value, deadline, "connect").read(answer)
            return told
        try:
            mine, *others = answers([own, *(m.expect(Value, deadline, "connect").read(kind) for m in self._to_first)])
            for member, one in zip(self._to_first, others, strict=True):
                member.send(Value.of(one), deadline, "connect")
        except WeightSyncError as error:
            for member in self._to_first:
                member.try_send(Failure(error.to_fields()), Deadline(timeouts.WORKER_FAREWELL_S), "connect")
            raise
        return mine

    def _dial(self, host: str, port: int, role: str, member: int, world: int, deadline: Deadline) -> Connection:
        """Connect to a member's listener as one of `world` peers in this role. Raises at once if it is unreachable."""
        hello = self._hello(role, member, world)
        peer = "trainer rank 0" if member == 0 else f"member {member} of the broadcast"
        while True:
            reach(host, port, f"member {self.rank}", peer, deadline).close()
            try:
                return dial(host, port, self.place[2], hello, peer, deadline)
            except PeerError:  # the member listens, and does not answer yet
                self._check()
                if deadline.passed():
                    raise

    def _hello(self, role: str, member: int, world: int) -> Hello:
        return Hello(PROTOCOL, role, member, self.rank, world, name=f"member {self.rank}")

    def _start(self, number: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> ThreadWork:
        work = ThreadWork(len(sends) + len(receives))
        self._check()
        for data, member in sends:
            link = self._outward[member]
            link.post(partial(link.send, number, data.numpy().data), work)
        for room, member in receives:
            link = self._inward[member]
            link.post(partial(link.receive, number, room.numpy().data), work)
        return work

    def _break(self) -> None:
        for link in (*self._outward.values(), *self._inward.values()):
            link.close()
        for connection in self._to_first:
            connection.close()
        if self._listener is not None:
            self._listener.close()


def _dialers(everyone: Sequence[_Place], member: int) -> list[int]:
    """Return the members that dial this one. Receivers dial, unless they are dialled workers and this one a rank.

    The ranks then dial these workers.
    """
    own, ranks = everyone[member], [number for number, place in enumerate(everyone) if not place.is_dialled]
    if not own.is_dialled:
        return [each for each in own.receivers if each in ranks]
    return [*own.receivers, *(each for each in ranks if member in everyone[each].receivers)]


def _patient(deadline: Deadline) -> Deadline:
    """Return a longer deadline. The error of the caller's own deadline names the missing step."""
    return Deadline(2 * deadline.left_s() + 1)


class _Link:
    """One direction of bytes, from or to one member. Its operations run in order, in a thread while there are any."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._posted: deque[tuple[Callable[[], None], ThreadWork]] = deque()
        self._runs = self._closed = False

    def post(self, operation: Callable[[], None], work: ThreadWork) -> None:
        """Run the operation, a part of the work, after those posted before."""
        with self._lock:
            self._posted.append((operation, work))
            if self._runs:
                return
            self._runs = True
        spawn("link", self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._posted:
                    self._runs = False
                    if self._closed:
                        self._sock.close()
                    return
                operation, work = self._posted.popleft()
            work.run(operation)

    def send(self, number: int, data: memoryview) -> None:
        self._sock.sendall(_HEAD.pack(number, len(data)))
        self._sock.sendall(data)

    def receive(self, number: int, room: memoryview) -> None:
        """Receive the message of this number. It may be shorter than its room."""
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        found, nbytes = _HEAD.unpack(head)
        if found != number or nbytes > len(room):
            raise ProtocolError(
                f"message {found} of {nbytes} bytes has come, expected message {number} of at most {len(room)} bytes"
            )
        self._fill(room[:nbytes])

    def _fill(self, room: memoryview) -> None:
        # One call for the whole message: after each call this thread competes with others for Python's lock.
        flags = 0 if isinstance(self._sock, TlsSocket) else socket.MSG_WAITALL
        while room:
            if not (count := self._sock.recv_into(room, len(room), flags)):
                raise ConnectionError("the other end has closed the connection")
            room = room[count:]

    def close(self) -> None:
        """Shut the connection down. Operations under way fail, here and at the other end."""
        with suppress(OSError):  # the other end has closed first
            # Not TLS's own shutdown: it takes the connection's state away from its thread.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        with self._lock:
            self._closed = True
            if not self._runs:  # else the thread closes it: its number might name another file before the next read
                self._sock.close()
