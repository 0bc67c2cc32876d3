"""The compilation of a push from the ranks' inventories and the workers' load plans."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from weightsync.errors import ConfigError
from weightsync.fleet.fleet import Fleet
from weightsync.fleet.kv_roles import check_roles
from weightsync.planning.bucketing import Bucketer
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Manifest
from weightsync.planning.load_plan import LoadPlan
from weightsync.planning.merge import merge_manifests
from weightsync.planning.transfer_plan import TransferPlan, count_load_paths, longest_way, make_chunks
from weightsync.sources.megatron import MegatronSource
from weightsync.sources.quantize import pairs
from weightsync.strategies import plan_checks
from weightsync.strategies.base import Options, warn_of_kept
from weightsync.strategies.inventory import Inventory, frozen_everywhere, machines, manifests
from weightsync.transports.base import RouteRequest, Transport

logger = logging.getLogger(__name__)

_TOGETHER = -1
"""The number in place of all engines that share experts."""


def compile_plan(
    fleet: Fleet,
    own: Manifest,
    everyone: Sequence[Inventory],
    transport: Transport,
    bucketer: Bucketer,
    options: Options,
    invitations: Sequence[dict[str, Any]] = (),
    earlier: Sequence[TransferPlan] = (),
) -> TransferPlan:
    """Ask the connected engines for their load plans, and compile the transfer plan, on rank 0.

    invitations: those of the transport for the workers. The workers meet while they plan.
    earlier: the plans of the last push. With an encoding, workers keep their bytes if chunks are cut as before.

    Raises `ManifestError` and `UnsupportedError` for tensors that do not fit the engines, before anything is written.
    Raises `ConfigError` as `check_roles` does.
    """
    check_roles(fleet.handles, options.pause, options.rolling)
    manifest = merge_manifests(manifests(own, everyone))
    together = _quantized(manifest, options)
    plans = fleet.plan(manifest, options.selection.keep, transport.name, invitations)
    distinct = [*{id(plan): plan for plan in plans}.values()]
    _check(manifest, together, _of_engines(fleet, plans), options)
    as_it_is = {name for pair in together for name in pair}
    travelling = plan_checks.wire_manifest(manifest, distinct, options.selection, as_it_is, transport.sends_unread)
    tied = set.intersection(*({*plan.duplicates} - {*plan.used} for plan in distinct))
    options.selection.warn_of_idle(manifest, [each.unmatched for each in everyone], tied | {*dict(together).values()})
    locations = [at for each in everyone for at in each.locations if at.name in travelling]
    together = [pair for pair in together if pair[0] in travelling]
    reads = plan_checks.reads_of(travelling, plans)
    workers = [worker.machine for worker in fleet.workers]
    chains = transport.route(RouteRequest(machines(everyone), workers, travelling, locations, reads))
    frozen = frozen_everywhere(everyone).intersection(travelling.names)
    buckets, last = plan_checks.make_buckets(bucketer, travelling, distinct, together, frozen)
    in_place = frozenset(() if chains else travelling.names).difference(*(each.unmapped for each in everyone))
    names, max_bytes = [bucket.names for bucket in buckets], getattr(bucketer, "max_bytes", None)
    hops = longest_way(chains)
    if transport.encoding is not None:
        hops = next((plan.hops for plan in earlier if hops <= 2 * plan.hops), hops)
    least = transport.min_chunk_bytes
    if max_bytes is not None:
        max_bytes = min(max_bytes, transport.max_chunk_bytes)
    chunks = make_chunks(travelling, chains, names, last, in_place, locations, max_bytes, dict(together), least, hops)
    doubles = plan_checks.duplicates(distinct)
    return TransferPlan(travelling, chains, chunks, len(reads), count_load_paths(plans), doubles, hops)


def _quantized(manifest: Manifest, options: Options) -> list[tuple[str, str]]:
    """Return the name of each quantised weight with its scales' name. Raise `ConfigError` if there is none."""
    if options.quantize is None:
        return []
    if not (together := pairs(manifest)):
        raise ConfigError(
            f"quantize={options.quantize!r}, but none of the {len(manifest)} tensors is a matrix `....weight` outside "
            "of TensorSelection.unquantized"
        )
    return together


def _of_engines(fleet: Fleet, plans: Sequence[LoadPlan]) -> list[tuple[str, list[LoadPlan]]]:
    """Return each engine's name with the distinct plans of its workers. Engines with equal plans count once.

    Engines that share experts, such as a server for each core, count as one.
    """
    names = {one.number: one.engine.name for one in fleet.handles} | {_TOGETHER: "the group of engines"}
    of_engine: dict[int, dict[int, LoadPlan]] = {}
    for worker, plan in zip(fleet.workers, plans, strict=True):
        number = _TOGETHER if worker.hello.shares_experts else worker.hello.group
        of_engine.setdefault(number, {})[id(plan)] = plan
    alike = grouped(of_engine, lambda number: frozenset(of_engine[number])).values()
    if len(alike) == 1:  # an error that holds for all engines names none
        names = dict.fromkeys(names, "the engine")
    return [(names[first], [*of_engine[first].values()]) for first, *_ in alike]


def _check(
    manifest: Manifest,
    together: Sequence[tuple[str, str]],
    engines: Sequence[tuple[str, Sequence[LoadPlan]]],
    options: Options,
) -> None:
    """Raise `ManifestError` for tensors that do not fit the engines. Log the tensors that stay behind or unchanged."""
    plans = [plan for _, own in engines for plan in own]
    plan_checks.check_quantized(manifest, together, plans)
    is_padded = isinstance(options.source, MegatronSource) and options.source.vocab_size is None
    if unused := plan_checks.check_plans(manifest, engines, is_padded, options.selection.keep):
        text = "%d tensors are not loaded, such as %s: the engine does not run their part of the model"
        logger.info(text, len(unused), unused[0])
    warn_of_kept(plans)
