"""`VllmServer`: a vLLM server that this process starts, starts anew, and ends, by its process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weightsync.deadline import Deadline
from weightsync.engines import HttpEngine
from weightsync.errors import EngineError, SyncTimeoutError

_POLL_S = 0.2
_FAREWELL_S = 20.0
_LOG_BYTES = 4000


class VllmServer:
    """`python -m weightsync.vllm.serve MODEL OPTIONS...` as a process of ours, which has ended when this is closed.

        with VllmServer("Qwen/Qwen3-0.6B", "--max-model-len", "2048") as server:
            sync = WeightSync("fsdp", CheckpointTransport(folder, restart=True), server)

    port: None takes a free one. log: where the server's output goes, "vllm.log" in a temporary folder when None.
    environment: added to this process's. start_timeout_s: how long loading a model may take.

    Entering it, `start` and `restart` return when the server answers. They raise `EngineError` with the end of its log
    when it has ended instead, and `SyncTimeoutError` when it takes too long; nothing is left running then.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *options: str,
        port: int | None = None,
        log: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 1800.0,
    ) -> None:
        self.port = _free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log) if log is not None else Path(tempfile.mkdtemp(prefix="weightsync-")) / "vllm.log"
        self._model = os.fspath(model)
        self._options = options
        self._environment = dict(environment or {})
        self.start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it, and return when it answers. Raises `EngineError`s where it runs already, another listens at its
        port, it ends, or does not answer within `start_timeout_s`."""
        if self._process is not None:
            raise EngineError(f"the server runs already, as process {self._process.pid}", who=self.url)
        if (problem := self._taken()) is not None:
            raise EngineError(  # whoever answered there would be taken for ours, which ends for want of the port
                f"port {self.port} cannot be had ({problem}): perhaps a server that outlived its trainer still listens "
                "there; end it, or give another port",
                who=self.url,
            ) from problem
        command = [sys.executable, "-m", "weightsync.vllm.serve", self._model, "--port", str(self.port), *self._options]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,  # its workers are ended with it, and a Ctrl-C reaches us alone
            )
        try:
            self._wait(self._process)
        except BaseException:
            self.stop()
            raise

    def restart(self, model: str | os.PathLike[str]) -> None:
        """End the server and start it from other weights, at the same address."""
        self.stop()
        self._model = os.fspath(model)
        self.start()

    def stop(self) -> None:
        """End the server and all that it has started, and wait until its port is free; nothing, where it has not been
        started."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_FAREWELL_S)
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)  # the session that it was started in
        process.wait()
        deadline = Deadline(_FAREWELL_S)
        while self._taken() is not None and not deadline.passed():
            time.sleep(_POLL_S)  # the kernel takes what was killed apart in its own time

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _taken(self) -> OSError | None:
        """Why nobody can listen at the port, if so."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended linger
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                return error
        return None

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        engine = HttpEngine(self.url, name=self.url, timeout_s=self.start_timeout_s)
        deadline = Deadline(self.start_timeout_s)
        while not engine.is_alive():
            if (code := process.poll()) is not None:
                raise EngineError(
                    f"the server ended with exit code {code}. The end of its log, {self.log}:\n{self._log_end()}",
                    who=self.url,
                )
            if deadline.passed():
                raise SyncTimeoutError(
                    f"the server did not answer within {deadline.timeout_s:g} s. The end of its log, {self.log}:\n"
                    f"{self._log_end()}",
                    who=self.url,
                    waiting_for=[self.url],
                )
            time.sleep(_POLL_S)

    def _log_end(self) -> str:
        return self.log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
