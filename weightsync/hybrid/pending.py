"""Pending calls of several Ray actors: the first failure ends the wait, and its error names the actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import ray

from weightsync.errors import ConfigError, PeerError, SyncTimeoutError, WeightSyncError
from weightsync.net.runtime import Deadline

_DEATHS = ray.exceptions.RayActorError, ray.exceptions.ObjectLostError
"""The second is raised if an actor had answered, and its node died before the answer was fetched."""
NEWS_S = 1.0
"""Seconds that a failed call waits for the other actors' results.

The peers of a dead actor raise before Ray reports its death, and the death is the first cause.
"""


class WorkerError(WeightSyncError, RuntimeError):
    """An exception from a worker, with its traceback. `who` names the worker."""


class Waited(Protocol):
    """A call in progress."""

    @property
    def refs(self) -> list[Any]:
        """The results of the actors at Ray."""

    def results(self) -> list[Any]:
        """Wait for the results of the actors, in the order of `refs`."""

    def late(self) -> tuple[str, list[str]]:
        """Return the method without all answers so far, and the names of the actors without an answer."""

    def failure(self) -> WeightSyncError | None:
        """Return the first cause, if the call has failed so far."""


class Pending:
    """A call in progress.

    names: the actors' names by their results at Ray.
    after: calls with results that are arguments of this call. If one fails, no actor runs this call.
    signs: the same names by results without values. They show a failure without fetching any value. None: `names`.
    """

    def __init__(
        self,
        doing: str,
        names: Mapping[Any, str],
        timeout_s: float,
        after: Sequence[Waited] = (),
        signs: Mapping[Any, str] | None = None,
    ) -> None:
        self.doing = doing
        self._failure: WeightSyncError | None = None
        self._names, self._signs = names, signs or names
        self._after = after
        self._deadline = Deadline(timeout_s)

    @property
    def refs(self) -> list[Any]:
        return list(self._names)

    def results(self) -> list[Any]:
        """Wait for the call to end, and return the results.

        Raises `PeerError` if an actor died. Raises an actor's `WeightSyncError` unchanged, and its other exceptions as
        a `WorkerError`. Raises `SyncTimeoutError` after the deadline.
        """
        try:
            # `get` raises as soon as one call has raised.
            found: list[Any] = ray.get(self.refs, timeout=self._deadline.left_s())
            self._after = ()  # or a chain of calls would keep the results of all in Ray's store
            return found
        except ray.exceptions.GetTimeoutError:
            self._failure = self._too_late()
        except ray.exceptions.RayError as error:
            self._failure = self._first_cause(error)
        raise self._failure

    def running(self, wait_s: float = 0.0) -> list[str]:
        """Return the names of the actors without an answer, if all have not answered within `wait_s`."""
        return [self._signs[ref] for ref in self._by_now(wait_s)[1]]

    def has_ended(self) -> bool:
        """Return whether `results` returns or raises at once."""
        return self._deadline.passed() or not self.running() or self.has_failed()

    def settle(self) -> None:
        """Wait until all actors have answered, or one has failed, or the deadline has passed. Fetches no result."""
        while not self.has_failed() and self.running(min(NEWS_S, self._deadline.left_s())):
            if self._deadline.passed():
                self._failure = self._too_late()

    def unasked(self) -> WeightSyncError | None:
        """Return the failure so far, unless it was raised by a call's `results`."""
        failure = self.failure()
        # An exception gets a traceback when it is raised, and a call has the failure of its arguments.
        return failure if failure is not None and failure.__traceback__ is None else None

    def late(self) -> tuple[str, list[str]]:
        for each in self._after:
            if (found := each.late())[1]:
                return found
        return self.doing, self.running()

    def has_failed(self) -> bool:
        """Return whether an actor has raised or died, or `results` has given up.

        Fetches the signs of ended calls. Calls without `signs` have their results in the place of these.
        """
        return self._failure is not None or any(error is not None for _, error in self._ended())

    def failure(self) -> WeightSyncError | None:
        if self._failure is None and self.has_failed():
            self._failure = self._first_cause()
        return self._failure

    def _by_now(self, wait_s: float = 0.0) -> tuple[list[Any], list[Any]]:
        """Return the refs with results, and the refs without results so far."""
        ended, waiting = ray.wait(list(self._signs), num_returns=len(self._signs), timeout=wait_s, fetch_local=False)
        return ended, waiting

    def _ended(self, wait_s: float = 0.0) -> list[tuple[str, Exception | None]]:
        """Return the actors of ended calls, with their exceptions. Large ones come from all nodes within `NEWS_S`."""
        if ended := self._by_now(wait_s)[0]:
            ray.wait(ended, num_returns=len(ended), timeout=NEWS_S)
        return [(self._signs[ref], raised(ref, 0.0)) for ref in ended]

    def _too_late(self) -> SyncTimeoutError:
        doing, who = self.late()
        text = f"no answer to {doing} within {self._deadline.timeout_s:g} s from {', '.join(who)}"
        return SyncTimeoutError(text, phase=self.doing, waiting_for=who)

    def _first_cause(self, seen: Exception | None = None) -> WeightSyncError:
        """Return the failure that caused the others: an earlier call's, and a death before an exception.

        seen: Ray's error, if a value was lost or cannot be read here.
        """
        for each in self._after:
            if (earlier := each.failure()) is not None:
                return earlier
        found = self._ended(NEWS_S)
        if seen is not None:  # a value may be lost with its node
            found += [(who, raised(ref, 0.0)) for ref, who in self._names.items()]
        failed = [(who, error) for who, error in found if error is not None]
        if not failed and seen is not None:
            return explain(seen, ", ".join(self._names.values()), self.doing)
        dead = [(who, error) for who, error in failed if _is_death(error)]
        who, error = (dead or failed)[0]
        return explain(error, who, self.doing)


@dataclass(frozen=True)
class Later:
    """A `CallFuture` on its way to an actor. The actor fetches the results from the actors of that call."""

    refs: list[Any]
    collect: Callable[[list[Any]], Any]

    def fetch(self) -> Any:
        """Wait for the result in the actor. Raise Ray's error if the call has failed."""
        return self.collect(ray.get(self.refs))


class CallFuture:
    """The result of a group's call in progress.

    It can be an argument of another `WorkerGroup`'s call. The workers then fetch the result, and the controller does
    not.
    """

    def __init__(self, pending: Waited, collect: Callable[[list[Any]], Any]) -> None:
        self.pending, self._collect = pending, collect

    def later(self) -> Later:
        """Return the result as an argument."""
        return Later(self.pending.refs, self._collect)

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a CallFuture is inside of another argument. Give it as an argument of its own, or give its `result()`"
        )

    def result(self) -> Any:
        """Wait for the result of the group.

        Returns:
            The result, joined by the method's dispatch mode.

        Raises:
            WorkerError: A worker raised. The text has its traceback.
            PeerError: A worker or engine has died.
            WeightSyncError: A worker or engine raised it.
        """
        return self._collect(self.pending.results())


class Method:
    """A method of a group. Calling it waits for the result; `remote` returns a `CallFuture` at once."""

    def __init__(self, begin: Callable[..., CallFuture]) -> None:
        self.remote = begin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()


def raised(ref: Any, wait_s: float = NEWS_S) -> Exception | None:
    """Return the exception of a call that has ended, or None if it has raised none.

    wait_s: the most seconds for a large exception, or a large value, to come from another node.
    """
    try:
        ray.get(ref, timeout=wait_s)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        found: Exception = error
        return found
    return None


def has_died(ref: Any) -> bool:
    """Return whether an actor has died. `ref` is a call that takes no time. A busy actor has not died."""
    ended, _ = ray.wait([ref], timeout=NEWS_S)
    return bool(ended) and _is_death(raised(ref))


def _is_death(error: BaseException | None) -> bool:
    """Return whether an actor has died. An actor that raises one of these errors has met the death of another."""
    return isinstance(error, _DEATHS) and not isinstance(error, ray.exceptions.RayTaskError)


def explain(error: BaseException, who: str, doing: str) -> WeightSyncError:
    """Return an error that names the actor, for an error of Ray. It keeps the actor's traceback."""
    if _is_death(error):
        return PeerError(f"{who} died before it answered {doing}: {error}", who=who, phase=doing)
    cause = getattr(error, "cause", None)
    if isinstance(cause, ray.exceptions.ObjectLostError):
        return PeerError(f"a value for {who} in {doing} was lost with its node: {error}", phase=doing)
    if isinstance(cause, WeightSyncError):
        cause.who = cause.who or who
        cause.__cause__ = error  # its text has the remote traceback
        return cause
    return WorkerError(f"{doing} raised {type(cause or error).__name__}: {error}", who=who, phase=doing)
