"""Calls of several Ray actors at once, and the wait for them: the first failure ends it and says who failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray

from weightsync.control.runtime import Deadline
from weightsync.errors import PeerError, SyncTimeoutError, WeightSyncError

_NEWS_S = 1.0
"""How long it may take, after a failure, until Ray says which actor has died. The others notice it sooner."""


class WorkerError(WeightSyncError, RuntimeError):
    """An exception that was raised in a worker, with the traceback there. `who` names the worker."""


class Pending:
    """A call that is under way. `refs` are the results of the actors that were called, by their names."""

    def __init__(self, doing: str, refs: Mapping[str, Any], timeout_s: float) -> None:
        self.doing = doing
        self.has_failed = False
        self._names = {ref: name for name, ref in refs.items()}
        self._deadline = Deadline(timeout_s)

    def results(self) -> list[Any]:
        """Wait for the call to end, and return the results.

        Raises `PeerError` where an actor died. Raises a `WeightSyncError` of an actor as it is, and anything else as a
        `WorkerError`. Raises `SyncTimeoutError` where the call takes too long.
        """
        waiting = list(self._names)
        found: dict[Any, Any] = {}
        while waiting:
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=self._deadline.left_s())
            if not ended:
                self.has_failed = True
                who = [self._names[ref] for ref in waiting]
                raise SyncTimeoutError(
                    f"no answer to {self.doing} within {self._deadline.timeout_s:g} s from {', '.join(who)}",
                    phase=self.doing,
                    waiting_for=who,
                )
            (ref,) = ended
            found[ref], error = outcome(ref)
            if error is not None:
                self.has_failed = True
                raise self._first_cause(ref, waiting)
        return [found[ref] for ref in self._names]

    def running(self) -> list[str]:
        """Return the names of the actors that have not answered yet."""
        _, waiting = ray.wait(list(self._names), num_returns=len(self._names), timeout=0, fetch_local=False)
        return [self._names[ref] for ref in waiting]

    def _first_cause(self, ended: Any, waiting: list[Any]) -> WeightSyncError:
        """Return the failure that the others are the outcome of: a death before an exception."""
        later, _ = ray.wait(waiting, num_returns=len(waiting), timeout=_NEWS_S) if waiting else ([], [])
        failed = [(ref, error) for ref in (ended, *later) if (error := outcome(ref)[1]) is not None]
        dead = [(ref, error) for ref, error in failed if isinstance(error, ray.exceptions.RayActorError)]
        ref, error = (dead or failed)[0]
        return explain(error, self._names[ref], self.doing)


class Later:
    """The result of a call of a group that is under way."""

    def __init__(self, pending: Pending, collect: Callable[[list[Any]], Any]) -> None:
        self._pending, self._collect = pending, collect

    def result(self) -> Any:
        """Wait for the result of the group. Raises what the call raises."""
        return self._collect(self._pending.results())


class Method:
    """A method of a group. Calling it waits for the result; `remote` returns a `Later` at once."""

    def __init__(self, begin: Callable[..., Later]) -> None:
        self.remote = begin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()


def outcome(ref: Any) -> tuple[Any, BaseException | None]:
    """Return the result of a call that has ended, and what it raised."""
    try:
        return ray.get(ref), None
    except ray.exceptions.RayError as error:
        return None, error


def explain(error: BaseException, who: str, doing: str) -> WeightSyncError:
    """Return an error of Ray as one that names the actor, with the traceback from there."""
    if isinstance(error, ray.exceptions.RayActorError):
        return PeerError(f"{who} died before it answered {doing}: {error}", who=who, phase=doing)
    cause = getattr(error, "cause", None)
    if isinstance(cause, WeightSyncError):
        cause.who = cause.who or who
        cause.__cause__ = error  # whose text is the remote traceback
        return cause
    return WorkerError(f"{doing} raised {type(cause or error).__name__}: {error}", who=who, phase=doing)
