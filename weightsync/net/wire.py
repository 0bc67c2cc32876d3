"""The messages that cross a process boundary, and their bytes. docs/internals/wire.md is the specification.

A frame is a 4-byte little-endian length and a msgpack body. The body is a map of the message's name, under "t", and its
fields. Each message has one canonical encoding, and a frame in another one is refused. Nothing in a frame is ever
executed. This module knows nothing about sockets, tensors, trainers or engines.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, structs

from weightsync.errors import ErrorFields, ProtocolError
from weightsync.net import timeouts
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Count, ShardLocation, TensorMeta
from weightsync.planning.load_plan import LoadPlan, NameReader, PackedRegions, Runs, pack_regions, runs_of
from weightsync.planning.wire_types import ByteRange, ChunkLayout, Plain, Storage

PROTOCOL = 13
CLEAN, POISONED = "CLEAN", "POISONED"
"""States of a worker's model. The version of an engine begins with POISONED while a push is under way, and after a push
that failed once its workers had `Go`."""
MAX_VERSION = 2**63 - 1
"""The largest version: a signed 64-bit integer."""
VERSION_VARIABLE = "WEIGHTSYNC_VERSION"
"""Name of the environment variable with the version of an engine's first weights."""
MAX_FRAME_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
_REASON_CHARS = 300

T = TypeVar("T")
M = TypeVar("M", bound="Message")


Sample = Annotated[int, Meta(ge=-1, le=15)]
"""A sample's number, or -1 for all bytes."""
Turn = Annotated[int, Meta(ge=-1)]
"""A push's number, or -1 for all bytes. The number selects a sample of each memory."""
Role = Annotated[str, Meta(pattern=r"^(worker|rank|engines|member|link)\Z")]
"""The kind of a peer. "engines": a rank's second connection, for calls into the engines of its process."""
KvRole = Annotated[str, Meta(pattern=r"^(kv_producer|kv_consumer|kv_both|)\Z")]
"""vLLM's role of an engine that shares keys and values of requests with other engines. "": the engine shares none."""
Process = Annotated[str, Meta(pattern=r"^[0-9a-f-]+:[0-9]+:[0-9]+\Z")]
"""A process's name, as `runtime.this_process` returns it."""


class InitInfo(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The arguments of an engine's `init` call, for its workers: rank 0's address, and the session.

    host, port: 0.0.0.0 or ::, and 0, if no worker can dial rank 0. Each then listens at one of its published ports.
    asks: the call only checks that these workers have met the session's trainer. Workers of another engine raise.
    cores: number of the engine's cores, more than 1 under data parallelism.
    """

    session: str
    engine: Count
    host: str
    port: Annotated[int, Meta(ge=0, le=65535)]
    token: str
    timeout_s: Annotated[float, Meta(gt=0, le=timeouts.MAX_TIMEOUT_S)]
    process: Process
    asks: bool = False
    cores: Annotated[int, Meta(ge=1)] = 1


BACKEND = "weightsync"
"""The weight transfer backend in `weight_transfer_config={"backend": "weightsync"}`."""
ADAPTER_MODULES = "weightsync_adapter_modules"
"""The method of an engine's workers that returns `BoundModules`. The plug-in or the worker extension adds it."""
NOT_LOADED, NEWEST = 0, -1
"""In place of an adapter's number. NOT_LOADED: the adapter is not loaded yet. NEWEST: the server chose the number, and
the newest adapter has the largest."""


class BoundModules(Struct, frozen=True, forbid_unknown_fields=True):
    """The binding of an adapter's modules to the engine's, on one engine worker.

    unbound: the adapter's modules without a module of this worker. Another pipeline stage may have the module.
    twice: the adapter's modules that share one module of the engine.
    modules: the engine's modules that take adapters, the likeliest first. Empty when nothing is unbound or bound twice.
    error: the reason why the worker cannot take the adapter, or could not check it. "" without one.
    """

    unbound: list[str] = []
    twice: list[str] = []
    modules: list[str] = []
    error: str = ""


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag=True):
    """The base of all messages. docs/internals/wire.md specifies the types of their fields."""


class MachineInfo(Struct, frozen=True, array_like=True):
    """The host and device of a trainer rank or an engine worker. `peer` is its name for people.

    dialled: address and port of a worker that cannot dial rank 0.
    """

    peer: str
    device: str
    gpu_uuid: str
    boot_id: str
    dialled: tuple[str, int] | None = None


class Hello(Message, frozen=True):
    """First message of a new peer: an engine worker, a trainer rank, or a member of a broadcast."""

    protocol: int
    role: Role
    group: Count  # worker: the engine's number; rank and engines: the rank's; member and link: the listening member's
    rank: Count  # worker: its number in the engine; others: the number of the rank or member
    world: Count  # number of such peers in the group
    # Defaults: those of other peers than workers.
    boot_id: str = ""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda|)\Z")] = ""
    gpu_uuid: str = ""  # "" on a CPU
    name: str = ""  # for people: "tp=1 pp=0 dp=0"
    version: Count = 0  # worker: the last committed version, 0 when none
    state: Annotated[str, Meta(pattern=r"^(CLEAN|POISONED|)\Z")] = ""
    update_open: bool = False  # worker: whether its engine has an update started and not finished
    kv_role: KvRole = ""
    shares_experts: bool = False  # worker: its core has a part of the experts, and other cores have the others


class Value(Message, frozen=True):
    """Between trainer ranks: one contribution to, or the outcome of, a collective step.

    The value stays encoded until `read(kind)` decodes it.
    """

    value: Raw

    @classmethod
    def of(cls, value: Any) -> Value:
        """Return a message with this value. Raises `ProtocolError` unless it is a plain value."""
        return cls(Raw(_written(value, "Value")))

    def read(self, kind: Any = Plain) -> Any:
        """Return the value decoded as a `kind`. Raises `ProtocolError` for a value of another kind."""
        try:
            value = _reader(kind)(self.value)
            if memoryview(self.value) != _encode(value):
                raise ValueError("its encoding is not canonical")
        except (ValueError, RecursionError) as error:
            raise _no(kind, error) from None
        return value


class PlanRequest(Message, frozen=True):
    """To a worker: the tensors of a push. The worker answers `PackedLoadPlan`, and writes nothing.

    With an invitation, the worker begins to meet the other members of the transport. It plans meanwhile.
    """

    tensors: tuple[TensorMeta, ...]
    tied: tuple[tuple[str, str], ...]  # (other name, name) of each tensor with two names in the trainer's model
    keep: tuple[str, ...] = ()  # shell patterns of the engine's parameters that no tensor fills
    transport: str = ""  # of the invitation
    invitation: dict[str, Plain] = {}  # the transport's own fields; empty: there is no meeting


class PackedLoadPlan(Message, frozen=True):
    """From a worker: its `LoadPlan`, with positions in `PlanRequest.tensors` in place of most names."""

    used: dict[str, Runs]  # by dtype in the engine
    partial: PackedRegions  # the regions that the worker reads
    refused: dict[str, str]
    groups: list[Runs]
    reloads: list[Runs]
    missing: list[str]
    hints: list[str]
    load_paths: dict[str, Count]
    left_out: Runs
    kept: list[str]
    tied: list[str]
    duplicates: dict[str, str]

    @classmethod
    def of(cls, plan: LoadPlan, names: Sequence[str]) -> PackedLoadPlan:
        """Pack a plan of the tensors `names`."""
        at = {name: position for position, name in enumerate(names)}
        used = grouped(plan.used, plan.used.__getitem__)
        packed = {
            "used": {dtype: runs_of(at[name] for name in those) for dtype, those in used.items()},
            "partial": pack_regions(plan.partial, at),
            "groups": [runs_of(at[name] for name in group) for group in plan.groups],
            "reloads": [runs_of(at[name] for name in group) for group in plan.reloads],
            "left_out": runs_of(at[name] for name in plan.left_out),
        }
        return cls(**structs.asdict(plan) | packed)

    def read(self, names: Sequence[str]) -> LoadPlan:
        """Return the plan of the tensors `names`. Raises `ProtocolError` for positions of no tensor."""
        reader = NameReader(names)
        packed = {
            "used": {name: dtype for dtype, runs in self.used.items() for name in reader.read(runs)},
            "partial": reader.read_regions(self.partial),
            "groups": [reader.read(runs) for runs in self.groups],
            "reloads": [reader.read(runs) for runs in self.reloads],
            "left_out": reader.read(self.left_out),
        }
        return LoadPlan(**structs.asdict(self) | packed)


class Connect(Message, frozen=True):
    """To a worker: its part of the plan. It maps storages or links with members, and answers `Connected`."""

    transport: str
    storages: list[Storage]
    chunks: list[ChunkLayout]  # the chunks that the worker reads
    frozen: Count  # number of chunks, at the end of the list, that travel only until a push is committed
    in_place: list[ByteRange]  # memory of the ranks that the worker reads without a copy
    proof: list[Count]  # the digest of all bytes of each rank's runs in `in_place`, in rank order
    fields: dict[str, Plain]  # the transport's own fields


class Connected(Message, frozen=True):
    """From a worker: every storage is mapped and proven, every communicator linked."""


class ExportParameters(Message, frozen=True):
    """To a worker, in place of `Connect`: let the trainer write into the parameters. Answer: `ParametersExported`."""

    processes: list[Process]  # of the trainer's ranks


class ParametersExported(Message, frozen=True):
    """From a worker: the locations of `PlanRequest`'s tensors in its parameters. Nothing has been written."""

    engine_instance: str  # unique for each start of an engine, and after each take-back of the parameters
    storages: list[tuple[Count, str, dict[str, Plain]]]  # [storage, kind, fields]
    locations: list[ShardLocation]


class Ready(Message, frozen=True):
    """To a worker: can you take a push? It answers `Ready` from the engine's update call, and writes nothing."""


class Go(Message, frozen=True):
    """To a worker: run the plan. From here on its weights are a mixture, until `Commit`."""

    version: Count
    sample: Sample | None  # the sample of each run in the slots, for the digest behind the run; None: no digests
    place_sample: Turn | None  # the sample of the runs in `in_place`, for `digests`; -1: all bytes
    digests: list[Count]  # one for each rank, of its runs in `in_place`; empty when nothing is verified


class Done(Message, frozen=True):
    """From a worker: every chunk of the push is verified and loaded."""

    version: Count
    nbytes: Count
    transfer_s: float
    verify_s: float
    load_s: float


class Commit(Message, frozen=True):
    """To a worker: every worker is done. The worker checks that nothing is missing."""

    version: Count


class Committed(Message, frozen=True):
    """From a worker: the model is complete at this version."""

    version: Count
    load_s: float


class Release(Message, frozen=True):
    """To a worker: return from the engine's `init` or `update` call."""


class Ping(Message, frozen=True):
    """To the peer's process: are you alive? A worker asks its trainer when another trainer calls the engine.

    The answer is `Pong`, and may come between any two messages.
    """


class Pong(Message, frozen=True):
    """The answer to `Ping`: the peer's process runs."""

    holds: bool  # the trainer keeps the engine: its push makes progress, or none is under way; True from others


class Failure(Message, frozen=True):
    """In either direction: the sender has failed."""

    error: ErrorFields


_LEARNING = threading.Lock()
"""Held while msgspec inspects a kind: it crashes the process when two threads use a new `Struct` at the same time."""


@cache
def _reader(kind: Any) -> Callable[[Raw], Any]:
    with _LEARNING:
        return msgspec.msgpack.Decoder(kind).decode


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(reduce(or_, Message.__subclasses__())).decode


def encode(message: Message) -> bytes:
    """Return the frame of `message`.

    Raises `ProtocolError` when the body is over `MAX_FRAME_BYTES`, or a value is not a plain value.
    """
    name = type(message).__name__
    body = _written(message, name)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {name} of {len(body)} bytes is over the {MAX_FRAME_BYTES} byte limit. A plan lists all ranks' "
            "shards: shard over fewer ranks, push from one replica with WeightSync(ranks=...), or raise max_bytes"
        )
    return _LENGTH.pack(len(body)) + body


def _written(value: Any, name: str) -> bytes:
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a {name} cannot be written as msgpack: {error}") from error


def decode(body: bytes) -> Message:
    """Return the message in a frame's body: the frame without its length.

    Raises `ProtocolError` unless `encode` returns the same bytes for the message.
    """
    try:
        message: Message = _decode(body)
        if _encode(message) != body:
            raise ValueError(f"the encoding of a {type(message).__name__} is not canonical")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"a frame of {len(body)} bytes is no message of protocol {PROTOCOL}: {str(error)[:_REASON_CHARS]}"
        ) from None
    return message


def typed(value: Any, kind: type[T]) -> T:
    """Return plain values converted to a `kind`. Raises `ProtocolError` for values of another kind."""
    _reader(kind)  # type: ignore[arg-type]  # msgspec inspects a new `kind` here, under the lock
    try:
        return msgspec.convert(value, kind)
    except ValueError as error:
        raise _no(kind, error) from None


def _no(kind: Any, error: Exception) -> ProtocolError:
    name = "plain value" if kind is Plain else getattr(kind, "__name__", str(kind))
    return ProtocolError(f"the peer sent no {name}: {str(error)[:_REASON_CHARS]}")


def frame_length(prefix: bytes, most_bytes: int = MAX_FRAME_BYTES) -> int:
    """Return the body's length from a frame's first 4 bytes. Raises `ProtocolError` when it is over `most_bytes`."""
    (length,) = _LENGTH.unpack(prefix)
    if length > most_bytes:
        raise ProtocolError(f"a frame announces {length} bytes, over the {most_bytes} byte limit")
    return int(length)


PREFIX_BYTES = _LENGTH.size
