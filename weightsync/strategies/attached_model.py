"""A trainer's model with the engine's own memory as parameters.

    worker i of the engine            trainer rank i, same GPU
    qkv_proj.weight  [q | k | v]  <-  q_proj.weight, k_proj.weight, v_proj.weight: views of its rows

The engine's load plan maps each checkpoint tensor to a region of an engine parameter. So every model that a push covers
can be attached, and this module knows no layer by name. Under tensor parallelism a trainer's parameter is a DTensor.
Its shard on rank i is a view of worker i's parameter. Workers may hold more replicas of a tensor than ranks do, such as
KV heads fewer than workers. Each write is copied to those replicas.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weightsync.errors import ConfigError, PlacementError, UnsupportedError, WeightSyncError
from weightsync.kernels.runs import storage_of
from weightsync.net.runtime import describe_device
from weightsync.net.update import Update
from weightsync.net.wire import MachineInfo, ParametersExported
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import CopyOp, LoadCopy, ShardLocation, View, copy_ops, part_of
from weightsync.planning.single_view import as_single_view
from weightsync.sources.base import TensorShard, dtype_name
from weightsync.sources.module_tree import modules, unwrapped
from weightsync.transports.base import strided
from weightsync.transports.shared_handles import open_exported

Exports: TypeAlias = Sequence[ParametersExported]
"""The exports of each engine worker. Worker i is paired with trainer rank i."""


@dataclass(frozen=True)
class _Slot:
    """The place of a parameter or buffer in a module."""

    tensors: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard of the tensor."""
        return self.tensor._local_tensor if isinstance(self.tensor, DTensor) else self.tensor


class AttachedModel:
    """A model with parameters that are views of an engine's. `lay_over` makes it."""

    def __init__(
        self, model: nn.Module, engine_instances: list[str], slots: list[_Slot], replicas: list[_Replica]
    ) -> None:
        self.model = model
        self.engine_instances = engine_instances
        self._slots = slots
        self._replicas = replicas
        self._addresses = [slot.local.data_ptr() for slot in slots]
        # None while the body of `writing()` runs, or after a signal interrupted the end of `open`.
        self._known: list[tuple[int, int]] | None = self._versions()
        self._ours = {id(slot.tensor) for slot in slots}
        self._hook = register_optimizer_step_pre_hook(self._refuse_step)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow writes to the weights inside of this context."""
        self._known = None
        try:
            yield
        finally:
            self._known = self._versions()

    def fence(self, update: Update) -> None:
        """Return once every rank's writes have reached every worker. Collective."""
        self._settle(update)
        with torch.no_grad():
            for target, source in self._replicas:
                target.copy_(source)
        self._settle(update)

    def check(self) -> None:
        """Raise `WeightSyncError` if a parameter was replaced, or written outside of `writing()`, since `attach`."""
        for slot, at in zip(self._slots, self._addresses, strict=True):
            if slot.tensors.get(slot.key) is not slot.tensor or slot.local.data_ptr() != at:
                raise WeightSyncError(
                    f"the model's {slot.key!r} of shape {tuple(slot.tensor.shape)} is no longer the engine's memory: "
                    "a call such as `model.to(...)` replaced it. Attach a new model on the meta device"
                )
        here = set(map(id, self.model.parameters()))
        ours = {id(slot.tensor) for slot in self._slots if isinstance(slot.tensor, nn.Parameter)}
        if here != ours:
            raise WeightSyncError(
                f"the model has {len(here - ours)} parameters outside of the engine's memory, and lacks "
                f"{len(ours - here)} of the attached ones. Modules were added, replaced or removed since `attach`. "
                "Attach a finished model, or train adapters with another transport"
            )
        known, self._known = self._known, self._versions()
        if known is not None and known != self._known:
            changed = sum(a != b for a, b in zip(known, self._known, strict=True))
            raise WeightSyncError(
                f"{changed} parameters were written outside of `with sync.writing():`. The engine may have generated "
                "with a mixture of versions; write inside of the context"
            )

    def release(self) -> None:
        """Stop watching optimizers. The parameters stay the engine's memory."""
        self._hook.remove()

    def _settle(self, update: Update) -> None:
        for device in {slot.local.device for slot in self._slots if slot.local.is_cuda}:
            torch.cuda.synchronize(device)  # the body may have written on any stream
        update.meet()

    def _versions(self) -> list[tuple[int, int]]:
        """Return torch's write counts of each parameter and its shard. A DTensor does not count writes to its shard."""
        return [(slot.tensor._version, slot.local._version) for slot in self._slots]

    def _refuse_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._known is None:
            return
        if any(id(p) in self._ours for group in optimizer.param_groups for p in group["params"]):
            raise WeightSyncError(
                "the engine may be generating; take this optimizer step inside of `with sync.writing():`"
            )


_Replica = tuple[torch.Tensor, torch.Tensor]
"""A region of this rank's worker, and the region of another worker that it must equal."""


def lay_over(
    model: nn.Module, shards: Sequence[TensorShard], workers: Sequence[MachineInfo], exports: Exports, update: Update
) -> AttachedModel:
    """Make the tensors of `model` views of the paired worker's memory. Collective.

    No rank changes its parameters before all ranks can. Buffers outside of the checkpoint get the values of
    `from_pretrained`.

    model: its tensors are on the meta device.
    shards: the checkpoint regions of these tensors.
    exports: the workers' descriptions of their parameters.

    Raises `ConfigError`, `PlacementError` or `UnsupportedError` for a tensor that cannot be such a view.
    """
    ranks = update.ranks
    own = exports[ranks.rank]
    device = _device_beside(workers[ranks.rank], ranks.rank)
    memory = _map_storages(exports, device)
    slots = _slots(model)
    views = _views(slots, shards, own.locations, ranks.rank)
    located = ranks.gather(_located(shards, own.locations), "connect", list[ShardLocation])
    all_located = [row for rows in located for row in rows]
    everywhere: list[ShardLocation] = ranks.broadcast(all_located, "connect", list[ShardLocation])
    with torch.no_grad():
        replicas = [
            (
                strided(memory(ranks.rank, int(op.param)), op.src_dtype, op.dst_offset, op.size, op.dst_stride),
                strided(memory(op.rank, op.storage), op.src_dtype, op.src_offset, op.size, op.src_stride),
            )
            for op in _to_repeat(own.locations, everywhere, ranks.rank)
        ]
        locals_ = {
            key: strided(memory(ranks.rank, storage), dtype, *view) for key, (storage, dtype, view) in views.items()
        }
        _set_up_buffers(model, [slot for slot in slots if storage_of(slot.local) not in views], device)
        update.meet()
        return AttachedModel(model, [one.engine_instance for one in exports], _install(slots, locals_), replicas)


def _map_storages(exports: Exports, device: torch.device) -> Callable[[int, int], torch.Tensor]:
    """Return a function of a worker and a storage's number. It returns the bytes, mapped at their first use."""
    rows = {(rank, row[0]): row[1:] for rank, export in enumerate(exports) for row in export.storages}

    @cache
    def memory(rank: int, storage: int) -> torch.Tensor:
        kind, fields = rows[rank, storage]
        return open_exported(kind, fields, device, f"engine worker {rank}")

    return memory


def _device_beside(own: MachineInfo, rank: int) -> torch.device:
    """Return the device that this rank shares with its worker."""
    if own.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if (mine := describe_device(device)[1]) != own.gpu_uuid:
        raise PlacementError(
            f"trainer rank {rank} works on GPU {mine}, and worker {rank} of the engine on {own.gpu_uuid}. To share "
            "memory, call torch.cuda.set_device with the worker's GPU before `attach`"
        )
    return device


def _slots(model: nn.Module) -> list[_Slot]:
    """Return every tensor of the model on the meta device, once for each of its modules.

    Raises `ConfigError` for a parameter on another device.
    """
    found: list[_Slot] = []
    for module in modules(model):
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            raise ConfigError("FSDP keeps its own copy of the model's weights; attach the model without FSDP")
        for kind in (module._parameters, module._buffers):
            tensors: dict[str, torch.Tensor | None] = kind  # type: ignore[assignment]
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    found.append(_Slot(tensors, key, tensor))
                elif isinstance(tensor, nn.Parameter):
                    raise ConfigError(
                        f"parameter {key!r} of shape {tuple(tensor.shape)} is on {tensor.device} and has values of its "
                        'own. Build the model under `with torch.device("meta"):`'
                    )
    return found


def _views(
    slots: Sequence[_Slot], shards: Sequence[TensorShard], locations: Sequence[ShardLocation], rank: int
) -> dict[int, tuple[int, str, View]]:
    """Return each local tensor's storage number, dtype and view in that storage, by its key."""
    twice = [name for (name, _), n in Counter((p.name, p.box) for p in locations).items() if n > 1]
    if twice:
        raise UnsupportedError(
            f"the engine holds {len(twice)} tensors more than once, such as {twice[0]}, and a parameter can share one "
            'memory alone; use transport="ipc"'
        )
    held = [(p.meta.name, p.box, p.tensor) for p in shards]
    copies = [LoadCopy(n, box, str(storage_of(t)), int(t.storage_offset()), tuple(t.stride())) for n, box, t in held]
    try:
        steps = copy_ops(copies, [locations])
    except PlacementError as error:
        problems = error.facts["problems"]
        raise PlacementError(
            f"worker {rank} of the engine lacks {len(problems)} regions of trainer rank {rank}: "
            f"{'; '.join(problems[:5])}. Shard the model as the engine does (parallelize_module with ColwiseParallel "
            "and RowwiseParallel, the embedding and the output layer too)",
            problems=problems,
        ) from error
    kinds = {p.meta.name: p.meta.dtype for p in shards}
    if wrong := [s for s in steps if s.src_dtype != kinds[s.name]]:
        raise ConfigError(
            f"{wrong[0].name} is {kinds[wrong[0].name]} in the model and {wrong[0].src_dtype} in the engine. Build "
            "the model with the engine's dtype, or start the engine with the model's"
        )
    of_tensor = grouped(steps, lambda step: int(step.param))
    found: dict[int, tuple[int, str, View]] = {}
    for slot in slots:
        steps, shape = of_tensor.get(storage_of(slot.local), []), tuple(slot.local.shape)
        if 0 in shape:  # without elements, a view of any memory will do
            found[storage_of(slot.local)] = locations[0].storage, dtype_name(slot.local), (0, shape, (0,) * len(shape))
            continue
        if sum(prod(step.size) for step in steps) != slot.local.numel() or not slot.local.is_contiguous():
            if isinstance(slot.tensor, nn.Parameter):
                raise ConfigError(
                    f"no engine parameter has all of {slot.key!r} of shape {shape}. Every parameter "
                    "of an attached model lies in the engine's memory: exclude none"
                )
            continue
        view = as_single_view(shape, int(slot.local.storage_offset()), steps)
        if view is None:
            raise UnsupportedError(
                f"{slot.key!r} is not one strided region of the engine's memory, and a view needs one; use "
                'transport="ipc"'
            )
        found[storage_of(slot.local)] = steps[0].storage, steps[0].src_dtype, view
    return found


def _located(shards: Sequence[TensorShard], locations: Sequence[ShardLocation]) -> list[ShardLocation]:
    """Return the locations of this rank's parameters in its worker's memory."""
    by_name = grouped(locations, lambda location: location.name)
    parts = (part_of(location, shard.box) for shard in shards for location in by_name.get(shard.meta.name, ()))
    return [part for part in parts if part is not None]


def _to_repeat(locations: Sequence[ShardLocation], located: Sequence[ShardLocation], rank: int) -> list[CopyOp]:
    """Return the copies into this rank's worker of regions that only other ranks' parameters cover.

    Raises `PlacementError` for a region without a parameter on any rank.
    """
    wanted = [LoadCopy(p.name, p.box, str(p.storage), p.offset, p.stride) for p in locations]
    try:
        steps = copy_ops(wanted, [located], rank)
    except PlacementError as error:
        raise PlacementError(
            f"worker {rank} of the engine holds more than the trainer: {'; '.join(error.facts['problems'][:5])}. "
            "Attach the whole model",
            problems=error.facts["problems"],
        ) from error
    return [s for s in steps if (s.rank, str(s.storage), s.src_offset) != (rank, s.param, s.dst_offset)]


def _install(slots: Sequence[_Slot], locals_: dict[int, torch.Tensor]) -> list[_Slot]:
    """Put the views in place of the tensors on the meta device. Tied parameters stay one object."""
    made: dict[int, torch.Tensor] = {}
    placed = []
    for slot in slots:
        if storage_of(slot.local) not in locals_:
            continue
        if id(slot.tensor) not in made:
            made[id(slot.tensor)] = _like(slot.tensor, locals_[storage_of(slot.local)])
        slot.tensors[slot.key] = made[id(slot.tensor)]
        placed.append(_Slot(slot.tensors, slot.key, made[id(slot.tensor)]))
    return placed


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a parameter, buffer or DTensor like `tensor`, with `local` as its memory."""
    values = local
    if isinstance(tensor, DTensor):
        values = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _set_up_buffers(model: nn.Module, slots: Sequence[_Slot], device: torch.device) -> None:
    """Give buffers outside of the checkpoint, such as rotary frequencies, the values of `from_pretrained`.

    Raises `UnsupportedError` for a buffer with a value that depends on the earlier contents of its memory.
    """
    if not slots:
        return
    outcomes = []
    for blank in (0, 1):
        for slot in slots:
            slot.tensors[slot.key] = torch.full_like(slot.local, blank, device=device)
        _initialise(model, slots)
        outcomes.append([slot.tensors[slot.key] for slot in slots])
    same = [torch.equal(a, b) for a, b in zip(*outcomes, strict=True) if a is not None and b is not None]
    if not all(same):
        for slot in slots:
            slot.tensors[slot.key] = slot.tensor
        lost = [slot.key for slot, fine in zip(slots, same, strict=True) if not fine]
        raise UnsupportedError(
            f"{len(lost)} buffers on the meta device get no values from the model's initialisation, such as "
            f"{lost[0]!r}. Build the model with values in its buffers, as `accelerate.init_empty_weights` does"
        )


def _initialise(model: nn.Module, slots: Sequence[_Slot]) -> None:
    """Initialise these slots as `from_pretrained` does with tensors missing in the checkpoint."""
    initialise = getattr(unwrapped(model), "initialize_weights", None)
    if "transformers" not in sys.modules or initialise is None:
        return
    blank = {id(slot.tensors) for slot in slots}
    for module in modules(model):
        for param in module._parameters.values():
            if param is not None:
                param._is_hf_initialized = True  # type: ignore[attr-defined]
        module._is_hf_initialized = id(module._buffers) not in blank  # type: ignore[assignment]
    initialise()
