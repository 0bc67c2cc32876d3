"""Loads what a transport delivers into one engine worker's model.

    plan -> connect -> [expect ->] load of each bucket, in their order -> commit
         -> share ->   load of the one that there is -> commit        where the trainer writes itself

Nothing up to `expect` writes, and `withdraw` takes that back. From the first `load` on the model is a mixture, and is
`POISONED` until a `commit`: a push that ends in any other way leaves it so, and only a whole push heals it. This module
knows nothing about vLLM, and nothing about who talks to it.
"""

from __future__ import annotations

import math
import struct
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from weightsync.deadline import Deadline
from weightsync.errors import DigestError, ProtocolError, UnsupportedError
from weightsync.kernels.digest import PARTS, WHOLE, Digests, warm_up
from weightsync.layout import Box, CopyStep, Manifest, Placement, copy_steps, coverage, fuse_groups, itemsize
from weightsync.machine import describe_device
from weightsync.memory import export
from weightsync.receiver.audit import moved
from weightsync.receiver.eight_bit import Pair, collapse, expand, find_pairs, quantised, renamed, unpacked
from weightsync.receiver.host import ModelHost
from weightsync.receiver.modules import Place, Reload, Unit, choose_roads, live_addresses, parameter_places, units
from weightsync.receiver.routes import Routes, computed_units, find_routes, sources_of
from weightsync.receiver.trace import Trace, named_tensors, trace_loader, uncovered, writers
from weightsync.transports import make_source
from weightsync.transports.base import Idle, Nothing, Source, strided
from weightsync.wire import CLEAN, POISONED


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


class _Span(NamedTuple):
    """Bytes of a storage that come with a digest."""

    rank: int
    storage: int
    first: int
    nbytes: int


class Receiver:
    """One worker's. Not safe for use by two threads. `version` is the last committed one; `state` CLEAN or POISONED."""

    def __init__(self, host: ModelHost) -> None:
        self.version = 0
        self.state = CLEAN
        self._host = host
        self._constructed: Set[str] | None = None  # names of the model's parameters before its loader ran
        self._units: list[Unit] | None = None
        self._outlived: list[Any] = []  # of units before these, whose kernels may run until all is loaded anew
        self._unit_of: dict[str, Unit] = {}
        self._addresses: dict[str, int] = {}  # where the live tensors lay before the first push
        self._parameters: list[Place] = []  # parameters alone
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
        self._read: set[tuple[int, int]] = set()  # storages that something is read of
        self._elsewhere: set[tuple[int, int]] = set()  # those in the memory of another GPU
        self._spans: list[list[_Span]] = []  # of each bucket
        self._digests: dict[tuple[int, int | None], tuple[list[int], Digests]] = {}  # by bucket and turn: spans, theirs
        self._routes: Routes | None = None  # of the connection
        self._push: _Push | None = None

    def plan(self, manifest: Manifest) -> Plan:
        """Trace the model's loader for these tensors. Raises `UnsupportedError` for a model with modules that cannot
        be reloaded. Remembers the last answer."""
        if self._plan is not None and self._manifest == manifest:
            return self._plan
        host = self._host
        with host.scope():
            model = host.pristine()
            if self._constructed is None:
                self._constructed = dict(model.named_parameters()).keys()

            def load(weights: Any) -> Any:
                return host.load_weights(model, weights)

            with unpacked(model) as packs:
                seen = trace_loader(model, load, manifest)
                pairs, unfit = find_pairs(model, manifest, seen)
            if pairs or packs:
                seen = trace_loader(model, load, expand(manifest, pairs))
            missing, doubled = uncovered(model, seen)
            landed, trace = renamed(seen, pairs), collapse(seen, pairs)
            held = named_tensors(model)
            made = {*(copy.param for copy in trace.copies), *trace.computed} - self._constructed
            if absent := sorted(made - named_tensors(host.live).keys()):
                for name in absent:  # or the next plan would find nothing that fills them
                    path, _, key = name.rpartition(".")
                    if key in model.get_submodule(path)._parameters:
                        model.get_submodule(path)._parameters[key] = None
                raise UnsupportedError(
                    f"the running model has no {absent[0]}, which the engine's loader makes when it loads one; start "
                    "the engine from a checkpoint that has it"
                )
            # After the trace, which may have made parameters.
            if self._units is None or self._unit_of.keys() != dict(model.named_parameters()).keys():
                found = units(host.live, model)
                self._outlived += [unit.keep_alive for unit in self._units or ()]
                choose_roads(found, host.post_process, host.parts, host.device, host.share, host.identity.rank)
                if host.device.type == "cuda":
                    torch.cuda.empty_cache()  # the scratch copies, which are as large as the largest parameters
                self._units = found
                self._addresses = live_addresses(found, host.live, host.parts)
                self._parameters = parameter_places(found)
                self._unit_of = {name: unit for unit in found for name in unit.params}
        if buffers := [name for name in trace.computed if name not in self._unit_of]:
            raise UnsupportedError(
                f"the engine's loader computes {len(buffers)} buffers, which this version can only copy into: "
                f"{', '.join(buffers[:5])}"
            )
        refused = trace.refused | unfit
        for param, boxes in doubled.items():
            names = writers(model, landed, param, boxes)
            for name in names:
                refused[name] = f"{_region(param, boxes, held)} is written twice, by {', '.join(names)}"
        used: dict[str, str] = {}
        for copy in trace.copies:
            dtype = str(held[copy.param].dtype).removeprefix("torch.")
            used[copy.name] = max(used.get(copy.name, dtype), dtype, key=itemsize)
        for names in trace.computed.values():
            used.update({name: manifest[name].dtype for name in names})  # arithmetic wants all that the trainer has
        used.update(dict.fromkeys(pairs.keys() & used.keys(), str(host.dtype).removeprefix("torch.")))
        roads = {"in place": 0, "straight": 0, "reload": 0, "loader": 0}
        computed = computed_units(trace, self._unit_of)
        for unit in self._units:
            road = "in place" if unit.in_place else "reload" if unit.recipe is None else "straight"
            roads["loader" if id(unit) in computed else road] += 1
        self._manifest, self._trace, self._pairs = manifest, trace, pairs
        self._plan = Plan(
            used=used,
            partial=_partial(manifest, trace),
            refused=refused,
            groups=fuse_groups(landed.copies),
            reloads=self._reloads(trace),
            missing=[_region(param, boxes, held) for param, boxes in missing.items()],
            hints=_hints(landed, missing),
            roads=roads,
        )
        self._routes = None  # they are of another plan
        return self._plan

    def connect(
        self,
        transport: str,
        storages: list[list[Any]],
        placements: Sequence[Placement],
        buckets: Sequence[Sequence[str]],
        once: int,
        spans: Sequence[Sequence[int]],
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
        warm_up(self._host.device)
        with self._host.scope():
            self._source.connect(storages, fields, idle, deadline)
        own = describe_device(self._host.device)[1]
        self._elsewhere = {(rank, number) for rank, number, _, row in storages if row.get("gpu_uuid", own) != own}
        self._digests = {}
        self._placements = defaultdict(list)
        for placement in placements:
            self._placements[placement.name].append(placement)
        self._buckets, self._once, self._settled = [list(names) for names in buckets], once, False
        self._spans = [[] for _ in buckets]
        for bucket, *span in spans:
            if not 0 <= bucket < len(buckets):
                raise ProtocolError(f"digests were announced of bucket {bucket}, of {len(buckets)}")
            self._spans[bucket].append(_Span(*span))
        with self._host.scope():
            # What several ranks have is read from the one on this worker's own GPU, if there is one.
            nearest = next((rank for rank, _, _, row in storages if own and row.get("gpu_uuid") == own), None)
            steps = copy_steps(self._trace.copies, placements, nearest)
            whole = {name for names in self._trace.computed.values() for name in names}
            self._read = {(step.rank, step.storage) for step in steps}
            self._read |= {(p.rank, p.storage) for name in whole for p in self._placements[name]}
            self._routes = self._find_routes(steps)

    def share(self) -> tuple[list[list[Any]], list[Placement]]:
        """Let a trainer write into the live parameters: gives [storage, kind, fields] of each storage, and which tensor
        of the manifest lies where in them. In place of `connect`: a push has one bucket, which says that the trainer
        begins to write. Parameters on a CPU move to shared memory; nothing else changes. Raises `UnsupportedError` for
        a model with modules whose parameters are not what the loader writes, and `PlacementError` for memory that
        cannot be shared."""
        if self._plan is None or self._manifest is None or self._units is None:
            raise ProtocolError("Share came before Plan")
        others = [unit.names[0] for unit in self._units if not unit.in_place]
        others += list(self._trace.computed)
        if others:
            raise UnsupportedError(
                f"{len(others)} modules keep their weights in a format of their kernel, such as {others[0]}: a trainer "
                'cannot work on these. Use transport="ipc"; or, where it is an unquantised engine on a CPU, start it '
                'with quantization="weightsync_plain", which keeps what is no expert as it is'
            )
        self.disconnect()
        self._source, self._source_name = Nothing(), ""
        with self._host.scope():
            live = named_tensors(self._host.live)
            numbers: dict[int, int] = {}  # by identity of a storage
            storages: list[list[Any]] = []
            placements: list[Placement] = []
            for copy in self._trace.copies:
                tensor = live[copy.param]
                storage = tensor.untyped_storage()
                if storage._cdata not in numbers:
                    numbers[storage._cdata] = len(storages)
                    storages.append([len(storages), *export(storage)])
                dtype = str(tensor.dtype).removeprefix("torch.")
                rank, number = self._host.identity.rank, numbers[storage._cdata]
                placements.append(Placement(copy.name, copy.box, rank, number, copy.offset, copy.stride, dtype))
            # Memory that is shared for the first time lies elsewhere than before; no graph has captured a CPU's.
            self._addresses = live_addresses(self._units, self._host.live, self._host.parts)
            self._parameters = parameter_places(self._units)
            self._buckets, self._once, self._settled = [list(self._manifest.names)], 0, False
            self._routes = self._find_routes([])
        return storages, placements

    def expect(self, version: int, bucket: int, part: int | None) -> None:
        """Let a bucket arrive, without waiting for it, that `load` may follow for, or `withdraw`. Writes nothing."""
        if self._source is None or self._routes is None:
            raise ProtocolError("Expect came before Connect")
        if not 0 <= bucket < len(self._buckets):
            raise ProtocolError(f"bucket {bucket} of version {version} was announced, of {len(self._buckets)}")
        with self._host.scope():
            if self._source.expect(bucket) and part is not None:
                self._own_digests(version, bucket, part)[1].begin(part)

    def withdraw(self, idle: Idle, deadline: Deadline) -> None:
        """What was expected will not be loaded: return when nothing of it is on its way any more."""
        if self._source is not None:
            self._source.withdraw(idle, deadline)
        _synchronise(self._host.device)  # digests may have begun
        self._digests = {}

    def load(
        self, version: int, bucket: int, part: int | None, digests: bytes, idle: Idle, deadline: Deadline
    ) -> Timing:
        """Load one bucket. Marks the model `POISONED` before the first byte is written."""
        if self._source is None or (routes := self._routes) is None:
            raise ProtocolError("Load came before Connect")
        if self._push is None or self._push.version != version:
            if version <= self.version:
                raise ProtocolError(
                    f"version {version} is not newer than {self.version}, which this engine serves: versions only grow"
                )
            count = len(self._buckets) - (self._once if self._settled else 0)
            singly = {name for names in routes.singly[:count] for name in names}
            self._push = _Push(
                version, count, singly, routes.fresh, self._host, self._trace, self._pairs, self._unit_of
            )
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
            if part is not None:
                self._verify(version, bucket, part, digests)
            verified = time.perf_counter()
            self.state = POISONED
            if not self._push.done and self._push.buckets == len(self._buckets):
                for constant, value in routes.constants:
                    constant.fill_(value)  # later pushes leave these alone
            routes.copies[bucket].run(lightly=following is not None)  # which is on its way meanwhile
            nbytes = routes.nbytes[bucket]
            for name in routes.singly[bucket]:
                nbytes += self._load_tensor(name, self._push, routes)
            self._push.close_finished()  # and what a loader computes out of no tensor
            for quantiser in routes.quantisers[bucket]:
                quantiser.run()
            self._push.done.add(bucket)
            if len(self._push.done) == self._push.buckets and not self._push.reloaded:
                self._check_addresses()  # a GPU copies meanwhile
            _synchronise(self._host.device)
        loaded = time.perf_counter()
        return Timing(nbytes, fetched - started, verified - fetched, loaded - verified)

    def _verify(self, version: int, bucket: int, part: int, digests: bytes) -> None:
        """Raise `DigestError` where what is about to be read is not what was sent."""
        spans = self._spans[bucket]
        if len(digests) != 8 * len(spans):
            raise ProtocolError(f"bucket {bucket} came with {len(digests)} bytes of digests for {len(spans)} spans")
        numbers, own_digests = self._own_digests(version, bucket, part)
        sent = struct.unpack(f"<{len(spans)}Q", digests)
        for number, found in zip(numbers, own_digests.of(part), strict=True):
            if found != sent[number]:
                raise DigestError(
                    f"bucket {bucket} from trainer rank {spans[number].rank} arrived with digest {found:016x}, it was "
                    f"sent with {sent[number]:016x}; nothing of it was loaded"
                )

    def _own_digests(self, version: int, bucket: int, part: int) -> tuple[list[int], Digests]:
        """The numbers of the bucket's spans that this worker compares, and what tells their digests. Of memory on other
        GPUs the workers of an engine take samples in turn: that costs a link more than all of a bucket costs a GPU."""
        own, turns = self._host.identity.rank, self._host.identity.world
        turn = (own - part - version // PARTS) % turns if part != WHOLE and self._elsewhere else None
        if (bucket, turn) not in self._digests:
            self._digests[bucket, turn] = self._digests_of(self._spans[bucket], turn)
        return self._digests[bucket, turn]

    def _digests_of(self, spans: Sequence[_Span], turn: int | None) -> tuple[list[int], Digests]:
        """The numbers of the spans that this worker compares when it is its `turn`, or of all that it reads; and what
        tells their digests."""
        assert self._source is not None
        numbers, runs = [], []
        for number, (rank, storage, first, nbytes) in enumerate(spans):
            ours = turn is None or number % self._host.identity.world == turn or (rank, storage) not in self._elsewhere
            if ours and (rank, storage) in self._read:
                numbers.append(number)
                runs.append(self._source.storage(rank, storage)[first : first + nbytes])
        return numbers, Digests(runs)

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
            refreshed = self._host.refresh()
            _synchronise(self._host.device)
            if refreshed:
                self._check_addresses()
            if push.reloaded:
                assert self._units is not None
                _refuse_moved(moved(self._addresses, live_addresses(self._units, self._host.live, self._host.parts)))
        if push.buckets == len(self._buckets):
            self._outlived.clear()
        self._push = None
        self._settled = True
        self.version, self.state = version, CLEAN
        return time.perf_counter() - started

    def _check_addresses(self) -> None:
        """Where the engine has reloaded no module, parameters alone can have moved."""
        paths = [place.path for place in self._parameters if not place.is_kept()]
        others = self._routes.others if self._routes is not None else {}
        paths += [name for name, at in others.items() if _tensor(self._host.live, name).data_ptr() != at]
        _refuse_moved(paths)

    def disconnect(self) -> None:
        """Give back what was mapped or joined, and forget a push under way (the state stays what it is)."""
        self._push = None
        self._settled = False
        self._routes = None
        self._spans, self._digests = [], {}
        if self._source is not None:
            self._source.close()
            self._source = None

    def _load_tensor(self, name: str, push: _Push, routes: Routes) -> int:
        """Gives the bytes that a loader takes whole."""
        for step in routes.fresh.get(name, ()):
            target = push.fresh(step.param)
            torch.as_strided(target, step.size, step.dst_stride, step.dst_offset).copy_(self._view(step))
            push.arrived(step)
        nbytes = push.take_whole(name, self._whole(name)) if push.wanted_whole(name) else 0
        push.close_finished()
        return nbytes

    def _find_routes(self, steps: Sequence[CopyStep]) -> Routes:
        assert self._units is not None
        return find_routes(self._host, self._trace, self._units, self._buckets, steps, self._view)

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
        dtype = placements[0].dtype if placements else meta.dtype  # nobody holds a tensor without elements
        whole = torch.empty(meta.shape, dtype=getattr(torch, dtype), device=self._host.device)
        for p in placements:
            region = whole[tuple(slice(s, s + n) for s, n in zip(p.box.start, p.box.size, strict=True))]
            data = self._source.storage(p.rank, p.storage)
            region.copy_(strided(data, p.dtype, p.offset, p.box.size, p.stride))
        return whole

    def _reloads(self, trace: Trace) -> list[tuple[str, ...]]:
        """The names that each unit which is not loaded in place is loaded from."""
        computed = computed_units(trace, self._unit_of)
        units = {id(unit): unit for unit in self._unit_of.values()}
        return [
            tuple(names)
            for key, names in sources_of(trace, self._unit_of).items()
            if key in computed or not units[key].in_place
        ]


class _Push:
    """One version on its way in: which units are open, and what each still waits for. `arriving` are the tensors of its
    buckets of which more is done than copying, `fresh` has the steps of these and perhaps others."""

    def __init__(
        self,
        version: int,
        buckets: int,
        arriving: Set[str],
        fresh: Mapping[str, Sequence[CopyStep]],
        host: ModelHost,
        trace: Trace,
        pairs: dict[str, Pair],
        unit_of: dict[str, Unit],
    ) -> None:
        self.version = version
        self.buckets = buckets
        self.done: set[int] = set()
        self.reloaded = False  # a module's post-processing has run
        self._host = host
        self._trace = trace
        self._pairs = pairs
        self._unit_of = unit_of
        # A unit gets all of its tensors in this push or none: `connect` has seen to it.
        self._computed: dict[int, set[str]] = {}  # needed whole
        if trace.computed:
            by_loader = computed_units(trace, unit_of)
            sources = {key: set(names) for key, names in sources_of(trace, unit_of).items() if key in by_loader}
            self._computed = {key: names for key, names in sources.items() if arriving >= names}
        self._whole: dict[str, torch.Tensor] = {}
        self._open: dict[int, Reload] = {}
        self._complete: list[int] = []  # units that have all they need
        self._units = {id(unit): unit for unit in unit_of.values()} if arriving or self._computed else {}
        self._waiting: dict[int, int] = defaultdict(int)  # unit -> elements still to come
        for step in (step for name, steps in fresh.items() if name in arriving for step in steps):
            self._waiting[id(unit_of[step.param])] += math.prod(step.size)

    def fresh(self, param: str) -> torch.Tensor:
        """The storage-wide tensor that a step into the fresh parameter `param` writes to."""
        return self._reload(self._unit_of[param]).fresh[param].data

    def arrived(self, step: CopyStep) -> None:
        key = id(self._unit_of[step.param])
        self._waiting[key] -= math.prod(step.size)
        if self._waiting[key] == 0:
            del self._waiting[key]
            self._complete.append(key)

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
            self._reload_unit(key)
            for name in [n for n in names if not self.wanted_whole(n)]:
                del self._whole[name]

    def unfinished(self) -> list[str]:
        return [self._units[key].names[0] for key in (*self._waiting, *self._computed)]

    def _reload(self, unit: Unit) -> Reload:
        if id(unit) not in self._open:
            self._open[id(unit)] = Reload(unit, self._trace.fills, self._host.device)
        return self._open[id(unit)]

    def _close(self, key: int) -> None:
        if self._units[key].recipe is None:
            self._reload_unit(key)
        else:
            self._open.pop(key).quantise(self._host.share)

    def _reload_unit(self, key: int) -> None:
        self._reload(self._units[key]).close(self._host.post_process, self._host.parts)
        self.reloaded = True
        del self._open[key]

    def _load_by_loader(self, unit: Unit, names: set[str]) -> None:
        """The engine's own loader, over the real tensors, into this unit's fresh parameters; the rest is on `meta`."""
        reload = self._reload(unit)
        # A loader may change what it is given, and the next unit wants what the trainer sent.
        weights = (
            (name, self._whole[name].clone() if self.wanted_whole(name) else self._whole[name])
            for name in sorted(names)
        )
        with reload.installed():
            self._host.load_weights(self._host.pristine(), quantised(weights, self._pairs, self._host.dtype))


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), key)
    return tensor


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _refuse_moved(paths: Sequence[str]) -> None:
    if paths:
        raise UnsupportedError(
            f"{len(paths)} tensors that the engine works with are not where they were before the push, and CUDA graphs "
            f"have captured their addresses: {', '.join(paths[:5])}. Start the engine anew from a checkpoint, and with "
            "another quantisation or kernel backend if this comes back"
        )


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
