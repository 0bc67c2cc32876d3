"""Loads what a transport delivers into one engine worker's model.

    plan -> connect -> load (every bucket, any order) -> commit

`plan` and `connect` write nothing. From the first `load` on the model is a mixture, and is `POISONED` until a
`commit`: a push that ends in any other way leaves it so, and only a whole push heals it. This module knows nothing
about vLLM, and nothing about who talks to it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.channel import Deadline
from weightsync.errors import DigestError, ProtocolError, UnsupportedError
from weightsync.kernels.digest import digest
from weightsync.layout import Box, CopyStep, Manifest, Placement, copy_steps, coverage, fuse_groups, itemsize
from weightsync.machine import describe_device
from weightsync.receiver.audit import moved
from weightsync.receiver.eight_bit import Pair, collapse, expand, find_pairs, quantised, rename
from weightsync.receiver.host import ModelHost
from weightsync.receiver.modules import Reload, Unit, choose_roads, live_addresses, units
from weightsync.receiver.trace import Trace, named_tensors, trace_loader, uncovered, writers
from weightsync.transports import make_source
from weightsync.transports.base import Idle, Source, strided

CLEAN, POISONED = "CLEAN", "POISONED"


@dataclass(frozen=True)
class Plan:
    """What `Receiver.plan` found out.

    `used` maps each tensor that the model takes to the dtype it is held in; `partial` maps those that it does not read
    whole to the regions that it reads, as (start, size); `refused` each one that does not fit, or lands where another
    does, to what is wrong with it. `groups` are names that land in one parameter, `reloads` all that a module is loaded
    from, of each that is not loaded in place. `missing` are parts of parameters that no tensor fills, `hints` the names
    of tensors that would. `roads` counts the modules by the road they take.
    """

    used: dict[str, str]
    partial: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]
    refused: dict[str, str]
    groups: list[tuple[str, ...]]
    reloads: list[tuple[str, ...]]
    missing: list[str]
    hints: list[str]
    roads: dict[str, int]


@dataclass(frozen=True)
class Timing:
    nbytes: int
    transfer_s: float
    verify_s: float
    load_s: float


class Receiver:
    """One worker's. Not safe for use by two threads. `version` is the last committed one; `state` CLEAN or POISONED."""

    def __init__(self, host: ModelHost) -> None:
        self.version = 0
        self.state = CLEAN
        self._host = host
        self._units: list[Unit] | None = None
        self._unit_of: dict[str, Unit] = {}
        self._addresses: dict[str, int] = {}  # where the live tensors lay before the first push
        self._manifest: Manifest | None = None
        self._trace = Trace()
        self._pairs: dict[str, Pair] = {}
        self._plan: Plan | None = None
        self._source: Source | None = None
        self._source_name = ""
        self._buckets: list[list[str]] = []
        self._once = 0
        self._settled = False  # a push of all buckets was committed since `connect`, and nothing was begun after it
        self._placements: dict[str, list[Placement]] = {}
        self._steps: dict[str, list[CopyStep]] = {}
        self._push: _Push | None = None

    def plan(self, manifest: Manifest) -> Plan:
        """Trace the model's loader for these tensors. Raises `UnsupportedError` for a model with modules that cannot
        be reloaded. Remembers the last answer."""
        if self._plan is not None and self._manifest == manifest:
            return self._plan
        host = self._host
        with host.scope():
            model = host.pristine()
            if self._units is None:
                found = units(host.live, model)
                choose_roads(found, host.post_process, host.parts, host.device)
                self._units = found
                self._addresses = live_addresses(found, host.live, host.parts)
                self._unit_of = {name: unit for unit in found for name in unit.params}

            def load(weights: Any) -> Any:
                return host.load_weights(model, weights)

            seen = trace_loader(model, load, manifest)
            pairs, unfit = find_pairs(model, manifest, seen)
            if pairs:
                seen = trace_loader(model, load, expand(manifest, pairs))
            missing, doubled = uncovered(model, seen)
            trace = collapse(seen, pairs)
            held = named_tensors(model)
        if buffers := [name for name in trace.computed if name not in self._unit_of]:
            raise UnsupportedError(
                f"the engine's loader computes {len(buffers)} buffers, which this version can only copy into: "
                f"{', '.join(buffers[:5])}"
            )
        if absent := sorted(
            {copy.param for copy in trace.copies} - self._unit_of.keys() - named_tensors(host.live).keys()
        ):
            raise UnsupportedError(
                f"the running model has no {absent[0]}, which the engine's loader makes when it loads one; start the "
                "engine from a checkpoint that has it"
            )
        refused = trace.refused | unfit
        for param, boxes in doubled.items():
            names = rename(writers(model, seen, param, boxes), pairs)
            for name in names:
                refused[name] = f"{_region(param, boxes, held)} is written twice, by {', '.join(names)}"
        used: dict[str, str] = {}
        for copy in trace.copies:
            dtype = str(held[copy.param].dtype).removeprefix("torch.")
            used[copy.name] = max(used.get(copy.name, dtype), dtype, key=itemsize)
        for names in trace.computed.values():
            used.update({name: manifest[name].dtype for name in names})  # arithmetic wants all that the trainer has
        used.update(dict.fromkeys(pairs.keys() & used.keys(), str(host.dtype).removeprefix("torch.")))
        scales = {pair.scale.name for pair in pairs.values()}
        roads = {"in place": 0, "reload": 0, "loader": 0}
        computed_units = {id(self._unit_of[param]) for param in trace.computed if param in self._unit_of}
        for unit in self._units:
            roads["loader" if id(unit) in computed_units else "in place" if unit.in_place else "reload"] += 1
        self._manifest, self._trace, self._pairs = manifest, trace, pairs
        self._plan = Plan(
            used=used,
            partial=_partial(manifest, trace),
            refused=refused,
            groups=fuse_groups([copy for copy in seen.copies if copy.name not in scales]),
            reloads=self._reloads(trace),
            missing=[_region(param, boxes, held) for param, boxes in missing.items()],
            hints=rename(_hints(seen, missing), pairs),
            roads=roads,
        )
        self._steps.clear()
        return self._plan

    def connect(
        self,
        transport: str,
        storages: list[list[Any]],
        placements: Sequence[Placement],
        buckets: Sequence[Sequence[str]],
        once: int,
        fields: dict[str, Any],
        idle: Idle,
        deadline: Deadline,
    ) -> None:
        """Map the trainer's storages, and work out every copy. A push has all buckets until one is committed, and then
        all but the last `once`. Raises `PlacementError` or `ProtocolError`; writes nothing. What was connected before
        is given back."""
        if self._plan is None or self._manifest is None:
            raise ProtocolError("Connect came before Plan")
        offered = [name for names in buckets for name in names]
        if len(set(offered)) != len(offered) or set(offered) != set(self._manifest.names):
            raise ProtocolError("the buckets do not hold every tensor of the manifest exactly once")
        if not 0 <= once < len(buckets):
            raise ProtocolError(
                f"{once} of {len(buckets)} buckets are to be loaded only once; one must be in every push"
            )
        left_out = {name for names in buckets[len(buckets) - once :] for name in names}
        for names in self._plan.reloads:
            if 0 < len(left_out.intersection(names)) < len(names):
                raise ProtocolError(
                    f"{names[0]} and {len(names) - 1} more are loaded together each time, but only some of them are in "
                    f"the {once} buckets that are to be loaded only once"
                )
        if self._source is None or self._source_name != transport:
            self.disconnect()
            self._source, self._source_name = make_source(transport, self._host.device), transport
        with self._host.scope():
            self._source.connect(storages, fields, idle, deadline)
        self._placements = defaultdict(list)
        for placement in placements:
            self._placements[placement.name].append(placement)
        near = self._nearest(storages)
        self._steps = defaultdict(list)
        for step in copy_steps(self._trace.copies, placements, near):
            self._steps[step.name].append(step)
        self._buckets, self._once, self._settled = [list(names) for names in buckets], once, False

    def load(self, version: int, bucket: int, digests: list[list[Any]], idle: Idle, deadline: Deadline) -> Timing:
        """Load one bucket. Marks the model `POISONED` before the first byte is written."""
        if self._source is None:
            raise ProtocolError("Load came before Connect")
        if self._push is None or self._push.version != version:
            if version <= self.version:
                raise ProtocolError(
                    f"version {version} is not newer than {self.version}, which this engine serves: versions only grow"
                )
            count = len(self._buckets) - (self._once if self._settled else 0)
            self._push = _Push(version, self._buckets[:count], self._host, self._trace, self._pairs, self._unit_of)
            self._settled = False
        if not 0 <= bucket < self._push.buckets:
            raise ProtocolError(f"bucket {bucket} of version {version} was announced, which has {self._push.buckets}")
        if bucket in self._push.done:
            raise ProtocolError(f"bucket {bucket} of version {version} was announced twice")
        with self._host.scope():
            started = time.perf_counter()
            following = bucket + 1 if bucket + 1 < self._push.buckets else None
            self._source.fetch(bucket, following, idle, deadline)
            fetched = time.perf_counter()
            for rank, storage, first, nbytes, expected in digests:
                if (found := digest(self._source.storage(rank, storage)[first : first + nbytes])) != expected:
                    raise DigestError(
                        f"bucket {bucket} from trainer rank {rank} arrived with digest {found:016x}, it was sent with "
                        f"{expected:016x}; nothing of it was loaded"
                    )
            verified = time.perf_counter()
            self.state = POISONED
            if not self._push.done and self._push.buckets == len(self._buckets):
                self._push.fill_in_place()  # later pushes leave these constants, and what was copied over them, alone
            nbytes = 0
            for name in self._buckets[bucket]:
                nbytes += self._load_tensor(name, self._push)
                self._push.close_finished()
            _synchronise(self._host.device)
            self._push.done.add(bucket)
        loaded = time.perf_counter()
        return Timing(nbytes, fetched - started, verified - fetched, loaded - verified)

    def commit(self, version: int) -> float:
        """Declare the model complete at `version`. Gives the seconds that derived state took.

        Raises, leaving the model `POISONED`: `ProtocolError` when it is not complete, `UnsupportedError` when a tensor
        that the engine works with is no longer where it was.
        """
        push = self._push
        if push is None or push.version != version or len(push.done) != push.buckets:
            raise ProtocolError(f"Commit of version {version} before all of its buckets were loaded")
        if unfinished := push.unfinished():
            raise ProtocolError(f"Commit of version {version}, but these are incomplete: {', '.join(unfinished[:5])}")
        started = time.perf_counter()
        with self._host.scope():
            self._host.refresh()
            _synchronise(self._host.device)
        self._check_addresses()
        self._push = None
        self._settled = True
        self.version, self.state = version, CLEAN
        return time.perf_counter() - started

    def _check_addresses(self) -> None:
        assert self._units is not None
        now = live_addresses(self._units, self._host.live, self._host.parts)
        if paths := moved(self._addresses, now):
            raise UnsupportedError(
                f"{len(paths)} tensors that the engine works with are not where they were before the push, and CUDA "
                f"graphs have captured their addresses: {', '.join(paths[:5])}. Start the engine anew from a "
                "checkpoint, and with another quantisation or kernel backend if this comes back"
            )

    def disconnect(self) -> None:
        """Give back what was mapped or joined, and forget a push under way (the state stays what it is)."""
        self._push = None
        self._settled = False
        self._steps = {}
        if self._source is not None:
            self._source.close()
            self._source = None

    def _load_tensor(self, name: str, push: _Push) -> int:
        nbytes = 0
        for step in self._steps.get(name, ()):
            target = push.target(step.param)
            if target is None:
                continue  # its loader computes: see below
            source = self._view(step)
            torch.as_strided(target, step.size, step.dst_stride, step.dst_offset).copy_(source)
            nbytes += source.numel() * source.element_size()
            push.arrived(step)
        if push.wanted_whole(name):
            nbytes += push.take_whole(name, self._whole(name))
        return nbytes

    def _view(self, step: CopyStep) -> torch.Tensor:
        assert self._source is not None
        data = self._source.storage(step.rank, step.storage)
        return strided(data, step.src_dtype, step.src_offset, step.size, step.src_stride)

    def _whole(self, name: str) -> torch.Tensor:
        """The full tensor, put together from its placements, in memory of its own."""
        assert self._source is not None
        assert self._manifest is not None
        meta = self._manifest[name]
        placements = self._placements[name]
        whole = torch.empty(meta.shape, dtype=getattr(torch, placements[0].dtype), device=self._host.device)
        for p in placements:
            region = whole[tuple(slice(s, s + n) for s, n in zip(p.box.start, p.box.size, strict=True))]
            data = self._source.storage(p.rank, p.storage)
            region.copy_(strided(data, p.dtype, p.offset, p.box.size, p.stride))
        return whole

    def _reloads(self, trace: Trace) -> list[tuple[str, ...]]:
        """The names that each unit which is not loaded in place is loaded from."""
        computed = {id(self._unit_of[param]) for param in trace.computed}
        units = {id(unit): unit for unit in self._unit_of.values()}
        return [
            tuple(names)
            for key, names in _sources(trace, self._unit_of).items()
            if key in computed or not units[key].in_place
        ]

    def _nearest(self, storages: list[list[Any]]) -> int | None:
        """The trainer rank on this worker's own GPU, if any: its replicas are read first."""
        own = describe_device(self._host.device)[1]
        return next((rank for rank, _, _, row in storages if own and row.get("gpu_uuid") == own), None)


class _Push:
    """One version on its way in: which units are open, and what each still waits for."""

    def __init__(
        self,
        version: int,
        buckets: Sequence[Sequence[str]],
        host: ModelHost,
        trace: Trace,
        pairs: dict[str, Pair],
        unit_of: dict[str, Unit],
    ) -> None:
        self.version = version
        self.buckets = len(buckets)
        self.done: set[int] = set()
        self._host = host
        self._trace = trace
        self._pairs = pairs
        self._unit_of = unit_of
        self._live = named_tensors(host.live)
        # A unit gets all of its tensors in this push or none: `connect` has seen to it.
        coming = {name for names in buckets for name in names}
        sources = {key: set(names) for key, names in _sources(trace, unit_of).items() if coming.issuperset(names)}
        by_loader = {id(unit_of[param]) for param in trace.computed}
        self._computed = {key: sources[key] for key in by_loader & sources.keys()}  # needed whole
        self._whole: dict[str, torch.Tensor] = {}
        self._open: dict[int, Reload] = {}
        self._complete: list[int] = []  # units that have all they need
        self._waiting: dict[int, int] = defaultdict(int)  # unit -> elements still to come
        for copy in trace.copies:
            unit = unit_of.get(copy.param) if copy.name in coming else None
            if unit is not None and not unit.in_place and id(unit) not in self._computed:
                self._waiting[id(unit)] += copy.box.numel
        self._units = {id(unit): unit for unit in unit_of.values()}

    def target(self, param: str) -> torch.Tensor | None:
        """The storage-wide tensor that a planned copy into `param` writes to; None where the loader will do it."""
        unit = self._unit_of.get(param)
        if unit is not None and id(unit) in self._computed:
            return None
        if unit is None or unit.in_place:
            return self._live[param].data
        return self._reload(unit).fresh[param].data

    def fill_in_place(self) -> None:
        """What the loader sets to a constant, for parameters that are loaded in place: they may never have been."""
        for fill in self._trace.fills:
            unit = self._unit_of.get(fill.param)
            if unit is None or (unit.in_place and id(unit) not in self._computed):
                live = self._live[fill.param].data
                torch.as_strided(live, fill.size, fill.stride, fill.offset).fill_(fill.value)

    def arrived(self, step: CopyStep) -> None:
        unit = self._unit_of.get(step.param)
        if unit is not None and id(unit) in self._waiting:
            self._waiting[id(unit)] -= math.prod(step.size)
            if self._waiting[id(unit)] == 0:
                del self._waiting[id(unit)]
                self._complete.append(id(unit))

    def wanted_whole(self, name: str) -> bool:
        return any(name in names for names in self._computed.values())

    def take_whole(self, name: str, tensor: torch.Tensor) -> int:
        self._whole[name] = tensor
        return tensor.numel() * tensor.element_size()

    def close_finished(self) -> None:
        """Take every unit that now has all it needs down the rest of its road."""
        while self._complete:
            self._close(self._complete.pop())
        for key in [key for key, names in self._computed.items() if names <= self._whole.keys()]:
            names = self._computed.pop(key)
            self._load_by_loader(self._units[key], names)
            self._close(key)
            for name in [n for n in names if not self.wanted_whole(n)]:
                del self._whole[name]

    def unfinished(self) -> list[str]:
        return [self._units[key].names[0] for key in (*self._waiting, *self._computed)]

    def _reload(self, unit: Unit) -> Reload:
        if id(unit) not in self._open:
            self._open[id(unit)] = Reload(unit, self._trace.fills, self._host.device)
        return self._open[id(unit)]

    def _close(self, key: int) -> None:
        self._reload(self._units[key]).close(self._host.post_process, self._host.parts)
        del self._open[key]

    def _load_by_loader(self, unit: Unit, names: set[str]) -> None:
        """The engine's own loader, over the real tensors, into this unit's fresh parameters; the rest is on `meta`."""
        reload = self._reload(unit)
        weights = ((name, self._whole[name]) for name in sorted(names))
        with reload.installed():
            self._host.load_weights(self._host.pristine(), quantised(weights, self._pairs, self._host.dtype))


def _sources(trace: Trace, unit_of: dict[str, Unit]) -> dict[int, dict[str, None]]:
    """By id of the unit: the names of the tensors that it is loaded from, in order."""
    names: dict[int, dict[str, None]] = defaultdict(dict)
    for copy in trace.copies:
        if (unit := unit_of.get(copy.param)) is not None:
            names[id(unit)][copy.name] = None
    for param, computed_from in trace.computed.items():
        names[id(unit_of[param])].update(dict.fromkeys(computed_from))
    return names


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _region(param: str, boxes: list[Box], held: dict[str, torch.Tensor]) -> str:
    """A readable name for part of a parameter: "model.layers.0.self_attn.qkv_proj.weight rows 64..96 of 128"."""
    shape = held[param].shape
    if any(box.size == tuple(shape) for box in boxes) or not shape:
        return param
    rows = ", ".join(f"{box.start[0]}..{box.start[0] + box.size[0]}" for box in boxes[:3])
    return f"{param} rows {rows} of {shape[0]}"


def _partial(manifest: Manifest, trace: Trace) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The regions that are read of each tensor that is not read whole, as tensor parallelism does."""
    whole = set().union(*trace.computed.values())
    regions: dict[str, list[Box]] = defaultdict(list)
    for copy in trace.copies:
        regions[copy.name].append(copy.box)
    return {
        name: [(box.start, box.size) for box in boxes]
        for name, boxes in regions.items()
        if name not in whole and coverage(manifest[name].shape, boxes)[0]
    }


def _hints(trace: Trace, missing: dict[str, list[Box]]) -> list[str]:
    """The names of the tensors that would fill what is missing, read off another layer that has its own."""
    patterns: dict[tuple[str, ...], list[tuple[str, str]]] = defaultdict(list)
    for copy in trace.copies:
        patterns[_without_numbers(copy.param)].append((copy.param, copy.name))
    hints: list[str] = []
    offered = {copy.name for copy in trace.copies}
    for param in missing:
        for other, name in patterns[_without_numbers(param)]:
            renamed = name
            for theirs, ours in zip(other.split("."), param.split("."), strict=True):
                if theirs != ours:
                    renamed = renamed.replace(f".{theirs}.", f".{ours}.", 1)
            if renamed not in offered and renamed not in hints:
                hints.append(renamed)
    return hints


def _without_numbers(name: str) -> tuple[str, ...]:
    return tuple("#" if part.isdigit() else part for part in name.split("."))
