"""Resource pools: places on nodes for the processes of a group, each with its share of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weightsync.errors import ConfigError, PlacementError

WORKERS, ENGINES = "WorkerGroup", "RolloutGroup"


@dataclass(eq=False)
class Reserved:
    """The resources of one process. `node` is Ray's placement group of all places on the node.

    claimed: the kinds of groups at the place.
    """

    node: Any
    bundle: int
    claimed: set[str] = field(default_factory=set)


class ResourcePool:
    """Places for processes: `ResourcePool([4, 4])` has four on one node and four on another, or on the same.

    A place carries one process of a `WorkerGroup`, one of a `RolloutGroup`, or one of each. Two processes share its
    GPU. `split` and `merge` make other pools of the same places. Ray reserves the resources until `close`. If a node
    dies, Ray reserves its places on another node as soon as one has room.

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
        self.gpus, self.cpus, self.timeout_s = gpus, cpus, timeout_s
        self._owns = True
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        needed = [{name: amount * count for name, amount in bundle.items()} for count in processes]
        if (unplaced := place(needed, nodes)) is not None:
            raise PlacementError(
                f"a pool of {list(processes)} processes is larger than the cluster: no node is left for {unplaced}; "
                f"nodes have {[{name: node.get(name, 0) for name in bundle} for node in nodes]}"
            )
        on_nodes = [(placement_group([bundle] * count, strategy="STRICT_PACK"), count) for count in processes]
        self._places = [Reserved(node, bundle) for node, count in on_nodes for bundle in range(count)]
        try:
            self.wait_until_reserved()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self._places)

    @property
    def processes(self) -> tuple[int, ...]:
        """The number of processes on each node."""
        return tuple(len(places) for places in self._by_node().values())

    def split(self, sizes: Sequence[int]) -> list[ResourcePool]:
        """Return pools of these numbers of places, in order. A place of a part is a place of this pool as well.

        Raises `ConfigError` if the sum of the sizes differs from the size of the pool.
        """
        if not sizes or min(sizes) < 1 or sum(sizes) != self.size:
            raise ConfigError(f"a pool of {self.size} places cannot be split into {list(sizes)}; expected all places")
        return [self._with(self._places[start:end]) for start, end in pairwise(accumulate(sizes, initial=0))]

    def merge(self, *others: ResourcePool) -> ResourcePool:
        """Return a pool of all places of this pool and others. Places of one node follow each other.

        Raises `ConfigError` if two pools have a place in common, or places of different kinds.
        """
        kinds = [f"{each.gpus} GPUs and {each.cpus:g} CPUs" for each in (self, *others)]
        if len(set(kinds)) > 1:
            raise ConfigError(f"pools cannot be merged, because their processes have {', '.join(kinds)}")
        merged = self._with([place for each in (self, *others) for place in each._places])
        if len(set(merged._places)) != merged.size:
            raise ConfigError("pools cannot be merged, because they have places in common: merge parts of one split")
        merged._places = [place for places in merged._by_node().values() for place in places]
        return merged

    def overlaps(self, other: ResourcePool) -> bool:
        """Return whether two pools have a place in common."""
        return not set(self._places).isdisjoint(other._places)

    def claim(self, kind: str) -> None:
        """Give the pool to a group of this kind.

        Raises `ConfigError` while another group of this kind has it. Raises `PlacementError` if a node of the pool has
        died, and no other has room for its places.
        """
        if any(kind in place.claimed for place in self._places):
            raise ConfigError(
                f"two {kind}s claim the same places of a pool of {list(self.processes)} processes, and so one GPU: "
                "give each a pool of its own" + (", or the first in place of the pool" if kind == WORKERS else "")
            )
        self.wait_until_reserved()
        for place in self._places:
            place.claimed.add(kind)

    def release(self, kind: str) -> None:
        """Take the pool back from the group of this kind."""
        for place in self._places:
            place.claimed.discard(kind)

    @property
    def is_shared(self) -> bool:
        """Whether both kinds of groups have a place of the pool."""
        return any(len(place.claimed) > 1 for place in self._places)

    def options(self, process: int) -> dict[str, Any]:
        """Return Ray's options for the actor of a group at this place."""
        at = self._places[process]
        strategy = PlacementGroupSchedulingStrategy(at.node, placement_group_bundle_index=at.bundle)
        # One half for each kind of group: with more, Ray would not start both on one GPU.
        return {"num_cpus": self.cpus / 2, "num_gpus": self.gpus / 2, "scheduling_strategy": strategy}

    def node_of(self, process: int) -> tuple[str, str]:
        """Return the id and the address of the node of a place."""
        at = self._places[process]
        node = placement_group_table(at.node)["bundles_to_node_id"][at.bundle]
        return node, next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node)

    def wait_until_reserved(self) -> None:
        """Wait until the cluster has reserved all places of the pool, also after a node's death.

        Raises `PlacementError` after the timeout.
        """
        ready = {node.ready(): len(places) for node, places in self._by_node().items()}
        _, waiting = ray.wait(list(ready), num_returns=len(ready), timeout=self.timeout_s)
        if waiting:
            lacking = [count for each, count in ready.items() if each in waiting]
            raise PlacementError(
                f"a pool of {list(self.processes)} processes found no node for {lacking} of them within "
                f"{self.timeout_s:g} s. Close other pools, end other jobs of the cluster, or replace dead nodes"
            )

    def close(self) -> None:
        """Give the resources back to the cluster. Ray ends all processes on them.

        Raises `ConfigError` for a pool of `split` or `merge`: close the pools that these were made of.
        """
        if not self._owns:
            raise ConfigError("a pool made by split or merge reserves nothing: close the pools that it was made of")
        for node in self._by_node():
            remove_placement_group(node)

    def _with(self, places: Iterable[Reserved]) -> ResourcePool:
        """Return a pool of these places, which are reserved already."""
        other = copy(self)
        other._places, other._owns = list(places), False
        return other

    def _by_node(self) -> dict[Any, list[Reserved]]:
        found: dict[Any, list[Reserved]] = {}
        for place in self._places:
            found.setdefault(place.node, []).append(place)
        return found


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
