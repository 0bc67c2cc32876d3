"""A process that this process starts, and ends by its process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from weightsync.net import timeouts
from weightsync.net.runtime import spawn

_LOG_LINES = 25
_PARENT = "WEIGHTSYNC_PARENT"
_TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
"""What a rank's child must not inherit. With the last one, torch waits for a store that torchrun would have opened."""


class Child:
    """A process in a session of its own, started at once. What it prints is added to its log.

    shows: its standard output is this process's, and only what it prints to standard error is logged.

    `stop` ends it. Where this process is killed before that, a child that has called `end_with_parent` ends itself.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, *, shows: bool = False
    ) -> None:
        self.name = name
        self.log = log
        inherited = {key: value for key, value in os.environ.items() if key not in _TORCHRUN}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if shows else file,
                stderr=file,
                env={**inherited, **environment, _PARENT: str(os.getpid())},
                start_new_session=True,  # a Ctrl-C reaches this process alone, which ends its children in order
            )

    def exit_report(self) -> str | None:
        """Return how the process ended, with the end of its log. None: it lives."""
        code = self.process.poll()
        return None if code is None else f"{self.name} ended with exit code {code}. {self.log_end()}"

    def log_end(self) -> str:
        """Return the last lines of the log, with an introduction."""
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        shown = "\n".join(f"  | {line}" for line in lines) or "  | (empty)"
        return f"The end of its log, {self.log}:\n{shown}"

    def stop(self) -> None:
        """End the process, and all that it has started."""
        try:
            if self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeouts.CHILD_FAREWELL_S)
        finally:  # also after a second Ctrl-C
            with suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def end_with_parent() -> None:
    """Have this process and all that it has started end when the process whose `Child` it is has ended.

    Does nothing in a process that is no `Child`. Returns at once.
    """
    if (parent := os.environ.pop(_PARENT, None)) is not None:
        spawn("parent", lambda: _end_after(int(parent)))


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(timeouts.CHILD_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(timeouts.CHILD_FAREWELL_S)
    os.killpg(0, signal.SIGKILL)


def free_port() -> int:
    """Return a port of the loopback interface that no process listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
