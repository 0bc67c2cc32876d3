"""The search of `weightsync place`, against an enumeration of its own and against placements made by hand."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigError
from weightsync.tools import cli, simulate
from weightsync.tools.place import Job, Role, by_hand, partitions, read_job, search

EXAMPLE = Path(__file__).parents[2] / "examples" / "place_ppo.json"
NAMES = ("rollout", "actor", "critic")
STAGES: Mapping[str, tuple[str, ...]] = {"rollout": ("generate",), "actor": ("prepare", "train"), "critic": ("train",)}


def job_of(costs: Mapping[tuple[str, str, int], tuple[float, float]], **other: Any) -> Job:
    """Return a job of three roles with the parallel sizes 1 and 2."""
    memory = {"rollout": (30.0, 0.0), "actor": (10.0, 60.0), "critic": (10.0, 60.0)}
    roles = {
        name: Role(
            {stage: {size: costs[name, stage, size] for size in (1, 2)} for stage in STAGES[name]}, *memory[name]
        )
        for name in NAMES
    }
    return Job(**{"gpus": 4, "batch": 24, "weights": "1B", "trainer": "actor", "roles": roles, **other})


def least(job: Job) -> float:
    """Return the least seconds of a step of all placements: the pool of each role, their GPUs and the sizes."""
    steps = [math.inf]
    sizes = list(itertools.product((1, 2), repeat=3))
    for pools, counts in itertools.product(
        itertools.product(range(3), repeat=3), itertools.product((1, 2, 4), repeat=3)
    ):
        if sum(counts[pool] for pool in {*pools}) <= job.gpus:
            steps += [step_s(job, pools, counts, size) for size in sizes]
    return min(steps)


def step_s(job: Job, pools: tuple[int, ...], counts: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    memory = dict.fromkeys(pools, 0.0)
    stages = dict.fromkeys(itertools.product(pools, ("generate", "prepare", "train")), 0.0)
    for name, pool, size in zip(NAMES, pools, sizes, strict=True):
        if counts[pool] % size:
            return math.inf
        memory[pool] += job.roles[name].gb / size + job.roles[name].sharded_gb / counts[pool]
        for stage in STAGES[name]:
            call_s, row_s = job.roles[name].seconds[stage][size]
            stages[pool, stage] += call_s + math.ceil(job.batch / (counts[pool] / size)) * row_s
    if max(memory.values()) > job.gpu_memory_gb:
        return math.inf
    generate, prepare, train = (
        max(stages[pool, stage] for pool in pools) for stage in ("generate", "prepare", "train")
    )
    together, ranks, workers = pools[0] == pools[1], counts[pools[1]], counts[pools[0]]
    topology = simulate.Topology(ranks=ranks, engines=workers // sizes[0], tp=sizes[0])
    kinds = ("ipc", "checkpoint") if together else ("ipc", "checkpoint", "broadcast")
    push = min(each.seconds for each in simulate.predict(2 * 10**9, topology) if each.transport in kinds)
    if job.behind and pools.count(pools[0]) == 1:
        return max(generate, prepare + train) + push
    return generate + prepare + train + push


SECONDS = st.tuples(st.floats(0, 4), st.floats(0.01, 1))
COSTS = st.fixed_dictionaries(
    {(name, stage, size): SECONDS for name in NAMES for stage in STAGES[name] for size in (1, 2)}
)


@settings(max_examples=40, deadline=None)
@given(COSTS, st.sampled_from([0, 1]), st.sampled_from([45.0, 80.0, 200.0]))
def test_no_placement_is_faster_than_the_one_found(costs: Any, behind: int, memory_gb: float):
    job = job_of(costs, behind=behind, gpu_memory_gb=memory_gb)
    expected = least(job)
    if math.isinf(expected):
        with pytest.raises(ConfigError, match="no placement fits on 4 GPUs of 45 GB"):
            search(job)
        return
    assert search(job).step_s == pytest.approx(expected)


@pytest.mark.parametrize(("count", "numbers"), [(0, 1), (1, 1), (3, 5), (5, 52)])
def test_all_partitions_are_tried_once(count: int, numbers: int):
    found = {frozenset(map(frozenset, each)) for each in partitions(tuple("abcde"[:count]))}
    assert len(list(partitions(tuple("abcde"[:count])))) == len(found) == numbers


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_the_one_found_is_not_slower_than_two_made_by_hand(gpus: int, behind: int):
    job = replace(read_job(EXAMPLE), gpus=gpus, behind=behind)
    one_pool = by_hand(job, {"rollout+actor+critic+reference": gpus})
    apart = by_hand(job, {"rollout": gpus // 2, "actor+critic+reference": gpus // 2})
    found = search(job)
    assert found.step_s <= min(one_pool.step_s, apart.step_s)
    # Few GPUs are worth most together. Many are not, because a call takes long however few rows it has.
    assert (len(found.pools) == 1) == (gpus <= 16)
    assert (found.step_s < min(one_pool.step_s, apart.step_s)) == (len(found.pools) > 1)


def test_engines_on_the_trainers_gpus_of_two_hosts_read_files():
    job = replace(read_job(EXAMPLE), gpus=16)
    assert by_hand(job, {"rollout+actor+critic+reference": 16}).transport == "checkpoint"
    assert by_hand(job, {"rollout": 8, "actor+critic+reference": 8}).transport == "broadcast"
    assert by_hand(job, {"rollout+actor+critic+reference": 8}).transport == "ipc"


def test_the_command_shows_both_beside_the_one_found(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["place", str(EXAMPLE)]) == 0
    title, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert title == "4 roles on 64 GPUs: predicted, not measured"
    assert columns.split() == ["placement", "generate", "prepare", "train", "push", "over", "step", "pools"]
    assert [row.split("  ")[0] for row in rows] == ["one pool", "engines apart", "found"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": None}, "is no job to place"),
        ({"unknown": 1}, "is no job to place: .*It has gpus, batch"),
        ({"trainer": "nobody"}, "expected the role 'nobody'"),
        ({"roles": {"actor": {"seconds": {"train": {"1": [1, 1]}}}}}, 'one role with the stage "generate"'),
        ({"roles": {"actor": {"seconds": {"train": {"1": 1}}}}}, "is no job to place"),
        ({"placements": {"short": {"rollout": 8}}}, "expected each of rollout, actor, critic, reference once"),
        ({"placements": {"large": {"rollout+actor+critic+reference": 128}}}, "takes 128 GPUs of 64"),
        ({"gpu_memory_gb": 10}, "no placement fits on rollout"),
    ],
)
def test_jobs_that_cannot_be_placed_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = json.loads(EXAMPLE.read_text()) | change
    (tmp_path / "job.json").write_text(json.dumps({name: value for name, value in given.items() if value is not None}))
    assert cli.main(["place", str(tmp_path / "job.json")]) == 2
    assert words.split(".*")[-1] in capsys.readouterr().err
