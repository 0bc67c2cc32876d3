"""A second reader of docs/internals/wire.md, written from its text alone. It shares no code with weightsync.

`read_frame` returns the name and the fields of a frame without its seal, or raises `RefusedError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType
from typing import Any

import msgpack

MOST_BODY_BYTES = 268435456
MOST_DEPTH = 10

Form = Callable[[Any], bool]
"""Tells whether a value has a form."""


class RefusedError(Exception):
    """Bytes that docs/internals/wire.md allows in no message."""


def number(least: int, most: int = 2**64 - 1) -> Form:
    return lambda value: type(value) is int and least <= value <= most


def text(value: Any) -> bool:
    return type(value) is str


def boolean(value: Any) -> bool:
    return type(value) is bool


def seconds(value: Any) -> bool:
    return type(value) is float


def word(*words: str) -> Form:
    return lambda value: type(value) is str and value in words


def process(value: Any) -> bool:
    return text(value) and re.fullmatch("[0-9a-f-]+:[0-9]+:[0-9]+", value) is not None


def maybe(form: Form) -> Form:
    return lambda value: value is None or form(value)


def array(form: Form) -> Form:
    return lambda value: type(value) is list and all(map(form, value))


def row(*forms: Form) -> Form:
    return lambda value: (
        type(value) is list
        and len(value) == len(forms)
        and all(form(one) for form, one in zip(forms, value, strict=True))
    )


def table(form: Form) -> Form:
    return lambda value: type(value) is dict and all(map(text, value)) and all(map(form, value.values()))


def record(**forms: Form) -> Form:
    """Return the form of a map with these keys in this order."""
    return lambda value: (
        type(value) is dict and [*value] == [*forms] and all(form(value[key]) for key, form in forms.items())
    )


def either(*forms: Form) -> Form:
    return lambda value: any(form(value) for form in forms)


def plain(value: Any, depth: int = MOST_DEPTH) -> bool:
    """Tell whether a value is of any type that messages have, at most so deep."""

    def inner(value: Any) -> bool:
        return plain(value, depth - 1)

    if type(value) in (list, dict):
        return depth > 0 and either(array(inner), table(inner))(value)
    return type(value) in (NoneType, bool, int, float, str)


COUNT = number(0)
INTEGER = number(-(2**63))
NAMES = array(text)
POSITIONS = array(row(COUNT, COUNT))
PLAIN_MAP = table(plain)

MANIFEST = row(text, array(COUNT), text)
BOX = row(array(COUNT), array(COUNT))
LOCATION = row(text, BOX, COUNT, INTEGER, COUNT, array(COUNT), text)
STORAGE = row(COUNT, INTEGER, text, PLAIN_MAP)
RUN = row(COUNT, INTEGER, COUNT, COUNT)

FACTS = table(either(NAMES, table(text)))
STORAGE_KINDS = {
    "fd": record(pid=COUNT, fd=COUNT, nbytes=COUNT, inode=COUNT),
    "cuda": record(
        device=COUNT,
        handle=text,
        nbytes=COUNT,
        offset_bytes=COUNT,
        counter_handle=text,
        counter_offset=COUNT,
        event_handle=text,
        event_sync=boolean,
        gpu_uuid=text,
    ),
    "nixl": record(firsts=array(maybe(COUNT))),
}
"""What opens a storage of each kind."""

SLOT_RUNS = array(array(row(COUNT, COUNT, COUNT)))
TRANSPORT_FIELDS: dict[str, dict[str, Form]] = {
    "ipc": {"worker": COUNT, "parts": array(maybe(array(COUNT)))},
    "broadcast": {
        "slot_bytes": COUNT,
        "runs": SLOT_RUNS,
        "senders": array(COUNT),
        "slots": COUNT,
        "pushes": COUNT,
        "encoders": array(COUNT),
        "by_words": boolean,
        "origins": array(array(COUNT)),
        "onward": maybe(COUNT),
        "before": NAMES,
        "after": NAMES,
    },
    "nixl": {"slot_bytes": COUNT, "runs": SLOT_RUNS, "before": array(COUNT), "behind": array(COUNT)},
    "checkpoint": {
        "slot_bytes": COUNT,
        "runs": SLOT_RUNS,
        "incoming": text,
        "pieces": array(array(array(row(text, COUNT, array(COUNT), BOX, COUNT, COUNT)))),
    },
}
"""What `Connect.fields` has with each transport."""
INVITATIONS: dict[str, dict[str, Form]] = {
    "": {},
    "broadcast": {
        "place": row(text, COUNT, text),
        "size": COUNT,
        "device": word("cpu", "cuda"),
        "rank": COUNT,
    },
    "nixl": {"place": row(text, COUNT, text), "size": COUNT, "rank": COUNT, "backend": text},
}
"""What `PlanRequest.invitation` has with each transport."""


MESSAGES: dict[str, dict[str, Form]] = {
    "Hello": {
        "protocol": INTEGER,
        "role": word("worker", "rank", "engines", "member", "link"),
        "group": COUNT,
        "rank": COUNT,
        "world": COUNT,
        "boot_id": text,
        "device": word("cpu", "cuda", ""),
        "gpu_uuid": text,
        "name": text,
        "version": COUNT,
        "state": word("CLEAN", "POISONED", ""),
        "update_open": boolean,
        "kv_role": word("kv_producer", "kv_consumer", "kv_both", ""),
        "shares_experts": boolean,
    },
    "PlanRequest": {
        "tensors": array(MANIFEST),
        "tied": array(row(text, text)),
        "keep": array(text),
        "transport": text,
        "invitation": PLAIN_MAP,
    },
    "PackedLoadPlan": {
        "used": table(POSITIONS),
        "partial": array(row(array(BOX), POSITIONS)),
        "refused": table(text),
        "groups": array(POSITIONS),
        "reloads": array(POSITIONS),
        "missing": NAMES,
        "hints": NAMES,
        "load_paths": table(COUNT),
        "left_out": POSITIONS,
        "kept": NAMES,
        "tied": NAMES,
        "duplicates": table(text),
    },
    "Connect": {
        "transport": text,
        "storages": array(STORAGE),
        "chunks": array(row(array(LOCATION), array(RUN))),
        "frozen": COUNT,
        "in_place": array(RUN),
        "proof": array(COUNT),
        "fields": PLAIN_MAP,
    },
    "Connected": {},
    "ExportParameters": {"processes": array(process)},
    "ParametersExported": {
        "engine_instance": text,
        "storages": array(row(COUNT, text, PLAIN_MAP)),
        "locations": array(LOCATION),
    },
    "Ready": {},
    "Go": {
        "version": COUNT,
        "sample": maybe(number(-1, 15)),
        "place_sample": maybe(number(-1)),
        "digests": array(COUNT),
    },
    "Done": {
        "version": COUNT,
        "nbytes": COUNT,
        "transfer_s": seconds,
        "verify_s": seconds,
        "load_s": seconds,
    },
    "Commit": {"version": COUNT},
    "Committed": {"version": COUNT, "load_s": seconds},
    "Release": {},
    "Ping": {},
    "Pong": {"holds": boolean},
    "Value": {"value": plain},
    "Failure": {
        "error": record(kind=text, message=text, who=maybe(text), phase=maybe(text), facts=FACTS),
    },
}


def read_frame(frame: bytes) -> tuple[str, dict[str, Any]]:
    """Read a frame without its seal. Raises `RefusedError`."""
    length = int.from_bytes(frame[:4], "little")
    if length > MOST_BODY_BYTES or length != len(frame) - 4:
        raise RefusedError(f"a frame of {len(frame)} bytes announces {length}")
    return read_body(frame[4:])


def read_body(body: bytes) -> tuple[str, dict[str, Any]]:
    """Read the body of a frame. Raises `RefusedError`."""
    try:
        content = msgpack.unpackb(body)
    except (ValueError, TypeError) as error:
        raise RefusedError(f"no msgpack: {error}") from error
    if type(content) is not dict or next(iter(content), None) != "t":
        raise RefusedError("no map that begins with a name")
    name = content.pop("t")
    if type(name) is not str or name not in MESSAGES:
        raise RefusedError("no known message")
    forms = MESSAGES[name]
    if [*content] != [*forms]:
        raise RefusedError(f"{name} has not exactly its fields in their order")
    for field, form in forms.items():
        if not form(content[field]):
            raise RefusedError(f"{name}.{field} is of another form")
    if msgpack.packb({"t": name, **content}) != body:
        raise RefusedError(f"{name} is not in its shortest form, or has a key twice")
    return name, content


def check_invitation(fields: dict[str, Any]) -> None:
    """Check what a `PlanRequest` says to its transport, as `check_connect` does."""
    forms, given = INVITATIONS[fields["transport"]], fields["invitation"]
    if given.keys() != forms.keys() or not all(form(given[name]) for name, form in forms.items()):
        raise RefusedError(f"{fields['transport']} has {given}")


def check_connect(fields: dict[str, Any]) -> None:
    """Check what a `Connect` says to its transport, which other transports may do otherwise. Raises `RefusedError`."""
    for _, _, kind, opens in fields["storages"]:
        if not STORAGE_KINDS[kind](opens):
            raise RefusedError(f"a storage of kind {kind} has {opens}")
    forms = TRANSPORT_FIELDS[fields["transport"]]
    given = fields["fields"]
    if given.keys() != forms.keys() or not all(form(given[name]) for name, form in forms.items()):
        raise RefusedError(f"{fields['transport']} has {given}")
