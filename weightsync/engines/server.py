"""A vLLM server as a child process of this process."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from weightsync.engines.http import HttpEngine
from weightsync.errors import EngineError, SyncTimeoutError
from weightsync.net import timeouts
from weightsync.net.child import Child, free_port
from weightsync.net.runtime import Deadline
from weightsync.net.wire import VERSION_VARIABLE


class VllmServer:
    """`weightsync serve MODEL OPTIONS...` as a child process, for the length of a `with` block.

        with VllmServer("Qwen/Qwen3-0.6B", "--max-model-len", "2048") as server:
            sync = WeightSync("fsdp", CheckpointTransport(folder, restart=True), server)

    The block begins when the server answers, and `start` and `restart` return then. After an error no process is left
    running. If this process is killed before the end of the block, the server ends itself.

    Args:
        model: The model for vLLM, a name or a folder.
        options: Command line options of `vllm serve`.
        port: The server's port on 127.0.0.1. None: a free port.
        log: The file for the server's output. None: "vllm.log" in a new temporary folder.
        environment: Variables for the server beside this process's environment.
        start_timeout_s: The most seconds from the start to the first answer. They include loading the model.

    Raises:
        EngineError: The server ended before it answered. The text has the end of its log.
        SyncTimeoutError: The server did not answer within `start_timeout_s`.
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
        self._model = self._name = os.fspath(model)  # requests name the first model, whatever is served later
        self.options = options
        self._environment = dict(environment or {})
        self.start_timeout_s = start_timeout_s
        self._child: Child | None = None

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.pid is not None else "not running"
        return f"<VllmServer({self._model!r}) at {self.url}, {state}>"

    @property
    def pid(self) -> int | None:
        """The server's process id. None: no process."""
        return self._child.process.pid if self._child is not None else None

    def has_option(self, *names: str) -> bool:
        """Return whether the server is started with any of these options, such as "--tokenizer"."""
        return not {option.partition("=")[0].replace("_", "-") for option in self.options}.isdisjoint(names)

    def start(self) -> None:
        """Launch the server, and return when it answers. Raises as `launch` and `wait` do."""
        self.launch()
        self.wait(self.start_timeout_s)

    def launch(self) -> None:
        """Start the process, and return at once.

        Raises:
            EngineError: the server runs already, or another process listens at its port.
        """
        if self._child is not None:
            raise EngineError(f"the server runs already, as process {self.pid}", who=self.url)
        if (problem := self._taken()) is not None:
            raise EngineError(  # `wait` would take the other program for our server
                f"port {self.port} cannot be opened ({problem}), perhaps because of an old server; end it, or give "
                "another port",
                who=self.url,
            ) from problem
        command = [sys.executable, "-m", "weightsync.vllm.serve", self._model, "--port", str(self.port), *self.options]
        if not self.has_option("--served-model-name"):
            command += ["--served-model-name", self._name]
        self._child = Child("the server", command, self._environment, self.log)

    def wait(self, timeout_s: float) -> None:
        """Return when the launched server answers. After an error the server is stopped.

        Args:
            timeout_s: longest time until the first answer.

        Raises:
            EngineError: the server has ended.
            SyncTimeoutError: the server has not answered within `timeout_s`.
        """
        assert self._child is not None
        engine, deadline = HttpEngine(self.url, name=self.url, timeout_s=timeout_s), Deadline(timeout_s)
        try:
            while not engine.is_alive():
                if (exit_report := self._child.exit_report()) is not None:
                    raise EngineError(exit_report, who=self.url)
                if deadline.passed():
                    raise SyncTimeoutError(
                        f"the server did not answer within {timeout_s:g} s. {self._child.log_end()}",
                        who=self.url,
                        waiting_for=[self.url],
                    )
                time.sleep(timeouts.SERVER_POLL_S)
        except BaseException:
            self.stop()
            raise

    def exit_report(self) -> str | None:
        """Return the exit code as text, with the end of the log. None: the process runs, or was not started."""
        return self._child.exit_report() if self._child is not None else None

    def restart(self, model: str | os.PathLike[str], version: int = 0) -> None:
        """End the server and start it with another model, at the same address. Raises as `start` does.

        Args:
            model: As for `VllmServer`.
            version: The version of these weights, for the server's metrics and the next push.
        """
        self.stop()
        self._model, self._environment[VERSION_VARIABLE] = os.fspath(model), str(version)
        self.start()

    def stop(self) -> None:
        """End the server and its child processes, and wait until its port is free. Do nothing if it was not started."""
        child, self._child = self._child, None
        if child is None:
            return
        child.stop()
        deadline = Deadline(timeouts.SERVER_PORT_S)
        while self._taken() is not None and not deadline.passed():
            time.sleep(timeouts.SERVER_POLL_S)  # the kernel closes a killed process's sockets later

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _taken(self) -> OSError | None:
        """Return the error of listening at the port. None: the port is free."""
        with socket.socket() as probe:
            # Otherwise ended connections in TIME_WAIT would make the port look taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                return error
        return None
