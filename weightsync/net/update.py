"""One collective step of the trainer's ranks, such as a push: its ranks, its phases, its deadline.

Everything that waits during a push gets an `Update`, and nothing else of `WeightSync`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError, PeerError
from weightsync.net import timeouts
from weightsync.net.modes import PlainModes
from weightsync.net.runtime import Deadline
from weightsync.net.wire import MAX_VERSION

if TYPE_CHECKING:
    from weightsync.net.ranks import Ranks


class Timeline:
    """The phase that an error happened in, and when each phase began and ended."""

    def __init__(self) -> None:
        self.phase = "connect"
        self.started_ns = time.time_ns()
        self.spans: list[tuple[str, int, int]] = []
        self.sent_s: list[float] = []
        """Rank 0: how long each rank has sent."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter a phase. Return to the outer one on success, and keep the inner one when an exception leaves."""
        outer, self.phase = self.phase, phase
        started_ns = time.time_ns()
        try:
            yield
        finally:
            self.spans.append((phase, started_ns, time.time_ns()))
        self.phase = outer


class Update:
    """One collective step on one trainer rank.

    Of `ranks` a transport uses `rank`, `size`, `host`, `gather`, `broadcast` and `wait`.

    `check` raises when an engine worker or an engine call has failed; rank 0 sets it once there are engines. `label` is
    what engines report in the place of the version. `modes` are left for what is the caller's. `report` is the
    `PushReport` of a step that has no return value.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, version: int | None = None) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.version = version
        self.timeline = Timeline()
        self.modes = PlainModes()
        self.check: Callable[[], None] = lambda: None
        self.label: str | None = None
        self.report: Any = None

    def deadline(self) -> Deadline:
        """Return the deadline of a wait that begins now."""
        return Deadline(self.timeout_s)

    def deadline_after_workers(self) -> Deadline:
        """Return the deadline of a wait for workers that wait for other ranks themselves, and then say for which."""
        return Deadline(self.timeout_s + min(timeouts.RANK_GRACE_S, self.timeout_s / 2))

    def wait(self, seconds: float) -> None:
        """Sleep for at most that long. Raise when a rank, a worker or an engine call has failed."""
        self.ranks.wait(seconds)
        self.check()

    def barrier(self, phase: str) -> None:
        """Return once every rank has come. Collective. Raise when a rank has failed before."""
        self.ranks.gather(None, phase)
        self.ranks.broadcast(None, phase)

    @contextmanager
    def blaming_ranks(self) -> Iterator[None]:
        """Raise the death of a rank in place of a `PeerError` that it has caused.

        A transfer breaks, and a worker says so, before or after the rank's own connection is seen to close.
        """
        try:
            yield
        except PeerError:
            self.ranks.wait(timeouts.RANK_DEATH_S)
            raise

    def choose_version(self, newest: int) -> int:
        """Return the version that was asked for, or the one after `newest`.

        Raises `ConfigError` when the one that was asked for is not newer, or no further one can be.
        """
        version = newest + 1 if self.version is None else self.version
        if version > MAX_VERSION:
            raise ConfigError(f"there has been version {newest}, after which there is none: versions have 63 bits")
        if version <= newest:
            raise ConfigError(
                f"version {version} is not newer than {newest}, which was pushed already: versions only grow. "
                f"Leave `version` out, or give at least {newest + 1}"
            )
        return version
