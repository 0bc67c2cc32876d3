"""Trainers and engines on several hosts, which are namespaces of this machine: see `hosts.py`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hosts import Host, Hosts

from weightsync.control.runtime import boot_id

PORT = 29600


def listen(host: Host, port: int) -> None:
    host.kept.append(socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True))


def dial(host: Host, name: str, port: int) -> str:
    """Return what a connection to another host comes to."""
    try:
        socket.create_connection((name, port), timeout=1.0).close()
    except OSError as error:
        return type(error).__name__
    return "reached"


def what_is_seen(host: Host) -> tuple[str, str, list[str]]:
    Path("/tmp/mine").touch()
    return socket.gethostname(), boot_id(), os.listdir("/dev/shm")


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
