"""The pure part of `weightsync.hybrid`: batches, dispatch modes, and what finds a place."""

from __future__ import annotations

import itertools
import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_protocols import ALL_MICRO_DP, PP_ONLY
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from weightsync import CheckpointTransport, LoraTransport, SingleCopyTransport
from weightsync.errors import ConfigError, PeerError, PlacementError
from weightsync.hybrid import Call, Dispatch, Layout, Place, Rollouts, balance, column, concat, pad, split, take, union
from weightsync.hybrid.batch import cut, pack, unpack
from weightsync.hybrid.dispatch import answer
from weightsync.hybrid.following import check_usable, choose_transport
from weightsync.hybrid.pool import place
from weightsync.hybrid.rollout_group import places_of_engines

COUNTS = st.integers(1, 14)
PARTS = st.integers(1, 9)


def batch_of(count: int, first: int = 0) -> TensorDict:
    numbers = range(first, first + count)
    columns = {
        "number": torch.arange(first, first + count),
        "vector": torch.arange(first, first + count).float()[:, None].expand(count, 3).clone(),
        # Values that tensors, or one value for the whole batch, could be mistaken for.
        "text": column(["same" for _ in numbers]),
        "anything": column([[number, number] if number % 2 else {"key": number} for number in numbers]),
        "jagged": nested([torch.arange(number % 3) for number in numbers], torch.jagged),
        "wide": nested([torch.full((2, number % 4), number) for number in numbers], torch.jagged, dim=2),
        "strided": nested([torch.ones(1 + number % 2, 2 + number % 3) for number in numbers], torch.strided),
        "temperature": NonTensorData(0.5),
        "labels": NonTensorData([*range(count)]),  # as many as there are rows, and no column
    }
    return TensorDict(columns, [count])


def nested(rows: list[torch.Tensor], layout: torch.layout, dim: int = 1) -> torch.Tensor:
    if layout is torch.strided:
        with warnings.catch_warnings():  # torch says that they are a prototype
            warnings.simplefilter("ignore")
            return torch.nested.nested_tensor(rows)
    ends = torch.tensor([0, *(row.shape[dim - 1] for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows, dim - 1), ends, jagged_dim=dim)


def told(batch: TensorDict) -> list[tuple[Any, ...]]:
    """Return the rows as plain values."""
    return list(
        zip(
            batch["number"].tolist(),
            batch["vector"].tolist(),
            batch.get("text").tolist(),
            batch.get("anything").tolist(),
            *([row.tolist() for row in batch[name].unbind()] for name in ("jagged", "wide", "strided")),
            strict=True,
        )
    )


# ---------------------------------------------------------------------------------------------------------------
# Batches


@given(COUNTS, PARTS)
def test_split_and_concat_are_each_others_inverse(count: int, parts: int):
    batch = batch_of(count)
    if count < parts:
        with pytest.raises(ConfigError, match=f"{count} rows cannot be split over {parts}"):
            split(batch, parts)
        return
    found = split(batch, parts)
    sizes = [len(part) for part in found]
    assert len(found) == parts
    assert max(sizes) - min(sizes) <= 1
    for part in (*found, concat(found)):
        assert isinstance(part.get("temperature"), NonTensorData)
        assert (part["temperature"], part["labels"]) == (0.5, [*range(count)])
    assert told(concat(found)) == told(batch)


@given(COUNTS, PARTS)
def test_padding_repeats_rows_and_can_be_undone(count: int, multiple: int):
    batch = batch_of(count)
    padded = pad(batch, multiple)
    assert len(padded) % multiple == 0
    assert 0 <= len(padded) - count < multiple
    assert told(cut(padded, 0, count)) == told(batch)
    assert (padded["temperature"], padded["labels"]) == (0.5, [*range(count)])
    assert told(padded) == list(itertools.islice(itertools.cycle(told(batch)), len(padded)))


def test_a_batch_without_rows_is_not_padded():
    with pytest.raises(ConfigError, match="nothing to repeat"):
        pad(cut(batch_of(3), 0, 0), 2)


def test_union_joins_columns():
    one, other = batch_of(3).select("number", "text"), batch_of(3).select("number", "anything")
    joined = union(one, other, TensorDict({"more": torch.ones(3)}, [3]))
    assert sorted(joined.keys()) == ["anything", "more", "number", "text"]
    assert joined.get("anything").tolist() == batch_of(3).get("anything").tolist()
    assert sorted(one.keys()) == ["number", "text"]
    unknown = TensorDict({"number": torch.tensor([1.0, torch.nan])}, [2])
    assert union(unknown, unknown.clone())["number"].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (batch_of(4), "3 and 4 rows"),
        (batch_of(3, first=1), "a column 'number' with different values"),
        (TensorDict({"text": column(["same", "same", "other"])}, [3]), "a column 'text' with different values"),
        (TensorDict({"number": torch.arange(3.0)}, [3]), "a column 'number' with different values"),
        (TensorDict({}, [3, 1]), "expected one dimension"),
    ],
)
def test_union_refuses_what_contradicts(other: TensorDict, words: str):
    with pytest.raises(ConfigError, match=words):
        union(batch_of(3), other)


def test_concat_refuses_other_columns():
    with pytest.raises(ConfigError, match=r"\['number'\]"):
        concat([batch_of(1), batch_of(1).select("number")])
    rows_of = {"[3]": torch.zeros(2, 3), "[4]": torch.zeros(1, 4), "no tensors": column(["a"])}
    for one, other in itertools.permutations(rows_of, 2):
        words = re.escape(f"the rows of the column 'answers' are of the sizes {one}, {other}: pad them alike first")
        with pytest.raises(ConfigError, match=words):
            concat([TensorDict({"answers": rows_of[size]}, [len(rows_of[size])]) for size in (one, other)])


@given(COUNTS)
def test_a_batch_travels_whole(count: int):
    assert told(unpack(pack(batch_of(count)))) == told(batch_of(count))
    assert unpack(pack([count])) == [count]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 0), (3, 1, 4)])
def test_tensors_of_any_kind_travel(dtype: torch.dtype, shape: tuple[int, ...]):
    whole = torch.randint(2, (9, *shape[1:])).to(dtype)
    part = TensorDict({"values": whole[3:6].requires_grad_(dtype is torch.bfloat16)}, [3])
    packed = pack(part)
    assert sum(data.nbytes for _, _, data in packed.tensors.values()) == part["values"].nbytes
    found = unpack(packed)["values"]
    assert (found.dtype, found.shape) == (dtype, shape)
    assert found.view(torch.uint8).equal(whole[3:6].detach().view(torch.uint8))
    found.zero_()  # into memory of its own
    assert unpack(packed)["values"].view(torch.uint8).equal(whole[3:6].detach().view(torch.uint8))


def test_a_column_of_a_table_travels():
    table = torch.arange(6).reshape(3, 2)
    batch = TensorDict({"first": table[:, 0], "turned": table.flip(1).T.contiguous().T}, [3])
    for found in (unpack(pack(batch)), concat(split(batch, 2))):
        assert (found["first"].tolist(), found["turned"].tolist()) == ([0, 2, 4], table.flip(1).tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_nested_tensors_travel(dtype: torch.dtype, count: int):
    whole = [torch.randint(2, (2, size)).to(dtype) for size in (3, 0, 1)]
    for values in (nested(whole, torch.jagged, dim=2), nested(whole, torch.strided)):
        batch = cut(TensorDict({"values": values}, [3]), 0, count)
        found = unpack(pack(batch))["values"]
        assert (found.layout, found.dtype, found.is_nested) == (values.layout, dtype, True)
        assert [row.tolist() for row in found.unbind()] == [row.tolist() for row in whole[:count]]
        again = concat([TensorDict({"values": found}, [count]), batch, TensorDict({"values": values}, [3])])
        assert [row.tolist() for row in again["values"].unbind()] == [
            row.tolist() for row in (*whole[:count], *whole[:count], *whole)
        ]


def test_nested_tensors_that_do_not_fit_together_are_refused():
    kinds = {
        "[*] (jagged, torch.int64)": nested([torch.arange(2)], torch.jagged),
        "[*] (jagged, torch.float32)": nested([torch.ones(2)], torch.jagged),
        "[2, *] (jagged, torch.int64)": nested([torch.ones(2, 1).long()], torch.jagged, dim=2),
        "[*, 2] (jagged, torch.int64)": nested([torch.ones(1, 2).long()], torch.jagged),
        "[*] (strided, torch.int64)": nested([torch.arange(2)], torch.strided),
        "[2]": torch.zeros(1, 2, dtype=torch.int64),
    }
    for one, other in itertools.permutations(kinds, 2):
        with pytest.raises(ConfigError, match=re.escape(f"are of the sizes {one}, {other}: pad them alike first")):
            concat([TensorDict({"answers": kinds[kind]}, [1]) for kind in (one, other)])
    one, *others = (TensorDict({"answers": values}, [1]) for values in kinds.values())
    assert union(one, one.clone())["answers"].unbind()[0].tolist() == [0, 1]
    for other in others:
        with pytest.raises(ConfigError, match="a column 'answers' with different values"):
            union(one, other)


def test_other_columns_are_refused():
    inner, sparse = TensorDict({"inner": batch_of(2)}, [2]), TensorDict({"inner": torch.eye(2).to_sparse()}, [2])
    array = TensorDict({"inner": torch.ones(2)}, [2])
    array["inner"] = np.array(["a", "b"], dtype=object)
    for batch, words in (
        (inner, "a TensorDict"),
        (sparse, "layout torch.sparse"),
        (array, r"an array of 2 objects .* Give column\(array\)"),
    ):
        for refuse in (pack, lambda batch: split(batch, 2), lambda batch: concat([batch]), union):
            with pytest.raises(ConfigError, match=f"'inner' is .*{words}"):
                refuse(batch)
    lazy = TensorDict.lazy_stack([TensorDict({"a": torch.ones(size)}) for size in (1, 2)])
    for mode in (Dispatch.DP, Dispatch.DP_PADDED):
        with pytest.raises(ConfigError, match="a batch is a LazyStackedTensorDict; expected a TensorDict"):
            run(plain(2), mode, lambda *_: pytest.fail("a worker was called"), lazy, batch_of(2))


META: list[Any] = [
    "one for all",
    7,
    None,
    ["a", "b", "c"],
    {"eos": [1, 2], "nan": float("nan"), "tensor": torch.tensor([1.0, torch.nan])},
    np.array([1.0, np.nan]),
]


@pytest.mark.parametrize("value", META, ids=str)
def test_meta_information_stays_meta(value: Any):
    batch = batch_of(3)
    batch["told"] = NonTensorData(value)
    parts = [unpack(pack(part)) for part in split(batch, 2)]
    for found in (
        *parts,
        concat(parts),
        take(batch, [2, 0]),
        pad(batch, 2),
        union(batch_of(3), batch),
        union(batch, batch),
    ):
        assert isinstance(found.get("told"), NonTensorData)
        assert repr(found["told"]) == repr(value)
    assert repr(concat([parts[0], cut(batch_of(3), 0, 1)])["told"]) == repr(value)  # which only one of them has
    for other in ("another", ["a", "b"], torch.ones(1)):
        parts[1]["told"] = NonTensorData(other)
        with pytest.raises(ConfigError, match="'told' is meta information of whole batches, and its values differ: "):
            concat(parts)
        with pytest.raises(ConfigError, match="a column 'told' with different values"):
            union(parts[0], cut(parts[1].select("told"), 0, 1))
    parts[1]["told"] = column([value, value])
    with pytest.raises(ConfigError, match="'told': a column of some batches, and meta information of others"):
        concat(parts)


def test_meta_information_goes_to_all_ranks_and_comes_back_once():
    def work(rank: int, part: TensorDict) -> TensorDict:
        assert part["labels"] == [0, 1, 2, 3, 4]
        return TensorDict({"rank": torch.full((len(part),), rank), "by": NonTensorData("policy")}, [len(part)])

    for mode in (Dispatch.DP, Dispatch.DP_PADDED):
        found = run(plain(2), mode, work, batch_of(5))
        assert (len(found), found["by"]) == (5, "policy")
    with pytest.raises(ConfigError, match="'by' is meta information of whole batches, and its values differ: 0 and 1"):
        run(plain(2), Dispatch.DP, lambda rank, part: TensorDict({"by": NonTensorData(rank)}, [len(part)]), batch_of(5))


def test_padded_results_have_a_row_for_each_row():
    with pytest.raises(ConfigError, match="the result of 3 rows has 6 rows"):
        run(plain(2), Dispatch.DP_PADDED, lambda rank, part: concat([part, part]), batch_of(5))


def test_rows_can_be_taken_in_any_order():
    batch = batch_of(3)
    assert told(take(batch, [2, 0, 0])) == [told(batch)[row] for row in (2, 0, 0)]


@given(st.lists(st.integers(0, 100), max_size=40), PARTS)
def test_balanced_parts_differ_by_one_row_of_the_largest_at_most(sizes: list[int], parts: int):
    found = balance(sizes, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(sizes)))
    loads = [sum(sizes[row] for row in part) for part in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    if len(set(sizes)) == 1:
        assert max(map(len, found)) - min(map(len, found)) <= 1


# ---------------------------------------------------------------------------------------------------------------
# Dispatch


def plain(size: int) -> Layout:
    return Layout(tuple(Place(rank, True) for rank in range(size)))


# Four ranks: two pipeline stages of two tensor-parallel ranks, once and beside a second data-parallel half.
MEGATRON = Layout(
    tuple(Place(dp, stage == 1 and tp == 0) for stage, dp, tp in itertools.product((0, 1), (0, 1), (0, 1)))
)


def run(layout: Layout, dispatch: Dispatch, work: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what a group does, in this process: `work(rank, *args, **kwargs)` on each rank that is called."""
    call = Call(args, kwargs)
    calls = dispatch.split(layout, call)
    assert len(calls) == layout.size
    results = [None if each is None else answer(partial(work, rank), each) for rank, each in enumerate(calls)]
    return dispatch.collect(layout, results)


def test_one_to_all_and_rank_zero():
    assert run(plain(3), Dispatch.ONE_TO_ALL, lambda rank, x, y: (rank, x, y), 1, y=[2]) == [
        (rank, 1, [2]) for rank in range(3)
    ]
    assert run(plain(3), Dispatch.RANK_ZERO, lambda rank, x: (rank, x), 1) == (0, 1)


def test_all_to_all_gives_each_rank_its_own():
    assert run(plain(2), Dispatch.ALL_TO_ALL, lambda rank, x, y: (rank, x, y), [1, 2], y=(3, 4)) == [
        (0, 1, 3),
        (1, 2, 4),
    ]
    with pytest.raises(ConfigError, match="argument 0 must be a list with a value for each of the 2 ranks"):
        run(plain(2), Dispatch.ALL_TO_ALL, lambda rank, x: x, [1, 2, 3])


@given(COUNTS, PARTS)
def test_data_parallel_calls_keep_the_order_of_rows(count: int, size: int):
    batch = batch_of(count)
    seen: dict[int, int] = {}

    def work(rank: int, part: TensorDict, scale: int, other: TensorDict) -> TensorDict:
        seen[rank] = len(part)
        assert told(part) == told(other)
        return TensorDict({"scaled": part["number"] * scale, "text": part.get("text")}, part.batch_size)

    padded = run(plain(size), Dispatch.DP_PADDED, work, batch, 2, other=batch)
    assert len(set(seen.values())) == 1
    assert padded["scaled"].tolist() == [2 * number for number in range(count)]
    if count < size:
        with pytest.raises(ConfigError, match="without an empty one"):
            run(plain(size), Dispatch.DP, work, batch, 2, other=batch)
        return
    found = run(plain(size), Dispatch.DP, work, batch, 2, other=batch)
    assert found["scaled"].tolist() == padded["scaled"].tolist()
    assert found.get("text").tolist() == batch.get("text").tolist()


def test_a_model_parallel_group_gets_one_part_and_its_last_stage_answers():
    got: dict[int, list[int]] = {}

    def work(rank: int, part: TensorDict) -> Any:
        got[rank] = part["number"].tolist()
        # What does not collect gives anything, or nothing.
        return TensorDict({"from": torch.full((len(part),), rank)}, part.batch_size) if rank in (4, 6) else "nothing"

    found = run(MEGATRON, Dispatch.DP, work, batch_of(5))
    assert [got[rank] for rank in range(8)] == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4]] * 2
    assert found["from"].tolist() == [4, 4, 6, 6, 6]


def test_results_that_are_no_batches_come_as_a_list():
    assert run(MEGATRON, Dispatch.DP, lambda rank, part: {"loss": rank}, batch_of(5)) == [{"loss": 4}, {"loss": 6}]


@pytest.mark.parametrize(
    ("args", "words"), [((), "no batch"), ((batch_of(2), batch_of(3)), r"batches of \[2, 3\] rows"), ((1,), "no batch")]
)
@pytest.mark.parametrize("mode", ["DP", "DP_PADDED"])
def test_what_cannot_be_split_is_refused(args: tuple[Any, ...], words: str, mode: str):
    with pytest.raises(ConfigError, match=words):
        run(plain(2), getattr(Dispatch, mode), lambda *_: pytest.fail("a worker was called"), *args)


@pytest.mark.parametrize(
    "places",
    [[(0, True), (0, True)], [(0, True), (2, True)], [(0, True), (1, False)], [(1, True)]],
    ids=["two collect", "a gap", "one silent", "no first"],
)
def test_places_that_do_not_fit_together_are_refused(places: list[tuple[int, bool]]):
    with pytest.raises(ConfigError, match=r"correct Worker\.place"):
        Layout(tuple(Place(*each) for each in places))


def test_a_mode_of_ones_own():
    last = Dispatch(
        lambda layout, call: [None] * (layout.size - 1) + [call], lambda layout, results: (layout.size, results[-1])
    )
    assert run(plain(3), last, lambda rank, x: rank + x, 5) == (3, 7)


# Eight ranks: two models of two pipeline stages of two tensor-parallel ranks.
THREE_D = Layout(
    tuple(Place(dp, stage == 1 and tp == 0, tp, stage) for stage, dp, tp in itertools.product((0, 1), (0, 1), (0, 1)))
)


def test_verls_pp_only_asks_each_stage_of_one_model():
    assert run(THREE_D, PP_ONLY, lambda rank, x: (rank, x), "names") == [(0, "names"), (4, "names")]
    assert run(plain(3), PP_ONLY, lambda rank: rank) == [0]


def test_verls_all_micro_dp_gives_each_tensor_parallel_group_its_part():
    got: dict[int, list[int]] = {}

    def work(rank: int, part: TensorDict) -> TensorDict:
        got[rank] = part["number"].tolist()
        return TensorDict({"from": torch.full((len(part),), rank)}, part.batch_size)

    found = run(THREE_D, ALL_MICRO_DP, work, batch_of(5))
    assert [got[rank] for rank in range(8)] == [[0], [0], [2], [2], [1], [1], [3, 4], [3, 4]]
    assert found["from"].tolist() == [0, 4, 2, 6, 6]


# ---------------------------------------------------------------------------------------------------------------
# Places


@pytest.mark.parametrize(
    ("needed", "nodes", "unplaced"),
    [
        ([{"CPU": 2}, {"CPU": 2}], [{"CPU": 4}], None),
        ([{"CPU": 2}, {"CPU": 3}], [{"CPU": 3}, {"CPU": 2}], None),
        ([{"CPU": 1}, {"CPU": 3}], [{"CPU": 3}, {"CPU": 2}], None),
        ([{"CPU": 2}, {"CPU": 2}], [{"CPU": 3}, {"CPU": 1}], {"CPU": 2}),
        ([{"CPU": 1, "GPU": 1}], [{"CPU": 8}], {"CPU": 1, "GPU": 1}),
        ([{"CPU": 1, "GPU": 1}] * 2, [{"CPU": 8}, {"CPU": 1, "GPU": 1}, {"CPU": 2, "GPU": 8}], None),
    ],
)
def test_pools_find_their_nodes(needed: Any, nodes: Any, unplaced: Any):
    assert place(needed, nodes) == unplaced


def test_engines_fill_the_nodes_of_a_pool():
    assert places_of_engines([2, 4], 2) == [0, 2, 4]
    assert places_of_engines([3], 1) == [0, 1, 2]
    for size in (0, 3, 4):
        with pytest.raises(ConfigError, match="does not fit a pool"):
            places_of_engines([2, 4], size)


def test_memory_is_shared_on_one_host_alone():
    assert choose_transport(["a", "a"], ["a"], shares_gpus=False)[0] == "ipc"
    assert choose_transport(["a", "a"], ["a"], shares_gpus=True)[0] == "ipc"
    assert choose_transport(["a", "a"], ["a", "b"], shares_gpus=False)[0] == "broadcast"
    assert choose_transport(["a", "b"], ["a", "b"], shares_gpus=False)[0] == "broadcast"
    files = CheckpointTransport("/shared")
    assert choose_transport(["a", "b"], ["a", "b"], shares_gpus=True, asked=files)[0] is files


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        ("single_copy", "single_copy needs steps inside"),
        (SingleCopyTransport(), "single_copy needs steps inside"),
        ("lora", "generate asks for no adapter"),
        (LoraTransport(name="mine"), "generate asks for no adapter"),
        (CheckpointTransport("/shared", restart=True), "leave out restart"),
    ],
    ids=str,
)
def test_transports_that_demand_more_than_pushes_are_refused(transport: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        check_usable(transport)


def test_transports_of_pushes_alone_are_not_refused():
    for transport in (None, "ipc", "broadcast", "nccl", CheckpointTransport("/shared"), object()):
        check_usable(transport)


@pytest.mark.parametrize(
    ("nodes", "shares_gpus", "asked", "words"),
    [
        ("ab", True, None, "on 2 hosts: 'broadcast' needs a GPU for each"),
        ("a", True, "nccl", "on 1 hosts: 'nccl' needs a GPU for each"),
        ("ab", False, "ipc", "on one host, got 2 hosts"),
        ("ab", True, "cuda_ipc", "on one host, got 2 hosts"),
    ],
)
def test_transports_that_cannot_work_are_refused(nodes: str, shares_gpus: bool, asked: str | None, words: str):
    with pytest.raises(PlacementError, match=words):
        choose_transport(nodes, nodes, shares_gpus=shares_gpus, asked=asked)


class Failing:
    """An engine that echoes prompts. Its calls fail, at once or later, while it is `broken`."""

    takes_turns, pushes = False, 0

    def __init__(self) -> None:
        self.broken = ""
        self.generate = self

    def remote(self, prompts: int) -> Failing:
        if self.broken == "at once":
            raise PeerError("it has died")
        future = Failing()
        future.prompts, future.broken = prompts, self.broken
        return future

    def result(self) -> int:
        if self.broken:
            raise PeerError("it has died")
        return self.prompts


@pytest.mark.parametrize("broken", ["at once", "later"])
def test_rollouts_after_an_error_go_on_with_the_same_batch(broken: str):
    engine: Any = Failing()
    rollouts: Any = Rollouts(engine, iter(range(6)), behind=1)
    found = [next(rollouts)]
    engine.broken = broken
    for _ in range(3):
        with pytest.raises(PeerError):
            found += (next(rollouts) for _ in range(6))
    engine.broken = ""
    assert [*found, *rollouts] == [*range(6)]
