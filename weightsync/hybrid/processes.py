"""The processes of a pool at the controller: Ray actors with `torch.distributed` among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from weightsync.errors import ConfigError, PeerError
from weightsync.hybrid.dispatch import Call, Place
from weightsync.hybrid.pending import NEWS_S, Pending, Waited
from weightsync.hybrid.pool import WORKERS, ResourcePool
from weightsync.hybrid.worker import Process, Unsplit, Worker


class Processes:
    """One process at each place of a pool. A process serves all its roles, one call at a time.

    nodes: the Ray node of each process.
    names: each process's name in errors, with the address of its node.
    roles: the names of the workers' classes in them.
    """

    def __init__(self, pool: ResourcePool, timeout_s: float) -> None:
        pool.claim(WORKERS)
        self.pool, self.timeout_s = pool, timeout_s
        self.roles: set[str] = set()
        self.nodes: list[str] = []
        self.names = [f"rank {rank}" for rank in range(pool.size)]
        self._under_way: list[Pending] = []
        self._actors: list[Any] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        role: str,
        method: str,
        calls: Mapping[int, Call],
        unsplit: Unsplit | None = None,
        after: Sequence[Waited] = (),
    ) -> Pending:
        """Call a method of the workers of a role on the ranks of `calls`.

        With `unsplit`, each rank gets the call of the group and takes its part. `after` is as for `Pending`.
        """
        self._check_idle(f"{role}.{method}")
        refs, signs = {}, {}
        for rank, call in calls.items():
            begin = self._actors[rank].call.options(num_returns=2).remote
            ref, sign = begin(role, method, call.rows, unsplit, *call.args, **call.kwargs)
            refs[ref] = signs[sign] = f"{role} {self.names[rank]}"
        return self._begin(f"{role}.{method}", refs, after, signs)

    def add(self, role: str, worker: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place]:
        """Make a worker of this class in each process, and return their places."""
        self._check_idle(f"{role}.init_model")
        actors = zip(self.names, self._actors, strict=True)
        refs = {each.add.remote(role, worker, args, kwargs): f"{role} {name}" for name, each in actors}
        return self._begin(f"{role}.init_model", refs).results()

    def _begin(
        self,
        doing: str,
        refs: Mapping[Any, str],
        after: Sequence[Waited] = (),
        signs: Mapping[Any, str] | None = None,
    ) -> Pending:
        pending = Pending(doing, refs, self.timeout_s, after, signs)
        self._under_way.append(pending)
        return pending

    def check_steps(self, doing: str) -> None:
        """Wait for the calls under way, and raise the first failure not yet raised by `result`. Forget the others.

        Ranks may have taken the step or not. Their weights would be a mixture.
        """
        for each in self._under_way:
            each.settle()
        # Two calls may have the same failure: one was an argument of the other.
        failures = [*dict.fromkeys(failure for each in self._under_way if (failure := each.unasked()) is not None)]
        self._under_way = [each for each in self._under_way if each.running()]
        if failures:
            more = f", nor those of {len(failures) - 1} more failed calls" if failures[1:] else ""
            failures[0].message += f" (`result()` of this call was not asked for{more}, so {doing} has not begun)"
            raise failures[0]

    def close(self) -> None:
        """End the processes, and give the pool back."""
        if self._actors:
            for actor in self._actors:
                ray.kill(actor)
            self.pool.release(WORKERS)
        self._actors = []

    def _start(self) -> None:
        actor = ray.remote(Process)
        size = self.pool.size
        self._actors = [actor.options(**self.pool.options(rank)).remote(rank, size) for rank in range(size)]
        nodes = {each.node.remote(): name for name, each in zip(self.names, self._actors, strict=True)}
        where = Pending("node", nodes, self.timeout_s).results()
        self.nodes = [node for node, _ in where]
        self.names = [f"rank {rank} on {address}" for rank, (_, address) in enumerate(where)]
        address = where[0][1]
        (port,) = Pending("listen", {self._actors[0].listen.remote(address): self.names[0]}, self.timeout_s).results()
        seen: Counter[str] = Counter()
        joins = {}
        for name, process, node in zip(self.names, self._actors, self.nodes, strict=True):
            joins[process.join.remote(address, port, seen[node], self.timeout_s)] = name
            seen[node] += 1
        Pending("join", joins, self.timeout_s).results()

    def _check_idle(self, doing: str) -> None:
        """Raise `ConfigError` once the processes are closed.

        Raise `PeerError` while ranks are in a call that has failed on another rank. They may never return.
        """
        if not self._actors:
            raise ConfigError(f"{doing} cannot begin, because the processes are closed: make a new group")
        self._under_way = [each for each in self._under_way if each.running() or each.unasked() is not None]
        for each in self._under_way:
            if each.has_failed() and (late := each.running(NEWS_S)):
                raise PeerError(
                    f"{', '.join(late)} cannot begin {doing}: {each.doing} has failed in another process "
                    "and still runs here. Close the group, and make another on the same pool",
                    phase=doing,
                )
