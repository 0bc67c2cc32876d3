"""A communicator of our own: torch's gloo or NCCL process group over a private store, outside the default group.

Made once per session, never shared with the training job's groups, so that it can be broken without breaking them.
Its waits are polls on the host with a deadline, and `abort` ends whoever still waits.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.channel import Deadline
from weightsync.errors import PeerError, SyncTimeoutError
from weightsync.machine import address_facing

_POLL_S = 0.0002
_LEAVE_S = 1.0


class Rendezvous:
    """Where the members of a communicator meet: a store on one interface only, held open by its first member."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.host, self.port = self._socket.getsockname()[:2]

    def store(self, timeout_s: float) -> dist.Store:
        return dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> None:
        """Let go of the address, when no store has been opened on it."""
        self._socket.close()


def visit(host: str, port: int, timeout_s: float) -> dist.Store:
    """The store of a `Rendezvous`, from another process."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class Communicator:
    """`size` members on `device`s of one type; member 0 is the root of every broadcast."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, host: str, timeout_s: float
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        if device.type == "cuda":
            # Deadlines are kept here, on the host. NCCL's own watchdog would end the process, and with it the engine.
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(days=1)
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_facing(host))]
            options._timeout = timedelta(seconds=timeout_s)
            try:
                self._group = dist.ProcessGroupGloo(store, rank, size, options)
            except RuntimeError as error:
                raise PeerError(
                    f"the {size} members of a communicator did not come together within {timeout_s:g} s: {error}",
                    phase="connect",
                ) from error

    def broadcast(self, data: torch.Tensor) -> Pending:
        """Start a broadcast of member 0's `data` (1-D uint8) into the others'; every member calls it in one order."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return Pending(self._group.broadcast([data], options), self.device, f"broadcast of {data.numel()} bytes")

    def send(self, data: torch.Tensor, to: int) -> Pending:
        work = self._watched(self._group.send([data], to, 0))
        return Pending(work, self.device, f"send of {data.numel()} bytes to rank {to}")

    def receive(self, data: torch.Tensor, source: int) -> Pending:
        work = self._watched(self._group.recv([data], source, 0))
        return Pending(work, self.device, f"receive of {data.numel()} bytes from rank {source}")

    def _watched(self, work: Any) -> Any:
        return _Watched(work) if self.device.type == "cpu" else work

    def abort(self) -> None:
        """Leave, and break every operation under way on the other members. Soon returns; nothing may follow."""
        group = [self._group]
        self._group = None
        if self.device.type == "cuda":
            group.pop().abort()
        else:
            # gloo has no abort. Letting go of the group is all there is, and that waits for the operations under way
            # here, which end when the others have gone, or at their deadline.
            leaving = threading.Thread(target=group.clear, name="weightsync-gloo", daemon=True)
            leaving.start()
            # Most often there are none. An interpreter that ends meanwhile would abort the process.
            leaving.join(_LEAVE_S)
            if leaving.is_alive():
                atexit.register(leaving.join, _LEAVE_S)


class _Watched(threading.Thread):
    """A send or receive of gloo: unlike its collectives these never say that they are done, only their `wait` ends."""

    def __init__(self, work: Any) -> None:
        super().__init__(name="weightsync-gloo", daemon=True)
        self._work = work
        self._error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self.is_alive()

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


class Pending:
    """An operation under way."""

    def __init__(self, work: Any, device: torch.device, what: str) -> None:
        self._work, self._device, self.what = work, device, what

    def wait(self, idle: Callable[[float], None], deadline: Deadline, phase: str) -> None:
        """Return once it is done, with later work on the current stream ordered after it.

        While waiting, `idle(seconds)` is called, which may sleep that long and may raise. Raises `PeerError` when the
        operation breaks, `SyncTimeoutError` past the deadline.
        """
        while not self._work.is_completed():
            if deadline.passed():
                raise SyncTimeoutError(
                    f"the {self.what} did not finish within {deadline.timeout_s:g} s",
                    phase=phase,
                    waiting_for=[self.what],
                )
            idle(_POLL_S)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"the {self.what} broke: {error}", phase=phase) from error
