"""NIXL's agents: which of them get to know each other, and what is said where one cannot be made."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from weightsync.errors import ConfigError, PlacementError, ProtocolError, WeightSyncError
from weightsync.net import runtime, timeouts
from weightsync.net.runtime import Deadline
from weightsync.tools.nixl_reads import read_speed, way_of_reads
from weightsync.transports import nixl_agent
from weightsync.transports.nixl import SLOTS, NixlReceiver, _Reader, _Run
from weightsync.transports.nixl_agent import PIECE_BYTES, Agent, AgentAddress
from weightsync.transports.nixl_group import Introduction, introduce

CPU = torch.device("cpu")
NAMES = ["trainer rank 0", "trainer rank 1", "engine 0 worker tp=0", "engine 1 worker tp=0"]


def introduced(number: int, before: list[int], behind: list[int], version: str = "1.5.1") -> Introduction:
    address = AgentAddress(f"agent {number}", "", "a11a", None, [64, 128])
    contact = AgentAddress(f"agent {number}", "", "c0c0", None, [])
    return Introduction(version, address, contact, before, behind)


CHAIN = [introduced(0, [], [2]), introduced(1, [], [2]), introduced(2, [0, 1], [3]), introduced(3, [2], [])]


def test_a_member_gets_to_know_those_beside_it_and_nobody_else():
    told = introduce(CHAIN, NAMES)
    assert [[number for number, _ in those] for those in told] == [[2], [2], [0, 1, 3], [2]]


def test_only_a_reader_gets_what_opens_memory():
    told = [dict(those) for those in introduce(CHAIN, NAMES)]
    assert (told[3][2].metadata, told[3][2].slots, told[3][2].member) == ("a11a", [64, 128], NAMES[2])
    assert (told[0][2].metadata, told[0][2].slots) == ("c0c0", [])
    assert (told[2][3].metadata, told[2][3].slots) == ("c0c0", [])


def test_a_member_that_claims_to_read_where_it_does_not_is_told_nothing():
    thief = introduced(3, [0, 1], [])
    assert introduce([*CHAIN[:3], thief], NAMES)[3] == []


def test_two_versions_of_nixl_are_refused_by_name():
    with pytest.raises(
        PlacementError, match=r"trainer rank 0 has NIXL 1\.5\.1, and engine 1 worker tp=0 has NIXL 1\.6"
    ):
        introduce([*CHAIN[:3], introduced(3, [2], [], "1.6.0")], NAMES)


def test_missing_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nixl_agent, "import_module", missing)
    with pytest.raises(ConfigError, match=r"'nixl'\).*weightsync\[nixl\]"):
        nixl_agent.nixl_version()
    with pytest.raises(ConfigError, match="beside the engine"):
        NixlReceiver(CPU).meet({}, Deadline(1.0))


def test_packages_of_two_versions_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        nixl_agent, "load_nixl", lambda: SimpleNamespace(__name__="nixl", _pkg=SimpleNamespace(__name__="nixl_cu13"))
    )
    found = {"nixl": "1.5.1", "nixl-cu13": "1.4.0"}
    monkeypatch.setattr(nixl_agent.metadata, "version", found.__getitem__)
    with pytest.raises(ConfigError, match=r"nixl 1\.5\.1 and nixl-cu13 1\.4\.0"):
        nixl_agent.nixl_version()


def test_import_of_nixl_leaves_the_logging_of_the_process_alone(monkeypatch: pytest.MonkeyPatch):
    def intruder(name: str) -> Any:
        logging.raiseExceptions = False

    monkeypatch.setattr(nixl_agent, "import_module", intruder)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    nixl_agent.load_nixl()
    assert logging.raiseExceptions


def test_a_worker_connects_only_when_it_was_invited():
    with pytest.raises(ProtocolError, match="without an invitation"):
        NixlReceiver(CPU).connect([], {}, lambda seconds: None, Deadline(1.0))


# With NIXL itself


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")  # NIXL refuses "tcp" alone where a GPU is
    pair = Agent("UCX"), Agent("UCX")
    yield pair
    for agent in pair:
        agent.close()


def finish(agent: Agent, read: int, peer: AgentAddress) -> None:
    while not agent.is_read(read, peer):
        continue


def eventually(condition: Callable[[], bool]) -> None:
    deadline = Deadline(10.0)
    while not condition():
        assert not deadline.passed()


def test_agent_reads_a_run_of_several_pieces_and_says_so(agents: tuple[Agent, Agent]):
    owner, reader = agents
    slot = torch.arange(PIECE_BYTES["cpu"] * 2 + 100, dtype=torch.int64).to(torch.uint8)
    room = torch.zeros_like(slot)
    owner.register([slot])
    reader.register([room])
    address = owner.address()
    reader.add(address)
    finish(reader, reader.read(address, 0, 7, room[8:-50], 1), address)
    assert torch.equal(room[8:-50], slot[7:-51])
    assert not room[:8].any()
    eventually(lambda: owner.counts()[reader.name] == 1)


def test_count_grows_once_all_lower_counts_have_come(agents: tuple[Agent, Agent]):
    owner, _ = agents
    notes = [{"reader": [b"2", b"0"], "other": [b"1"]}, {"reader": [b"4"]}, {"reader": [b"1"]}, {}, {"reader": [b"3"]}]
    owner._agent = SimpleNamespace(getNotifs=lambda *_: notes.pop(0), deregisterMem=lambda *_: None)
    assert [owner.counts()["reader"] for _ in range(5)] == [0, 0, 2, 2, 4]
    assert owner._counts["other"] == 1


class SlowAgent:
    """An agent whose peer has packed `packed` chunks, and whose reads end when a test says so."""

    def __init__(self) -> None:
        self.packed, self.begun, self.ended = 0, list[int](), set[int]()

    def counts(self) -> Counter[str]:
        return Counter(rank=self.packed)

    def read(self, peer: AgentAddress, slot: int, at: int, room: torch.Tensor, count: int) -> int:
        self.begun.append(count)
        return count

    def is_read(self, read: int, peer: AgentAddress) -> bool:
        return read in self.ended


def test_reader_reads_ahead_into_free_slots_and_keeps_the_order_of_chunks():
    agent, aborted = SlowAgent(), threading.Event()
    group: Any = SimpleNamespace(agent=agent, peers={0: AgentAddress("rank", "rank 0", "", None, [])}, aborted=aborted)
    slots = [torch.zeros(8, dtype=torch.uint8) for _ in range(SLOTS)]
    reader = _Reader(group, slots, [[_Run(0, 0, 8, 0)] for _ in range(5)], [])
    reader.begin(range(5))
    eventually(lambda: reader.late(0) == ["rank 0"])
    assert agent.begun == []
    agent.packed = 5
    eventually(lambda: agent.begun == [1, 2, 3])  # as many as there are slots, and none has ended
    agent.ended = {2, 3}
    assert reader.late(1)  # chunk 0 comes first
    agent.ended = {1, 2, 3}
    eventually(lambda: not (reader.late(0) or reader.late(1) or reader.late(2)))
    assert agent.begun == [1, 2, 3]  # no slot is free before its chunk is loaded
    reader.loaded(0)
    eventually(lambda: agent.begun == [1, 2, 3, 4])
    aborted.set()
    reader.join()
    with pytest.raises(WeightSyncError, match="was closed"):
        reader.late(3)


def test_worker_frees_its_slots_before_it_takes_new_ones(monkeypatch: pytest.MonkeyPatch):
    receiver, empty, kept, still = NixlReceiver(CPU), torch.empty, list[weakref.ref[torch.Tensor]](), list[int]()
    receiver._communicator = SimpleNamespace(share=lambda *_: None, peers={})

    def note(*size: Any, **options: Any) -> torch.Tensor:
        still.append(sum(each() is not None for each in kept))
        slot = empty(*size, **options)
        kept.append(weakref.ref(slot))
        return slot

    monkeypatch.setattr(torch, "empty", note)
    for _ in range(2):
        receiver.connect([], {"runs": [], "slot_bytes": 256, "before": [], "behind": []}, lambda _: None, Deadline(1.0))
    assert still == [*range(SLOTS)] * 2


def test_reader_without_a_thread_can_be_closed(monkeypatch: pytest.MonkeyPatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    group: Any = SimpleNamespace(agent=SlowAgent(), peers={}, aborted=threading.Event())
    reader = _Reader(group, [torch.zeros(8, dtype=torch.uint8)] * SLOTS, [[]], [])
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "_idle", [])
        patched.setattr(runtime._Kept, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            reader.begin([0])
    closing = threading.Thread(target=reader.join, daemon=True)
    closing.start()
    closing.join(10.0)
    assert not closing.is_alive()


def test_closed_agent_cannot_be_read_by_whoever_kept_its_address(agents: tuple[Agent, Agent]):
    owner, reader = agents
    slot, room = torch.ones(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    owner.register([slot])
    reader.register([room])
    address = owner.address()
    reader.add(address)
    finish(reader, reader.read(address, 0, 0, room, 1), address)
    owner.close()
    room.zero_()
    with pytest.raises(WeightSyncError, match="cannot be read"):
        finish(reader, reader.read(address, 0, 0, room, 2), address)
    assert not room.any()
    with pytest.raises(WeightSyncError, match="closed"):
        owner.counts()


def test_closed_agent_ends_after_its_reads(agents: tuple[Agent, Agent]):
    owner, reader = agents
    slot = torch.ones(2**26, dtype=torch.uint8)
    room = torch.zeros_like(slot)
    owner.register([slot])
    reader.register([room])
    address = owner.address()
    reader.add(address)
    finish(reader, reader.read(address, 0, 0, room[:256], 1), address)
    reader.read(address, 0, 0, room, 2)
    assert not room.all()
    reader.close()
    eventually(lambda: bool(room.all()))


def test_closed_agent_does_not_wait_for_ever(agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch):
    agent, _ = agents
    released = list[int]()
    stalled = SimpleNamespace(getXferStatus=lambda _: agent._nixl.NIXL_IN_PROG, releaseXferReq=released.append)
    monkeypatch.setattr(timeouts, "FAREWELL_S", 0.05)
    agent._agent, agent._reads = stalled, [7, 8]
    agent.close()
    eventually(lambda: released == [7, 8])


def test_agent_is_closed_when_no_thread_starts(agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch):
    """As at the exit of the interpreter."""
    agent, _ = agents
    slot = torch.ones(4096, dtype=torch.uint8)
    agent.register([slot])
    slots, released = agent.slots, list[int]()
    ended = SimpleNamespace(getXferStatus=lambda _: agent._nixl.NIXL_SUCCESS, releaseXferReq=released.append)
    agent._agent, agent._reads = ended, [7]
    monkeypatch.setattr(nixl_agent, "submit", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    agent.close()
    assert released == [7]
    assert not slots


@pytest.mark.parametrize("reads", [[], [7]])
def test_closed_agent_lets_a_gpu_go_in_the_context_of_the_gpu(monkeypatch: pytest.MonkeyPatch, reads: list[int]):
    """A thread that has made no choice is on GPU 0, and the thread of `close` stays on its own."""
    gpus, calls = [0], list[tuple[str, int]]()
    context = mock.MagicMock()
    context.__enter__.side_effect = lambda *_: gpus.append(3)
    context.__exit__.side_effect = lambda *_: gpus.pop() == 0
    monkeypatch.setattr(torch.cuda, "device_of", lambda slot: context if slot.is_cuda else nullcontext())
    agent = object.__new__(Agent)
    agent._lock, agent._nixl, agent._reads, agent._registered = threading.Lock(), SimpleNamespace(), reads, object()
    agent._nixl.NIXL_IN_PROG = 1
    agent.slots = [SimpleNamespace(is_cuda=True)]  # type: ignore[list-item]
    agent._agent = SimpleNamespace(
        getXferStatus=lambda _: 0,
        releaseXferReq=lambda _: calls.append(("release", gpus[-1])),
        deregisterMem=lambda *_: calls.append(("deregister", gpus[-1])),
    )
    agent.close()
    eventually(lambda: calls[-1:] == [("deregister", 3)])
    assert calls == [*[("release", 3)] * len(reads), ("deregister", 3)]
    eventually(lambda: gpus == [0])


def test_contact_does_not_open_memory(agents: tuple[Agent, Agent]):
    owner, reader = agents
    slot = torch.ones(4096, dtype=torch.uint8)
    owner.register([slot])
    reader.register([torch.zeros(4096, dtype=torch.uint8)])
    contact = owner.contact()
    reader.add(contact)
    with pytest.raises(WeightSyncError, match="cannot be read"):
        reader.read(AgentAddress(contact.agent, "", "", None, [slot.data_ptr()]), 0, 0, reader.slots[0], 1)


def test_backend_that_is_not_there_is_named():
    pytest.importorskip("nixl")
    with pytest.raises(PlacementError, match="NIXL's backend NOTHING does not start"):
        Agent("NOTHING")


@pytest.mark.parametrize(("gpu", "words"), [(None, "ulimit -l"), (0, "nvidia_peermem")])
def test_memory_that_cannot_be_registered_says_what_to_do(
    agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch, gpu: int | None, words: str
):
    def refuse(*_: Any) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(agents[0], "_agent", SimpleNamespace(registerMem=refuse))
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    slot: Any = SimpleNamespace(
        numel=lambda: 8, nbytes=8, is_cuda=gpu is not None, data_ptr=lambda: 64, get_device=lambda: gpu
    )
    slot.device = torch.device(device)
    with pytest.raises(PlacementError, match=f"cannot register 8 bytes on {device} .*NIXL_ERR_BACKEND.*{words}"):
        agents[0].register([slot])


UCX_LOG = """\
[1.0] [host:1:0]   | a1 self cfg#0 remote memory write by ucp_put* from host memory to host |
[1.0] [host:1:0]   | 0..inf | zero-copy | rc_mlx5/mlx5_9:1 |
[1.0] [host:1:0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda |
[1.0] [host:1:0]   | Range        | Description | Config |
[1.0] [host:1:0]   | 0..4095      | copy-out    | rc_mlx5/mlx5_0:1 |
[1.0] [host:1:0]   | 4096..inf    | zero-copy   | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
[1.0] [host:1:0]   | a1 self cfg#0 active message by ucp_am_send* from host memory |
[1.0] [host:1:0]   | 0..inf | short | tcp/lo |
"""


def test_way_of_large_reads_is_read_in_the_log_of_ucx():
    assert way_of_reads(UCX_LOG) == "zero-copy by 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"
    assert way_of_reads("") == "an unknown way"


def test_reads_between_two_processes_have_a_speed_and_a_way(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")  # NIXL refuses "tcp" alone where a GPU is
    speed, way = read_speed(CPU, CPU)
    assert speed > 0
    assert "tcp/" in way


def test_reads_of_other_bytes_have_no_speed(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("nixl")
    monkeypatch.setattr(torch, "ones", torch.zeros)  # in this process, whose memory the other one reads
    with pytest.raises(WeightSyncError, match=r"exit code 1: .*has other bytes here"):
        read_speed(CPU, CPU)
