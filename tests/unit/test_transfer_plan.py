"""Cutting what travels into chunks, choosing a route, and the plan as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from weightsync.errors import ConfigError
from weightsync.net.wire import PREFIX_BYTES, Value, decode, encode
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta, coverage, itemsize, row_major
from weightsync.planning.transfer_plan import (
    Chain,
    Chunk,
    PackedPlan,
    TransferPlan,
    chain_of,
    choose_chains,
    load_chains,
    load_staged,
    make_chunks,
    slices,
)
from weightsync.planning.wire_types import ReadRegions

FLOAT = "float32"


def shard(name: str, start: Sequence[int], size: Sequence[int], rank: int, dtype: str = FLOAT) -> ShardLocation:
    return ShardLocation(name, Box(tuple(start), tuple(size)), rank, 1, 0, row_major(size), dtype)


def by_rows(name: str, rows: int, columns: int, ranks: int) -> list[ShardLocation]:
    """A matrix of which each rank has as many rows as another."""
    share = rows // ranks
    return [shard(name, (rank * share, 0), (share, columns), rank) for rank in range(ranks)]


def manifest_of(*tensors: tuple[str, tuple[int, ...]]) -> Manifest:
    return Manifest(tuple(TensorMeta(name, shape, FLOAT) for name, shape in tensors))


def whole(manifest: Manifest) -> ReadRegions:
    return {meta.name: (Box.full(meta.shape),) for meta in manifest}


def chunks_of(
    manifest: Manifest,
    locations: Sequence[ShardLocation],
    max_bytes: int | None,
    *,
    chains: Sequence[Chain] | None = None,
    buckets: Sequence[Sequence[str]] | None = None,
    frozen: frozenset[str] = frozenset(),
    in_place: frozenset[str] = frozenset(),
    together: dict[str, str] | None = None,
) -> tuple[Chunk, ...]:
    buckets = [[name] for name in manifest.names] if buckets is None else buckets
    chains = [Chain((0,), whole(manifest))] if chains is None else chains
    return make_chunks(manifest, chains, buckets, frozen, in_place, locations, max_bytes, together or {})


def peak(chunk: Chunk, load) -> int:
    return max(sum((Counter(load([piece])) for piece in chunk.pieces), Counter[Hashable]()).values())


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.integers(1, 40),
    st.integers(0, 5),
)
def test_slices_of_a_box_cover_it_once(size: tuple[int, ...], count: int, start: int):
    box = Box((start,) * len(size), size)
    parts = slices(box, count)
    inner = [Box(tuple(at - start for at in part.start), part.size) for part in parts]
    assert coverage(size, inner) == ([], [])
    assert len(parts) >= min(count, box.numel)
    assert max(part.numel for part in parts) <= 2 * -(-box.numel // count)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(4, 200),
    st.sampled_from([(), ((0,),), ((0, 1),), ((0,), (1,))]),
)
def test_chunks_have_every_element_once_and_bounded_loads(
    shapes: list[tuple[int, int]], ranks: int, max_bytes: int, workers: tuple[tuple[int, ...], ...]
):
    manifest = manifest_of(*((f"t{n}", (rows * ranks, columns)) for n, (rows, columns) in enumerate(shapes)))
    locations = [p for meta in manifest for p in by_rows(meta.name, *meta.shape, ranks)]
    chains = [Chain(each, whole(manifest)) for each in workers]
    chunks = chunks_of(manifest, locations, max_bytes, chains=chains)
    for meta in manifest:
        boxes = [piece.box for chunk in chunks for piece in chunk.pieces if piece.name == meta.name]
        assert coverage(meta.shape, boxes) == ([], [])
    load = load_chains(manifest, chains) if chains else load_staged(manifest)
    for chunk in chunks:
        in_one_row_of_each = all(piece.box.numel == 1 for piece in chunk.pieces)
        assert peak(chunk, load) <= max_bytes or in_one_row_of_each


def test_a_large_tensor_has_a_share_of_every_rank_in_each_chunk():
    manifest = manifest_of(("embed", (64, 4)))
    chunks = chunks_of(manifest, by_rows("embed", 64, 4, 4), 256)
    assert len(chunks) == 4
    for chunk in chunks:
        assert Counter(piece.rank for piece in chunk.pieces) == dict.fromkeys(range(4), 1)


def test_whole_experts_of_all_ranks_share_each_chunk():
    experts, ranks = 32, 4
    names = [f"experts.{n}.{part}" for n in range(experts) for part in ("gate", "up")]
    manifest = manifest_of(*((name, (4, 4)) for name in names))
    locations = [shard(name, (0, 0), (4, 4), n * ranks // len(names)) for n, name in enumerate(names)]
    chunks = chunks_of(manifest, locations, 512, buckets=[names])
    assert len(chunks) == 8
    for chunk in chunks:
        assert Counter(piece.rank for piece in chunk.pieces) == dict.fromkeys(range(ranks), 2)
    of_rank_0 = [piece.name for chunk in chunks for piece in chunk.pieces if piece.rank == 0]
    assert of_rank_0 == names[: len(names) // ranks]


def test_a_small_expert_is_in_one_chunk():
    """Its projections may share a scale. A large one is cut, so that chunks are full."""
    names = [f"layers.0.experts.{n}.{part}.weight" for n in range(20) for part in ("gate", "up", "down")]
    manifest = manifest_of(*((name, (4, 4)) for name in names))
    locations = [shard(name, (0, 0), (4, 4), 0) for name in names]
    for max_bytes, are_whole in ((1600, True), (1024, False)):  # an expert has 192 bytes
        chunks = chunks_of(manifest, locations, max_bytes, buckets=[names])
        parts = [Counter(piece.name.split(".")[3] for piece in chunk.pieces) for chunk in chunks]
        assert len(parts) > 2
        assert all({*own.values()} == {3} for own in parts) == are_whole


def test_buckets_of_pipeline_stages_take_turns_and_stay_whole():
    names = [f"layers.{n}" for n in range(8)]
    manifest = manifest_of(*((name, (64, 4)) for name in names), ("embed", (64, 4)))
    locations = [shard(name, (0, 0), (64, 4), n // 2) for n, name in enumerate(names)]
    buckets = [["embed"], *([name] for name in names)]
    chunks = chunks_of(manifest, [*locations, *by_rows("embed", 64, 4, 4)], 4096, buckets=buckets)
    stages_in_turn = [f"layers.{n}" for n in (0, 2, 4, 6)], ["embed", *(f"layers.{n}" for n in (1, 3, 5))], ["layers.7"]
    assert [[*dict.fromkeys(piece.name for piece in chunk.pieces)] for chunk in chunks] == [*stages_in_turn]


def test_what_is_cut_fills_chunks_and_is_whole_again_within_one():
    manifest = manifest_of(*((f"t{n}", (40, 4)) for n in range(6)))
    locations = [shard(meta.name, (0, 0), (40, 4), 0) for meta in manifest]
    chunks = chunks_of(manifest, locations, 1024, buckets=[["t0", "t1"], ["t2", "t3"], ["t4", "t5"]])
    assert [[(piece.name, piece.box.size[0]) for piece in chunk.pieces] for chunk in chunks] == [
        [("t0", 40), ("t1", 24)],
        [("t1", 16), ("t2", 40), ("t3", 8)],
        [("t3", 32), ("t4", 32)],
        [("t4", 8), ("t5", 40)],
    ]


def test_shards_that_follow_each_other_in_memory_stay_apart():
    """So a loader leaves the parts of a tensor that it has split: each is packed out of a tensor of its own."""
    manifest = manifest_of(("qkv", (24, 4)))
    locations = [replace(shard("qkv", (8 * n, 0), (8, 4), 0), offset=32 * n) for n in (1, 2, 0)]
    for max_bytes in (1024, 256, None):
        pieces = [piece for chunk in chunks_of(manifest, locations, max_bytes) for piece in chunk.pieces]
        assert all(any(own.box.intersect(piece.box) == piece.box for own in locations) for piece in pieces)
        assert sum(piece.box.numel for piece in pieces) == 96
    assert len(pieces) == len(locations)


def test_small_buckets_share_a_chunk_and_order_is_kept():
    manifest = manifest_of(*((f"t{n}", (4, 4)) for n in range(10)))
    locations = [shard(meta.name, (0, 0), (4, 4), 0) for meta in manifest]
    chunks = chunks_of(manifest, locations, 256)
    assert [chunk.names for chunk in chunks] == [
        ("t0", "t1", "t2", "t3"),
        ("t4", "t5", "t6", "t7"),
        ("t8", "t9"),
    ]


def test_without_a_limit_every_bucket_is_a_chunk():
    manifest = manifest_of(("a", (1, 1)), ("b", (100, 100)), ("c", (1, 1)))
    locations = [shard(meta.name, (0, 0), meta.shape, 0) for meta in manifest]
    assert [chunk.names for chunk in chunks_of(manifest, locations, None)] == [("a",), ("b",), ("c",)]


def test_frozen_tensors_have_the_last_chunks_to_themselves():
    manifest = manifest_of(("a", (8, 4)), ("b", (8, 4)), ("c", (8, 4)))
    locations = [shard(meta.name, (0, 0), (8, 4), 0) for meta in manifest]
    buckets = [["a"], ["c"], ["b"]]
    chunks = chunks_of(manifest, locations, 1024, buckets=buckets, frozen=frozenset({"b"}))
    assert [(chunk.names, chunk.frozen) for chunk in chunks] == [(("a", "c"), False), (("b",), True)]
    plan = TransferPlan(manifest, (), chunks, 1, {})
    assert list(plan.due(first=True)) == [0, 1]
    assert list(plan.due(first=False)) == [0]
    assert plan.nbytes(first=True) == 3 * 128
    assert plan.nbytes(first=False) == 2 * 128


def test_what_is_read_in_place_is_one_chunk_with_its_replicas():
    manifest = manifest_of(("a", (8, 4)), ("b", (8, 4)), ("c", (8, 4)))
    locations = [shard(name, (0, 0), (8, 4), rank) for name in "abc" for rank in (0, 1)]
    chunks = chunks_of(manifest, locations, 64, chains=(), in_place=frozenset("ab"))
    assert chunks[0].in_place
    assert [(piece.name, piece.rank) for piece in chunks[0].pieces] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert {chunk.names for chunk in chunks[1:]} == {("c",)}
    assert sum(piece.box.numel for chunk in chunks[1:] for piece in chunk.pieces) == 32
    assert not any(chunk.in_place for chunk in chunks[1:])


def test_replicas_are_shared_out_among_ranks():
    manifest = manifest_of(("a", (8, 4)), ("b", (8, 4)))
    locations = [shard(name, (0, 0), (8, 4), rank) for name in "ab" for rank in (1, 0)]
    chunks = chunks_of(manifest, locations, 1024)
    assert {piece.rank for chunk in chunks for piece in chunk.pieces} == {0, 1}


def test_scales_travel_with_the_first_chunk_of_their_weight():
    manifest = manifest_of(("w", (64, 4)), ("w_scale", (64, 1)))
    locations = [shard("w", (0, 0), (64, 4), 0), shard("w_scale", (0, 0), (64, 1), 0)]
    chunks = chunks_of(manifest, locations, 512, buckets=[["w", "w_scale"]], together={"w": "w_scale"})
    assert [set(chunk.names) for chunk in chunks] == [{"w", "w_scale"}, {"w"}, {"w"}]
    load = load_chains(manifest, [Chain((0,), whole(manifest))])
    assert max(peak(chunk, load) for chunk in chunks) <= 512


def test_tensors_without_elements_do_not_travel():
    manifest = manifest_of(("a", (0, 4)), ("b", (2, 4)))
    locations = [shard("a", (0, 0), (0, 4), 0), shard("b", (0, 0), (2, 4), 0)]
    assert [chunk.names for chunk in chunks_of(manifest, locations, 1024)] == [("b",)]


HALVES: list[ReadRegions] = [{"a": (Box((0, 0), (4, 4)),)}, {"a": (Box((4, 0), (4, 4)),)}]


def test_workers_that_read_alike_are_a_chain_ordered_by_host():
    manifest = manifest_of(("a", (8, 4)))
    one_rank = by_rows("a", 8, 4, 1)
    assert choose_chains(manifest, one_rank, [whole(manifest)] * 4, [1, 2, 0, 1]) == (
        Chain((2, 0, 3, 1), whole(manifest)),
    )
    chains = choose_chains(manifest, one_rank, HALVES * 2, [2, 2, 1, 1])
    assert chains == (Chain((2, 0), HALVES[0]), Chain((3, 1), HALVES[1]))
    load = sum((Counter(load_chains(manifest, chains)([each])) for each in one_rank), Counter())
    assert load == {("rank", 0): 128, ("chain", 0): 64, ("chain", 1): 64}, "however many engines there are"


def test_workers_share_one_chain_before_a_rank_sends_more_than_the_model():
    manifest = manifest_of(("a", (8, 4)))
    reads = [whole(manifest), *HALVES]
    (chain,) = choose_chains(manifest, by_rows("a", 8, 4, 1), reads, [0, 1, 1])
    assert (chain.workers, load_chains(manifest, [chain])([shard("a", (0, 0), (8, 4), 5)])) == (
        (0, 1, 2),
        {("rank", 5): 128, ("chain", 0): 128},
    )
    # Two ranks send half of it twice.
    assert len(choose_chains(manifest, by_rows("a", 8, 4, 2), reads, [0, 1, 1])) == 3


def test_a_limit_in_mebibytes_instead_of_bytes_is_refused_before_a_chunk_is_cut():
    manifest = manifest_of(("a", (257, 1 << 18)))
    locations = by_rows("a", 257, 1 << 18, 1)
    with pytest.raises(ConfigError, match=r"^max_bytes=256 for 269484032 bytes: over 1048576 chunks\. Give more"):
        chunks_of(manifest, locations, 256)
    assert chunks_of(manifest, locations, 256, in_place=frozenset("a"), chains=[])  # nothing is cut


def test_longer_chains_have_smaller_chunks_down_to_a_limit():
    manifest = manifest_of(("a", (4096, 512)))
    locations = by_rows("a", 4096, 512, 2)  # 4 MiB of each rank, and 8 for each worker

    def count(workers: int) -> int:
        chains = [Chain((*range(workers),), whole(manifest))]
        return len(make_chunks(manifest, chains, [["a"]], frozenset(), frozenset(), locations, 1 << 23, {}, 1 << 17))

    assert [count(workers) for workers in (1, 2, 3, 64)] == [1, 32, 64, 64]


def test_load_of_a_chain_counts_the_regions_that_it_reads():
    manifest = manifest_of(("a", (8, 4)))
    load = load_chains(manifest, [Chain((0, 2), {"a": (Box((2, 0), (3, 4)),)}), Chain((1,), {})])
    assert load([shard("a", (0, 0), (4, 4), 5)]) == {("rank", 5): 32, ("chain", 0): 32}


@pytest.mark.parametrize("workers", [(), ((0, 1),), ((0,), (1,))])
def test_a_plan_survives_being_plain_values(workers: tuple[tuple[int, ...], ...]):
    manifest = manifest_of(("a", (8, 4)), ("b", (3, 3)))
    locations = [*by_rows("a", 8, 4, 2), shard("b", (0, 0), (3, 3), 1)]
    in_place = frozenset() if workers else frozenset({"b"})
    reads = [{"a": (Box((0, 0), (4, 4)),)}, whole(manifest)]
    chains = tuple(chain_of(each, reads) for each in workers)
    chunks = chunks_of(manifest, locations, 64, chains=chains, in_place=in_place)
    plan = TransferPlan(manifest, chains, chunks, 2, {"in_place": 3})
    carried = decode(encode(Value.of(PackedPlan.of(plan)))[PREFIX_BYTES:])
    assert isinstance(carried, Value)
    assert carried.read(PackedPlan).read() == plan
    assert sum(itemsize(p.dtype) * p.box.numel for chunk in plan.chunks for p in chunk.pieces) == plan.nbytes(True)
