"""The weight source for FSDP2, FSDP1, DDP and plain modules.

An optimizer updates the shards, so this source reads the shards and never a gathered copy.

- FSDP2 leaves a module gathered after some forwards (its root, `reshard_after_forward=False`). The gathered copy has
  the compute dtype, and is stale after the next optimizer step. `reshard` puts such a module back in its sharded state.
  The next forward gathers it again.
- FSDP1 keeps its shards in flat parameters. With `use_orig_params=True` the module's own parameters are views of them,
  and the user may have assigned other storage. FSDP1 copies that storage at the next forward, so this source reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED, HandleTrainingState
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from weightsync.errors import UnsupportedError
from weightsync.planning.layout import Box
from weightsync.sources.base import Barrier, dtype_name
from weightsync.sources.module import (
    ON_META,
    LocalParam,
    ModuleSource,
    NamedReader,
    flat_parts,
    memory_of,
    plain,
    read_whole,
    readable,
    trains,
)
from weightsync.sources.module_tree import walk


class FsdpSource(ModuleSource):
    """Tensors of a model under FSDP2 (`fully_shard` on any mesh), FSDP1, DDP, or none of them. See `ShardSource`.

    Gathered FSDP2 modules are put back in their sharded state (see this file's head). Nothing else changes.
    """

    def reshard(self, found: list[nn.Module]) -> None:
        kinds = {*map(type, found)}
        self._is_flat = any(issubclass(kind, FullyShardedDataParallel) for kind in kinds)
        if any(issubclass(kind, FSDPModule) for kind in kinds):
            for module in found:
                if isinstance(module, FSDPModule):
                    module.reshard()

    def local(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        if any(issubclass(kind, DTensor) for kind in {*map(type, tensors)}):
            # `to_local` takes longer than the rest of this function.
            tensors = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        # No check for ZeRO-3 here. Partitioning moves a tensor, so it is read again, and `read_param` refuses it.
        return None if self._is_flat else plain(tensors)

    def readers(self, model: nn.Module) -> Iterator[NamedReader]:
        flattened = _flattened(model)
        for prefix, module in walk(model):
            # With use_orig_params=False these are no longer parameters of the module. The handle still has their order.
            flat = {prefix + name: partial(_read_flat, *at) for name, at in flattened[id(module)].items()}
            own = dict(self.own_readers(prefix, module))
            own.pop(f"{prefix}_flat_param", None)
            # `flat` comes first for the order of `state_dict`, and last because its readers read the shards.
            yield from (flat | own | flat).items()

    def read_param(self, tensor: torch.Tensor) -> LocalParam:
        if hasattr(tensor, "ds_tensor"):
            raise UnsupportedError('DeepSpeed has partitioned it (ZeRO-3); push with backend="deepspeed"')
        if any(getattr(each, FSDP_FLATTENED, False) for each in (tensor, tensor._base)):
            raise UnsupportedError("FSDP1 has flattened it: push the outermost module; for adapters use `fully_shard`")
        if not isinstance(tensor, DTensor):
            return read_whole(tensor)
        local = readable(tensor.to_local())
        shape, parts = tuple(tensor.shape), _sharded_parts(tensor, local)
        return LocalParam(shape, dtype_name(local), memory_of(local, shape), parts, trains(tensor))

    def whole(self, tensors: Sequence[torch.Tensor], barrier: Barrier) -> dict[torch.Tensor, torch.Tensor]:
        if any(isinstance(each, DTensor) for each in tensors):
            barrier()
        return {each: readable(each.full_tensor() if isinstance(each, DTensor) else each) for each in tensors}


# --- FSDP2: DTensors


def _sharded_parts(tensor: DTensor, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the regions of a DTensor that this rank holds, as views of its local tensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    cuts: list[list[Cut]] = [[] for _ in tensor.shape]
    for chunks, index, placement in zip(mesh.shape, coordinate, tensor.placements, strict=True):
        # _StridedShard first: it is a subclass of Shard in some releases.
        if isinstance(placement, _StridedShard):
            cuts[placement.dim].append(Cut(chunks, index, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts[placement.dim].append(Cut(chunks, index))
        elif not isinstance(placement, Replicate):
            raise UnsupportedError(f"it is placed as {placement!r}, expected Shard or Replicate; redistribute it first")
    try:
        return cut_parts(tuple(tensor.shape), cuts, local)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error.message}: {tensor.placements} on a mesh of {tuple(mesh.shape)}") from None


def cut_parts(
    shape: Sequence[int], cuts: Sequence[Sequence[Cut]], local: torch.Tensor
) -> list[tuple[Box, torch.Tensor]]:
    """Return the regions of a tensor of `shape` that are left after each dimension's `cuts`, as views of `local`.

    Raises `UnsupportedError` if `local` has not their shape.
    """
    ranges = [held_ranges(length, dim_cuts) for length, dim_cuts in zip(shape, cuts, strict=True)]
    expected = tuple(sum(size for _, size in dim_ranges) for dim_ranges in ranges)
    if expected != tuple(local.shape):
        raise UnsupportedError(
            f"its shard on this rank has shape {tuple(local.shape)}, and that of {tuple(shape)} has {expected}"
        )
    parts = []
    for region in product(*(_with_local_start(dim_ranges) for dim_ranges in ranges)):
        view = local[tuple(slice(at, at + size) for _, size, at in region)]
        parts.append((Box(tuple(start for start, _, _ in region), tuple(size for _, size, _ in region)), view))
    return parts


def _with_local_start(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return ranges as (start, size, start in the local tensor). There they follow each other without gaps."""
    ends = accumulate(size for _, size in ranges)
    return [(start, size, end - size) for (start, size), end in zip(ranges, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Cut:
    """A mesh dimension that shards a tensor dimension into `chunks`. This rank has chunk number `index`.

    `split_factor` is `_StridedShard`'s, and 1 for a plain `Shard`.
    """

    chunks: int
    index: int
    split_factor: int = 1


def held_ranges(length: int, cuts: Sequence[Cut]) -> list[tuple[int, int]]:
    """Return the rest of a dimension of `length` after `cuts`, in mesh order: (start, size) in local order.

    `_StridedShard` means that mesh dimensions to its right were applied before it, as tensor parallelism before FSDP.
    If its split factor identifies them, the cuts are made in that order and one range is left. Otherwise it is split
    into `split_factor` blocks, and one chunk is taken from each.
    """
    ranges = [(0, length)] if length > 0 else []
    for cut in _in_order_of_application(cuts) or cuts:
        total = sum(size for _, size in ranges)
        blocks = [_chunk(0, total, cut.split_factor, block) for block in range(cut.split_factor)]
        mine = [_chunk(start, size, cut.chunks, cut.index) for start, size in blocks]
        ranges = [part for start, size in mine for part in _slice(ranges, start, size)]
    return ranges


def _in_order_of_application(cuts: Sequence[Cut]) -> list[Cut] | None:
    """Return the cuts as plain ones, the first applied first, or None if the split factors fit no such order."""
    order: list[Cut] = []
    for cut in reversed(cuts):
        shards_before = list(accumulate((c.chunks for c in order), lambda a, b: a * b, initial=1))
        if cut.split_factor not in shards_before:
            return None
        order.insert(shards_before.index(cut.split_factor), Cut(cut.chunks, cut.index))
    return order


def _chunk(start: int, size: int, chunks: int, index: int) -> tuple[int, int]:
    """Return (start, size) of chunk number `index` as `torch.chunk` cuts: equal sizes, except for the last chunks."""
    each = -(-size // chunks)
    first = min(index * each, size)
    return start + first, min(each, size - first)


def _slice(ranges: list[tuple[int, int]], start: int, size: int) -> list[tuple[int, int]]:
    """Return elements `start` to `start + size` of the ranges laid end to end, without empty ranges."""
    found = []
    for first, length, at in _with_local_start(ranges):
        low, high = max(start, at), min(start + size, at + length)
        if low < high:
            found.append((first + low - at, high - low))
    return found


# --- FSDP1: flat parameters. FlatParamHandle and its metadata are private to torch. No public function places an
# --- original parameter without gathering it.


def _flattened(model: nn.Module) -> dict[int, dict[str, tuple[Any, int]]]:
    """Return the parameters flattened by FSDP1, by id of the module that owned them.

    Each is (handle, number in its flat parameter). Tied parameters have the same number.
    """
    found: dict[int, dict[str, tuple[Any, int]]] = defaultdict(dict)
    for fsdp in model.modules():
        handle = fsdp._handle if isinstance(fsdp, FullyShardedDataParallel) else None
        if handle is None:
            continue
        for index, info in enumerate(handle.flat_param._param_infos):
            found[id(info.module)][info.param_name] = (handle, index)
        for tied in handle.flat_param._shared_param_infos:
            found[id(tied.module)][tied.param_name] = found[id(tied.prim_module)][tied.prim_param_name]
    return found


def _read_flat(handle: Any, index: int) -> LocalParam:
    """Read parameter number `index` of a flat parameter. This rank's shard has a range of its elements, or none."""
    flat = handle.flat_param
    info, shard, shape = flat._param_infos[index], flat._shard_param_infos[index], tuple(flat._shapes[index])
    if flat._param_extensions[index] is not None:
        raise UnsupportedError("FSDP1 over tensor parallelism is not covered; use `fully_shard`")
    if not flat._contiguities[index]:
        raise UnsupportedError(f"its strides are {flat._strides[index]}; FSDP1 is covered for contiguous parameters")
    if flat.is_meta:
        raise UnsupportedError(ON_META)
    if handle._training_state != HandleTrainingState.IDLE:
        raise UnsupportedError("FSDP has it gathered; push outside of forward, backward and `summon_full_params`")
    dtype = dtype_name(flat)
    own = getattr(info.module, info.param_name) if handle._use_orig_params else flat
    if not shard.in_shard or shard.numel_in_shard == 0:
        return LocalParam(shape, dtype, (id(flat), index), [], own.requires_grad)
    if handle._use_orig_params and not handle._skipped_use_sharded_views:
        values = own.detach()
        if values.dtype != flat.dtype or values.numel() != shard.numel_in_shard or not values.is_contiguous():
            raise UnsupportedError(
                f"it was replaced by {values.dtype} of shape {tuple(values.shape)}, expected {shard.numel_in_shard} "
                f"elements of {flat.dtype}; assign in place"
            )
        values = values.view(-1)
    else:
        values = flat.detach()[shard.offset_in_shard : shard.offset_in_shard + shard.numel_in_shard]
    parts = flat_parts(shape, shard.intra_param_start_idx, values)
    return LocalParam(shape, dtype, (id(flat), index), parts, own.requires_grad)
