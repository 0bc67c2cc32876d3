"""The changed words of a push, written into the bytes of the last push.

The bytes of a chunk lie in the engine's parameters, if all of them are copied there as they are. Those of other chunks
are kept by the transport, and loaded from there as in every push.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from weightsync.errors import DigestError, ProtocolError
from weightsync.kernels.changed_words import CHECKSUM, NONE, ChangeWriter, Region, table_bytes, words_of
from weightsync.kernels.copies import collapse
from weightsync.planning.layout import CopyOp, ShardLocation, itemsize
from weightsync.transports.base import Changes
from weightsync.transports.changes import parts_of
from weightsync.worker.load_paths import Arrivals
from weightsync.worker.trace import named_tensors

_LEAST_BYTES = 1024
"""Fewest bytes of a region. Kept bytes cost less than a table of shorter regions."""


class _Arrived(NamedTuple):
    """Changes under way into memory. checksum: of the memory here."""

    changes: Changes
    writer: ChangeWriter
    checksum: torch.Tensor


class ChangedRuns:
    """The memory of the last push's bytes, for one connection.

    kept: the chunks to be kept by the transport, among the chunks of every push.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals, self._locations = arrivals, arrivals.locations
        self._due = arrivals.chunks(False)
        self._regions = _live_regions(arrivals)
        self.kept = {number for number in self._due if number not in self._regions}
        self._arrived: list[_Arrived] = []
        # By the part's first chunk, and the rank. A rank without pieces in a part sends an empty body.
        self._writers = defaultdict[tuple[int, int], ChangeWriter](lambda: ChangeWriter((), ()))

    def bind(self) -> None:
        """Prepare the writing. The transport has memory for the kept chunks."""
        for part in parts_of(self._due):
            words, regions = defaultdict[int, list[int]](list), defaultdict[int, list[Region]](list)
            for number in part:
                for at, place in enumerate(self._locations[number]):
                    own = words[place.rank]
                    regions[place.rank] += self._regions_of(number, at, len(own))
                    own.append(_words(place))
            for rank, own in words.items():
                self._writers[part[0], rank] = ChangeWriter(own, regions[rank])

    def clear(self) -> None:
        """Forget the changes. Their memory is the engine's again."""
        self._arrived.clear()

    def add(self, changes: Changes, sample: int | None) -> None:
        """Take changes, and begin to check them. Raises `ProtocolError` if they are too short."""
        writer = self._writers[changes.chunks[0], changes.rank]
        if changes.body.numel() < (least := table_bytes(writer.tiles)):
            raise ProtocolError(f"changes of {changes.body.numel()} bytes came, expected at least {least}")
        checksum = writer.check(changes.body, NONE if sample is None else sample)
        self._arrived.append(_Arrived(changes, writer, checksum))

    def finish_checks(self) -> None:
        """Compare the changes, and a sample of the bytes of the last push, with the checksums. Waits for the GPU.

        Raises `DigestError` if changes were damaged, or this worker has other bytes than the last push.
        """
        checksums = torch.stack([each.checksum for each in self._arrived]).tolist() if self._arrived else ()
        for (each, *_), checksum in zip(self._arrived, checksums, strict=True):
            if (checksum ^ each.checksum) & CHECKSUM:
                raise DigestError(
                    f"the changes in chunks {each.chunks[0]} to {each.chunks[-1]} from trainer rank {each.rank} were "
                    "damaged, or this worker has other bytes than the last push. Nothing was written. Push again: the "
                    "next push sends everything"
                )

    def write(self) -> int:
        """Write the changed words. On a GPU the work is queued on the current stream. Return the bytes read."""
        for changes, writer, _ in self._arrived:
            writer.write(changes.body)
        nbytes = sum(each.changes.body.numel() for each in self._arrived)
        self.clear()
        return nbytes

    def _regions_of(self, number: int, at: int, piece: int) -> list[Region]:
        """Return the regions of a place, as this `piece` of its body."""
        place = self._locations[number][at]
        if number in self._regions:
            return [region._replace(piece=piece) for region in self._regions[number][at]]
        first, words = place.offset * itemsize(place.dtype), _words(place)
        storage = self._arrivals.source.storage(place.rank, place.storage)
        return [Region(piece, 0, words, storage[first : first + 2 * words])]


def _words(place: ShardLocation) -> int:
    return words_of(place.box.numel * itemsize(place.dtype))


def _live_regions(arrivals: Arrivals) -> dict[int, list[list[Region]]]:
    """Return the regions of each place in a chunk, for chunks with all bytes in parameters as they come.

    Of such a chunk, each word of each place lies in exactly one parameter.
    """
    live, locations = named_tensors(arrivals.model.live), arrivals.locations
    starts = [
        sorted((place.rank, place.offset * itemsize(place.dtype), at) for at, place in enumerate(own))
        for own in locations
    ]
    found: dict[int, list[list[Region]]] = {number: [[] for _ in own] for number, own in enumerate(locations)}
    elsewhere = {op.chunk for ops in arrivals.whole_ops.values() for op in ops}
    for param, ops in arrivals.ops.items():
        if not arrivals.takes_in_place(param):
            elsewhere.update(op.chunk for op in ops)
            continue
        for op in ops:
            for first, memory in _pieces(op, live[param].data):
                _, start, at = starts[op.chunk][bisect_right(starts[op.chunk], (op.rank, first, sys.maxsize)) - 1]
                word = (first - start) // 2
                found[op.chunk][at].append(Region(0, word, word + memory.numel() // 2, memory))
    return {
        number: regions
        for number, regions in found.items()
        if number not in elsewhere
        and all(_cover(own, _words(place)) for own, place in zip(regions, locations[number], strict=True))
    }


def _cover(regions: list[Region], words: int) -> bool:
    """Sort regions. Return whether they cover each of so many words once."""
    regions.sort(key=lambda region: region.first)
    return [0, *(region.end for region in regions)] == [*(region.first for region in regions), words]


def _pieces(op: CopyOp, live: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the contiguous parts of a copy into a live tensor: the first byte in the slot, and the tensor's bytes.

    Yields nothing if the copy changes the dtype, or has short or odd parts.
    """
    size = itemsize(op.src_dtype)
    *outer, (count, to, of) = collapse(op.size, op.dst_stride, op.src_stride)
    nbytes = count * size
    if live.dtype != getattr(torch, op.src_dtype) or to != 1 or of != 1 or (outer and nbytes < _LEAST_BYTES):
        return
    for index in product(*(range(length) for length, _, _ in outer)):
        moved = [sum(n * dim[1 + side] for n, dim in zip(index, outer, strict=True)) for side in (0, 1)]
        memory = torch.as_strided(live, (count,), (1,), op.dst_offset + moved[0]).view(torch.uint8)
        first = (op.src_offset + moved[1]) * size
        if nbytes % 2 == first % 2 == memory.data_ptr() % 2 == 0:
            yield first, memory
