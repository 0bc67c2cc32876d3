"""Where the pieces of chunks lie in slots, and what a rank puts there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from weightsync.errors import PlacementError, SyncTimeoutError
from weightsync.kernels.copies import BatchedCopy
from weightsync.kernels.digest import MASK, WHOLE, digest, signed
from weightsync.net.runtime import Deadline
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta, coverage, itemsize, row_major
from weightsync.planning.transfer_plan import Chain, Chunk, TransferPlan, make_chunks
from weightsync.planning.wire_types import ReadRegions
from weightsync.transports import staging
from weightsync.transports.base import ALIGN_BYTES, DIGEST_BYTES, LocalTensor, LocalTensors, Seal, strided
from weightsync.transports.staging import Packer, arrival, receive_layout, send_layout, slot_bytes, wait_until

ROWS, COLUMNS = 64, 32
MAX_BYTES = 1024
MANIFEST = Manifest(
    (
        TensorMeta("embed", (ROWS, COLUMNS), "bfloat16"),
        TensorMeta("norm", (COLUMNS,), "float32"),
        TensorMeta("down", (COLUMNS, ROWS), "bfloat16"),
    )
)


def share(shape: tuple[int, ...], dim: int, number: int, count: int) -> Box:
    size = shape[dim] // count
    start = tuple(number * size if at == dim else 0 for at in range(len(shape)))
    return Box(start, tuple(size if at == dim else length for at, length in enumerate(shape)))


def sharded(ranks: int) -> list[ShardLocation]:
    """Every rank has its rows of everything, in float32."""
    return [
        ShardLocation(meta.name, box := share(meta.shape, 0, rank, ranks), rank, n, 0, row_major(box.size), "float32")
        for n, meta in enumerate(MANIFEST, 1)
        for rank in range(ranks)
    ]


def tensor_parallel(workers: int) -> tuple[ReadRegions, ...]:
    found = []
    for worker in range(workers):
        reads = {meta.name: (share(meta.shape, 0, worker, workers),) for meta in MANIFEST}
        reads["norm"] = (Box.full((COLUMNS,)),)
        reads["down"] = (share((COLUMNS, ROWS), 1, worker, workers),)
        found.append(reads)
    return tuple(found)


def replicas(workers: int) -> tuple[ReadRegions, ...]:
    return ({meta.name: (Box.full(meta.shape),) for meta in MANIFEST},) * workers


def plan_of(ranks: int, reads: tuple[ReadRegions, ...], max_bytes: int = MAX_BYTES) -> TransferPlan:
    buckets = [[meta.name] for meta in MANIFEST]
    none: frozenset[str] = frozenset()
    chains = tuple(Chain((worker,), own) for worker, own in enumerate(reads))
    chunks = make_chunks(MANIFEST, chains, buckets, none, none, sharded(ranks), max_bytes, {})
    return TransferPlan(MANIFEST, chains, chunks, len(reads), {})


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("reads", [tensor_parallel(2), tensor_parallel(4), replicas(2)])
def test_arriving_of_all_chunks_has_what_a_worker_reads_once_and_apart(ranks: int, reads: tuple[ReadRegions, ...]):
    plan = plan_of(ranks, reads)
    assert len(plan.chunks) > 2
    for worker, wanted in enumerate(reads):
        layout = receive_layout(plan, worker, slots=2)
        places = [place for bundles in layout for bundle in bundles.values() for place in bundle.places]
        for name, (box,) in wanted.items():
            came = [
                Box(tuple(a - b for a, b in zip(p.box.start, box.start, strict=True)), p.box.size)
                for p in places
                if p.name == name
            ]
            assert coverage(box.size, came) == ([], []), (name, worker)
        for number, bundles in enumerate(layout):
            runs = sorted((bundle.first, bundle.end) for bundle in bundles.values())
            assert all(end <= first for (_, end), (first, _) in pairwise(runs))
            assert all(end <= slot_bytes(layout) for _, end in runs)
            for bundle in bundles.values():
                assert bundle.storage == number % 2
                assert bundle.first % ALIGN_BYTES == bundle.nbytes % ALIGN_BYTES == 0
                spans = [(p.offset * itemsize(p.dtype), p.box.numel * itemsize(p.dtype)) for p in bundle.places]
                assert all(bundle.first <= at and at + n <= bundle.first + bundle.nbytes for at, n in spans)
                assert all(at + n <= following for (at, n), (following, _) in pairwise(spans))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("reads", [tensor_parallel(2), tensor_parallel(4), replicas(2)])
def test_leaving_of_every_rank_matches_arriving_of_every_worker(ranks: int, reads: tuple[ReadRegions, ...]):
    plan = plan_of(ranks, reads)
    sent = [send_layout(plan, rank, slots=2) for rank in range(ranks)]
    for worker in range(len(reads)):
        for number, bundles in enumerate(receive_layout(plan, worker, slots=2)):
            assert bundles.keys() == {rank for rank in range(ranks) if worker in sent[rank][number]}
            for rank, came in bundles.items():
                went = sent[rank][number][worker]
                assert (went.sources, went.nbytes) == (came.sources, came.nbytes)
                for a, b in zip(went.places, came.places, strict=True):
                    assert (a.box, a.dtype, a.stride) == (b.box, b.dtype, b.stride)
                    assert (a.offset - b.offset) * itemsize(a.dtype) == went.first - came.first


def test_arriving_of_overlapping_reads_has_the_whole_tensor_once():
    halves = (Box((0, 0), (ROWS // 2, COLUMNS)), Box((ROWS // 4, 0), (ROWS // 2, COLUMNS)))
    plan = plan_of(1, ({"embed": halves}, {"embed": (halves[0], halves[0])}), max_bytes=1 << 20)

    def rows_of(worker: int) -> list[int]:
        layout = receive_layout(plan, worker, slots=1)
        return [p.box.size[0] for bundles in layout for bundle in bundles.values() for p in bundle.places]

    assert [rows_of(worker) for worker in range(2)] == [[ROWS], [ROWS // 2]]


class Held:
    """One rank that holds everything. What is computed is there only between its own `gather` and the next one."""

    def __init__(self, computed: Sequence[str]) -> None:
        self.values = {meta.name: torch.randn(meta.shape) for meta in MANIFEST}
        self.gathered: list[str] = []
        self.computed: list[str] = []
        at = {}
        for location in sharded(1):
            values = self.values[location.name]
            compute = None
            if location.name in computed:
                compute = lambda name=location.name: self.compute(name)  # noqa: E731
            at[location] = LocalTensor(torch.zeros_like(values) if compute else values, compute)
        self.tensors = LocalTensors(at, self.gather)

    def gather(self, names: Sequence[str]) -> None:
        self.gathered += names
        self.last = set(names)

    def compute(self, name: str) -> torch.Tensor:
        assert name in self.last
        self.computed.append(name)
        return self.values[name].clone()


def test_packer_fill_of_a_push_writes_values_and_digests_and_computes_once():
    plan, held = plan_of(1, replicas(1)), Held(computed=["embed", "norm"])
    layout = send_layout(plan, 0, slots=2)
    slots = {number: torch.zeros(slot_bytes(layout), dtype=torch.uint8) for number in range(2)}
    packer = Packer(plan, held.tensors, layout, slots)
    assert sum("embed" in chunk.names for chunk in plan.chunks) > 1
    for push in range(2):
        held.gathered, held.computed = [], []
        for values in held.values.values():
            values.add_(1)
        for number, bundles in enumerate(layout):
            packer.fill(number, Seal(WHOLE, push))
            slot = slots[number % 2]
            found = arrival(bundles)
            for place in found.locations:
                index = tuple(slice(a, a + n) for a, n in zip(place.box.start, place.box.size, strict=True))
                expected = held.values[place.name][index].to(getattr(torch, place.dtype))
                assert torch.equal(strided(slot, place.dtype, place.offset, place.box.size, place.stride), expected)
            for run in found.runs:
                behind = slot[run.first + run.nbytes :][:DIGEST_BYTES].view(torch.int64)
                sealed = digest(slot[run.first : run.first + run.nbytes]) + Seal(WHOLE, push).seed(number)
                assert int(behind) == signed(sealed & MASK)
        assert held.gathered == list(dict.fromkeys(name for chunk in plan.chunks for name in chunk.names)), push
        assert sorted(held.computed) == ["embed", "norm"], push


def test_packer_fill_without_a_sample_writes_no_digests():
    plan, held = plan_of(1, replicas(1)), Held(computed=[])
    layout = send_layout(plan, 0, slots=1)
    slot = torch.zeros(slot_bytes(layout), dtype=torch.uint8)
    Packer(plan, held.tensors, layout, {0: slot}).fill(0, None)
    (bundle,) = layout[0].values()
    assert slot[: bundle.end - DIGEST_BYTES].any()
    assert not slot[bundle.end - DIGEST_BYTES : bundle.end].any()


def test_packer_of_a_piece_that_the_rank_lacks_raises_which_one():
    plan, held = plan_of(2, replicas(1)), Held(computed=[])
    lacking = LocalTensors({p: each for p, each in held.tensors.at.items() if p.name != "norm"})
    layout = send_layout(plan, 0, slots=1)
    with pytest.raises(PlacementError, match=r"trainer rank 0 lacks norm\[0:16\]"):
        Packer(plan, lacking, layout, {0: torch.zeros(slot_bytes(layout), dtype=torch.uint8)})


@pytest.mark.parametrize("columns", [5, 1 << 15])
def test_packer_fill_of_equal_parts_of_fused_parameters_makes_few_copies(columns: int, monkeypatch: pytest.MonkeyPatch):
    fused, other = torch.randn(3, 4, 2, columns), torch.randn(2, columns)
    parts = [*fused[0, :, :1].unbind(), *fused[0, :, 1:].unbind(), *fused[1].unbind(), other, fused[2, 3], fused[2, 1]]
    at = {
        ShardLocation(f"part {n}", Box.full(part.shape), 0, 1, n, part.stride(), "float32"): LocalTensor(part)
        for n, part in enumerate(parts)
    }
    manifest = Manifest(tuple(TensorMeta(f"part {n}", part.shape, "float32") for n, part in enumerate(parts)))
    pieces = Chunk(tuple(at))
    reads = {meta.name: (Box.full(meta.shape),) for meta in manifest}
    plan = TransferPlan(manifest, (Chain((0,), reads),), (pieces,), 1, {})
    layout = send_layout(plan, 0, slots=1)
    slot = torch.zeros(slot_bytes(layout), dtype=torch.uint8)
    made: list[int] = []
    monkeypatch.setattr(
        staging, "BatchedCopy", lambda copies, **most: (made.append(len(copies)), BatchedCopy(copies))[1]
    )
    packer = Packer(plan, LocalTensors(at), layout, {0: slot})
    assert made == [6]
    for _ in range(2):
        fused.add_(1)
        other.add_(1)
        packer.fill(0, None)
        for place, part in zip(arrival(layout[0]).locations, parts, strict=True):
            found = strided(slot, place.dtype, place.offset, place.box.size, place.stride)
            assert torch.equal(found, part), place.name


def test_wait_until_past_the_deadline_raises_who_is_late():
    pauses: list[float] = []
    with pytest.raises(SyncTimeoutError, match="engine worker 1 did not take a chunk within 0 s") as caught:
        wait_until(lambda: ["engine worker 1"], "take a chunk", pauses.append, Deadline(0.0))
    assert (caught.value.waiting_for, pauses) == (["engine worker 1"], [])


def test_wait_until_of_a_long_wait_sleeps_longer_and_longer_up_to_a_limit():
    pauses: list[float] = []
    wait_until(lambda: ["it"] if len(pauses) < 9 else [], "come", pauses.append, Deadline(60.0))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.00005, 0.001)
