"""The bytes of docs/internals/wire.md: what is written, what is read, and what is refused."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.msgpack import Ext
from msgspec.structs import fields

from weightsync.errors import ErrorFields, ManifestError, ProtocolError
from weightsync.net import wire
from weightsync.net.wire import (
    MAX_FRAME_BYTES,
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
    frame_length,
    typed,
)
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta
from weightsync.planning.wire_types import ByteRange, ChunkLayout

MOMENT = datetime(2026, 1, 1, tzinfo=timezone.utc)
LOCATION = ShardLocation("w", Box((0, 0), (2, 3)), 0, 0, 0, (3, 1), "bfloat16")

# One of each message, and the bytes of its frame. They never change: a change of the bytes is a new PROTOCOL.
GOLDEN: list[tuple[Message, str]] = [
    (
        Hello(
            protocol=5,
            role="worker",
            group=2,
            rank=3,
            world=4,
            boot_id="b",
            device="cuda",
            gpu_uuid="GPU-1",
            name="tp=3",
            version=5,
            state="CLEAN",
            update_open=False,
            kv_role="kv_both",
            shares_experts=True,
        ),
        (
            "a40000008fa174a548656c6c6fa870726f746f636f6c05a4726f6c65a6776f726b6572a567726f757002a472616e6b03a5776f72"
            "6c6404a7626f6f745f6964a162a6646576696365a463756461a86770755f75756964a54750552d31a46e616d65a474703d33a776"
            "657273696f6e05a57374617465a5434c45414eab7570646174655f6f70656ec2a76b765f726f6c65a76b765f626f7468ae7368617265"
            "735f65787065727473c3"
        ),
    ),
    (
        Value.of({"a": [1, -1, 2.5, None, True, "\u00e9"]}),
        "2300000082a174a556616c7565a576616c756581a1619601ffcb4004000000000000c0c3a2c3a9",
    ),
    (
        PlanRequest((TensorMeta("w", (2, 3), "bfloat16"),), (("y", "w"),), ("visual.*",), "broadcast", {"size": 2}),
        (
            "6700000086a174ab506c616e52657175657374a774656e736f72739193a177920203a862666c6f61743136a4746965649192a179"
            "a177a46b65657091a876697375616c2e2aa97472616e73706f7274a962726f616463617374aa696e7669746174696f6e81a473697a6502"
        ),
    ),
    (
        PackedLoadPlan(
            used={"bfloat16": [(0, 2), (5, 1)]},
            partial=[((Box((0, 0), (1, 3)),), [(1, 1)])],
            refused={"x": "no"},
            groups=[[(0, 2)]],
            reloads=[[(0, 1), (5, 1)]],
            missing=["p rows 0..1 of 2"],
            hints=["y"],
            load_paths={"in_place": 1},
            left_out=[(3, 2)],
            kept=["drafter.w"],
            tied=["w"],
            duplicates={"y": "w"},
        ),
        (
            "d60000008da174ae5061636b65644c6f6164506c616ea47573656481a862666c6f6174313692920002920501a77061727469616c"
            "9192919292000092010391920101a77265667573656481a178a26e6fa667726f7570739191920002a772656c6f61647391929200"
            "01920501a76d697373696e6791b07020726f777320302e2e31206f662032a568696e747391a179aa6c6f61645f706174687381a8"
            "696e5f706c61636501a86c6566745f6f757491920302a46b65707491a9647261667465722e77a47469656491a177aa6475706c69"
            "636174657381a179a177"
        ),
    ),
    (
        Connect(
            transport="ipc",
            storages=[(0, 0, "shm", {"path": "/dev/shm/x", "nbytes": 256})],
            chunks=[ChunkLayout((LOCATION,), (ByteRange(0, 0, 0, 256),))],
            frozen=0,
            in_place=[ByteRange(0, 1, 0, 12)],
            proof=[(1 << 64) - 1],
            fields={"k": 1},
        ),
        (
            "a200000088a174a7436f6e6e656374a97472616e73706f7274a3697063a873746f726167657391940000a373686d82a47061"
            "7468aa2f6465762f73686d2f78a66e6279746573cd0100a66368756e6b7391929197a17792920000920203000000920301a8"
            "62666c6f617431369194000000cd0100a666726f7a656e00a8696e5f706c61636591940001000ca570726f6f6691cfffffff"
            "ffffffffffa66669656c647381a16b01"
        ),
    ),
    (
        Connected(),
        "0d00000081a174a9436f6e6e6563746564",
    ),
    (
        ExportParameters(["b:1:2"]),
        "2500000082a174b04578706f7274506172616d6574657273a970726f63657373657391a5623a313a32",
    ),
    (
        ParametersExported(
            engine_instance="e",
            storages=[(0, "fd", {"path": "/proc/1/fd/3", "nbytes": 12})],
            locations=[LOCATION],
        ),
        (
            "7600000084a174b2506172616d65746572734578706f72746564af656e67696e655f696e7374616e6365a165a873746f7261"
            "676573919300a2666482a470617468ac2f70726f632f312f66642f33a66e62797465730ca96c6f636174696f6e739197a177"
            "92920000920203000000920301a862666c6f61743136"
        ),
    ),
    (
        Go(7, -1, 3, [(1 << 64) - 1]),
        (
            "3700000085a174a2476fa776657273696f6e07a673616d706c65ffac706c6163655f73616d706c6503a76469676573747391"
            "cfffffffffffffffff"
        ),
    ),
    (
        Done(7, 12, 0.5, 0.25, 0.0),
        (
            "4f00000086a174a4446f6e65a776657273696f6e07a66e62797465730caa7472616e736665725f73cb3fe0000000000000a8"
            "7665726966795f73cb3fd0000000000000a66c6f61645f73cb0000000000000000"
        ),
    ),
    (
        Commit(7),
        "1300000082a174a6436f6d6d6974a776657273696f6e07",
    ),
    (
        Committed(7, 0.5),
        "2600000083a174a9436f6d6d6974746564a776657273696f6e07a66c6f61645f73cb3fe0000000000000",
    ),
    (
        Ready(),
        "0900000081a174a55265616479",
    ),
    (
        Release(),
        "0b00000081a174a752656c65617365",
    ),
    (
        Ping(),
        "0800000081a174a450696e67",
    ),
    (
        Pong(True),
        "0f00000082a174a4506f6e67a5686f6c6473c3",
    ),
    (
        Failure(ErrorFields("DigestError", "m", None, "load", {})),
        (
            "4400000082a174a74661696c757265a56572726f7285a46b696e64ab4469676573744572726f72a76d657373616765a16da3"
            "77686fc0a57068617365a46c6f6164a5666163747380"
        ),
    ),
]
EXAMPLES = [message for message, _ in GOLDEN]


def kind(message: Message) -> str:
    return type(message).__name__


def body(message: Message) -> bytes:
    return encode(message)[PREFIX_BYTES:]


def content(message: Message) -> dict[Any, Any]:
    """A message's body as a map, to be spoilt."""
    return dict(msgpack.decode(body(message)))


def read(data: bytes) -> Message:
    """Decode a message, and what it carries where it is a `Value`."""
    message = decode(data)
    if isinstance(message, Value):
        message.read()
    return message


def refuse(data: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words) as raised:
        read(data if isinstance(data, bytes) else msgpack.encode(data))
    assert len(str(raised.value)) < 500


def test_the_number_of_the_protocol_that_these_bytes_belong_to():
    assert PROTOCOL == 13
    assert {type(message) for message in EXAMPLES} == set(Message.__subclasses__())


@pytest.mark.parametrize(("message", "frame"), GOLDEN, ids=[kind(message) for message in EXAMPLES])
def test_golden_bytes(message: Message, frame: str):
    assert encode(message).hex() == frame
    assert decode(bytes.fromhex(frame)[PREFIX_BYTES:]) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=kind)
def test_a_frame_is_its_length_and_its_body(message: Message):
    frame = encode(message)
    assert frame_length(frame[:PREFIX_BYTES]) == len(frame) - PREFIX_BYTES
    assert struct.unpack("<I", frame[:4]) == (len(frame) - 4,)


@pytest.mark.parametrize("message", EXAMPLES, ids=kind)
def test_a_message_has_exactly_its_fields_in_their_order(message: Message):
    whole = content(message)
    for name in whole.keys() - {"t"}:
        refuse({key: value for key, value in whole.items() if key != name}, "missing required field|not canonical")
    refuse({**whole, "surplus": 1}, "surplus")
    refuse({**whole, b"surplus": 1}, "Expected `str`, got `bytes` - at `key`")
    if len(whole) > 1:
        refuse(dict(reversed(whole.items())), "not canonical")


def values_inside(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a decoded body, and the keys on the way to it."""
    yield at, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from values_inside(inner, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


FREE = {"value": 0, "fields": 1, "invitation": 1, "storages": 3}
"""Of these fields, what lies deeper than this may be any plain value."""
OPTIONAL = {"who": str, "phase": str, "sample": int, "place_sample": int}
OTHERS: list[Any] = [
    None,
    True,
    -1,
    1.5,
    "s",
    b"b",
    [],
    {},
    [None],
    {"k": None},
    Ext(5, b"x"),
    MOMENT,
]


@pytest.mark.parametrize("message", EXAMPLES, ids=kind)
def test_every_value_down_to_the_rows_is_of_its_type(message: Message):
    whole = content(message)
    for at, value in values_inside(whole):
        if not at or len(at) > FREE.get(at[0], 99):
            continue
        may_be = {type(value), *([type(None), OPTIONAL[at[-1]]] if at[-1] in OPTIONAL else [])}
        if isinstance(value, (list, dict)):
            refuse(replaced(whole, at, [[[]]]), "Expected|not canonical")
        for other in OTHERS:
            if type(other) not in may_be:
                refuse(replaced(whole, at, other), "Expected|Invalid value|not canonical")


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("Connect", ("chunks", 0, 0, 0, 1, 1, 0)),
        ("Connect", ("chunks", 0, 0, 0, 4)),
        ("Connect", ("chunks", 0, 1, 0, 3)),
        ("Connect", ("in_place", 0, 2)),
        ("Connect", ("proof", 0)),
        ("Connect", ("frozen",)),
        ("PlanRequest", ("tensors", 0, 1, 0)),
        ("PackedLoadPlan", ("partial", 0, 0, 0, 0, 0)),
        ("PackedLoadPlan", ("used", "bfloat16", 0, 1)),
        ("PackedLoadPlan", ("left_out", 0, 0)),
        ("Go", ("version",)),
        ("Done", ("nbytes",)),
        ("Hello", ("world",)),
    ],
)
def test_what_counts_is_never_negative(name: str, at: tuple[Any, ...]):
    whole = content(next(message for message in EXAMPLES if kind(message) == name))
    assert type(dict(values_inside(whole))[at]) is int
    refuse(replaced(whole, at, -1), ">= 0")


@pytest.mark.parametrize("at", [("tensors", 0), ("tensors", 0, 1)])
def test_a_row_with_more_than_it_has_is_refused(at: tuple[Any, ...]):
    whole = content(PlanRequest((TensorMeta("w", (2, 3), "bfloat16"),), (("y", "w"),)))
    row = dict(values_inside(whole))[at]
    refuse(replaced(whole, at, [*row, "x"]), "not canonical|Expected")


@pytest.mark.parametrize("message", EXAMPLES, ids=kind)
def test_a_truncated_or_prolonged_body_is_refused(message: Message):
    whole = body(message)
    for length in range(len(whole)):
        refuse(whole[:length], "is no message of protocol")
    refuse(whole + b"\xc0", "trailing characters")


@pytest.mark.parametrize(
    "data",
    [None, 1, "Hello", [], ["t"], {}, {"t": None}, {"t": 1}, {"t": b"Release"}, {"T": "Release"}, [{"t": "Release"}]],
)
def test_what_is_no_message_is_refused(data: Any):
    refuse(data, "is no message of protocol")


@pytest.mark.parametrize("name", ["", "hello", "Message", "WeightSyncError", "Hello ", "os.system"])
def test_an_unknown_message_is_refused(name: str):
    refuse({"t": name}, f"Invalid value {name!r}")


def test_a_refusal_does_not_repeat_what_came():
    refuse({"t": "x" * 10_000_000}, "Invalid value 'xxx")


@pytest.mark.parametrize(
    "value",
    [
        Ext(5, b"x"),
        Ext(-1, bytes(4)),
        MOMENT,
        b"bytes",
        {1: 2},
        {None: 1},
        {(1,): 1},
        {b"k": 1},
    ],
    ids=["extension", "short timestamp", "timestamp", "bytes", "int key", "nil key", "array key", "bytes key"],
)
def test_extension_types_bytes_and_other_keys_than_strings_are_refused(value: Any):
    refuse({"t": "Value", "value": value}, "Expected")
    refuse({"t": "Value", "value": [{"deep": value}]}, "Expected")


@pytest.mark.parametrize(
    "data",
    [
        b"\x83\xa1t\xa5Value\xa5value\x01\xa5value\x02",  # a field twice
        b"\x83\xa1t\xa5Value\xa1t\xa5Value\xa5value\x01",  # the name twice
        b"\x82\xa1t\xa5Value\xa5value\x82\xa1k\x01\xa1k\x01",  # a key inside twice
        b"\x82\xa1t\xa5Value\xa5value\xcc\x01",  # a longer form of 1
        b"\x82\xa1t\xa5Value\xa5value\xca\x3f\x80\x00\x00",  # a float of 32 bits
        b"\x82\xa1t\xa5Value\xa5value\xd9\x01k",  # a longer form of "k"
        b"\x82\xa1t\xa5Value\xa5value\xdc\x00\x00",  # a longer form of []
        b"\xde\x00\x02\xa1t\xa5Value\xa5value\x01",  # a longer form of the map
        b"\x86\xa1t\xa4Done\xa7version\x07\xa6nbytes\x0c\xaatransfer_s\x01\xa8verify_s\x01\xa6load_s\x01",  # ints
    ],
)
def test_a_message_has_one_form(data: bytes):
    msgpack.decode(data)
    refuse(data, "not canonical")


def test_strings_that_are_not_utf_8_are_refused():
    refuse(b"\x82\xa1t\xa5Value\xa5value\xa2\xff\xfe", "the peer sent no plain value")
    refuse(b"\x82\xa1t\xb0ExportParameters\xa9processes\x91\xa2\xff\xfe", "is no message of protocol")


def test_nesting_has_a_limit():
    for depth in (11, 100, 10_000, 1_000_000):
        refuse(b"\x82\xa1t\xa5Value\xa5value" + b"\x91" * depth + b"\xc0", "got `array`|recursion")
    assert kind(read(b"\x82\xa1t\xa5Value\xa5value" + b"\x91" * 10 + b"\xc0")) == "Value"


def test_a_large_honest_plan_is_read():
    row = ShardLocation("h.1.w", Box((0, 0), (4096, 4096)), 1, 2, 1 << 31, (4096, 1), "bfloat16")
    for message in (
        Connect(
            "ipc",
            [],
            [ChunkLayout((row,) * 20_000)],
            0,
            [ByteRange(1, 2, 1 << 31, 1 << 25)] * 20_000,
            [],
            {"runs": [[0]]},
        ),
        PlanRequest(tuple(TensorMeta(f"h.{n}.w", (4096, 4096), "bfloat16") for n in range(20_000)), ()),
        Value.of([(1, n, "fd", {"pid": 123456, "fd": n, "nbytes": 1 << 25, "inode": 1 << 21}) for n in range(10_000)]),
    ):
        assert decode(body(message)) == message


def test_a_frame_that_announces_too_much_is_refused():
    assert frame_length(struct.pack("<I", MAX_FRAME_BYTES)) == MAX_FRAME_BYTES
    with pytest.raises(ProtocolError, match=f"announces {MAX_FRAME_BYTES + 1} bytes"):
        frame_length(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_a_message_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    encode(Value.of("x" * 900))
    with pytest.raises(
        ProtocolError, match=r"a Value of 1018 bytes is over the 1000 byte limit\. A plan lists .*shard over fewer"
    ):
        encode(Value.of("x" * 1000))


@pytest.mark.parametrize("value", [object(), 1 << 64, -(1 << 64), "\ud800", {"a": [print]}])
def test_what_is_no_plain_value_is_not_written(value: Any):
    with pytest.raises(ProtocolError, match="a Value cannot be written as msgpack"):
        encode(Value.of(value))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error(data: bytes):
    with pytest.raises(ProtocolError):
        decode(data)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_any_plain_value_crosses(value: Any):
    message = decode(body(Value.of(value)))
    assert isinstance(message, Value)
    assert message == Value.of(value)
    assert message.read() == value


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_spoilt_message_is_read_or_a_protocol_error(message: Message, draw: st.DataObject):
    data = bytearray(body(message))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        assert isinstance(read(bytes(data)), Message)
    except ProtocolError:
        pass


@given(
    st.sampled_from([kind(message) for message in EXAMPLES]), st.dictionaries(st.text(max_size=8), plain, max_size=4)
)
def test_any_map_under_a_known_name_is_read_or_a_protocol_error(name: str, values: dict[str, Any]):
    try:
        assert isinstance(read(msgpack.encode({"t": name, **values})), Message)
    except ProtocolError:
        pass


# ---------------------------------------------------------------------------------------------------------------
# Rows

ROWS = [[], ["a"], ["a", [1]], ["a", 1, "x"], ["a", [1], "x", 1], None, 5, [["a"], [1], "x"], ["a", [True], "x"]]


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_another_form_are_a_protocol_error(row: Any):
    refuse({"t": "PlanRequest", "tensors": [row], "tied": []}, "Expected|not canonical")
    if row != ["a", [1], "x", 1]:  # which no decoded message has, as it has another form
        with pytest.raises(ProtocolError, match="the peer sent no"):
            typed([row], list[TensorMeta])


def test_a_manifest_that_offers_a_name_twice_is_refused_on_both_sides():
    with pytest.raises(ManifestError, match="offered more than once") as raised:
        Manifest((TensorMeta("a", (2,), "float32"), TensorMeta("b", (2,), "float32"), TensorMeta("a", (3,), "float32")))
    assert raised.value.mismatched == {"a": "offered twice"}


def test_the_specification_has_every_message_and_field():
    text = Path(__file__).parents[2].joinpath("docs/internals/wire.md").read_text()
    assert f"Number: **{PROTOCOL}**" in text
    assert str(MAX_FRAME_BYTES) in text
    for cls in Message.__subclasses__():
        name = cls.__name__
        assert f"`{name}`" in text
        for field in fields(cls):
            assert re.search(rf"`{field.name}`", text), f"{name}.{field.name}"
