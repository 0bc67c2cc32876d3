"""Rank 0's listening sockets: the admission of peers, and the collection of their answers.

A peer that connects is a newcomer until it has proven itself. A newcomer gets little memory, little time and no
message.

If no worker can dial rank 0, each worker listens in this way, and rank 0 dials it. Nothing else differs: the worker's
`Hello` follows rank 0's, and the messages after it are the same.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from msgspec import to_builtins

from weightsync.errors import ConfigError, PeerError, ProtocolError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.addresses import ANYWHERE, NOT_DIALLED, address_facing, host_port, is_behind_nat, is_here, listen
from weightsync.net.authentication import (
    GREETING_BYTES,
    SET_A_KEY,
    TAGS,
    derive_keys,
    explain_mismatch,
    greeting,
    read_key,
    refuse_other_users,
)
from weightsync.net.connection import Connection, Pollable, dial, hang_up, name_of, ready, timed_out
from weightsync.net.runtime import Deadline, this_process
from weightsync.net.tls import read_certificates, wrap
from weightsync.net.wire import MAX_FRAME_BYTES, PROTOCOL, Failure, Hello, InitInfo, Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_KINDS = {
    "worker": "workers of engine {}",
    "rank": "trainer rank {}",
    "engines": "trainer rank {}",
    "member": "members of a broadcast",
    "link": "receivers of the broadcast's member {}",
}
"""The names of peers by role, for people."""
_HELLO_BYTES = 1 << 16
"""Size of a newcomer's largest frame before its `Hello`. Strangers then cannot fill the memory."""
_NEWCOMERS = 128
"""Most newcomers at a time. The next one replaces the oldest, so strangers cannot keep a worker out."""


class Listener:
    """Rank 0's listening sockets. Peers must prove that they know its token, and the key if one is set.

    refused: the reason, for people, why the last newcomer was turned away. The newcomer may have been a stranger.
    """

    def __init__(self, token: str = "") -> None:
        """Listen nowhere yet. Without a token, make one."""
        self.token = token or secrets.token_hex(32)
        self.refused = ""
        self._key, self._certificates = read_key(), read_certificates(is_listener=True)
        self.listening: dict[str, tuple[str, int]] = {}
        self._listeners: list[socket.socket] = []
        self._admitted: set[tuple[str, int]] = set()
        self._arrived: dict[tuple[str, int, int], tuple[Hello, Connection]] = {}
        self._newcomers: list[_UnauthenticatedPeer] = []
        self._dialled: deque[tuple[Hello, Connection]] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    def listen(self, host: str) -> tuple[str, int]:
        """Listen at the address that faces `host`, once for each address. Return (address, port).

        Raises `ConfigError` for another host when no key is set, and as `addresses.listen` does. Raises `OSError` when
        there is no route to `host`.
        """
        address = address_facing(host)
        if not self._key and not is_here(host):
            raise ConfigError(f"{host} is another host, and without a key only this host is trusted. {SET_A_KEY}")
        if address not in self.listening:
            self.listen_at(address)
        return self.listening[address]

    def listen_at(self, address: str, ports: Sequence[int] = ()) -> None:
        """Listen at an address of this host, and raise, as `addresses.listen` does."""
        listener = listen(address, ports)
        listener.setblocking(False)
        self._listeners.append(listener)
        self.listening[address] = (address, listener.getsockname()[1])

    def dial(self, host: str, port: int, is_wanted: Callable[[], bool]) -> None:
        """Dial a worker's `await_dial`, again and again until it answers or is not wanted. Never raises.

        Runs in a thread of its own. The worker's `Hello` then counts as if the worker had dialled.
        """
        hello = Hello(PROTOCOL, "rank", 0, 0, world=1, name="trainer rank 0")
        while is_wanted() and self._wake_in.fileno() >= 0:
            try:
                with ExitStack() as on_failure:
                    connection = dial(host, port, self.token, hello, "an engine's worker", Deadline(timeouts.REACH_S))
                    on_failure.callback(connection.close)
                    connection.dialled = host, port
                    answer = connection.expect(Hello, Deadline(timeouts.NEWCOMER_S), "connect")
                    on_failure.pop_all()
                    self._dialled.append((answer, connection))
                    self.wake()
                    return
            except (WeightSyncError, OSError) as error:
                if isinstance(error, ProtocolError):  # ports of other engines may be closed
                    self.refused = str(error)
                time.sleep(timeouts.DIAL_AGAIN_S)

    def invitation(self, session: str, engine: int, host: str, timeout_s: float) -> dict[str, Any]:
        """Return the `InitInfo` for an engine on `host`, as plain values. Raises as `listen` does."""
        address, port = self.listen(host)
        if is_behind_nat():
            address, port = ANYWHERE[":" in address], 0
        info: dict[str, Any] = to_builtins(
            InitInfo(session, engine, address, port, self.token, timeout_s, this_process())
        )
        return info

    def reset_role(self, role: str) -> None:
        """Allow peers of this role to connect again with numbers that were admitted before."""
        self._admitted = {key for key in self._admitted if key[0] != role}

    def wake(self) -> None:
        """Wake a running `admit` or `collect`, so that it calls `check` and reads inboxes again.

        From any thread. Returns at once and never raises.
        """
        with suppress(OSError):  # the pipe is full, so a wake-up is pending; or the listener is closed
            self._wake_in.send(b"x")

    def have_arrived(self, role: str, group: int) -> bool:
        """Return whether all peers of a group have connected, so that `admit` returns at once."""
        present = self._present(role, group)
        return bool(present) and {self._arrived[key][0].world for key in present} == {len(present)}

    def _present(self, role: str, group: int) -> list[tuple[str, int, int]]:
        return sorted(key for key in self._arrived if key[:2] == (role, group))

    def admit(
        self, role: str, group: int, deadline: Deadline, phase: str, check: Callable[[], None]
    ) -> list[tuple[Hello, Connection]]:
        """Wait for all peers of a group, and return them in rank order. `Hello.world` gives their number.

        `check` is called in every turn of the wait, and may raise. A `WeightSyncError` raised here is also sent to the
        connected peers of all groups.
        """
        try:
            return self._admit(role, group, deadline, phase, check)
        except WeightSyncError as error:
            error.message += f"; {self.refused}" if self.refused not in error.message else ""  # perhaps the cause
            for _, (_, connection) in _taken(self._arrived.popitem):
                connection.try_send(Failure(error.to_fields()), Deadline(1.0), phase)
                connection.close()
            raise

    def _admit(
        self, role: str, group: int, deadline: Deadline, phase: str, check: Callable[[], None]
    ) -> list[tuple[Hello, Connection]]:
        kind = _KINDS[role].format(group)
        while True:
            present = self._present(role, group)
            worlds = {self._arrived[key][0].world for key in present}
            if len(worlds) > 1:
                said = ", ".join(f"number {key[2]} of {self._arrived[key][0].world}" for key in present)
                raise ProtocolError(f"the {kind} do not agree on their number: {said}", phase=phase)
            if present and {len(present)} == worlds:
                self._admitted.add((role, group))
                return [self._arrived.pop(key) for key in present]
            check()
            self._poll_once([], deadline)
            if deadline.passed():
                none = "none has" if role == "worker" else "it has not"
                known = f"{len(present)} of {worlds.pop()} have" if worlds else none
                dialled = [place for key in present if (place := self._arrived[key][1].dialled)]
                where = ", ".join(host_port(*place) for place in dialled or self.listening.values())
                error = timed_out([f"{kind} ({known} connected to {where})"], phase, deadline)
                if dialled or not self.listening.keys().isdisjoint(ANYWHERE):
                    error.message += f". {NOT_DIALLED}"
                raise error

    def collect(
        self,
        peers: Collection[Connection],
        kind: type[M],
        deadline: Deadline,
        phase: str,
        check: Callable[[], None] | None = None,
    ) -> list[M]:
        """Return one message of `kind` from each of `peers`, in their order.

        Raises at once for the first `Failure` and for the first peer that disconnects. `check` is called in every turn
        of the wait, and may raise.
        """
        answers: dict[Connection, M] = {}
        watched = list(peers)
        while True:
            for connection in peers:
                if (error := connection.reported()) is not None:
                    raise error
                if connection not in answers and connection.has_mail():
                    answers[connection] = connection.expect(kind, deadline, phase)
            owing = [connection for connection in peers if connection not in answers]
            if not owing:
                return [answers[connection] for connection in peers]
            if deadline.passed():
                raise timed_out([connection.peer for connection in owing], phase, deadline)
            if check is not None:
                check()
            if any(connection.has_mail() for connection in owing):
                continue  # `check` has read it: no socket becomes readable for it
            for connection in self._poll_once(watched, deadline):
                try:
                    connection.read(phase)
                except PeerError:
                    if connection not in owing or not connection.has_mail():
                        raise
                    watched.remove(connection)  # its last message may be the one of `kind`

    def _poll_once(self, connections: list[Connection], deadline: Deadline) -> list[Connection]:
        """Wait until a socket is readable or `wake` is called. Serve newcomers. Return the readable connections."""
        for newcomer in [newcomer for newcomer in self._newcomers if newcomer.deadline.passed()]:
            self._turn_away(newcomer, "it did not introduce itself")
        listeners = self._listeners if self._has_room() else []
        everyone: list[Pollable] = [*connections, *listeners, *self._newcomers, self._wake_out]
        readable = ready(everyone, select.POLLIN, min(deadline.left_s(), timeouts.LISTENER_POLL_S))
        if self._wake_out in readable:
            self._wake_out.recv(4096)
        for dialled in _taken(self._dialled.popleft):
            self._arrive(*dialled)
        for newcomer in [newcomer for newcomer in self._newcomers if newcomer in readable]:
            has_greeted, arrived = newcomer.connection is not None, len(self._arrived)
            self._introduce(newcomer)
            if len(self._arrived) > arrived:
                break  # `admit` may return now. A worker with two addresses is dialled at each, and takes one dial.
            if not self._key and not has_greeted and newcomer.connection is not None:
                try:
                    refuse_other_users(newcomer.sock, newcomer.peer)
                except ProtocolError as error:
                    self._turn_away(newcomer, str(error))
        for listener in [listener for listener in self._listeners if listener in readable]:
            self._accept(listener)
        return [connection for connection in connections if connection in readable]

    def _has_room(self) -> bool:
        """Return whether to accept a newcomer, possibly in place of the oldest one."""
        left_s = timeouts.NEWCOMER_S - timeouts.NEWCOMER_LEAST_S
        return len(self._newcomers) < _NEWCOMERS or self._newcomers[0].deadline.left_s() < left_s

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the newcomer has closed already
        except OSError as error:  # no file descriptor is left, perhaps for too many strangers
            for newcomer in [*self._newcomers]:
                self._turn_away(newcomer, str(error))
            time.sleep(timeouts.NO_ROOM_S)
            return
        if len(self._newcomers) == _NEWCOMERS:
            self._turn_away(self._newcomers[0], f"{_NEWCOMERS} later connections took its place")
        try:
            sock = wrap(sock, self._certificates, is_listener=True)
        except OSError:
            return  # the newcomer has closed already
        self._newcomers.append(_UnauthenticatedPeer(sock, host_port(*address[:2])))

    def _turn_away(self, newcomer: _UnauthenticatedPeer, why: str) -> None:
        self.refused = f"{newcomer.peer} was turned away: {why}"
        self._newcomers.remove(newcomer)
        newcomer.close()

    def _introduce(self, newcomer: _UnauthenticatedPeer) -> None:
        """Read a newcomer's greeting and answer it, or read its `Hello`.

        A newcomer that cannot prove itself is turned away without a message. A proven peer with an unfit `Hello` is
        sent a `Failure`. The same `ProtocolError` is raised here.
        """
        try:
            if (connection := newcomer.connection) is None:
                newcomer.answer(self._key, self.token)
                return
            connection.read("connect")
            hello = connection.pop()
        except BlockingIOError:
            return  # only TLS's own records have arrived
        except (WeightSyncError, OSError) as error:
            self._turn_away(newcomer, f"{explain_mismatch(newcomer.greeting, self._key)} ({error})")
            return
        if hello is None:
            return
        if not isinstance(hello, Hello):
            self._turn_away(newcomer, f"it began with {type(hello).__name__}")
            return
        self._newcomers.remove(newcomer)
        connection.most_bytes = MAX_FRAME_BYTES
        self._arrive(hello, connection)

    def _arrive(self, hello: Hello, connection: Connection) -> None:
        """Note a proven peer for `admit`. One with an unfit `Hello` is sent a `Failure`. The same error is raised."""
        refusal = None
        if hello.protocol != PROTOCOL:
            refusal = (
                f"this process speaks wire protocol {PROTOCOL} and {hello.name} speaks {hello.protocol}: install the "
                "same weightsync on both sides"
            )
        elif (hello.role, hello.group) in self._admitted:
            refusal = f"{hello.role} {hello.name} of group {hello.group} came after all members had come"
        elif (hello.role, hello.group, hello.rank) in self._arrived:
            refusal = f"a second {hello.role} has number {hello.rank} of group {hello.group}: {hello.name}"
        if refusal is not None:
            problem = ProtocolError(refusal, phase="connect")
            connection.try_send(Failure(problem.to_fields()), Deadline(1.0), "connect")
            connection.close()
            raise problem
        connection.peer = name_of(hello)
        self._arrived[hello.role, hello.group, hello.rank] = (hello, connection)

    def close(self) -> None:
        """Close all sockets. From any thread: a wait that another one is in raises."""
        for listener in _taken(self._listeners.pop):
            hang_up(listener)
        for newcomer in _taken(self._newcomers.pop):
            newcomer.close()
        for _, (_, connection) in _taken(self._arrived.popitem):
            connection.close()
        for _, connection in _taken(self._dialled.popleft):
            connection.close()
        self._wake_in.close()
        self._wake_out.close()


def await_dial(
    listener: Listener, address: str, port: int, hello: Hello, deadline: Deadline, check: Callable[[], None]
) -> Connection:
    """Listen at this port until trainer rank 0 dials, and send it `hello`. For peers that cannot dial it.

    check: called in every turn of the wait, and may raise.
    """
    listener.listen_at(address, [port])
    ((_, connection),) = listener.admit("rank", 0, deadline, "connect", check)
    connection.send(hello, deadline, "connect")
    return connection


def _taken(pop: Callable[[], T]) -> Iterator[T]:
    """Pop until nothing is left. Another thread may add and pop meanwhile."""
    with suppress(LookupError):
        while True:
            yield pop()


class _UnauthenticatedPeer:
    """A newcomer. `connection` is None until its greeting is answered."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self.peer, self.greeting, self.deadline = peer, b"", Deadline(timeouts.NEWCOMER_S)
        self.connection: Connection | None = None
        self.sock = sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def answer(self, key: bytes, token: str) -> None:
        """Read arrived bytes of the greeting, and answer it when it is complete.

        Raises `ProtocolError` for bytes of another protocol, `PeerError` at EOF, and `OSError`.
        """
        data = self.sock.recv(GREETING_BYTES - len(self.greeting))
        if not data:
            raise PeerError("it closed its connection")
        self.greeting += data
        if not self.greeting.startswith(tuple(tag[: len(self.greeting)] for tag in TAGS)):
            raise ProtocolError("it sent no greeting")
        if len(self.greeting) == GREETING_BYTES:
            mine = greeting(key)
            proof, received, sent = derive_keys(key, token, self.greeting, mine)
            self.sock.sendall(mine + proof)  # does not block: a new socket's buffer has room
            self.connection = Connection(self.sock, self.peer, sent, received)
            self.connection.most_bytes = _HELLO_BYTES

    def close(self) -> None:
        hang_up(self.sock)
