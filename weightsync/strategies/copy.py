"""Copy tensors into engines: the strategy of `"ipc"`, `"broadcast"`, `"nixl"` and `CheckpointTransport(folder)`.

Ranks and workers negotiate the tensors, chunks and paths once. They negotiate again when the model's tensors have
moved, or after a failure. A push runs that plan without a message for each chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weightsync.errors import ConfigError, WeightSyncError
from weightsync.fleet import EngineList
from weightsync.fleet.engine_handle import CALLER, ConnectedWorker, EngineHandle
from weightsync.fleet.fleet import Fleet
from weightsync.kernels.first_use import prepare_kernels
from weightsync.net.addresses import is_loopback
from weightsync.net.runtime import collector_paused, submit
from weightsync.net.update import Timeline, Update
from weightsync.net.wire import Done
from weightsync.planning.bucketing import open_bucketer
from weightsync.planning.transfer_plan import PackedPlan, TransferPlan, count_load_paths
from weightsync.report import EngineReport, Progress, PushReport, WorkerReport
from weightsync.sources.base import Model, Reading, SteadySource, await_writes
from weightsync.sources.megatron import MegatronSource
from weightsync.sources.quantize import QuantizingSource
from weightsync.sources.rename import renamed
from weightsync.strategies.base import FleetStrategy, Options, locate, worker_reports
from weightsync.strategies.compile import compile_plan
from weightsync.strategies.duplicates import places_of_two, refuse_different
from weightsync.strategies.inventory import Inventory, check_settings, device_of, machines, settings_of, take_inventory
from weightsync.strategies.non_finite import FiniteCheck
from weightsync.strategies.pushed import TrainerMemory
from weightsync.strategies.rank_max import RankMax
from weightsync.strategies.transfer_session import SessionChanges, Sessions, TransferSession
from weightsync.transports.base import LocalTensors, Transport

logger = logging.getLogger(__name__)


@dataclass
class PlannedPush:
    """A push from the end of its plan phase on. Each group adds its results.

    groups: sessions with one commit each, one group after the other. Empty: every engine has the version.
    digests: on rank 0 for each session, the digest of each rank's sample of the bytes read in place.
    nbytes: the bytes of the tensors in the push, each counted once.
    done: on rank 0, the answers of the last group's workers.
    sent_bytes: on rank 0, the bytes sent by all ranks to all groups so far.
    workers, engines: on rank 0, the reports of all groups so far.
    """

    groups: list[list[TransferSession]]
    version: int
    label: str | None
    digests: dict[TransferSession, list[int]]
    nbytes: int
    done: list[Done] = field(default_factory=list)
    sent_bytes: int = 0
    workers: list[WorkerReport] = field(default_factory=list)
    engines: list[EngineReport] = field(default_factory=list)

    @property
    def sessions(self) -> list[TransferSession]:
        return [session for group in self.groups for session in group]

    @property
    def left_out(self) -> frozenset[str]:
        """The tensors left out of every session."""
        return frozenset.intersection(*(session.left_out for session in self.sessions))


class CopyWeights(FleetStrategy):
    """A copy of every tensor in every engine, over one transport."""

    def __init__(self, options: Options, transport: Transport, another: Callable[[], Transport] | None = None) -> None:
        """Push over `transport`, and over `another()` to engines that join later.

        If `another` is None, all engines are connected anew when one joins.
        """
        super().__init__(options)
        if options.rolling and (another is None or options.pause == CALLER):
            one = 'pause="caller" has all paused' if options.pause == CALLER else "one transport or stream serves all"
            raise ConfigError(f"rolling=True updates one engine after the other, and {one}: leave rolling out")
        self._sessions = Sessions(options, transport, another)
        self._updated: list[str] = []  # on rank 0: the names of engines with the version of the push under way
        given = renamed(SteadySource(options.source), options.selection)
        self._finite = FiniteCheck(options, given)
        self._source = self._finite.source
        self._largest = RankMax(options.ranks, self._wait)
        if options.quantize is not None:
            self._source = QuantizingSource(self._source, options.quantize, options.selection, self._largest)
        bucketer: Any = options.bucketer
        if bucketer is None:
            by_order = options.is_stream or isinstance(options.source, MegatronSource)
            bucketer = "module" if transport.name in ("ipc", "cuda_ipc") and not by_order else "threshold"
        if isinstance(bucketer, str):
            bucketer = open_bucketer(bucketer, options.max_bytes)
        elif options.max_bytes is not None:
            raise ConfigError(
                f"max_bytes={options.max_bytes} has no effect with a bucketer object; give it to {bucketer!r} itself"
            )
        self._bucketer = bucketer
        self._verify = options.verify or "sampled"
        self._reading: Reading | None = None  # the negotiated tensors
        self._memory = TrainerMemory(self._verify)
        self._update: Update | None = None
        self._model: Model = None  # of the push under way
        self._is_touched = False  # the push has changed sessions, or has passed the last step that may refuse it

    def run(self, update: Update, model: Model) -> PushReport:
        report = self._push(update, model, False)
        assert report is not None
        return report

    def catch_up(self, update: Update, model: Model) -> PushReport | None:
        if self._options.is_stream or self._verify == "none":
            what = "a stream" if self._options.is_stream else 'with verify="none" a model'
            raise ConfigError(f"{what} cannot be compared with the last push: push it to all engines")
        self._memory.catches_up = True
        return self._push(update, model, True)

    def _push(self, update: Update, model: Model, late: bool) -> PushReport | None:
        """Push to all engines. If `late`, push the others' version to the engines without it.

        Returns None for a late push without such engines.
        """
        self._update, self._updated, self._model = update, [], model
        timeline = update.timeline
        # A stream runs the user's code. It may need the collector.
        with timeline.during("plan"), nullcontext() if self._options.is_stream else collector_paused():
            push = self._plan(update, model, late)
            if push.sessions:
                # While the engines pause. Later, workers on the same GPU would wait.
                for session in push.sessions:
                    session.transport.begin_send(session.seal(push.version))
                self._finite.begin(push.left_out)
                self._memory.begin(push.version)
        self._is_touched = bool(push.sessions)
        if not push.sessions:
            return None
        report: PushReport | None = None
        for group in push.groups:
            seen = self._load(update, push, group)
            with timeline.during("commit"):
                if self._fleet is not None:
                    self._commit(self._fleet, push, group)
                if group is push.groups[-1]:
                    if self._fleet is not None:
                        report = self._report(timeline, push)
                    self._finite.warn(update, push.version, seen)
                    # The last step: a rank may return after it.
                    report = update.ranks.broadcast(report, "commit", PushReport)
        for session in push.sessions:
            session.pushes += 1
        if self._options.rolling and report is not None and not late:
            self._sessions.sort([each.pause_s for each in report.engines])
        self._updated, self._is_touched, self._model = [], False, None
        return report

    def _load(self, update: Update, push: PlannedPush, group: Sequence[TransferSession]) -> list[str]:
        """Make the engines of a group load the version, and verify it. Return the tensors seen by `FiniteCheck.look`.

        Opens the update of a later group's engines first.
        """
        timeline, seen = update.timeline, list[str]()
        is_later = group is not push.groups[0]
        with timeline.during("pause"):
            if self._fleet is not None:
                if is_later:
                    self._fleet.open([one for session in group for one in session.handles])
                self._fleet.wait_open()
            if is_later:
                update.ranks.broadcast(None, "pause")  # the deadline of a send begins when the engines are ready
        with timeline.during("transfer"):
            self._send(update, push, group)
            self._source.gather((), update.meet)
        with timeline.during("load"), update.blaming_ranks():
            if group is push.groups[-1]:
                seen = self._finite.look(push.left_out)  # while the workers load
            # For each group: no engine may commit weights written during its transfer.
            self._memory.note(push.version, push.label)
            self._wait_done(update, push, group)
        return seen

    def _send(self, update: Update, push: PlannedPush, group: Sequence[TransferSession]) -> None:
        """Tell workers to begin, and send them this rank's part, session by session."""
        for session in group:
            if self._fleet is not None:
                self._fleet.go(session.go(push.version, push.digests[session]), session.handles)
            with (
                update.blaming_ranks(),
                Progress(self._options.progress, f"push {push.version}", session.due, update.ranks.rank == 0) as bar,
            ):
                session.transport.send(bar, session.seal(push.version), update)

    def _wait_done(self, update: Update, push: PlannedPush, group: Sequence[TransferSession]) -> None:
        """Wait on rank 0 for every worker and rank of a group. Note there what they answer."""
        if self._fleet is not None:
            push.done = self._fleet.wait_done(max(session.done_s(self._options.timeout_s) for session in group))
        own = update.timeline.seconds("transfer"), sum(session.transport.sent_bytes for session in group)
        everyone = update.ranks.gather(own, "transfer")
        update.timeline.sent_s = [seconds for seconds, _ in everyone]
        push.sent_bytes += sum(nbytes for _, nbytes in everyone)

    def _commit(self, fleet: Fleet, push: PlannedPush, group: Sequence[TransferSession]) -> None:
        """Make the engines of a group serve the version, on rank 0."""
        for session in group:
            session.transport.on_commit(push.version)
        push.workers.extend(worker_reports(fleet, push.done, fleet.commit(push.label)))
        push.engines.extend(fleet.report())
        self._updated = [each.name for each in push.engines]
        for session in group:
            session.transport.after_commit()

    def _report(self, timeline: Timeline, push: PlannedPush) -> PushReport:
        """Return the report of a push after its last commit, on rank 0."""
        report = timeline.report(
            push.workers,
            push.engines,
            version=push.version,
            nbytes=push.nbytes,
            chunks=sum(len(session.due) for session in push.sessions),
            sent_bytes=push.sent_bytes,
            load_paths=count_load_paths([session.plan for session in push.sessions]),
            left_out=tuple(sorted(self._roster.lost)),
        )
        logger.info("pushed %s", report)
        return report

    def explain(self, error: WeightSyncError) -> WeightSyncError:
        error = super().explain(error)
        if self._updated:
            error.message += f"; engines with the new version: {', '.join(self._updated)}"
            error.add_facts(updated=self._updated)
        version = self._update.version if self._update is not None and self._is_touched else None
        if version is not None and self._fleet is not None and version <= self._fleet.newest_version:
            error.message += f"; version {version} is spent, so push again with a greater one"
            error.add_facts(spent=["the version"])
        return error

    def is_untouched(self) -> bool:
        # A rank changes sessions only after rank 0's broadcast of the changes, so rank 0 knows of every change.
        return self._fleet is not None and not self._is_touched

    def withdraw(self) -> bool:
        is_as_before = super().withdraw()  # removing files takes long, and engines generate meanwhile
        for session in self._sessions.negotiated:
            session.transport.withdraw()
        return is_as_before

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
        self._sessions.disconnect()
        self._largest.abort()
        self._memory.clear()
        self._update = self._reading = self._model = None
        self._updated = []
        self._source.close()
        self._is_touched = False

    def _plan(self, update: Update, model: Model, late: bool) -> PlannedPush:
        """Choose sessions and version, and negotiate what has changed. Collective."""
        self._roster.others.check_unchanged(update.ranks.rank)
        self._finite.refuse(update, model)
        is_open = self._sync_engines(update) and not late and self._open_early(update)
        reading = self._source.read(model)
        self._memory.find(model, reading)
        changes, digests = self._agree_on_changes(update, reading, late)
        made = 0  # new sessions
        if changes.affect(self._sessions.negotiated):
            self._is_touched = True
            if is_open and self._fleet is not None:
                self._fleet.cancel()
            is_open = False
            transport = self._sessions.apply(changes, None if self._fleet is None else self._fleet.handles)
            while transport is not None:
                self._sessions.add(self._negotiate(update, model, reading, transport, late))
                self._reading, made = reading, made + 1
                is_last = update.ranks.broadcast(not self._unlinked(late), "plan")
                transport = None if is_last else self._sessions.begin()
            digests = update.ranks.gather(self._sessions.prepare_push() if made or not late else [], "plan")
        first = len(self._sessions.negotiated) - made if late else 0
        sessions = self._sessions.negotiated[first:]
        of_session = {session: [each[at] for each in digests] for at, session in enumerate(sessions, first)}
        if pairs := places_of_two(sessions):
            # Ranks that quantise compute scales together, and may be out of step after a refusal.
            self._is_touched |= self._options.quantize is not None
            refuse_different(update, self._source, model, reading.shards, pairs, self._options.is_stream)
            if self._options.is_stream:
                self._source.read(model)  # begin the stream anew
        version = update.ranks.broadcast(self._choose_version(update, sessions, late), "plan")
        groups = [[each] for each in sessions] if self._options.rolling else [sessions] if sessions else []
        if groups and not is_open:
            self._open(update, groups[0])
        pushed = self._memory.pushed
        label = pushed.label if late and pushed is not None else update.label
        if self._verify == "none":
            of_session = {session: [] for session in sessions}
        return PlannedPush(groups, version, label, of_session, max((each.nbytes for each in sessions), default=0))

    def _open_early(self, update: Update) -> bool:
        """Begin to open the update before the model is read, on rank 0, if that ends no request. Return whether it did.

        A model has seldom moved. So engines pause while the ranks read it.
        """
        sessions, handles = self._sessions.negotiated, [] if self._fleet is None else self._fleet.handles
        # A refused call has taken note of engines that have left. Sessions have not.
        has_left = any(one not in handles for session in sessions for one in session.handles)
        is_changing = not sessions or has_left or self._sessions.merges(handles)
        if is_changing or self._options.rolling or self._options.pause not in (None, "keep", CALLER):
            return False
        self._choose_version(update, sessions, False)  # an invalid version is refused before an engine pauses
        self._open(update, sessions)
        return True

    def _agree_on_changes(self, update: Update, reading: Reading, late: bool) -> tuple[SessionChanges, list[list[int]]]:
        """Return the changes of sessions and, on rank 0, each rank's digests for the earlier sessions. Collective."""
        ranks, holds = update.ranks, reading is self._reading
        if late:
            await_writes(reading.shards)
        if late and not (holds and self._memory.is_as_pushed()):
            raise ConfigError(
                "there is no version to catch up with: the last push failed, or the model was written or moved since. "
                "Push it to all engines"
            )
        # Digest only if the shards hold: memory that the model has left may be freed.
        digests = self._sessions.prepare_push() if holds and not late else []
        everyone = ranks.gather([holds, digests, settings_of(reading)], "plan")
        check_settings([settings for *_, settings in everyone])
        changes = self._choose(all(each for each, *_ in everyone), late) if ranks.rank == 0 else None
        return ranks.broadcast(changes, "plan", SessionChanges), [digests for _, digests, _ in everyone]

    def _choose(self, holds: bool, late: bool) -> SessionChanges:
        """Return the changes of sessions, on rank 0."""
        if self._fleet is None:
            return SessionChanges([], [], True)
        handles = self._fleet.handles
        joining = [one for one in handles if not self._is_served(one)] if late else None
        return self._sessions.choose(holds, handles, joining)

    def _is_served(self, one: EngineHandle) -> bool:
        return self._memory.pushed is not None and one.served == self._memory.pushed.version

    def _choose_version(self, update: Update, sessions: Sequence[TransferSession], late: bool) -> int:
        """Return the version of a push over these sessions, on rank 0. Raises `ConfigError` if it is not newer."""
        fleet, pushed = self._fleet, self._memory.pushed
        if fleet is None or not sessions:
            return 0
        if not late or pushed is None:
            newest = max(session.transport.newest_version for session in sessions)
            return update.choose_version(max(newest, fleet.newest_version))
        newest = max(one.newest_version for session in sessions for one in session.handles)
        if newest >= pushed.version:
            raise ConfigError(
                f"an engine that is to catch up with version {pushed.version} has had version {newest}, and "
                "versions only grow. Push a newer version to all engines"
            )
        return pushed.version

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
        device = device_of(held, options.ranks)
        # Meanwhile the workers trace their loaders, and this rank would wait.
        kernels = submit("kernels", partial(prepare_kernels, device))
        inventory = take_inventory(reading, held, ranks.rank, transport, options)
        everyone: list[Inventory] = ranks.gather(inventory, "plan", Inventory)
        is_first = ranks.rank == 0
        handles, workers, invitations = self._connect(update, transport, everyone, late) if is_first else ([], [], [])
        if own := ranks.broadcast(invitations[: ranks.size], "plan"):
            transport.meet(own[ranks.rank], device, update.deadline())  # in the background, while the workers plan
        made = None
        if is_first and (fleet := self._fleet) is not None:
            offered, to_workers = reading.manifest, invitations[ranks.size :]
            earlier = [each.plan for each in self._sessions.negotiated] + self._sessions.again
            made = compile_plan(fleet, offered, everyone, transport, self._bucketer, options, to_workers, earlier)
        packed = PackedPlan.of(made) if made is not None and ranks.size > 1 else None
        told = ranks.broadcast(packed, "plan", PackedPlan)
        plan: TransferPlan = told.read() if made is None else made
        with update.timeline.during("connect"):
            if options.quantize is not None:
                self._largest.connect(update, any(each.tensor.is_cuda for each in held.values()))
            kernels.result()
            transport.keeps_runs = self._sessions.keeps(plan)
            session = TransferSession(transport, plan, self._verify, workers, handles)
            session.connect(update, LocalTensors(held, self._gather, lambda: self._model), self._fleet)
        return session

    def _connect(
        self, update: Update, transport: Transport, everyone: Sequence[Inventory], late: bool
    ) -> tuple[list[EngineHandle], list[ConnectedWorker], list[dict[str, Any]]]:
        """Connect the engines without a session, on rank 0. Return them, their workers, and the invitations to meet."""
        fleet, ranks = self._open_fleet(update), update.ranks
        handles = self._unlinked(late)[: 1 if self._options.rolling else None]
        workers = fleet.connect(handles)
        # Workers with a loopback address run on this host, so any address of this host works.
        host = ranks.host if ranks.size > 1 and is_loopback(fleet.host) else fleet.host
        return handles, workers, transport.invite(machines(everyone), [each.machine for each in workers], host)

    def _unlinked(self, late: bool) -> list[EngineHandle]:
        """Return the engines that wait for a session, on rank 0."""
        linked = [one for session in self._sessions.negotiated for one in session.handles]
        handles = [] if self._fleet is None else self._fleet.handles
        return [one for one in handles if one not in linked and not (late and self._is_served(one))]

    def _gather(self, names: Sequence[str]) -> None:
        assert self._update is not None
        self._source.gather(names, self._update.meet)

    def _wait(self, seconds: float) -> None:
        if self._update is not None:
            self._update.wait(seconds)
