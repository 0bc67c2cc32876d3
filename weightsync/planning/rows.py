"""Manifests, locations and regions as rows of plain values, for messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta

Reads: TypeAlias = Mapping[str, tuple[Box, ...]]
"""The regions of each tensor that one engine worker reads, by name. It reads nothing of a tensor without an entry."""


def pack_manifest(manifest: Manifest) -> list[list[Any]]:
    """Return a row of [name, shape, dtype] for each tensor."""
    return [[t.name, list(t.shape), t.dtype] for t in manifest]


def unpack_manifest(rows: Iterable[list[Any]]) -> Manifest:
    """Return the manifest of `pack_manifest`'s rows. Raises `ProtocolError` for any other rows."""
    try:
        return Manifest(tuple(TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in rows))
    except (TypeError, ValueError) as error:
        if isinstance(error, WeightSyncError):
            raise
        raise ProtocolError(f"a manifest has a row that is not [name, shape, dtype]: {error}") from error


def pack_locations(locations: Iterable[ShardLocation]) -> list[list[Any]]:
    """Return a row of [name, start, size, rank, storage, offset, stride, dtype] for each location."""
    return [
        [p.name, list(p.box.start), list(p.box.size), p.rank, p.storage, p.offset, list(p.stride), p.dtype]
        for p in locations
    ]


def unpack_locations(rows: Iterable[list[Any]]) -> list[ShardLocation]:
    """Return the locations of `pack_locations`' rows. Raises `ProtocolError` for any other rows."""
    try:
        return [
            ShardLocation(name, Box(tuple(start), tuple(size)), rank, storage, offset, tuple(stride), dtype)
            for name, start, size, rank, storage, offset, stride, dtype in rows
        ]
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"a row of locations is not [name, start, size, rank, storage, offset, stride, dtype]: {error}"
        ) from error


def pack_reads(reads: Reads) -> dict[str, list[Any]]:
    """Return the regions as [start, size], by name."""
    return {name: [[list(box.start), list(box.size)] for box in boxes] for name, boxes in reads.items()}


def unpack_reads(rows: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Box, ...]]:
    """Return the regions of `pack_reads`' rows."""
    return {name: tuple(Box(tuple(start), tuple(size)) for start, size in boxes) for name, boxes in rows.items()}
