"""One copy of the weights: a trainer's model whose parameters are the engine's own memory.

    worker i of the engine            trainer rank i, same GPU
    qkv_proj.weight  [q | k | v]  <-  q_proj.weight, k_proj.weight, v_proj.weight: views of its rows

Which region of which engine parameter a tensor of the checkpoint is, the engine's load plan says, so any model that a
push covers can be attached, and nothing here knows the name of a layer. Under tensor parallelism a trainer's parameter
is a DTensor whose shard on rank i is a view of worker i's. What the engine's workers hold more often than the trainer's
ranks do (heads of keys and values, where there are fewer than workers) is copied between workers after each write.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weightsync.errors import ConfigError, PlacementError, UnsupportedError, WeightSyncError
from weightsync.layout import CopyStep, Placement, PlannedCopy, View, copy_steps, one_view, part_of
from weightsync.machine import describe_device
from weightsync.memory import open_exported
from weightsync.ranks import RankGroup
from weightsync.senders.base import Piece
from weightsync.senders.names import modules, unwrapped
from weightsync.transports.base import strided
from weightsync.wire import pack_placements, unpack_placements


@dataclass(frozen=True)
class Export:
    """What one engine worker has told about its parameters; its place in a list is the rank that is paired with it."""

    epoch: str
    device: str
    gpu_uuid: str
    storages: list[list[Any]]
    placements: list[Placement]


@dataclass(frozen=True)
class _Slot:
    """Where a module holds a parameter or buffer, and what this rank has of it."""

    tensors: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor
    local: torch.Tensor


class AttachedModel:
    """A model whose parameters are views of an engine's. Made by `lay_over`."""

    def __init__(self, model: nn.Module, epochs: list[str], slots: list[_Slot], copies: list[_Replica]) -> None:
        self.model = model
        self.epochs = epochs
        self._slots = slots
        self._copies = copies
        self._writing = False
        self._addresses = [_local(slot.tensor).data_ptr() for slot in slots]
        self._known = self._versions()
        self._ours = {id(slot.tensor) for slot in slots}
        self._hook = register_optimizer_step_pre_hook(self._refuse_step)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Meanwhile the weights may be written."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False
            self._known = self._versions()

    def fence(self, ranks: RankGroup) -> None:
        """Collective: every trainer rank calls this. When it returns, what any rank has written is everywhere."""
        self._settle(ranks)
        with torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)
        self._settle(ranks)

    def check(self) -> None:
        """Raise `WeightSyncError` where the model is no longer what was attached, or was written outside of
        `writing()`."""
        for slot, at in zip(self._slots, self._addresses, strict=True):
            if slot.tensors.get(slot.key) is not slot.tensor or _local(slot.tensor).data_ptr() != at:
                raise WeightSyncError(
                    f"the model's {slot.key!r} of shape {tuple(slot.tensor.shape)} is no longer the engine's memory: "
                    "it was replaced after `attach`, as `model.to(...)` does. Build the model anew on the meta device "
                    "and attach that"
                )
        if (now_at := self._versions()) != self._known:
            changed = sum(a != b for a, b in zip(now_at, self._known, strict=True))
            self._known = now_at
            raise WeightSyncError(
                f"{changed} parameters were written outside of `with sync.writing():`, while the engine may have been "
                "generating with them. What it generated since then belongs to no version; write inside"
            )

    def release(self) -> None:
        """Stop watching optimizers. The parameters stay what they are."""
        self._hook.remove()

    def _settle(self, ranks: RankGroup) -> None:
        for device in {slot.local.device for slot in self._slots if slot.local.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        ranks.gather(None, "write")
        ranks.share(None, "write")

    def _versions(self) -> list[tuple[int, int]]:
        """Torch's own count of writes: of a DTensor, and of its shard, where such writes are not counted."""
        return [(slot.tensor._version, _local(slot.tensor)._version) for slot in self._slots]

    def _refuse_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._writing:
            return
        if any(id(p) in self._ours for group in optimizer.param_groups for p in group["params"]):
            raise WeightSyncError(
                "this optimizer step would write into an engine that may be generating; take it inside of "
                "`with sync.writing():`"
            )


_Replica = tuple[torch.Tensor, torch.Tensor]
"""A region of this rank's worker, and the region of another's that it must be a copy of."""


def lay_over(model: nn.Module, pieces: Sequence[Piece], exports: Sequence[Export], ranks: RankGroup) -> AttachedModel:
    """Collective: every trainer rank calls this. Make the tensors of `model`, which are on the meta device, views of
    the memory of the worker that is paired with this rank; `pieces` say what of the checkpoint they are. Buffers that
    are in no checkpoint are set up as `from_pretrained` does. No rank's parameters are changed before all ranks' can.

    Raises `ConfigError`, `PlacementError` or `UnsupportedError`, which say what of the model cannot be the engine's
    memory.
    """
    own = exports[ranks.rank]
    memory = _Memory(exports, _device_beside(own, ranks.rank))
    slots = _slots(model)
    views = _views(slots, pieces, own.placements, ranks.rank)
    located = pack_placements(_located(pieces, own.placements))
    everywhere = ranks.share([row for rows in ranks.gather(located, "connect") for row in rows], "connect")
    steps = _to_repeat(own.placements, unpack_placements(everywhere), ranks.rank)
    with torch.no_grad():
        copies = [
            (
                strided(memory.of(ranks.rank, int(s.param)), s.src_dtype, s.dst_offset, s.size, s.dst_stride),
                strided(memory.of(s.rank, s.storage), s.src_dtype, s.src_offset, s.size, s.src_stride),
            )
            for s in steps
        ]
        locals_ = {
            key: strided(memory.of(ranks.rank, storage), dtype, *view) for key, (storage, dtype, view) in views.items()
        }
        _set_up_buffers(model, [slot for slot in slots if _key(slot.local) not in views], memory.device)
        ranks.gather(None, "connect")
        ranks.share(None, "connect")
        return AttachedModel(model, [export.epoch for export in exports], _install(slots, locals_), copies)


class _Memory:
    """The workers' memory, mapped when it is first used."""

    def __init__(self, exports: Sequence[Export], device: torch.device) -> None:
        self.device = device
        self._rows = {(rank, row[0]): row for rank, export in enumerate(exports) for row in export.storages}
        self._open: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, rank: int, storage: int) -> torch.Tensor:
        if (rank, storage) not in self._open:
            _, kind, fields = self._rows[rank, storage]
            self._open[rank, storage] = open_exported(kind, fields, self.device, f"engine worker {rank}")
        return self._open[rank, storage]


def _device_beside(own: Export, rank: int) -> torch.device:
    """The device that this rank shares with its worker."""
    if own.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if (mine := describe_device(device)[1]) != own.gpu_uuid:
        raise PlacementError(
            f"trainer rank {rank} works on GPU {mine}, and worker {rank} of the engine on {own.gpu_uuid}: to share "
            "memory they must use the same one. Call torch.cuda.set_device accordingly, before `attach`"
        )
    return device


def _slots(model: nn.Module) -> list[_Slot]:
    """Every tensor of the model that is on the meta device, under each of its modules. Raises `ConfigError` for a
    parameter that is not."""
    found: list[_Slot] = []
    for module in modules(model):
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            raise ConfigError("the model is under FSDP, which keeps its own copy of the weights; attach it without")
        for kind in (module._parameters, module._buffers):
            tensors: dict[str, torch.Tensor | None] = kind  # type: ignore[assignment]
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                local = _local(tensor)
                if local.is_meta:
                    found.append(_Slot(tensors, key, tensor, local))
                elif isinstance(tensor, nn.Parameter):
                    raise ConfigError(
                        f"parameter {key!r} of shape {tuple(tensor.shape)} is on {local.device} and has values of its "
                        'own: build the model under `with torch.device("meta"):`, it gets the engine\'s values'
                    )
    return found


def _views(
    slots: Sequence[_Slot], pieces: Sequence[Piece], placements: Sequence[Placement], rank: int
) -> dict[int, tuple[int, str, View]]:
    """By key of a local tensor: number of the storage, dtype and view of it that it becomes."""
    twice = [name for (name, _), n in Counter((p.name, p.box) for p in placements).items() if n > 1]
    if twice:
        raise UnsupportedError(
            f"the engine holds {len(twice)} tensors more than once, such as {twice[0]}: a trainer's parameter can be "
            'only one of them; use transport="ipc"'
        )
    copies = [
        PlannedCopy(p.meta.name, p.box, str(_key(p.tensor)), int(p.tensor.storage_offset()), tuple(p.tensor.stride()))
        for p in pieces
    ]
    try:
        steps = copy_steps(copies, placements)
    except PlacementError as error:
        problems = error.facts["problems"]
        raise PlacementError(
            f"worker {rank} of the engine does not hold all that trainer rank {rank} has, in {len(problems)} regions: "
            f"{'; '.join(problems[:5])}. Shard the model as the engine does (parallelize_module with ColwiseParallel "
            "and RowwiseParallel, the embedding and the output layer too)",
            problems=problems,
        ) from error
    kinds = {p.meta.name: p.meta.dtype for p in pieces}
    if wrong := [s for s in steps if s.src_dtype != kinds[s.name]]:
        raise ConfigError(
            f"{wrong[0].name} is {kinds[wrong[0].name]} in the model and {wrong[0].src_dtype} in the engine, of whose "
            "memory it is to be a view; build the model with the engine's dtype, or start the engine with the model's"
        )
    of_tensor: dict[int, list[CopyStep]] = defaultdict(list)
    for step in steps:
        of_tensor[int(step.param)].append(step)
    found: dict[int, tuple[int, str, View]] = {}
    for slot in slots:
        steps = of_tensor.get(_key(slot.local), [])
        if sum(prod(step.size) for step in steps) != slot.local.numel() or not slot.local.is_contiguous():
            if isinstance(slot.tensor, nn.Parameter):
                raise ConfigError(
                    f"no engine parameter is behind all of {slot.key!r} of shape {tuple(slot.local.shape)}: a shared "
                    "model has every parameter in the engine's memory, so none can be excluded"
                )
            continue
        view = one_view(tuple(slot.local.shape), int(slot.local.storage_offset()), steps)
        if view is None:
            raise UnsupportedError(
                f"{steps[0].name} is not one strided region of the engine's memory, so no parameter can be a view of "
                'it; use transport="ipc"'
            )
        found[_key(slot.local)] = steps[0].storage, steps[0].src_dtype, view
    return found


def _located(pieces: Sequence[Piece], placements: Sequence[Placement]) -> list[Placement]:
    """Where in the worker's memory lies what this rank's parameters are."""
    by_name: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        by_name[placement.name].append(placement)
    parts = (part_of(placement, piece.box) for piece in pieces for placement in by_name[piece.meta.name])
    return [part for part in parts if part is not None]


def _to_repeat(placements: Sequence[Placement], located: Sequence[Placement], rank: int) -> list[CopyStep]:
    """What this rank's worker holds that is not behind this rank's parameters: to be copied from where it is behind
    another's. Raises `PlacementError` for what is behind nobody's."""
    wanted = [PlannedCopy(p.name, p.box, str(p.storage), p.offset, p.stride) for p in placements]
    try:
        steps = copy_steps(wanted, located, rank)
    except PlacementError as error:
        raise PlacementError(
            f"worker {rank} of the engine holds what is no trainer rank's: {'; '.join(error.facts['problems'][:5])}. "
            "Attach the whole model",
            problems=error.facts["problems"],
        ) from error
    return [s for s in steps if (s.rank, str(s.storage), s.src_offset) != (rank, s.param, s.dst_offset)]


def _install(slots: Sequence[_Slot], locals_: dict[int, torch.Tensor]) -> list[_Slot]:
    """Put the views where the tensors on the meta device were; what was one object stays one."""
    made: dict[int, torch.Tensor] = {}
    placed = []
    for slot in slots:
        if _key(slot.local) not in locals_:
            continue
        if id(slot.tensor) not in made:
            made[id(slot.tensor)] = _like(slot.tensor, locals_[_key(slot.local)])
        tensor = made[id(slot.tensor)]
        slot.tensors[slot.key] = tensor
        placed.append(_Slot(slot.tensors, slot.key, tensor, _local(tensor)))
    return placed


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A parameter, buffer or DTensor as `tensor` is, with `local` as its memory."""
    values = local
    if isinstance(tensor, DTensor):
        values = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _set_up_buffers(model: nn.Module, slots: Sequence[_Slot], device: torch.device) -> None:
    """Give the buffers that are in no checkpoint, such as rotary frequencies, the values that `from_pretrained` gives
    them. Whatever comes out must not depend on what was there before. Raises `UnsupportedError` for others."""
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
            f"{len(lost)} buffers are on the meta device and in no checkpoint, such as {lost[0]!r}, and nothing says "
            "what they should be: build the model so that buffers have values, as `accelerate.init_empty_weights` does"
        )


def _initialise(model: nn.Module, slots: Sequence[_Slot]) -> None:
    """What `from_pretrained` does with tensors that the checkpoint does not have."""
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
