"""Which bytes of which file a tensor has, and whether safetensors reads the same."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from weightsync import ConfigError, PlacementError
from weightsync.checkpoint.safetensors import INDEX, lay_out, runs
from weightsync.checkpoint.shard_files import check_whole, create, publish, write
from weightsync.planning.layout import Box, Manifest, ShardLocation, TensorMeta, itemsize, row_major

DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    *("float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


@st.composite
def manifests(draw: st.DrawFn) -> tuple[Manifest, list[list[str]]]:
    count = draw(st.integers(1, 8))
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    tensors = [TensorMeta(f"t{n}", draw(shapes), draw(st.sampled_from(DTYPES))) for n in range(count)]
    names = draw(st.permutations([meta.name for meta in tensors]))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    buckets = [names[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    return Manifest(tuple(tensors)), buckets


@given(manifests(), st.integers(1, 400))
def test_every_byte_of_every_file_has_one_owner(drawn: tuple[Manifest, list[list[str]]], max_bytes: int):
    manifest, buckets = drawn
    shards = lay_out(manifest, buckets, max_bytes)
    for shard in shards.files:
        header = json.loads(shard.header[8:])
        assert len(shard.header) == 8 + int.from_bytes(shard.header[:8], "little")
        assert len(shard.header) % 8 == 0
        at = len(shard.header)
        for name, row in list(header.items())[1:]:
            assert row["data_offsets"] == [n - len(shard.header) for n in (at, at + manifest[name].nbytes)]
            assert shards.in_file[name] == at
            assert at % itemsize(manifest[name].dtype) == 0
            at += manifest[name].nbytes
        assert at == shard.nbytes
        held = header.keys() - {"__metadata__"}
        own = [names for names in buckets if held.intersection(names)]
        assert held == {name for names in own for name in names}
        assert {shards.file_of[name] for name in held} == {shard.name}
        assert len(own) == 1 or shard.nbytes - len(shard.header) <= max_bytes
    assert shards.file_of.keys() == shards.in_file.keys() == set(manifest.names)


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, Box(start, tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)))


@given(regions())
def test_runs_are_the_elements_of_a_box_in_order(drawn: tuple[tuple[int, ...], Box]):
    shape, box = drawn
    length, starts = runs(shape, box)
    found = [start + n for start in starts for n in range(length)]
    elements = product(*(range(a, a + n) for a, n in zip(box.start, box.size, strict=True)))
    assert found == [sum(i * s for i, s in zip(at, row_major(shape), strict=True)) for at in elements]


def test_rows_are_one_run():
    assert runs((100, 8, 4), Box((10, 0, 0), (50, 8, 4))) == (1600, [320])
    assert runs((100, 8), Box((0, 4), (3, 4))) == (4, [4, 12, 20])


def values_of(meta: TensorMeta, draw: torch.Generator) -> torch.Tensor:
    found = torch.randint(0, 2, (meta.nbytes,), dtype=torch.uint8, generator=draw)
    return found.view(getattr(torch, meta.dtype)).view(meta.shape)


@pytest.mark.parametrize("max_bytes", [1, 300, 10**9])
def test_safetensors_reads_what_was_written_in_pieces(tmp_path: Path, max_bytes: int):
    draw = torch.Generator().manual_seed(1)
    metas = [TensorMeta(f"{dtype}.{shape}", shape, dtype) for dtype in DTYPES for shape in ((5, 3), (), (0, 2), (7,))]
    manifest = Manifest(tuple(metas))
    names = list(manifest.names)
    buckets = [names[at : at + 5] for at in range(0, len(names), 5)]
    expected = {meta.name: values_of(meta, draw) for meta in metas}
    shards = lay_out(manifest, buckets, max_bytes)
    incoming, target = tmp_path / "incoming", tmp_path / "target"
    create(incoming, shards, {"more/config.json": b"{}"})
    for bucket in buckets:
        for part in (0, 1):  # two ranks: columns of what has some, and else everything by the second
            own = []
            for name in bucket:
                shape = manifest[name].shape
                box = Box.full(shape)
                if shape == (5, 3):
                    box = (Box((0, 0), (5, 2)), Box((0, 2), (5, 1)))[part]
                elif part == 0:
                    continue
                view = expected[name][tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
                own.append((ShardLocation(name, box, part, 1, 0, view.stride(), manifest[name].dtype), view))
            write(incoming, shards, own)
    assert not target.exists()
    publish(incoming, target)
    assert (target / "more/config.json").read_bytes() == b"{}"
    found = {}
    for shard in shards.files:
        found.update(load_file(target / shard.name))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert bytes(tensor.view(-1).view(torch.uint8).tolist()) == bytes(
            expected[name].view(-1).view(torch.uint8).tolist()
        )
    if len(shards.files) > 1:
        index = json.loads((target / INDEX).read_text())
        assert index["metadata"]["total_size"] == manifest.nbytes
        assert {name: load_file(target / file).keys() >= {name} for name, file in index["weight_map"].items()} == (
            dict.fromkeys(names, True)
        )
    else:
        assert [shard.name for shard in shards.files] == ["model.safetensors"]
        assert not (target / INDEX).exists()


def test_a_dtype_that_safetensors_has_not_is_refused():
    with pytest.raises(ConfigError, match="float8_e8m0fnu"):
        lay_out(Manifest((TensorMeta("scale", (2,), "float8_e8m0fnu"),)), [["scale"]], 100)


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(tmp_path: Path):
    shards = lay_out(Manifest((TensorMeta("huge", (1 << 55,), "int8"),)), [["huge"]], 1)
    with pytest.raises(PlacementError, match="cannot write a checkpoint of 36028797018964096 bytes"):
        create(tmp_path / "incoming", shards, {})


def test_ranks_that_do_not_hold_everything_are_refused():
    manifest = Manifest((TensorMeta("w", (4, 2), "int8"),))

    def held(start: int, rows: int) -> ShardLocation:
        return ShardLocation("w", Box((start, 0), (rows, 2)), 0, 1, 0, (2, 1), "int8")

    check_whole(manifest, [held(0, 2), held(2, 2), held(2, 2)])
    with pytest.raises(PlacementError, match=r"w\[3:4, 0:2\] is held by no rank"):
        check_whole(manifest, [held(0, 3)])
    with pytest.raises(PlacementError, match=r"ranks hold w\[1:2, 0:2\] in boxes that overlap"):
        check_whole(manifest, [held(0, 2), held(1, 3)])


def test_write_of_columns_puts_every_run_where_it_belongs(tmp_path: Path):
    manifest = Manifest((TensorMeta("w", (100, 4), "int8"),))
    shards = lay_out(manifest, [["w"]], 10**9)
    create(tmp_path / "incoming", shards, {})
    values = torch.arange(400).to(torch.int8).view(100, 4)
    for start in (0, 2):
        owned = ShardLocation("w", Box((0, start), (100, 2)), 0, 1, start, (4, 1), "int8")
        write(tmp_path / "incoming", shards, [(owned, values[:, start : start + 2])])
    assert torch.equal(load_file(tmp_path / "incoming" / "model.safetensors")["w"], values)
