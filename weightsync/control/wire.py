"""The messages that cross a process boundary, and their bytes. docs/wire.md is the specification.

A frame is a 4-byte little-endian length and that many bytes of msgpack: a map with the message's name under "t" and
its fields. Only nil, booleans, integers, floats, strings, byte strings, arrays and string-keyed maps occur; nothing
in a frame is ever executed. This module knows nothing about sockets, tensors, trainers or engines.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from weightsync.errors import ProtocolError

PROTOCOL = 2
CLEAN, POISONED = "CLEAN", "POISONED"
"""States of a worker's model. The version of an engine begins with the second one when a push into it has failed after
its first bucket was announced."""
MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")

M = TypeVar("M", bound="Message")


@dataclass(frozen=True)
class Message:
    """One message. Subclasses are flat: every field is a plain msgpack value."""

    types: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        Message.types[cls.__name__] = cls


@dataclass(frozen=True)
class MachineInfo:
    """Where a trainer rank or an engine worker runs. `peer` is its name for people."""

    peer: str
    device: str
    gpu_uuid: str
    boot_id: str


@dataclass(frozen=True)
class Hello(Message):
    """First message of a peer that connects to trainer rank 0: an engine worker or another trainer rank."""

    protocol: int
    token: bytes
    role: str  # "worker" or "rank"
    group: int  # worker: the engine's number; rank: 0
    rank: int  # worker: its number in the engine; rank: its number among the trainer's ranks
    world: int  # how many such peers the group has
    boot_id: str
    device: str  # "cpu" or "cuda"
    gpu_uuid: str  # "" on a CPU
    name: str  # for people: "tp=1 pp=0 dp=0"
    version: int  # worker: the last version that was committed, 0 when none; rank: 0
    state: str  # worker: CLEAN or POISONED; rank: ""
    update_open: bool  # worker: whether its engine has an update started and not finished; rank: False


@dataclass(frozen=True)
class Value(Message):
    """Between trainer ranks: one contribution to, or the outcome of, a collective step."""

    value: Any


@dataclass(frozen=True)
class PlanRequest(Message):
    """To a worker: the tensors that a push will deliver. The worker answers `LoadPlan`, and writes nothing."""

    tensors: list[list[Any]]  # rows of [name, shape, dtype]


@dataclass(frozen=True)
class LoadPlan(Message):
    """From a worker: how its model takes the tensors."""

    used: dict[str, str]  # tensor name -> dtype that the engine holds it in
    partial: dict[str, list[Any]]  # tensor name -> [start, size] of the regions it reads, where that is not all of it
    refused: dict[str, str]  # tensor name -> what the engine's loader has against it
    groups: list[list[str]]  # names that land in one engine parameter
    reloads: list[list[str]]  # names that a module needs all of whenever any of them changes
    missing: list[str]  # parts of the engine's parameters that no tensor fills
    hints: list[str]  # the tensor names that would fill them, where other layers tell
    load_paths: dict[str, int]  # load path -> how many modules take it
    left_out: list[str]  # tensors of a part of the model that the engine was started without
    kept: list[str]  # parameters of a drafter that no tensor fills, and that stay as they are


@dataclass(frozen=True)
class Connect(Message):
    """To a worker: its part of the plan. It maps or joins what the transport needs, and answers `Connected`."""

    transport: str
    storages: list[list[Any]]  # [rank, storage, kind, fields]
    chunks: list[list[Any]]  # [locations, runs] of each chunk that the worker reads
    frozen: int  # how many chunks, the last ones, no push has any more after one was committed
    in_place: list[list[Any]]  # [rank, storage, first byte, bytes] of what is read where it lies
    proof: list[int]  # the digest of each rank's runs in `in_place`, of all bytes, in rank order
    fields: dict[str, Any]  # what else this transport needs


@dataclass(frozen=True)
class Connected(Message):
    """From a worker: every storage is mapped and proven, every communicator joined."""


@dataclass(frozen=True)
class ExportParameters(Message):
    """To a worker, in place of `Connect`: let the trainer write into the parameters. Answer: `ParametersExported`."""


@dataclass(frozen=True)
class ParametersExported(Message):
    """From a worker: where the tensors of `PlanRequest` lie in its parameters. Nothing has been written."""

    engine_instance: str  # another one for each start of an engine
    storages: list[list[Any]]  # [storage, kind, fields]
    locations: list[list[Any]]


@dataclass(frozen=True)
class Go(Message):
    """To a worker: run the plan. From here on its weights are a mixture, until `Commit`."""

    version: int
    sample: int | None  # which sample of each run in the slots has a digest beside it; None: no run has one
    place_sample: int | None  # which sample of what is read in place `digests` are of; -1: all bytes
    digests: list[int]  # of each rank's sample of its runs in `in_place`; empty when nothing is verified


@dataclass(frozen=True)
class Done(Message):
    """From a worker: every chunk of the push is verified and loaded."""

    version: int
    nbytes: int
    transfer_s: float
    verify_s: float
    load_s: float


@dataclass(frozen=True)
class Commit(Message):
    """To a worker: every worker is done. It checks that nothing is missing."""

    version: int


@dataclass(frozen=True)
class Committed(Message):
    """From a worker: the model is complete at this version."""

    version: int
    load_s: float


@dataclass(frozen=True)
class Release(Message):
    """To a worker: return from the engine call that it serves this connection in."""


@dataclass(frozen=True)
class Failure(Message):
    """Either way: the sender of this has failed; `error` is `WeightSyncError.to_fields()`."""

    error: dict[str, Any] = field(default_factory=dict)


def encode(message: Message) -> bytes:
    """Return the frame of `message`.

    Raises `ProtocolError` when it would pass `MAX_FRAME_BYTES`, or holds what is not a plain value.
    """
    name = type(message).__name__
    try:
        content = {"t": name, **{f.name: getattr(message, f.name) for f in fields(message)}}
        body: bytes = msgpack.packb(content, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a {name} cannot be written as msgpack: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {name} of {len(body)} bytes is over the {MAX_FRAME_BYTES} byte limit")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Return the message in a frame's body, which is the frame without its length.

    Raises `ProtocolError` for anything but a known message with exactly its fields, each of its type. The reader checks
    what is inside of arrays and maps.
    """
    try:
        content = msgpack.unpackb(body, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except ValueError as error:
        raise ProtocolError(f"a frame of {len(body)} bytes is not msgpack: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("t"), str):
        raise ProtocolError("a frame holds no message: expected a map with the message's name under 't'")
    name = content.pop("t")
    cls = Message.types.get(name)
    if cls is None:
        raise ProtocolError(f"unknown message {name!r}; this side speaks protocol {PROTOCOL}")
    expected = _field_types(name)
    if content.keys() != expected.keys():
        raise ProtocolError(
            f"{name} has fields {sorted(map(str, content))}, expected {sorted(expected)}; this side speaks protocol "
            f"{PROTOCOL}"
        )
    for key, kinds in expected.items():
        found = type(content[key])
        if Any not in kinds and found not in kinds:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ProtocolError(f"field {key!r} of {name} is of type {found.__name__}, expected {wanted}")
    return cls(**content)


@cache
def _field_types(name: str) -> dict[str, tuple[Any, ...]]:
    """Return the fields of the message `name`, and the types that each may have once decoded. `Any` allows any type."""
    hints = get_type_hints(Message.types[name])
    kinds = {
        f.name: get_args(hint) if isinstance(hint := hints[f.name], UnionType) else (hint,)
        for f in fields(Message.types[name])
    }
    return {key: tuple(get_origin(kind) or kind for kind in those) for key, those in kinds.items()}


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} has no meaning here")


def frame_length(prefix: bytes) -> int:
    """Return the body's length from a frame's first 4 bytes.

    Raises `ProtocolError` when it passes `MAX_FRAME_BYTES`.
    """
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame announces {length} bytes, over the {MAX_FRAME_BYTES} byte limit")
    return int(length)


PREFIX_BYTES = _LENGTH.size
