"""Communicators: groups of processes for byte tensors, outside the training job's process groups.

An abort leaves the job's groups intact. All waits are polls on the host with a deadline, including the wait for the
members. `abort` ends every wait.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from weightsync.errors import PeerError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline
from weightsync.planning.grouping import grouped
from weightsync.transports.base import Wait

_ABSENT = "not all have connected to {host}. Every member must reach this host"
PeerBuffer = tuple[torch.Tensor, int]
"""A tensor to send to a member or to receive from it, and the member's number."""
UNCONNECTED = "all have connected to {host}, but not to each other. Open their ports in the firewall"


class Communicator(ABC):
    """A group of `size` members on `device`s of one type. This process is member `rank`.

    All members `meet`, and then `link` with the members of their `exchange`s.

    place: [host, port, name] of the rendezvous.
    rendezvous: the rendezvous itself, on the first member alone.
    """

    rendezvous_at: Callable[[str], Any]
    """Opens the rendezvous of a new communicator at an address of this host.

    It has a `host`, a `port`, a unique `name`, and `close`. Two may have the same address, one after the other.
    """

    def __init__(self, place: list[Any], rendezvous: Any, rank: int, size: int, device: torch.device) -> None:
        self.place, self.rank, self.size, self.device = place, rank, size, device
        self.aborted = threading.Event()
        self._rendezvous = rendezvous
        self._missing = _ABSENT
        self._step: threading.Thread | None = None
        self._error: Exception | None = None

    def meet(self, deadline: Deadline) -> None:
        """Begin to wait for the other members, once. Returns at once. `link` raises the errors."""
        self._begin(partial(self._join, deadline))

    def link(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], wait: Wait, deadline: Deadline) -> None:
        """Wait until all members have come. Then connect to members, by a first exchange of these bytes on a GPU.

        Collective among the members, after each of their agreements on exchanges. Waits as `Operation.wait` does.
        """
        self._await(wait, deadline)
        self._begin(partial(self._connect, sends, receives, deadline))
        self._await(wait, deadline)

    def _begin(self, step: Callable[[], None]) -> None:
        # In a separate thread: torch's constructors cannot be interrupted when a member does not come.
        self._step = threading.Thread(target=self._run, args=(step,), name="weightsync-meet", daemon=True)
        self._step.start()

    def _await(self, wait: Wait, deadline: Deadline) -> None:
        """Wait for the end of the step that has begun last. Raise its error. Abort after any error."""
        step = self._step
        try:
            self._check()
            while step is not None and step.is_alive():
                if deadline.passed():
                    what = f"the {self.size} members of a communicator did not come together"
                    others, why = ["the communicator's other members"], self._missing.format(host=self.place[0])
                    raise deadline.expired(what, "connect", others, why)
                wait(timeouts.MEMBER_POLL_S)
            if isinstance(self._error, WeightSyncError):
                raise self._error
            if self._error is not None:
                raise PeerError(
                    f"the {self.size} members of a communicator did not come together: {self._error}", phase="connect"
                ) from self._error
        except BaseException:
            self.abort()
            raise

    def _run(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            self._error = error.with_traceback(None)  # the traceback would keep this frame and its sockets
        if self.aborted.is_set():  # `abort` found nothing to break
            self._break()

    def _check(self) -> None:
        if self.aborted.is_set():
            raise WeightSyncError("the communicator was closed")

    @abstractmethod
    def _join(self, deadline: Deadline) -> None:
        """Come together with the other members. Raise soon once `aborted` is set."""

    @abstractmethod
    def _connect(self, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer], deadline: Deadline) -> None:
        """Connect this member to the members of these exchanges. Raise soon once `aborted` is set."""

    def exchange(
        self,
        number: int,
        sends: Sequence[PeerBuffer],
        receives: Sequence[PeerBuffer],
        names: Sequence[str] = (),
        behind: Sequence[str] = (),
    ) -> Operation:
        """Start sends and receives as one operation.

        Two members must post their exchanges in the same order, under the same `number`s.

        names: the names of these members in errors.
        behind: the further members for which these may wait.
        """
        verb = "exchange" if sends and receives else "send" if sends else "receive"
        nbytes = sum(data.numel() for data, _ in (*sends, *receives))
        what = f"{verb} of {nbytes} bytes with {', '.join(names)}"
        try:
            return Operation(self._start(number, sends, receives), self.device, what, [*names, *behind])
        except RuntimeError as error:
            raise PeerError(f"the {what} broke: {error}") from error

    @abstractmethod
    def _start(self, number: int, sends: Sequence[PeerBuffer], receives: Sequence[PeerBuffer]) -> Any:
        """Start sends and receives. Return their work: torch's, or a `ThreadWork`."""

    def abort(self) -> None:
        """Leave. Break the wait for the members, and every operation under way on them. Returns within seconds."""
        self.aborted.set()
        self._break()
        if self._rendezvous is not None:
            self._rendezvous.close()

    @abstractmethod
    def _break(self) -> None:
        """Close the connections to the other members. Operations under way raise, here and there."""


class ThreadWork:
    """An operation of several parts, each run by a thread. `done` is set after the last part, or the first failure."""

    def __init__(self, parts: int) -> None:
        self.done = threading.Event()
        self._lock, self._left, self._error = threading.Lock(), parts, ""
        if not parts:
            self.done.set()

    def run(self, part: Callable[[], None]) -> None:
        """Run one part in this thread. Never raises: `wait` does."""
        problem = ""
        try:
            part()
        except Exception as error:
            # Keep the text only: the error's traceback would keep frames and their sockets.
            problem = str(error) or type(error).__name__
        with self._lock:
            self._left -= 1
            self._error = self._error or problem
            if self._error or not self._left:
                self.done.set()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        """Raise `RuntimeError` if a part has failed."""
        if self._error:
            raise RuntimeError(self._error)


class Operation:
    """An operation under way. `waiting_for` are its members' names in errors."""

    def __init__(self, work: Any, device: torch.device, what: str, waiting_for: list[str]) -> None:
        self._work, self._device, self._what, self._waiting_for = work, device, what, waiting_for

    def follow(self, wait: Wait, deadline: Deadline, phase: str) -> None:
        """Order later work on the current stream after the operation, without waiting. On a CPU wait as `wait` does."""
        if self._device.type == "cuda":
            self._order(phase)
        else:
            self.wait(wait, deadline, phase)

    def wait(self, wait: Wait, deadline: Deadline, phase: str) -> None:
        """Wait until the operation is done, and order later work on the current stream after it.

        Raises `PeerError` if the operation breaks, `SyncTimeoutError` past the deadline, and the errors of `wait`.
        """
        while not self._work.is_completed():
            if deadline.passed():
                raise deadline.expired(f"the {self._what} did not finish", phase, self._waiting_for)
            if isinstance(self._work, ThreadWork):
                self._work.done.wait(timeouts.LINK_LOOK_S)
                wait(0.0)
            else:
                wait(timeouts.NCCL_POLL_S)
        self._order(phase)

    def _order(self, phase: str) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"the {self._what} broke: {error}", phase=phase) from error


def longest(buffers: Iterable[PeerBuffer]) -> list[PeerBuffer]:
    """Return the longest buffer of each member, in the order of the members."""
    by_member = grouped(buffers, lambda buffer: buffer[1])
    return [max(by_member[member], key=lambda buffer: buffer[0].numel()) for member in sorted(by_member)]


class UnderWay(deque[Operation]):
    """Operations begun and not seen to end, oldest first."""

    def bound(self, count: int, wait: Wait, deadline: Deadline) -> None:
        """Wait for the oldest operations until at most `count` are left."""
        while len(self) > count:
            self.popleft().wait(wait, deadline, "transfer")
