"""The tensors of all trainer ranks together. Pure, like `layout`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from weightsync.errors import ManifestError
from weightsync.planning.layout import Manifest, TensorMeta


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Return the tensors of all ranks together, each once.

    A pipeline stage knows its own layers, and other ranks know all. Every manifest's order is kept. Between tensors of
    different manifests layer 2 comes before layer 10.

    Raises one `ManifestError` for all tensors with another shape or dtype on another rank. Raises
    `ManifestError` if there is no tensor.
    """
    distinct = list(dict.fromkeys(manifest.tensors for manifest in manifests))
    known: dict[str, TensorMeta] = {}
    mismatched: dict[str, str] = {}
    for tensors in distinct:
        for meta in tensors:
            first = known.setdefault(meta.name, meta)
            if first != meta:
                mismatched[meta.name] = f"{first.shape} {first.dtype} on one rank, {meta.shape} {meta.dtype} on another"
    if not known:
        raise ManifestError("the manifest is empty: the model has no tensor to push")
    if mismatched:
        name, reason = next(iter(mismatched.items()))
        raise ManifestError(
            f"the trainer's ranks do not hold the same model: {len(mismatched)} tensors differ, such as {name} "
            f"({reason})",
            mismatched=mismatched,
        )
    # A single list needs no keys.
    lists = ([meta.name for meta in tensors] for tensors in distinct)
    merged = known if len(distinct) == 1 else dict.fromkeys(heapq.merge(*lists, key=_natural))
    tied = dict.fromkeys(pair for manifest in manifests for pair in manifest.tied if pair[0] not in known)
    return Manifest(tuple(known[name] for name in merged), tuple(tied))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names. It orders numbers in them as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
