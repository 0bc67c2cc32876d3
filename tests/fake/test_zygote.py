"""A process that is forked from the zygote is to its parent what a fresh one is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import zygote

pytestmark = [
    pytest.mark.forks,
    pytest.mark.skipif(torch.cuda.is_available(), reason="no process forks once it has used CUDA"),
]
SPAWN = multiprocessing.get_context("spawn")


def run(folder: Path, **environment: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "weightsync", "plan", "nowhere"]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_command_ends_and_prints_as_a_fresh_one(tmp_path: Path):
    forked = run(tmp_path, COLUMNS="60")
    with zygote.forking(False):
        assert forked == run(tmp_path, COLUMNS="60")
    assert forked[0] == 2


def tell(way: Connection) -> None:
    way.send((os.getppid(), "vllm" in sys.modules))
    inner, outer = SPAWN.Pipe()
    child = SPAWN.Process(target=tell_and_stay, args=(outer,))
    child.start()
    way.send((child.pid, *inner.recv()))
    time.sleep(600)


def tell_and_stay(way: Connection) -> None:
    way.send((os.getppid(), "vllm" in sys.modules))
    time.sleep(600)


def test_children_and_theirs_are_forked_and_a_signal_ends_them():
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=tell, args=(there,))
    child.start()
    assert here.recv() == (os.getpid(), True)
    grandchild, *found = here.recv()
    assert found == [child.pid, True]
    os.kill(grandchild, signal.SIGKILL)
    child.kill()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL


def test_a_zygote_ends_with_its_parent():
    program = (
        "import multiprocessing, os, zygote\n"
        "zygote.IMPORTED = ()\n"  # how a zygote ends does not depend on them
        "with zygote.forking():\n"
        "    multiprocessing.get_context('spawn').Process(target=os.getpid).start()\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folder = Path(zygote.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    left = [Path("/proc", pid) for pid in done.stdout.split()]
    assert len(left) >= 2, done.stderr
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [each for each in left if each.exists()]
    assert left == []
