"""Who may talk to whom: keys, users, strangers, and frames that were not sent."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from weightsync.errors import ConfigError, EngineError, PeerError, ProtocolError, SyncTimeoutError, WeightSyncError
from weightsync.net import authentication, timeouts
from weightsync.net.authentication import ANSWER_BYTES, SEAL_BYTES, derive_keys, greeting, read_key, refuse_other_users
from weightsync.net.connection import Connection, dial
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline
from weightsync.net.wire import PROTOCOL, Commit, Failure, Hello, Value, encode

LOCAL = "127.0.0.1"
KEY, OTHER_KEY = "k" * 32, "o" * 32
HELLO = Hello(
    protocol=PROTOCOL,
    role="worker",
    group=0,
    rank=0,
    world=1,
    boot_id="boot",
    device="cpu",
    gpu_uuid="",
    name="tp=0",
    version=0,
    state="CLEAN",
    update_open=False,
)


@pytest.fixture(autouse=True)
def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(authentication.KEY, raising=False)
    monkeypatch.delenv(authentication.KEY_FILE, raising=False)


@pytest.fixture
def keep() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(params=["", KEY], ids=["without a key", "with a key"])
def listener(request: Any, keep: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> Listener:
    if request.param:
        monkeypatch.setenv(authentication.KEY, request.param)
    return opened(keep)


def opened(keep: contextlib.ExitStack) -> Listener:
    listener = Listener()
    keep.callback(listener.close)
    listener.listen(LOCAL)
    return listener


class Admission:
    """A hub that waits for one worker, in a thread."""

    def __init__(self, listener: Listener, timeout_s: float = 60.0) -> None:
        self.listener, self.timeout_s = listener, timeout_s
        self.connection: Connection | None = None
        self.error: WeightSyncError | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            ((_, self.connection),) = self.listener.admit("worker", 0, Deadline(self.timeout_s), "init", lambda: None)
        except WeightSyncError as error:
            self.error = error

    def outcome(self) -> Connection:
        self.thread.join(self.timeout_s + 10)
        if self.error is not None:
            raise self.error
        assert self.connection is not None
        return self.connection


def address(listener: Listener) -> tuple[str, int]:
    return listener.listen(LOCAL)


def arrive(listener: Listener, keep: contextlib.ExitStack) -> Connection:
    connection = dial(*address(listener), listener.token, HELLO, "trainer rank 0", Deadline(60))
    keep.callback(connection.close)
    return connection


def met(listener: Listener, keep: contextlib.ExitStack) -> tuple[Connection, Connection]:
    """Both ends of an admitted worker's connection: the hub's, the worker's."""
    admission = Admission(listener)
    theirs = arrive(listener, keep)
    ours = admission.outcome()
    keep.callback(ours.close)
    return ours, theirs


def knock(listener: Listener, keep: contextlib.ExitStack) -> socket.socket:
    sock = socket.create_connection(address(listener))
    sock.settimeout(20)
    keep.callback(sock.close)
    return sock


def read_all(sock: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            found += data
    return found


def expect(connection: Connection) -> Any:
    return connection.receive(Deadline(20), "test")


def test_both_ends_talk_after_the_handshake(listener, keep):
    ours, theirs = met(listener, keep)
    for number in range(3):
        theirs.send(Commit(number), Deadline(20), "test")
        ours.send(Value.of([number]), Deadline(20), "test")
    assert [expect(ours) for _ in range(3)] == [Commit(number) for number in range(3)]
    assert [expect(theirs) for _ in range(3)] == [Value.of([number]) for number in range(3)]


# ---------------------------------------------------------------------------------------------------------------
# Keys


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (KEY, OTHER_KEY, "it has another key"),
        (KEY, "", "it has a key, and this process has none"),
        ("", KEY, "it has no key, and this process has one"),
    ],
)
def test_who_has_another_key_or_none_is_told_so_and_sends_nothing(keep, monkeypatch, ours, theirs, words):
    monkeypatch.setenv(authentication.KEY, ours)
    listener = opened(keep)
    admission = Admission(listener, 1.0)
    monkeypatch.setenv(authentication.KEY, theirs)
    with pytest.raises(ProtocolError, match=f"trainer rank 0 at 127.*cannot prove itself: {words}"):
        arrive(listener, keep)
    with pytest.raises(SyncTimeoutError, match="was turned away: it has"):
        admission.outcome()


def test_an_error_while_workers_are_awaited_says_why_one_was_turned_away(keep):
    """Such as a rank that cannot find the user of its worker. The call's own error knows nothing of it."""
    listener = opened(keep)
    knock(listener, keep).sendall(b"x" * 48)

    def check() -> None:
        if listener.refused:
            raise EngineError("this engine's workers have not connected")

    def wait_for_another_engine() -> None:
        listener.admit("worker", 1, Deadline(10.0), "init", check)

    with pytest.raises(EngineError, match=r"have not connected; 127\..* was turned away: it does not speak") as raised:
        listener.admit("worker", 0, Deadline(10.0), "init", wait_for_another_engine)
    assert str(raised.value).count("was turned away") == 1


def test_a_worker_tells_nothing_to_a_listener_without_the_key(keep, monkeypatch):
    """Whoever reaches an engine's routes gives an address and a token of his own."""
    monkeypatch.setenv(authentication.KEY, KEY)
    received: list[bytes] = []

    def impostor(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.settimeout(20)
            theirs = sock.recv(1 << 16)
            mine = greeting(KEY.encode())
            sock.sendall(mine + derive_keys(b"a guess", "token", theirs, mine)[0])
            received.extend([theirs, read_all(sock)])

    with socket.create_server((LOCAL, 0)) as server:
        thread = threading.Thread(target=impostor, args=(server,))
        thread.start()
        with pytest.raises(ProtocolError, match="cannot prove itself"):
            dial(*server.getsockname(), "token", HELLO, "trainer rank 0", Deadline(20))
        thread.join(20)
    assert len(received[0]) == authentication.GREETING_BYTES
    assert received[1] == b""


def test_a_listener_that_says_nothing_holds_a_worker_for_seconds_at_most(keep, monkeypatch):
    monkeypatch.setattr(timeouts, "GREETING_S", 0.3)
    with socket.create_server((LOCAL, 0)) as server:
        started = time.monotonic()
        with pytest.raises(PeerError, match="did not answer a greeting"):
            dial(*server.getsockname(), "token", HELLO, "trainer rank 0", Deadline(86400))
        assert time.monotonic() - started < 10


def test_a_key_file_is_its_owners_alone(tmp_path: Path, monkeypatch):
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    monkeypatch.setenv(authentication.KEY_FILE, str(path))
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="without read access for others"):
            read_key()
    path.chmod(0o600)
    assert read_key() == KEY.encode()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="a file of this user without"):
        read_key()
    monkeypatch.undo()


def test_a_key_of_any_bytes_is_the_same_in_the_variable_and_in_a_file(tmp_path: Path, monkeypatch):
    key = bytes(range(160, 192))  # no UTF-8
    path = tmp_path / "key"
    path.write_bytes(key + b"\n")
    path.chmod(0o600)
    monkeypatch.setenv(authentication.KEY, os.fsdecode(key))
    assert read_key() == key
    monkeypatch.delenv(authentication.KEY)
    monkeypatch.setenv(authentication.KEY_FILE, str(path))
    assert read_key() == key


@pytest.mark.parametrize("content", ["", " \n", "short"])
def test_a_key_that_is_no_secret_is_refused(tmp_path: Path, monkeypatch, content: str):
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    monkeypatch.setenv(authentication.KEY_FILE, str(path))
    with pytest.raises(ConfigError, match=r"is empty|too short"):
        Listener()
    monkeypatch.setenv(authentication.KEY_FILE, str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot read|without read access for others"):
        Listener()


# ---------------------------------------------------------------------------------------------------------------
# Without a key: one user, one host


def test_without_a_key_another_user_is_refused_on_both_sides(keep, monkeypatch):
    listener = opened(keep)
    admission = Admission(listener, 1.0)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WeightSyncError, match=r"is of user|refused this process's key|did not answer"):
        arrive(listener, keep)
    with pytest.raises(SyncTimeoutError, match=r"is of user \d+, and without a key only.*Set WEIGHTSYNC_KEY"):
        admission.outcome()


@pytest.fixture
def tables(monkeypatch):
    """Return the kernel's tables of all connections that were read, as they are read."""
    reads, read_text = [], Path.read_text

    def noting(path: Path, *args: Any, **options: Any) -> str:
        if path.parent == Path("/proc/net"):
            reads.append(path.name)
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", noting)
    return reads


@pytest.mark.parametrize("kernel", ["answers", "lacks the protocol", "knows no such request"])
@pytest.mark.parametrize(
    ("family", "address", "table"), [(socket.AF_INET, LOCAL, "tcp"), (socket.AF_INET6, "::1", "tcp6")]
)
def test_the_user_at_the_other_end_is_looked_up(family, address, table, kernel, tables, monkeypatch):
    with socket.create_server((address, 0), family=family) as server:
        one = socket.create_connection(server.getsockname()[:2])
        other, _ = server.accept()
    if kernel == "lacks the protocol":
        monkeypatch.setattr(authentication, "_SOCK_DIAG", 31)
    elif kernel == "knows no such request":
        monkeypatch.setattr(authentication, "_BY_FAMILY", 0x7FFF)
    with one, other:
        refuse_other_users(one, "a peer")
        refuse_other_users(other, "a peer")
        monkeypatch.setattr(os, "geteuid", lambda: 1 << 20)
        for end in (one, other):
            with pytest.raises(ProtocolError, match=f"a peer is of user {os.getuid()}.*Set WEIGHTSYNC_KEY"):
                refuse_other_users(end, "a peer")
    assert tables == ([] if kernel == "answers" else [table] * 4)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, LOCAL), (socket.AF_INET6, "::1")])
def test_the_kernel_names_the_user_of_one_connection_and_of_no_listener(family, address):
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as one,
    ):
        dialer, listener = one.getsockname()[:2], one.getpeername()[:2]
        assert authentication._ask_kernel(dialer, listener) == os.getuid()
        assert authentication._ask_kernel(listener, (address, 1)) is None  # what listens there answers the request
        assert authentication._ask_kernel((address, 1), dialer) is None


def test_silent_strangers_are_not_looked_up_and_no_stranger_costs_a_table(keep, tables, monkeypatch):
    """A table takes the kernel 4 ms, and 28 ms with 10,000 connections."""
    asked, ask = [], authentication._ask_kernel

    def noting(*ends: Any) -> int | None:
        asked.append(ends)
        return ask(*ends)

    monkeypatch.setattr(authentication, "_ask_kernel", noting)
    listener = opened(keep)
    strangers = [knock(listener, keep) for _ in range(40)]
    with pytest.raises(SyncTimeoutError):
        listener.admit("worker", 0, Deadline(0.5), "init", lambda: None)
    assert len(listener._newcomers) == 40
    assert asked == []
    for stranger in strangers:
        stranger.sendall(greeting(b""))
    with pytest.raises(SyncTimeoutError):
        listener.admit("worker", 0, Deadline(0.2), "init", lambda: None)
    assert [len(stranger.recv(ANSWER_BYTES, socket.MSG_WAITALL)) for stranger in strangers] == [ANSWER_BYTES] * 40
    assert len(asked) == 80  # of each its own end, and the stranger's
    assert tables == []


def test_an_end_that_has_gone_is_nobodys():
    with (
        socket.socket() as sock,
        pytest.raises(ProtocolError, match=r"the user of a peer's process.*Set WEIGHTSYNC_KEY"),
    ):
        refuse_other_users(sock, "a peer")


def test_an_end_that_is_not_listed_here_is_of_another_host():
    class Elsewhere:
        def getpeername(self) -> tuple[str, int]:
            return "192.0.2.1", 40000

        def getsockname(self) -> tuple[str, int]:
            return "192.0.2.2", 50000

    with pytest.raises(ProtocolError, match=r"a peer is of another host or container.*Set WEIGHTSYNC_KEY"):
        refuse_other_users(Elsewhere(), "a peer")  # type: ignore[arg-type]


def test_without_a_key_an_engine_on_another_host_is_refused_before_anything_listens(keep, monkeypatch):
    listener = opened(keep)
    monkeypatch.setattr("weightsync.net.addresses.local_and_peer_address", lambda host: ("192.0.2.2", host))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is another host.*Set WEIGHTSYNC_KEY"):
        listener.listen("192.0.2.1")


# ---------------------------------------------------------------------------------------------------------------
# Frames that were not sent


def read_until_it_raises(connection: Connection) -> None:
    while True:
        connection.read("test")


def frames_between(listener: Listener, keep: contextlib.ExitStack, *, change: Any) -> Connection:
    """A worker's connection through someone in the middle, who hands `change(frames)` of three frames to the hub."""
    admission = Admission(listener)
    with socket.create_server((LOCAL, 0)) as server:
        sides: list[socket.socket] = []

        def between() -> None:
            worker, _ = server.accept()
            hub = socket.create_connection(address(listener))
            sides.extend([worker, hub])
            hub.sendall(worker.recv(1 << 16))
            answer = b""
            while len(answer) < ANSWER_BYTES:
                answer += hub.recv(1 << 16)
            worker.sendall(answer)
            hub.sendall(cut(worker)[0])  # Hello
            frames = [cut(worker)[0] for _ in range(3)]
            admission.outcome()
            hub.sendall(b"".join(change(frames)))

        def cut(sock: socket.socket) -> tuple[bytes, int]:
            head = sock.recv(4, socket.MSG_WAITALL)
            size = struct.unpack("<I", head)[0] + SEAL_BYTES
            return head + sock.recv(size, socket.MSG_WAITALL), size

        thread = threading.Thread(target=between)
        thread.start()
        token = listener.token
        # The hub cannot know the user at the other end, which is this process all the same.
        theirs = dial(*server.getsockname(), token, HELLO, "trainer rank 0", Deadline(20))
        keep.callback(theirs.close)
        for number in range(3):
            theirs.send(Commit(number), Deadline(20), "test")
        thread.join(20)
        for side in sides:
            keep.callback(side.close)
    ours = admission.outcome()
    keep.callback(ours.close)
    return ours


@pytest.mark.parametrize(
    ("change", "arrive"),
    [
        (lambda f: [f[0], f[0]], 1),  # replayed
        (lambda f: [f[1]], 0),  # one left out
        (lambda f: [f[1], f[0]], 0),  # in another order
        (lambda f: [f[0], f[1][:-1] + bytes([f[1][-1] ^ 1])], 1),  # another seal
        (lambda f: [f[0][:-SEAL_BYTES]] * 8, 0),  # no seal
        (lambda f: [f[0][:6] + bytes([f[0][6] ^ 1]) + f[0][7:]], 0),  # another body
        (lambda f: [struct.pack("<I", 5) + f[0][4:]], 0),  # another length
    ],
    ids=["replay", "gap", "order", "seal", "no seal", "body", "length"],
)
def test_a_frame_that_was_not_sent_so_is_refused(listener, keep, change, arrive):
    ours = frames_between(listener, keep, change=change)
    with pytest.raises(ProtocolError, match="a frame has a wrong seal: it is forged, or not the peer's next frame"):
        read_until_it_raises(ours)
    assert [ours.pop() for _ in range(arrive)] == [Commit(number) for number in range(arrive)]
    assert not ours.has_mail()


def test_what_a_peer_has_sent_cannot_be_given_back_to_it(listener, keep):
    ours, theirs = met(listener, keep)
    frame = encode(Commit(1))
    theirs._sock.sendall(frame + ours._sent.of(frame))  # the hub's own first frame
    with pytest.raises(ProtocolError, match="a frame has a wrong seal"):
        expect(ours)


def test_frames_of_one_connection_are_nothing_on_another(listener, keep):
    ours, theirs = met(listener, keep)
    frame = encode(Commit(1))
    sealed = frame + theirs._sent.of(frame)
    ours.close()
    listener._admitted.clear()
    again, other = met(listener, keep)
    other._sock.sendall(sealed)
    with pytest.raises(ProtocolError, match="a frame has a wrong seal"):
        expect(again)


def test_a_recorded_handshake_is_of_no_use(listener, keep):
    admission = Admission(listener, 1.0)
    mine = greeting(listener._key)
    first = knock(listener, keep)
    first.sendall(mine)
    answer = first.recv(ANSWER_BYTES, socket.MSG_WAITALL)
    seal = derive_keys(listener._key, listener.token, mine, answer[: authentication.GREETING_BYTES])[1]
    hello = encode(HELLO)
    recorded = hello + seal.of(hello)
    second = knock(listener, keep)
    second.sendall(mine)
    second.recv(ANSWER_BYTES, socket.MSG_WAITALL)
    second.sendall(recorded)
    assert read_all(second) == b""
    with pytest.raises(SyncTimeoutError, match="a frame has a wrong seal"):
        admission.outcome()


def test_an_answer_cannot_be_reflected(listener, keep):
    """Someone without the token lets the hub answer a greeting, and sends the proof back as his own."""
    admission = Admission(listener, 3.0)
    sock = knock(listener, keep)
    sock.sendall(greeting(listener._key))
    proof = sock.recv(ANSWER_BYTES, socket.MSG_WAITALL)[authentication.GREETING_BYTES :]
    hello = encode(HELLO)
    sock.sendall(hello + proof[:SEAL_BYTES])
    assert read_all(sock) == b""
    with pytest.raises(SyncTimeoutError):
        admission.outcome()


# ---------------------------------------------------------------------------------------------------------------
# Strangers


@pytest.mark.parametrize("greets", [False, True])
def test_a_flood_of_strangers_keeps_nobody_out(listener, keep, greets, monkeypatch):
    """A thousand connect, and say nothing more, before and while a worker comes in and answers."""
    monkeypatch.setattr(timeouts, "GREETING_S", 60.0)  # on a busy machine each stranger takes a while
    strangers: list[socket.socket] = []
    over = threading.Event()

    def flood() -> None:
        while not over.is_set() and len(strangers) < 1000:
            with contextlib.suppress(OSError):
                sock = socket.create_connection(address(listener), timeout=1)
                strangers.append(sock)
                if greets:
                    sock.sendall(greeting(listener._key))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    keep.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        ours, theirs = met(listener, keep)
        threading.Timer(0.5, theirs.send, (Commit(1), Deadline(60), "test")).start()
        assert listener.collect([ours], Commit, Deadline(60), "test") == [Commit(1)]
    finally:
        over.set()
        thread.join(20)
        for sock in strangers:
            sock.close()
    assert len(listener._newcomers) <= 128
    assert len(strangers) > 100


def test_a_process_without_descriptors_goes_on(listener, keep):
    ours, theirs = met(listener, keep)
    place = address(listener)
    strangers = [socket.socket() for _ in range(40)]
    for sock in strangers:
        keep.callback(sock.close)
        sock.setblocking(False)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (filler := os.dup(0)) < highest:  # the limit is one of numbers, and those below it may be free
        keep.callback(os.close, filler)
    os.close(filler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 6, hard))
    keep.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    for sock in strangers:
        with contextlib.suppress(BlockingIOError):
            sock.connect(place)
    threading.Timer(1.0, theirs.send, (Commit(1), Deadline(20), "test")).start()
    before = time.process_time()
    assert listener.collect([ours], Commit, Deadline(20), "test") == [Commit(1)]
    assert time.process_time() - before < 0.8
    assert "Too many open files" in listener.refused or listener._newcomers


def test_who_is_slow_to_introduce_itself_is_turned_away(listener, keep, monkeypatch):
    monkeypatch.setattr("weightsync.net.timeouts.NEWCOMER_S", 0.2)
    admission = Admission(listener, 1.5)
    strangers = [knock(listener, keep) for _ in range(3)]
    strangers[1].sendall(greeting(listener._key))
    strangers[2].sendall(greeting(listener._key)[:20])
    started = time.monotonic()
    assert [len(read_all(sock)) for sock in strangers] == [0, ANSWER_BYTES, 0]
    assert time.monotonic() - started < 10
    with pytest.raises(SyncTimeoutError, match="it did not introduce itself"):
        admission.outcome()


def test_a_listener_may_be_closed_while_a_wait_of_another_thread_fails(keep, monkeypatch):
    """The one who closes it finds peers that the failed wait is telling of its failure."""
    listener, told = opened(keep), []
    send = Connection.send

    def close_first(self: Connection, message: Any, *args: Any) -> None:
        if isinstance(message, Failure):
            told.append(message)
            listener.close()
        send(self, message, *args)

    monkeypatch.setattr(Connection, "send", close_first)
    with ThreadPoolExecutor(2) as pool:
        arrivals = [
            pool.submit(dial, *address(listener), listener.token, hello, "trainer rank 0", Deadline(20))
            for hello in (structs.replace(HELLO, rank=rank, world=3) for rank in range(2))
        ]
        with pytest.raises(SyncTimeoutError, match="2 of 3 have connected"):
            listener.admit("worker", 0, Deadline(1.0), "init", lambda: None)
        for each in arrivals:
            keep.callback(each.result().close)
    assert told


def test_what_comes_before_the_proof_takes_next_to_no_memory(listener, keep):
    """A frame of empty maps, which would take a hundred times as much, is refused by its length."""
    admission = Admission(listener, 2.0)
    sock = knock(listener, keep)
    sock.sendall(greeting(listener._key))
    sock.recv(ANSWER_BYTES, socket.MSG_WAITALL)
    with contextlib.suppress(ConnectionError):
        sock.sendall(struct.pack("<I", 1 << 20) + b"\x80" * (1 << 20))
    assert read_all(sock) == b""
    with pytest.raises(SyncTimeoutError, match="announces 1048576 bytes, over the 65536 byte limit"):
        admission.outcome()
