"""Resource pools: places on nodes for the processes of a group, each with its share of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weightsync.errors import ConfigError, PlacementError

WORKERS, ENGINES = "WorkerGroup", "RolloutGroup"


class ResourcePool:
    """Places for processes: `ResourcePool([4, 4])` has four on one node and four on another, or on the same.

    A pool carries one `WorkerGroup`, one `RolloutGroup`, or one of each. Two groups share its GPUs. Ray reserves the
    pool's resources until `close`. If a node dies, Ray reserves its places on another node as soon as one has room.

    Args:
        processes: The number of processes on each node.
        gpus: The GPUs of each process, 0 or 1. None means one if the cluster has GPUs, else none.
        cpus: The CPUs of each process.
        timeout_s: The wait for the cluster to have these resources free. Each group that gets the pool waits as long
            again.

    Raises:
        ConfigError: An argument cannot work, or Ray is not running.
        PlacementError: The pool is larger than the cluster, or its resources do not become free.
    """

    def __init__(
        self, processes: Sequence[int], *, gpus: int | None = None, cpus: float = 1.0, timeout_s: float = 60.0
    ) -> None:
        if not processes or min(processes) < 1:
            raise ConfigError(f"processes={list(processes)}; expected the number of processes on each node")
        if gpus not in (None, 0, 1):
            raise ConfigError(f"gpus={gpus}; expected 0 or 1, because a process has one GPU: give it more processes")
        if not ray.is_initialized():
            raise ConfigError("Ray is not running in this process: call ray.init first")
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if gpus is None:
            gpus = int(any(node.get("GPU") for node in nodes))
        self.processes, self.gpus, self.cpus, self.timeout_s = tuple(processes), gpus, cpus, timeout_s
        self._claimed: set[str] = set()
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        needed = [{name: amount * count for name, amount in bundle.items()} for count in processes]
        if (unplaced := place(needed, nodes)) is not None:
            raise PlacementError(
                f"a pool of {list(processes)} processes is larger than the cluster: no node is left for {unplaced}; "
                f"nodes have {[{name: node.get(name, 0) for name in bundle} for node in nodes]}"
            )
        self._placement = [placement_group([bundle] * count, strategy="STRICT_PACK") for count in processes]
        try:
            self.wait_until_reserved()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The number of processes."""
        return sum(self.processes)

    def claim(self, kind: str) -> None:
        """Give the pool to a group of this kind.

        Raises `ConfigError` while another group of this kind has it. Raises `PlacementError` if a node of the pool has
        died, and no other has room for its places.
        """
        if kind in self._claimed:
            raise ConfigError(
                f"two {kind}s claim the same places of a pool of {list(self.processes)} processes, and so one GPU: "
                "give each a pool of its own" + (", or the first in place of the pool" if kind == WORKERS else "")
            )
        self.wait_until_reserved()
        self._claimed.add(kind)

    def release(self, kind: str) -> None:
        """Take the pool back from the group of this kind."""
        self._claimed.discard(kind)

    @property
    def is_shared(self) -> bool:
        """Whether both kinds of groups have the pool."""
        return len(self._claimed) > 1

    def options(self, process: int) -> dict[str, Any]:
        """Return Ray's options for the actor of a group at this place."""
        node, bundle = 0, process
        while bundle >= self.processes[node]:
            bundle -= self.processes[node]
            node += 1
        strategy = PlacementGroupSchedulingStrategy(self._placement[node], placement_group_bundle_index=bundle)
        # One half for each kind of group: with more, Ray would not start both on one GPU.
        return {"num_cpus": self.cpus / 2, "num_gpus": self.gpus / 2, "scheduling_strategy": strategy}

    def wait_until_reserved(self) -> None:
        """Wait until the cluster has reserved all places of the pool, also after a node's death.

        Raises `PlacementError` after the timeout.
        """
        ready = [group.ready() for group in self._placement]
        _, waiting = ray.wait(ready, num_returns=len(ready), timeout=self.timeout_s)
        if waiting:
            lacking = [count for count, each in zip(self.processes, ready, strict=True) if each in waiting]
            raise PlacementError(
                f"a pool of {list(self.processes)} processes found no node for {lacking} of them within "
                f"{self.timeout_s:g} s. Close other pools, end other jobs of the cluster, or replace dead nodes"
            )

    def close(self) -> None:
        """Give the resources back to the cluster. Ray ends all processes on them."""
        for group in self._placement:
            remove_placement_group(group)


def place(needed: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> Mapping[str, float] | None:
    """Return the first of `needed` without a node, or None if all fit. The largest look for a node first."""
    free = [dict(node) for node in nodes]
    for each in sorted(needed, key=lambda amounts: sorted(amounts.items(), reverse=True), reverse=True):
        fitting = (node for node in free if all(node.get(name, 0) >= amount for name, amount in each.items()))
        node = next(fitting, None)
        if node is None:
            return each
        for name, amount in each.items():
            node[name] -= amount
    return None
