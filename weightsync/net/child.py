"""Child processes of this process."""

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
"""Variables that a rank's child must not inherit. With the last one set, torch waits for torchrun's store."""


class Child:
    """A process in a session of its own, started at once. Its output is appended to `log`.

    shows: the child writes its standard output to this process's, and only its standard error to the log.

    `stop` ends the child. If this process is killed first, a child that called `end_with_parent` ends itself.
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
                start_new_session=True,  # or Ctrl-C would reach the child too, before this process stops it
            )

    def exit_report(self) -> str | None:
        """Return the exit code as text, with the end of the log. None: the process runs."""
        code = self.process.poll()
        return None if code is None else f"{self.name} ended with exit code {code}. {self.log_end()}"

    def log_end(self) -> str:
        """Return the last lines of the log, under a heading."""
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        shown = "\n".join(f"  | {line}" for line in lines) or "  | (empty)"
        return f"The end of its log, {self.log}:\n{shown}"

    def stop(self) -> None:
        """End the process with SIGTERM, and its process group with SIGKILL. Wait for the process."""
        try:
            if self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeouts.CHILD_FAREWELL_S)
        finally:  # also after a second Ctrl-C
            with suppress(ProcessLookupError):  # the group is empty
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def end_with_parent() -> None:
    """End this process group when the parent process exits.

    Returns at once: a thread watches the parent. Does nothing in a process that is no `Child`.
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
    """Return a free port of the loopback interface. Another process may take it at any time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
