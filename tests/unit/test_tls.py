"""TLS under the connections to trainer rank 0: who gets in, and what is seen from outside."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, module_of
from ranks import run_ranks
from tls_certificates import make_certificates, use_certificates

from weightsync import ConfigError, PeerError, WeightSync
from weightsync.net import tls
from weightsync.net.connection import Connection, dial
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline
from weightsync.net.wire import PROTOCOL, Hello, Value

HELLO = Hello(PROTOCOL, "worker", 0, 0, 1, "boot", "cpu", "", "the name of a worker", 0, "CLEAN", False)
LARGE = "the name of a tensor" * 200_000


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls") / "others")


@pytest.fixture
def listener(ours: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    use_certificates(ours, monkeypatch)
    with closing(Listener()) as listener:
        yield listener


def arrive(listener: Listener, port: int) -> Connection:
    return dial("127.0.0.1", port, listener.token, HELLO, "trainer rank 0", Deadline(20))


def met(listener: Listener, port: int) -> tuple[Connection, Connection]:
    """Both ends of an admitted worker's connection: the trainer's, the worker's."""
    theirs: list[Connection] = []
    arriving = threading.Thread(target=lambda: theirs.append(arrive(listener, port)))
    arriving.start()
    ((_, mine),) = listener.admit("worker", 0, Deadline(20), "init", lambda: None)
    arriving.join(20)
    return mine, theirs[0]


def push(rank: int) -> None:
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=30) as sync:
        for version in (1, 2):
            assert sync.push(module_of(checkpoint(2))).version == version


def test_ranks_and_workers_with_certificates_push(ours: Path, monkeypatch: pytest.MonkeyPatch):
    use_certificates(ours, monkeypatch)
    run_ranks(push, 2)


class Relay:
    """What lies between two ends, and keeps what it saw."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
            self._server = server.dup()
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()

    def _run(self, port: int) -> None:
        with self._server, self._server.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=self._copy, args=(far, near))
            back.start()
            self._copy(near, far)
            back.join()

    def _copy(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        self._thread.join(20)


def test_both_ends_send_much_at_once_and_nothing_of_it_is_seen_between_them(listener: Listener):
    relay = Relay(listener.listen("127.0.0.1")[1])
    mine, theirs = met(listener, relay.port)
    pinging = threading.Thread(target=lambda: [mine.answer_pings() for _ in range(50)])
    sending = threading.Thread(target=mine.send, args=(Value.of(LARGE), Deadline(20), "test"))
    pinging.start()
    sending.start()
    theirs.send(Value.of(LARGE), Deadline(20), "test")
    assert mine.expect(Value, Deadline(20), "test") == theirs.expect(Value, Deadline(20), "test") == Value.of(LARGE)
    for each in (sending, pinging):
        each.join(20)
    assert theirs.is_open()
    mine.close()
    with pytest.raises(PeerError, match="closed its connection"):
        theirs.receive(Deadline(20), "test")
    theirs.close()
    relay.join()
    assert len(relay.seen) > 2 * len(LARGE)
    for known in (b"weightsync", b"the name of"):
        assert known not in relay.seen


def test_an_end_that_has_finished_sees_the_other_one_hang_up(listener: Listener):
    mine, theirs = met(listener, listener.listen("127.0.0.1")[1])
    mine.finish(Value.of(LARGE[:1000]), Deadline(20), "test")
    assert theirs.has_ended(20)
    assert theirs.expect(Value, Deadline(20), "test") == Value.of(LARGE[:1000])
    assert not theirs.is_open()
    assert not mine.has_ended(0.0)
    theirs.close()
    assert mine.has_ended(20)
    mine.close()


@pytest.mark.parametrize("who", ["others", "nobody"])
def test_who_has_no_certificate_of_the_authority_is_turned_away(
    listener: Listener, others: Path, monkeypatch: pytest.MonkeyPatch, who: str
):
    port = listener.listen("127.0.0.1")[1]
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            listener._poll_once([], Deadline(0.1))

    looking = threading.Thread(target=look)
    looking.start()
    use_certificates(others if who == "others" else None, monkeypatch)
    words = r"did not answer a greeting.*TLS_CERT" if who == "others" else "key or certificate.*TLS_CERT"
    try:
        with pytest.raises(PeerError, match=words):
            arrive(listener, port)
    finally:
        stop.set()
        looking.join()
    assert "was turned away" in listener.refused
    assert not listener._arrived


def test_a_worker_tells_nothing_to_a_listener_without_a_certificate(
    ours: Path, others: Path, monkeypatch: pytest.MonkeyPatch
):
    use_certificates(others, monkeypatch)
    context = tls.read_certificates(is_listener=True)
    use_certificates(ours, monkeypatch)
    monkeypatch.setattr("weightsync.net.connection._TRIES", 1)
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with suppress(OSError), tls.wrap(server.accept()[0], context, is_listener=True) as sock:
                received.append(sock.recv(1 << 16))

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        with pytest.raises(PeerError, match="certificate verify failed"):
            dial("127.0.0.1", server.getsockname()[1], "0" * 64, HELLO, "trainer rank 0", Deadline(20))
        listening.join(20)
    assert not b"".join(received)


def test_certificates_that_cannot_be_used_are_refused(ours: Path, monkeypatch: pytest.MonkeyPatch):
    use_certificates(ours, monkeypatch)
    monkeypatch.delenv(tls.CA)
    with pytest.raises(ConfigError, match="not set: WEIGHTSYNC_TLS_CA"):
        Listener()
    monkeypatch.setenv(tls.CA, str(ours / "node.key"))
    with pytest.raises(ConfigError, match="cannot use WEIGHTSYNC_TLS_CERT="):
        Listener()
