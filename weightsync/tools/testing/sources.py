"""The conformance check of weight sources."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.net.ranks import Ranks, collective
from weightsync.net.wire import typed
from weightsync.planning.layout import Box, Manifest, TensorMeta, coverage
from weightsync.planning.merge import merge_manifests
from weightsync.selection import TensorSelection
from weightsync.sources.base import Model, ShardSource, dtype_name
from weightsync.sources.edits import region
from weightsync.tools.testing.assertions import require, same_bytes

OpenSource: TypeAlias = Callable[[TensorSelection], ShardSource]


def check_source(
    open_source: OpenSource, model: Model, expected: Mapping[str, torch.Tensor], *, timeout_s: float = 60.0
) -> None:
    """Check a trainer source. Collective: with a default process group every trainer rank calls this.

    Args:
        open_source: Returns the source to check, for a selection.
        model: The trainer's model on this rank, or its chunks.
        expected: Every tensor of a push, whole, under its checkpoint name, with the trainer's values and dtype. It is
            the same on every rank. A pipeline stage knows its own tensors, and the ranks together must know all.
        timeout_s: The timeout of each wait.

    Raises:
        AssertionError: The source breaks a promise. The error is the same on all ranks.
    """
    ranks = Ranks(timeout_s)
    try:
        with collective(ranks):
            view: list[Any] = []
            try:
                _check_own_shards(open_source, model, expected, view)
                problem = None
            except AssertionError as error:
                problem = f"rank {ranks.rank}: {error}"
            except Exception:
                problem = f"rank {ranks.rank}: {traceback.format_exc()}"
            views = ranks.gather([problem, view], "check")
            problem = ranks.broadcast(_first_problem(views, expected) if ranks.rank == 0 else None, "check")
    finally:
        ranks.disconnect()
    require(problem is None, str(problem))


def _check_own_shards(
    open_source: OpenSource, model: Model, expected: Mapping[str, torch.Tensor], view: list[Any]
) -> None:
    """Check one rank's own manifest and shards. Append its manifest and its boxes to `view`."""
    source = open_source(TensorSelection())
    reading = source.read(model)
    manifest, shards = reading.manifest, reading.shards
    source.gather(manifest.names, _no_barrier)
    view.append(manifest)
    view.append([(shard.meta.name, shard.box) for shard in shards])

    extra = sorted(set(manifest.names) - set(expected))
    require(not extra, f"the manifest has the unexpected {extra}")
    for meta in manifest:
        want = expected[meta.name]
        require(meta.shape == tuple(want.shape), f"{meta.name}: shape {meta.shape}, expected {tuple(want.shape)}")
        require(meta.dtype == dtype_name(want), f"{meta.name}: dtype {meta.dtype}, expected {want.dtype}")
    absent = sorted({shard.meta.name for shard in shards} - set(manifest.names))
    require(not absent, f"the manifest lacks {absent}, but shards have these names")
    place = {name: at for at, name in enumerate(manifest.names)}
    order = [place[shard.meta.name] for shard in shards]
    require(order == sorted(order), "shards are not in the manifest's order")
    for shard in shards:
        what = f"the shard {shard.box} of {shard.meta.name}"
        require(shard.meta == manifest[shard.meta.name], f"{what}: its meta is not the manifest's")
        require(Box.full(shard.meta.shape).intersect(shard.box) == shard.box, f"{what} is empty or reaches outside")
        require(tuple(shard.tensor.shape) == shard.box.size, f"{what}: its tensor has shape {shard.tensor.shape}")
        require(dtype_name(shard.tensor) == shard.meta.dtype, f"{what}: its tensor is {shard.tensor.dtype}")
        require(shard.tensor.device.type in ("cpu", "cuda"), f"{what} is on {shard.tensor.device}")
        require(not shard.tensor.requires_grad, f"{what} is not detached")
        want = expected[shard.meta.name][region(shard.box)].to(shard.tensor.device)
        require(same_bytes(shard.values(), want), f"{what} has other values than expected")

    again = source.read(model)
    require(again.manifest == manifest, "a second manifest of the same model differs")
    require(
        [(shard.tensor.data_ptr(), shard.tensor.stride()) for shard in shards]
        == [(shard.tensor.data_ptr(), shard.tensor.stride()) for shard in again.shards],
        "shards are not views of the trainer's memory: a second call gives other addresses",
    )

    if isinstance(model, nn.Module):
        _check_follows(source, model)

    left_out = manifest.names[-1]  # the first are embeddings: tied ones travel under another name
    without = open_source(TensorSelection(exclude=(left_out,)))
    if len(manifest) > 1:
        rest = without.read(model)
        found = rest.manifest.names
        require(found == manifest.names[:-1], f"exclude=({left_out!r},) leaves {found} in the manifest")
        require(all(shard.meta.name != left_out for shard in rest.shards), f"there are shards of {left_out}, excluded")
    if isinstance(model, nn.Module):
        buffers = {name for name, _ in model.named_buffers()} - {name for name, _ in model.named_parameters()}
        with_them = sorted(buffers.intersection(open_source(TensorSelection(buffers=False)).read(model).manifest.names))
        require(not with_them, f"buffers=False leaves {with_them} in the manifest")
    found = open_source(TensorSelection(exclude=("*",))).read(model).manifest.names
    require(not found, f"with everything excluded the manifest has {found}")


def _check_follows(source: ShardSource, model: nn.Module) -> None:
    """Compare a reading with parameters written in place, as by an optimizer, and check its `trains`."""
    params = dict(model.named_parameters())
    if any(hasattr(param, "ds_id") for param in params.values()):
        return  # ZeRO-3 keeps its values elsewhere
    own = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in params.values()]
    before = _values(source, model)
    _flip(own)
    try:
        after = _values(source, model)
    finally:
        _flip(own)
    stale = [name for name, values in before.items() if all(map(same_bytes, values, after[name]))]
    is_stale = len(stale) == len(before) > 0 and any(each.numel() for each in own)
    if wrong := sorted({*stale} & {*params}) or stale * is_stale:
        raise AssertionError(f"a reading has older values of {wrong[0]} than the model, whose parameters were changed")
    trains = [shard.trains for shard in source.read(model).shards]
    require(any(trains) or not trains or not all(p.requires_grad for p in params.values()), "no shard trains")


def _values(source: ShardSource, model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the values of the shards of a new reading by name."""
    reading = source.read(model)
    source.gather(reading.manifest.names, _no_barrier)
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for shard in reading.shards:
        if shard.tensor.numel():
            found[shard.meta.name].append(shard.values().clone())
    return found


def _flip(tensors: Sequence[torch.Tensor]) -> None:
    """Change the lowest bit of each byte in place. A second call changes it back."""
    for each in tensors:
        flipped = each.contiguous().reshape(-1).view(torch.uint8) ^ 1
        each.copy_(flipped.view(each.dtype).view(each.shape))


def _no_barrier() -> None:
    """Do nothing. A rank that fails alone leaves the other ranks to their timeout."""


def _first_problem(views: Sequence[Any], expected: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first rank's problem, or a problem of all ranks' shards together."""
    for problem, _ in views:
        if problem is not None:
            return str(problem)
    manifests = [typed(view[0], Manifest) for _, view in views]
    for rank, manifest in enumerate(manifests):
        if _common(manifest, manifests[0]) != _common(manifests[0], manifest):
            return (
                f"rank {rank} has another manifest than rank 0: names, order, shapes and dtypes of common tensors "
                "must be the same"
            )
    merged = merge_manifests(manifests)
    if absent := sorted(set(expected) - set(merged.names)):
        return f"the manifest lacks {absent}"
    boxes: dict[str, set[Box]] = defaultdict(set)
    for rank, (_, view) in enumerate(views):
        times = Counter(typed(view[1], list[tuple[str, Box]]))
        for (name, box), count in times.items():
            if count > 1:
                return f"rank {rank} reports {name}{box} {count} times"
            boxes[name].add(box)
    for meta in merged:
        missing, doubled = coverage(meta.shape, boxes[meta.name])
        if missing:
            return f"no rank holds {meta.name}{missing[0]}"
        if doubled:
            return f"ranks hold {meta.name}{doubled[0]} in boxes that overlap and differ"
    return None


def _common(manifest: Manifest, other: Manifest) -> list[TensorMeta]:
    return [meta for meta in manifest if meta.name in other]
