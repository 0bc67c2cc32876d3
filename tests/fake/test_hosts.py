"""Trainers and engines on several hosts, which are namespaces of this machine: see `hosts.py`."""

from __future__ import annotations

import os
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import Remote
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, module_of
from fake_server import FakeServer
from hosts import Host, Hosts
from tls_certificates import make_certificates

from weightsync import WeightSync, WeightSyncError
from weightsync.net.addresses import HOST, PORTS
from weightsync.net.authentication import KEY, FrameMac
from weightsync.net.connection import Connection
from weightsync.net.runtime import Deadline, boot_id
from weightsync.net.tls import VARIABLES
from weightsync.net.wire import PROTOCOL, Release
from weightsync.tools.connections import connections

all_hosts = pytest.mark.skipif("TEST_HOSTS" not in os.environ, reason="`make test-hosts` runs it")

PORT, ENGINE_PORT, GROUP_PORT = 29600, 8000, 29500
TIMEOUT_S = 60.0
SOON_S = 15.0
"""Until a blocked port is an error: seconds, and some for a busy machine."""

# ---------------------------------------------------------------------------------------------------------------
# What runs on the hosts


def listen(host: Host, port: int) -> None:
    host.kept.append(socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True))


def dial(host: Host, name: str, port: int) -> str:
    """Return what a connection to another host comes to."""
    try:
        socket.create_connection((name, port), timeout=1.0).close()
    except OSError as error:
        return type(error).__name__
    return "reached"


def hold_open(host: Host, name: str, port: int, speaks: bool) -> None:
    """Connect as a worker does whose trainer waits for 2 s."""
    connection = Connection(socket.create_connection((name, port)), "the other", FrameMac(b""), FrameMac(b""))
    connection.watch_host(2.0)
    host.kept.append((connection, speaks))


def await_silence(host: Host) -> list[str]:
    """Return what becomes of each connection. Those that speak do so now."""
    told = []
    for connection, speaks in host.kept:
        try:
            if speaks:
                connection.send(Release(), Deadline(2.0), "transfer")
            connection.receive(Deadline(SOON_S), "transfer")
        except WeightSyncError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def what_is_seen(host: Host) -> tuple[str, str, list[str]]:
    Path("/tmp/mine").touch()
    return socket.gethostname(), boot_id(), os.listdir("/dev/shm")


def set_environment(host: Host, variables: dict[str, str]) -> None:
    os.environ.update({KEY: "k" * 32, **variables})


def serve(host: Host, tp: int) -> None:
    """Have an engine of `tp` workers answer at a port of this host."""
    models = [ModuleHost(partial(TinyEngineModel, r, tp), checkpoint(1), rank=r, world=tp) for r in range(tp)]
    server = FakeServer(FakeEngine(*models), ENGINE_PORT)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host.kept.append(server)


def wrong(host: Host, seed: int) -> list[str]:
    """Return what an engine of this host has otherwise than one that was started from these weights."""
    engine = host.kept[0].engine
    found = []
    for rank, model in enumerate(engine.hosts):
        expected = cold(checkpoint(seed), rank=rank, tp=len(engine.hosts)).state_dict()
        live = model.live.state_dict()
        found += [f"{rank}: {name}" for name in expected if not torch.equal(live[name], expected[name])]
    return found


def join(host: Host, rank: int, size: int, master: str) -> None:
    """Become a rank of a trainer, as torchrun makes one."""
    os.environ |= {"MASTER_ADDR": master, "MASTER_PORT": str(GROUP_PORT), "RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo")


def connect(host: Host, engines: list[str], transport: str, timeout_s: float, rolling: bool | None = None) -> None:
    host.kept.append(WeightSync("fsdp", transport, engines, timeout_s=timeout_s, rolling=rolling))


def close_all(host: Host) -> None:
    while host.kept:
        host.kept.pop().close()


def push(host: Host, seed: int) -> tuple[str, float]:
    """Return what came of a push, and how long it took."""
    model = module_of(checkpoint(seed))
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, ignored_params={each for each in model.parameters() if each.dim() == 0})
    started = time.monotonic()
    try:
        host.kept[-1].push(model)
    except WeightSyncError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


# ---------------------------------------------------------------------------------------------------------------


def on_all(remotes: list[Remote], fn, *args):
    """Return what a function returns on each, run on all at once."""
    for remote in remotes:
        remote.begin(fn, *args)
    return [remote.result(120) for remote in remotes]


def trainer_of(hosts: Hosts, names: str, engines: list[str], master: str = "", **variables: str) -> list[Remote]:
    """Return the ranks of a trainer, one on each host, with the engines behind these names."""
    remotes = [hosts.python(name) for name in names]
    on_all(remotes, set_environment, variables)
    if len(names) > 1:
        for rank, remote in enumerate(remotes):
            remote.begin(join, rank, len(names), master or names[0])
        for remote in remotes:
            remote.result(60)
    on_all(remotes, connect, [f"http://{name}:{ENGINE_PORT}" for name in engines], "broadcast", TIMEOUT_S)
    return remotes


def engine_on(hosts: Hosts, name: str, tp: int = 1, **variables: str) -> Remote:
    remote = hosts.python(name)
    remote.call(set_environment, variables)
    remote.call(serve, tp)
    return remote


def test_hosts_share_a_network_and_one_folder_and_can_be_blocked_and_cut_off(tmp_path: Path) -> None:
    with Hosts("A", "B", shared=tmp_path) as hosts:
        a, b = hosts.python("A"), hosts.python("B")
        seen = [each.call(what_is_seen) for each in (a, b)]
        assert [name for name, _, _ in seen] == ["A", "B"]
        assert len({boot_id(), *(boot for _, boot, _ in seen)}) == 3
        assert [files for _, _, files in seen] == [[], []]
        (tmp_path / "both").touch()
        assert hosts.sh("B", f"ls {tmp_path} /tmp").split().count("both") == 1
        a.call(listen, PORT)
        for name in ("A", "A-v6", hosts.address("A")):
            assert b.call(dial, name, PORT) == "reached"
            assert b.call(dial, name, PORT + 1) == "ConnectionRefusedError"
        hosts.block("A", f"{PORT}-{PORT + 9}", refuse=True)
        assert [b.call(dial, name, PORT) for name in ("A", "A-v6")] == ["ConnectionRefusedError"] * 2
        hosts.unblock("A", f"{PORT}-{PORT + 9}", refuse=True)
        hosts.block("A", PORT)
        assert [b.call(dial, name, PORT) for name in ("A", "A-v6")] == ["TimeoutError"] * 2
        assert b.call(dial, "A", PORT + 1) == "ConnectionRefusedError"
        hosts.unblock("A", PORT)
        assert b.call(dial, "A", PORT) == "reached"
        hosts.cut("A")
        assert b.call(dial, "A", PORT) == "TimeoutError"
        hosts.heal("A")
        hosts.link("A", rate="100mbit")
        assert b.call(dial, "A", PORT) == "reached"
        hosts.down("A")
        assert b.call(dial, "A", PORT) == "TimeoutError"
    assert not Path("/tmp/mine").exists()


def test_ranks_on_two_hosts_push_to_engines_on_two_others(tmp_path: Path) -> None:
    with Hosts("A", "B", "C", "D", shared=tmp_path) as hosts:
        engines = [engine_on(hosts, "C"), engine_on(hosts, "D", tp=2)]
        trainer = trainer_of(hosts, "AB", ["C", "D"], **{PORTS: f"{PORT}-{PORT + 9}"})
        for seed in (2, 3):
            assert [text for text, _ in on_all(trainer, push, seed)] == ["", ""]
            assert [engine.call(wrong, seed) for engine in engines] == [[], []]
        # Once the members of the broadcast have met, the port of rank 0 alone is left. The job's own gloo has others.
        listening = hosts.sh("A", "ss -Htln | awk '{print $4}'").split()
        assert [place for place in listening if ":296" in place] == [f"10.77.0.1:{PORT}"], listening


def test_a_connection_breaks_soon_after_the_other_host_has_gone_silent(tmp_path: Path) -> None:
    with Hosts("A", "B", shared=tmp_path) as hosts:
        hosts.python("A").call(listen, PORT)
        dialler = hosts.python("B")
        for speaks in (True, False):
            dialler.call(hold_open, "A", PORT, speaks)
        hosts.cut("A")
        started = time.monotonic()
        told = dialler.call(await_silence)
        assert time.monotonic() - started < SOON_S
        assert [text.startswith("PeerError: the other does not answer: its host") for text in told] == [True, True]


@pytest.mark.parametrize("refuse", [True, pytest.param(False, marks=all_hosts)], ids=["refused", "dropped"])
def test_a_worker_that_cannot_reach_the_trainer_says_so_at_once(tmp_path: Path, refuse: bool) -> None:
    with Hosts("A", "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C", tp=2)
        (trainer,) = trainer_of(hosts, "A", ["C"], **{PORTS: f"{PORT}-{PORT + 1}"})
        hosts.block("A", PORT, refuse)
        text, took_s = trainer.call(push, 2)
        assert took_s < SOON_S
        why = "Connection refused" if refuse else "no answer within 5 s"
        assert f"engine 0 worker tp=1 on C could not reach trainer rank 0 at 10.77.0.1:{PORT}: {why}" in text
        assert HOST in text
        hosts.unblock("A", PORT, refuse)
        assert trainer.call(push, 2)[0] == ""
        assert engine.call(wrong, 2) == []


@pytest.mark.parametrize("rolling", [True, None])
def test_engines_that_can_be_dialled_at_their_http_port_alone(tmp_path: Path, rolling: bool | None) -> None:
    """As in containers, or behind NAT, with one published port. Each can dial."""
    with Hosts("A", "C", "D", shared=tmp_path) as hosts:
        engines = [engine_on(hosts, name, **{PORTS: f"{PORT}-{PORT + 9}"}) for name in "CD"]
        for name in "CD":
            hosts.block(name, f"{PORT}-{PORT + 9}", refuse=True)
        trainer = hosts.python("A")
        trainer.call(set_environment, {})
        trainer.call(connect, [f"http://{name}:{ENGINE_PORT}" for name in "CD"], "broadcast", TIMEOUT_S, rolling)
        text, took_s = trainer.call(push, 2)
        assert took_s < SOON_S
        if rolling:
            assert text == ""
            assert [engine.call(wrong, 2) for engine in engines] == [[], []]
        else:  # the second engine receives from the first one
            assert "could not reach member 1 of the broadcast" in text
            assert "engine 1 worker tp=0" in text
            assert "NAT" in text
            assert "rolling=True" in text


BEHIND_NAT = {HOST: "none", PORTS: f"{PORT}-{PORT + 3}"}
CLIENT_PORTS = "32768-60999"
"""The ports of connections on the side that has dialled."""


def lock_in(hosts: Hosts, engine: str, others: str) -> None:
    """Let an engine's host dial none of these hosts. They can still dial it."""
    for name in others:
        hosts.sh(engine, f"ip rule add pref 5 to {hosts.address(name)} ipproto tcp sport {CLIENT_PORTS} prohibit")


@pytest.mark.parametrize("ranks", ["A", pytest.param("AB", marks=all_hosts)])
def test_a_trainer_that_no_engine_can_dial_dials_the_workers(tmp_path: Path, ranks: str) -> None:
    """As a notebook behind NAT, and an engine in a container with published ports. All bytes travel in TLS."""
    files = make_certificates(tmp_path / "tls")
    certificates = {
        name: str(files / file) for name, file in zip(VARIABLES, ("node.pem", "node.key", "ca.pem"), strict=True)
    }
    with Hosts(*ranks, "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C", tp=2, **{PORTS: f"{PORT}-{PORT + 1}"}, **certificates)
        trainer = trainer_of(hosts, ranks, ["C"], **BEHIND_NAT, **certificates)
        lock_in(hosts, "C", ranks)
        hosts.python("A").call(listen, PORT)
        assert engine.call(dial, hosts.address("A"), PORT) == "PermissionError"
        for seed in (2, 3):
            assert [text for text, _ in on_all(trainer, push, seed)] == [""] * len(ranks)
            assert engine.call(wrong, seed) == []
        on_all(trainer, close_all)
        *_, (status, _, text) = hosts.python("A").call(diagnose, {KEY: "k" * 32, **BEHIND_NAT, **certificates})
        reached = ", ".join(f"{hosts.address('C')}:{port}" for port in (PORT, PORT + 1))
        assert (status, text) == ("pass", f"on another host, are reached at {reached}, and have its key")
        assert hosts.sh("C", f"ss -Htln '( sport >= :{PORT} and sport <= :{PORT + 9} )'") == ""


@all_hosts
@pytest.mark.parametrize("rolling", [True, None])
def test_a_trainer_that_no_engine_can_dial_has_two_engines(tmp_path: Path, rolling: bool | None) -> None:
    with Hosts("A", "C", "D", shared=tmp_path) as hosts:
        engines = [
            engine_on(hosts, "C", tp=2, **{PORTS: f"{PORT}-{PORT + 1}"}),
            engine_on(hosts, "D", **{PORTS: f"{PORT + 2}"}),
        ]
        trainer = hosts.python("A")
        trainer.call(set_environment, BEHIND_NAT)
        trainer.call(connect, [f"http://{name}:{ENGINE_PORT}" for name in "CD"], "broadcast", TIMEOUT_S, rolling)
        for name in "CD":
            lock_in(hosts, name, "A")
        for seed in (2, 3):
            assert trainer.call(push, seed)[0] == ""
            assert [engine.call(wrong, seed) for engine in engines] == [[], []]


def test_where_neither_end_can_dial_the_error_says_so_at_once(tmp_path: Path) -> None:
    with Hosts("A", "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C", tp=2, **{PORTS: f"{PORT}-{PORT + 1}"})
        (trainer,) = trainer_of(hosts, "A", ["C"], **BEHIND_NAT)
        lock_in(hosts, "C", "A")
        hosts.block("C", f"{PORT}-{PORT + 3}", refuse=True)
        text, took_s = trainer.call(push, 2)
        assert took_s < SOON_S
        assert "engine 0 (http://C:8000)" in text
        assert f"no answer from trainer rank 0 (it has not connected to 0.0.0.0:{PORT + 1}) within 10 s" in text
        for word in ("NAT", PORTS, f"{HOST}=none", 'transport="lora"'):
            assert word in text
        hosts.unblock("C", f"{PORT}-{PORT + 3}", refuse=True)
        assert engine.call(wrong, 1) == []
        assert trainer.call(push, 2)[0] == ""
        assert engine.call(wrong, 2) == []


@all_hosts
def test_published_ports_are_too_few_or_not_told_or_behind_another_key(tmp_path: Path) -> None:
    with Hosts("A", "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C", tp=2, **{PORTS: f"{PORT}"})
        (trainer,) = trainer_of(hosts, "A", ["C"], **{HOST: "none"})
        assert f"{PORTS} names 0 ports, expected 1 to 128" in trainer.call(push, 2)[0]
        trainer.call(set_environment, BEHIND_NAT)
        assert f"{PORTS} names 1 ports, expected 2 to 128" in trainer.call(push, 2)[0]
        engine.call(set_environment, {PORTS: f"{PORT}-{PORT + 1}", KEY: "o" * 32})
        assert "was turned away: it has another key" in trainer.call(push, 2)[0]
        engine.call(set_environment, {})
        assert trainer.call(push, 2)[0] == ""
        assert engine.call(wrong, 2) == []


@pytest.mark.parametrize("refuse", [True, False], ids=["refused", "dropped"])
@all_hosts
def test_a_rank_that_cannot_reach_rank_0_says_so_on_all_ranks(tmp_path: Path, refuse: bool) -> None:
    with Hosts("A", "B", "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C")
        trainer = trainer_of(hosts, "AB", ["C"], **{PORTS: f"{PORT}-{PORT + 1}"})
        hosts.block("A", f"{PORT}-{PORT + 1}", refuse)
        why = "Connection refused" if refuse else "no answer within 5 s"
        for text, took_s in on_all(trainer, push, 2):
            assert f"trainer rank 1 on B could not reach trainer rank 0 at 10.77.0.1:{PORT}: {why}" in text
            assert took_s < SOON_S
        hosts.unblock("A", f"{PORT}-{PORT + 1}", refuse)
        assert [text for text, _ in on_all(trainer, push, 2)] == ["", ""]
        assert engine.call(wrong, 2) == []


@pytest.mark.parametrize("refuse", [True, False], ids=["refused", "dropped"])
@all_hosts
def test_a_store_that_cannot_be_reached_is_an_error_at_once(tmp_path: Path, refuse: bool) -> None:
    with Hosts("A", "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C")
        (trainer,) = trainer_of(hosts, "A", ["C"], **{PORTS: f"{PORT}-{PORT + 3}"})
        all_but_the_hubs = f"{PORT + 1}-{PORT + 3}"
        hosts.block("A", all_but_the_hubs, refuse)
        text, took_s = trainer.call(push, 2)
        why = "Connection refused" if refuse else "no answer within 5 s"
        assert f"on C could not reach trainer rank 0 at 10.77.0.1:{PORT + 1}: {why}" in text
        assert "engine 0 worker tp=0" in text
        assert took_s < SOON_S
        hosts.unblock("A", all_but_the_hubs, refuse)
        assert trainer.call(push, 2)[0] == ""
        assert engine.call(wrong, 2) == []


@pytest.mark.parametrize("refuse", [True, False], ids=["refused", "dropped"])
@all_hosts
def test_an_engine_that_cannot_be_reached_is_an_error_at_once(tmp_path: Path, refuse: bool) -> None:
    with Hosts("A", "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C")
        (trainer,) = trainer_of(hosts, "A", ["C"])
        hosts.block("C", ENGINE_PORT, refuse)
        text, took_s = trainer.call(push, 2)
        assert "engine 0 (http://C:8000)" in text
        assert ("Connection refused" if refuse else "timed out") in text
        assert "called from A" in text
        assert took_s < SOON_S
        hosts.unblock("C", ENGINE_PORT, refuse)
        assert trainer.call(push, 2)[0] == ""
        assert engine.call(wrong, 2) == []


def diagnose(host: Host, variables: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return what the doctor finds of the connections to the engine on C."""
    os.environ.update(variables)
    return [(each.status, each.check, each.text) for each in connections(f"http://C:{ENGINE_PORT}")]


def test_the_doctor_tries_every_connection_from_both_sides(tmp_path: Path) -> None:
    with Hosts("A", "C", shared=tmp_path) as hosts:
        engine = engine_on(hosts, "C", tp=2)
        trainer = hosts.python("A")
        place = {KEY: "k" * 32, PORTS: f"{PORT}-{PORT + 1}"}
        assert trainer.call(diagnose, place) == [
            ("pass", "engine", "http://C:8000 answers A, and serves version default"),
            ("pass", "key", "set; needed, since the engine is on another host"),
            ("pass", "plug-in", f"wire protocol {PROTOCOL} on 2 workers: tp=0, tp=1"),
            ("pass", "workers", f"on another host, reach this process at 10.77.0.1:{PORT}, and have its key"),
        ]
        (_, (status, check, text)) = trainer.call(diagnose, {KEY: ""})
        assert (status, check) == ("FAIL", "key")
        assert text.startswith("not set, and needed, since the engine is on another host. Set WEIGHTSYNC_KEY")
        *_, (status, check, text) = trainer.call(diagnose, {KEY: "o" * 32})
        assert (status, check) == ("FAIL", "workers")
        assert "cannot prove itself: it has another key" in text
        hosts.block("A", PORT, refuse=True)
        *_, (status, check, text) = trainer.call(diagnose, place)
        assert (status, check) == ("FAIL", "workers")
        assert f"on C could not reach trainer rank 0 at 10.77.0.1:{PORT}: Connection refused" in text
        hosts.block("C", ENGINE_PORT, refuse=True)
        ((status, check, text),) = trainer.call(diagnose, place)
        assert (status, check) == ("FAIL", "engine")
        assert "Connection refused" in text
        assert engine.call(wrong, 1) == []


# ---------------------------------------------------------------------------------------------------------------
# Addresses


@all_hosts
def test_the_name_of_rank_0s_host_may_be_that_of_the_loopback_there(tmp_path: Path) -> None:
    with Hosts("A", "B", "C", shared=tmp_path) as hosts:
        hosts.sh("A", "printf '127.0.0.1 localhost\n127.0.1.1 A\n10.77.0.3 C\n' > /etc/hosts")
        engine = engine_on(hosts, "C")
        # torch's own group would be lost as well, had its ranks no other name of the host.
        trainer = trainer_of(hosts, "AB", ["C"], GLOO_SOCKET_IFNAME="eth0")
        assert [text for text, _ in on_all(trainer, push, 2)] == ["", ""]
        assert engine.call(wrong, 2) == []


@all_hosts
def test_hosts_that_have_ipv6_alone(tmp_path: Path) -> None:
    with Hosts("A", "B", "C", shared=tmp_path) as hosts:
        for name in "ABC":
            known = "".join(f"{hosts.address(each, 6)} {each}\\n" for each in "ABC")
            hosts.sh(name, "ip -4 addr flush dev eth0", f"printf '::1 localhost\\n{known}' > /etc/hosts")
        engine = engine_on(hosts, "C")
        trainer = trainer_of(hosts, "AB", ["[fd77::3]"], GLOO_SOCKET_IFNAME="eth0")
        assert [text for text, _ in on_all(trainer, push, 2)] == ["", ""]
        assert engine.call(wrong, 2) == []


@all_hosts
@pytest.mark.parametrize("said", ["eth0", "10.77.0.1"])
def test_a_host_of_several_networks_is_told_which_one_to_offer(tmp_path: Path, said: str) -> None:
    """The engine's name leads the trainer through a network of which the engine's host knows no way back."""
    with Hosts("A", "C", shared=tmp_path) as hosts:
        hosts.sh("C", "ip addr add 10.88.0.3/32 dev eth0", "ip route add prohibit 10.99.0.0/24")
        hosts.sh("A", "ip addr add 10.99.0.1/32 dev lo", "ip route add 10.88.0.3 dev eth0 src 10.77.0.1")
        engine = engine_on(hosts, "C")
        hosts.sh("A", "ip link add eth1 type bridge && ip addr add 10.99.0.1/24 dev eth1 && ip link set eth1 up")
        trainer = trainer_of(hosts, "A", ["C"], **{HOST: "eth1", PORTS: f"{PORT}-{PORT + 1}"})[0]
        text, _ = trainer.call(push, 2)
        assert f"engine 0 worker tp=0 on C could not reach trainer rank 0 at 10.99.0.1:{PORT}" in text
        trainer.call(set_environment, {HOST: said})
        assert trainer.call(push, 2)[0] == ""
        assert engine.call(wrong, 2) == []
