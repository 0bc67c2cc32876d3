"""Engines that pass chunks on: what a push costs each link between hosts of namespaces, and how long it takes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, module_of, trainer_model
from fake_server import FakeServer
from hosts import Host, Hosts
from optional_transports import NIXL
from torch import nn

from weightsync import WeightSync, WeightSyncError
from weightsync.net.authentication import KEY
from weightsync.tools.simulate import Topology, predict

all_hosts = pytest.mark.skipif("TEST_HOSTS" not in os.environ, reason="`make test-hosts` runs it")

PORT, GROUP_PORT = 8000, 29500
TIMEOUT_S = 20.0
LAYERS, ROWS, WIDTH = 28, 512, 1024
NBYTES = LAYERS * ROWS * WIDTH * 2
HEADERS = 1.05
"""What Ethernet, IP and TCP add to the bytes of a link, and what is sent to say that they came."""
FIXED_S = 0.025
"""What a push to such an engine takes beside its bytes."""
LITTLE = 0.1
"""What else a push sends, in models: messages, and that bytes came."""


class Layers(nn.Module):
    """Rank `rank` of `tp`, which has as many rows of each matrix as another."""

    def __init__(self, rank: int, tp: int, width: int = WIDTH) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ParameterList(torch.empty(ROWS // tp, width, dtype=torch.bfloat16) for _ in range(LAYERS))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            param = self.get_parameter(name)
            param.data.copy_(tensor.narrow(0, self.rank * param.shape[0], param.shape[0]))


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Draw one matrix, and give each layer its columns in another turn. Drawing a matrix for each takes far longer."""
    drawn = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return {f"layers.{n}": drawn.roll(n, dims=1) for n in range(LAYERS)}


# ---------------------------------------------------------------------------------------------------------------
# What runs on the hosts


def serve(host: Host, port: int, tp: int) -> int:
    """Have an engine answer at a port. Return the process, as others of its host know it."""
    os.environ[KEY] = "k" * 32
    models = [ModuleHost(partial(Layers, rank, tp), weights(0), rank=rank, world=tp) for rank in range(tp)]
    server = FakeServer(FakeEngine(*models), port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host.kept.append(server)
    return os.getpid()


def wrong(host: Host, seed: int) -> list[str]:
    """Return what an engine has otherwise than one that was started from these weights."""
    found = []
    for model in host.kept[0].engine.hosts:
        rank, tp = model.identity.rank, model.identity.world
        expected = ModuleHost(partial(Layers, rank, tp), weights(seed)).live.state_dict()
        found += [name for name, tensor in model.live.state_dict().items() if not torch.equal(tensor, expected[name])]
    return found


def dial(host: Host, address: str, port: int) -> float:
    """Return how long it takes to connect to another host."""
    started = time.monotonic()
    socket.create_connection((address, port), timeout=10).close()
    return time.monotonic() - started


def connect(host: Host, rank: int, size: int, engines: list[str], on_engine_failure: str | None, transport: str) -> int:
    os.environ |= {KEY: "k" * 32, "MASTER_ADDR": "A", "MASTER_PORT": str(GROUP_PORT)}
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    host.kept.append(WeightSync("fsdp", transport, engines, timeout_s=TIMEOUT_S, on_engine_failure=on_engine_failure))
    return os.getpid()


def push(host: Host, seed: int) -> tuple[str, float, tuple[str, ...]]:
    """Return what came of a push, how long it took, and the engines that are lost or were left out."""
    model = module_of(weights(seed))
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    if host.model is None:
        host.model = model
    else:  # a trainer's step writes where the weights lie, and a push after it negotiates nothing
        for own, new in zip(host.model.parameters(), model.parameters(), strict=True):
            own.data.copy_(new.data)
    started = time.monotonic()
    try:
        report = host.kept[-1].push(host.model)
    except WeightSyncError as error:
        return str(error), time.monotonic() - started, tuple(getattr(error, "lost", ()))
    return "", time.monotonic() - started, report.left_out


# ---------------------------------------------------------------------------------------------------------------


class Fleet:
    """A trainer with ranks on the hosts `ranks`, and an engine on each of `engines`: a host may be named twice."""

    def __init__(
        self,
        hosts: Hosts,
        ranks: str,
        engines: str,
        tp: int = 1,
        on_engine_failure: str | None = None,
        transport: str = "broadcast",
    ) -> None:
        self.hosts, self.names = hosts, sorted({*ranks, *engines})
        self.engines = [hosts.python(name) for name in engines]
        for number, engine in enumerate(self.engines):
            engine.begin(serve, PORT + number, tp)
        self.pids = [engine.result(120) for engine in self.engines]
        self.urls = [f"http://{name}:{PORT + number}" for number, name in enumerate(engines)]
        self.ranks = [hosts.python(name) for name in ranks]
        for number, rank in enumerate(self.ranks):
            rank.begin(connect, number, len(ranks), self.urls, on_engine_failure, transport)
        self.rank_pids = [rank.result(120) for rank in self.ranks]

    def push(self, seed: int) -> list[tuple[str, float, tuple[str, ...]]]:
        for rank in self.ranks:
            rank.begin(push, seed)
        return [rank.result(120) for rank in self.ranks]

    def carried(self) -> dict[str, list[int]]:
        """Return how many bytes have come and gone over each host's cable."""
        found = {}
        for name in self.names:
            row = next(line for line in self.hosts.sh(name, "cat /proc/net/dev").splitlines() if "eth0:" in line)
            found[name] = [int(row.partition(":")[2].split()[at]) for at in (0, 8)]
        return found

    def push_and_count(self, seed: int) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return how long a push takes that must succeed, and how often each cable carries the model, in and out."""
        before = self.carried()
        outcomes = self.push(seed)
        assert [text for text, _, _ in outcomes] == [""] * len(self.ranks)
        assert [engine.call(wrong, seed) for engine in self.engines] == [[]] * len(self.engines)
        times = {}
        for name, (into, out) in self.carried().items():
            times[name] = (into - before[name][0]) / NBYTES, (out - before[name][1]) / NBYTES
        return max(took_s for _, took_s, _ in outcomes), times


def begin_slowly(fleet: Fleet, seed: int) -> None:
    """Begin a push that takes a few seconds, and return in the middle of it."""
    for name in fleet.names:
        fleet.hosts.link(name, rate="60mbit")
    for rank in fleet.ranks:
        rank.begin(push, seed)
    time.sleep(1.5)


@pytest.mark.parametrize("transport", ["broadcast", NIXL])
def test_each_link_carries_the_model_once_and_a_relay_that_dies_is_left_out(tmp_path: Path, transport: str) -> None:
    with Hosts("A", "B", "C", "D", shared=tmp_path) as hosts:
        fleet = Fleet(hosts, "AB", "CDCA", 2, "drop", transport)
        for seed in (1, 2):
            _, times = fleet.push_and_count(seed)
        # Half of the model comes from B to the engine on A, which passes all on to C. There it goes to the other engine
        # without the cable, and on to D.
        expected = {"A": (0.5, 1), "B": (0, 0.5), "C": (1, 1), "D": (1, 0)}
        for name, each in expected.items():
            for found, least in zip(times[name], each, strict=True):
                assert least <= found <= least * HEADERS + LITTLE, (name, times)
        begin_slowly(fleet, 3)
        hosts.sh("C", f"kill -KILL {fleet.pids[0]}")
        for name in fleet.names:
            hosts.link(name)
        outcomes = [rank.result(60) for rank in fleet.ranks]
        # Over TCP, UCX may end a process whose reader dies: the engine that engine 0 reads from (docs/use/rdma.md).
        dead = [number for number, engine in enumerate(fleet.engines) if not engine.process.is_alive()]
        assert dead == [0] or (dead == [0, 3] and transport == "nixl")
        for text, _, left_out in outcomes:
            assert (text, left_out) == ("", tuple(f"engine {number} ({fleet.urls[number]})" for number in dead))
        alive = [engine for number, engine in enumerate(fleet.engines) if number not in dead]
        assert [engine.call(wrong, 3) for engine in alive] == [[]] * len(alive)


def test_engines_of_other_sizes_are_one_chain_of_one_rank() -> None:
    engines = [
        FakeEngine(
            *(ModuleHost(partial(TinyEngineModel, rank, tp), checkpoint(1), rank=rank, world=tp) for rank in range(tp))
        )
        for tp in (1, 2)
    ]
    with WeightSync("fsdp", "broadcast", engines, timeout_s=TIMEOUT_S) as sync:
        for seed in (2, 3):
            sync.push(trainer_model(checkpoint(seed)))
            for engine in engines:
                for host in engine.hosts:
                    expected = cold(checkpoint(seed), rank=host.identity.rank, tp=host.identity.world)
                    assert all(map(torch.equal, host.live.parameters(), expected.parameters()))
    for engine in engines:
        engine.close()


@all_hosts
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_trainers_link_carries_the_model_once_over_nixl_too(tmp_path: Path, count: int) -> None:
    names = "CDEFGHIJ"[:count]
    with Hosts("A", *names, shared=tmp_path) as hosts:
        fleet = Fleet(hosts, "A", names, transport="nixl")
        fleet.push_and_count(1)
        _, times = fleet.push_and_count(2)
        print(f"{count} engines: {times['A'][1]:.3f} times the model")
        assert 1 <= times["A"][1] <= HEADERS


@all_hosts
@pytest.mark.parametrize("stalled", [0, 1, 2, 3])
def test_a_relay_that_stalls_is_named_on_every_rank_in_time(tmp_path: Path, stalled: int) -> None:
    with Hosts("A", "B", "C", "D", "E", "F", shared=tmp_path) as hosts:
        fleet = Fleet(hosts, "AB", "CDEF")
        fleet.push_and_count(1)
        begin_slowly(fleet, 2)
        hosts.sh("CDEF"[stalled], f"kill -STOP {fleet.pids[stalled]}")
        for text, took_s, lost in [rank.result(60) for rank in fleet.ranks]:
            assert lost == (f"engine {stalled} ({fleet.urls[stalled]})",), text
            assert f"engine {stalled}" in text, text
            assert took_s < TIMEOUT_S + 15
        hosts.sh("CDEF"[stalled], f"kill -CONT {fleet.pids[stalled]}")
        for name in fleet.names:
            hosts.link(name)
        fleet.push_and_count(3)


@all_hosts
def test_a_rank_that_stalls_is_named_however_long_the_chain(tmp_path: Path) -> None:
    with Hosts("A", "B", "C", "D", "E", shared=tmp_path) as hosts:
        fleet = Fleet(hosts, "AB", "CDE")
        fleet.push_and_count(1)
        begin_slowly(fleet, 2)
        pid = fleet.rank_pids[1]
        hosts.sh("B", f"kill -STOP {pid}")
        text, took_s, lost = fleet.ranks[0].result(60)
        assert ("trainer rank 1" in text, lost) == (True, ()), text
        assert took_s < TIMEOUT_S + 15
        hosts.sh("B", f"kill -CONT {pid}")
        assert "trainer rank 1" in fleet.ranks[1].result(60)[0]
        for name in fleet.names:
            hosts.link(name)
        fleet.push_and_count(3)


@all_hosts
def test_a_push_over_long_cables_that_lose_packets_ends_and_is_right(tmp_path: Path) -> None:
    with Hosts("A", "C", "D", shared=tmp_path) as hosts:
        fleet = Fleet(hosts, "A", "CD")
        fleet.push_and_count(1)
        for name in "CD":
            hosts.move_away(name, delay_ms=10, loss=0.01)
        assert min(fleet.ranks[0].call(dial, fleet.hosts.address("D"), PORT + 1) for _ in range(3)) > 0.02
        took_s, _ = fleet.push_and_count(2)
        print(f"10 ms and 1 % in each direction: {took_s:.1f} s")


@all_hosts
def test_a_partition_of_a_minute_is_an_error_in_time_and_heals(tmp_path: Path) -> None:
    with Hosts("A", "C", "D", "E", shared=tmp_path) as hosts:
        fleet = Fleet(hosts, "A", "CDE")
        fleet.push_and_count(1)
        begin_slowly(fleet, 2)
        hosts.cut("D")
        started = time.monotonic()
        ((text, took_s, lost),) = [rank.result(60) for rank in fleet.ranks]
        assert lost == (f"engine 1 ({fleet.urls[1]})",), text
        assert took_s < TIMEOUT_S + 15
        time.sleep(max(0.0, 60 - (time.monotonic() - started)))
        hosts.heal("D")
        for name in fleet.names:
            hosts.link(name)
        fleet.push_and_count(3)


@all_hosts
@pytest.mark.parametrize(("count", "mbit"), [(1, 200), (2, 200), (3, 200), (8, 200), (8, 50)])
def test_a_push_to_many_engines_takes_hardly_longer_than_one_link(tmp_path: Path, count: int, mbit: int) -> None:
    names = "CDEFGHIJ"[:count]
    with Hosts("A", *names, shared=tmp_path) as hosts:
        fleet = Fleet(hosts, "A", names)
        fleet.push_and_count(1)
        for name in fleet.names:
            hosts.link(name, rate=f"{mbit}mbit")
        link_s, payload = NBYTES / (mbit * 1e6 / 8), mbit / 8e3 / HEADERS
        topology = Topology(
            hosts=1 + count,
            gpus_per_host=1,
            ranks=1,
            engines=count,
            tp=1,
            network=payload,
            least_mib=7 / 32,
            fixed_s=FIXED_S,
        )
        predicted = next(each.seconds for each in predict(NBYTES, topology) if each.transport == "broadcast")
        took_s = min(fleet.push_and_count(seed)[0] for seed in range(2, 7))
        print(f"{count} engines, {mbit} Mbit/s: {took_s:.2f} s, the link {link_s:.2f} s, predicted {predicted:.2f} s")
        assert took_s <= 1.15 * link_s
        assert abs(took_s / predicted - 1) < 0.15
