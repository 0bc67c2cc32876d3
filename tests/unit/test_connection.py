"""Messages over TCP: deadlines, deaths, strangers, and frames that arrive in any way."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from weightsync.errors import (
    DigestError,
    ErrorFields,
    FencedError,
    ManifestError,
    PeerError,
    ProtocolError,
    SyncTimeoutError,
    WeightSyncError,
)
from weightsync.fleet.engine_call import BackgroundCall
from weightsync.fleet.engine_handle import ConnectedWorker, EngineHandle, UpdateState
from weightsync.fleet.fleet import Fleet
from weightsync.net import timeouts
from weightsync.net.authentication import FrameMac, greeting
from weightsync.net.connection import Connection, dial
from weightsync.net.listener import Listener
from weightsync.net.ranks import ALONE, Ranks
from weightsync.net.runtime import Deadline
from weightsync.net.wire import PROTOCOL, Commit, Failure, Hello, Message, Release, Value, decode, encode

LOCAL = "127.0.0.1"
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


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block ends, well or with an error, before `seconds` have passed."""
    started = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - started
    assert took < seconds, f"took {took:.2f} s"


def arrival(connection: Connection) -> None:
    """Wait until something can be read."""
    assert select.select([connection], [], [], 30)[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(30)
    while not condition():
        assert not deadline.passed()
        time.sleep(0.005)


def check_until_it_raises(connection: Connection) -> None:
    deadline = Deadline(30)
    while not deadline.passed():
        connection.check("test", 0.005)


@pytest.fixture
def keep() -> Iterator[contextlib.ExitStack]:
    """Closes what a test has opened."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(keep) -> tuple[Connection, Connection]:
    return connected(keep)


def connected(keep: contextlib.ExitStack) -> tuple[Connection, Connection]:
    """Two ends of one connection."""
    with socket.create_server((LOCAL, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    seals = [(FrameMac(b"one"), FrameMac(b"other")), (FrameMac(b"other"), FrameMac(b"one"))]
    connections = Connection(one, "the other", *seals[0]), Connection(other, "the one", *seals[1])
    for connection in connections:
        keep.callback(connection.close)
    return connections


@pytest.fixture
def listener(keep) -> Listener:
    listener = Listener()
    keep.callback(listener.close)
    return listener


def knock(listener: Listener, keep: contextlib.ExitStack) -> socket.socket:
    """A bare connection to the hub."""
    sock = socket.create_connection(listener.listen(LOCAL))
    keep.callback(sock.close)
    return sock


def arrive(listener: Listener, keep: contextlib.ExitStack, token: str = "", **fields: Any) -> Connection:
    """A worker that introduces itself to the hub, which has answered its greeting and not read its `Hello`."""
    address, hello = listener.listen(LOCAL), replace(HELLO, **fields)
    found: list[Connection | WeightSyncError] = []

    def arrive() -> None:
        try:
            found.append(dial(*address, token or listener.token, hello, "trainer rank 0", Deadline(30)))
        except WeightSyncError as error:
            found.append(error)

    before = {*listener._newcomers}
    dialling = threading.Thread(target=arrive)
    dialling.start()
    while not any(newcomer.connection is not None for newcomer in {*listener._newcomers} - before):
        listener._poll_once([], Deadline(0.01))
    dialling.join(30)
    if isinstance(found[0], WeightSyncError):
        raise found[0]
    keep.callback(found[0].close)
    return found[0]


def admit(listener: Listener, timeout_s: float = 5.0, group: int = 0) -> list[tuple[Hello, Connection]]:
    return listener.admit("worker", group, Deadline(timeout_s), "init", lambda: None)


def two_workers(listener: Listener, keep: contextlib.ExitStack) -> tuple[list[Connection], list[Connection]]:
    """Both ends of the connections of two admitted workers: the hub's, the workers'."""
    theirs = [arrive(listener, keep, rank=rank, world=2) for rank in (0, 1)]
    ours = [connection for _, connection in admit(listener)]
    for connection in ours:
        keep.callback(connection.close)
    return ours, theirs


def say(connection: Connection, message: Message) -> None:
    connection.send(message, Deadline(30), "test")


def failure(error: WeightSyncError) -> Failure:
    return Failure(error.to_fields())


def raw(connection: Connection) -> socket.socket:
    return connection._sock


def sealed(connection: Connection, *frames: bytes) -> bytes:
    """The bytes that `connection` sends for these frames."""
    return b"".join(frame + connection._sent.of(frame) for frame in frames)


# ---------------------------------------------------------------------------------------------------------------
# One connection


def test_a_peer_that_has_finished_is_answered_until_the_other_end_hangs_up(pair):
    one, other = pair
    say(one, Commit(1))
    assert not other.has_ended(0.0)
    one.finish(Release(), Deadline(30), "test")
    assert other.has_ended(30)
    assert [other.receive(Deadline(30), "test") for _ in range(2)] == [Commit(1), Release()]
    assert not other.is_open()
    say(other, Commit(2))
    assert one.receive(Deadline(30), "test") == Commit(2)
    assert not one.has_ended(0.0)
    other.close()
    assert other.has_ended(0.0)
    assert one.has_ended(30)
    for each in pair:
        each.close()
        each.finish(Release(), Deadline(30), "test")


def test_messages_come_in_the_order_in_which_they_were_sent(pair):
    one, other = pair
    sent = [Commit(1), Value.of({"a": [1, None, "\x00", 2.5]}), Release()]
    for message in sent:
        say(one, message)
    assert [other.receive(Deadline(30), "test") for _ in sent] == sent
    say(other, Commit(2))
    assert one.expect(Commit, Deadline(30), "test") == Commit(2)


def test_a_frame_may_arrive_byte_by_byte(pair):
    one, other = pair
    received: list[Message] = []
    reader = threading.Thread(target=lambda: received.extend(other.receive(Deadline(30), "test") for _ in range(2)))
    reader.start()
    for byte in sealed(one, encode(Value.of([1, 2, 3])), encode(Commit(9))):
        raw(one).send(bytes([byte]))
        time.sleep(0.0005)
    reader.join(5)
    assert received == [Value.of([1, 2, 3]), Commit(9)]


def test_many_frames_may_arrive_at_once(pair):
    one, other = pair
    raw(one).send(sealed(one, *(encode(Commit(n)) for n in range(100))))
    assert [other.receive(Deadline(30), "test") for _ in range(100)] == [Commit(n) for n in range(100)]


def test_no_frame_is_decoded_before_its_seal_was_checked(pair, monkeypatch):
    """A peer without the key reaches the check of 16 bytes, and no decoder."""
    one, other = pair
    decoded = []
    monkeypatch.setattr("weightsync.net.wire.decode", lambda body: decoded.append(body) or decode(body))
    changed = bytearray(sealed(one, encode(Commit(1))))
    changed[-1] ^= 1
    raw(one).sendall(changed)
    with pytest.raises(ProtocolError, match="a frame has a wrong seal"):
        other.expect(Commit, Deadline(5), "load")
    assert decoded == []


def test_a_changed_frame_that_the_ping_thread_reads_ends_the_connection(pair):
    one, other = pair
    changed = bytearray(sealed(one, encode(Commit(1))))
    changed[-1] ^= 1
    raw(one).sendall(changed + sealed(one, encode(Commit(2))))
    arrival(other)
    other.answer_pings()
    assert not other.is_open()
    with pytest.raises(ProtocolError, match="a frame has a wrong seal"):
        other.receive(Deadline(30), "test")


def test_messages_that_nobody_asked_for_do_not_pile_up(pair):
    one, other = pair
    other.most_bytes = 1 << 16
    raw(one).sendall(sealed(one, *(encode(Release()) for _ in range(300))))
    with pytest.raises(ProtocolError, match="the peer has sent more messages than this process has requested"):
        check_until_it_raises(other)
    assert len(other._inbox) < 257


def test_messages_that_are_taken_leave_room_for_others(pair):
    one, other = pair
    one.most_bytes = other.most_bytes = 1 << 16
    for number in range(300):
        say(one, Commit(number))
        assert other.receive(Deadline(30), "test") == Commit(number)


def test_a_large_frame_takes_less_than_four_times_its_bytes_until_it_is_a_message(pair):
    ours, theirs = pair
    data = sealed(ours, encode(Value.of("x" * 8_000_000)))
    sending = threading.Thread(target=raw(ours).sendall, args=(data,))
    raw(ours).setblocking(True)
    tracemalloc.start()
    try:
        sending.start()
        theirs.receive(Deadline(30), "test")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        sending.join()
    assert peak_bytes < 4 * len(data)


def test_silence_runs_into_the_deadline_and_says_who_is_silent(pair):
    with within(10.0), pytest.raises(SyncTimeoutError, match=r"no answer from the other within 0\.2 s") as raised:
        pair[0].receive(Deadline(0.2), "plan")
    assert (raised.value.waiting_for, raised.value.phase) == (["the other"], "plan")


def test_half_a_frame_is_silence(pair):
    one, other = pair
    raw(one).send(sealed(one, encode(Commit(1)))[:-1])
    with within(10.0), pytest.raises(SyncTimeoutError):
        other.receive(Deadline(0.2), "test")


def test_a_peer_that_does_not_read_runs_into_the_deadline(pair):
    with within(10.0), pytest.raises(SyncTimeoutError, match="the other"):
        pair[0].send(Value.of("x" * (64 << 20)), Deadline(0.3), "test")


def test_large_messages_both_ways_at_once_do_not_block_each_other(pair):
    content = os.urandom(1 << 19).hex() * 48
    received: dict[Connection, Message] = {}

    def talk(connection: Connection) -> None:
        connection.send(Value.of(content), Deadline(20), "test")
        received[connection] = connection.receive(Deadline(20), "test")

    threads = [threading.Thread(target=talk, args=(connection,)) for connection in pair]
    with within(20):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(25)
    assert [received.get(connection) == Value.of(content) for connection in pair] == [True, True]


def test_a_death_is_noticed_at_once_by_whoever_waits(pair):
    one, other = pair
    threading.Timer(0.2, other.close).start()
    with within(10.0), pytest.raises(PeerError, match="the other closed its connection") as raised:
        one.receive(Deadline(30), "load")
    assert (raised.value.who, raised.value.phase) == ("the other", "load")


def test_a_death_is_noticed_at_once_by_whoever_sends(pair):
    one, other = pair
    threading.Timer(0.2, other.close).start()
    with within(10.0), pytest.raises(PeerError, match="the other closed its connection"):
        one.send(Value.of("x" * (64 << 20)), Deadline(30), "test")


def test_what_a_peer_said_before_it_went_comes_first(pair):
    one, other = pair
    say(other, Commit(1))
    say(other, failure(DigestError("the bytes differ", who="worker 1")))
    other.close()
    assert one.receive(Deadline(30), "test") == Commit(1)
    for _ in range(2):
        with pytest.raises(DigestError, match=r"the bytes differ \[worker 1\]"):
            one.receive(Deadline(30), "test")


def test_a_failed_peer_is_heard_by_whoever_sends_to_it(pair):
    """The failure lies unread when a send finds that the connection is broken: it is the better cause."""
    one, other = pair
    say(one, Commit(1))  # never read, so that closing breaks the connection instead of ending it
    say(other, failure(DigestError("the bytes differ")))
    other.close()

    def send_until_it_breaks() -> None:
        for _ in range(100):
            say(one, Commit(2))
            time.sleep(0.01)

    with pytest.raises(DigestError, match="the bytes differ"):
        send_until_it_breaks()


def test_the_facts_of_a_failure_cross(pair):
    one, other = pair
    say(one, failure(ManifestError("no", missing=["a"], mismatched={"b": "shape"}, who="engine 0", phase="plan")))
    with pytest.raises(ManifestError) as raised:
        other.receive(Deadline(30), "test")
    assert (raised.value.missing, raised.value.mismatched) == (["a"], {"b": "shape"})
    assert (raised.value.who, raised.value.phase) == ("engine 0", "plan")


@pytest.mark.parametrize(
    "error",
    [
        {},
        {"kind": "DigestError", "message": 5, "who": None, "phase": None, "facts": {}},
        {"kind": "DigestError", "message": "m", "who": 3, "phase": None, "facts": {}},
        {"kind": "DigestError", "message": "m", "who": None, "phase": None, "facts": {"waiting_for": 1}},
    ],
)
def test_a_failure_that_is_not_in_words_is_a_failure_all_the_same(pair, error):
    one, other = pair
    body = msgspec.msgpack.encode({"t": "Failure", "error": error})
    raw(one).send(sealed(one, len(body).to_bytes(4, "little") + body))
    with pytest.raises(ProtocolError, match="is no message"):
        other.receive(Deadline(30), "test")


@pytest.mark.parametrize("kind", ["DigestError", "ManifestError", "Unknown", "BaseException", "", "WeightSyncError"])
@pytest.mark.parametrize("fact", ["args", "who", "message", "facts", "to_fields", "__class__", "__dict__", "", "other"])
def test_a_failure_always_has_a_text(pair, kind, fact):
    one, other = pair
    say(one, Failure(ErrorFields(kind, "boo", "worker", "load", {fact: ["x"]})))
    with pytest.raises(WeightSyncError, match="boo") as raised:
        other.receive(Deadline(30), "test")
    assert raised.value.to_fields().kind == type(raised.value).__name__


def test_another_message_than_the_expected_one_is_refused(pair):
    one, other = pair
    say(one, Release())
    with pytest.raises(ProtocolError, match="the one sent Release, expected Commit"):
        other.expect(Commit, Deadline(30), "test")


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x03\x00\x00\x00abc"])
def test_rubbish_is_refused_and_says_who_sent_it(pair, frame):
    one, other = pair
    raw(one).send(sealed(one, frame))
    with pytest.raises(ProtocolError) as raised:
        other.receive(Deadline(30), "test")
    assert raised.value.who == "the one"


def test_check_finds_bad_news_and_consumes_nothing(pair):
    one, other = pair
    one.check("test")
    say(other, Commit(1))
    arrival(one)
    one.check("test", 0.05)
    assert one.receive(Deadline(30), "test") == Commit(1)
    say(other, Commit(2))
    say(other, failure(DigestError("bad")))
    with pytest.raises(DigestError):
        check_until_it_raises(one)
    assert one.pop() == Commit(2)
    other.close()
    with pytest.raises(DigestError):
        one.check("test", 0.05)


def test_a_connection_is_open_until_the_peer_closes(keep):
    one, other = connected(keep)
    assert one.is_open()
    say(other, failure(WeightSyncError("I give up")))
    arrival(one)
    assert one.is_open(), "one that gives up may have more to do before it hangs up"
    other.close()
    until(lambda: not one.is_open())
    assert str(one.reported()) == "I give up"

    one.close()
    one.close()
    assert not one.is_open()


def test_a_peer_answers_whether_it_is_alive_from_any_thread_and_in_any_wait(pair):
    one, other = pair
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            other.answer_pings()

    looking = threading.Thread(target=look)
    looking.start()
    assert one.answers(30.0)
    over.set()
    looking.join()
    conversing = threading.Thread(target=lambda: other.receive(Deadline(30), "test"))
    conversing.start()
    assert one.answers(30.0)
    say(one, Commit(2))
    conversing.join()
    say(other, Release())
    assert one.receive(Deadline(30), "test") == Release(), "answers are no messages"


def test_a_peer_that_does_not_look_does_not_answer(pair):
    one, other = pair
    assert not one.answers(0.05)
    other.close()
    assert not one.answers(30.0)


def test_an_answer_that_comes_too_late_is_no_message(pair):
    one, other = pair
    assert not one.answers(0.05)
    other.answer_pings()
    say(other, Release())
    assert one.receive(Deadline(30), "test") == Release()


def test_check_finds_the_end_behind_the_last_message(pair):
    one, other = pair
    say(other, Commit(1))
    other.close()
    arrival(one)
    with pytest.raises(PeerError, match="closed its connection"):
        one.check("test", 0.05)
    assert one.pop() == Commit(1)


def test_that_one_was_fenced_off_explains_what_else_was_reported(pair):
    one, other = pair
    say(other, failure(DigestError("bad")))
    say(other, failure(FencedError("taken over")))
    other.close()
    until(lambda: not one.is_open())
    with pytest.raises(FencedError, match="taken over"):
        one.check("test")
    with pytest.raises(FencedError, match="taken over"):
        one.receive(Deadline(30), "test")


def test_a_connection_is_over_though_what_the_peer_said_before_has_not_been_read(pair):
    one, other = pair
    say(other, Release())
    say(other, Commit(3))
    other.close()
    until(lambda: not one.is_open())


def test_closing_counts_though_a_forked_child_has_a_copy_of_the_descriptor(keep):
    """So have a data loader's workers; with a copy still open, `close` alone tells the peer nothing."""
    one, other = connected(keep)
    keep.callback(os.close, os.dup(one.fileno()))
    one.close()
    with within(10.0), pytest.raises(PeerError):
        other.receive(Deadline(30), "test")

    listener = Listener()
    host, port = listener.listen(LOCAL)
    keep.callback(os.close, os.dup(listener._listeners[0].fileno()))
    listener.close()
    with pytest.raises(PeerError, match="could not reach"):
        dial(host, port, "", HELLO, "trainer rank 0", Deadline(30))


def test_descriptors_beyond_the_reach_of_select(keep):
    """A process that holds an engine, or many ranks, has more than 1024 descriptors; select() cannot wait for those."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip(f"only {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    keep.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    for _ in range(1100):
        keep.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    listener = Listener()
    keep.callback(listener.close)
    ours, theirs = two_workers(listener, keep)
    assert min(connection.fileno() for connection in (*ours, *theirs)) > 1023
    for number, connection in enumerate(theirs):
        say(connection, Commit(number))
    assert listener.collect(ours, Commit, Deadline(30), "test") == [Commit(0), Commit(1)]
    with pytest.raises(SyncTimeoutError):
        ours[0].send(Value.of("x" * (64 << 20)), Deadline(0.1), "test")
    with pytest.raises(SyncTimeoutError):
        theirs[1].receive(Deadline(0.1), "test")


# ---------------------------------------------------------------------------------------------------------------
# The hub: who comes in


def test_a_group_is_admitted_in_rank_order_whoever_comes_first(listener, keep):
    for rank in (2, 0, 1):
        arrive(listener, keep, rank=rank, world=3, name=f"tp={rank}")
    admitted = admit(listener)
    assert [hello.rank for hello, _ in admitted] == [0, 1, 2]
    assert [connection.peer for _, connection in admitted] == [f"engine 0 worker tp={rank}" for rank in (0, 1, 2)]
    for _, connection in admitted:
        connection.close()


def test_groups_do_not_mix(listener, keep):
    for group in (0, 1):
        arrive(listener, keep, group=group, boot_id=f"of {group}")
    arrive(listener, keep, role="rank", boot_id="of a rank")
    ((first, a),) = admit(listener, group=1)
    ((second, b),) = admit(listener, group=0)
    ((third, c),) = listener.admit("rank", 0, Deadline(30), "init", lambda: None)
    assert (first.boot_id, second.boot_id, third.boot_id) == ("of 1", "of 0", "of a rank")
    for connection in (a, b, c):
        connection.close()


def test_who_is_still_missing_is_said(listener, keep):
    with within(10.0), pytest.raises(SyncTimeoutError, match=r"workers of engine 0 \(none has connected"):
        admit(listener, 0.2)
    come = arrive(listener, keep, rank=1, world=2)
    with within(10.0), pytest.raises(SyncTimeoutError, match=r"workers of engine 0 \(1 of 2 have connected to 127\."):
        admit(listener, 0.2)
    # Whoever had come is told at once, and is not left waiting.
    with within(10.0), pytest.raises(SyncTimeoutError, match=r"1 of 2 have connected"):
        come.receive(Deadline(30), "init")


def test_workers_that_do_not_agree_on_how_many_they_are(listener, keep):
    arrive(listener, keep, rank=0, world=2)
    arrive(listener, keep, rank=1, world=3)
    with within(10.0), pytest.raises(ProtocolError, match="their number: number 0 of 2, number 1 of 3"):
        admit(listener, 10)


def test_two_workers_with_one_number(listener, keep):
    first, second = arrive(listener, keep, world=2), arrive(listener, keep, world=2)
    with within(10.0), pytest.raises(ProtocolError, match=r"a second worker has number 0.*tp=0"):
        admit(listener, 10)
    for connection in (first, second):
        with pytest.raises(ProtocolError, match="a second worker"):
            connection.receive(Deadline(30), "init")


def test_what_check_raises_ends_the_wait(listener, keep):
    def check() -> None:
        raise DigestError("the engine says no")

    with within(10.0), pytest.raises(DigestError, match="the engine says no"):
        listener.admit("worker", 0, Deadline(30), "init", check)


def test_a_wrong_token_is_turned_away_and_others_are_admitted(listener, keep):
    for token in ("0" * 64, listener.token[:-1], listener.token.upper()):
        with pytest.raises(ProtocolError, match="another key, or another session's token"):
            arrive(listener, keep, token=token)
    arrive(listener, keep, boot_id="of the one that knows")
    ((hello, connection),) = admit(listener)
    assert hello.boot_id == "of the one that knows"
    connection.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode(Release()),
        encode(Failure(ErrorFields("DigestError", "boo", None, None, {}))),
        b"\xff\xff\xff\xff",
        b"\x02\x00\x00\x00\xc0\xc0",
        b"",
    ],
)
def test_strangers_are_turned_away_and_others_are_admitted(listener, keep, noise):
    stranger = knock(listener, keep)
    stranger.sendall(noise)
    stranger.shutdown(socket.SHUT_WR)
    arrive(listener, keep)
    ((_, connection),) = admit(listener)
    connection.close()
    stranger.settimeout(5)
    with suppress(ConnectionResetError):
        assert stranger.recv(100) == b""  # it was told nothing


def test_a_stranger_fills_no_memory(listener, keep):
    """It greets, announces the largest frame there is, and sends on and on."""
    stranger = knock(listener, keep)
    stranger.sendall(greeting(b"") + (1 << 28).to_bytes(4, "little"))
    taken = 0

    def flood() -> None:
        nonlocal taken
        with suppress(OSError):
            while taken < 64:
                stranger.sendall(bytes(1 << 20))
                taken += 1

    source = threading.Thread(target=flood)
    source.start()
    with pytest.raises(SyncTimeoutError):
        admit(listener, 0.5)
    source.join(5)
    assert taken < 64  # MiB, most of them in the sockets' own buffers


def test_who_never_introduces_itself_blocks_nobody(listener, keep):
    knock(listener, keep)
    knock(listener, keep).sendall(b"\x10")
    arrive(listener, keep)
    with within(10.0):
        ((_, connection),) = admit(listener)
    connection.close()


def test_who_goes_before_it_is_looked_at_blocks_nobody(listener, keep):
    for _ in range(5):
        sock = knock(listener, keep)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        sock.close()  # resets the connection
    arrive(listener, keep)
    ((_, connection),) = admit(listener)
    connection.close()


def test_another_protocol_is_an_error_on_both_sides(listener, keep):
    newer = arrive(listener, keep, protocol=PROTOCOL + 1, name="tp=3")
    with pytest.raises(ProtocolError, match=f"speaks wire protocol {PROTOCOL} and tp=3 speaks {PROTOCOL + 1}"):
        admit(listener)
    with pytest.raises(ProtocolError, match="install the same weightsync on both sides"):
        newer.receive(Deadline(30), "init")


def test_another_protocol_whose_speaker_has_gone_is_an_error_too(listener, keep):
    arrive(listener, keep, protocol=PROTOCOL + 1).close()
    with pytest.raises(ProtocolError, match="install the same"):
        admit(listener)


def test_a_failure_right_behind_the_introduction_is_heard(listener, keep):
    """So does a worker that is busy with another trainer."""
    connection = arrive(listener, keep)
    say(connection, failure(DigestError("busy")))
    connection.close()
    ((_, ours),) = admit(listener)
    keep.callback(ours.close)

    def ask() -> None:
        ours.send(Commit(1), Deadline(30), "plan")
        listener.collect([ours], Commit, Deadline(30), "plan")

    with pytest.raises(DigestError, match="busy"):
        ask()


def test_nobody_listens_where_we_dial(keep):
    with socket.create_server((LOCAL, 0)) as listener:
        address = listener.getsockname()
    with (
        within(10.0),
        pytest.raises(PeerError, match=r"worker tp=0 on .* could not reach trainer rank 0 at 127\.0\.0\.1:\d+"),
    ):
        dial(*address, "", HELLO, "trainer rank 0", Deadline(30))


def test_a_hub_listens_once_at_each_address_and_lets_go_of_everybody(keep):
    listener = Listener()
    address = listener.listen(LOCAL)
    assert listener.listen("127.0.0.1") == address
    newcomer, come = knock(listener, keep), arrive(listener, keep, world=2)
    with pytest.raises(WeightSyncError, match="stop"):
        listener.admit("worker", 1, Deadline(30), "init", stop_when(lambda: bool(listener._arrived)))
    with pytest.raises(WeightSyncError, match="stop"):
        come.receive(Deadline(30), "init")
    listener.close()
    listener.close()
    newcomer.settimeout(5)
    assert newcomer.recv(1) == b""
    with pytest.raises(PeerError):
        dial(*address, "", HELLO, "trainer rank 0", Deadline(30))


def stop_when(condition: Any) -> Any:
    def check() -> None:
        if condition():
            raise WeightSyncError("stop")

    return check


def test_a_closed_hub_lets_go_of_those_who_were_not_admitted(keep):
    listener = Listener()
    come = arrive(listener, keep, world=2)
    with pytest.raises(KeyboardInterrupt):
        listener.admit("worker", 0, Deadline(30), "init", interrupt_when(lambda: bool(listener._arrived)))
    listener.close()
    with within(10.0), pytest.raises(PeerError, match="closed its connection"):
        come.receive(Deadline(30), "init")


def interrupt_when(condition: Any) -> Any:
    def check() -> None:
        if condition():
            raise KeyboardInterrupt

    return check


# ---------------------------------------------------------------------------------------------------------------
# The hub: answers


def test_answers_come_in_the_order_of_the_peers(listener, keep):
    ours, theirs = two_workers(listener, keep)
    say(theirs[1], Commit(1))
    threading.Timer(0.1, say, (theirs[0], Commit(0))).start()
    assert listener.collect(ours, Commit, Deadline(30), "test") == [Commit(0), Commit(1)]


def test_one_answer_of_each_is_taken(listener, keep):
    ours, theirs = two_workers(listener, keep)
    for number in range(3):
        for connection in theirs:
            say(connection, Commit(number))
    for number in range(3):
        assert listener.collect(ours, Commit, Deadline(30), "test") == [Commit(number)] * 2


def test_who_owes_an_answer_is_said(listener, keep):
    ours, theirs = two_workers(listener, keep)
    say(theirs[0], Commit(0))
    with within(10.0), pytest.raises(SyncTimeoutError) as raised:
        listener.collect(ours, Commit, Deadline(0.2), "load")
    assert raised.value.waiting_for == [ours[1].peer]


def test_a_peer_that_stalls_in_the_middle_of_a_frame_blocks_nobody_else(listener, keep):
    ours, theirs = two_workers(listener, keep)
    raw(theirs[0]).send(sealed(theirs[0], encode(Commit(0)))[:7])
    say(theirs[1], failure(DigestError("bad bytes")))
    with within(10.0), pytest.raises(DigestError):
        listener.collect(ours, Commit, Deadline(30), "load")


def test_the_first_failure_is_raised_at_once(listener, keep):
    ours, theirs = two_workers(listener, keep)
    threading.Timer(0.1, say, (theirs[1], failure(DigestError("first")))).start()
    with within(10.0), pytest.raises(DigestError, match="first"):
        listener.collect(ours, Commit, Deadline(30), "load")


def test_a_failure_behind_an_answer_is_raised_at_once(listener, keep):
    ours, theirs = two_workers(listener, keep)
    say(theirs[0], Commit(0))
    say(theirs[0], failure(DigestError("after all")))
    with within(10.0), pytest.raises(DigestError, match="after all"):
        listener.collect(ours, Commit, Deadline(30), "load")


@pytest.mark.parametrize("answered", [False, True])
def test_the_first_death_is_raised_at_once(listener, keep, answered):
    ours, theirs = two_workers(listener, keep)
    if answered:
        say(theirs[1], Commit(1))
    threading.Timer(0.1, theirs[1].close).start()
    with within(10.0), pytest.raises(PeerError) as raised:
        listener.collect(ours, Commit, Deadline(30), "load")
    assert raised.value.who == ours[1].peer


def test_an_answer_counts_though_its_sender_has_gone(listener, keep):
    ours, theirs = two_workers(listener, keep)
    say(theirs[0], Commit(0))
    theirs[0].close()
    arrival(ours[0])
    say(theirs[1], Commit(1))
    assert listener.collect(ours, Commit, Deadline(30), "test") == [Commit(0), Commit(1)]


def test_a_wait_that_follows_a_death_does_not_spin(listener, keep):
    """A closed connection can always be read: it must not keep the hub awake while another answer is awaited."""
    ours, theirs = two_workers(listener, keep)
    say(theirs[0], Commit(0))
    say(theirs[0], Commit(0))
    theirs[0].close()
    arrival(ours[0])
    before = time.process_time()
    with suppress(PeerError, SyncTimeoutError):
        listener.collect(ours, Commit, Deadline(1.0), "test")
    assert time.process_time() - before < 0.5


def test_another_message_than_the_collected_kind_is_refused(listener, keep):
    ours, theirs = two_workers(listener, keep)
    say(theirs[1], Release())
    with within(10.0), pytest.raises(ProtocolError, match="sent Release, expected Commit"):
        listener.collect(ours, Commit, Deadline(30), "load")


def test_newcomers_are_looked_at_while_answers_are_awaited(listener, keep):
    ours, theirs = two_workers(listener, keep)
    stranger = knock(listener, keep)
    stranger.sendall(b"rubbish rubbish")
    for connection in theirs:
        threading.Timer(0.2, say, (connection, Commit(3))).start()
    assert listener.collect(ours, Commit, Deadline(30), "test") == [Commit(3)] * 2


def test_an_answer_that_check_has_read_ends_the_wait(listener, keep, monkeypatch):
    """No socket becomes readable for it any more."""
    monkeypatch.setattr(timeouts, "LISTENER_POLL_S", 25.0)
    ours, theirs = two_workers(listener, keep)
    for connection in theirs:
        say(connection, Commit(3))

    def check() -> None:
        for connection in ours:
            arrival(connection)
            connection.check("test")

    with within(10.0):
        assert listener.collect(ours, Commit, Deadline(30), "test", check) == [Commit(3)] * 2


# ---------------------------------------------------------------------------------------------------------------
# Calls beside the conversation


def test_the_end_of_a_call_wakes_the_hub(listener, keep, monkeypatch):
    """Without the wake it would sleep for a turn before it looked."""
    monkeypatch.setattr(timeouts, "LISTENER_POLL_S", 25.0)
    ours, _ = two_workers(listener, keep)
    ended: list[float] = []

    def work() -> None:
        time.sleep(0.2)
        ended.append(time.monotonic())
        raise DigestError("the call failed")

    call = BackgroundCall(listener, "work", work)

    def check() -> None:
        if call.error is not None:
            raise call.error

    with pytest.raises(DigestError, match="the call failed"):
        listener.collect(ours, Commit, Deadline(30), "load", check)
    assert time.monotonic() - ended[0] < 10
    call.join(5)


def test_an_answer_that_comes_in_with_a_ping_wakes_the_hub(listener, keep, monkeypatch):
    """The thread that answers pings may read it after the hub has looked, and before it sleeps."""
    monkeypatch.setattr(timeouts, "LISTENER_POLL_S", 25.0)
    monkeypatch.setattr(timeouts, "LEASE_LOOK_S", 3600.0)
    (mine,), (worker,) = (each[:1] for each in two_workers(listener, keep))
    ranks = Ranks(5.0, ALONE)
    ranks.listener = listener
    engine: Any = SimpleNamespace(name="an engine")
    fleet = Fleet([engine], ranks, "keep", 5.0)
    keep.callback(fleet.close)
    fleet.handles[0].workers = [ConnectedWorker(HELLO, mine)]

    def check() -> None:
        worker.send(Commit(3), Deadline(5), "test")
        arrival(mine)
        fleet._answer_pings()

    with within(10.0):
        assert listener.collect([mine], Commit, Deadline(30), "test", check) == [Commit(3)]


@pytest.mark.parametrize("method", [lambda one: one.pause("keep"), EngineHandle.start])
def test_a_call_that_ends_late_takes_nothing_back_from_another_trainer(method, pair):
    mine, worker = pair
    calls: list[str] = []

    def fall_behind(*_: Any) -> None:
        one.state = UpdateState.FAILED
        worker.send(Failure(FencedError("another trainer has it").to_fields()), Deadline(5), "test")
        worker.close()

    engine: Any = SimpleNamespace(
        pause=fall_behind, start=fall_behind, resume=lambda: calls.append("resume"), finish=calls.append
    )
    one = EngineHandle(engine, workers=[ConnectedWorker(HELLO, mine)])
    with pytest.raises(FencedError):
        method(one)
    assert not calls


def test_a_mark_that_comes_late_is_taken_back():
    said: list[str] = []

    def fall_behind(version: str) -> None:
        if not one.has_failed:
            one.state = UpdateState.FAILED
            one.roll_back()
        said.append(version)

    engine: Any = SimpleNamespace(set_version=fall_behind)
    one = EngineHandle(engine, version="7")
    one.mark()
    assert said[-1] == "7"


def test_a_hub_that_nobody_waits_at_can_be_woken_any_number_of_times(listener):
    with within(10.0):
        for _ in range(5000):
            listener.wake()


@pytest.mark.parametrize("error", [RuntimeError("odd"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_call_raises_is_kept(listener, error):
    def work() -> None:
        raise error

    call = BackgroundCall(listener, "work", work)
    call.join(5)
    assert type(call.error) is WeightSyncError
    assert str(call.error).startswith(type(error).__name__)


def test_a_call_may_end_after_its_hub(keep):
    listener = Listener()
    done = threading.Event()
    call = BackgroundCall(listener, "work", done.wait, 5)
    listener.close()
    done.set()
    call.join(5)
    assert not call.is_alive()
    assert call.error is None
