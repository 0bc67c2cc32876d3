"""Copy every tensor into the engines: the strategy of `"ipc"`, `"broadcast"` and `CheckpointTransport(folder)`.

What travels, in which chunks and between whom is negotiated once, and again when the model's tensors have moved, or
after a failure. A push then runs that plan: no message is sent for a chunk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from msgspec import Struct
from torch import distributed

from weightsync.control.fleet import Fleet
from weightsync.control.member import CALLER
from weightsync.control.ranks import Ranks
from weightsync.control.runtime import boot_id, describe_device
from weightsync.control.update import Update
from weightsync.control.wire import Connect, Done, MachineInfo, typed
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.kernels.digest import SAMPLES, WHOLE
from weightsync.planning.bucketing import open_bucketer
from weightsync.planning.checks import check_plans, check_quantized, cut, reads_of, wire_manifest
from weightsync.planning.layout import Manifest, ShardLocation, merge_manifests
from weightsync.planning.rows import Run, Storage
from weightsync.planning.transfer_plan import DEFAULT_MAX_BYTES, Route, TransferPlan, make_chunks
from weightsync.report import Progress, PushReport, WorkerReport
from weightsync.sources.base import LastShards, Model, TensorShard
from weightsync.sources.quantize import QuantizingSource, pairs
from weightsync.sources.rename import renamed
from weightsync.strategies.base import FleetStrategy, Options, locate, warn_of_kept
from weightsync.transports.base import LocalTensor, LocalTensors, Transport

logger = logging.getLogger(__name__)

_PATIENCE = 7
"""Rank 0 waits at most this many times as long as for anything else until every worker is done with its chunks."""


class Inventory(Struct):
    """What one rank has. `unmapped` are the tensors that workers cannot read where they lie."""

    manifest: Manifest
    locations: list[ShardLocation]
    unmapped: list[str]
    frozen: list[str]
    machine: MachineInfo


class Memory(Struct):
    """What one rank lets each worker map, what of it is read in place, and the digest of that."""

    storages: list[list[Storage]]
    in_place: list[Run]
    proof: int


@dataclass
class _Link:
    """What was negotiated, which holds while this rank's shards lie where they lay.

    nbytes: what travels in the first push, and in a later one.
    pushes: how many every engine has committed.
    """

    plan: TransferPlan
    shards: list[TensorShard]
    nbytes: tuple[int, int]
    pushes: int = 0


class CopyWeights(FleetStrategy):
    """Every engine gets a copy of every tensor, over one transport."""

    def __init__(self, options: Options, transport: Transport) -> None:
        super().__init__(options)
        self._transport = transport
        self._source = renamed(options.source, options.selection)
        if options.quantize is not None:
            self._source = QuantizingSource(
                self._source, options.quantize, options.selection, wait=self._wait, timeout_s=options.timeout_s
            )
        bucketer: Any = options.bucketer
        if bucketer is None:
            by_module = transport.name in ("ipc", "cuda_ipc") and options.backend not in ("megatron", "stream")
            bucketer = "module" if by_module else "threshold"
        if isinstance(bucketer, str):
            default = None if bucketer == "parameter" else DEFAULT_MAX_BYTES
            bucketer = open_bucketer(bucketer, default if options.max_bytes is None else options.max_bytes)
        elif options.max_bytes is not None:
            raise ConfigError(
                f"max_bytes={options.max_bytes} is for a bucketer that is named; give it to {bucketer!r} itself"
            )
        self._bucketer = bucketer
        self._verify = options.verify or "sampled"
        self._pause = options.pause or "keep"
        self._last = LastShards()
        self._link: _Link | None = None
        self._update: Update | None = None

    def run(self, update: Update, model: Model) -> PushReport:
        started = time.perf_counter()
        self._update = update
        self._take_in()
        if self._fleet is not None:
            update.check = self._fleet.check
        ranks, timeline = update.ranks, update.timeline
        with timeline.during("plan"):
            link, version, sample, place_sample, digests = self._look(update, model)
        planned = opened = time.perf_counter()
        fleet, first = self._fleet, link.pushes == 0
        due, nbytes = link.plan.due(first), link.nbytes[0 if first else 1]
        if fleet is not None:
            with timeline.during("pause"):
                fleet.opened()
            opened = time.perf_counter()
            with timeline.during("transfer"):
                fleet.go(version, sample, place_sample, digests)
        with (
            timeline.during("transfer"),
            update.blaming_ranks(),
            Progress(self._options.progress, f"push {version}", due, ranks.rank == 0) as bar,
        ):
            self._transport.send(bar, sample, update)
            self._source.gather(())
        sent = time.perf_counter()
        with timeline.during("load"), update.blaming_ranks():
            done = fleet.done(self._done_s(link.plan, due)) if fleet is not None else []
            timeline.sent_s = ranks.gather(sent - opened, "transfer")  # every rank has sent its part
        loaded = time.perf_counter()
        report: PushReport | None = None
        if fleet is not None:
            with timeline.during("commit"):
                self._transport.complete(version)
                commit_s = [answer.load_s for answer in fleet.commit(update.label)]
            now = time.perf_counter()
            workers = _worker_reports(fleet, done, commit_s)
            report = PushReport(
                version=version,
                nbytes=nbytes,
                chunks=len(due),
                plan_s=planned - started,
                control_s=opened - started + now - loaded,
                gather_s=sent - opened,
                transfer_s=max(worker.transfer_s for worker in workers),
                verify_s=max(worker.verify_s for worker in workers),
                load_s=max(worker.load_s for worker in workers),
                pause_s=now - fleet.paused_at,
                total_s=now - started,
                load_paths=link.plan.load_paths,
                workers=workers,
                left_out=tuple(sorted(self._left_out)),
            )
            logger.info("pushed %s", report)
        with timeline.during("commit"):
            report = PushReport.from_dict(ranks.broadcast(asdict(report) if report is not None else None, "commit"))
        link.pushes += 1
        return report

    def reset(self, error: WeightSyncError) -> None:
        super().reset(error)
        self._disconnect()

    def close(self) -> None:
        super().close()
        self._disconnect()

    def leave_out(self, engines: Sequence[str]) -> None:
        self._left_out.update(engines)

    def _take_in(self) -> None:
        """Connect anew, on rank 0, where engines that were left out answer again."""
        if not self._left_out or self._fleet is None:
            return
        if back := {one.name for one in self._find_engines() if one.name in self._left_out and one.is_alive()}:
            logger.warning("engines that were left out answer again: %s", ", ".join(sorted(back)))
            self._left_out -= back
            self._fleet.close()
            self._transport.abort()  # the other ranks follow when they prepare anew
            self._fleet = self._link = None

    def _disconnect(self) -> None:
        self._transport.abort()
        self._link = self._update = None
        self._last = LastShards()
        self._source.close()

    def _look(self, update: Update, model: Model) -> tuple[_Link, int, int | None, int | None, list[int]]:
        """Return a link that holds for the model, the version, the samples that are verified of what travels and of
        what is read in place, and the digest of each rank's sample of the latter. Collective.

        Engines are paused meanwhile where that ends no request: a model has seldom moved.
        """
        ranks, link = update.ranks, self._link
        early = link is not None and self._pause in ("keep", CALLER)
        if early:
            self._open(update)
        shards = self._last.of(self._source.shards(model))
        holds = link is not None and shards is link.shards
        # Only then: memory that the model has left may have been freed.
        digest = self._transport.look(self._place_sample()) if holds else 0
        everyone = ranks.gather([holds, digest], "plan")
        if link is None or not ranks.broadcast(all(each for each, _ in everyone), "plan"):
            if early and self._fleet is not None:
                self._fleet.cancel()
            early, self._link = False, None
            link = self._link = self._negotiate(update, model, shards)
            digest = self._transport.look(self._place_sample())
            everyone = ranks.gather([True, digest], "plan")
        version = ranks.broadcast(update.choose_version(self._newest_version()) if self._fleet else 0, "plan")
        if not early:
            self._open(update)
        digests = [digest for _, digest in everyone] if self._verify != "none" else []
        return link, version, self._sample(), self._place_sample(), digests

    def _open(self, update: Update) -> None:
        """Begin to open the engines' update, on rank 0.

        A version that cannot be is refused before anything is paused.
        """
        if self._fleet is not None:
            update.choose_version(self._newest_version())
            with update.timeline.during("pause"):
                self._fleet.open()

    def _newest_version(self) -> int:
        assert self._fleet is not None
        return max(self._fleet.newest_version, self._transport.newest_version)

    def _sample(self) -> int | None:
        """Return which sample of what travels gets digests in the next push."""
        if self._verify == "none":
            return None
        pushes = self._link.pushes if self._link is not None else 0
        return WHOLE if self._verify == "full" or pushes == 0 else pushes % SAMPLES

    def _place_sample(self) -> int | None:
        """Return which sample is compared of what is read in place, and was proven in full when it was mapped."""
        if self._verify == "none":
            return None
        return WHOLE if self._verify == "full" or self._link is None else self._link.pushes

    def _negotiate(self, update: Update, model: Model, shards: list[TensorShard]) -> _Link:
        """Agree with every engine worker on what travels, in which dtype, in which chunks, from where. Collective."""
        ranks, options = update.ranks, self._options
        assert isinstance(ranks, Ranks)
        self._others.meet(ranks)
        manifest = self._source.manifest(model)
        held = locate(shards, ranks.rank)
        kind, gpu_uuid = describe_device(_device(held))
        inventory = Inventory(
            manifest=manifest,
            locations=list(held),
            unmapped=_unmapped(held, self._transport),
            frozen=sorted({s.meta.name for s in shards if options.selection.freezes(s.meta.name, s.trains)}),
            machine=MachineInfo(f"trainer rank {ranks.rank}", kind, gpu_uuid, boot_id()),
        )
        everyone = typed(ranks.gather(inventory, "plan"), list[Inventory])
        made = self._plan(update, everyone) if ranks.rank == 0 else None
        plan = typed(ranks.broadcast(made, "plan"), TransferPlan)
        with update.timeline.during("connect"):
            self._connect(update, plan, held)
        return _Link(plan, shards, (plan.nbytes(True), plan.nbytes(False)))

    def _plan(self, update: Update, everyone: Sequence[Inventory]) -> TransferPlan:
        """Rank 0: ask the engines, and compile the push."""
        options, transport = self._options, self._transport
        manifest = merge_manifests([own.manifest for own in everyone])
        locations = [location for own in everyone for location in own.locations]
        together = pairs(manifest) if options.quantize is not None else []
        if options.quantize is not None and not together:
            raise ConfigError(
                f"quantize={options.quantize!r}, but none of the {len(manifest)} tensors is a matrix `....weight` "
                "that is not named in TensorSelection.unquantized"
            )
        fleet = self._call_in(update)
        plans = fleet.plan(manifest)
        check_quantized(manifest, together, plans)
        is_padded = options.backend == "megatron" and options.vocab_size is None
        if unused := check_plans(manifest, plans, is_padded):
            logger.info(
                "%d tensors are not pushed, such as %s: the engine does not run that part of the model",
                len(unused),
                unused[0],
            )
        warn_of_kept(plans)
        as_it_is = {name for pair in together for name in pair}
        travelling = wire_manifest(manifest, plans, options.selection, as_it_is)
        locations = [location for location in locations if location.name in travelling]
        together = [pair for pair in together if pair[0] in travelling]
        reads = [reads_of(travelling, plan) for plan in plans]
        machines = [own.machine for own in everyone]
        workers = [worker.machine for worker in fleet.workers]
        route = transport.route(machines, workers, travelling, locations, reads)
        frozen = frozen_everywhere(everyone).intersection(travelling.names) if transport.keeps_frozen else set()
        buckets, last = cut(self._bucketer, travelling, plans, together, frozen)
        in_place: frozenset[str] = frozenset()
        if route is Route.IN_PLACE:
            in_place = frozenset(travelling.names).difference(*(own.unmapped for own in everyone))
        chunks = make_chunks(
            travelling,
            route,
            [bucket.names for bucket in buckets],
            last,
            in_place,
            locations,
            reads,
            getattr(self._bucketer, "max_bytes", None),
            dict(together),
        )
        load_paths = {path: sum(plan.load_paths[path] for plan in plans) for path in plans[0].load_paths}
        return TransferPlan(travelling, route, chunks, tuple(reads), fleet.host, load_paths)

    def _connect(self, update: Update, plan: TransferPlan, held: dict[ShardLocation, LocalTensor]) -> None:
        """Connect transport and workers, and prove what is read in place. Collective."""
        ranks, transport = update.ranks, self._transport
        endpoints = transport.prepare(plan, LocalTensors(held, self._source.gather), update)
        proof = transport.look(WHOLE if self._verify != "none" else None)
        own = Memory([each.storages for each in endpoints], transport.in_place(), proof)
        everyone = typed(ranks.gather(own, "connect"), list[Memory])
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
            fleet.attach(messages, transport.connect)
            fleet.release("init")
        ranks.broadcast(None, "connect")

    def _wait(self, seconds: float) -> None:
        if self._update is not None:
            self._update.wait(seconds)

    def _done_s(self, plan: TransferPlan, due: Sequence[int]) -> float:
        """Return how long workers may take for their chunks once rank 0 has sent its own."""
        staged = sum(not plan.chunks[number].in_place for number in due)
        return min(1 + staged, _PATIENCE) * self._options.timeout_s


def frozen_everywhere(everyone: Sequence[Inventory]) -> set[str]:
    """Return the tensors that are frozen on every rank that holds any of them."""
    changing = [{location.name for location in own.locations}.difference(own.frozen) for own in everyone]
    return set().union(*(own.frozen for own in everyone)).difference(*changing)


def _unmapped(held: dict[ShardLocation, LocalTensor], transport: Transport) -> list[str]:
    """Return the tensors of which this rank has a shard that workers cannot read where it lies."""
    return sorted({location.name for location, tensor in held.items() if not transport.can_map(tensor)})


def _device(held: dict[ShardLocation, LocalTensor]) -> torch.device:
    """Return where this rank's tensors are; for one that holds none, where its process group works."""
    if held:
        return next((each.tensor.device for each in held.values() if each.tensor.is_cuda), torch.device("cpu"))
    on_gpu = distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _worker_reports(fleet: Fleet, done: Sequence[Done], commit_s: Sequence[float]) -> tuple[WorkerReport, ...]:
    return tuple(
        WorkerReport(worker.connection.peer, each.nbytes, each.transfer_s, each.verify_s, each.load_s + extra_s)
        for worker, each, extra_s in zip(fleet.workers, done, commit_s, strict=True)
    )
