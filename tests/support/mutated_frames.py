"""Spoils recorded conversations and says them to both ends, in each of their states: `make fuzz EXAMPLES=10000000`.

The ends are the real ones, from the bytes that a socket gives to the errors that come out. Only the sockets are not:
one gives what it was told to give, and then the peer has gone. So nothing here may wait, and what does is a hang.
An outcome is a message that was taken, or the class of a `WeightSyncError`. Anything else is printed, and a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, module_of

from weightsync import WeightSync
from weightsync.errors import EngineBusyError, ErrorFields, WeightSyncError
from weightsync.net.authentication import GREETING_BYTES, FrameMac, authenticate, derive_keys, greeting
from weightsync.net.connection import Connection
from weightsync.net.listener import Listener, _UnauthenticatedPeer
from weightsync.net.runtime import Deadline
from weightsync.net.wire import (
    CLEAN,
    PREFIX_BYTES,
    PROTOCOL,
    Commit,
    Committed,
    Connect,
    Connected,
    Done,
    ExportParameters,
    Failure,
    Go,
    Hello,
    Message,
    PackedLoadPlan,
    ParametersExported,
    Ping,
    PlanRequest,
    Pong,
    Ready,
    Release,
    Value,
    decode,
    encode,
)
from weightsync.planning.layout import Box, ShardLocation
from weightsync.transports.shared_handles import SharedFile
from weightsync.worker.session import WorkerSession

_LOOK_EVERY = 1 << 16
_TRACE_EVERY = 1 << 12
_HANG_S = 120
_KEY = b"k" * 32
HELLO = Hello(PROTOCOL, "worker", 0, 0, 1, "boot", "cpu", "", "tp=0", 0, CLEAN, False)
FAILURE = Failure(ErrorFields("ManifestError", "m", None, "plan", {"missing": ["w"], "mismatched": {"w": "shape"}}))
OTHERS: list[Message] = [
    HELLO,
    FAILURE,
    Ready(),
    Release(),
    Ping(),
    Pong(True),
    Value.of([1, {"k": None}]),
    ExportParameters(["a:1:2"]),
]
OTHERS += [ParametersExported("e", [(0, "fd", {})], [ShardLocation("w", Box((0,), (2,)), 0, 0, 0, (1,), "float32")])]
EXTREMES = [0, 1, -1, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 1e308, 0.5]
EXTREMES += [float("inf"), float("nan"), None, True, "", "w", "\0", "../../etc/passwd", "cuda", "fd", "x" * 999, [], {}]


@contextlib.contextmanager
def recorded_push() -> Iterator[tuple[list[Message], list[Message]]]:
    """What trainer and worker say in a push over shared memory, which stays there."""
    asked: list[Message] = []
    answered: list[Message] = []
    files: list[SharedFile] = []
    send, close = Connection.send, SharedFile.close

    def record(self: Connection, message: Message, deadline: Deadline, phase: str) -> None:
        if isinstance(message, (PlanRequest, Connect, Go, Commit)):
            asked.append(message)
        elif isinstance(message, (PackedLoadPlan, Connected, Done, Committed)):
            answered.append(message)
        send(self, message, deadline, phase)

    Connection.send, SharedFile.close = record, lambda file: files.append(file)  # type: ignore[method-assign]
    try:
        engine = FakeEngine(host())
        sync = WeightSync("fsdp", "ipc", engine, timeout_s=30)
        sync.push(module_of(checkpoint(2)))
        Connection.send, SharedFile.close = send, close  # type: ignore[method-assign]
        yield asked, answered
        sync.close()
        engine.close()
    finally:
        Connection.send, SharedFile.close = send, close  # type: ignore[method-assign]
        for file in files:
            close(file)


def host() -> ModuleHost:
    return ModuleHost(TinyEngineModel, checkpoint(1))


class Told:
    """A socket that gives some bytes, and then the end, or nothing more. It takes whatever is sent."""

    _readable = os.open("/dev/zero", os.O_RDWR)
    _silent = os.pipe()[0]

    def __init__(self, data: bytes, ends: bool) -> None:
        self.data, self.sent, self._ends = data, b"", ends

    def recv(self, most_bytes: int) -> bytes:
        if not self.data and not self._ends:
            raise BlockingIOError
        data, self.data = self.data[:most_bytes], self.data[most_bytes:]
        return data

    def send(self, data: bytes) -> int:
        self.sent += data
        return len(data)

    sendall = send

    def fileno(self) -> int:
        return self._readable if self.data or self._ends else self._silent

    def ignore(self, *args: Any) -> None: ...

    setblocking = setsockopt = settimeout = shutdown = close = ignore


def sealed(frames: list[bytes], key: bytes, draw: random.Random) -> bytes:
    """Frames with their seals, of which a few are wrong."""
    seal = FrameMac(key)
    data = bytearray()
    for frame in frames:
        right = seal.of(frame)
        data += frame + (right if draw.random() > 0.02 else draw.randbytes(16))
    return bytes(data)


def connection_of(data: bytes, ends: bool = True) -> Connection:
    return Connection(Told(data, ends), "the peer", FrameMac(b"s" * 32), FrameMac(_KEY))  # type: ignore[arg-type]


class Mutator:
    """Draws frames that are nearly those that a state expects."""

    def __init__(self, draw: random.Random, known: list[Message]) -> None:
        self._draw, self._known = draw, [encode(message) for message in known]
        self._plain = {frame: msgspec.msgpack.decode(frame[PREFIX_BYTES:]) for frame in self._known}

    def frames(self, expected: Message) -> tuple[str, list[bytes]]:
        """What one sends in place of one message, and the name of what was done."""
        draw, frame = self._draw, encode(expected)
        kinds = (self.bits, self.length, self.bytes, self.splice, self.cut, self.order, self.other, self.extreme)
        kind = draw.choice(kinds)
        return kind.__name__, kind(frame)

    def bits(self, frame: bytes) -> list[bytes]:
        data = bytearray(frame)
        for _ in range(self._draw.choice((1, 1, 2, 8))):
            data[self._draw.randrange(PREFIX_BYTES, len(data))] ^= 1 << self._draw.randrange(8)
        return [bytes(data)]

    def length(self, frame: bytes) -> list[bytes]:
        length = self._draw.choice((0, 1, len(frame), len(frame) - 5, 2**28, 2**28 + 1, 2**32 - 1))
        return [length.to_bytes(4, "little") + frame[PREFIX_BYTES:], self._draw.choice(self._known)]

    def bytes(self, frame: bytes) -> list[bytes]:
        body, draw = bytearray(frame[PREFIX_BYTES:]), self._draw
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(len(body) + 1)
            end = at + draw.randrange(9)
            body[at:end] = draw.choice(
                (body[at:end] * 2, b"", draw.randbytes(draw.randrange(1, 9)), b"\xdd\xff\xff\xff\xff")
            )
        return [framed(bytes(body))]

    def splice(self, frame: bytes) -> list[bytes]:
        other = self._draw.choice(self._known)
        body, more = frame[PREFIX_BYTES:], other[PREFIX_BYTES:]
        return [framed(body[: self._draw.randrange(len(body))] + more[self._draw.randrange(len(more)) :])]

    def cut(self, frame: bytes) -> list[bytes]:
        body = frame[PREFIX_BYTES:]
        return [framed(body[: self._draw.randrange(len(body))])]

    def order(self, frame: bytes) -> list[bytes]:
        """Swapped, doubled, or left out."""
        frames = [frame, self._draw.choice(self._known), frame]
        self._draw.shuffle(frames)
        return frames[: self._draw.randrange(1, 4)]

    def other(self, frame: bytes) -> list[bytes]:
        return [self._draw.choice(self._known)]

    def extreme(self, frame: bytes) -> list[bytes]:
        """An extreme value in a place of a valid message."""
        plain, draw = self._plain.get(frame) or msgspec.msgpack.decode(frame[PREFIX_BYTES:]), self._draw
        for _ in range(draw.choice((1, 1, 3))):
            plain = self._replaced(plain)
        return [framed(msgspec.msgpack.encode(plain))]

    def _replaced(self, value: Any) -> Any:
        draw = self._draw
        if not isinstance(value, (list, dict)) or not value or draw.random() < 0.05:
            return draw.choice(EXTREMES)
        if isinstance(value, dict):
            key = draw.choice([*value])
            return {**value, key: value[key] if key == "t" else self._replaced(value[key])}
        at = draw.randrange(len(value))
        return [*value[:at], self._replaced(value[at]), *value[at + 1 :]]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


class Ends:
    """Both ends of the protocol. Each method brings one of them into a state, says something there, and returns what
    it made of that. It may raise any `WeightSyncError`."""

    def __init__(self, draw: random.Random, asked: list[Message], answered: list[Message]) -> None:
        self._draw, self._asked, self._answered = draw, asked, answered
        self._mutate = Mutator(draw, [*asked, *answered, *OTHERS])
        self._listener, self._session, self._stage = Listener(), WorkerSession(host()), -1
        self._reached: list[object] = []
        self.foreign: dict[str, str] = {}
        self.states: dict[str, Callable[[], str]] = {
            "trainer: before a greeting": self.greeting,
            "trainer: before Hello": self.hello,
            **{f"trainer: before {kind(one)}": self._answer(one) for one in (*answered, OTHERS[-1], OTHERS[-3])},
            "trainer: between pushes": self.idle_trainer,
            "worker: in the handshake": self.dialer,
            **{f"worker: before {kind(one)}": self._ask(number) for number, one in enumerate(asked)},
            "worker: between pushes": self.idle_worker,
        }

    def greeting(self) -> str:
        data = self._bytes(greeting(b""))
        newcomer = self._come(data)
        for _ in range(3):
            if newcomer not in self._listener._newcomers:
                return "turned away"
            if newcomer.connection is not None:
                return "answered"
            self._listener._introduce(newcomer)
        return "waits"

    def hello(self) -> str:
        mine = greeting(b"")
        newcomer = self._come(mine)
        self._listener._introduce(newcomer)
        told: Any = newcomer.sock
        assert newcomer.connection is not None
        seal = derive_keys(b"", self._listener.token, mine, told.sent[:GREETING_BYTES])[1]
        told.data = sealed(self._mutate.frames(HELLO)[1], seal._key, self._draw)
        for _ in range(3):
            if self._listener._arrived:
                self._listener._arrived.clear()
                return "came in"
            if newcomer not in self._listener._newcomers:
                return "turned away"
            self._listener._introduce(newcomer)
        return "waits"

    def _come(self, data: bytes) -> _UnauthenticatedPeer:
        self._listener._newcomers.clear()
        newcomer = _UnauthenticatedPeer(Told(data, True), "a stranger")  # type: ignore[arg-type]
        self._listener._newcomers.append(newcomer)
        return newcomer

    def _bytes(self, data: bytes) -> bytes:
        return self._mutate.bytes(framed(data))[0][PREFIX_BYTES:]

    def _answer(self, expected: Message) -> Callable[[], str]:
        def answer() -> str:
            connection = connection_of(sealed(self._mutate.frames(expected)[1], _KEY, self._draw))
            for message in self._listener.collect([connection], type(expected), Deadline(5.0), "test"):
                if isinstance(message, Value):
                    message.read()
            return "taken"

        return answer

    def idle_trainer(self) -> str:
        connection = connection_of(sealed(self._mutate.frames(Ping())[1], _KEY, self._draw), False)
        connection.answer_pings()
        connection.check("idle")
        return "taken" if connection.has_mail() else "answered" if connection._sock.sent else "waits"  # type: ignore[attr-defined]

    def dialer(self) -> str:
        theirs = greeting(b"")
        answer = theirs + derive_keys(b"", "token", greeting(b""), theirs)[0]
        authenticate(Told(self._bytes(answer), True), "token", "a peer", Deadline(5.0))  # type: ignore[arg-type]
        raise AssertionError("a dialer believed who does not know its nonce")

    def _ask(self, number: int) -> Callable[[], str]:
        def ask() -> str:
            self._bring_to(number)
            expected = self._asked[number]
            if number >= 2:
                expected = msgspec.structs.replace(expected, version=self._session.receiver.version + 1)
            return self._serve(self._mutate.frames(expected)[1])

        return ask

    def idle_worker(self) -> str:
        session = self._session
        session._connection = connection_of(sealed(self._mutate.frames(Pong(True))[1], _KEY, self._draw), False)
        try:
            session._check_free("a:1:2", 0.0)
        except EngineBusyError:
            return "stays the trainer's"
        finally:
            session._connection = None
        return "is free"

    def _bring_to(self, number: int) -> None:
        """Let the worker have answered the first messages of a push, and no more."""
        if self._stage == number:
            return
        session = self._session
        if session.receiver.version > 2**40:
            self._session = session = WorkerSession(host())
        session.receiver.disconnect = type(session.receiver).disconnect.__get__(session.receiver)  # type: ignore[method-assign]
        session.receiver.disconnect()
        frames = self._asked[:number]
        if number > 2:
            frames = [*frames[:2], msgspec.structs.replace(frames[2], version=session.receiver.version + 1)]
        outcome = self._serve([encode(message) for message in frames], spoilt=False) if frames else ""
        assert not frames or outcome == f"answered {number}", outcome
        session.receiver.disconnect = lambda: None  # type: ignore[method-assign]
        self._stage, self._reached = number, self._state()

    def _state(self) -> list[object]:
        receiver = self._session.receiver
        return [receiver._planner.traced, receiver._plan, receiver.loaded, receiver.version]

    def _serve(self, frames: list[bytes], spoilt: bool = True) -> str:
        """Let the worker answer. Where it has answered a spoilt message, its state is another one."""
        session = self._session
        data = sealed(frames, _KEY, self._draw if spoilt else random.Random(0))
        session._connection = connection_of(data)
        connection: Any = session._connection
        session._serve("init")
        session._connection = None
        said, seal, sent = [], FrameMac(b"s" * 32), connection._sock.sent
        while sent:
            end = PREFIX_BYTES + int.from_bytes(sent[:PREFIX_BYTES], "little")
            assert sent[end : end + 16] == seal.of(sent[:end])
            said.append(decode(sent[PREFIX_BYTES:end]))
            sent = sent[end + 16 :]
        answers = [message for message in said if not isinstance(message, (Failure, Pong))]
        if answers or self._state() != self._reached:
            self._stage = -1
        if answers:
            return f"answered {len(answers)}"
        return next((self._kind(message.error) for message in said if isinstance(message, Failure)), "released")

    def _kind(self, error: ErrorFields) -> str:
        """Return the class of an error. That of an exception which is none of weightsync's stands in its text."""
        if error.kind != "WeightSyncError":
            return error.kind
        foreign = error.message.partition(":")[0]
        self.foreign.setdefault(foreign, error.message)
        return foreign

    def close(self) -> None:
        self._listener.close()
        self._session.receiver.__dict__.pop("disconnect", None)
        self._session.close()


def kind(message: Message) -> str:
    return type(message).__name__


def run(examples: int, seed: int, seconds: float = float("inf")) -> dict[str, Any]:
    """Say so many spoilt things, for so long at most. Return the outcomes, by state."""
    draw, started = random.Random(seed), time.monotonic()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    spent: Counter[str] = Counter()
    crashes: list[str] = []
    most_s, before = 0.0, 0
    logging.disable(logging.CRITICAL)  # a worker says each failure there too
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.NOTSET)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        asked, answered = stack.enter_context(recorded_push())
        ends = stack.enter_context(contextlib.closing(Ends(draw, asked, answered)))
        # A worker loads a model, which takes as long as ten of the other states.
        names = [name for name in ends.states for _ in range(1 if name.startswith("worker: before") else 10)]
        for number in range(examples):
            # The same state many times in a row: what leads to it is said once.
            name = names[(number >> 8) % len(names)]
            if not number % _TRACE_EVERY:
                faulthandler.dump_traceback_later(_HANG_S, exit=True)
            if not number % _LOOK_EVERY:
                before = before or (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if number else 0)
                print(f"{number} of {examples}, {len(crashes)} crashes", file=sys.stderr, flush=True)
            if time.monotonic() > started + seconds:
                break
            at = time.thread_time()
            try:
                outcome = ends.states[name]()
            except WeightSyncError as error:
                outcome = kind(error)  # type: ignore[arg-type]
                encode(Failure(error.to_fields()))
            except Exception as error:
                outcome = "CRASH"
                crashes.append(f"{name}: {type(error).__name__}: {error}")
                print(crashes[-1], file=sys.stderr, flush=True)
                if len(crashes) > 20:
                    break
            spent[name] += time.thread_time() - at
            most_s = max(most_s, time.thread_time() - at)
            outcomes[name][outcome] += 1
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "examples": sum(sum(one.values()) for one in outcomes.values()),
        "crashes": crashes,
        "foreign": ends.foreign,
        "mean_us": {name: round(one / max(1, sum(outcomes[name].values())) * 1e6) for name, one in spent.items()},
        "longest_s": round(most_s, 3),
        "seconds": round(time.monotonic() - started),
        "grown_mib": (after - (before or after)) >> 10,
        "outcomes": {name: dict(one.most_common()) for name, one in outcomes.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    found = run(arguments.examples, arguments.seed, arguments.seconds)
    print(json.dumps(found, indent=2))
    return bool(found["crashes"])


if __name__ == "__main__":
    sys.exit(main())
