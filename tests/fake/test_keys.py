"""Pushes with keys: from trainer ranks of several processes, and to engines that have another key or none."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, module_of
from ranks import run_ranks

from weightsync import ProtocolError, WeightSync, WeightSyncError
from weightsync.net.authentication import GREETING_BYTES, KEY, KEY_FILE
from weightsync.net.runtime import this_process
from weightsync.net.wire import CLEAN
from weightsync.worker.session import WorkerSession


@pytest.fixture(autouse=True)
def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.delenv(KEY_FILE, raising=False)


def push(rank: int) -> None:
    os.environ[KEY] = "k" * 32
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", "ipc", engine, timeout_s=30) as sync:
        for version in (1, 2):
            assert sync.push(module_of(checkpoint(2))).version == version


def test_ranks_and_workers_with_the_key_push() -> None:
    run_ranks(push, 2)


class WithKey(FakeEngine):
    """Its workers have another environment than the trainer."""

    key = "o" * 32

    def init(self, init_info: dict[str, Any]) -> None:
        before = os.environ.pop(KEY, None)
        if self.key:
            os.environ[KEY] = self.key
        try:
            super().init(init_info)
        finally:
            os.environ.pop(KEY, None)
            if before:
                os.environ[KEY] = before


@pytest.mark.parametrize(("ours", "theirs"), [("k" * 32, "o" * 32), ("k" * 32, ""), ("", "o" * 32)])
def test_push_to_an_engine_with_another_key_or_none_says_so(monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str):
    if ours:
        monkeypatch.setenv(KEY, ours)
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    engine = WithKey(host)
    engine.key = theirs
    with (
        closing(engine),
        WeightSync("fsdp", "ipc", engine, timeout_s=10) as sync,
        pytest.raises(ProtocolError, match=r"trainer rank 0 at .* cannot prove itself: it has (another|no|a) key"),
    ):
        sync.push(module_of(checkpoint(2)))
    assert engine.sessions[0].receiver.state == CLEAN


@pytest.mark.parametrize("key", ["", "k" * 32])
def test_a_false_init_holds_an_engine_for_seconds_and_leads_nowhere(monkeypatch: pytest.MonkeyPatch, key: str):
    """The caller gives an address of his own, where somebody listens who reads everything and answers at random."""
    if key:
        monkeypatch.setenv(KEY, key)
    monkeypatch.setattr("weightsync.net.timeouts.GREETING_S", 1.0)
    session, received = WorkerSession(ModuleHost(TinyEngineModel, checkpoint(1))), b""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            nonlocal received
            sock, _ = server.accept()
            with sock:
                sock.sendall(os.urandom(40))
                while data := sock.recv(1 << 16):
                    received += data

        listening = threading.Thread(target=listen)
        listening.start()
        place = {"host": "127.0.0.1", "port": server.getsockname()[1]}
        info = {"session": "s", "engine": 0, **place, "token": "0" * 64, "process": this_process()}
        started = time.monotonic()
        with pytest.raises(WeightSyncError):
            session.init({**info, "timeout_s": 86400})
        assert time.monotonic() - started < 10
        listening.join(10)
    assert len(received) == GREETING_BYTES
    assert session._connection is None
    with pytest.raises(ProtocolError):
        session.init({**info, "timeout_s": 1e9})  # refused at once
    assert session.receiver.state == CLEAN
