"""Let the trainer write into the engine's own memory: the strategy of `"single_copy"` and `SingleCopyTransport`.

`attach` makes the model's parameters views of the engine's (attached_model.py). After that no bytes move. A push pauses
generation, runs the body of `writing()`, waits for every rank's writes, and commits the version.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from weightsync.errors import ConfigError, EngineError, PlacementError
from weightsync.fleet import ENGINE_VARIABLE, EngineList
from weightsync.fleet.engine_handle import ConnectedWorker
from weightsync.fleet.kv_roles import check_roles
from weightsync.net.runtime import boot_id, this_process
from weightsync.net.update import Update
from weightsync.net.wire import Done, Go, MachineInfo, ParametersExported
from weightsync.planning.layout import Manifest
from weightsync.planning.merge import merge_manifests
from weightsync.report import PushReport
from weightsync.sources.base import Model
from weightsync.sources.fsdp import FsdpSource
from weightsync.strategies.attached_model import AttachedModel, lay_over
from weightsync.strategies.base import OF_COPIES, FleetStrategy, Options, warn_of_kept, worker_reports
from weightsync.strategies.non_finite import FiniteCheck
from weightsync.strategies.plan_checks import check_plans
from weightsync.transports import handle_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SingleCopyTransport:
    """Weights in the engine's memory alone: `WeightSync.attach` makes the model's parameters views of the engine's.

    Args:
        handle_file: The engine's `vllm_bridge_config.json`. It names the engine for `WeightSync(engine=None)`. None:
            the file found by `weightsync.transports.handle_file.find`.
    """

    handle_file: str | os.PathLike[str] | None = None
    demands: ClassVar[str] = "writing"

    def open(self, options: Options) -> SharedMemory:
        """Return the strategy. Raises `ConfigError` for options that it cannot work with."""
        if options.backend != "fsdp" or options.quantize is not None:
            raise ConfigError(
                'single_copy takes a plain model, or one sharded by `parallelize_module`, with backend="fsdp" and '
                f"quantize=None. Got backend={options.backend!r}, quantize={options.quantize!r}"
            )
        if options.non_finite == "refuse":
            raise ConfigError(
                'non_finite="refuse" has no effect with single_copy: the trainer itself writes into the engine. Check '
                'the gradients before a step, or set non_finite="warn"'
            )
        options.selection.refuse("this SingleCopyTransport", "frozen", "only_trained", "dtypes", "rename")
        options.refuse("this SingleCopyTransport", *OF_COPIES)
        if options.engines.given is None:
            options = replace(options, engines=EngineList(self._read_engine, options.timeout_s))
        return SharedMemory(options, self)

    def _read_engine(self) -> str | None:
        """Return the engine for `WeightSync(engine=None)`. None: $WEIGHTSYNC_ENGINE names it."""
        return None if ENGINE_VARIABLE in os.environ else self.engine_url()

    def engine_url(self) -> str:
        """Return the address of the engine in the handle file. Raises as `handle_file.find`, `read` and `check` do."""
        found = handle_file.read(handle_file.find(self.handle_file))
        handle_file.check(found)
        if found.url is None:
            raise ConfigError(
                f"{found.path} has no address: its engine is no server, or does not know its address. Give the "
                "engine, WeightSync(engine=...)"
            )
        return found.url

    def check_instances(self, engine_instances: Sequence[str]) -> None:
        """Raise `PlacementError` if the user named a handle file of another engine."""
        if self.handle_file is None:
            return
        found = handle_file.read(handle_file.find(self.handle_file))
        handle_file.check(found)
        if [worker.engine_instance for worker in found.workers] != list(engine_instances):
            raise PlacementError(
                f"{found.path} belongs to another engine than this address; name the file of the engine at this "
                "address, or none"
            )


class SharedMemory(FleetStrategy):
    """One copy of the weights. The trainer's ranks write it, and the engine's workers read it."""

    def __init__(self, options: Options, transport: SingleCopyTransport) -> None:
        super().__init__(options)
        self._transport = transport
        self._finite = FiniteCheck(options, options.source)
        self._manifest: Manifest | None = None  # this rank's tensors of the attached model
        self._attached: AttachedModel | None = None

    def run(self, update: Update, model: Model) -> PushReport:
        if self._attached is None:
            raise ConfigError("no model is attached: call `attach(model)` before `push`")
        if self._attached.model is not model:
            raise ConfigError("another model is attached; single_copy pushes the attached model alone")
        with self.writing(update):
            pass
        assert update.report is not None
        return update.report

    def attach(self, update: Update, model: nn.Module) -> None:
        if self._attached is not None:
            raise ConfigError("a model is attached already; close this WeightSync first")
        assert isinstance(self._options.source, FsdpSource)
        with update.timeline.during("plan"):
            shards = self._options.source.sketch(model)
            self._manifest = Manifest(tuple(dict.fromkeys(shard.meta for shard in shards)))
            self._attached = lay_over(model, shards, *self._connect(update), update)

    @contextmanager
    def writing(self, update: Update) -> Iterator[None]:
        attached = self._attached
        if attached is None:
            raise ConfigError("there is no model to write: call `attach` first")
        ranks, timeline = update.ranks, update.timeline
        with timeline.during("plan"):
            attached.check()
            if ranks.broadcast(ranks.rank == 0 and self._fleet is None, "plan"):
                self._connect(update)
            fleet, version, done = self._fleet, 0, list[Done]()
            if fleet is not None:
                update.check = fleet.check
                version = update.choose_version(fleet.newest_version)
            ranks.gather(None, "plan")  # rank 0 waits here until every rank is in the same call
        with timeline.during("pause"):
            if fleet is not None:
                fleet.open()
                fleet.wait_open()
                fleet.go(Go(version, None, 0, []))  # from here on the weights count as a mixture
                done = fleet.wait_done()
            ranks.broadcast(None, "pause")
        with timeline.during("write"):
            opened = time.perf_counter()
            with attached.open(), update.modes.left():
                yield
            body_s = time.perf_counter() - opened
            attached.fence(update)
        report: PushReport | None = None
        with timeline.during("commit"):
            if fleet is not None:
                workers = worker_reports(fleet, done, fleet.commit(update.label))
                report = timeline.report(workers, fleet.report(), away_s=body_s, version=version, nbytes=0)
                logger.info("wrote %s", report)
            self._finite.source.read(attached.model)
            self._finite.warn(update, 0 if report is None else report.version, self._finite.look())
            update.report = ranks.broadcast(report, "commit", PushReport)

    def close(self) -> None:
        """Disconnect from the engine. The parameters stay its memory, for as long as the model lives."""
        if self._attached is not None:
            self._attached.release()
            self._attached = None
        super().close()

    def _connect(self, update: Update) -> tuple[list[MachineInfo], list[ParametersExported]]:
        """Return the machine and the exported parameters of each engine worker. Collective.

        Raises `EngineError` if the engine is not the one of the attached model.
        """
        ranks = update.ranks
        assert self._manifest is not None
        self._roster.others.meet(ranks, refuse="single_copy")
        own = self._manifest, boot_id(), this_process()
        everyone: list[tuple[Manifest, str, str]] = ranks.gather(own, "plan", tuple[Manifest, str, str])
        told: tuple[list[MachineInfo], list[ParametersExported]] | None = None
        if ranks.rank == 0:
            manifest = merge_manifests([each for each, _, _ in everyone])
            fleet = self._open_fleet(update)
            check_pairs([host for _, host, _ in everyone], fleet.connect())
            check_roles(fleet.handles, self._options.pause)
            selection = self._options.selection
            plans = fleet.plan(manifest, selection.keep)
            warn_of_kept(plans)
            selection.warn_of_idle(manifest, [selection.unmatched()])  # every rank has all names
            if unused := check_plans(manifest, [("the engine", plans)], False, selection.keep):
                raise PlacementError(
                    f"the engine does not run the part of the model with {unused[0]}, and cannot share it. Use "
                    'transport="ipc", or attach a model without this part'
                )
            exported = fleet.export([process for _, _, process in everyone])
            self._transport.check_instances([answer.engine_instance for answer in exported])
            told = [worker.machine for worker in fleet.workers], exported
            fleet.release("init")
        workers, exports = ranks.broadcast(told, "connect", tuple[list[MachineInfo], list[ParametersExported]])
        instances = [export.engine_instance for export in exports]
        if self._attached is not None and self._attached.engine_instances != instances:
            raise EngineError(
                "the model's parameters are not this engine's memory: the engine was restarted since `attach`, or "
                "taken by another trainer. Close this WeightSync, build a new model on the meta device, and attach it"
            )
        return workers, exports


def check_pairs(hosts: Sequence[str], workers: Sequence[ConnectedWorker]) -> None:
    """Raise `PlacementError` unless each trainer rank has its own worker of one engine, on the same host.

    hosts: the boot id of each rank's host.
    """
    if len(engines := {worker.hello.group for worker in workers}) > 1:
        raise PlacementError(
            f"single_copy shares the memory of one engine, got {len(engines)} engines; leave out all but one, or use "
            'transport="ipc"'
        )
    if len(workers) != len(hosts):
        raise PlacementError(
            f"{len(hosts)} trainer ranks cannot share the memory of {len(workers)} engine workers: single_copy pairs "
            'rank i with worker i of one engine. Start one rank for each worker, or use transport="ipc"'
        )
    strangers = [f"trainer rank {rank}" for rank, host in enumerate(hosts) if host != hosts[0]]
    strangers += [worker.connection.peer for worker in workers if worker.hello.boot_id != hosts[0]]
    if strangers:
        raise PlacementError(
            f"single_copy shares memory of one host, but {', '.join(strangers)} runs on another host than trainer "
            'rank 0; use transport="broadcast"'
        )
