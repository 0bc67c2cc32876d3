"""A communicator whose members do not come, or go: nobody waits past its deadline, and no process ends of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

from weightsync.errors import PeerError, SyncTimeoutError, WeightSyncError
from weightsync.net.runtime import Deadline
from weightsync.transports import communicator as communicators
from weightsync.transports.communicator import _ARRIVED, Communicator, RendezvousStore
from weightsync.transports.gloo_port import GlooPort

HOST = "127.0.0.1"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))]


def device_of(kind: str, rank: int) -> torch.device:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    return device


def still_works(device: torch.device) -> None:
    """A process that has lost a member goes on, its device too, also once NCCL's watchdog has had its time."""
    time.sleep(3.0 if device.type == "cuda" else 0.3)
    assert float(torch.ones(4, device=device).sum()) == 4.0


def alone(rank: int, kind: str, ending: str) -> None:
    """The other member never comes, or is seen at the store and never reached."""
    device, rendezvous, started = device_of(kind, rank), RendezvousStore(HOST), time.monotonic()

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        if ending == "news" and time.monotonic() - started > 0.5:
            raise WeightSyncError("bad news")

    def open_store(timeout_s: float) -> Any:
        store = rendezvous.store(timeout_s)
        if ending == "unreached":
            store.add(_ARRIVED, 1)
        return store

    deadline = Deadline(20.0 if ending == "news" else 1.5)
    place = [HOST, rendezvous.port, rendezvous.name]
    communicator = Communicator(place, mock.Mock(store=open_store), 0, 2, device, [], [1])
    with pytest.raises(WeightSyncError if ending == "news" else SyncTimeoutError) as caught:
        communicator.meet(wait, deadline)
    said = {"news": "bad news", "deadline": f"not all have connected to {HOST}", "unreached": "but not to each other"}
    assert said[ending] in str(caught.value)
    assert time.monotonic() - started < 15.0
    still_works(device)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("ending", ["deadline", "news", "unreached"])
def test_a_member_that_never_comes(kind: str, ending: str):
    run_ranks(alone, 1, kind, ending, timeout_s=60)


def meet(rank: int, device: torch.device, place: Path) -> Communicator:
    """Rank 1 will send to rank 0."""
    ends = ([], [1]) if rank == 0 else ([0], [])
    rendezvous = None
    if rank == 0:
        rendezvous = RendezvousStore(HOST)
        place.with_suffix(".new").write_text(str(rendezvous.port))
        place.with_suffix(".new").rename(place)
    while not place.exists():
        time.sleep(0.01)
    communicator = Communicator([HOST, int(place.read_text()), ""], rendezvous, rank, 2, device, *ends)
    communicator.meet(time.sleep, Deadline(20.0))
    return communicator


def lose(rank: int, kind: str, gone: int, folder: str) -> None:
    """After one round that works, rank `gone` dies where the other waits for it."""
    device, place = device_of(kind, rank), Path(folder, "port")
    communicator = meet(rank, device, place)
    nbytes = 1 << (28 if kind == "cuda" else 22)  # NCCL takes what fits into its buffers also for a dead receiver
    data = torch.full((nbytes,), rank, dtype=torch.uint8, device=device)

    def begin() -> Any:
        return communicator.exchange(0, [(data, 0)], []) if rank else communicator.exchange(0, [], [(data, 1)])

    begin().wait(time.sleep, Deadline(20.0), "transfer")
    assert int(data[-1]) == 1
    if rank == gone:
        if kind == "cuda":
            torch.cuda.synchronize()
        os._exit(0)
    time.sleep(0.5)
    started = time.monotonic()

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        if time.monotonic() - started > (2.0 if device.type == "cuda" else 0.5):
            raise PeerError("its connection has closed")  # how the library notices, whatever NCCL does

    with pytest.raises(PeerError):
        begin().wait(wait, Deadline(20.0), "transfer")
    communicator.abort()
    assert time.monotonic() - started < 15.0
    still_works(device)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("gone", [1, 0])
def test_a_member_that_dies(kind: str, gone: int, tmp_path: Path):
    run_ranks(lose, 2, kind, gone, str(tmp_path), timeout_s=60)


def test_the_jobs_environment_does_not_decide_how_nccl_waits_or_aborts(
    monkeypatch: pytest.MonkeyPatch,
):
    settings = [f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT")]
    monkeypatch.delenv(settings[0], raising=False)
    monkeypatch.setenv(settings[1], "1")
    # NCCL itself needs a GPU.
    nccl = mock.Mock(side_effect=lambda *_: [os.environ.get(name) for name in settings])
    monkeypatch.setattr(communicators.dist, "ProcessGroupNCCL", nccl, raising=False)
    assert communicators._nccl(torch.distributed.HashStore(), 0, 1) == ["0", "0"]
    assert [os.environ.get(name) for name in settings] == [None, "1"]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_search_whose_members_nccl_connects_first_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
):
    aborted = threading.Event()

    def allreduce(*_: Any) -> Any:
        if not is_broken:
            aborted.wait(20)
        raise RuntimeError("a member has gone")

    # NCCL itself needs a GPU.
    for name in ("stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    communicator = Communicator([HOST, 0, ""], None, 0, 2, torch.device("cuda", 0), [], [])
    communicator._group = mock.Mock(allreduce=allreduce, abort=aborted.set)
    search = communicator.largest(torch.zeros(3), ["trainer rank 1"])
    error, words = (
        (PeerError, "a member has gone") if is_broken else (SyncTimeoutError, r"did not finish within 0\.2 s")
    )
    with pytest.raises(error, match=f"search for the largest of 3 numbers .*{words}"):
        search.wait(time.sleep, Deadline(20.0 if is_broken else 0.2), "transfer")
    communicator.abort()
    assert aborted.is_set()


def leave(rank: int, folder: str) -> None:
    """Rank 0 leaves while it waits for what rank 1 never sends."""
    data = torch.zeros(1000, dtype=torch.uint8)
    for number in range(2):  # the first opens what a process keeps
        before = len(os.listdir("/proc/self/fd"))
        communicator = meet(rank, torch.device("cpu"), Path(folder, f"port{number}"))
        has_left = Path(folder, f"left{number}")
        if rank == 0:
            with pytest.raises(SyncTimeoutError):
                communicator.exchange(0, [], [(data, 1)]).wait(time.sleep, Deadline(0.5), "transfer")
        while rank == 1 and not has_left.exists():
            time.sleep(0.01)
        communicator.abort()
        deadline = Deadline(10.0)
        while number and len(os.listdir("/proc/self/fd")) > before:
            assert not deadline.passed(), "gloo keeps its sockets"
            time.sleep(0.05)
        has_left.touch()


def test_a_member_that_leaves_ends_what_is_under_way_and_gives_its_sockets_back(tmp_path: Path):
    run_ranks(leave, 2, str(tmp_path), timeout_s=60)


class VisitedPort(GlooPort):
    """A port that strangers come to as soon as it is open: none has a member's address, and then all have."""

    def __init__(self, members: Any, address: str) -> None:
        super().__init__(members, address)
        (at,) = (opened.getsockname() for opened in self._opened)
        with pytest.raises(TimeoutError):
            socket.create_connection(at, 0.5, ("127.0.0.2", 0))
        self.strangers = [socket.create_connection(at, 5.0) for _ in range(20)]
        for number, stranger in enumerate(self.strangers):
            stranger.sendall(bytes([0x77] * number))  # a member begins with its number, in 8 bytes
        for stranger in self.strangers[::2]:
            stranger.close()


class ForeignPort(GlooPort):
    """A port to which another user of this host connects as soon as it is open."""

    stranger: socket.socket

    def __init__(self, members: Any, address: str) -> None:
        super().__init__(members, address)
        os.seteuid(65534)
        try:
            ForeignPort.stranger = socket.create_connection(self._opened[0].getsockname(), 5.0)
        finally:
            os.seteuid(0)
        self.stranger.sendall(bytes([0x77] * 8))


def meet_among_strangers(rank: int, folder: str, kind: type[GlooPort]) -> None:
    if rank == 0:
        communicators.GlooPort = kind  # type: ignore[misc]
    communicator = meet(rank, torch.device("cpu"), Path(folder, "port"))
    data = torch.full((1000,), rank, dtype=torch.uint8)
    sends, receives = ([(data, 0)], []) if rank else ([], [(data, 1)])
    communicator.exchange(0, sends, receives).wait(time.sleep, Deadline(20.0), "transfer")
    assert data.tolist() == [1] * 1000
    if rank == 0 and kind is ForeignPort:
        assert ForeignPort.stranger.recv(1) == b"", "its connection was ended"
    communicator.abort()


@pytest.mark.parametrize("kind", [VisitedPort, ForeignPort])
def test_strangers_do_not_disturb_members_that_meet(tmp_path: Path, kind: type[GlooPort]):
    if kind is ForeignPort and os.geteuid() != 0:
        pytest.skip("only root can be another user, too")
    run_ranks(meet_among_strangers, 2, str(tmp_path), kind, timeout_s=60)
