"""layout against torch: whatever it says about boxes, views and shards, torch's own slicing must agree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from weightsync.errors import ConfigError, ManifestError, PlacementError
from weightsync.planning import layout
from weightsync.planning.layout import (
    Box,
    CopyOp,
    LoadCopy,
    Manifest,
    ShardLocation,
    TensorMeta,
    affine_boxes,
    choose_owners,
    copy_ops,
    coverage,
    flat_boxes,
    fuse_groups,
    itemsize,
    part_of,
    row_major,
    strided_boxes,
)
from weightsync.planning.merge import merge_manifests
from weightsync.planning.single_view import as_single_view

quick = settings(max_examples=100, deadline=None)
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
empty_too = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def counting(shape: Sequence[int]) -> torch.Tensor:
    """A tensor in which every element is its own flat index."""
    return torch.arange(prod(shape)).reshape(tuple(shape))


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def view_of(tensor: torch.Tensor) -> layout.View:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


# Boxes, strides, sizes


@quick
@given(st.data(), empty_too)
def test_intersection_is_what_both_masks_have(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    masks = torch.zeros((2, *shape), dtype=torch.bool)
    cut(masks[0], one).fill_(True)
    cut(masks[1], other).fill_(True)
    common = one.intersect(other)
    expected = torch.zeros(shape, dtype=torch.bool)
    if common is not None:
        assert common.numel > 0
        cut(expected, common).fill_(True)
    assert torch.equal(masks[0] & masks[1], expected)


def test_a_scalar_is_one_element_and_an_empty_tensor_none() -> None:
    scalar = Box.full(())
    assert (scalar, scalar.numel, scalar.intersect(scalar)) == (Box((), ()), 1, scalar)
    empty = Box.full((3, 0))
    assert (empty.numel, empty.intersect(empty)) == (0, None)


def test_boxes_of_different_dimensions_have_nothing_in_common() -> None:
    assert Box((0,), (4,)).intersect(Box((0, 0), (4, 4))) is None


def test_a_box_prints_as_one_would_index_it() -> None:
    assert str(Box((0, 8), (4, 8))) == "[0:4, 8:16]"


@quick
@given(shapes)
def test_row_major_is_the_stride_of_a_contiguous_tensor(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


def test_itemsize_agrees_with_torch() -> None:
    for name, nbytes in layout._ITEMSIZE.items():
        assert itemsize(name) == nbytes == getattr(torch, name).itemsize
    with pytest.raises(ConfigError, match="float3"):
        itemsize("float3")


def test_tensor_meta_counts_elements_and_bytes() -> None:
    meta = TensorMeta("w", (3, 4), "bfloat16")
    assert (meta.numel, meta.nbytes) == (12, 24)
    assert TensorMeta("scale", (), "float32").nbytes == 4


# Flat intervals


@quick
@given(st.data(), empty_too)
def test_flat_boxes_are_the_interval_of_the_flattened_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    start, stop = sorted((data.draw(st.integers(0, prod(shape))), data.draw(st.integers(0, prod(shape)))))
    boxes = flat_boxes(shape, start, stop)
    tensor = counting(shape)
    found = torch.cat([torch.empty(0, dtype=tensor.dtype), *(cut(tensor, box).flatten() for box in boxes)])
    assert found.tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_flat_boxes_of_a_matrix_are_a_row_end_whole_rows_and_a_row_start() -> None:
    assert flat_boxes((4, 8), 5, 26) == [Box((0, 5), (1, 3)), Box((1, 0), (2, 8)), Box((3, 0), (1, 2))]
    assert flat_boxes((4, 8), 8, 24) == [Box((1, 0), (2, 8))]
    assert flat_boxes((4, 8), 3, 3) == []
    assert flat_boxes((), 0, 1) == [Box((), ())]
    with pytest.raises(ConfigError, match="30 to 33"):
        flat_boxes((4, 8), 30, 33)


# Loader copies as boxes


@st.composite
def loader_views(draw: st.DrawFn, tensor: torch.Tensor, *, splits: bool) -> torch.Tensor:
    """What a loader may make of a tensor with the view operations that loaders use."""
    choices = ["narrow", "chunk", "select", "flatten", "reshape", "transpose", "permute", "unsqueeze", "squeeze"]
    for operation in draw(st.lists(st.sampled_from([*choices, *(["unflatten"] * 3 if splits else [])]), max_size=6)):
        dims = tensor.dim()
        if operation == "unsqueeze":
            tensor = tensor.unsqueeze(draw(st.integers(0, dims)))
            continue
        if dims == 0:
            continue
        dim = draw(st.integers(0, dims - 1))
        size = tensor.shape[dim]
        if operation == "narrow":
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(dim, start, draw(st.integers(1, size - start)))
        elif operation == "chunk":
            tensor = draw(st.sampled_from(tensor.chunk(draw(st.integers(1, size)), dim)))
        elif operation == "select":
            tensor = tensor.select(dim, draw(st.integers(0, size - 1)))
        elif operation == "transpose":
            tensor = tensor.transpose(dim, draw(st.integers(0, dims - 1)))
        elif operation == "permute":
            tensor = tensor.permute(draw(st.permutations(range(dims))))
        elif operation == "squeeze":
            tensor = tensor.squeeze(dim)
        elif operation == "unflatten":
            inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            tensor = tensor.unflatten(dim, (size // inner, inner))
        else:
            last = draw(st.integers(dim, dims - 1))
            shape = (*tensor.shape[:dim], -1, *tensor.shape[last + 1 :])
            merged = tensor.flatten(dim, last) if operation == "flatten" else tensor.reshape(shape)
            if merged.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                tensor = merged
    return tensor


@st.composite
def somewhere(draw: st.DrawFn, size: Sequence[int]) -> torch.Tensor:
    """A view of `size` in a fresh, larger parameter that keeps its dimensions in another order."""
    order = draw(st.permutations(range(len(size))))
    before = [draw(st.integers(0, 2)) for _ in size]
    after = [draw(st.integers(0, 2)) for _ in size]
    param = torch.full([before[d] + size[d] + after[d] for d in order], -1)
    inner = cut(param, Box(tuple(before[d] for d in order), tuple(size[d] for d in order)))
    return inner.permute([order.index(d) for d in range(len(size))])


def storage_of(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())


def copied(tensor: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor | None:
    """The storage of `dst` after `affine_boxes` in place of `dst.copy_(src)`."""
    boxes = affine_boxes(tuple(tensor.shape), view_of(src), view_of(dst))
    if boxes is None:
        return None
    storage = storage_of(dst).clone()
    for box, offset, stride in boxes:
        assert len(stride) == tensor.dim()
        storage.as_strided(box.size, stride, offset).copy_(cut(tensor, box))
    return storage


@quick
@given(st.data(), shapes)
def test_boxes_copy_what_a_loader_copies(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensor = counting(shape)
    src = data.draw(loader_views(tensor, splits=False))
    dst = data.draw(somewhere(src.shape))
    by_boxes = copied(tensor, src, dst)
    dst.copy_(src)
    assert by_boxes is not None
    assert torch.equal(by_boxes, storage_of(dst))


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes)
def test_boxes_of_split_dimensions_are_exact_or_refused(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensor = counting(shape)
    src = data.draw(loader_views(tensor, splits=True))
    dst = data.draw(somewhere(src.shape))
    by_boxes = copied(tensor, src, dst)
    dst.copy_(src)
    if by_boxes is not None:
        assert torch.equal(by_boxes, storage_of(dst))
    else:  # only a view with a step is refused, and as a region it still has boxes
        region = strided_boxes(shape, *view_of(src))
        assert region is not None
        assert len(region) > 1


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes)
def test_strided_boxes_are_the_region_of_the_view(data: st.DataObject, shape: tuple[int, ...]) -> None:
    param = torch.zeros(shape)
    view = data.draw(loader_views(param, splits=True))
    boxes = strided_boxes(shape, *view_of(view))
    assert boxes is not None
    view.add_(1)
    for box in boxes:
        cut(param, box).sub_(1)
    assert not param.any(), "an element lies in no box, or in two"


def test_a_transposed_slice_is_one_box() -> None:
    weight, param = counting((8, 6)), torch.empty(6, 10)
    assert affine_boxes((8, 6), view_of(weight[2:6].t()), view_of(param[:, 4:8])) == [(Box((2, 0), (4, 6)), 4, (1, 10))]


def test_an_expert_of_a_fused_tensor_is_one_box() -> None:
    fused = counting((4, 10, 6))  # experts, gate rows then up rows, hidden
    boxes = affine_boxes((4, 10, 6), view_of(fused[2, 5:]), (0, (5, 6), (6, 1)))
    assert boxes == [(Box((2, 5, 0), (1, 5, 6)), 0, (0, 6, 1))]


def test_rows_that_interleave_become_one_box_each_group() -> None:
    # A checkpoint that keeps q, k, v head by head: (heads, 3, head size, hidden). The engine wants all q first.
    weight = counting((4 * 3 * 2, 5))
    k = weight.view(4, 3, 2, 5)[:, 1]
    param = torch.empty(8, 5)
    boxes = affine_boxes((24, 5), view_of(k), view_of(param.view(4, 2, 5)))
    assert boxes == [(Box((6 * head + 2, 0), (2, 5)), 10 * head, (5, 1)) for head in range(4)]


def test_a_flat_slice_of_a_matrix_takes_the_boxes_of_the_interval() -> None:
    flat = counting((4, 8)).flatten()[5:26]
    boxes = affine_boxes((4, 8), view_of(flat), (100, (21,), (1,)))
    assert boxes is not None
    assert [box for box, _, _ in boxes] == flat_boxes((4, 8), 5, 26)
    assert [offset for _, offset, _ in boxes] == [100, 103, 119]


def test_rows_of_another_width_are_taken_one_by_one() -> None:
    reshaped = counting((4, 6)).view(3, 8)[:, :2]  # begins in columns 0, 2 and 4 of the rows 0, 1 and 2
    boxes = affine_boxes((4, 6), view_of(reshaped), (0, (3, 2), (2, 1)))
    assert boxes == [(Box((i, 2 * i), (1, 2)), 2 * i, (0, 1)) for i in range(3)]


def test_what_is_not_made_of_boxes_is_refused() -> None:
    weight = counting((8, 6))
    stepped = weight[::2]
    assert affine_boxes((8, 6), view_of(stepped), (0, (4, 6), (6, 1))) is None
    broadcast = weight[:1].expand(4, 6)
    assert affine_boxes((8, 6), view_of(broadcast), (0, (4, 6), (6, 1))) is None
    sliding = weight.flatten().unfold(0, 4, 2)
    assert affine_boxes((8, 6), view_of(sliding), view_of(torch.empty(sliding.shape))) is None
    assert affine_boxes((8, 6), (6, (8, 6), (6, 1)), (0, (8, 6), (6, 1))) is None  # one row too far
    assert affine_boxes((8, 6), (0, (8, 6), (6, 1)), (0, (6, 8), (8, 1))) is None  # two sizes


def test_more_boxes_than_are_worth_a_plan_are_refused() -> None:
    pairs = 2 * layout.MAX_BOXES
    swapped = (0, (2, pairs), (1, 2))  # every second element first, then the others
    assert affine_boxes((2 * pairs,), swapped, (0, (2, pairs), (pairs, 1))) is None
    assert strided_boxes((2 * pairs,), 0, (pairs,), (2,)) is None
    assert strided_boxes((256, 256), 0, (128, 128), (512, 2)) is None  # 128 rows of 128 columns, each on its own
    assert strided_boxes((10**7, 7), 0, (10**7, 5), (6, 1)) is None


def test_an_empty_copy_has_no_boxes_and_a_scalar_has_one() -> None:
    assert affine_boxes((0, 4), (0, (0, 4), (4, 1)), (0, (0, 4), (4, 1))) == []
    assert affine_boxes((), (0, (1,), (1,)), (7, (1,), (1,))) == [(Box((), ()), 7, ())]


# Coverage


@quick
@given(st.data(), empty_too)
def test_coverage_agrees_with_counting(data: st.DataObject, shape: tuple[int, ...]) -> None:
    regions = data.draw(st.lists(boxes_in(shape), max_size=6))
    count = torch.zeros(shape, dtype=torch.int64)
    for region in regions:
        cut(count, region).add_(1)
    missing, doubled = coverage(shape, regions)
    found = torch.ones(shape, dtype=torch.int64)
    for box in missing:
        cut(found, box).sub_(1)
    for box in doubled:
        cut(found, box).add_(1)
    assert torch.equal(found, count.clamp(max=2))


def test_a_hole_is_one_box() -> None:
    rows = [Box((0, 0), (4, 8)), Box((6, 0), (2, 8))]
    assert coverage((8, 8), rows) == ([Box((4, 0), (2, 8))], [])
    assert coverage((8, 8), [*rows, Box((3, 0), (3, 8))]) == ([], [Box((3, 0), (1, 8))])


def test_holes_of_the_same_form_are_joined() -> None:
    left_half = [Box((row, 0), (1, 4)) for row in range(4)]
    assert coverage((4, 8), left_half) == ([Box((0, 4), (4, 4))], [])


def test_coverage_ignores_what_lies_outside() -> None:
    assert coverage((2,), [Box((0,), (5,)), Box((7,), (2,))]) == ([], [])


def test_coverage_of_many_regions_is_quick() -> None:
    experts = [Box((e, half * 8, 0), (1, 8, 16)) for e in range(2048) for half in range(2)]
    begin = time.process_time()
    assert coverage((2048, 16, 16), experts) == ([], [])
    assert time.process_time() - begin < 5


# Copy steps


class Trainer:
    """Ranks with real storages. `place` puts a box of a tensor into one of them, padded and strided."""

    def __init__(self) -> None:
        self.storages: dict[tuple[int, int], torch.Tensor] = {}
        self.locations: list[ShardLocation] = []

    def place(self, name: str, tensor: torch.Tensor, box: Box, rank: int, pad: int = 0) -> None:
        padded = torch.full([n + pad for n in box.size], -1)
        local = cut(padded, Box((0,) * len(box.size), box.size))
        local.copy_(cut(tensor, box))
        number = len(self.storages)
        self.storages[rank, number] = torch.cat([torch.full((3,), -1), padded.flatten()])
        self.locations.append(ShardLocation(name, box, rank, number, 3, padded.stride(), "int64"))

    def place_flat(self, name: str, tensor: torch.Tensor, start: int, stop: int, rank: int) -> None:
        """As ZeRO-3 and FSDP1 shard: an interval of the flattened tensor."""
        number = len(self.storages)
        self.storages[rank, number] = tensor.flatten()[start:stop].clone()
        strides = row_major(tensor.shape)
        for box in flat_boxes(tensor.shape, start, stop):
            first = sum(a * step for a, step in zip(box.start, strides, strict=True))
            self.locations.append(ShardLocation(name, box, rank, number, first - start, strides, "int64"))

    def run(self, steps: list[CopyOp], params: dict[str, torch.Tensor]) -> None:
        for step in steps:
            src = self.storages[step.rank, step.storage].as_strided(step.size, step.src_stride, step.src_offset)
            params[step.param].as_strided(step.size, step.dst_stride, step.dst_offset).copy_(src)


def chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """As `torch.chunk` and FSDP2 cut a dimension: equal parts, but for a smaller last one and empty ones after it."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


@st.composite
def sharded(draw: st.DrawFn, trainer: Trainer, name: str, tensor: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    kind = draw(st.sampled_from(["whole", "dim 0", "last dim", "grid", "flat"]))
    parts, pad, replicas = draw(st.integers(1, 4)), draw(st.integers(0, 2)), draw(st.integers(1, 2))
    if kind == "flat":
        for rank, (start, stop) in enumerate(chunks(prod(shape), parts)):
            trainer.place_flat(name, tensor, start, stop, rank)
        return
    cuts = [[(0, n)] for n in shape]
    if shape and kind in ("dim 0", "grid"):
        cuts[0] = chunks(shape[0], parts)
    if shape and kind in ("last dim", "grid"):
        cuts[-1] = chunks(shape[-1], parts)
    grid = [Box((), ())]
    for bounds in cuts:
        grid = [Box((*box.start, low), (*box.size, high - low)) for box in grid for low, high in bounds]
    for copy in range(replicas):
        for number, box in enumerate(grid):
            trainer.place(name, tensor, box, copy * len(grid) + number, pad)


@st.composite
def loaded(draw: st.DrawFn, name: str, tensor: torch.Tensor) -> tuple[list[LoadCopy], torch.Tensor, torch.Tensor]:
    """Planned copies of a slice of a tensor into a parameter, that parameter's storage, and what must be in it."""
    src = draw(loader_views(tensor, splits=False))
    dst = draw(somewhere(src.shape))
    empty = storage_of(dst).clone()
    boxes = affine_boxes(tuple(tensor.shape), view_of(src), view_of(dst))
    assert boxes is not None
    dst.copy_(src)
    return [LoadCopy(name, box, name, offset, stride) for box, offset, stride in boxes], empty, storage_of(dst)


@quick
@given(st.data(), st.lists(shapes, min_size=1, max_size=3), st.sampled_from([None, 0, 1, 5]))
def test_steps_bring_shards_where_the_loader_would(
    data: st.DataObject, tensor_shapes: list[tuple[int, ...]], prefer_rank: int | None
) -> None:
    trainer = Trainer()
    copies: list[LoadCopy] = []
    params: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(tensor_shapes):
        name, tensor = f"t{number}", counting(shape) + 1000 * number
        data.draw(sharded(trainer, name, tensor))
        more, params[name], expected[name] = data.draw(loaded(name, tensor))
        copies += more
    steps = copy_ops(copies, [trainer.locations], prefer_rank)
    trainer.run(steps, params)
    for name in params:
        assert torch.equal(params[name], expected[name])
    assert sum(prod(step.size) for step in steps) == sum(copy.box.numel for copy in copies), "nothing is read twice"
    assert steps == copy_ops(copies, [trainer.locations], prefer_rank)


def whole(name: str, shape: tuple[int, ...], rank: int = 0) -> ShardLocation:
    return ShardLocation(name, Box.full(shape), rank, 0, 0, row_major(shape), "bfloat16")


def rows(name: str, start: int, stop: int, columns: int, rank: int) -> ShardLocation:
    return ShardLocation(name, Box((start, 0), (stop - start, columns)), rank, 0, 0, (columns, 1), "bfloat16")


def test_qkv_with_one_kv_head_under_tensor_parallelism() -> None:
    # 4 query heads and 1 key/value head of size 2, hidden size 6; two FSDP ranks hold half of the rows each. Each of
    # two engine workers takes 2 query heads and, because there is but one, the same key/value head.
    tensors = {"q": counting((8, 6)), "k": 100 + counting((2, 6)), "v": 200 + counting((2, 6))}
    trainer = Trainer()
    for name, tensor in tensors.items():
        for rank, (start, stop) in enumerate(chunks(len(tensor), 2)):
            trainer.place(name, tensor, Box((start, 0), (stop - start, 6)), rank)
    for worker in range(2):
        plan = [
            LoadCopy("q", Box((4 * worker, 0), (4, 6)), "qkv", 0, (6, 1)),
            LoadCopy("k", Box((0, 0), (2, 6)), "qkv", 24, (6, 1)),
            LoadCopy("v", Box((0, 0), (2, 6)), "qkv", 36, (6, 1)),
        ]
        steps = copy_ops(plan, [trainer.locations])
        assert [(step.name, step.rank, step.size) for step in steps] == [
            ("q", worker, (4, 6)),
            ("k", 0, (1, 6)),
            ("k", 1, (1, 6)),
            ("v", 0, (1, 6)),
            ("v", 1, (1, 6)),
        ]
        params = {"qkv": torch.full((48,), -1)}
        trainer.run(steps, params)
        expected = torch.cat([tensors["q"][4 * worker : 4 * worker + 4], tensors["k"], tensors["v"]])
        assert torch.equal(params["qkv"].view(8, 6), expected)
        assert fuse_groups(plan) == [("q", "k", "v")]


def test_experts_of_gate_and_up_become_one_tensor() -> None:
    # Two experts of intermediate size 4 and hidden size 3; worker 1 of 2 takes the lower half of gate and of up.
    tensors = {f"experts.{e}.{part}": counting((4, 3)) + 100 * e for e in range(2) for part in ("gate", "up")}
    trainer = Trainer()
    plan = []
    for place, (name, tensor) in enumerate(tensors.items()):
        trainer.place(name, tensor, Box.full((4, 3)), rank=0)
        plan.append(LoadCopy(name, Box((2, 0), (2, 3)), "w13", 6 * place, (3, 1)))
    params = {"w13": torch.full((24,), -1)}
    trainer.run(copy_ops(plan, [trainer.locations]), params)
    assert torch.equal(params["w13"].view(8, 3), torch.cat([tensor[2:] for tensor in tensors.values()]))
    assert fuse_groups(plan) == [tuple(tensors)]


def test_a_tied_tensor_goes_to_both_its_parameters() -> None:
    plan = [LoadCopy("embed", Box.full((4, 2)), param, 0, (2, 1)) for param in ("embed_tokens", "lm_head")]
    steps = copy_ops(plan, [[whole("embed", (4, 2))]])
    assert [step.param for step in steps] == ["embed_tokens", "lm_head"]


def test_replicas_are_read_from_the_preferred_rank_or_evenly() -> None:
    names = [f"w{i}" for i in range(6)]
    plan = [LoadCopy(name, Box.full((4, 2)), name, 0, (2, 1)) for name in names]
    locations = [whole(name, (4, 2), rank) for name in names for rank in (2, 0, 1)]
    assert [step.rank for step in copy_ops(plan, [locations])] == [0, 1, 2, 0, 1, 2]
    assert [step.rank for step in copy_ops(plan, [locations], prefer_rank=1)] == [1] * 6
    assert [step.rank for step in copy_ops(plan, [locations], prefer_rank=9)] == [0, 1, 2, 0, 1, 2]


def test_replicas_are_balanced_by_bytes_not_by_number() -> None:
    sizes = {"big": (8, 2), "a": (4, 2), "b": (4, 2)}
    plan = [LoadCopy(name, Box.full(shape), name, 0, (2, 1)) for name, shape in sizes.items()]
    locations = [whole(name, shape, rank) for name, shape in sizes.items() for rank in (0, 1)]
    assert [step.rank for step in copy_ops(plan, [locations])] == [0, 1, 1]
    owners = choose_owners(locations)
    assert [(owner.name, owner.rank) for owner in owners] == [("big", 0), ("a", 1), ("b", 1)]


def test_owners_keep_every_region_once() -> None:
    shards = [rows("w", 2 * rank, 2 * rank + 2, 5, rank) for rank in range(3)]
    replicas = [replace(shard, rank=shard.rank + 3) for shard in shards]
    owners = choose_owners([*shards, *replicas])
    assert [owner.box for owner in owners] == [shard.box for shard in shards]
    assert choose_owners(owners) == owners


def test_every_misplaced_region_is_in_one_error() -> None:
    plan = [LoadCopy(name, Box.full((4, 2)), name, 0, (2, 1)) for name in ("half", "gone", "twice", "good")]
    locations = [
        rows("half", 0, 1, 2, rank=0),
        rows("half", 3, 4, 2, rank=1),
        rows("twice", 0, 3, 2, rank=0),
        rows("twice", 2, 4, 2, rank=1),
        whole("good", (4, 2)),
    ]
    with pytest.raises(PlacementError) as caught:
        copy_ops(plan, [locations])
    assert caught.value.facts["problems"] == [
        "half[1:3, 0:2] is held by no rank",
        "gone[0:4, 0:2] is held by no rank",
        "twice[2:3, 0:2] is held twice, in two chunks or in boxes that overlap",
    ]
    assert all(problem in str(caught.value) for problem in caught.value.facts["problems"])


def test_copies_know_the_chunk_that_brings_what_they_read() -> None:
    plan = [LoadCopy("w", Box((1, 0), (6, 2)), "w", 0, (2, 1))]
    arrivals = [[], [rows("w", 0, 4, 2, rank=0)], [rows("w", 4, 8, 2, rank=0), rows("w", 4, 8, 2, rank=1)]]
    found = copy_ops(plan, arrivals, prefer_rank=1)
    assert [(op.chunk, op.size, op.rank, op.dst_offset) for op in found] == [(1, (3, 2), 0, 0), (2, (3, 2), 1, 6)]


def test_the_same_box_in_two_chunks_is_refused() -> None:
    plan = [LoadCopy("w", Box.full((4, 2)), "w", 0, (2, 1))]
    with pytest.raises(PlacementError, match=r"w\[0:4, 0:2\] is held twice, in two chunks"):
        copy_ops(plan, [[whole("w", (4, 2), rank=0)], [whole("w", (4, 2), rank=1)]])


def test_a_placement_of_another_shape_holds_nothing() -> None:
    with pytest.raises(PlacementError, match=r"w\[0:4, 0:2\] is held by no rank"):
        copy_ops([LoadCopy("w", Box.full((4, 2)), "w", 0, (2, 1))], [[whole("w", (8,))]])


def test_ten_thousand_tensors_take_no_time() -> None:
    names = [f"layers.{i}.weight" for i in range(10_000)]
    plan = [LoadCopy(name, Box((0, 0), (64, 8)), name, 0, (8, 1)) for name in names]
    locations = [rows(name, 32 * rank, 32 * rank + 32, 8, rank) for name in names for rank in range(2)]
    begin = time.process_time()
    assert len(copy_ops(plan, [locations])) == 20_000
    assert len(choose_owners(locations)) == 20_000
    assert len(fuse_groups(plan)) == 10_000
    assert time.process_time() - begin < 5


# One view


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A strided view of a larger tensor of counted elements, with its dimensions in any order."""
    view = draw(somewhere(draw(shapes)))
    storage = storage_of(view)
    storage.copy_(torch.arange(storage.numel()))
    return view


@st.composite
def grids(draw: st.DrawFn, shape: Sequence[int]) -> list[Box]:
    """The tensor, cut along each of its dimensions into some parts."""
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    cells = product(*(pairwise(at) for at in cuts))
    return [Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in cells]


def steps_into(view: torch.Tensor, boxes: Sequence[Box], first: int) -> list[CopyOp]:
    """What fills a contiguous tensor, which begins at element `first`, with the elements of `view`."""
    rows = row_major(view.shape)
    return [
        CopyOp(
            0,
            "w",
            box.size,
            0,
            0,
            view.storage_offset() + sum(a * s for a, s in zip(box.start, view.stride(), strict=True)),
            view.stride(),
            "int64",
            "p",
            first + sum(a * s for a, s in zip(box.start, rows, strict=True)),
            rows,
        )
        for box in boxes
    ]


@quick
@given(st.data(), views(), st.integers(0, 9))
def test_pieces_of_a_view_are_found_to_be_one(data: st.DataObject, view: torch.Tensor, first: int) -> None:
    steps = steps_into(view, data.draw(grids(view.shape)), first)
    found = as_single_view(tuple(view.shape), first, data.draw(st.permutations(steps)))
    assert found is not None
    offset, size, stride = found
    assert torch.equal(torch.as_strided(view, size, stride, offset), view)
    if len(steps) > 2:  # one that lies elsewhere
        moved = replace(steps[-1], src_offset=steps[-1].src_offset + 1000)
        assert as_single_view(tuple(view.shape), first, [*steps[:-1], moved]) is None
    assert as_single_view(tuple(view.shape), first, [*steps, replace(steps[0], storage=1)]) is None


@quick
@given(st.data(), views())
def test_the_part_of_a_placement_is_where_the_box_lies(data: st.DataObject, view: torch.Tensor) -> None:
    held = ShardLocation("w", Box.full(view.shape), 0, 0, view.storage_offset(), view.stride(), "int64")
    box = data.draw(boxes_in(view.shape))
    part = part_of(held, box)
    if box.numel == 0:
        assert part is None
    else:
        assert part is not None
        assert torch.equal(torch.as_strided(view, part.box.size, part.stride, part.offset), cut(view, box))


# Groups


def fused(*pairs: tuple[str, str]) -> list[LoadCopy]:
    return [LoadCopy(name, Box((), ()), param, 0, ()) for name, param in pairs]


def test_names_are_grouped_by_the_parameter_they_land_in() -> None:
    plan = fused(("q", "qkv"), ("gate", "gate_up"), ("k", "qkv"), ("up", "gate_up"), ("norm", "norm"), ("v", "qkv"))
    assert fuse_groups(plan) == [("q", "k", "v"), ("gate", "up"), ("norm",)]


def test_groups_that_share_a_name_are_one() -> None:
    assert fuse_groups(fused(("a", "x"), ("b", "y"), ("c", "z"), ("c", "y"), ("b", "x"))) == [("a", "b", "c")]


@quick
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("stuvwxyz")), max_size=12))
def test_groups_are_connected_components(pairs: list[tuple[str, str]]) -> None:
    groups = fuse_groups(fused(*pairs))
    names = list(dict.fromkeys(name for name, _ in pairs))
    assert sorted(name for group in groups for name in group) == sorted(names)
    together = {name: {name} for name in names}
    for _ in names:  # reachability by repeated merging
        for name, param in pairs:
            for other, same in pairs:
                if param == same:
                    together[name] |= together[other]
    assert all(set(group) == together[group[0]] for group in groups)
    assert [names.index(group[0]) for group in groups] == sorted(names.index(group[0]) for group in groups)
    assert all(list(group) == sorted(group, key=names.index) for group in groups)


# Manifest


def test_a_manifest_reads_as_a_collection_in_order() -> None:
    manifest = Manifest((TensorMeta("b", (2, 3), "float32"), TensorMeta("a", (4,), "bfloat16")))
    assert manifest.names == ("b", "a")
    assert list(manifest) == [manifest["b"], manifest["a"]]
    assert (len(manifest), manifest.nbytes) == (2, 32)
    assert "a" in manifest
    assert "c" not in manifest
    with pytest.raises(KeyError):
        manifest["c"]


def test_a_manifest_refuses_doubled_names_and_all_ranks_together_emptiness() -> None:
    once, again = TensorMeta("a", (2,), "float32"), TensorMeta("a", (3,), "float32")
    with pytest.raises(ManifestError, match="'a'") as caught:
        Manifest((once, TensorMeta("b", (), "float32"), again))
    assert caught.value.mismatched == {"a": "offered twice"}
    some = Manifest((once,))
    assert merge_manifests([Manifest(()), some]) == some
    with pytest.raises(ManifestError, match="empty"):
        merge_manifests([Manifest(()), Manifest(())])


# ---------------------------------------------------------------------------------------------------------------
# Manifests of several ranks


def manifest(*names: str, dtype: str = "bfloat16") -> Manifest:
    return Manifest(tuple(TensorMeta(name, (4, 2), dtype) for name in names))


def test_the_same_manifest_on_all_ranks_stays_what_it_is():
    whole = manifest("lm_head.weight", "model.embed", "a.10", "a.2")
    assert merge_manifests([whole, whole, whole]) == whole


def test_stages_come_in_the_order_of_their_layers():
    first = manifest("model.embed", *(f"model.layers.{n}.w" for n in (0, 1, 10, 11)))
    second = manifest(*(f"model.layers.{n}.w" for n in (2, 9)), "model.norm", "lm_head.weight")
    layers = [f"model.layers.{n}.w" for n in (0, 1, 2, 9, 10, 11)]
    for order in ([first, second], [second, first, second]):
        assert merge_manifests(order).names == ("model.embed", *layers, "model.norm", "lm_head.weight")


def test_ranks_that_disagree_are_refused_with_every_name():
    with pytest.raises(ManifestError, match="2 tensors differ, such as b") as caught:
        merge_manifests([manifest("a", "b", "c"), manifest("b", "c", "d", dtype="float32")])
    assert list(caught.value.mismatched) == ["b", "c"]
