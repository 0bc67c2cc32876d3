"""vLLM's `WeightSource` objects: tensors that a trainer declares, and then gives by iteration.

This file does not import vLLM: a source is known by its members. There are two forms.

- Up to vLLM 0.32, `metadata()` lists all tensors. Iteration gives each of them whole on every rank, or None for a
  tensor that this rank does not hold (`held_names`). Without `held_names`, rank 0 alone is sure to give real tensors.
- From vLLM 0.33 on, `metadata` also has the owners of each tensor. `iter_full` gives a rank the whole tensors of its
  own, and `iter_local` its shards of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from weightsync.errors import ManifestError, UnsupportedError
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import Reading, TensorShard
from weightsync.sources.fsdp import Cut, cut_parts
from weightsync.sources.module import readable


def is_declared(model: Any) -> bool:
    """Return whether a model is a `WeightSource` of vLLM's."""
    gives = any(hasattr(type(model), name) for name in ("__iter__", "iter_full", "iter_local"))
    return gives and hasattr(type(model), "metadata") and not isinstance(model, (nn.Module, Mapping))


def has_shards(source: Any) -> bool:
    """Return whether a source gives each rank its own shards."""
    return getattr(source, "implements_iter_local", bool)()


def declared(source: Any) -> list[TensorMeta]:
    """Return the tensors of a source, in its order. May be collective: some trainers must export for it."""
    return [_meta_of(entry) for entry in _entries(source)]


def held_names(source: Any, rank: int) -> Collection[str]:
    """Return the names of the whole tensors that this rank gives."""
    if hasattr(source, "iter_full"):
        return {entry.name for entry in _entries(source) if _owns(entry, rank)}
    held: Collection[str] | None = getattr(source, "held_names", lambda: None)()
    if held is not None:
        return held
    return [entry.name for entry in _entries(source)] if rank == 0 else ()


def whole_tensors(source: Any, rank: int) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each declared name with its whole tensor, or with None if this rank does not hold it.

    Reading may run collectives of the tensor's owners.
    """
    if not hasattr(source, "iter_full"):
        yield from source
        return
    owned = iter(source.iter_full())
    for entry in _entries(source):
        if not _owns(entry, rank):
            yield entry.name, None
        elif (pair := next(owned, None)) is not None:
            yield pair
    yield from owned


def local_shards(source: Any, rank: int, selection: TensorSelection) -> Reading:
    """Return this rank's shards of a source's tensors, where they lie.

    Raises `ManifestError` for a shard other than the declared one.
    """
    entries = _entries(source)
    shards: list[TensorShard] = []
    owned = (entry for entry in entries if _owns(entry, rank))
    for entry, pair in zip_longest(owned, source.iter_local()):
        name, tensor = pair or ("nothing", torch.empty(0))
        meta = None if entry is None else _meta_of(entry)
        if meta is None or name != meta.name or str(tensor.dtype) != f"torch.{meta.dtype}":
            raise _misfit(name, f"{tuple(tensor.shape)} {tensor.dtype}", meta)
        if not selection.excludes(name):
            try:
                parts = cut_parts(meta.shape, _cuts(entry, rank), readable(tensor))
            except UnsupportedError as error:
                raise _misfit(name, error.message, meta) from error
            shards += [TensorShard(meta, box, view) for box, view in parts]
    metas = (meta for meta in map(_meta_of, entries) if not selection.excludes(meta.name))
    return Reading(Manifest(tuple(metas)), shards)


def _entries(source: Any) -> list[Any]:
    """Return vLLM's `ParamMeta` objects. `metadata` is a method up to 0.32, and a property from 0.33 on."""
    found = source.metadata
    return list(found() if callable(found) else found)


def _meta_of(entry: Any) -> TensorMeta:
    return TensorMeta(entry.name, tuple(entry.shape), str(entry.dtype).removeprefix("torch."))


def _owns(entry: Any, rank: int) -> bool:
    return entry.owners is None or rank in entry.owners


def _cuts(entry: Any, rank: int) -> list[list[Cut]]:
    """Return the cuts of each dimension, in mesh order. The mesh is row-major over the owners."""
    cuts: list[list[Cut]] = [[] for _ in entry.shape]
    at = 0 if entry.owners is None else entry.owners.index(rank)
    axes = zip(entry.mesh_shape or (), entry.placements or (), strict=False)  # no placements: replicated
    for chunks, placement in reversed(list(axes)):
        at, index = divmod(at, chunks)
        if hasattr(placement, "dim"):
            cuts[placement.dim].insert(0, Cut(chunks, index))
    return cuts


def _misfit(name: str, given: str, expected: TensorMeta | None) -> ManifestError:
    told = "nothing" if expected is None else f"{expected.name} as {expected.shape} {expected.dtype}"
    return ManifestError(
        f"the weight source gives {name} as {given}, and its metadata declares {told}. Both must agree",
        mismatched={name: given},
    )
