"""A communicator whose members do not come, or go: nobody waits past its deadline, and no process ends of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from tls_certificates import make_certificates, use_certificates

from weightsync.errors import PeerError, ProtocolError, SyncTimeoutError, WeightSyncError
from weightsync.net.connection import dial
from weightsync.net.runtime import Deadline, submit
from weightsync.net.wire import PROTOCOL, Hello, Value
from weightsync.transports import nccl_group, tcp_links
from weightsync.transports.communicator import Communicator, PeerBuffer
from weightsync.transports.nccl_group import _ARRIVED, NcclGroup
from weightsync.transports.tcp_links import TcpLinks

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


def kind_of(device: torch.device) -> type[Communicator]:
    return NcclGroup if device.type == "cuda" else TcpLinks


def from_other(device: torch.device, member: int) -> list[PeerBuffer]:
    """Return one end of a first exchange with a member."""
    return [(torch.zeros(1, dtype=torch.uint8, device=device), member)]


def visit(place: list[Any], address: tuple[str, int]) -> None:
    """Come to a rendezvous of links as member 1, which listens at `address` and sends to member 0."""
    host, port, token = place
    hello = Hello(PROTOCOL, "member", 0, 1, 1, "", "", "", "member 1", 0, "", False)
    connection = dial(host, port, token, hello, "member 0", Deadline(10.0))
    connection.send(Value.of((*address, [0], False)), Deadline(10.0), "connect")
    connection.expect(Value, Deadline(10.0), "connect")


def alone(rank: int, kind: str, ending: str) -> None:
    """The other member never comes, or comes to the rendezvous and cannot be reached."""
    device, started = device_of(kind, rank), time.monotonic()
    rendezvous = kind_of(device).rendezvous_at(HOST)
    place = [HOST, rendezvous.port, rendezvous.name]

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        if ending == "news" and time.monotonic() - started > 0.5:
            raise WeightSyncError("bad news")

    given: Any = rendezvous
    if ending == "unreached" and kind == "cuda":

        def open_store(timeout_s: float) -> Any:
            store = rendezvous.store(timeout_s)
            store.add(_ARRIVED, 1)
            return store

        given = mock.Mock(store=open_store)
    with closing(socket.create_server((HOST, 0))) as full:  # its connections are never answered
        if ending == "unreached" and kind == "cpu":
            threading.Thread(target=visit, args=(place, full.getsockname()), daemon=True).start()
        deadline = Deadline(20.0 if ending == "news" else 1.5)
        communicator = kind_of(device)(place, given, 0, 2, device)
        communicator.meet(deadline)
        with pytest.raises(WeightSyncError if ending == "news" else SyncTimeoutError) as caught:
            communicator.link([], from_other(device, 1), wait, deadline)
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
    ends = ([], from_other(device, 1)) if rank == 0 else (from_other(device, 0), [])
    rendezvous: Any = None
    if rank == 0:
        rendezvous = kind_of(device).rendezvous_at(HOST)
        place.with_suffix(".new").write_text(f"{rendezvous.port} {rendezvous.name}")
        place.with_suffix(".new").rename(place)
    while not place.exists():
        time.sleep(0.01)
    port, name = place.read_text().split()
    communicator = kind_of(device)([HOST, int(port), name], rendezvous, rank, 2, device)
    communicator.meet(Deadline(20.0))
    communicator.link(*ends, time.sleep, Deadline(20.0))
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
    monkeypatch.setattr(nccl_group.dist, "ProcessGroupNCCL", nccl, raising=False)
    assert nccl_group._nccl(torch.distributed.HashStore(), 0, 1) == ["0", "0"]
    assert [os.environ.get(name) for name in settings] == [None, "1"]


class GlooGroup:
    """Stands in for torch's group over NCCL, which needs GPUs."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        group: Any = torch.distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
        self.broadcast = group.broadcast
        self.abort, self.eager_connect_single_device = mock.Mock(), mock.Mock()


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_device", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(nccl_group, "_nccl", GlooGroup)


def nccl_members(count: int, size: int) -> list[NcclGroup]:
    rendezvous = NcclGroup.rendezvous_at(HOST)
    place = [rendezvous.host, rendezvous.port, rendezvous.name]
    members = [NcclGroup(place, None if rank else rendezvous, rank, size, torch.device("cpu")) for rank in range(count)]
    for member in members:
        member.meet(Deadline(20.0))
    return members


def end_of_meetings() -> None:
    deadline = Deadline(10.0)
    while any(thread.name == "weightsync-meet" for thread in threading.enumerate()):
        assert not deadline.passed(), "a member still waits for others"
        time.sleep(0.05)


def test_members_over_nccl_link_by_an_exchange_after_they_have_met(without_gpus: None):
    first, second = nccl_members(2, 2)
    end_of_meetings()  # with nobody waiting in `link`
    sent, room = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    for _ in range(2):  # the communicator outlives a plan
        room.zero_()
        receiving = threading.Thread(target=second.link, args=([], [(room, 0)], time.sleep, Deadline(20.0)))
        receiving.start()
        first.link([(sent, 1)], [], time.sleep, Deadline(20.0))
        receiving.join()
        assert torch.equal(room, sent)


def test_a_member_over_nccl_stops_waiting_when_the_first_one_leaves_the_meeting(without_gpus: None):
    first, second = nccl_members(2, 3)
    time.sleep(0.3)  # the third one never comes
    first.abort()
    end_of_meetings()
    with pytest.raises(PeerError, match="3 members of a communicator did not come together"):
        second.link([], [], time.sleep, Deadline(20.0))


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
    communicator = NcclGroup([HOST, 0, ""], None, 0, 2, torch.device("cuda", 0))
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
            assert not deadline.passed(), "a socket is left"
            time.sleep(0.05)
        has_left.touch()


def test_a_member_that_leaves_ends_what_is_under_way_and_gives_its_sockets_back(tmp_path: Path):
    run_ranks(leave, 2, str(tmp_path), timeout_s=60)


def meet_among_strangers(rank: int, folder: str) -> None:
    """Strangers come to the rendezvous before the members do: silent ones, and ones with garbage."""
    place = Path(folder, "port")
    with ExitStack() as strangers:
        if rank:
            while not place.exists():
                time.sleep(0.01)
            for number in range(20):
                stranger = strangers.enter_context(socket.create_connection((HOST, int(place.read_text().split()[0]))))
                stranger.sendall(bytes([0x77] * number))
        communicator = meet(rank, torch.device("cpu"), place)
        data = torch.full((1000,), rank, dtype=torch.uint8)
        sends, receives = ([(data, 0)], []) if rank else ([], [(data, 1)])
        communicator.exchange(0, sends, receives).wait(time.sleep, Deadline(20.0), "transfer")
        assert data.tolist() == [1] * 1000
        communicator.abort()


def test_strangers_do_not_disturb_members_that_meet(tmp_path: Path):
    run_ranks(meet_among_strangers, 2, str(tmp_path), timeout_s=60)


def link(members: tuple[Communicator, Communicator], sends: list[PeerBuffer], receives: list[PeerBuffer]) -> None:
    """Link two members in this process: what member 0 sends, member 1 receives."""
    parts = [(data, 0) for data, _ in receives], [(data, 0) for data, _ in sends]
    other = threading.Thread(target=members[1].link, args=(*parts, time.sleep, Deadline(20.0)))
    other.start()
    members[0].link(sends, receives, time.sleep, Deadline(20.0))
    other.join()


@pytest.fixture
def links() -> Iterator[tuple[Communicator, Communicator]]:
    """Yield two members in this process. Member 1 sends to member 0."""
    device, rendezvous = torch.device("cpu"), TcpLinks.rendezvous_at(HOST)
    place = [rendezvous.host, rendezvous.port, rendezvous.name]
    members = TcpLinks(place, rendezvous, 0, 2, device), TcpLinks(place, None, 1, 2, device)
    for member in members:
        member.meet(Deadline(20.0))
    link(members, [], from_other(device, 1))
    yield members
    for member in members:
        member.abort()


def test_members_that_have_exchanged_link_once_more_for_the_other_direction(links: tuple[Communicator, Communicator]):
    forth, back = (torch.full((9,), value, dtype=torch.uint8) for value in (1, 2))
    rooms = torch.zeros(2, 9, dtype=torch.uint8)
    link(links, [(forth, 1)], [(rooms[0], 1)])
    ends = [
        links[0].exchange(0, [(forth, 1)], [(rooms[0], 1)]),
        links[1].exchange(0, [(back, 0)], [(rooms[1], 0)]),
    ]
    for end in ends:
        end.wait(time.sleep, Deadline(20.0), "transfer")
    assert rooms.tolist() == [[2] * 9, [1] * 9]


def test_a_meeting_that_is_aborted_leaves_no_thread_and_no_socket_waiting():
    rendezvous = TcpLinks.rendezvous_at(HOST)
    place = [rendezvous.host, rendezvous.port, rendezvous.name]
    before = len(os.listdir("/proc/self/fd"))
    members = [TcpLinks(place, given, rank, 3, torch.device("cpu")) for rank, given in enumerate((rendezvous, None))]
    for member in members:
        member.meet(Deadline(20.0))
    time.sleep(0.3)  # the third member never comes
    for member in members:
        member.abort()
    end_of_meetings()
    assert len(os.listdir("/proc/self/fd")) < before
    with pytest.raises(WeightSyncError, match="was closed"):
        members[1].link([], [], time.sleep, Deadline(20.0))


def test_the_first_member_tells_the_others_why_they_cannot_link():
    rendezvous = TcpLinks.rendezvous_at(HOST)
    place = [rendezvous.host, rendezvous.port, rendezvous.name]
    first, other = (TcpLinks(place, given, at, 3, torch.device("cpu")) for at, given in ((0, rendezvous), (2, None)))
    for member in (first, other):
        member.meet(Deadline(20.0))
    hello = Hello(PROTOCOL, "member", 0, 1, 2, name="member 1")
    with closing(dial(*place, hello, "member 0", Deadline(10.0))) as odd:
        odd.send(Value.of("no place"), Deadline(10.0), "connect")
        linking = submit("first", partial(first.link, [], [], time.sleep, Deadline(20.0)))
        with pytest.raises(ProtocolError, match="Expected `array`, got `str`"):
            other.link([], [], time.sleep, Deadline(20.0))
        assert isinstance(linking.exception(20.0), ProtocolError)


def test_a_message_may_be_shorter_than_its_room(links: tuple[Communicator, Communicator]):
    room, data = torch.zeros(10, dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)
    receiving = links[0].exchange(3, [], [(room, 1)])
    links[1].exchange(3, [(data, 0)], []).wait(time.sleep, Deadline(20.0), "transfer")
    receiving.wait(time.sleep, Deadline(20.0), "transfer")
    assert room.tolist() == [*range(7), 0, 0, 0]


@pytest.mark.parametrize(("number", "nbytes"), [(4, 10), (3, 11)])
def test_a_message_that_is_not_the_expected_one_is_refused(
    links: tuple[Communicator, Communicator], number: int, nbytes: int
):
    room = torch.zeros(10, dtype=torch.uint8)
    receiving = links[0].exchange(3, [], [(room, 1)], ["trainer rank 1"])
    links[1].exchange(number, [(torch.ones(nbytes, dtype=torch.uint8), 0)], [])
    words = f"receive of 10 bytes with trainer rank 1 broke: message {number} of {nbytes} bytes has come"
    with pytest.raises(PeerError, match=words):
        receiving.wait(time.sleep, Deadline(20.0), "transfer")
    assert not room.any()


@pytest.mark.parametrize("leaves", [0, 1])
@pytest.mark.parametrize("posts", [0, 1])
def test_an_abort_ends_what_is_under_way_at_both_ends(
    links: tuple[Communicator, Communicator], posts: int, leaves: int
):
    """Member `posts` waits for the other half, which is never posted, and member `leaves` leaves."""
    data = torch.zeros(1 << 26, dtype=torch.uint8)  # more than the kernel's buffers take
    sends, receives = ([(data, 0)], []) if posts else ([], [(data, 1)])
    pending = links[posts].exchange(0, sends, receives)
    links[leaves].abort()
    with pytest.raises(PeerError):
        pending.wait(time.sleep, Deadline(20.0), "transfer")
    with pytest.raises(WeightSyncError, match="was closed"):
        links[leaves].exchange(1, [], [])


class _Tap:
    """Stands between the two ends of each connection, and records each direction's bytes before it passes them on."""

    def __init__(self, sockets: ExitStack) -> None:
        self.seen: list[bytearray] = []
        self._sockets = sockets

    def stand_before(self, address: tuple[str, int]) -> tuple[str, int]:
        """Return the address to dial in place of this one."""
        listener = self._sockets.enter_context(socket.create_server((HOST, 0)))
        threading.Thread(target=self._join, args=(listener, address), daemon=True).start()
        return HOST, listener.getsockname()[1]

    def _join(self, listener: socket.socket, address: tuple[str, int]) -> None:
        near = self._sockets.enter_context(listener.accept()[0])
        far = self._sockets.enter_context(socket.create_connection(address))
        for ends in ((near, far), (far, near)):
            self.seen.append(bytearray())
            copying = threading.Thread(target=self._copy, args=(*ends, self.seen[-1]), daemon=True)
            copying.start()
            self._sockets.callback(copying.join, 20.0)

    def _copy(self, source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Tap]:
    with ExitStack() as sockets:
        tap = _Tap(sockets)
        monkeypatch.setattr(tcp_links, "dial", lambda host, port, *more: dial(*tap.stand_before((host, port)), *more))
        yield tap


@pytest.mark.parametrize("has_tls", [False, True])
def test_with_tls_no_weight_is_read_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tap: _Tap, has_tls: bool
):
    if has_tls:
        use_certificates(make_certificates(tmp_path / "tls"), monkeypatch)
    links: tuple[Communicator, Communicator] = request.getfixturevalue("links")
    secret, room = torch.randint(256, (64,), dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    receiving = links[0].exchange(0, [], [(room, 1)])
    links[1].exchange(0, [(secret, 0)], [])
    receiving.wait(time.sleep, Deadline(20.0), "transfer")
    assert torch.equal(room, secret)
    assert any(tap.seen)
    assert any(secret.numpy().tobytes() in seen for seen in tap.seen) is not has_tls
