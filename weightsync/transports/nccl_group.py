"""A communicator over NCCL: a process group of torch's over a store of its own."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weightsync.net import timeouts
from weightsync.net.addresses import listen, reach
from weightsync.net.runtime import Deadline, spawn
from weightsync.transports.base import Wait
from weightsync.transports.communicator import UNCONNECTED, Communicator, Operation, PeerBuffer, ThreadWork

_ARRIVED = "arrived"
_VISIT = timedelta(seconds=5)
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""Settings that override the job's environment. torch reads these variables in the group's constructor alone.

When a member dies, NCCL's watchdog would end the process, so the trainer or the engine. With a blocking wait
`Operation.follow` would wait for a member without a deadline.
"""
_settings_lock = threading.Lock()
"""Held while the settings are in the environment. Two groups at once would take each other's for the job's."""


class RendezvousStore:
    """The meeting point of a communicator's members: a store on one network interface, held open by the first one."""

    def __init__(self, host: str) -> None:
        self.name = secrets.token_hex(8)
        self._socket = listen(host)
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
        """Release the address if no store has been opened on it."""
        self._socket.close()


def visit(host: str, port: int, deadline: Deadline) -> dist.Store:
    """Open the `RendezvousStore` of another process. Raises `PeerError` within seconds if it cannot be reached."""
    while True:
        # Probe the address first. TCPStore retries until its timeout, hides the reason, and cannot be interrupted.
        reach(host, port, "a member of a communicator", "trainer rank 0", deadline).close()
        patience = timedelta(seconds=deadline.left_s())
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=min(patience, _VISIT))
        except dist.DistError:
            if deadline.passed():
                raise
        else:
            store.set_timeout(patience)
            return store


class NcclGroup(Communicator):
    """A communicator of GPUs."""

    rendezvous_at = RendezvousStore

    _group: Any = None

    def _join(self, deadline: Deadline) -> None:
        host, port, _ = self.place
        if self._rendezvous is not None:
            store = self._rendezvous.store(deadline.left_s())
        else:
            store = visit(host, port, deadline)
        # Count arrivals before the group's constructor. It cannot be interrupted, and keeps the store's port while it
        # waits.
        store.add(_ARRIVED, 1)
        while store.add(_ARRIVED, 0) < self.size:
            self._check()
            time.sleep(timeouts.MEMBER_ARRIVAL_POLL_S)
        self._missing = UNCONNECTED
        torch.cuda.set_device(self.device)
        self._group = group = _nccl(store, self.rank, self.size)
        self._check()
        # Without this NCCL's members connect in the first operation, and block its calling thread.
        group.eager_connect_single_device(self.device)

    def link(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], wait: Wait, deadline: Deadline) -> None:
        self._stream = torch.cuda.current_stream(self.device)  # of the caller's thread
        super().link(sends, receives, wait, deadline)

    def _connect(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], deadline: Deadline) -> None:
        # NCCL connects members, and loads its kernel, in their first operation. Each call then waits for the other
        # member.
        with torch.cuda.stream(self._stream):
            self._start(0, sends, receives).wait()
            self._stream.synchronize()

    def largest(self, values: torch.Tensor, names: Sequence[str]) -> Operation:
        """Start replacing each of `values` by the maximum over all members. Every member calls this. See `exchange`."""
        self._check()
        group, options = self._group, dist.AllreduceOptions()
        what = f"search for the largest of {values.numel()} numbers"
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        stream, work = torch.cuda.current_stream(self.device), ThreadWork(1)

        def search() -> None:
            with torch.cuda.stream(stream):
                group.allreduce([values], options).wait()
            stream.synchronize()

        # In a thread: NCCL may have to connect members, and its call then waits for all of them.
        spawn("communicator", partial(work.run, search))
        return Operation(work, self.device, what, [*names])

    def _start(self, number: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> Any:
        self._check()
        group = self._group
        if not (sends or receives):
            return ThreadWork(0)
        if self.size == 2 and len(sends) + len(receives) == 1:
            # Use broadcast: NCCL's send is slower than its broadcast while copies run on the GPU.
            ((data, member),) = (*sends, *receives)
            options = dist.BroadcastOptions()
            options.rootRank = self.rank if sends else member
            return group.broadcast([data], options)
        # Always as a batch: an unbatched NCCL send creates a two-member communicator, and that blocks.
        group._start_coalescing()
        try:
            for data, member in sends:
                group.send([data], member, 0)
            for data, member in receives:
                group.recv([data], member, 0)
        except BaseException:
            # End the batch. Otherwise NCCL holds back this thread's later operations, the training job's too.
            with suppress(RuntimeError):
                group._end_coalescing()
            raise
        return group._end_coalescing()

    def _break(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # callers keep the deadlines, on the host
    # High priority: the next chunk's copies start together with this chunk's broadcast, and would delay it.
    options.is_high_priority_stream = True
    with _settings_lock:
        before = {name: os.environ[name] for name in _NCCL_SETTINGS if name in os.environ}
        os.environ.update(_NCCL_SETTINGS)
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            for name in _NCCL_SETTINGS:
                del os.environ[name]
            os.environ.update(before)
