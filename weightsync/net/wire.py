"""The messages that cross a process boundary, and their bytes. docs/wire.md is the specification.

A frame is a 4-byte little-endian length and that many bytes of msgpack: a map with the message's name under "t" and
its fields. Each message has one form: what encodes to other bytes than those that came is refused. Nothing in a frame
is ever executed. This module knows nothing about sockets, tensors, trainers or engines.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from weightsync.errors import ErrorFields, ProtocolError
from weightsync.net import timeouts
from weightsync.planning.layout import Box, Count, ShardLocation, TensorMeta
from weightsync.planning.wire_types import ByteRange, ChunkLayout, Plain, Storage

PROTOCOL = 4
CLEAN, POISONED = "CLEAN", "POISONED"
"""States of a worker's model. The version of an engine begins with the second one when a push into it has failed after
its first bucket was announced."""
MAX_VERSION = 2**63 - 1
"""No version is larger: msgpack, and what counts versions elsewhere, take 64 bits."""
MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
_REASON_CHARS = 300

T = TypeVar("T")
M = TypeVar("M", bound="Message")


Sample = Annotated[int, Meta(ge=-1, le=15)]
"""A sample's number, or -1 for all bytes."""
Turn = Annotated[int, Meta(ge=-1)]
"""The number of a push, from which each memory takes a sample of its own, or -1 for all bytes."""
Role = Annotated[str, Meta(pattern=r"^(worker|rank|engines)\Z")]
"""What connects. "engines" is a rank's second connection, for calls into the engines that it has."""
Process = Annotated[str, Meta(pattern=r"^[0-9a-f-]+:[0-9]+:[0-9]+\Z")]
"""A process, as `runtime.this_process` names it."""


class InitInfo(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the engine's `init` call tells its workers: where trainer rank 0 listens, and for which session.

    asks: the call only asks whether these workers have met the session's trainer. Any others raise.
    """

    session: str
    engine: Count
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: str
    timeout_s: Annotated[float, Meta(gt=0, le=timeouts.MAX_TIMEOUT_S)]
    process: Process
    asks: bool = False


BACKEND = "weightsync"
"""The weight transfer backend in `weight_transfer_config={"backend": "weightsync"}`."""
ADAPTER_MODULES = "weightsync_adapter_modules"
"""A method that the plug-in or the worker extension gives an engine's workers. It answers `BoundModules`."""
NOT_LOADED, NEWEST = 0, -1
"""What stands for an adapter's number: it is not loaded yet; a server has chosen the number, and numbers grow."""


class BoundModules(Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine worker makes of an adapter.

    unbound: the adapter's modules that it does not bind. With pipeline parallelism another worker may.
    twice: those that the worker binds to a module that another one of the adapter's is bound to.
    modules: the engine's own that adapters can be bound to, the likeliest first; none where nothing is wrong.
    error: why the worker cannot take it, or could not find out; "" where it could.
    """

    unbound: list[str] = []
    twice: list[str] = []
    modules: list[str] = []
    error: str = ""


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag=True):
    """One message. Its fields are of the types that docs/wire.md gives them."""


class MachineInfo(Struct, frozen=True, array_like=True):
    """Where a trainer rank or an engine worker runs. `peer` is its name for people."""

    peer: str
    device: str
    gpu_uuid: str
    boot_id: str


class Hello(Message, frozen=True):
    """First message of a peer that connects to trainer rank 0: an engine worker or another trainer rank."""

    protocol: int
    role: Role
    group: Count  # worker: the engine's number; rank: 0; engines: the rank's number
    rank: Count  # worker: its number in the engine; rank: its number among the trainer's ranks
    world: Count  # how many such peers the group has
    boot_id: str
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda|)\Z")]  # "" of a rank
    gpu_uuid: str  # "" on a CPU
    name: str  # for people: "tp=1 pp=0 dp=0"
    version: Count  # worker: the last version that was committed, 0 when none; rank: 0
    state: Annotated[str, Meta(pattern=r"^(CLEAN|POISONED|)\Z")]  # "" of a rank
    update_open: bool  # worker: whether its engine has an update started and not finished; rank: False


class Value(Message, frozen=True):
    """Between trainer ranks: one contribution to, or the outcome of, a collective step.

    It stays the bytes that it came in until its reader says what it is.
    """

    value: Raw

    @classmethod
    def of(cls, value: Any) -> Value:
        """Return the message that carries this. Raises `ProtocolError` for what is no plain value."""
        return cls(Raw(_written(value, "Value")))

    def read(self, kind: Any = Plain) -> Any:
        """Return what it carries, as the `kind` that its sender meant. Raises `ProtocolError` for anything else."""
        try:
            value = _reader(kind)(self.value)
            if memoryview(self.value) != _encode(value):
                raise ValueError("it is written in another form than the one that it has")
        except (ValueError, RecursionError) as error:
            raise _no(kind, error) from None
        return value


class PlanRequest(Message, frozen=True):
    """To a worker: the tensors that a push will deliver. The worker answers `LoadPlan`, and writes nothing."""

    tensors: tuple[TensorMeta, ...]
    tied: tuple[tuple[str, str], ...]  # (other name, name) of each tensor that the trainer's model has twice


class LoadPlan(Message, frozen=True):
    """From a worker: how its model takes the tensors."""

    used: dict[str, str]  # tensor name -> dtype that the engine holds it in
    partial: dict[str, tuple[Box, ...]]  # tensor name -> the regions it reads, where that is not all of it
    refused: dict[str, str]  # tensor name -> what the engine's loader has against it
    groups: list[list[str]]  # names that land in one engine parameter
    reloads: list[list[str]]  # names that a module needs all of whenever any of them changes
    missing: list[str]  # parts of the engine's parameters that no tensor fills
    hints: list[str]  # the tensor names that would fill them, where other layers tell
    load_paths: dict[str, Count]  # load path -> how many modules take it
    left_out: list[str]  # tensors of a part of the model that the engine does not run
    kept: list[str]  # parameters of a drafter that no tensor fills, and that stay as they are
    tied: list[str]  # tensors that fill a parameter which several modules of the engine share
    duplicates: dict[str, str]  # tensor name -> the tensor that fills the same parameter, and must be equal


class Connect(Message, frozen=True):
    """To a worker: its part of the plan. It maps or joins what the transport needs, and answers `Connected`."""

    transport: str
    storages: list[Storage]
    chunks: list[ChunkLayout]  # each that the worker reads
    frozen: Count  # how many chunks, the last ones, no push has any more after one was committed
    in_place: list[ByteRange]  # what is read where it lies
    proof: list[Count]  # the digest of each rank's runs in `in_place`, of all bytes, in rank order
    fields: dict[str, Plain]  # what else this transport needs


class Connected(Message, frozen=True):
    """From a worker: every storage is mapped and proven, every communicator joined."""


class ExportParameters(Message, frozen=True):
    """To a worker, in place of `Connect`: let the trainer write into the parameters. Answer: `ParametersExported`."""

    processes: list[Process]  # of the trainer's ranks


class ParametersExported(Message, frozen=True):
    """From a worker: where the tensors of `PlanRequest` lie in its parameters. Nothing has been written."""

    engine_instance: str  # another one for each start of an engine
    storages: list[tuple[Count, str, dict[str, Plain]]]  # [storage, kind, fields]
    locations: list[ShardLocation]


class Ready(Message, frozen=True):
    """To a worker: can you take a push? It answers the same, from the call that it serves, and writes nothing."""


class Go(Message, frozen=True):
    """To a worker: run the plan. From here on its weights are a mixture, until `Commit`."""

    version: Count
    sample: Sample | None  # which sample of each run in the slots has a digest beside it; None: no run has one
    place_sample: Turn | None  # which sample of what is read in place `digests` are of; -1: all bytes
    digests: list[Count]  # of each rank's sample of its runs in `in_place`; empty when nothing is verified


class Done(Message, frozen=True):
    """From a worker: every chunk of the push is verified and loaded."""

    version: Count
    nbytes: Count
    transfer_s: float
    verify_s: float
    load_s: float


class Commit(Message, frozen=True):
    """To a worker: every worker is done. It checks that nothing is missing."""

    version: Count


class Committed(Message, frozen=True):
    """From a worker: the model is complete at this version."""

    version: Count
    load_s: float


class Release(Message, frozen=True):
    """To a worker: return from the engine call that it serves this connection in."""


class Ping(Message, frozen=True):
    """From a worker that another trainer asks for: does the one that has the engine keep it?

    The answer is `Pong`, and may come at any time.
    """


class Pong(Message, frozen=True):
    """From a trainer that has an engine, and runs."""

    holds: bool  # the trainer keeps the engine: its push moves, or it has none under way; True from others


class Failure(Message, frozen=True):
    """Either way: the sender of this has failed."""

    error: ErrorFields


_LEARNING = threading.Lock()
"""Held while msgspec learns a kind: it ends the process where two threads show it a `Struct` for the first time."""


@cache
def _reader(kind: Any) -> Callable[[Raw], Any]:
    with _LEARNING:
        return msgspec.msgpack.Decoder(kind).decode


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(reduce(or_, Message.__subclasses__())).decode


def encode(message: Message) -> bytes:
    """Return the frame of `message`.

    Raises `ProtocolError` when it would pass `MAX_FRAME_BYTES`, or holds what is not a plain value.
    """
    name = type(message).__name__
    body = _written(message, name)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {name} of {len(body)} bytes is over the {MAX_FRAME_BYTES} byte limit")
    return _LENGTH.pack(len(body)) + body


def _written(value: Any, name: str) -> bytes:
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a {name} cannot be written as msgpack: {error}") from error


def decode(body: bytes) -> Message:
    """Return the message in a frame's body, which is the frame without its length.

    Raises `ProtocolError` for anything but the bytes that `encode` gives a message.
    """
    try:
        message: Message = _decode(body)
        if _encode(message) != body:
            raise ValueError(f"a {type(message).__name__} is written in another form than the one that it has")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"a frame of {len(body)} bytes is no message of protocol {PROTOCOL}: {str(error)[:_REASON_CHARS]}"
        ) from None
    return message


def typed(value: Any, kind: type[T]) -> T:
    """Return plain values as the `kind` that their sender meant. Raises `ProtocolError` for anything else."""
    _reader(kind)  # type: ignore[arg-type]  # which lets msgspec learn it
    try:
        return msgspec.convert(value, kind)
    except ValueError as error:
        raise _no(kind, error) from None


def _no(kind: Any, error: Exception) -> ProtocolError:
    name = "plain value" if kind is Plain else getattr(kind, "__name__", str(kind))
    return ProtocolError(f"what came is no {name}: {str(error)[:_REASON_CHARS]}")


def frame_length(prefix: bytes, most_bytes: int = MAX_FRAME_BYTES) -> int:
    """Return the body's length from a frame's first 4 bytes. Raises `ProtocolError` when it passes `most_bytes`."""
    (length,) = _LENGTH.unpack(prefix)
    if length > most_bytes:
        raise ProtocolError(f"a frame announces {length} bytes, over the {most_bytes} byte limit")
    return int(length)


PREFIX_BYTES = _LENGTH.size
