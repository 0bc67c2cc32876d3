"""The ports that a broadcast between CPUs opens (docs/operate/security.md)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from engine_process import EngineProcess, fingerprint
from fake_engine import checkpoint, cold, trainer_model

from weightsync import WeightSync

LISTEN = "0A"


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


@pytest.mark.forks
def test_once_members_have_met_the_port_of_rank_0_alone_is_open(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path)
    try:
        before = listening(os.getpid())
        with WeightSync("fsdp", "broadcast", engine.url, timeout_s=20.0) as sync:
            sync.push(trainer_model(checkpoint(1)))
            assert [port for _, port in listening(engine.pid)] == [engine.port]
            ((address, _),) = [at for at in listening(os.getpid()) if at not in before]
            assert address == "127.0.0.1", "all members are on this host"
            sync.push(trainer_model(checkpoint(2)))
            assert engine.ask()["weights"] == fingerprint(cold(checkpoint(2)))
    finally:
        engine.kill()
