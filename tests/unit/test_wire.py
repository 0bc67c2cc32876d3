"""The bytes of docs/wire.md: what is written, what is read, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.control import wire
from weightsync.control.wire import (
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
    LoadPlan,
    Message,
    ParametersExported,
    PlanRequest,
    Release,
    Value,
    decode,
    encode,
    frame_length,
)
from weightsync.errors import ManifestError, ProtocolError
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta
from weightsync.planning.rows import pack_locations, pack_manifest, unpack_locations, unpack_manifest

# One of each message, and the bytes of its frame. They never change: a change of the bytes is a new PROTOCOL.
GOLDEN: list[tuple[Message, str]] = [
    (
        Hello(
            protocol=2,
            token=b"\x00\xff",
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
        ),
        (
            "8e0000008ea174a548656c6c6fa870726f746f636f6c02a5746f6b656ec40200ffa4726f6c65a6776f726b6572a567726f75"
            "7002a472616e6b03a5776f726c6404a7626f6f745f6964a162a6646576696365a463756461a8677075"
            "5f75756964a54750552d31a46e616d65a474703d33a776657273696f6e05a57374617465a5434c45414eab7570646174655f"
            "6f70656ec2"
        ),
    ),
    (
        Value({"a": [1, -1, 2.5, None, True, b"\x80", "\u00e9"]}),
        "2600000082a174a556616c7565a576616c756581a1619701ffcb4004000000000000c0c3c40180a2c3a9",
    ),
    (
        PlanRequest([["w", [2, 3], "bfloat16"]]),
        "2700000082a174ab506c616e52657175657374a774656e736f72739193a177920203a862666c6f61743136",
    ),
    (
        LoadPlan(
            used={"w": "bfloat16"},
            partial={"w": [[[0, 0], [1, 3]]]},
            refused={"x": "no"},
            groups=[["w", "v"]],
            reloads=[["w", "b"]],
            missing=["p rows 0..1 of 2"],
            hints=["y"],
            load_paths={"in_place": 1},
            left_out=["v.w"],
            kept=["drafter.w"],
        ),
        (
            "b00000008ba174a84c6f6164506c616ea47573656481a177a862666c6f61743136a77061727469616c81a1779192920000920103"
            "a77265667573656481a178a26e6fa667726f7570739192a177a176a772656c6f6164739192a177a162a76d697373696e6791b070"
            "20726f777320302e2e31206f662032a568696e747391a179aa6c6f61645f706174687381a8696e5f706c61636501a86c6566745f"
            "6f757491a3762e77a46b65707491a9647261667465722e77"
        ),
    ),
    (
        Connect(
            transport="ipc",
            storages=[[0, 0, "shm", {"path": "/dev/shm/x", "nbytes": 256}]],
            chunks=[[[["w", [0, 0], [2, 3], 0, 0, 0, [3, 1], "bfloat16"]], [[0, 0, 0, 256]]]],
            frozen=0,
            in_place=[[0, 1, 0, 12]],
            proof=[(1 << 64) - 1],
            fields={"k": 1},
        ),
        (
            "a100000088a174a7436f6e6e656374a97472616e73706f7274a3697063a873746f726167657391940000a373686d82a47061"
            "7468aa2f6465762f73686d2f78a66e6279746573cd0100a66368756e6b7391929198a177920000920203000000920301a862"
            "666c6f617431369194000000cd0100a666726f7a656e00a8696e5f706c61636591940001000ca570726f6f6691cfffffffff"
            "ffffffffa66669656c647381a16b01"
        ),
    ),
    (
        Connected(),
        "0d00000081a174a9436f6e6e6563746564",
    ),
    (
        ExportParameters(),
        "1400000081a174b04578706f7274506172616d6574657273",
    ),
    (
        ParametersExported(
            engine_instance="e",
            storages=[[0, "fd", {"path": "/proc/1/fd/3", "nbytes": 12}]],
            locations=[["w", [0, 0], [2, 3], 0, 0, 0, [3, 1], "bfloat16"]],
        ),
        (
            "7500000084a174b2506172616d65746572734578706f72746564af656e67696e655f696e7374616e6365a165a873746f7261"
            "676573919300a2666482a470617468ac2f70726f632f312f66642f33a66e62797465730ca96c6f636174696f6e739198a177"
            "920000920203000000920301a862666c6f61743136"
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
        Release(),
        "0b00000081a174a752656c65617365",
    ),
    (
        Failure({"kind": "DigestError", "message": "m", "who": None, "phase": "load", "facts": {}}),
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
    return dict(msgpack.unpackb(body(message)))


def refuse(data: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode(data if isinstance(data, bytes) else msgpack.packb(data))


def test_the_number_of_the_protocol_that_these_bytes_belong_to():
    assert PROTOCOL == 2
    assert {kind(message) for message in EXAMPLES} == set(Message.types)


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
def test_the_order_of_fields_is_free(message: Message):
    assert decode(msgpack.packb(dict(reversed(content(message).items())))) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=kind)
def test_a_message_has_exactly_its_fields(message: Message):
    fields = content(message)
    for name in fields.keys() - {"t"}:
        refuse({key: value for key, value in fields.items() if key != name}, f"{kind(message)} has fields .*expected")
    refuse({**fields, "surplus": 1}, "surplus")
    refuse({**fields, b"surplus": 1}, "surplus")


@pytest.mark.parametrize("message", EXAMPLES, ids=kind)
def test_each_field_is_of_its_type(message: Message):
    values: list[Any] = [None, True, 1, 1.5, "s", b"b", [], {}]
    for field in dataclasses.fields(message):
        own = [type(getattr(message, field.name)).__name__]
        own += ["NoneType"] * field.type.endswith("| None")
        for value in values:
            if kind(message) == "Value" or type(value).__name__ in own:
                decode(msgpack.packb({**content(message), field.name: value}))
            else:
                words = f"field '{field.name}' of .* is of type {type(value).__name__}, expected {' or '.join(own)}$"
                refuse({**content(message), field.name: value}, words)


@pytest.mark.parametrize("message", EXAMPLES, ids=kind)
def test_a_truncated_or_prolonged_body_is_refused(message: Message):
    whole = body(message)
    for length in range(len(whole)):
        refuse(whole[:length], "not msgpack|holds no message|expected")
    refuse(whole + b"\xc0", "not msgpack")


@pytest.mark.parametrize(
    "data",
    [None, 1, "Hello", [], ["t"], {}, {"t": None}, {"t": 1}, {"t": b"Release"}, {"T": "Release"}, [{"t": "Release"}]],
)
def test_what_is_no_message_is_refused(data: Any):
    refuse(data, "holds no message")


@pytest.mark.parametrize("name", ["", "hello", "Message", "WeightSyncError", "Hello ", "os.system"])
def test_an_unknown_message_is_refused(name: str):
    refuse({"t": name}, f"unknown message {name!r}; this side speaks protocol {PROTOCOL}")


@pytest.mark.parametrize("value", [msgpack.ExtType(5, b"x"), {1: 2}, {None: 1}, {(1,): 1}], ids=repr)
def test_extension_types_and_other_keys_than_strings_are_refused(value: Any):
    refuse({"t": "Value", "value": value}, "not msgpack")


def test_strings_that_are_not_utf_8_are_refused():
    refuse(b"\x82\xa1t\xa5Value\xa5value\xa2\xff\xfe", "not msgpack")


def test_deep_nesting_is_refused_or_read_and_never_overflows_the_stack():
    for depth in (100, 10_000, 1_000_000):
        data = b"\x82\xa1t\xa5Value\xa5value" + b"\x91" * depth + b"\xc0"
        try:
            assert kind(decode(data)) == "Value"
        except ProtocolError:
            pass


def test_a_frame_that_announces_too_much_is_refused():
    assert frame_length(struct.pack("<I", MAX_FRAME_BYTES)) == MAX_FRAME_BYTES
    with pytest.raises(ProtocolError, match=f"announces {MAX_FRAME_BYTES + 1} bytes"):
        frame_length(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_a_message_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    encode(Value(bytes(900)))
    with pytest.raises(ProtocolError, match="a Value of 1018 bytes is over the 1000 byte limit"):
        encode(Value(bytes(1000)))


@pytest.mark.parametrize("value", [object(), {1, 2}, 1 << 64, -(1 << 64), "\ud800", {"a": [print]}])
def test_what_is_no_plain_value_is_not_written(value: Any):
    with pytest.raises(ProtocolError, match="a Value cannot be written as msgpack"):
        encode(Value(value))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error(data: bytes):
    with pytest.raises(ProtocolError):
        decode(data)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_any_plain_value_crosses(value: Any):
    assert decode(body(Value(value))) == Value(value)
    assert decode(body(Failure({"facts": value}))) == Failure({"facts": value})


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_spoilt_message_is_read_or_a_protocol_error(message: Message, draw: st.DataObject):
    data = bytearray(body(message))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        assert isinstance(decode(bytes(data)), Message)
    except ProtocolError:
        pass


@given(st.sampled_from(sorted(Message.types)), st.dictionaries(st.text(max_size=8), plain, max_size=4))
def test_any_map_under_a_known_name_is_read_or_a_protocol_error(name: str, fields: dict[str, Any]):
    try:
        assert isinstance(decode(msgpack.packb({**fields, "t": name})), Message)
    except ProtocolError:
        pass


# ---------------------------------------------------------------------------------------------------------------
# Rows

MANIFEST = Manifest((TensorMeta("a", (2, 3), "bfloat16"), TensorMeta("b", (), "float32")))
LOCATIONS = [
    ShardLocation("a", Box((0, 1), (2, 2)), 1, 5, 7, (2, 1), "bfloat16"),
    ShardLocation("b", Box((), ()), 0, 0, 0, (), "float32"),
]


def test_manifests_and_locations_cross():
    rows = decode(body(PlanRequest(pack_manifest(MANIFEST))))
    assert isinstance(rows, PlanRequest)
    assert unpack_manifest(rows.tensors) == MANIFEST
    rows = decode(body(Connect("ipc", [], [[pack_locations(LOCATIONS), []]], 0, [], [], {})))
    assert isinstance(rows, Connect)
    assert unpack_locations(rows.chunks[0][0]) == LOCATIONS


@pytest.mark.parametrize("row", [[], ["a"], ["a", [1]], ["a", 1, "x"], ["a", [1], "x", 1], None, 5, [["a"], [1], "x"]])
def test_rows_of_another_form_are_a_protocol_error(row: Any):
    with pytest.raises(ProtocolError, match="a manifest has a row that is not"):
        unpack_manifest([row])
    with pytest.raises(ProtocolError, match="a row of locations is not"):
        unpack_locations([row])


def test_a_manifest_that_offers_a_name_twice_is_refused_on_both_sides():
    with pytest.raises(ManifestError, match="offered more than once") as raised:
        Manifest((TensorMeta("a", (2,), "float32"), TensorMeta("b", (2,), "float32"), TensorMeta("a", (3,), "float32")))
    assert raised.value.mismatched == {"a": "offered twice"}
    with pytest.raises(ManifestError, match="offered more than once"):
        unpack_manifest([["a", [2], "float32"], ["a", [2], "float32"]])


def test_the_specification_has_every_message_and_field():
    text = Path(__file__).parents[2].joinpath("docs", "wire.md").read_text()
    assert f"Number: **{PROTOCOL}**" in text
    assert str(MAX_FRAME_BYTES) in text
    for name, cls in Message.types.items():
        assert f"`{name}`" in text
        for field in dataclasses.fields(cls):
            assert re.search(rf"`{field.name}`", text), f"{name}.{field.name}"
