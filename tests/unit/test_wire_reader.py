"""Two more readers of docs/internals/wire.md read what weightsync writes: the `msgpack` package, and `wire_reader`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, checkpoint, module_of
from mutated_frames import OTHERS, Mutator, framed, host, recorded_push
from test_wire import GOLDEN, replaced, values_inside
from torch import nn
from wire_reader import RefusedError, check_connect, check_invitation, read_body, read_frame

from weightsync import CheckpointTransport, WeightSync
from weightsync.errors import ProtocolError
from weightsync.net import wire
from weightsync.net.wire import PREFIX_BYTES, Message, Value, decode, encode, typed

FRAMES = [bytes.fromhex(frame) for _, frame in GOLDEN]
TIMEOUT_S = 30

OF_ANY_PUSH = {"Hello", "PlanRequest", "PackedLoadPlan", "Ready", "Go", "Done", "Commit", "Committed", "Release"}
SINGLE_COPY = OF_ANY_PUSH | {"ExportParameters", "ParametersExported"}
SAID = dict.fromkeys(("ipc", "broadcast", "checkpoint"), OF_ANY_PUSH | {"Connect", "Connected"})
SAID["broadcast"] = SAID["ipc"] | {"Value"}
SAID |= {"nixl": SAID["broadcast"]} if find_spec("nixl") else {}
SAID["single_copy"] = SINGLE_COPY

VALUES: list[Any] = [None, True, -1, -2, -33, 0, 255, 2**31, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan")]
VALUES += ["", "w", "a:1:2", "cuda", b"b", [], {}, ["a"], [["a"]], [["a", "b"]], {"a": ["b"]}, {"a": {"b": "c"}}]
VALUES += [[[0, -1, "fd", {}]], [[0, -1, 0, 0]], {"a": [[[0], [1]]]}, [1], {"a": 1}, {"a": None}]


def is_read(body: bytes) -> bool:
    """Return whether weightsync reads this. Both readers must say the same of it."""
    try:
        message = decode(body)
        if isinstance(message, Value):
            message.read()
        reason = ""
    except ProtocolError as error:
        reason = str(error)
    try:
        read_body(body)
        other = ""
    except RefusedError as error:
        other = str(error)
    assert bool(reason) == bool(other), f"weightsync: {reason or 'reads it'}, and: {other or 'reads it'}: {body!r}"
    return not reason


class Plain(nn.Module):
    """A model that a trainer may write to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def push(transport: str, folder: Path) -> None:
    """Make two pushes from a trainer to a stand-in for an engine."""
    if transport == "single_copy":
        engine = FakeEngine(ModuleHost(Plain, {"weight": torch.ones(4, 4)}))
        with torch.device("meta"):
            model: nn.Module = Plain()
    else:
        engine, model = FakeEngine(host()), module_of(checkpoint(2))
    way = CheckpointTransport(folder) if transport == "checkpoint" else transport
    with WeightSync("fsdp", way, engine, timeout_s=TIMEOUT_S) as sync:
        if transport == "single_copy":
            sync.attach(model)
        sync.push(model)
        sync.push(model)
    engine.close()


@pytest.mark.parametrize(("message", "frame"), [(message, bytes.fromhex(frame)) for message, frame in GOLDEN])
def test_golden_bytes_are_read_alike_by_all_three(message: Message, frame: bytes) -> None:
    name, found = read_frame(frame)
    content = msgpack.unpackb(frame[PREFIX_BYTES:])
    assert content == {"t": name, **found}
    if isinstance(message, Value):
        assert found == {"value": message.read()}
    else:
        assert typed(content, type(message)) == message


@pytest.mark.parametrize("transport", SAID)
def test_whatever_both_ends_send_in_a_push_is_read(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    def record(message: Message) -> bytes:
        sent.append(encode(message))
        return sent[-1]

    monkeypatch.setattr(wire, "encode", record)
    push(transport, tmp_path)
    names = set()
    for frame in sent:
        name, found = read_frame(frame)
        assert msgpack.unpackb(frame[PREFIX_BYTES:]) == {"t": name, **found}
        names.add(name)
        if name == "Connect":
            check_connect(found)
        if name == "PlanRequest":
            check_invitation(found)
    # A slow worker makes its trainer ask whether it still runs.
    assert names - {"Ping", "Pong"} == SAID[transport]


def test_a_value_of_each_kind_in_each_place_is_read_or_refused_alike() -> None:
    read = 0
    for frame in FRAMES:
        content = msgpack.unpackb(frame[PREFIX_BYTES:])
        for at, value in values_inside(content):
            if not at:
                continue
            read += sum(is_read(msgpack.packb(replaced(content, at, other))) for other in VALUES)
            if isinstance(value, dict):
                is_read(msgpack.packb(replaced(content, at, dict(reversed(value.items())))))
                is_read(msgpack.packb(replaced(content, at, {**value, "surplus": 1})))
            if isinstance(value, list):
                is_read(msgpack.packb(replaced(content, at, [*value, *value])))
                is_read(msgpack.packb(replaced(content, at, value[:-1])))
    assert read > 100


def test_spoilt_frames_are_read_or_refused_alike() -> None:
    draw = random.Random(1)
    with recorded_push() as (asked, answered):
        known = [*asked, *answered, *OTHERS, *(message for message, _ in GOLDEN)]
        mutator = Mutator(draw, known)
        bodies = [frame[PREFIX_BYTES:] for _ in range(6000) for frame in mutator.frames(draw.choice(known))[1]]
    assert 1000 < sum(map(is_read, bodies)) < len(bodies) - 1000


@pytest.mark.parametrize("frame", FRAMES, ids=[type(message).__name__ for message, _ in GOLDEN])
def test_a_message_of_more_or_fewer_fields_is_refused(frame: bytes) -> None:
    content = msgpack.unpackb(frame[PREFIX_BYTES:])
    assert not is_read(msgpack.packb({**content, "surplus": None}))
    assert not is_read(msgpack.packb({**content, "t": content["t"] + "s"}))
    assert not is_read(msgpack.packb(dict(reversed(content.items())))) or len(content) == 1
    for name in content:
        assert not is_read(msgpack.packb({key: value for key, value in content.items() if key != name}))
    for end in range(len(frame) - PREFIX_BYTES):
        assert not is_read(frame[PREFIX_BYTES:][:end])
    assert not is_read(frame[PREFIX_BYTES:] + b"\xc0")


@pytest.mark.parametrize(
    "value",
    [
        b"\xcc\x01",
        b"\xd0\x01",
        b"\xd0\xe0",
        b"\xd1\x01\x00",
        b"\xd1\xff\x80",
        b"\xd2\x00\x01\x00\x00",
        b"\xd3\x00\x00\x00\x01\x00\x00\x00\x00",
        b"\xca\x3f\x80\x00\x00",
        b"\xd9\x01k",
        b"\xda\x00\x20" + b"x" * 32,
        b"\xdc\x00\x00",
        b"\xde\x00\x00",
        b"\x82\xa1k\x01\xa1k\x01",
        b"\x81\x01\x02",
        b"\xc4\x01b",
        b"\xd4\x05x",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc1",
        b"\xa3\xed\xa0\x80",
        b"\x91" * 11 + b"\xc0",
        b"\x81\xa1k" * 11 + b"\xc0",
        b"\x91" * 100_000 + b"\xc0",
    ],
    ids=lambda value: value[:5].hex(),
)
def test_another_form_of_a_value_is_refused(value: bytes) -> None:
    assert not is_read(b"\x82\xa1t\xa5Value\xa5value" + value)


@pytest.mark.parametrize(
    "value",
    [
        b"\xe0",
        b"\xd0\xdf",
        b"\xd1\xff\x7f",
        b"\xcd\x01\x00",
        b"\xce\x00\x01\x00\x00",
        b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00",
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x01",
        b"\x91" * 10 + b"\xc0",
        b"\x81\xa1k" * 10 + b"\xc0",
    ],
    ids=lambda value: value[:5].hex(),
)
def test_the_one_form_of_a_value_is_read(value: bytes) -> None:
    assert is_read(b"\x82\xa1t\xa5Value\xa5value" + value)


def test_a_frame_announces_its_body_and_no_more_than_it_may() -> None:
    for length in (8, 10, (1 << 28) + 1):
        with pytest.raises(RefusedError, match="announces"):
            read_frame(length.to_bytes(4, "little") + FRAMES[0][PREFIX_BYTES:])
    assert read_frame(framed(FRAMES[0][PREFIX_BYTES:])) == read_frame(FRAMES[0])
