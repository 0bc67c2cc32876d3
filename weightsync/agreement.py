"""What a trainer's ranks and the engines have agreed on, and how long that holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.errors import ProtocolError
from weightsync.layout import Placement
from weightsync.senders.base import Piece, TensorPolicy

Signature = list[tuple[Any, ...]]


class Agreement:
    """What was agreed in a negotiation, and the local facts that it rests on. `once` of the buckets, the last ones, are
    frozen; `pushes` counts those that every engine has committed since, the first of all buckets; `model` is the `id`
    of what was pushed last. `digested` counts the spans of each bucket on this rank; `told` has, on rank 0, for each
    worker and bucket, which of the ranks' digests are its."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        local: Signature,
        buckets: Sequence[Sequence[str]],
        bucket_bytes: list[int],
        once: int,
        roads: dict[str, int],
        digested: Sequence[int],
        told: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        self._local = local
        self.buckets = buckets
        self.bucket_bytes = bucket_bytes
        self.once = once
        self.roads = roads
        self.digested = digested
        self.told = told
        self.pushes = 0
        self.model: int | None = None
        self._rest_on(pieces)

    def still_holds(self, pieces: Sequence[Piece], policy: TensorPolicy) -> bool:
        """Whether these pieces are what was agreed on; perhaps in other objects than before."""
        if pieces is not self._pieces:
            if signature(pieces, policy) != self._local:
                return False
            self._rest_on(pieces)
        return True

    def _rest_on(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._tensors = [p.tensor for p in pieces]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._computes = any(p.compute is not None for p in pieces)

    def holds_its_memory(self) -> bool:
        """Whether all that was agreed on still lies where it did, though the model may consist of something else."""
        return not self._computes and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses

    def due(self) -> list[int]:
        """The bytes of each bucket of the next push."""
        return self.bucket_bytes[: len(self.bucket_bytes) - (self.once if self.pushes else 0)]

    def check(self, bucket: int, part: int | None, digests: Sequence[int]) -> None:
        """Raise `ProtocolError` unless a transport gives this rank's digests as it has announced them."""
        expected = 0 if part is None else self.digested[bucket]
        if len(digests) != expected:
            raise ProtocolError(f"the transport gave {len(digests)} digests of bucket {bucket}, expected {expected}")

    def by_worker(self, bucket: int, digests: bytes) -> list[bytes]:
        """Of the digests of all ranks' spans of a bucket, those for each worker."""
        return [
            digests if 8 * len(numbers) == len(digests) else b"".join(digests[8 * n : 8 * n + 8] for n in numbers)
            for numbers in (buckets[bucket] for buckets in self.told)
        ]


def signature(pieces: Sequence[Piece], policy: TensorPolicy) -> Signature:
    """Compares equal as long as the tensors that this rank holds, the place of each in its memory, which are computed,
    and which are frozen, stay what they are. All ranks' together tell of every tensor of the model."""
    return [
        (
            p.meta,
            p.box,
            p.tensor.data_ptr(),
            p.tensor.stride(),
            p.tensor.device,
            p.compute is not None,
            policy.freezes(p.meta.name, p.trains),
        )
        for p in pieces
    ]


def frozen_everywhere(everyone: Sequence[dict[str, Any]]) -> set[str]:
    """What is frozen on every rank that holds any of it."""
    changing = [{row[0] for row in own["placements"]}.difference(own["frozen"]) for own in everyone]
    return set().union(*(own["frozen"] for own in everyone)).difference(*changing)


def frozen_buckets(buckets: Sequence[Sequence[str]], frozen: frozenset[str]) -> int:
    """How many of the buckets, counted from the end, hold nothing but what is frozen."""
    return next((n for n, names in enumerate(reversed(buckets)) if not frozen.issuperset(names)), len(buckets))


def spans_by_bucket(spans: Sequence[Sequence[list[int]]], buckets: int) -> list[list[list[int]]]:
    """The rows of all ranks' spans, rank after rank in each bucket: the order in which their digests come. Raises
    `ProtocolError` for those of no bucket."""
    found: list[list[list[int]]] = [[] for _ in range(buckets)]
    for row in (row for rows in spans for row in rows):
        if not 0 <= row[0] < buckets:
            raise ProtocolError(f"the transport announced digests of bucket {row[0]}, of {buckets}")
        found[row[0]].append(row)
    return found


def spans_told(
    spans: Sequence[Sequence[list[int]]], placements: Sequence[Sequence[Placement]]
) -> list[list[list[int]]]:
    """For each worker and bucket, the numbers of those spans that are of storages which the worker is told of."""
    of_storage: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for bucket, rows in enumerate(spans):
        for number, (_, rank, storage, *_) in enumerate(rows):
            of_storage[rank, storage].append((bucket, number))
    found: list[list[list[int]]] = []
    for own in placements:
        found.append([[] for _ in spans])
        for known in {(p.rank, p.storage) for p in own}:
            for bucket, number in of_storage.get(known, ()):
                found[-1][bucket].append(number)
        for numbers in found[-1]:
            numbers.sort()
    return found
