"""A trainer that no engine can dial: workers listen, and trainer rank 0 dials them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tls_certificates import make_certificates, use_certificates

from weightsync.errors import ConfigError, PeerError, PlacementError, ProtocolError, SyncTimeoutError
from weightsync.net.addresses import HOST, PORTS, listen, published_ports
from weightsync.net.authentication import ANSWER_BYTES, KEY, greeting
from weightsync.net.child import free_port
from weightsync.net.connection import Connection, dial
from weightsync.net.listener import Listener, await_dial
from weightsync.net.runtime import Deadline, submit
from weightsync.net.wire import PROTOCOL, Commit, Hello, MachineInfo, Release
from weightsync.transports.nccl import NcclTransport
from weightsync.transports.nixl import NixlTransport
from weightsync.transports.tcp_links import _dialers, _Place

WORKER = Hello(PROTOCOL, "worker", 3, 0, 1, name="tp=0")
RANK_0 = Hello(PROTOCOL, "rank", 0, 0, 1, name="trainer rank 0")
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@pytest.fixture(autouse=True)
def with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "k" * 32)


@pytest.fixture
def trainer() -> Iterator[Listener]:
    with contextlib.closing(Listener()) as listener:
        yield listener


def wait_for(
    trainer: Listener, port: int, address: str = "0.0.0.0", timeout_s: float = 20.0, hello: Hello = WORKER
) -> Connection:
    """Return a worker's end of the connection for which it waits at this port."""
    with contextlib.closing(Listener(trainer.token)) as listener:
        return await_dial(listener, address, port, hello, Deadline(timeout_s), lambda: None)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.mark.parametrize("certificates", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("address", LOCAL)
def test_a_dialled_worker_is_met_as_one_that_has_dialled(
    address: str, certificates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if certificates:
        use_certificates(make_certificates(tmp_path / "tls"), monkeypatch)
    trainer: Listener = request.getfixturevalue("trainer")  # it reads the certificates
    port = free_port()
    worker = submit("worker", lambda: wait_for(trainer, port, address))
    dialling = in_thread(lambda: trainer.dial(LOCAL[address], port, lambda: True))
    ((hello, connection),) = trainer.admit("worker", 3, Deadline(20), "init", lambda: None)
    dialling.join(20)
    assert hello == WORKER
    assert connection.dialled == (LOCAL[address], port)
    theirs = worker.result(20)
    assert (connection.peer, theirs.peer) == ("engine 3 worker tp=0", "trainer rank 0")
    connection.send(Commit(7), Deadline(20), "test")
    theirs.send(Release(), Deadline(20), "test")
    assert theirs.expect(Commit, Deadline(20), "test") == Commit(7)
    assert connection.expect(Release, Deadline(20), "test") == Release()
    theirs.close()
    connection.close()


def test_strangers_at_a_workers_port_are_turned_away_and_told_nothing(
    trainer: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    worker = submit("worker", lambda: wait_for(trainer, port))
    with contextlib.ExitStack() as stack:
        silent, rude, keyless = (stack.enter_context(_reach(port)) for _ in range(3))
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(48))
        with contextlib.suppress(ConnectionError):
            assert rude.recv(1) == b""
        # It is answered as anyone is, and cannot seal a Hello: it has neither the key nor the token.
        keyless.sendall(greeting(b"o" * 32))
        assert len(keyless.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES
        keyless.sendall(bytes(64))
        with contextlib.suppress(ConnectionError):
            assert keyless.recv(1) == b""
        with pytest.raises(ProtocolError, match="cannot prove itself: it has another key"):
            dial("127.0.0.1", port, "another session's token", RANK_0, "a worker", Deadline(10))
        monkeypatch.setenv(KEY, "o" * 32)
        with pytest.raises(ProtocolError, match="cannot prove itself: it has another key"):
            dial("127.0.0.1", port, trainer.token, RANK_0, "a worker", Deadline(10))
        monkeypatch.setenv(KEY, "k" * 32)
        assert not worker.done()
        trainer.dial("127.0.0.1", port, lambda: True)  # while the silent one still waits
        worker.result(20).close()
        assert silent.recv(1) == b""


def test_a_worker_that_is_not_dialled_says_what_to_publish(trainer: Listener) -> None:
    port = free_port()
    with pytest.raises(SyncTimeoutError) as raised:
        wait_for(trainer, port, timeout_s=0.2)
    for word in (f"0.0.0.0:{port}", "NAT", PORTS, f"{HOST}=none", 'transport="lora"'):
        assert word in str(raised.value)


def test_a_worker_with_two_addresses_takes_one_of_two_dials(trainer: Listener) -> None:
    port, dials = free_port(), list[threading.Thread]()
    connections = list[Connection]()

    def say_hello() -> None:
        with contextlib.suppress(PeerError):  # the worker has taken the other one
            connections.append(dial("127.0.0.1", port, trainer.token, RANK_0, "a worker", Deadline(10)))

    def wait_for_hellos() -> None:
        """Let both arrive in one turn."""
        newcomers = [newcomer.connection for newcomer in listener._newcomers]
        if len(newcomers) == 2 and all(newcomers):
            for each in dials:
                each.join(10)

    with contextlib.closing(Listener(trainer.token)) as listener:
        worker = submit("worker", lambda: await_dial(listener, "0.0.0.0", port, WORKER, Deadline(20), wait_for_hellos))
        _reach(port).close()
        dials += [in_thread(say_hello) for _ in range(2)]
        worker.result(20).close()
    for each in dials:
        each.join(10)
    answers = []
    for connection in connections:
        with contextlib.suppress(PeerError):
            answers.append(connection.expect(Hello, Deadline(10), "test"))
        connection.close()
    assert answers == [WORKER]


def test_the_trainer_names_the_workers_that_it_has_dialled(trainer: Listener) -> None:
    """The port of an earlier worker alone is not published. No call to the engine fails: its last worker answers."""
    port, closed = free_port(), free_port()
    hello = msgspec.structs.replace(WORKER, rank=1, world=2)
    worker = submit("worker", lambda: wait_for(trainer, port, hello=hello))
    dialling = [in_thread(partial(trainer.dial, "127.0.0.1", each, lambda: True)) for each in (port, closed)]
    connection = worker.result(20)
    with pytest.raises(SyncTimeoutError) as raised:
        trainer.admit("worker", 3, Deadline(1), "init", lambda: None)
    trainer.close()
    connection.close()
    for each in dialling:
        each.join(20)
    assert f"workers of engine 3 (1 of 2 have connected to 127.0.0.1:{port}) within 1 s. Publish" in str(raised.value)
    assert str(raised.value).count(PORTS) == 1


def test_a_dial_without_an_answer_is_hung_up(trainer: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stalled for long would else wait for a trainer that has given the connection up."""
    monkeypatch.setattr("weightsync.net.timeouts.NEWCOMER_S", 1.0)
    port = free_port()
    with contextlib.closing(Listener(trainer.token)) as listener:
        listener.listen_at("0.0.0.0", [port])
        dialling = in_thread(lambda: trainer.dial("127.0.0.1", port, lambda: True))
        ((_, connection),) = listener.admit("rank", 0, Deadline(20), "connect", lambda: None)
    with pytest.raises(PeerError):
        connection.expect(Commit, Deadline(20), "test")
    connection.close()
    trainer.close()
    dialling.join(20)


def test_the_trainer_stops_dialling_what_is_not_wanted_or_after_its_end(trainer: Listener) -> None:
    port, wanted = free_port(), threading.Event()
    dialling = in_thread(lambda: trainer.dial("127.0.0.1", port, lambda: not wanted.is_set()))
    wanted.set()
    dialling.join(20)
    assert not dialling.is_alive()
    dialling = in_thread(lambda: trainer.dial("127.0.0.1", port, lambda: True))
    trainer.close()
    dialling.join(20)
    assert not dialling.is_alive()


def test_a_worker_of_another_protocol_is_refused(trainer: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.net.listener.PROTOCOL", PROTOCOL + 1)
    port = free_port()
    worker = submit("worker", lambda: wait_for(trainer, port))
    _reach(port).close()
    with dial("127.0.0.1", port, trainer.token, RANK_0, "a worker", Deadline(10)).detach():
        pass
    with pytest.raises(
        ProtocolError, match=f"speaks wire protocol {PROTOCOL + 1} and trainer rank 0 speaks {PROTOCOL}"
    ):
        worker.result(20)


def test_the_trainers_own_listeners_leave_the_engines_ports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(PORTS, str(port))
    monkeypatch.setenv(HOST, "none")
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        assert port not in (first.getsockname()[1], second.getsockname()[1])
    assert published_ports() == range(port, port + 1)
    for said, workers in (("", 1), ("29600-29601", 3), ("1024-65535", 1)):
        monkeypatch.setenv(PORTS, said)
        with pytest.raises(ConfigError, match=rf"{PORTS} names \d+ ports, expected {workers} to 128"):
            published_ports(workers)


@pytest.mark.parametrize("transport", [NcclTransport("broadcast"), NixlTransport("nixl")])
def test_libraries_with_ports_of_their_own_are_refused(transport: NcclTransport | NixlTransport) -> None:
    rank = MachineInfo("trainer rank 0", "cuda", "GPU-1", "a")
    worker = MachineInfo("engine 0 worker tp=0", "cuda", "GPU-2", "b", ("192.0.2.7", 29600))
    with pytest.raises(PlacementError) as raised:
        transport.invite([rank], [worker], "127.0.0.1")
    for word in ("engine 0 worker tp=0 at 192.0.2.7:29600", "NAT", "CheckpointTransport", "lora"):
        assert word in str(raised.value)


def test_ranks_dial_dialled_workers_and_all_others_their_senders() -> None:
    def place(is_dialled: bool, *receivers: int) -> _Place:
        return _Place("", 0, [*receivers], is_dialled)

    usual = [place(False, 2), place(False, 2, 3), place(False, 3), place(False)]
    assert [_dialers(usual, member) for member in range(4)] == [[2], [2, 3], [3], []]
    behind_nat = [place(False, 2), place(False, 2, 3), place(True, 3), place(True)]
    assert [_dialers(behind_nat, member) for member in range(4)] == [[], [], [3, 0, 1], [1]]


def _reach(port: int) -> socket.socket:
    deadline = Deadline(10)
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            assert not deadline.passed()
