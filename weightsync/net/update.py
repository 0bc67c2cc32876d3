"""One collective step of the trainer's ranks, such as a push: its ranks, its phases, its deadlines.

Code that waits during a push gets the `Update`, and nothing else of `WeightSync`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError, PeerError
from weightsync.net import timeouts
from weightsync.net.modes import PlainModes
from weightsync.net.runtime import Deadline
from weightsync.net.wire import MAX_VERSION
from weightsync.report import EngineReport, PushReport, WorkerReport, format_seconds

if TYPE_CHECKING:
    from weightsync.net.ranks import Ranks


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PhaseSpan:
    """One stretch of a phase, in nanoseconds since the epoch. `end_ns` is None while the phase lasts."""

    phase: str
    begin_ns: int
    end_ns: int | None = None


class Timeline:
    """The current phase, for errors, and the start and end of each phase, for the report and for traces."""

    def __init__(self) -> None:
        self.phase = "connect"
        self.started_ns = time.time_ns()
        self._offset_ns = self.started_ns - time.perf_counter_ns()
        self.spans: list[PhaseSpan] = []
        self.sent_s: list[float] = []
        """Each rank's seconds of sending, in rank order. Empty on other ranks than 0."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter a phase. Return to the outer phase on success. Keep this phase when the body raises."""
        outer, self.phase = self.phase, phase
        span = PhaseSpan(phase, self._now_ns())
        self.spans.append(span)
        logger.debug("%s begins", phase)
        try:
            yield
        finally:
            span.end_ns = self._now_ns()
            logger.debug("%s took %s", phase, format_seconds((span.end_ns - span.begin_ns) / 1e9))
        self.phase = outer

    def seconds(self, *phases: str) -> float:
        """Return the seconds spent in these phases so far."""
        now_ns = self._now_ns()
        spans = [span for span in self.spans if span.phase in phases]
        return sum((now_ns if span.end_ns is None else span.end_ns) - span.begin_ns for span in spans) / 1e9

    def report(
        self,
        workers: Sequence[WorkerReport] = (),
        engines: Sequence[EngineReport] = (),
        *,
        away_s: float = 0.0,
        **facts: Any,
    ) -> PushReport:
        """Return the report of a step that ends now, on rank 0.

        The step began with its first phase. A step sends in "transfer" or "save", and waits for engines in "load".

        Args:
            workers: Their reports. The report has the seconds of the slowest.
            engines: The reports of paused engines. The report has the seconds of the longest pause.
            away_s: Seconds of the caller's own code. The report leaves them out.
            facts: Other fields of the report.
        """
        total_s = (self._now_ns() - self.spans[0].begin_ns) / 1e9 - away_s
        gather_s = self.seconds("transfer", "save")
        slowest = {
            name: max((getattr(each, name) for each in workers), default=0.0)
            for name in ("transfer_s", "verify_s", "load_s")
        }
        seconds = {
            "plan_s": self.seconds("plan"),
            "control_s": total_s - gather_s - self.seconds("load", "restart"),
            "gather_s": gather_s,
            "pause_s": max((each.pause_s for each in engines), default=0.0),
            "total_s": total_s,
        }
        return PushReport(workers=tuple(workers), engines=tuple(engines), **{**slowest, **seconds, **facts})

    def _now_ns(self) -> int:
        """Return the time since the epoch, by a monotonic clock."""
        return time.perf_counter_ns() + self._offset_ns


class Update:
    """One collective step on one trainer rank.

    A transport uses `rank`, `size`, `host`, `gather`, `broadcast` and `wait` of `ranks`, and nothing else.

    Attributes:
        check: Raises when an engine worker or an engine call has failed. Rank 0 sets it once there are engines.
        label: The text that engines report in place of the version, or None.
        modes: The step's `PlainModes`. A call of the caller's code leaves them.
        report: The `PushReport` of a step without a return value.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, version: int | None = None, label: str | None = None) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.version = version
        self.timeline = Timeline()
        self.modes = PlainModes()
        self.check: Callable[[], None] = lambda: None
        self.label = label
        self.report: PushReport | None = None

    def deadline(self) -> Deadline:
        """Return the deadline of a wait that starts now."""
        return Deadline(self.timeout_s)

    def deadline_after_workers(self) -> Deadline:
        """Return a later deadline, for a rank's wait for workers, or for ranks that wait for workers.

        The workers may wait for another rank. A worker's own timeout then comes first, and its error names the rank.
        """
        return Deadline(self.timeout_s + min(timeouts.RANK_GRACE_S, self.timeout_s / 2))

    def wait(self, seconds: float) -> None:
        """Sleep for this time. Raise when a rank, a worker or an engine call has failed."""
        self.ranks.wait(seconds)
        self.check()

    def meet(self) -> None:
        """Return once every rank has called this. Collective.

        Raises when a rank, a worker or an engine call has failed.
        """
        self.ranks.gather(None, self.timeline.phase, check=self.check, deadline=self.deadline_after_workers())
        self.ranks.broadcast(None, self.timeline.phase)

    @contextmanager
    def blaming_ranks(self) -> Iterator[None]:
        """Raise the death of a rank in place of the body's `PeerError`, if the dead rank caused it.

        A dead rank also breaks the transfer. A worker may report this before the EOF of the rank's own connection.
        """
        try:
            yield
        except PeerError:
            self.ranks.wait(timeouts.RANK_DEATH_S)
            raise

    def choose_version(self, newest: int) -> int:
        """Return the requested version, or else `newest` + 1.

        Raises `ConfigError` when the requested version is not over `newest`, or the result is over `MAX_VERSION`.
        """
        version = newest + 1 if self.version is None else self.version
        if version > MAX_VERSION:
            raise ConfigError(f"version {newest} was the last: versions have 63 bits")
        if version <= newest:
            raise ConfigError(
                f"version {version} is not newer than {newest}, the last pushed version: versions only grow. Leave "
                f"`version` out, or give at least {newest + 1}"
            )
        return version
