"""Neighbours in memory are one run, and each tensor is in one run."""

from __future__ import annotations

import random

import pytest
import torch

from weightsync.kernels.finite import find_non_finite
from weightsync.kernels.runs import join_runs


def test_all_parts_of_a_fused_parameter_are_one_run():
    fused = torch.randn(8, 6, 5)
    parts = [expert[rows] for rows in (slice(0, 3), slice(3, 6)) for expert in fused]
    ((data, members),) = join_runs(parts)
    assert (data.data_ptr(), data.numel(), sorted(members)) == (fused.data_ptr(), fused.numel(), [*range(16)])


@pytest.mark.parametrize("seed", range(20))
def test_runs_hold_the_values_of_their_members_and_nothing_else(seed: int):
    draw = random.Random(seed)
    storages = [torch.arange(200 * number, 200 * number + 200).to(torch.float32) for number in range(3)]
    tensors = []
    for _ in range(draw.randint(1, 12)):
        storage, rows, gap = draw.choice(storages), draw.randint(0, 4), draw.choice([0, 0, 1])
        tensors.append(storage.as_strided((rows, 5), (5 + gap, 1), draw.randint(0, 150)))
    runs = join_runs([*tensors, tensors[0]])
    assert sorted(number for _, members in runs for number in members) == [*range(len(tensors) + 1)]
    for data, members in runs:
        held = {value for number in members for value in [*tensors, tensors[0]][number].flatten().tolist()}
        assert {*data.flatten().tolist()} == held


def test_a_long_run_is_cut_between_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weightsync.kernels.runs._MOST_BYTES", 48)
    rows = [*torch.randn(5, 4)]
    assert [members for _, members in join_runs(rows)] == [[0, 1, 2], [3, 4]]
    (found,) = join_runs([torch.randn(100)])
    assert found.data.numel() == 100


def test_a_run_with_a_bad_value_is_found():
    fused = torch.randn(4, 3, 2)
    fused[2, 1, 1] = torch.nan
    assert find_non_finite([run.data for run in join_runs([*fused])]) == [0]
