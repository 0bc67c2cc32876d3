"""The trainer's ranks as one group: what one knows all know, and what fails on one fails on all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ranks import run_ranks

from weightsync.channel import Hub
from weightsync.deadline import Deadline
from weightsync.errors import (
    ConfigError,
    DigestError,
    ManifestError,
    PeerError,
    SyncTimeoutError,
    WeightSyncError,
)
from weightsync.ranks import RankGroup, _broadcast_text

RANKS = 3


@contextmanager
def group_of(rank: int, timeout_s: float = 10.0) -> Iterator[RankGroup]:
    """Collective: every rank calls this."""
    hub = Hub() if rank == 0 else None
    group = None
    try:
        group = RankGroup(hub, timeout_s)
        yield group
    finally:
        if group is not None:
            group.close()
        if hub is not None:
            hub.close()


def outcome(group: RankGroup, work: Callable[[], Any]) -> WeightSyncError:
    """What a push would raise here when `work` fails."""
    try:
        work()
    except WeightSyncError as error:
        return group.fail(error)
    raise AssertionError("it did not fail")


def steps(group: RankGroup) -> None:
    """Collective: what a push does, until somebody fails."""
    for _ in range(100):
        group.gather(None, "gather")
        group.share(None, "gather")


def raising(error: Exception) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def test_alone_there_is_nobody_to_talk_to():
    group = RankGroup(None, 5.0)
    assert (group.rank, group.size) == (0, 1)
    assert group.gather({"a": 1}, "plan") == [{"a": 1}]
    assert group.share({"a": 1}, "plan") == {"a": 1}
    started = time.monotonic()
    group.idle(0.05)
    assert time.monotonic() - started >= 0.05
    error = DigestError("m")
    assert group.fail(error) is error
    group.close()


def test_values_reach_every_rank():
    run_ranks(_values, RANKS)


def _values(rank: int) -> None:
    with group_of(rank) as group:
        assert (group.rank, group.size, group.host) == (rank, RANKS, "127.0.0.1")
        for value in ([rank, None, "x" * rank], {"of": rank}, bytes([rank]) * (8 << 20)):
            gathered = group.gather(value, "plan")
            assert type(gathered) is list
            if rank == 0:
                assert gathered[0] == value
                assert len(gathered) == RANKS
            else:
                assert gathered == []
            shared = group.share(gathered, "plan")
            assert shared[rank] == value
        group.idle(0.01)
        group.gather(None, "plan")  # so that rank 0 does not leave while others are idle
        assert group.share("zero" if rank == 0 else "ignored", "plan") == "zero"
        # Rank 0 may be away for longer than the others would wait for an engine: its own waits have deadlines.
    with group_of(rank, 2.0) as group:
        if rank == 0:
            time.sleep(3.0)
        assert group.share(7, "load") == 7
    with group_of(rank, 0.2) as group:
        if rank == 0:
            time.sleep(2.5)
        assert group.share(7, "load", away_s=5.0) == 7


def test_one_ranks_failure_is_everybodys():
    run_ranks(_failures, RANKS)


def _failures(rank: int) -> None:
    for failing in range(RANKS):
        # In the middle of a step, and in a wait that polls.
        for wait in (steps, idle_for_long):
            with group_of(rank) as group:
                error = ManifestError("rows differ", missing=["a"], who=f"trainer rank {failing}", phase="plan")
                started = time.monotonic()
                raised = outcome(group, raising(error) if rank == failing else lambda g=group, w=wait: w(g))
                assert type(raised) is ManifestError
                assert str(raised) == f"rows differ [trainer rank {failing}, phase plan]"
                assert raised.missing == ["a"]
                assert time.monotonic() - started < 5
    # Several at once: all raise one of them, the same one.
    for _ in range(5):
        with group_of(rank) as group:
            mine = [ConfigError("zero"), DigestError("one"), ManifestError("two")][rank]
            raised = outcome(group, raising(mine))
        assert_agreed(rank, raised)
    for _ in range(5):
        with group_of(rank) as group:
            mine = [None, DigestError("one"), ManifestError("two")][rank]
            raised = outcome(group, lambda g=group: steps(g)) if mine is None else outcome(group, raising(mine))
        assert str(raised) in ("one", "two")
        assert_agreed(rank, raised)


def idle_for_long(group: RankGroup) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        group.idle(0.001)


def assert_agreed(rank: int, raised: WeightSyncError) -> None:
    with group_of(rank) as group:
        said = group.share(group.gather(raised.to_fields(), "test"), "test")
    assert said == [said[0]] * RANKS


def test_a_rank_that_dies_is_named():
    run_ranks(_death, RANKS, 2)


def _death(rank: int, dying: int) -> None:
    with group_of(rank, 20.0) as group:
        group.share(group.gather(rank, "plan"), "plan")
        if rank == dying:
            os._exit(0)
        started = time.monotonic()
        raised = outcome(group, lambda: steps(group))
        assert isinstance(raised, PeerError)
        assert f"trainer rank {dying} closed its connection" in str(raised)
        assert raised.who == f"trainer rank {dying}"
        assert time.monotonic() - started < 8
    os._exit(0)  # the default group waits for the dead


def test_the_death_of_rank_0_is_noticed():
    run_ranks(_death_of_the_root, RANKS)


def _death_of_the_root(rank: int) -> None:
    with group_of(rank, 20.0) as group:
        if rank == 0:
            os._exit(0)
        started = time.monotonic()
        raised = outcome(group, lambda: steps(group))
        assert isinstance(raised, PeerError)
        assert "trainer rank 0 closed its connection" in str(raised)
        assert time.monotonic() - started < 8
    os._exit(0)


def test_a_rank_that_does_not_come_is_missed():
    run_ranks(_absence, RANKS)


def _absence(rank: int) -> None:
    started = time.monotonic()
    if rank == 2:
        # It takes part in the default group's step, so that this stays in order, and then never connects.
        _broadcast_text("", Deadline(10))
        time.sleep(2)
    else:
        with (
            pytest.raises(SyncTimeoutError, match=r"trainer ranks \(1 of 2 have connected"),
            group_of(rank, 1.0) as group,
        ):
            group.share(None, "plan")
        assert time.monotonic() - started < 4
    # And everything is in order again.
    with group_of(rank) as group:
        assert group.share(3, "plan") == 3
    if rank == 0:
        time.sleep(2)
    else:
        with pytest.raises(SyncTimeoutError, match="every rank must call push") as raised:
            RankGroup(None, 1.0)
        assert raised.value.waiting_for == ["trainer rank 0"]
    os._exit(0)  # a step of the default group is left open


def test_a_rank_that_begins_alone_is_told_so():
    run_ranks(_alone, 2)


@contextmanager
def begun(group: RankGroup) -> Iterator[None]:
    group.begin("plan")
    yield


def _alone(rank: int) -> None:
    for absent in (0, 1):
        with group_of(rank, 1.0) as group:
            with begun(group):
                group.gather(None, "plan")
            if rank == absent:
                time.sleep(2.0)
                continue
            started = time.monotonic()
            with (
                pytest.raises(SyncTimeoutError, match=f"trainer rank {absent} within 1 s: every rank must call push"),
                begun(group),
            ):
                group.gather(None, "plan")
            assert time.monotonic() - started < 2


def test_an_address_at_which_rank_0_cannot_listen_is_an_error_on_every_rank():
    run_ranks(_no_address, RANKS)


def _no_address(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "::1"  # IPv4 is what we listen on; no name server is asked
    with pytest.raises(PeerError, match="cannot listen"), group_of(rank):
        pass
    os.environ["MASTER_ADDR"] = "localhost"
    with group_of(rank) as group:
        assert group.share(1, "plan") == 1
