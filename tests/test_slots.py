"""Where the bytes of a bucket lie while they travel, and which way they take."""

from __future__ import annotations

from itertools import pairwise

import pytest

from weightsync.layout import Box, Manifest, Placement, TensorMeta, coverage, itemsize, row_major
from weightsync.transports.base import Reads, Shipment
from weightsync.transports.broadcast import spares
from weightsync.transports.slots import SLOTS, Exchange, exchange_layout, merge

ROWS, COLUMNS = 4096, 512
BUCKETS = (("embed", "norm"), ("up", "down"), ("head",))
MANIFEST = Manifest(
    (
        TensorMeta("embed", (ROWS, COLUMNS), "bfloat16"),
        TensorMeta("norm", (COLUMNS,), "float32"),
        TensorMeta("up", (ROWS, COLUMNS), "bfloat16"),
        TensorMeta("down", (COLUMNS, ROWS), "bfloat16"),
        TensorMeta("head", (ROWS, COLUMNS), "bfloat16"),
    )
)


def share(shape: tuple[int, ...], dim: int, number: int, count: int) -> Box:
    size = shape[dim] // count
    start = tuple(number * size if at == dim else 0 for at in range(len(shape)))
    return Box(start, tuple(size if at == dim else length for at, length in enumerate(shape)))


def sharded(ranks: int) -> tuple[Placement, ...]:
    """Every rank has its rows of everything, as with FSDP2."""
    found = []
    for number, meta in enumerate(MANIFEST):
        for rank in range(ranks):
            box = share(meta.shape, 0, rank, ranks)
            found.append(Placement(meta.name, box, rank, number, 0, row_major(box.size), meta.dtype))
    return tuple(found)


def tensor_parallel(workers: int) -> tuple[Reads, ...]:
    found = []
    for worker in range(workers):
        reads = {meta.name: (share(meta.shape, 0, worker, workers),) for meta in MANIFEST}
        reads["norm"] = (Box.full((COLUMNS,)),)
        reads["down"] = (share((COLUMNS, ROWS), 1, worker, workers),)
        found.append(reads)
    return tuple(found)


def replicas(workers: int) -> tuple[Reads, ...]:
    return ({meta.name: (Box.full(meta.shape),) for meta in MANIFEST},) * workers


def laid_out(ranks: int, reads: tuple[Reads, ...]) -> Exchange:
    return exchange_layout(MANIFEST, BUCKETS, sharded(ranks), reads)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("reads", [tensor_parallel(2), tensor_parallel(4), replicas(2)])
def test_each_worker_gets_what_it_reads_once_and_runs_do_not_overlap(ranks: int, reads: tuple[Reads, ...]):
    exchange = laid_out(ranks, reads)
    arriving = [exchange.arriving(worker) for worker in range(len(reads))]
    for worker, wanted in enumerate(reads):
        for name, (box,) in wanted.items():
            came = [
                Box(tuple(a - b for a, b in zip(p.box.start, box.start, strict=True)), p.box.size)
                for p in arriving[worker]
                if p.name == name
            ]
            assert coverage(box.size, came) == ([], []), (name, worker)
    number = {name: bucket for bucket, names in enumerate(BUCKETS) for name in names}
    left = {}
    for rank in range(ranks):
        for bucket, own, sent in exchange.leaving(rank):
            assert (own.rank, sent.rank, bucket) == (rank, rank, number[own.name])
            left[rank, sent.storage // SLOTS, sent.name, sent.box] = sent
    came_from = {(p.rank, worker, p.name, p.box): p for worker, those in enumerate(arriving) for p in those}
    assert left.keys() == came_from.keys()
    for (rank, worker, name, _), received in came_from.items():
        bucket, size = number[name], itemsize(received.dtype)
        sent = left[rank, worker, name, received.box]
        assert (sent.dtype, sent.stride, sent.storage) == (received.dtype, received.stride, received.storage)
        (first, last), (begin, end) = (runs[bucket][rank, worker] for runs in (exchange.received, exchange.sent))
        assert first <= received.offset * size < last
        assert sent.offset * size - begin == received.offset * size - first
        assert end - begin == last - first
        assert received.storage == worker * SLOTS + bucket % SLOTS
    for bucket in range(len(BUCKETS)):
        for end, runs in (("worker", exchange.received[bucket]), ("rank", exchange.sent[bucket])):
            for number in {key[end == "worker"] for key in runs}:
                mine = sorted(run for key, run in runs.items() if key[end == "worker"] == number)
                assert all(a[1] <= b[0] for a, b in pairwise(mine)), (end, number)


def test_buckets_grow_to_what_a_member_has_room_for_and_what_is_frozen_stays_apart():
    loads = laid_out(4, tensor_parallel(4)).loads()
    nbytes = [sum(MANIFEST[name].nbytes for name in names) for names in BUCKETS]
    assert merge(BUCKETS, loads, frozenset(), max(nbytes)) == (("embed", "norm", "up", "down", "head"),)
    apart = merge(BUCKETS, loads, frozenset({"head"}), max(nbytes))
    assert apart == (("embed", "norm", "up", "down"), ("head",))
    # A quarter of all, of the norm more: one byte less does not do for the first two.
    assert merge(BUCKETS, loads, frozenset(), max(loads[1].values())) == BUCKETS


def test_a_region_that_is_read_in_overlapping_parts_is_sent_whole():
    halves = (Box((0, 0), (ROWS // 2, COLUMNS)), Box((ROWS // 4, 0), (ROWS // 2, COLUMNS)))
    exchange = laid_out(1, ({"embed": halves}, {"embed": (halves[0], halves[0])}))
    assert [[placement.box.size[0] for placement in exchange.arriving(worker)] for worker in range(2)] == [
        [ROWS],
        [ROWS // 2],
    ]


@pytest.mark.parametrize(
    ("ranks", "reads", "expected"),
    [
        (1, replicas(1), False),  # there is nobody to spare
        (1, tensor_parallel(2), True),  # each worker gets half
        (1, replicas(2), False),  # one rank would send everything twice
        (2, replicas(1), True),  # rank 0 need not gather
        (2, replicas(2), True),
        (2, replicas(3), False),
        (2, tensor_parallel(2), True),
        (2, (*tensor_parallel(2), *tensor_parallel(2)), True),
        (2, (*tensor_parallel(2), *tensor_parallel(2), *tensor_parallel(2)), False),
    ],
)
def test_workers_get_their_own_where_no_link_carries_more(ranks: int, reads: tuple[Reads, ...], expected: bool):
    shipment = Shipment(MANIFEST, BUCKETS, sharded(ranks), reads, "127.0.0.1")
    assert spares(laid_out(ranks, reads), shipment, ranks) is expected
