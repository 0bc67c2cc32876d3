"""What a stranger can do at the port where gloo listens (docs/security.md), and what a push does then."""

from __future__ import annotations

import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from engine_process import EngineProcess, fingerprint
from fake_engine import checkpoint, cold, trainer_model

from weightsync import EngineUnreachableError, PeerError, WeightSync

DESCRIPTORS = 64
LISTEN = "0A"
NOBODY = bytes([0x77] * 8)
"""The number of a member that does not exist: gloo keeps such a connection for ever."""


def listening(pid: int) -> list[tuple[str, int]]:
    """Return where a process listens."""
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    found = []
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = row.split()[:10]
        if state == LISTEN and f"socket:[{inode}]" in links:
            address, port = local.split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def test_engine_that_strangers_have_ended_is_healed_by_the_next_push(tmp_path: Path) -> None:
    engine = EngineProcess(tmp_path)
    strangers: list[socket.socket] = []
    try:
        with WeightSync("fsdp", "broadcast", engine.url, timeout_s=20.0) as sync:
            sync.push(trainer_model(checkpoint(1)))
            (gloo,) = [at for at in listening(engine.pid) if at[1] != engine.port]
            assert gloo[0] == "127.0.0.1", "all members are on this host"
            resource.prlimit(engine.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
            with suppress(OSError):  # the engine is gone
                for _ in range(4 * DESCRIPTORS):
                    strangers.append(socket.create_connection(gloo, timeout=5.0))
                    strangers[-1].sendall(NOBODY)
            assert engine.process.wait(10.0) == -signal.SIGABRT
            with pytest.raises((PeerError, EngineUnreachableError), match=r"engine 0"):
                sync.push(trainer_model(checkpoint(2)))
            engine.launch()
            sync.push(trainer_model(checkpoint(3)))
            assert engine.ask()["weights"] == fingerprint(cold(checkpoint(3)))
    finally:
        for each in strangers:
            each.close()
        engine.kill()
