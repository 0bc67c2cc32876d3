"""A load plan in positions, as messages have it: nothing is lost, and no message takes much memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ProtocolError
from weightsync.net.wire import PackedLoadPlan, encode
from weightsync.planning.layout import Box
from weightsync.planning.load_plan import LoadPlan, NameReader, Runs, runs_of

NAMES = [f"layers.{number}.weight" for number in range(12)]
BOXES = [(Box((0,), (2,)),), (Box((0,), (1,)), Box((4,), (1,)))]
some = st.lists(st.sampled_from(NAMES), max_size=12, unique=True)


@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["bfloat16", "float32"])),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(BOXES)),
    st.lists(some, max_size=4),
    st.lists(some, max_size=2),
    some,
)
def test_a_plan_is_the_same_after_a_message(
    used: dict[str, str],
    partial: dict[str, tuple[Box, ...]],
    groups: list[list[str]],
    reloads: list[list[str]],
    left_out: list[str],
):
    plan = LoadPlan(used, partial, {"x": "no"}, groups, reloads, ["p"], ["h"], {"in_place": 1}, left_out, [], [], {})
    found = PackedLoadPlan.of(plan, NAMES).read(NAMES)
    assert (found.used, found.partial) == (used, partial)
    assert [*map(set, found.groups)] == [*map(set, groups)]
    assert [*map(set, found.reloads)] == [*map(set, reloads)]
    assert {*found.left_out} == {*left_out}
    assert (found.refused, found.missing, found.load_paths) == (plan.refused, plan.missing, plan.load_paths)


@given(st.sets(st.integers(0, 30)))
def test_runs_are_the_fewest(positions: set[int]):
    runs = runs_of(positions)
    assert {at for first, count in runs for at in range(first, first + count)} == positions
    assert len(runs) == sum(at - 1 not in positions for at in positions)


@pytest.mark.parametrize("runs", [[(12, 1)], [(0, 13)], [(3, 1), (3, 1)], [(3, 2), (0, 1)], [(0, 2**63)]])
def test_positions_of_no_tensor_and_positions_out_of_order_are_refused(runs: Runs):
    with pytest.raises(ProtocolError, match="of 12 tensors from number"):
        NameReader(NAMES).read(runs)


def test_a_message_cannot_name_tensors_without_end():
    everything = [[(0, 12)]] * 1000
    packed = PackedLoadPlan({}, [], {}, everything, [], [], [], {}, [], [], [], {})
    with pytest.raises(ProtocolError, match="of 12 tensors from number 0"):
        packed.read(NAMES)


def test_the_message_of_a_mixture_of_experts_is_small():
    names = [
        f"layers.{layer}.experts.{number}.{part}" for layer in range(8) for part in ("gate", "up", "down")
        for number in range(128)
    ]  # fmt: skip
    groups = [
        [name for name in names if name.startswith(f"layers.{layer}.") and name.endswith(parts)]
        for layer in range(8)
        for parts in (("gate", "up"), ("down",))
    ]
    halves = {name: (Box((0, 0), (4, 8)),) for name in names}
    plan = LoadPlan(dict.fromkeys(names, "bfloat16"), halves, {}, groups, groups, [], [], {}, [], [], [], {})
    assert len(encode(PackedLoadPlan.of(plan, names))) < 1000
