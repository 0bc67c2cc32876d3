"""The weight source for DeepSpeed, ZeRO 0 to 3. The model is the engine of `deepspeed.initialize`, or its module.

This source reads this memory:

- ZeRO 0, 1 and 2 leave the module's parameters whole on every rank, in the model's compute dtype. `step` copies each
  rank's part of the float32 masters into the parameters. `step` gathers the other ranks' parts before it returns. This
  source reads the parameters like a plain module's.
- With ZeRO-3 each rank keeps one flat partition of each parameter, `ds_tensor`, padded to equal size. `step` writes the
  partition from the float32 masters, also if parameters or optimizer states are offloaded to the CPU.
- With ZeRO-3 the parameter itself is empty, or holds a copy gathered from the partitions. A forward or the user gathers
  the copy. A small parameter stays gathered (`ds_persist`). `step` drops all copies, and gathers small parameters anew
  at its end. Only a `GatheredParameters` with a `modifier_rank` writes a copy back. So this source reads partitions,
  and never reads copies.
- ZeRO++'s secondary partitions (`zero_hpz_partition_size`) and quantised gathers (`zero_quantized_weights`) are copies
  too.

To merge a PEFT adapter, this source needs the adapter's whole factors. This source gathers the factors from the
partitions itself, because `GatheredParameters` would change DeepSpeed's record of gathered parameters.

This source never reads the masters. A push sends the values that a checkpoint in the model's own dtype would hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.planning.grouping import grouped
from weightsync.sources.base import Barrier, dtype_name
from weightsync.sources.module import (
    LocalParam,
    ModuleSource,
    NamedReader,
    flat_parts,
    plain,
    read_whole,
    readable,
    trains,
)
from weightsync.sources.module_tree import walk


class DeepSpeedSource(ModuleSource):
    """Tensors of a model under DeepSpeed's ZeRO 0, 1, 2 or 3. See `ShardSource`.

    Only the factors of adapters are gathered. DeepSpeed's state stays unchanged. Push outside of `GatheredParameters`,
    after `step`.
    """

    def local(self, tensors: list[Any]) -> list[torch.Tensor] | None:
        partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_tensor")]
        whole = plain([tensor for tensor in tensors if not hasattr(tensor, "ds_tensor")])
        if whole is None or not all(map(_is_settled, partitioned)):
            return None
        return [*whole, *(param.ds_tensor for param in partitioned)]

    def readers(self, model: nn.Module) -> Iterator[NamedReader]:
        pipeline = getattr(sys.modules.get("deepspeed"), "PipelineModule", ())  # () if not imported
        if any(isinstance(module, pipeline) for _, module in walk(model)):
            raise UnsupportedError("DeepSpeed's PipelineModule numbers its layers, and has no checkpoint names")
        return super().readers(model)

    def read_param(self, tensor: torch.Tensor) -> LocalParam:
        if getattr(tensor, "ds_is_replaced_module", False):
            raise UnsupportedError(
                "DeepSpeed's AutoTP has cut it; train without `tensor_parallel`, with ZeRO-3 instead"
            )
        if getattr(tensor, "allreduce", True) is False:
            raise UnsupportedError("it belongs to DeepSpeed's own experts (MoE, AutoEP), and has no checkpoint name")
        if getattr(tensor, "weight_quantized", False):
            raise UnsupportedError("it is quantised; switch `quantized_initialization` off")
        return _read_partition(tensor) if hasattr(tensor, "ds_tensor") else read_whole(tensor)

    def whole(self, tensors: Sequence[Any], barrier: Barrier) -> dict[torch.Tensor, torch.Tensor]:
        found = {each: each.detach() for each in tensors if not hasattr(each, "ds_tensor")}
        cut = [each for each in tensors if hasattr(each, "ds_tensor")]
        together = grouped(cut, lambda each: (each.ds_process_group, each.ds_tensor.dtype, each.device))
        if together:
            barrier()
        for (group, _, device), params in together.items():
            found |= zip(params, _gathered(params, group, device), strict=True)
        return found


def _is_settled(param: Any) -> bool:
    """Return whether a partition is readable now, by the two states that change while training goes on."""
    depth = getattr(param, "_ds_z3_gathered_param_context_depth", 0)
    return depth == 0 and param.ds_tensor.status.name == "AVAILABLE"


def _read_partition(param: Any) -> LocalParam:
    """Read this rank's partition of a parameter: a range of its elements, or none if the partition is all padding."""
    partition = param.ds_tensor
    if getattr(param, "_ds_z3_gathered_param_context_depth", 0) > 0:
        raise UnsupportedError("it is gathered and may change; push outside of `GatheredParameters`")
    if partition.final_location == "nvme" or partition.status.name != "AVAILABLE":
        raise UnsupportedError('it is offloaded to NVMe; use `offload_param` with `"device": "cpu"`, or leave it out')
    if hasattr(partition, "ds_quant_scale"):
        raise UnsupportedError("it is quantised; switch `zero_quantized_nontrainable_weights` off")
    shape, numel = tuple(param.ds_shape), int(param.ds_numel)
    world, rank = dist.get_world_size(param.ds_process_group), dist.get_rank(param.ds_process_group)
    start, stop, padded = held_range(numel, world, rank)
    if tuple(partition.shape) != (padded,):
        raise UnsupportedError(
            f"its partition has shape {tuple(partition.shape)}, expected {padded} elements: {numel} over {world} "
            "ranks. MiCS is not covered; train without `mics_shard_size`"
        )
    values = readable(partition)[: stop - start]
    return LocalParam(
        shape, dtype_name(values), ("ds_id", param.ds_id), flat_parts(shape, start, values), trains(param)
    )


def _gathered(params: list[Any], group: Any, device: torch.device) -> list[torch.Tensor]:
    """Return each of these partitioned parameters whole, and leave the parameters unchanged. Collective in `group`."""
    # Move offloaded partitions to the GPU: the group cannot send CPU memory.
    mine = torch.cat([param.ds_tensor.to(device) for param in params])  # (elements of all partitions,)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group)
    sizes = [param.ds_tensor.numel() for param in params]
    parts = zip(*(each.split(sizes) for each in theirs), strict=True)
    return [torch.cat(own)[: param.ds_numel].view(param.ds_shape) for param, own in zip(params, parts, strict=True)]


def held_range(numel: int, world: int, rank: int) -> tuple[int, int, int]:
    """Return the range of `numel` elements that `rank` of `world` ranks holds: start, stop, and elements with padding.

    All partitions have one size. Padding is at the end, and can fill the last partitions.
    """
    padded = -(-numel // world)
    start = min(rank * padded, numel)
    return start, min(start + padded, numel), padded
