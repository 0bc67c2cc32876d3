"""The four ways in which modules take new weights, each for one connection to a trainer.

in place          bytes go straight into live parameters, in the loader's own layout
fused quantise    a weight is quantised into the tensors of its kernel
reload            a module is loaded afresh, post-processed, and the outcome copied into its live tensors
native loader     a reload by the engine's own loader, because the loader computes values
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from weightsync.errors import ProtocolError
from weightsync.kernels.copies import BatchedCopy, Copy
from weightsync.kernels.rows import Job, RowQuantiser, WeightPiece
from weightsync.net.runtime import describe_device
from weightsync.net.wire import Connect
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Box, CopyOp, LoadCopy, copy_ops, row_major
from weightsync.planning.regular_copies import join_regular
from weightsync.transports.base import TransportReceiver, strided
from weightsync.worker.checkpoint_quantize import quantised
from weightsync.worker.engine_model import DRAFTER, EngineModel, largest_of_all
from weightsync.worker.fused_quantize import AnyForm, Recipe, pieces_of
from weightsync.worker.load_planner import FUSED_QUANTIZE, NATIVE_LOADER, RELOAD, TracedLoad
from weightsync.worker.module_groups import LiveTensor, ModuleGroup, live_tensor, parameters_of
from weightsync.worker.reload import Reload, given_memory
from weightsync.worker.trace import named_tensors, paddings

_Unit = TypeVar("_Unit", "ModuleGroup", "Weight")

NO_CHUNK = -1
"""Stands for the last chunk of a group without travelling tensors. Its loader makes the values itself."""


class Weight(NamedTuple):
    """A weight of the load path `FUSED_QUANTIZE`."""

    group: ModuleGroup
    recipe: Recipe

    @property
    def param(self) -> str:
        """The name of its parameter."""
        return self.group.param(self.recipe.weight)


class Arrivals:
    """The chunks of one connection, met with the load plan.

    locations: the place of each region, for each chunk.
    ops: the copies into each parameter, without parameters loaded by the engine's loader itself.
    whole_ops: the copies into whole tensors for the engine's own loader, by the tensor's name.
    fills: the constants set by the loader, by parameter.
    last_chunk: the chunk that completes each group, or each weight to quantise. `NO_CHUNK` for a group without needs.
        `agree_on_last_chunks` sets it.
    """

    def __init__(self, model: EngineModel, traced: TracedLoad, source: TransportReceiver, message: Connect) -> None:
        """Meet the load plan with the locations in each chunk.

        A region on several ranks is read from the rank on this worker's GPU, if there is one.

        Raises:
            PlacementError: The chunks do not cover every load copy exactly once.
            ProtocolError: Frozen chunks hold only a part of a module's tensors.
        """
        self.model, self.traced, self.source = model, traced, source
        self.locations = [chunk.locations for chunk in message.chunks]
        self._frozen = message.frozen
        gpu = describe_device(model.device)[1]
        nearest = next((rank for rank, _, _, row in message.storages if gpu and row.get("gpu_uuid") == gpu), None)
        self.ops = grouped(copy_ops(self._direct_copies(), self.locations, nearest), lambda op: op.param)
        self.whole_ops = grouped(copy_ops(self._whole_copies(), self.locations, nearest), lambda op: op.param)
        self.fills = grouped(traced.trace.fills, lambda fill: fill.param)
        self.weights = [Weight(group, recipe) for group in self.groups(FUSED_QUANTIZE) for recipe in group.all_recipes]
        self._needed: dict[ModuleGroup | Weight, Sequence[CopyOp]] = {
            group: self._needs(group, path) for group, path in traced.load_path.items() if path != FUSED_QUANTIZE
        }
        self._needed |= {weight: self.ops.get(weight.param, ()) for weight in self.weights}
        _refuse_torn(self._needed, len(self.chunks(False)))

    def chunks(self, is_first: bool) -> range:
        """Return the chunks of the first push over this connection, or of a later push."""
        return range(len(self.locations) - (0 if is_first else self._frozen))

    def _direct_copies(self) -> list[LoadCopy]:
        of, paths = self.traced.group_of, self.traced.load_path
        return [c for c in self.traced.placed if c.param not in of or paths[of[c.param]] != NATIVE_LOADER]

    def _whole_copies(self) -> list[LoadCopy]:
        """Return copies into full tensors.

        Of a tensor that the loader only copies, this worker may read just some regions.
        """
        trace, manifest = self.traced.trace, self.traced.manifest
        computed = {name for names in trace.computed.values() for name in names}
        boxes = {name: {Box.full(manifest[name].shape): None} for name in computed}
        copied = {name for group in self.groups(NATIVE_LOADER) for name in self.traced.sources[group]} - computed
        for copy in trace.copies:
            if copy.name in copied:
                boxes.setdefault(copy.name, {})[copy.box] = None
        copies = []
        for name, regions in boxes.items():
            steps = row_major(manifest[name].shape)
            firsts = [sum(at * step for at, step in zip(box.start, steps, strict=True)) for box in regions]
            copies += [LoadCopy(name, box, name, first, steps) for box, first in zip(regions, firsts, strict=True)]
        return copies

    def _needs(self, group: ModuleGroup, path: str) -> list[CopyOp]:
        """Return the copies needed before a group can be loaded."""
        if path == NATIVE_LOADER:
            return [op for name in self.traced.sources[group] for op in self.whole_ops.get(name, ())]
        waiting = [param for param in group.params if not group.takes_in_place(param)]
        return [op for param in waiting for op in self.ops.get(param, ())]

    def takes_in_place(self, param: str) -> bool:
        """Return whether the load path `InPlace` fills this parameter or buffer."""
        group = self.traced.group_of.get(param)
        if group is None:
            return True
        return self.traced.load_path[group] != NATIVE_LOADER and group.takes_in_place(param)

    def agree_on_last_chunks(self) -> None:
        """Set `last_chunk`, the same on all workers. Collective among workers with parts of the same modules.

        Post-processing and shared scales are collective, and each worker reads other parts of the chunks.
        """
        own = [max((op.chunk for op in ops), default=NO_CHUNK) for ops in self._needed.values()]
        last = map(int, largest_of_all(own, self.model.all_reduce_max, self.model.device))
        self.last_chunk = dict(zip(self._needed, last, strict=True))

    def collective_chunks(self) -> set[int]:
        """Return the chunks in whose loading workers may wait for each other, the same on all workers."""
        if self.model.all_reduce_max is None:
            return set()
        shared = {self.last_chunk[weight] for weight in self.weights if weight.recipe.shared}
        return shared | {self.last_chunk[group] for path in (RELOAD, NATIVE_LOADER) for group in self.groups(path)}

    def groups(self, path: str) -> list[ModuleGroup]:
        """Return the groups of a load path, in the model's order."""
        return [group for group, own in self.traced.load_path.items() if own == path]

    def due(self, units: Iterable[_Unit]) -> dict[int, list[_Unit]]:
        """Return groups, or weights, by their last chunks."""
        return grouped(units, self.last_chunk.__getitem__)

    def view(self, op: CopyOp) -> torch.Tensor:
        """Return the received memory for `op` to read, as a view."""
        return strided(self.source.storage(op.rank, op.storage), op.src_dtype, op.src_offset, op.size, op.src_stride)


def _refuse_torn(needs: Mapping[ModuleGroup | Weight, Sequence[CopyOp]], first_frozen: int) -> None:
    for unit, ops in needs.items():
        group = unit.group if isinstance(unit, Weight) else unit
        late = {op.name for op in ops if op.chunk >= first_frozen}
        if late and any(op.chunk < first_frozen for op in ops):
            raise ProtocolError(
                f"{', '.join(sorted(late)[:3])} come only in the first push, but {group.names[0]} loads them together "
                "with tensors of every push; freeze all tensors of this module, or none"
            )


def _copy_all(copies: Sequence[tuple[torch.Tensor, CopyOp, torch.Tensor]]) -> int:
    """Copy received memory into tensors, by `CopyOp`, in few launches. Return the number of bytes read."""
    if copies:
        targets = [torch.as_strided(target, op.size, op.dst_stride, op.dst_offset) for target, op, _ in copies]
        torch._foreach_copy_(targets, [seen for _, _, seen in copies])
    return sum(seen.nbytes for _, _, seen in copies)


class LoadPath(ABC):
    """One way of loading, bound to the chunks of one connection.

    Any step that may fail on one worker alone happens before `bind`. Workers wait for each other in `bind`.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._model = arrivals.model

    def bind(self) -> None:
        """Prepare the steps that depend on all workers' chunks. Collective among workers with shared scales."""
        return

    def begin(self) -> None:
        """Begin a push. The model counts as a mixture from here on."""
        return

    def blocking(self) -> Iterable[int]:
        """Return the chunks in whose loading the host may wait for the GPU. Call it after `bind`."""
        return ()

    def first_uses(self) -> Iterable[int]:
        """Return the chunks whose first loading may load a kernel, and wait for the GPU. Call it after `bind`."""
        return ()

    @abstractmethod
    def load(self, chunk: int) -> int:
        """Load this chunk, and close the groups completed by it. Return the number of bytes read.

        On a GPU the work is queued on the current stream.
        """

    def unfinished(self) -> list[str]:
        """Return the modules still waiting for a chunk."""
        return []


class InPlace(LoadPath):
    """Copies into live parameters and buffers as they are."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__(arrivals)
        traced, live = self._arrivals.traced, named_tensors(self._model.live)
        copies: dict[int, list[Copy]] = defaultdict(list)
        self._nbytes: Counter[int] = Counter()
        for param, ops in self._arrivals.ops.items():
            if self._arrivals.takes_in_place(param):
                for op in join_regular(ops):
                    seen = self._arrivals.view(op)
                    target = torch.as_strided(live[param].data, op.size, op.dst_stride, op.dst_offset)
                    copies[op.chunk].append((target, seen, op.rank))
                    self._nbytes[op.chunk] += seen.nbytes
        self._group_of = {chunk: number for number, chunk in enumerate(copies)}
        self._copies = BatchedCopy(*copies.values(), programs=arrivals.source.copy_programs)
        constants = paddings(self._model.pristine(), traced.trace)
        self._constants = [
            (fill, live[fill.param].data) for fill in constants if self._arrivals.takes_in_place(fill.param)
        ]
        buffers = [param for param in self._arrivals.ops if param not in traced.group_of]
        self.buffers: list[LiveTensor] = [live_tensor(self._model.live, param) for param in buffers]

    def first_uses(self) -> Iterable[int]:
        return () if self._copies.is_loaded else self._group_of

    def begin(self) -> None:
        # Dummy weights were never loaded, and sleep at level 2 discards weights. Nothing else fills these regions.
        for fill, target in self._constants:
            fill.apply(target)

    def load(self, chunk: int) -> int:
        if chunk in self._group_of:
            self._copies.run(self._group_of[chunk])
        return self._nbytes[chunk]


class FusedQuantize(LoadPath):
    """Quantisation of weights straight from received memory.

    A weight is put together first in two cases. Its rows or blocks do not come whole, or rows with one scale come in
    several chunks.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__(arrivals)
        self._views: dict[Weight, list[tuple[CopyOp, torch.Tensor, list[WeightPiece] | None]]] = {}
        for weight in arrivals.weights:
            like = torch.empty(0, dtype=weight.recipe.wide, device=self._model.device)
            seen = [(op, arrivals.view(op)) for op in join_regular(arrivals.ops.get(weight.param, ()))]
            self._views[weight] = [(op, view, pieces_of(op, view, weight.recipe.shape, like)) for op, view in seen]

    def bind(self) -> None:
        direct = self._agree({weight for weight in self._views if self._is_direct(weight)})
        jobs: dict[int, dict[tuple[AnyForm, bool], list[Job]]] = defaultdict(lambda: defaultdict(list))
        self._nbytes: Counter[int] = Counter()
        self._parts: dict[int, list[tuple[Weight, CopyOp, torch.Tensor]]] = defaultdict(list)
        for weight, those in self._views.items():
            found: dict[int, list[WeightPiece]] = defaultdict(list)
            for op, seen, pieces in those:
                self._nbytes[op.chunk] += seen.nbytes
                if weight not in direct:
                    self._parts[op.chunk].append((weight, op, seen))
                elif pieces is not None:
                    found[op.chunk] += pieces
            for chunk, own in found.items():
                jobs[chunk][weight.recipe.form, weight.recipe.shared].append(self._job(weight, own))
        self._due = self._arrivals.due(weight for weight in self._views if weight not in direct)
        self._quantisers = {
            chunk: [self._quantiser(form, shared, those) for (form, shared), those in of_chunk.items()]
            for chunk, of_chunk in jobs.items()
        }
        self._fresh: dict[Weight, torch.Tensor] = {}

    def blocking(self) -> Iterable[int]:
        return {*self._parts, *self._due}  # parts allocate memory, and the driver may wait for the whole GPU to do so

    def first_uses(self) -> Iterable[int]:
        return self._quantisers

    def begin(self) -> None:
        self._fresh.clear()

    def load(self, chunk: int) -> int:
        for quantiser in self._quantisers.get(chunk, ()):
            quantiser.run()
        _copy_all([(self.put_together(weight), op, seen) for weight, op, seen in self._parts.get(chunk, ())])
        for weight in self._due.get(chunk, ()):
            whole = WeightPiece(0, 0, self.put_together(weight))
            self._quantiser(weight.recipe.form, weight.recipe.shared, [self._job(weight, [whole])]).run()
            del self._fresh[weight]
        return self._nbytes[chunk]

    def unfinished(self) -> list[str]:
        return [weight.param for weight in self._fresh]

    def put_together(self, weight: Weight) -> torch.Tensor:
        """Return the memory in which this weight is put together."""
        if weight not in self._fresh:
            recipe = weight.recipe
            self._fresh[weight] = torch.empty(recipe.shape, dtype=recipe.wide, device=self._model.device)
            for fill in self._arrivals.fills.get(weight.param, ()):
                fill.apply(self._fresh[weight])
        return self._fresh[weight]

    def _job(self, weight: Weight, pieces: Sequence[WeightPiece]) -> Job:
        return weight.recipe.job(dict(parameters_of(weight.group.live[0])), pieces)

    def _quantiser(self, form: AnyForm, shared: bool, jobs: Sequence[Job]) -> RowQuantiser:
        return RowQuantiser(form, jobs, self._model.all_reduce_max if shared else None)

    def _is_direct(self, weight: Weight) -> bool:
        """Return whether a weight can be quantised out of the chunks."""
        recipe, views = weight.recipe, self._views[weight]
        whole = [piece for _, _, pieces in views for piece in pieces or ()]
        matrices, rows, _ = recipe.shape
        is_whole = sum(len(piece.source) * piece.source.shape[1] for piece in whole) == matrices * rows
        if not is_whole or any(pieces is None for _, _, pieces in views):
            return False
        if recipe.height is not None:
            return all(recipe.can_cut(piece.row, piece.source.shape[1]) for piece in whole)
        come: dict[int, Counter[int]] = defaultdict(Counter)
        for op, _, pieces in views:
            for piece in pieces or ():
                for matrix in range(piece.matrix, piece.matrix + len(piece.source)):
                    come[op.chunk][matrix] += piece.source.shape[1]
        if recipe.shared:
            return come.keys() == {self._arrivals.last_chunk[weight]}
        # A job is for all matrices between its first one and its last one.
        return all({*own.values()} == {rows} and max(own) - min(own) < len(own) for own in come.values())

    def _agree(self, direct: set[Weight]) -> set[Weight]:
        """Leave out weights put together first on another worker: all workers must exchange the same scales."""
        shared = [weight for weight in self._views if weight.recipe.shared]
        own = [float(weight not in direct) for weight in shared]
        doubts = largest_of_all(own, self._model.all_reduce_max, self._model.device)
        return direct - {weight for weight, doubt in zip(shared, doubts, strict=True) if doubt}


class _Reloading(LoadPath):
    """The common part of the two load paths with post-processing."""

    name: str
    _pieces: Mapping[int, object]  # each chunk's pieces of these groups

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__(arrivals)
        self._groups = arrivals.groups(self.name)
        self._open: dict[ModuleGroup, Reload] = {}

    def bind(self) -> None:
        self._due = self._arrivals.due(self._groups)

    def blocking(self) -> Iterable[int]:
        return {*self._pieces, *self._due}

    def begin(self) -> None:
        self._open.clear()

    def unfinished(self) -> list[str]:
        return [group.names[0] for group in self._open]

    def _reload(self, group: ModuleGroup) -> Reload:
        if group not in self._open:
            own = [fill for param in group.params for fill in self._arrivals.fills.get(param, ())]
            self._open[group] = Reload(group, own, self._model)
        return self._open[group]


class ReloadPath(_Reloading):
    """A reload of modules, each when its last chunk has come."""

    name = RELOAD

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__(arrivals)
        self._pieces: dict[int, list[tuple[ModuleGroup, CopyOp, torch.Tensor]]] = defaultdict(list)
        for group in self._groups:
            for op in join_regular(op for param in group.params for op in self._arrivals.ops.get(param, ())):
                self._pieces[op.chunk].append((group, op, self._arrivals.view(op)))

    def load(self, chunk: int) -> int:
        pieces = self._pieces.get(chunk, ())
        nbytes = _copy_all([(self._reload(group).fresh[op.param].data, op, seen) for group, op, seen in pieces])
        for group in self._due.get(chunk, ()):
            if group in self._open:
                self._open.pop(group).close()
        return nbytes


class NativeLoader(_Reloading):
    """A reload by the engine's own loader, from whole tensors put together here."""

    name = NATIVE_LOADER

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__(arrivals)
        self._dtypes = {name: ops[0].src_dtype for name, ops in arrivals.whole_ops.items()}
        views = ((op, arrivals.view(op)) for ops in arrivals.whole_ops.values() for op in ops)
        self._pieces: dict[int, list[tuple[CopyOp, torch.Tensor]]] = grouped(views, lambda pair: pair[0].chunk)
        self._tensors: dict[str, torch.Tensor] = {}
        self._wanted: Counter[str] = Counter()

    def begin(self) -> None:
        super().begin()
        self._tensors.clear()
        self._wanted = Counter(name for group in self._groups for name in self._arrivals.traced.sources[group])
        self._load_due(NO_CHUNK)

    def load(self, chunk: int) -> int:
        nbytes = _copy_all([(self._tensor(op.name), op, seen) for op, seen in self._pieces.get(chunk, ())])
        self._load_due(chunk)
        return nbytes

    def unfinished(self) -> list[str]:
        return [*super().unfinished(), *self._tensors]

    def _load_due(self, chunk: int) -> None:
        for group in self._due.get(chunk, ()):
            names = sorted(self._arrivals.traced.sources[group])
            self._wanted.subtract(names)
            weights = ((name, self._take(name)) for name in names)
            with self._reload(group).installed(), given_memory(self._read_beside(group, names), self._model):
                pairs, dtype = self._arrivals.traced.pairs, self._model.dtype
                self._model.load_weights(self._loaded_by(group), quantised(weights, pairs, dtype))
            self._open.pop(group).close()

    def _read_beside(self, group: ModuleGroup, names: Sequence[str]) -> set[str]:
        """Return the other parameters that the loader fills from these tensors. It may compute from them."""
        filled = {param for param, name in self._arrivals.traced.trace.landed() if name in names}
        return filled.difference(group.params)

    def _loaded_by(self, group: ModuleGroup) -> nn.Module:
        """Return the never loaded model with the loader for this group."""
        pristine = self._model.pristine()
        return pristine.get_submodule(DRAFTER) if group.names[0].startswith(f"{DRAFTER}.") else pristine

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            meta = self._arrivals.traced.manifest[name]
            dtype = getattr(torch, self._dtypes.get(name, meta.dtype))
            self._tensors[name] = torch.empty(meta.shape, dtype=dtype, device=self._model.device)
        return self._tensors[name]

    def _take(self, name: str) -> torch.Tensor:
        """Return a tensor for the loader. Clone it while another group needs it: the loader may change its argument."""
        tensor = self._tensor(name)
        return tensor.clone() if self._wanted[name] else self._tensors.pop(name)
