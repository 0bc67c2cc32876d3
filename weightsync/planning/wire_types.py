"""The types of rows in messages: storages, runs of bytes, and a worker's view of a chunk. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from weightsync.planning.layout import Box, Count, ShardLocation

if TYPE_CHECKING:
    Plain: TypeAlias = Any
else:
    Plain = bool | int | float | str | None
    for _ in range(10):  # msgspec has no recursive type
        Plain = bool | int | float | str | None | list[Plain] | dict[str, Plain]
"""Nil, booleans, integers, floats, strings, and arrays and maps of them, up to a depth."""

Storage: TypeAlias = tuple[Count, int, str, dict[str, Plain]]
"""A storage's rank, its number, its kind of memory, and the fields that open it."""

ReadRegions: TypeAlias = Mapping[str, tuple[Box, ...]]
"""The regions of each tensor that one engine worker reads, by name. A tensor without an entry is not read."""


class ByteRange(Struct, frozen=True, array_like=True, gc=False):
    """Bytes of a storage, filled by one rank for one chunk. Their digest follows them, at byte `first + nbytes`."""

    rank: Count
    storage: int
    first: Count
    nbytes: Count


class ChunkLayout(Struct, frozen=True, array_like=True):
    """One chunk as a worker finds it: the location of each region, and the runs with digests."""

    locations: tuple[ShardLocation, ...]
    runs: tuple[ByteRange, ...] = ()
