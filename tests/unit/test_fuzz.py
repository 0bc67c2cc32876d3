"""Spoilt bytes and spoilt messages, in every state of both ends. `make fuzz` says millions of them."""

from __future__ import annotations

import contextlib
import os
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutated_frames import host, recorded_push, run

from weightsync.errors import ErrorFields, ProtocolError, WeightSyncError
from weightsync.net.authentication import ANSWER_BYTES, GREETING_BYTES, FrameMac, authenticate, derive_keys, greeting
from weightsync.net.connection import Connection
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline
from weightsync.net.wire import (
    CLEAN,
    PREFIX_BYTES,
    PROTOCOL,
    Commit,
    Committed,
    Connect,
    Failure,
    Go,
    Hello,
    Message,
    PackedLoadPlan,
    PlanRequest,
    Release,
    Value,
    decode,
    encode,
)
from weightsync.planning.layout import Box
from weightsync.worker.session import WorkerSession

LOCAL, TOKEN = "127.0.0.1", "token"
HELLO = Hello(PROTOCOL, "worker", 0, 0, 1, "boot", "cpu", "", "tp=0", 0, CLEAN, False)
RUNS = [(0, 1)]
BOXES = (Box((0,), (1,)),)
PLAN = PackedLoadPlan({"float32": RUNS}, [(BOXES, RUNS)], {}, [RUNS], [], [], [], {"in_place": 1}, [], [], [], {})
MESSAGES: list[Message] = [HELLO, PLAN, Commit(3), Value.of([1, {"k": None}]), Committed(3, 0.5)]
MESSAGES += [Failure(ErrorFields("ManifestError", "m", None, "plan", {"missing": ["w"]})), Release()]

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, float("inf"), "", "w", b"b"]),
    st.sampled_from([[], {}, [[]], {"": None}, "x" * 5000, "../../etc/passwd", "/etc/passwd", "\x00", "cuda", "fd"]),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=8),
)


@st.composite
def spoilt_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """Some bytes, in which a few were changed, cut out, put in or repeated."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = at + draw(st.integers(0, 8))
        piece = draw(st.sampled_from([data[at:end] * 2, bytearray(), bytearray(draw(st.binary(max_size=8)))]))
        data[at:end] = piece
    return bytes(data)


@st.composite
def spoilt_content(draw: st.DrawFn, message: Message) -> bytes:
    """A frame of msgpack, in which some values of a message were replaced by others."""
    content = msgspec.msgpack.decode(encode(message)[PREFIX_BYTES:])
    for _ in range(draw(st.integers(1, 3))):
        places = [place for place in _places(content) if place[1] != "t"]
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["replace", "drop", "repeat"]))
        if action == "replace":
            holder[key] = deepcopy(draw(ODD))
        elif action == "drop":
            del holder[key]
        elif isinstance(holder, list):
            holder.append(deepcopy(holder[key]))
        else:
            holder[draw(st.text(max_size=4))] = deepcopy(holder[key])
    body = msgspec.msgpack.encode(content)
    return len(body).to_bytes(4, "little") + body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def spoilt(message: Message) -> st.SearchStrategy[bytes]:
    """A message's frame, spoilt in one way or the other."""
    return st.one_of(spoilt_bytes(encode(message)), spoilt_content(message))


@contextlib.contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server((LOCAL, 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def ends(one: socket.socket, other: socket.socket) -> tuple[Connection, Connection]:
    return Connection(one, "one", FrameMac(b"a"), FrameMac(b"b")), Connection(
        other, "other", FrameMac(b"b"), FrameMac(b"a")
    )


def send_raw(connection: Connection, frames: list[bytes]) -> None:
    """Send frames with good seals, and nothing more."""
    connection._sock.sendall(b"".join(frame + connection._sent.of(frame) for frame in frames))
    connection._sock.shutdown(socket.SHUT_WR)


def only_our_errors(call: Callable[[], object]) -> None:
    """Call until it raises, which must be an error of weightsync's with a text."""
    problem: WeightSyncError | None = None
    try:
        while call() is not None:
            pass
    except WeightSyncError as error:
        problem = error
    assert problem is None or (str(problem) and encode(Failure(problem.to_fields())))


@fuzz
@given(st.data())
def test_a_spoilt_body_is_a_message_or_a_protocol_error_and_takes_little_memory(draw: st.DataObject):
    frame = draw.draw(st.sampled_from(MESSAGES).flatmap(spoilt))
    tracemalloc.start()
    try:
        decode(frame[PREFIX_BYTES:])
    except ProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(frame) + (1 << 16)


@fuzz
@given(st.data())
def test_whatever_comes_is_turned_away_or_comes_in(draw: st.DataObject):
    """A newcomer: its greeting, its Hello with and without a good seal, and more behind them."""
    listener = Listener()
    try:
        with contextlib.closing(socket.create_connection(listener.listen(LOCAL))) as sock:
            sock.settimeout(5)
            mine = greeting(b"")
            if draw.draw(st.booleans()):
                mine = draw.draw(spoilt_bytes(mine))
            sock.sendall(mine)
            for _ in range(2):
                listener._poll_once([], Deadline(0.02))
            answer = b""
            with contextlib.suppress(OSError):
                sock.settimeout(0.02)
                answer = sock.recv(ANSWER_BYTES)
            if len(answer) == ANSWER_BYTES:
                seal = derive_keys(b"", listener.token, mine[:GREETING_BYTES], answer[:GREETING_BYTES])[1]
                frame = draw.draw(spoilt(HELLO))
                ending = draw.draw(st.sampled_from([seal.of(frame), bytes(16), b""]))
                with contextlib.suppress(OSError):
                    sock.sendall(frame + ending)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            for _ in range(2):
                only_our_errors(lambda: listener._poll_once([], Deadline(0.02)) or None)
        assert not listener._newcomers or len(listener._newcomers) == 1
    finally:
        listener.close()


@fuzz
@given(st.data())
def test_whatever_a_listener_answers_a_dialer_believes_it_or_raises(draw: st.DataObject):
    with sockets() as (one, other):
        theirs = greeting(b"")
        proof = derive_keys(b"", TOKEN, greeting(b""), theirs)[0]
        other.sendall(draw.draw(st.one_of(spoilt_bytes(theirs + proof), st.binary(max_size=200))))
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(WeightSyncError):  # it cannot know the dialer's nonce
            authenticate(one, TOKEN, "a peer", Deadline(5))


@fuzz
@given(st.data())
def test_whatever_is_sent_in_a_session_a_connection_raises_only_our_errors(draw: st.DataObject):
    with sockets() as pair:
        one, other = ends(*pair)
        frames = draw.draw(st.lists(st.sampled_from(MESSAGES).flatmap(spoilt), min_size=1, max_size=3))
        if draw.draw(st.booleans()):
            send_raw(one, frames)
        else:
            pair[0].sendall(draw.draw(spoilt_bytes(b"".join(frame + one._sent.of(frame) for frame in frames))))
            pair[0].shutdown(socket.SHUT_WR)
        only_our_errors(lambda: other.receive(Deadline(5), "test"))


@fuzz
@given(st.data())
def test_whatever_a_worker_answers_the_trainer_raises_only_our_errors(draw: st.DataObject):
    listener = Listener()
    with sockets() as pair, contextlib.closing(listener):
        one, other = ends(*pair)
        kind = draw.draw(st.sampled_from([PackedLoadPlan, Committed, Value]))
        send_raw(one, [draw.draw(st.sampled_from(MESSAGES).flatmap(spoilt)), encode(Release())])
        with contextlib.suppress(WeightSyncError):
            answers = listener.collect([other], kind, Deadline(5), "test")
            assert [type(answer) for answer in answers] == [kind]


@pytest.fixture(scope="module")
def push() -> Iterator[list[Message]]:
    with recorded_push() as (asked, _):
        assert [type(message) for message in asked] == [PlanRequest, Connect, Go, Commit]
        yield asked


def serve(session: WorkerSession, frames: list[bytes]) -> list[Message]:
    """Let a worker answer these frames, after which the trainer says no more. Return what it answers."""
    with sockets() as pair:
        trainer, worker = ends(*pair)
        send_raw(trainer, frames)
        session._connection, session._timeout_s = worker, 1.0
        session._serve("init")
        worker.close()
        answers = []
        with contextlib.suppress(WeightSyncError):
            while True:
                trainer.read("test")
        while (message := trainer.pop()) is not None:
            answers.append(message)
        return answers


def test_a_worker_answers_the_recorded_push(push: list[Message]):
    session = WorkerSession(host())
    answers = serve(session, [encode(message) for message in push])
    assert [type(answer).__name__ for answer in answers] == ["PackedLoadPlan", "Connected", "Done", "Committed"]
    assert session.receiver.state == CLEAN


@fuzz
@given(st.data())
def test_whatever_a_trainer_says_a_worker_answers_and_serves_the_next_push(push: list[Message], draw: st.DataObject):
    """In each state: one message is spoilt, and those before it are not. A whole push heals the engine."""
    session = WorkerSession(host())
    number = draw.draw(st.integers(0, len(push) - 1))
    frames = [encode(message) for message in push[:number]]
    frames += [draw.draw(spoilt(draw.draw(st.sampled_from([push[number], *MESSAGES])))), encode(push[-1])]
    answers = serve(session, frames)
    assert all(isinstance(answer, Message) for answer in answers)
    version = session.receiver.version + 1
    again = [push[0], push[1], msgspec.structs.replace(push[2], version=version, sample=None), Commit(version)]
    if version < 2**62:
        assert [*map(type, serve(session, [encode(message) for message in again]))][-1] is Committed
        assert session.receiver.state == CLEAN


INFO = {"session": "s", "engine": 0, "host": LOCAL, "port": 1, "token": "t", "timeout_s": 1.0}


@fuzz
@given(st.sampled_from(sorted(INFO)), ODD, st.booleans())
def test_whatever_an_init_says_nothing_is_written(name: str, value: Any, more: bool):
    session = WorkerSession(host())
    info = {**INFO, name: value, **({"surplus": value} if more else {})}
    if name == "host" and isinstance(value, str) and value not in ("", "\x00"):
        info["host"] = LOCAL  # which no resolver is asked for
    with contextlib.suppress(WeightSyncError):  # it says why it met nobody
        session.init(info)
    assert session.receiver.state == CLEAN
    assert session._connection is None


def test_each_state_of_both_ends_takes_spoilt_frames_or_raises_an_error_of_its_own():
    found = run(8192, seed=1)
    assert found["crashes"] == []
    assert found["foreign"] == {}
    assert found["examples"] == 8192
