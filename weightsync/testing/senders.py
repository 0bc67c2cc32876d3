"""The conformance check of trainer backends."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weightsync.channel import Hub
from weightsync.errors import ManifestError
from weightsync.layout import Box, Manifest, TensorMeta, coverage, merge_manifests
from weightsync.ranks import RankGroup
from weightsync.senders.base import Model, Sender, TensorPolicy
from weightsync.testing.promises import dtype_name, region, require, same_bytes
from weightsync.wire import pack_manifest, unpack_manifest


def check_sender(
    make_sender: Callable[[TensorPolicy], Sender],
    model: Model,
    expected: Mapping[str, torch.Tensor],
    *,
    timeout_s: float = 60.0,
) -> None:
    """Check a trainer backend. Collective where a default process group exists: every trainer rank calls this.

    `model` is the trainer's model on this rank, or its chunks; `expected` has every tensor that a push delivers, under
    its checkpoint name, whole, with the values and in the dtype that the trainer holds. It is the same on every rank:
    a pipeline stage knows its own tensors, and the ranks together must know all. Raises the same `AssertionError` on
    all ranks.
    """
    alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    hub = Hub() if alone or torch.distributed.get_rank() == 0 else None
    ranks = RankGroup(hub, timeout_s)
    try:
        view: list[Any] = []
        try:
            _check_own_pieces(make_sender, model, expected, view)
            problem = None
        except AssertionError as error:
            problem = f"rank {ranks.rank}: {error}"
        except Exception:
            problem = f"rank {ranks.rank}: {traceback.format_exc()}"
        views = ranks.gather([problem, view], "check")
        problem = ranks.share(_first_problem(views, expected) if ranks.rank == 0 else None, "check")
        require(problem is None, str(problem))
    finally:
        ranks.close()
        if hub is not None:
            hub.close()


def _check_own_pieces(
    make_sender: Callable[[TensorPolicy], Sender],
    model: Model,
    expected: Mapping[str, torch.Tensor],
    view: list[Any],
) -> None:
    """What one rank can see on its own; leaves its manifest and its boxes in `view`."""
    sender = make_sender(TensorPolicy())
    manifest = sender.manifest(model)
    pieces = sender.pieces(model)
    sender.gather(manifest.names)
    view.append(pack_manifest(manifest))
    view.append([[piece.meta.name, list(piece.box.start), list(piece.box.size)] for piece in pieces])

    extra = sorted(set(manifest.names) - set(expected))
    require(not extra, f"the manifest has {extra}, which are not expected")
    for meta in manifest:
        want = expected[meta.name]
        require(meta.shape == tuple(want.shape), f"{meta.name}: shape {meta.shape}, expected {tuple(want.shape)}")
        require(
            meta.dtype == dtype_name(want.dtype), f"{meta.name}: dtype {meta.dtype}, expected {dtype_name(want.dtype)}"
        )
    absent = sorted({piece.meta.name for piece in pieces} - set(manifest.names))
    require(not absent, f"the manifest lacks {absent}, of which there are pieces")
    place = {name: at for at, name in enumerate(manifest.names)}
    order = [place[piece.meta.name] for piece in pieces]
    require(order == sorted(order), "pieces are not in the manifest's order")
    for piece in pieces:
        what = f"the piece {piece.box} of {piece.meta.name}"
        require(piece.meta == manifest[piece.meta.name], f"{what}: its meta is not the manifest's")
        require(Box.full(piece.meta.shape).intersect(piece.box) == piece.box, f"{what} is empty or reaches outside")
        require(tuple(piece.tensor.shape) == piece.box.size, f"{what}: its tensor has shape {piece.tensor.shape}")
        require(dtype_name(piece.tensor.dtype) == piece.meta.dtype, f"{what}: its tensor is {piece.tensor.dtype}")
        require(piece.tensor.device.type in ("cpu", "cuda"), f"{what} is on {piece.tensor.device}")
        require(not piece.tensor.requires_grad, f"{what} is not detached")
        want = expected[piece.meta.name][region(piece.box)].to(piece.tensor.device)
        values = piece.tensor if piece.compute is None else piece.compute()
        require(same_bytes(values, want), f"{what} has other values than expected")

    again = sender.pieces(model)
    require(sender.manifest(model) == manifest, "a second manifest of the same model differs")
    require(
        [(piece.tensor.data_ptr(), piece.tensor.stride()) for piece in pieces]
        == [(piece.tensor.data_ptr(), piece.tensor.stride()) for piece in again],
        "pieces are not views of the trainer's memory: a second call gives other addresses",
    )

    left_out = manifest.names[-1]  # the first are embeddings, which may be tied and then travel under another name
    without = make_sender(TensorPolicy(exclude=(left_out,)))
    if len(manifest) > 1:
        found = without.manifest(model).names
        require(found == manifest.names[:-1], f"exclude=({left_out!r},) leaves {found} in the manifest")
        require(
            all(piece.meta.name != left_out for piece in without.pieces(model)),
            f"there are pieces of {left_out}, excluded",
        )
    try:
        make_sender(TensorPolicy(exclude=("*",))).manifest(model)
    except ManifestError:
        return
    raise AssertionError("with everything excluded there must be a ManifestError, not an empty manifest")


def _first_problem(views: Sequence[Any], expected: Mapping[str, torch.Tensor]) -> str | None:
    """What is wrong on any rank, or with what the ranks hold together."""
    for problem, _ in views:
        if problem is not None:
            return str(problem)
    manifests = [unpack_manifest(view[0]) for _, view in views]
    for rank, manifest in enumerate(manifests):
        if _common(manifest, manifests[0]) != _common(manifests[0], manifest):
            return (
                f"rank {rank} has another manifest than rank 0: names, order, shapes and dtypes of what both know must "
                "be the same"
            )
    merged = merge_manifests(manifests)
    if absent := sorted(set(expected) - set(merged.names)):
        return f"the manifest lacks {absent}"
    boxes: dict[str, set[Box]] = defaultdict(set)
    for rank, (_, view) in enumerate(views):
        times = Counter((name, Box(tuple(start), tuple(size))) for name, start, size in view[1])
        for (name, box), count in times.items():
            if count > 1:
                return f"rank {rank} reports {name}{box} {count} times"
            boxes[name].add(box)
    for meta in merged:
        missing, doubled = coverage(meta.shape, boxes[meta.name])
        if missing:
            return f"no rank holds {meta.name}{missing[0]}"
        if doubled:
            return f"ranks hold {meta.name}{doubled[0]} in boxes that overlap without being the same"
    return None


def _common(manifest: Manifest, other: Manifest) -> list[TensorMeta]:
    return [meta for meta in manifest if meta.name in other]
