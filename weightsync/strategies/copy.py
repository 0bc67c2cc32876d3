"""Copy every tensor into the engines: the strategy of `"ipc"`, `"broadcast"` and `CheckpointTransport(folder)`.

Ranks and workers negotiate the tensors, chunks and paths once. They negotiate again when the model's tensors have
moved, or after a failure. A push runs that plan without a message for each chunk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.fleet import EngineList
from weightsync.fleet.engine_handle import CALLER, ConnectedWorker, EngineHandle
from weightsync.fleet.fleet import Fleet
from weightsync.kernels.digest import WHOLE
from weightsync.net.update import Update
from weightsync.net.wire import Connect, Done, Go
from weightsync.planning.bucketing import open_bucketer
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.planning.wire_types import ByteRange, Storage
from weightsync.report import Progress, PushReport, WorkerReport
from weightsync.sources.base import Model, Reading, SteadySource
from weightsync.sources.megatron import MegatronSource
from weightsync.sources.quantize import QuantizingSource
from weightsync.sources.rename import renamed
from weightsync.sources.stream import StreamSource
from weightsync.strategies.base import FleetStrategy, Options, locate
from weightsync.strategies.compile import compile_plan
from weightsync.strategies.duplicates import places_of_two, refuse_different
from weightsync.strategies.inventory import Inventory, take_inventory
from weightsync.strategies.non_finite import FiniteCheck
from weightsync.strategies.pushed import Pushed, TrainerMemory
from weightsync.strategies.rank_max import RankMax
from weightsync.strategies.transfer_session import SessionChanges, TransferSession, choose_session_changes
from weightsync.transports.base import LocalTensors, Transport

logger = logging.getLogger(__name__)


class Memory(Struct):
    """One rank's storages for each worker, its byte ranges read in place, and their digest."""

    storages: list[list[Storage]]
    in_place: list[ByteRange]
    proof: int


class CopyWeights(FleetStrategy):
    """A copy of every tensor in every engine, over one transport."""

    def __init__(self, options: Options, transport: Transport, another: Callable[[], Transport] | None = None) -> None:
        """Push over `transport`, and over `another()` to engines that join later.

        If `another` is None, all engines are connected anew when one joins.
        """
        super().__init__(options)
        self._transport, self._another = transport, another
        if options.encoding is not None and options.encoding not in transport.encodings:
            raise ConfigError(
                f"encoding={options.encoding!r}; encodings of transport {transport.name!r}: "
                f"{', '.join(map(repr, transport.encodings)) or 'none'}"
            )
        self._finite = FiniteCheck(options.non_finite)
        self._source = self._finite.watch(renamed(SteadySource(options.source), options.selection), options.source)
        self._largest = RankMax(options.ranks, self._wait)
        if options.quantize is not None:
            self._source = QuantizingSource(self._source, options.quantize, options.selection, self._largest)
        bucketer: Any = options.bucketer
        if bucketer is None:
            by_order = isinstance(options.source, MegatronSource | StreamSource)
            bucketer = "module" if transport.name in ("ipc", "cuda_ipc") and not by_order else "threshold"
        if isinstance(bucketer, str):
            bucketer = open_bucketer(bucketer, options.max_bytes)
        elif options.max_bytes is not None:
            raise ConfigError(
                f"max_bytes={options.max_bytes} has no effect with a bucketer object; give it to {bucketer!r} itself"
            )
        self._bucketer = bucketer
        self._verify = options.verify or "sampled"
        self._pause = options.pause or "keep"
        self._reading: Reading | None = None  # the negotiated tensors
        self._sessions: list[TransferSession] = []
        self._joining: list[Transport] = []  # transports of the session under negotiation
        self._pushed: Pushed | None = None
        self._memory = TrainerMemory(options.source, self._verify)
        self._update: Update | None = None
        self._is_touched = False  # the push has changed sessions, or has passed the last step that may refuse it

    def run(self, update: Update, model: Model) -> PushReport:
        report = self._push(update, model, False)
        self._is_touched = False
        assert report is not None
        return report

    def catch_up(self, update: Update, model: Model) -> PushReport | None:
        if isinstance(self._options.source, StreamSource):
            raise ConfigError("a stream cannot be compared with the last push: push it to all engines")
        self._memory.catches_up = True
        report = self._push(update, model, True)
        self._is_touched = False
        return report

    def _push(self, update: Update, model: Model, late: bool) -> PushReport | None:
        """Push to all engines. If `late`, push the others' version to the engines without it.

        Returns None for a late push without such engines.
        """
        started = time.perf_counter()
        self._update = update
        ranks, timeline = update.ranks, update.timeline
        with timeline.during("plan"):
            self._roster.others.check_unchanged(ranks.rank)
            self._finite.refuse(update, model)
            sessions, version, digests = self._look(update, model, late)
        self._is_touched = True
        if not sessions:
            return None
        planned = opened = time.perf_counter()
        fleet, chunks = self._fleet, sum(len(session.due) for session in sessions)
        label = self._pushed.label if late and self._pushed is not None else update.label
        nbytes = max(session.nbytes for session in sessions)
        if fleet is not None:
            with timeline.during("pause"):
                fleet.wait_open()
            opened = time.perf_counter()
        self._memory.begin(model, self._reading.shards if self._reading is not None else ())
        self._send(update, version, sessions, digests)
        self._source.gather((), update.meet)
        sent = time.perf_counter()
        pushed = self._memory.note(version, label)  # overlaps with the workers' loading
        with timeline.during("load"), update.blaming_ranks():
            patience_s = max(session.done_s(self._options.timeout_s) for session in sessions)
            done = fleet.wait_done(patience_s) if fleet is not None else []
            own = sent - opened, sum(session.transport.sent_bytes for session in sessions)
            everyone = ranks.gather(own, "transfer")  # rank 0 waits here for every rank's part
            timeline.sent_s = [seconds for seconds, _ in everyone]
            sent_bytes = sum(nbytes for _, nbytes in everyone)
        loaded = time.perf_counter()
        report: PushReport | None = None
        if fleet is not None:
            with timeline.during("commit"):
                for session in sessions:
                    session.transport.on_commit(version)
                commit_s = [answer.load_s for answer in fleet.commit(label)]
            now = time.perf_counter()
            report = PushReport.of(
                _worker_reports(fleet, done, commit_s),
                version=version,
                nbytes=nbytes,
                chunks=chunks,
                sent_bytes=sent_bytes,
                plan_s=planned - started,
                control_s=opened - started + now - loaded,
                gather_s=sent - opened,
                pause_s=now - fleet.paused_at,
                total_s=now - started,
                load_paths={
                    path: sum(session.plan.load_paths[path] for session in sessions)
                    for path in sessions[0].plan.load_paths
                },
                left_out=tuple(sorted(self._roster.lost)),
            )
            logger.info("pushed %s", report)
        with timeline.during("commit"):
            self._finite.warn(update, version, frozenset.intersection(*(session.left_out for session in sessions)))
            report = ranks.broadcast(report, "commit", PushReport)  # the last step: a rank may return after it
        for session in sessions:
            session.pushes += 1
        self._pushed = pushed
        return report

    def _send(
        self, update: Update, version: int, sessions: Sequence[TransferSession], digests: Sequence[list[int]]
    ) -> None:
        """Tell workers to begin, and send them this rank's part, session by session."""
        timeline = update.timeline
        for session, those in zip(sessions, digests, strict=True):
            if self._fleet is not None:
                with timeline.during("transfer"):
                    self._fleet.go(Go(version, session.sample, session.place_sample, those), session.handles)
            with (
                timeline.during("transfer"),
                update.blaming_ranks(),
                Progress(self._options.progress, f"push {version}", session.due, update.ranks.rank == 0) as bar,
            ):
                session.transport.send(bar, session.sample, update)

    def is_untouched(self) -> bool:
        # A rank changes sessions only after rank 0's broadcast of the changes, so rank 0 knows of every change.
        return self._fleet is not None and not self._is_touched

    def reset(self, error: WeightSyncError) -> None:
        super().reset(error)
        self._disconnect()

    def close(self) -> None:
        super().close()
        self._disconnect()

    @property
    def engines(self) -> EngineList:
        return self._options.engines

    def leave_out(self, engines: Sequence[str]) -> None:
        self._roster.leave_out(engines)

    def _disconnect(self) -> None:
        for transport in (*(session.transport for session in self._sessions), *self._joining):
            _let_go(transport)
        self._largest.abort()
        self._sessions, self._joining, self._pushed = [], [], None
        self._memory.clear()
        self._update = self._reading = None
        self._source.close()
        self._is_touched = False

    def _look(self, update: Update, model: Model, late: bool) -> tuple[list[TransferSession], int, list[list[int]]]:
        """Return the sessions of the push, the version, and the ranks' digests for each session. Collective.

        With `pause` "keep" or "caller" engines pause meanwhile: a model has seldom moved, and no request ends.
        """
        ranks = update.ranks
        is_early = self._sync_engines(update) and bool(self._sessions) and self._pause in ("keep", CALLER) and not late
        if is_early:
            self._choose_version(update, self._sessions, late)  # an invalid version is refused before an engine pauses
            self._open(update, self._sessions)
        reading = self._source.read(model)
        holds = reading is self._reading
        if late and not (holds and self._memory.is_as(self._pushed, model, reading.shards)):
            raise ConfigError(
                "there is no version to catch up with: the last push failed, or the model was written or moved since. "
                "Push it to all engines"
            )
        # Digest only if the shards hold: memory that the model has left may be freed.
        digests = [session.prepare_push() for session in self._sessions] if holds else []
        everyone = ranks.gather([holds, digests], "plan")
        changes = self._choose(all(each for each, _ in everyone), late) if ranks.rank == 0 else None
        changes = ranks.broadcast(changes, "plan", SessionChanges)
        if changes.affect(self._sessions):
            self._is_touched = True
            if is_early and self._fleet is not None:
                self._fleet.cancel()
            is_early = False
            self._follow(changes, update, model, reading, late)
            everyone = ranks.gather([True, [session.prepare_push() for session in self._sessions]], "plan")
        sessions = self._sessions
        if late:
            sessions = self._sessions[-1:] if changes.connects else []
        if pairs := places_of_two(sessions):
            # Ranks that quantise compute scales together, and may be out of step after a refusal.
            self._is_touched |= self._options.quantize is not None
            is_stream = isinstance(self._options.source, StreamSource)
            refuse_different(update, self._source, model, reading.shards, pairs, is_stream)
            if is_stream:
                self._source.read(model)  # begin the stream anew
        version = ranks.broadcast(self._choose_version(update, sessions, late), "plan")
        if sessions and not is_early:
            self._open(update, sessions)
        of_session = {session: [each[at] for _, each in everyone] for at, session in enumerate(self._sessions)}
        return sessions, version, [of_session[session] if self._verify != "none" else [] for session in sessions]

    def _choose(self, holds: bool, late: bool) -> SessionChanges:
        """Return the changes of sessions, on rank 0."""
        if self._fleet is None:
            return SessionChanges([], None, True)
        handles = self._fleet.handles
        joining = [one for one in handles if not self._is_served(one)] if late else None
        return choose_session_changes(self._sessions, holds, handles, joining, self._another is None)

    def _is_served(self, one: EngineHandle) -> bool:
        return self._pushed is not None and one.served == self._pushed.version

    def _choose_version(self, update: Update, sessions: Sequence[TransferSession], late: bool) -> int:
        """Return the version of a push over these sessions, on rank 0. Raises `ConfigError` if it is not newer."""
        fleet = self._fleet
        if fleet is None or not sessions:
            return 0
        newest = max(session.transport.newest_version for session in sessions)
        if not late or self._pushed is None:
            return update.choose_version(max(newest, fleet.newest_version))
        newest = max(newest, *(one.newest_version for session in sessions for one in session.handles))
        if newest >= self._pushed.version:
            raise ConfigError(
                f"an engine that is to catch up with version {self._pushed.version} has had version {newest}, and "
                "versions only grow. Push a newer version to all engines"
            )
        return self._pushed.version

    def _follow(self, changes: SessionChanges, update: Update, model: Model, reading: Reading, late: bool) -> None:
        """Drop sessions, and negotiate a new one. Collective."""
        before, rank = self._sessions, update.ranks.rank
        again = None if changes.again is None else before[changes.again].transport
        for number, left in changes.kept:
            session = before[number]
            if left and rank:
                session.transport.drop_workers(left)
            if self._fleet is not None:
                session.handles = [one for one in session.handles if one in self._fleet.handles]
        self._sessions = [before[number] for number, _ in changes.kept]
        for session in before:
            if session not in self._sessions and session.transport is not again:
                _let_go(session.transport)
        if changes.connects:
            transport = again or (self._transport if self._another is None else self._another())
            if transport.owner not in (None, self):
                raise ConfigError("another WeightSync uses the transport: close the other, or use another transport")
            transport.owner, transport.encoding = self, self._options.encoding
            self._joining = [transport]
            session = self._negotiate(update, model, reading, transport, late)
            self._sessions, self._joining, self._reading = [*self._sessions, session], [], reading

    def _open(self, update: Update, sessions: Sequence[TransferSession]) -> None:
        """Begin to open the update of these sessions' engines, on rank 0."""
        if self._fleet is not None:
            with update.timeline.during("pause"):
                self._fleet.open([one for session in sessions for one in session.handles])

    def _negotiate(
        self, update: Update, model: Model, reading: Reading, transport: Transport, late: bool
    ) -> TransferSession:
        """Agree with engines without a session on tensors, dtypes, chunks and locations. Collective."""
        ranks, options = update.ranks, self._options
        self._roster.others.meet(ranks)
        held = locate(reading.shards, ranks.rank)
        inventory = take_inventory(reading, held, ranks.rank, transport, options)
        everyone: list[Inventory] = ranks.gather(inventory, "plan", Inventory)
        handles: list[EngineHandle] = []
        workers: list[ConnectedWorker] = []
        made = None
        if ranks.rank == 0:
            fleet = self._open_fleet(update)
            linked = [one for session in self._sessions for one in session.handles]
            handles = [one for one in fleet.handles if one not in linked and not (late and self._is_served(one))]
            workers = fleet.connect(handles)
            made = compile_plan(fleet, everyone, transport, self._bucketer, options)
        plan: TransferPlan = ranks.broadcast(made, "plan", TransferPlan)
        with update.timeline.during("connect"):
            if options.quantize is not None:
                self._largest.connect(update, any(each.tensor.is_cuda for each in held.values()))
            self._connect(update, plan, LocalTensors(held, self._gather, model), transport)
        return TransferSession(transport, plan, self._verify, workers, handles)

    def _connect(self, update: Update, plan: TransferPlan, tensors: LocalTensors, transport: Transport) -> None:
        """Connect transport and workers, and compare digests of the bytes read in place. Collective."""
        ranks = update.ranks
        endpoints = transport.prepare(plan, tensors, update)
        proof = transport.prepare_push(WHOLE if self._verify != "none" else None)
        own = Memory([each.storages for each in endpoints], transport.in_place(), proof)
        everyone: list[Memory] = ranks.gather(own, "connect", Memory)
        fleet = self._fleet
        if fleet is None:
            transport.connect(update.deadline())
        else:
            messages = [
                Connect(
                    transport=transport.name,
                    storages=[row for memory in everyone for row in memory.storages[number]],
                    chunks=list(endpoint.arrivals),
                    frozen=plan.frozen_chunks,
                    in_place=[run for memory in everyone for run in memory.in_place],
                    proof=[memory.proof for memory in everyone] if self._verify != "none" else [],
                    fields=endpoint.fields,
                )
                for number, endpoint in enumerate(endpoints)
            ]
            fleet.connect_transport(messages, transport.connect)
            fleet.release("init")
        ranks.broadcast(None, "connect")

    def _gather(self, names: Sequence[str]) -> None:
        assert self._update is not None
        self._source.gather(names, self._update.meet)

    def _wait(self, seconds: float) -> None:
        if self._update is not None:
            self._update.wait(seconds)


def _let_go(transport: Transport) -> None:
    transport.abort()
    transport.owner = None


def _worker_reports(fleet: Fleet, done: Sequence[Done], commit_s: Sequence[float]) -> tuple[WorkerReport, ...]:
    return tuple(
        WorkerReport(worker.connection.peer, each.nbytes, each.transfer_s, each.verify_s, each.load_s + extra_s)
        for worker, each, extra_s in zip(fleet.workers, done, commit_s, strict=True)
    )
