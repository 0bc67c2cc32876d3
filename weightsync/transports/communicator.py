"""Communicators: torch's gloo or NCCL process groups over a private store, outside the default group.

A communicator is never shared with the training job's groups, so an abort leaves those intact. All waits are polls on
the host with a deadline, including the wait for the members. `abort` ends every wait.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import PeerError, SyncTimeoutError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.addresses import listen, local_and_peer_address, reach
from weightsync.net.runtime import Deadline, spawn
from weightsync.transports.base import Wait
from weightsync.transports.gloo_port import GlooPort, meet_addresses

_ARRIVED = "arrived"
_ABSENT = "not all have connected to {host}. Every member must reach this host"
_UNCONNECTED = (
    "all have connected to {host}, but not to each other. Open the ports chosen by gloo or NCCL in the firewall"
)
_VISIT = timedelta(seconds=5)
_NO_NUMBER = 2**31 - 1
"""A number that no chunk has."""
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""Settings that override the job's environment. torch reads these variables in the group's constructor alone.

When a member dies, NCCL's watchdog would end the process, so the trainer or the engine. With a blocking wait
`Operation.follow` would wait for a member without a deadline.
"""


class RendezvousStore:
    """The meeting point of a communicator's members: a store on one network interface. The first member holds it open.

    Each has a unique `name`. Two may have the same address, one after the other.
    """

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


class Communicator:
    """A group of `size` members on `device`s of one type. This process is member `rank`. All members `meet` first.

    place: [host, port, name] of the rendezvous.
    rendezvous: the rendezvous itself, on the first member alone.
    sends_to, receives_from: the members of later `exchange`s.
    """

    def __init__(
        self,
        place: list[Any],
        rendezvous: RendezvousStore | None,
        rank: int,
        size: int,
        device: torch.device,
        sends_to: Sequence[int],
        receives_from: Sequence[int],
    ) -> None:
        self.place, self.rank, self.size, self.device = place, rank, size, device
        self.aborted = threading.Event()
        self._rendezvous, self._partners = rendezvous, (sends_to, receives_from)
        self._group: Any = None
        self._has_met = False
        self._missing = _ABSENT
        self._error: Exception | None = None

    def meet(self, wait: Wait, deadline: Deadline) -> None:
        """Wait, once, until all members have come. Waits as `Operation.wait` does."""
        if self._has_met:
            return
        # In a separate thread: torch's constructors cannot be interrupted when a member does not come.
        meeting = threading.Thread(target=self._meet, args=(deadline,), name="weightsync-meet", daemon=True)
        meeting.start()
        try:
            while meeting.is_alive():
                if deadline.passed():
                    raise SyncTimeoutError(
                        f"the {self.size} members of a communicator did not come together within "
                        f"{deadline.timeout_s:g} s: {self._missing.format(host=self.place[0])}",
                        phase="connect",
                        waiting_for=["the communicator's other members"],
                    )
                wait(timeouts.MEMBER_POLL_S)
            if self._error is not None:
                raise PeerError(
                    f"the {self.size} members of a communicator did not come together: {self._error}", phase="connect"
                ) from self._error
            if self.aborted.is_set():
                raise WeightSyncError("the communicator was closed before its members had met")
        except BaseException:
            self.abort()
            raise
        self._has_met = True

    def _meet(self, deadline: Deadline) -> None:
        host, port, _ = self.place
        try:
            if self._rendezvous is not None:
                store = self._rendezvous.store(deadline.left_s())
            else:
                store = visit(host, port, deadline)
            # Count arrivals before the group's constructor. It cannot be interrupted, and keeps the store's port while
            # it waits.
            store.add(_ARRIVED, 1)
            while store.add(_ARRIVED, 0) < self.size:
                if self.aborted.is_set():
                    return
                time.sleep(timeouts.MEMBER_ARRIVAL_POLL_S)
            self._missing = _UNCONNECTED
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                group: Any = _nccl(store, self.rank, self.size)
                self._group = group
                if self.aborted.is_set():  # `abort` found no group to break
                    self.abort()
                    return
                # Without this NCCL's members connect in the first operation, and block its calling thread.
                group.eager_connect_single_device(self.device)
                self._connect()
            else:
                address = local_and_peer_address(host)[0]
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                # Callers keep the deadlines. An operation may be posted long before its peer posts the other half.
                options._timeout = timedelta(seconds=timeouts.NCCL_PATIENCE * deadline.timeout_s)
                with GlooPort(meet_addresses(store, self.rank, self.size, address), address) as port:
                    options._devices = [port.device]
                    self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
                    port.close(store, self.rank)
        except Exception as error:
            self._error = error.with_traceback(None)  # the traceback would keep this frame and the store's socket
        else:
            if self.aborted.is_set():  # `abort` found no group to break
                self.abort()

    def _connect(self) -> None:
        """Run one operation between the members.

        NCCL connects members in their first operation. Each call then waits for the other member.
        """
        nothing = torch.zeros(1, dtype=torch.uint8, device=self.device)
        sends_to, receives_from = self._partners
        if sends_to or receives_from:
            receives = [(torch.empty_like(nothing), source) for source in receives_from]
            self._together(0, [(nothing, to) for to in sends_to], receives).wait()
        torch.cuda.current_stream(self.device).synchronize()

    def exchange(
        self,
        number: int,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        names: Sequence[str] = (),
        behind: Sequence[str] = (),
    ) -> Operation:
        """Start sends and receives as one operation. Each tensor has its member beside it.

        Two members must post their exchanges in the same order, under the same `number`s.

        names: the names of these members in errors.
        behind: further members that those may wait for.
        """
        verb = "exchange" if sends and receives else "send" if sends else "receive"
        nbytes = sum(data.numel() for data, _ in (*sends, *receives))
        what = f"{verb} of {nbytes} bytes with {', '.join(names)}"
        try:
            return Operation(self._together(number, sends, receives), self.device, what, [*names, *behind])
        except RuntimeError as error:
            raise PeerError(f"the {what} broke: {error}") from error

    def largest(self, values: torch.Tensor, names: Sequence[str]) -> Operation:
        """Start replacing each of `values` by the maximum over all members. Every member calls this. See `exchange`."""
        if (group := self._group) is None:
            raise WeightSyncError("the communicator was closed")
        what, options = f"search for the largest of {values.numel()} numbers", dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)

            def search() -> None:
                with torch.cuda.stream(stream):
                    group.allreduce([values], options).wait()
                stream.synchronize()

            # In a thread: NCCL may have to connect members, and its call then waits for all of them.
            return Operation(_Watched([search]), self.device, what, [*names])
        try:
            return Operation(group.allreduce([values], options), self.device, what, [*names])
        except RuntimeError as error:
            raise PeerError(f"the {what} broke: {error}") from error

    def _together(
        self, number: int, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Any:
        group = self._group
        if group is None:
            raise WeightSyncError("the communicator was closed")
        if self.device.type == "cpu" or not (sends or receives):
            # Tag by chunk number: gloo ends the process when a message's size differs from the receive's.
            works = [group.send([data], member, number) for data, member in sends]
            works += [group.recv([data], member, number) for data, member in receives]
            return _Watched([work.wait for work in works])
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

    def abort(self) -> None:
        """Leave. Break the wait for the members, and every operation under way on them. Returns within seconds."""
        self.aborted.set()
        self._break()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _break(self) -> None:
        group = [self._group]
        if group[0] is None:
            return
        self._group = None
        if self.device.type == "cuda":
            group.pop().abort()
        else:
            others = [member for member in range(self.size) if member != self.rank]
            leaving = threading.Thread(target=_leave, args=(group, others), name="weightsync-gloo", daemon=True)
            leaving.start()
            # Join: an interpreter that exits meanwhile would abort the process. Usually nothing is left to break.
            leaving.join(timeouts.COMMUNICATOR_LEAVE_S)
            if leaving.is_alive():
                atexit.register(leaving.join, timeouts.COMMUNICATOR_LEAVE_S)


def _leave(group: list[Any], others: Sequence[int]) -> None:
    """Break the operations of a gloo group, and close the group. The close waits for them."""
    # gloo has no abort. A receive that times out breaks all operations of the group, here and on the other members. If
    # the other member has gone, the receive raises at once.
    for member in others:
        with suppress(RuntimeError):
            group[0].recv([torch.empty(1, dtype=torch.uint8)], member, _NO_NUMBER).wait(timedelta(milliseconds=1))
    group.clear()


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # callers keep the deadlines, on the host
    # High priority: the next chunk's copies start together with this chunk's broadcast, and would delay it.
    options.is_high_priority_stream = True
    before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
    os.environ.update(_NCCL_SETTINGS)
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Watched:
    """Waits in a thread. gloo's sends and receives do not report their completion: only their `wait` returns."""

    def __init__(self, waits: list[Callable[[], object]]) -> None:
        self._waits = waits
        self.done = threading.Event()
        self._error = ""
        if waits:
            spawn("communicator", self._run)
        else:
            self.done.set()

    def _run(self) -> None:
        try:
            for wait in self._waits:
                wait()
        except RuntimeError as error:
            self._error = str(error)  # keep the text only: the error would keep this frame and the group's sockets
        self._waits.clear()
        self.done.set()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class Operation:
    """An operation under way. `waiting_for` are its members' names in errors."""

    def __init__(self, work: Any, device: torch.device, what: str, waiting_for: list[str]) -> None:
        self._work, self._device, self._what, self._waiting_for = work, device, what, waiting_for

    def follow(self, wait: Wait, deadline: Deadline, phase: str) -> None:
        """Order later work on the current stream after the operation, without waiting. On a CPU wait as `wait` does."""
        if self._device.type != "cuda":
            self.wait(wait, deadline, phase)
            return
        self._order(phase)

    def wait(self, wait: Wait, deadline: Deadline, phase: str) -> None:
        """Wait until the operation is done, and order later work on the current stream after it.

        Raises `PeerError` if the operation breaks, `SyncTimeoutError` past the deadline, and the errors of `wait`.
        """
        while not self._work.is_completed():
            if deadline.passed():
                raise SyncTimeoutError(
                    f"the {self._what} did not finish within {deadline.timeout_s:g} s",
                    phase=phase,
                    waiting_for=self._waiting_for,
                )
            if isinstance(self._work, _Watched):
                self._work.done.wait(timeouts.GLOO_LOOK_S)
                wait(0.0)
            else:
                wait(timeouts.NCCL_POLL_S)
        self._order(phase)

    def _order(self, phase: str) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"the {self._what} broke: {error}", phase=phase) from error


class UnderWay:
    """Operations that have begun and were not seen to end, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[Operation] = deque()

    def add(self, pending: Operation) -> None:
        """Add an operation that has begun."""
        self._pending.append(pending)

    def bound(self, count: int, wait: Wait, deadline: Deadline) -> None:
        """Wait for the oldest operations until at most `count` are left."""
        while len(self._pending) > count:
            self._pending.popleft().wait(wait, deadline, "transfer")
