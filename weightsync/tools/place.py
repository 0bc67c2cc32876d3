"""`weightsync place`: search for the placement of a job's roles with the least predicted seconds of one step.

As in the HybridFlow paper's auto-mapping, the search tries each partition of the roles, each number of GPUs and each
parallel size. Roles of one pool take turns, and pools compute at the same time.

    a stage of a role    the measured seconds of a call on one group of this size, and of each of its rows:
                         call_s + ceil(batch * size / GPUs) * row_s
    a stage              the longest of the pools, each the sum of its roles
    a step               the sum of the stages and the push. With `behind` over 0 and engines on GPUs of their own:
                         the longer of the stage "generate" and the sum of the others, and the push
    the push             the fastest possible transport of `weightsync plan --simulate`
    memory of a GPU      the sum over the roles of its pool of gb / size + sharded_gb / GPUs

All but `run` and `read_job` is pure.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError
from weightsync.tools import simulate
from weightsync.tools.tables import print_line, print_table

if TYPE_CHECKING:
    from rich.console import Console

GENERATE = "generate"
_SHARED, _APART = ("ipc", "checkpoint"), ("ipc", "broadcast", "checkpoint")
"""The transports between a trainer and engines on the same GPUs, and on different ones."""


@dataclass(frozen=True)
class Role:
    """A model's use in a job.

    seconds: the measured seconds of a call and of each row, on one model-parallel group, by stage and parallel size.
    gb: the memory of a whole model on a model-parallel group.
    sharded_gb: the memory that all GPUs of the pool share, such as an optimizer's under FSDP.
    """

    seconds: Mapping[str, Mapping[int, tuple[float, float]]]
    gb: float = 0.0
    sharded_gb: float = 0.0

    @property
    def sizes(self) -> list[int]:
        """The parallel sizes with measured seconds in each stage."""
        return sorted(set.intersection(*(set(by_size) for by_size in self.seconds.values())))


@dataclass(frozen=True)
class Job:
    """A job to place.

    roles: the engines' role has the stage "generate", and `trainer` is the role that pushes to it.
    behind: as for `Rollouts`.
    placements: placements made by hand, to compare with: the GPUs of each pool by the names of its roles.
    """

    gpus: int
    batch: int
    weights: str
    trainer: str
    roles: Mapping[str, Role]
    gpu_memory_gb: float = 80.0
    behind: int = 0
    topology: str = ""
    placements: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def engines(self) -> str:
        return next(name for name, role in self.roles.items() if GENERATE in role.seconds)

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(stage for role in self.roles.values() for stage in role.seconds))


@dataclass(frozen=True)
class Pool:
    """The parallel size of each role on a number of GPUs."""

    gpus: int
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Placement:
    """Pools, and the predicted seconds of each stage and of the push over a transport."""

    pools: tuple[Pool, ...]
    stages: Mapping[str, float]
    transport: str
    push_s: float
    step_s: float


def read_job(path: Path) -> Job:
    """Return the job of a JSON file. Raise `ConfigError` for a file that describes none."""
    try:
        given = json.loads(path.read_bytes())
        given["roles"] = {
            name: Role(**{**role, "seconds": {stage: _by_size(found) for stage, found in role["seconds"].items()}})
            for name, role in given["roles"].items()
        }
        job = Job(**given)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(each.name for each in fields(Job))
        raise ConfigError(f"{path} is no job to place: {error!r}. It has {names}: docs/use/controller.md") from error
    if job.trainer not in job.roles or sum(GENERATE in role.seconds for role in job.roles.values()) != 1:
        raise ConfigError(f'{path}: expected the role {job.trainer!r}, and one role with the stage "{GENERATE}"')
    for name, role in job.roles.items():
        if not role.seconds or not role.sizes:
            raise ConfigError(f"{path}: the role {name!r} has no parallel size with measured seconds in each stage")
    return job


def search(job: Job) -> Placement:
    """Return the placement with the least seconds of a step. Raise `ConfigError` if none fits."""
    gpus_per_host = simulate.Topology.parse(job.topology).gpus_per_host
    # Pools of these sizes fill hosts, and a group of a smaller size lies on one.
    sizes = [count for count in range(1, job.gpus + 1) if not count % gpus_per_host or not gpus_per_host % count]
    found = (
        placement
        for partition in partitions(tuple(job.roles))
        for counts in _allocations(sizes, len(partition), job.gpus)
        for placement in placements(job, list(zip(partition, counts, strict=True)))
    )
    return _best(found, f"{job.gpus} GPUs of {job.gpu_memory_gb:g} GB")


def by_hand(job: Job, pools: Mapping[str, int]) -> Placement:
    """Return the best parallel sizes on given pools. Raise `ConfigError` if none fits, or if roles are missing."""
    partition = [(tuple(names.split("+")), count) for names, count in pools.items()]
    if sorted(name for names, _ in partition for name in names) != sorted(job.roles):
        raise ConfigError(f"a placement has the pools {', '.join(pools)}; expected each of {', '.join(job.roles)} once")
    if sum(pools.values()) > job.gpus:
        raise ConfigError(f"a placement takes {sum(pools.values())} GPUs of {job.gpus}")
    return _best(placements(job, partition), ", ".join(pools))


def placements(job: Job, partition: Sequence[tuple[tuple[str, ...], int]]) -> Iterator[Placement]:
    """Yield the placement of each choice of parallel sizes that fits on these pools."""
    for pools in product(*(_fitting(job, names, count) for names, count in partition)):
        yield _placement(job, pools)


def partitions(names: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    """Yield each partition of names into sets."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    for found in partitions(rest):
        yield [(first,), *found]
        for at, names_of_one in enumerate(found):
            yield [*found[:at], (first, *names_of_one), *found[at + 1 :]]


def _fitting(job: Job, names: Sequence[str], gpus: int) -> list[Pool]:
    """Return the pools of these roles with enough memory. Leave out pools slower in each stage than another."""
    found: dict[Pool, tuple[float, ...]] = {}
    for sizes in product(*([size for size in job.roles[name].sizes if not gpus % size] for name in names)):
        pool = Pool(gpus, tuple(zip(names, sizes, strict=True)))
        roles = [(job.roles[name], size) for name, size in pool.sizes]
        if sum(role.gb / size + role.sharded_gb / gpus for role, size in roles) <= job.gpu_memory_gb:
            found[pool] = tuple(_seconds(job, pool, stage) for stage in job.stages)

    def size_of_engines(pool: Pool) -> int:
        return dict(pool.sizes).get(job.engines, 0)  # the push depends on it

    return [
        pool
        for pool, slow in found.items()
        if not any(
            fast != slow and size_of_engines(other) == size_of_engines(pool)
            and all(one <= two for one, two in zip(fast, slow, strict=True))
            for other, fast in found.items()
        )
    ]  # fmt: skip


def _seconds(job: Job, pool: Pool, stage: str) -> float:
    """Return the seconds of a stage on a pool, one role after the other."""
    costs = [(size, job.roles[name].seconds.get(stage)) for name, size in pool.sizes]
    known = [(size, by_size[size]) for size, by_size in costs if by_size is not None]
    return sum(call_s + math.ceil(job.batch * size / pool.gpus) * row_s for size, (call_s, row_s) in known)


def _placement(job: Job, pools: tuple[Pool, ...]) -> Placement:
    stages = {stage: max(_seconds(job, pool, stage) for pool in pools) for stage in job.stages}
    trainer, engines = (next(pool for pool in pools if name in dict(pool.sizes)) for name in (job.trainer, job.engines))
    transport, push_s = _push(job.weights, job.topology, trainer, engines, dict(engines.sizes)[job.engines])
    compute_s = sum(stages.values())
    if job.behind and len(engines.sizes) == 1:
        compute_s = max(stages[GENERATE], compute_s - stages[GENERATE])
    return Placement(pools, stages, transport, push_s, compute_s + push_s)


@cache
def _push(weights: str, topology: str, trainer: Pool, engines: Pool, size: int) -> tuple[str, float]:
    """Return the fastest transport from a trainer's pool to engines of this size, and its seconds."""
    given, usable = simulate.Topology.parse(topology), _SHARED if trainer == engines else _APART
    gpus = trainer.gpus if trainer == engines else trainer.gpus + engines.gpus
    hosts = math.ceil(gpus / given.gpus_per_host)
    t = replace(given, hosts=hosts, ranks=trainer.gpus, engines=engines.gpus // size, tp=size)
    predicted = simulate.predict(simulate.bfloat16_bytes(weights), t)
    possible = [each for each in predicted if each.impossible is None and each.transport in usable]
    best = min(possible, key=lambda each: each.seconds, default=simulate.Prediction("none", {"push": math.inf}))
    return best.transport, best.seconds


def _allocations(sizes: Sequence[int], pools: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of GPUs of each pool, with a sum of at most `gpus`."""
    if not pools:
        yield ()
        return
    for size in sizes:
        if size <= gpus - (pools - 1):
            for others in _allocations(sizes, pools - 1, gpus - size):
                yield size, *others


def _best(found: Iterator[Placement], where: str) -> Placement:
    best = min(found, key=lambda each: each.step_s, default=None)
    if best is None or math.isinf(best.step_s):
        raise ConfigError(f"no placement fits on {where}: give more GPUs, or larger parallel sizes with their seconds")
    return best


def _by_size(seconds: Mapping[str, Any]) -> dict[int, tuple[float, float]]:
    return {int(size): (float(call_s), float(row_s)) for size, (call_s, row_s) in seconds.items()}


def run(options: Namespace, console: Console) -> bool:
    """Print the best placement below those made by hand. Return True."""
    job = read_job(options.job)
    found = {name: by_hand(job, pools) for name, pools in job.placements.items()}
    found["found"] = search(job)
    print_line(console, f"{len(job.roles)} roles on {job.gpus} GPUs: predicted, not measured\n")
    columns = ("placement", *job.stages, "push", "over", "step", "pools")
    rows = [
        (
            name,
            *(simulate.rounded(each.stages[stage]) for stage in job.stages),
            simulate.rounded(each.push_s),
            each.transport,
            simulate.rounded(each.step_s),
            "; ".join(_shown(pool) for pool in each.pools),
        )
        for name, each in found.items()
    ]
    print_table(console, columns, rows, "<" + ">" * (len(job.stages) + 1) + "<><")
    return True


def _shown(pool: Pool) -> str:
    return f"{pool.gpus} GPUs: " + ", ".join(f"{name} x{size}" for name, size in pool.sizes)
