"""Ray's workers as processes that are forked from the zygote.

Ray's raylet starts a worker through a Python program, and is none itself. That program is `ray_worker.py` here. It
hands the worker's command, environment and standard files to a starter:

    pytest
     |-- starter
     |    |-- zygote
     |    `-- worker              forked from the zygote above; the raylet knows it by its own process id
     `-- raylet
          `-- ray_worker.py       ends when the worker has ended; ended before, it takes the worker with it
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

from zygote import RAY_WORKER

PROGRAM = str(Path(__file__).with_name("ray_worker.py"))
SET_UP = ("--serialized-runtime-env-context=", "--language=")
"""Beginnings of the words of a command that are for Ray's own program in place of `PROGRAM`, and not for the worker."""


@contextmanager
def started_here() -> Iterator[None]:
    """Meanwhile a Ray that this process starts gets its workers from a process that forks where this one does."""
    from ray._private import ray_constants

    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        mock.patch.dict(os.environ, {"RAY_WORKERS": f"{folder}/starter"}),
        mock.patch.object(ray_constants, "SETUP_WORKER_FILENAME", PROGRAM),
    ):
        listener.bind(os.environ["RAY_WORKERS"])
        listener.listen()
        # No thread of this process: Ray waits for its first workers with Python's lock held.
        starter = multiprocessing.get_context("spawn").Process(target=_serve, args=(listener,), daemon=True)
        starter.start()
        try:
            yield
        finally:
            starter.kill()
            starter.join()


def _serve(listener: socket.socket) -> None:
    """Start a worker for each program that connects, until this process's parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while listener in wait([listener, parent.sentinel]):
        program, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(program, 1 << 20, 3)
        task = json.loads(message)
        options = (word for word in task["words"][1:] if not word.startswith(SET_UP))
        worker = subprocess.Popen(
            [sys.executable, "-m", RAY_WORKER, *options],
            env=task["environment"],
            cwd=task["folder"],
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
        )
        for fd in files:
            os.close(fd)
        threading.Thread(target=_wait, args=(worker, program), daemon=True).start()


def _wait(worker: subprocess.Popen[bytes], program: socket.socket) -> None:
    """Wait until the worker or its program has ended, and end the other."""
    end = os.pidfd_open(worker.pid)
    if end not in wait([program, end]):
        worker.kill()
    os.close(end)
    with program, suppress(OSError):
        program.send(str(worker.wait()).encode())


def kill_below(actor: Any) -> None:
    """Kill the core below an actor of an `AsyncLLM`, or the last worker below one of an `LLM`. Runs in the actor."""
    if hasattr(actor.llm, "llm_engine"):
        actor.llm.llm_engine.engine_core.engine_core.model_executor.workers[-1].proc.kill()
    else:
        actor.llm.engine_core.resources.engine_manager.processes[0].kill()
