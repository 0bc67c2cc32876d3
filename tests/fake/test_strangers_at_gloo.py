"""A stranger at the port where gloo listens (docs/security.md)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from engine_process import EngineProcess, fingerprint
from fake_engine import checkpoint, cold, trainer_model

from weightsync import WeightSync
from weightsync.transports.gloo_port import GlooPort

DESCRIPTORS = 64
LISTEN = "0A"
NOBODY = bytes([0x77] * 8)
"""The number of a member that does not exist: gloo keeps such a connection for ever."""


def listening(pid: int) -> list[tuple[str, int]]:
    """Return where a process listens."""
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
    found = []
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = row.split()[:10]
        if state == LISTEN and f"socket:[{inode}]" in links:
            address, port = local.split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def refused(at: tuple[str, int]) -> bool:
    try:
        socket.create_connection(at, timeout=0.5).close()
    except OSError:
        return True
    return False


def test_strangers_reach_no_port_of_gloo_once_its_members_have_met(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path)
    try:
        before = listening(os.getpid())
        with WeightSync("fsdp", "broadcast", engine.url, timeout_s=20.0) as sync:
            sync.push(trainer_model(checkpoint(1)))
            (theirs,) = [at for at in listening(engine.pid) if at[1] != engine.port]
            assert theirs[0] == "127.0.0.1", "all members are on this host"
            assert refused(theirs)
            ours = [at for at in listening(os.getpid()) if at not in before]
            assert sum(map(refused, ours)) == 1, "the port of gloo, beside those of the store and of rank 0"
            assert not refused(("127.0.0.1", engine.port))
            sync.push(trainer_model(checkpoint(2)))
            assert engine.ask()["weights"] == fingerprint(cold(checkpoint(2)))
    finally:
        engine.kill()


@pytest.mark.parametrize(("address", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", "::2")])
def test_while_members_meet_their_addresses_alone_reach_the_port_of_gloo(address: str, other: str) -> None:
    for members, is_open in (({address, other}, True), ({other}, False)):
        with GlooPort(members, address) as port:
            places = {opened.getsockname()[:2] for opened in port._opened}
            assert [refused(place) for place in places if place[0] == address] == [not is_open]
