"""Whom the error of a call blames, by the error of Ray."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from weightsync.errors import EngineError, PeerError
from weightsync.hybrid.pending import NEWS_S, Pending, WorkerError, explain, has_died

LOST = ObjectLostError("a1", None, "")


def raised_by_an_actor(cause: Exception) -> Exception:
    """Return Ray's error for an exception in an actor."""
    found: Exception = RayTaskError("take", "Traceback ...", cause).as_instanceof_cause()
    assert isinstance(found, type(cause))
    return found


@pytest.mark.parametrize("error", [ActorDiedError(), LOST])
def test_a_dead_actor_is_named(error: Exception):
    found = explain(error, "rank 1", "take")
    assert isinstance(found, PeerError)
    assert found.who == "rank 1"
    assert "rank 1 died before it answered take" in str(found)


def test_an_actor_that_fetches_a_lost_value_has_not_died():
    found = explain(raised_by_an_actor(LOST), "rank 1", "take")
    assert isinstance(found, PeerError)
    assert found.who is None
    assert "a value for rank 1 in take was lost with its node" in str(found)


@pytest.mark.parametrize("cause", [ActorDiedError(), ValueError("odd")])
def test_an_actor_that_raises_is_named_with_the_exception(cause: Exception):
    """Another actor may have died."""
    found = explain(raised_by_an_actor(cause), "rank 1", "take")
    assert isinstance(found, WorkerError)
    assert found.who == "rank 1"
    assert f"take raised {type(cause).__name__}" in str(found)


def test_an_actors_own_error_is_kept():
    cause = EngineError("odd", who="engine 0")
    assert explain(raised_by_an_actor(cause), "rank 1", "push") is cause


def test_a_death_decides_whether_an_actor_has_died(monkeypatch: pytest.MonkeyPatch):
    for error, dead in ((ActorDiedError(), True), (raised_by_an_actor(ActorDiedError()), False)):

        def get(ref: object, timeout: float, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
        monkeypatch.setattr(ray, "get", get)
        assert has_died("a call") is dead


def test_large_exceptions_of_all_calls_are_awaited_together(monkeypatch: pytest.MonkeyPatch):
    waits = []

    def wait(refs: list[str], timeout: float, **_: object) -> tuple[list[str], list[str]]:
        waits.append(timeout)
        return refs, []

    def get(_: str, timeout: float) -> None:
        waits.append(timeout)
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    call = Pending("generate", {str(number): f"engine {number}" for number in range(64)}, 60.0)
    assert not call.has_failed()
    assert sum(waits) == NEWS_S
