"""A group of workers as one object at the controller. Its methods are the registered methods of the workers' class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from tensordict import TensorDict

from weightsync.errors import ConfigError
from weightsync.hybrid.batch import pack, unpack
from weightsync.hybrid.dispatch import Call, Dispatch, Layout, dispatch_of
from weightsync.hybrid.pending import CallFuture, Method
from weightsync.hybrid.pool import ResourcePool
from weightsync.hybrid.processes import Processes
from weightsync.hybrid.worker import Worker

_TIMEOUT_S = 3600.0


class WorkerGroup:
    """One `Worker` of a class in each process of a pool, with `torch.distributed` among the processes.

        actor = WorkerGroup(pool, Policy, config)        # each worker: Policy().init_model(config)
        reference = WorkerGroup(actor, Reference, path)  # another role in the same processes
        batch = actor.logprobs(batch)                    # waits for the result
        update = actor.update.remote(batch)              # returns at once: update.result() waits
        critic.update.remote(reference.logprobs.remote(batch))  # the workers fetch the result, the controller does not

    A process runs one call at a time. After a `PeerError` call `close`, and make another group on the same pool.

    Args:
        where: A `ResourcePool`. Or another group: this group then uses the processes of that group.
        worker: The class of the workers. The name of the class is the name of the role.
        *args: The arguments of `init_model`.
        **kwargs: The keyword arguments of `init_model`.
        timeout_s: The most seconds of each call, and of each collective between the workers. None: an hour. All roles
            of the processes share it, so only their first group takes a timeout.

    Raises:
        WorkerError: `init_model` raised another exception in a worker. The text has the traceback of the exception.
            Later calls of the group raise the same classes of errors.
        PeerError: A worker has died.
        WeightSyncError: `init_model` raised a `WeightSyncError` in a worker.
        ConfigError: An argument cannot work.
    """

    def __init__(
        self,
        where: ResourcePool | WorkerGroup,
        worker: type[Worker],
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not issubclass(worker, Worker):
            raise ConfigError(f"{worker!r} is no subclass of weightsync.hybrid.Worker")
        self._worker = worker
        if isinstance(where, WorkerGroup) and timeout_s is not None:
            raise ConfigError(f"timeout_s={timeout_s} is for the first group in the processes: give it to that group")
        self.processes: Processes = (
            where.processes if isinstance(where, WorkerGroup) else Processes(where, timeout_s or _TIMEOUT_S)
        )
        if self.role in self.processes.roles:
            raise ConfigError(f"the processes have a {self.role} already: give the second group a class of its own")
        try:
            self.layout = Layout(tuple(self.processes.add(self.role, worker, args, kwargs)))
        except BaseException:
            if not self.processes.roles:
                self.close()
            raise
        self.processes.roles.add(self.role)

    @property
    def role(self) -> str:
        """The name of the workers' class."""
        return self._worker.__name__

    def __getattr__(self, name: str) -> Method:
        dispatch = dispatch_of(getattr(self.__dict__.get("_worker"), name, None))
        if dispatch is None:
            raise AttributeError(f"{name} is no method of a {type(self).__name__}, or registered in its workers' class")
        return Method(partial(self._begin, name, dispatch))

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, registered or not, with the same arguments. Return all results."""
        found: list[Any] = self._begin(method, Dispatch.ONE_TO_ALL, *args).result()
        return found

    def close(self) -> None:
        """End the processes, with all roles in them, and give the pool back."""
        self.processes.close()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, method: str, dispatch: Dispatch, *args: Any, **kwargs: Any) -> CallFuture:
        call = Call(args, kwargs)
        unsplit = (dispatch, self.layout) if _futures([call]) else None
        split = [call] * self.layout.size if unsplit else dispatch.split(self.layout, call)
        calls = {rank: each for rank, each in enumerate(split) if each is not None}
        after = [future.pending for future in _futures(calls.values())]
        pending = self.processes.begin(self.role, method, stored_once(calls), unsplit, after)
        return CallFuture(pending, partial(collected, dispatch, self.layout, list(calls)))


def collected(dispatch: Dispatch, layout: Layout, ranks: Sequence[int], results: Sequence[Any]) -> Any:
    """Return the result of a group from the results of these ranks as they travel."""
    by_rank = dict(zip(ranks, map(unpack, results), strict=True))
    return dispatch.collect(layout, [by_rank.get(rank) for rank in range(layout.size)])


def stored_once(calls: Mapping[int, Call]) -> dict[int, Call]:
    """Return the calls as they travel. A batch for several ranks is one object in Ray's store."""
    given = _values(calls.values())
    large = {id(value): value for value in given if isinstance(value, TensorDict | CallFuture)}
    counts = Counter(map(id, given))
    stored = {key: ray.put(_sent(value)) for key, value in large.items() if counts[key] > 1}

    def of(value: Any) -> Any:
        return stored[id(value)] if id(value) in stored else _sent(value)

    return {
        rank: Call(tuple(map(of, call.args)), {name: of(value) for name, value in call.kwargs.items()}, call.rows)
        for rank, call in calls.items()
    }


def _values(calls: Iterable[Call]) -> list[Any]:
    return [value for call in calls for value in (*call.args, *call.kwargs.values())]


def _futures(calls: Iterable[Call]) -> list[CallFuture]:
    return list(dict.fromkeys(value for value in _values(calls) if isinstance(value, CallFuture)))


def _sent(value: Any) -> Any:
    return value.later() if isinstance(value, CallFuture) else pack(value)
