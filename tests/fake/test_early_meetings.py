"""The members of a broadcast meet while the workers plan: its failures end with the first cause, and leave nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess, fingerprint
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model

from weightsync import WeightSync
from weightsync.errors import ManifestError, PeerError, SyncTimeoutError, WeightSyncError
from weightsync.net.connection import dial
from weightsync.net.runtime import Deadline
from weightsync.transports import tcp_links
from weightsync.transports.nccl import NcclTransport
from weightsync.worker.loader import Receiver


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with closing(FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine:
        yield engine


def meetings_under_way() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weightsync-meet"]


def end_all_meetings() -> None:
    deadline = Deadline(10.0)
    while meetings_under_way():
        assert not deadline.passed(), "a meeting goes on after the failed push"
        time.sleep(0.02)


def keep_away(*_: Any) -> Any:
    """Stand in for a network that lets no member reach the rendezvous."""
    time.sleep(0.02)
    raise PeerError("the way is closed")


def test_members_meet_while_the_workers_plan(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine):
    planned = threading.Event()
    make_plan: Callable[..., Any] = Receiver.make_plan

    def note_plan(*args: Any) -> Any:
        assert meetings_under_way(), "the worker plans before it meets the others"
        made = make_plan(*args)
        planned.set()
        return made

    def dial_once_planned(*args: Any) -> Any:
        if not planned.is_set():
            return keep_away()
        return dial(*args)

    monkeypatch.setattr(Receiver, "make_plan", note_plan)
    monkeypatch.setattr(tcp_links, "dial", dial_once_planned)
    with WeightSync("fsdp", "broadcast", engine, timeout_s=20.0) as sync:
        assert sync.push(trainer_model(checkpoint(2))).version == 1
        assert not meetings_under_way()


def test_a_refused_plan_is_the_error_of_a_push_whose_members_still_meet(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
):
    with WeightSync("fsdp", "broadcast", engine, timeout_s=20.0) as sync:
        with monkeypatch.context() as patched:
            patched.setattr(tcp_links, "dial", keep_away)
            with pytest.raises(ManifestError, match="no_such_name"):
                sync.push(trainer_model({**checkpoint(2), "no_such_name": torch.zeros(3)}))
            end_all_meetings()
        assert engine.log == [], "nothing was asked of the engine"
        assert sync.push(trainer_model(checkpoint(2))).version == 1


def test_a_meeting_that_times_out_after_the_plan_fails_the_push(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine):
    with WeightSync("fsdp", "broadcast", engine, timeout_s=4.0) as sync:
        with monkeypatch.context() as patched:
            patched.setattr(tcp_links, "dial", keep_away)
            with pytest.raises(SyncTimeoutError) as raised:
                sync.push(trainer_model(checkpoint(2)))
            assert raised.value.phase == "connect"
            end_all_meetings()
        assert engine.log == []
        assert sync.push(trainer_model(checkpoint(2))).version == 1


def test_rank_0_gives_up_on_a_worker_before_its_own_links_end(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine):
    """A link that ends first is closed, and the worker would blame rank 0."""
    links: list[Deadline] = []
    connect = NcclTransport.connect

    def note(transport: NcclTransport, deadline: Deadline) -> None:
        links.append(deadline)
        connect(transport, deadline)

    monkeypatch.setattr(NcclTransport, "connect", note)
    with WeightSync("fsdp", "broadcast", engine, timeout_s=20.0) as sync:
        sync.push(trainer_model(checkpoint(2)))
    assert [each.timeout_s > 20.0 for each in links] == [True]


@pytest.mark.forks
def test_a_worker_that_dies_while_members_meet_is_missed_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    engine = EngineProcess(tmp_path)
    meet = NcclTransport.meet
    try:
        with WeightSync("fsdp", "broadcast", engine.url, timeout_s=60.0) as sync:
            with monkeypatch.context() as patched:

                def meet_and_kill(*args: Any) -> None:
                    meet(*args)
                    engine.kill()

                patched.setattr(NcclTransport, "meet", meet_and_kill)
                started = time.monotonic()
                with pytest.raises(WeightSyncError, match=f"{engine.port}|engine 0 worker"):
                    sync.push(trainer_model(checkpoint(1)))
                assert time.monotonic() - started < 20.0
                end_all_meetings()
            engine.launch()
            sync.push(trainer_model(checkpoint(2)))
            assert engine.ask()["weights"] == fingerprint(cold(checkpoint(2)))
    finally:
        engine.kill()
