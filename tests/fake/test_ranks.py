"""The trainer's ranks as one group: what one knows all know, and what fails on one fails on all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch.distributed as dist
from ranks import run_ranks

from weightsync.errors import (
    ConfigError,
    DigestError,
    ManifestError,
    PeerError,
    SyncTimeoutError,
    WeightSyncError,
)
from weightsync.net.ranks import Ranks, uses_nccl

RANKS = 3


@contextmanager
def group_of(rank: int, timeout_s: float = 60.0) -> Iterator[Ranks]:
    """Collective: every rank calls this."""
    group = Ranks(timeout_s)
    try:
        group.begin("connect")
        assert (group.listener is None) == (rank > 0)
        yield group
    finally:
        group.disconnect()


def outcome(group: Ranks, work: Callable[[], Any]) -> WeightSyncError:
    """What a push would raise here when `work` fails."""
    try:
        work()
    except WeightSyncError as error:
        return group.agree_on(error)
    raise AssertionError("it did not fail")


def steps(group: Ranks) -> None:
    """Collective: what a push does, until somebody fails."""
    for _ in range(100):
        group.gather(None, "gather")
        group.broadcast(None, "gather")


def raising(error: Exception) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def test_alone_there_is_nobody_to_talk_to():
    group = Ranks(5.0)
    group.begin("connect")
    assert (group.rank, group.size) == (0, 1)
    assert group.gather({"a": 1}, "plan") == [{"a": 1}]
    assert group.broadcast({"a": 1}, "plan") == {"a": 1}
    started = time.monotonic()
    group.wait(0.05)
    assert time.monotonic() - started >= 0.05
    error = DigestError("m")
    assert group.agree_on(error) is error
    group.disconnect()


@pytest.mark.parametrize(
    ("given", "is_nccl"),
    [
        ("nccl", True),
        ("cpu:gloo,cuda:nccl", True),
        ("cuda:nccl,cpu:gloo", True),
        ("gloo", False),
        ("cpu:gloo,cuda:gloo", False),
        ("cpu:gloo", False),
    ],
)
def test_nccl_is_found_in_whatever_way_the_job_asked_for_it(given: str, is_nccl: bool):
    state = dist.distributed_c10d
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not uses_nccl(None)
        other = dist.new_group([0])
        # NCCL itself needs a GPU, so that the groups are only said to have it.
        said = str(state.BackendConfig(state.Backend(given)))
        for group in (dist.group.WORLD, other):
            with mock.patch.dict(state._world.pg_backend_config, {group: said}):
                assert uses_nccl(group) == is_nccl
                assert uses_nccl(None) == (is_nccl and group is not other)
                assert not uses_nccl("alone")
    finally:
        dist.destroy_process_group()
    assert not uses_nccl(None)


def _note_environment(rank: int, folder: Path) -> None:
    (folder / str(rank)).write_text(os.environ.get("OF_A_TEST", "unset"))
    dist.barrier()  # or the other one may still be about to connect to this one when it ends


@pytest.mark.parametrize("value", ["first", "second", None])  # the fork server keeps what the first one has set
def test_ranks_have_the_environment_of_their_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None):
    if value is not None:
        monkeypatch.setenv("OF_A_TEST", value)
    run_ranks(_note_environment, 2, tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [value or "unset"] * 2


def test_values_reach_every_rank():
    run_ranks(_values, RANKS)


def _values(rank: int) -> None:
    with group_of(rank) as group:
        assert (group.rank, group.size, group.host) == (rank, RANKS, "127.0.0.1")
        for value in ([rank, None, "x" * rank], {"of": rank}, str(rank) * (2 << 20)):
            gathered = group.gather(value, "plan")
            assert type(gathered) is list
            if rank == 0:
                assert gathered[0] == value
                assert len(gathered) == RANKS
            else:
                assert gathered == []
            shared = group.broadcast(gathered, "plan")
            assert shared[rank] == value
        group.wait(0.01)
        group.gather(None, "plan")  # so that rank 0 does not leave while others are idle
        assert group.broadcast("zero" if rank == 0 else "ignored", "plan") == "zero"
        # Rank 0 may be away for longer than the others would wait for an engine: its own waits have deadlines.
    with group_of(rank) as group:
        group.timeout_s = 0.5
        if rank == 0:
            time.sleep(0.7)
        assert group.broadcast(7, "load") == 7
        group.timeout_s = 0.1
        if rank == 0:
            time.sleep(1.0)
        assert group.broadcast(7, "load", away_s=20.0) == 7


def test_a_rank_with_other_options_is_named_whenever_it_connects():
    run_ranks(_other_options, RANKS)


def _other_options(rank: int) -> None:
    group = Ranks(20.0, options={"transport": "ipc", "verify": "full" if rank == 2 else "none"})
    for _ in range(2):  # the second time as in a push that is tried again
        raised = outcome(group, lambda: (group.begin("connect"), steps(group)))
        assert type(raised) is ConfigError
        assert raised.message == (
            "trainer rank 2 was given verify=full, and rank 0 verify=none: give every rank the same options"
        )
        group.disconnect()


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
                assert time.monotonic() - started < 30
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


def idle_for_long(group: Ranks) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        group.wait(0.001)


def assert_agreed(rank: int, raised: WeightSyncError) -> None:
    with group_of(rank) as group:
        said = group.broadcast(group.gather(msgspec.to_builtins(raised.to_fields()), "test"), "test")
    assert said == [said[0]] * RANKS


def test_a_rank_that_dies_is_named():
    run_ranks(_death, RANKS, 2)


def _death(rank: int, dying: int) -> None:
    with group_of(rank) as group:
        group.broadcast(group.gather(rank, "plan"), "plan")
        if rank == dying:
            os._exit(0)
        started = time.monotonic()
        raised = outcome(group, lambda: steps(group))
        assert isinstance(raised, PeerError)
        assert f"trainer rank {dying} closed its connection" in str(raised)
        assert raised.who == f"trainer rank {dying}"
        assert time.monotonic() - started < 30
    os._exit(0)  # the default group waits for the dead


def test_whom_rank_0_waits_for_is_named_where_others_wait_for_rank_0():
    run_ranks(_silence, RANKS)


def _silence(rank: int) -> None:
    late = SyncTimeoutError("a chunk did not arrive", phase="transfer", waiting_for=["trainer rank 0"])
    with group_of(rank) as group:
        dist.barrier()
        if rank == 1:
            time.sleep(2.5)  # as one that was stopped
        raised = outcome(group, raising(late) if rank == 0 else lambda: idle_for_long(group))
    assert str(raised) == "a chunk did not arrive; trainer rank 1 does not answer [phase transfer]"
    assert raised.facts["waiting_for"] == ["trainer rank 1"]


def test_the_death_of_rank_0_is_noticed():
    run_ranks(_death_of_the_root, RANKS)


def _death_of_the_root(rank: int) -> None:
    with group_of(rank) as group:
        if rank == 0:
            os._exit(0)
        started = time.monotonic()
        raised = outcome(group, lambda: steps(group))
        assert isinstance(raised, PeerError)
        assert "trainer rank 0 closed its connection" in str(raised)
        assert time.monotonic() - started < 30
    os._exit(0)


def test_a_rank_that_does_not_come_is_missed():
    run_ranks(_absence, RANKS)


def _absence(rank: int) -> None:
    # Before the ranks have ever met, and when one of them has left.
    for absent in (r"trainer rank 1 within 1 s: every rank", r"trainer rank 1 \(it has not connected"):
        if rank == 0:
            with pytest.raises(SyncTimeoutError, match=absent), group_of(rank, 1.0):
                pass
        dist.barrier()
        if rank:  # they come late, and hear what became of it
            with (
                pytest.raises(SyncTimeoutError, match=rf"{absent}.*\[trainer rank 0, phase connect\]") as raised,
                group_of(rank, 1.0),
            ):
                pass
            assert raised.value.waiting_for
        dist.barrier()
        with group_of(rank) as group:
            assert group.broadcast(3, "plan") == 3
    if rank == 0:
        dist.barrier()
    else:
        with pytest.raises(SyncTimeoutError, match="every rank must call push") as raised:
            Ranks(1.0).begin("connect")
        assert raised.value.waiting_for == ["trainer rank 0"]
        dist.barrier()  # the job's collectives are in step
    with group_of(rank) as group:
        assert group.broadcast(4, "plan") == 4


def test_ranks_find_each_other_again_when_one_alone_has_left():
    run_ranks(_found_again, RANKS)


def _found_again(rank: int) -> None:
    with group_of(rank) as group:
        for leaving in (1, 2, 0):
            group.broadcast(group.gather(rank, "plan"), "plan")
            if rank == leaving:
                group.disconnect()
            dist.barrier()
            assert group.begin("connect")
            told = group.broadcast(group.gather(rank, "plan"), "plan")
            assert told == [0, 1, 2]
            assert not group.begin("plan")


def test_a_rank_that_begins_alone_is_told_so():
    run_ranks(_alone, 2)


@contextmanager
def begun(group: Ranks) -> Iterator[None]:
    group.begin("plan")
    yield


def _alone(rank: int) -> None:
    for absent in (0, 1):
        with group_of(rank, 1.0) as group:
            with begun(group):
                group.gather(None, "plan")
            if rank != absent:
                silence = f"trainer rank {absent} within 1 s: every rank must call push"
                with pytest.raises(SyncTimeoutError, match=silence), begun(group):
                    group.gather(None, "plan")
            dist.barrier()


def test_an_address_at_which_rank_0_cannot_listen_is_an_error_on_every_rank():
    run_ranks(_no_address, RANKS)


def _no_address(rank: int) -> None:
    os.environ["WEIGHTSYNC_HOST"] = "192.0.2.1"
    with pytest.raises(PeerError, match=r"cannot listen at 192\.0\.2\.1, WEIGHTSYNC_HOST=192"), group_of(rank):
        pass
    del os.environ["WEIGHTSYNC_HOST"]
    with group_of(rank) as group:
        assert group.broadcast(1, "plan") == 1
