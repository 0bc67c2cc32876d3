"""A vLLM server that this process starts, starts anew, and ends by its process id."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from weightsync.engines import HttpEngine
from weightsync.errors import EngineError, SyncTimeoutError
from weightsync.net import timeouts
from weightsync.net.child import Child, free_port
from weightsync.net.runtime import Deadline


class VllmServer:
    """`python -m weightsync.vllm.serve MODEL OPTIONS...` as a process that ends when this is closed.

        with VllmServer("Qwen/Qwen3-0.6B", "--max-model-len", "2048") as server:
            sync = WeightSync("fsdp", CheckpointTransport(folder, restart=True), server)

    Where this process is killed before that, the server ends itself.

    port: None takes a free one. log: where the server's output goes, "vllm.log" in a temporary folder when None.
    environment: added to this process's. start_timeout_s: how long loading a model may take.

    Entering it, `start` and `restart` return when the server answers.
    They raise `EngineError` with the end of its log when it ends instead.
    They raise `SyncTimeoutError` when it takes too long. No process is left running then.
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
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log) if log is not None else Path(tempfile.mkdtemp(prefix="weightsync-")) / "vllm.log"
        self._model = os.fspath(model)
        self.options = options
        self._environment = dict(environment or {})
        self.start_timeout_s = start_timeout_s
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._child.process.pid if self._child is not None else None

    def start(self) -> None:
        """Launch the server, and return when it answers. Raise `EngineError`s as `launch` and `wait` do."""
        self.launch()
        self.wait(self.start_timeout_s)

    def launch(self) -> None:
        """Start the process, and return at once.

        Raise `EngineError` where it runs already, or where another process listens at its port.
        """
        if self._child is not None:
            raise EngineError(f"the server runs already, as process {self.pid}", who=self.url)
        if (problem := self._taken()) is not None:
            raise EngineError(  # another program there would be taken for our server, which ends for want of the port
                f"port {self.port} cannot be had ({problem}): perhaps a server that outlived its trainer still listens "
                "there; end it, or give another port",
                who=self.url,
            ) from problem
        command = [sys.executable, "-m", "weightsync.vllm.serve", self._model, "--port", str(self.port), *self.options]
        self._child = Child("the server", command, self._environment, self.log)

    def wait(self, timeout_s: float) -> None:
        """Return when the launched server answers. Stop it and raise an `EngineError` where it does not."""
        assert self._child is not None
        try:
            self._wait(self._child, timeout_s)
        except BaseException:
            self.stop()
            raise

    def exit_report(self) -> str | None:
        """Return how the process ended, with the end of its log. None: it lives, or was not started."""
        return self._child.exit_report() if self._child is not None else None

    def restart(self, model: str | os.PathLike[str]) -> None:
        """End the server and start it from other weights, at the same address."""
        self.stop()
        self._model = os.fspath(model)
        self.start()

    def stop(self) -> None:
        """End the server and all that it has started, and wait until its port is free.

        Nothing happens where it has not been started.
        """
        child, self._child = self._child, None
        if child is None:
            return
        child.stop()
        deadline = Deadline(timeouts.SERVER_PORT_S)
        while self._taken() is not None and not deadline.passed():
            time.sleep(timeouts.SERVER_POLL_S)  # the kernel closes the sockets of killed processes in its own time

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _taken(self) -> OSError | None:
        """Return why no server can listen at the port, if so."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended linger
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                return error
        return None

    def _wait(self, child: Child, timeout_s: float) -> None:
        engine = HttpEngine(self.url, name=self.url, timeout_s=timeout_s)
        deadline = Deadline(timeout_s)
        while not engine.is_alive():
            if (exit_report := child.exit_report()) is not None:
                raise EngineError(exit_report, who=self.url)
            if deadline.passed():
                raise SyncTimeoutError(
                    f"the server did not answer within {timeout_s:g} s. {child.log_end()}",
                    who=self.url,
                    waiting_for=[self.url],
                )
            time.sleep(timeouts.SERVER_POLL_S)
