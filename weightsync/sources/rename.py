"""A source with new tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_meta

from weightsync.errors import ManifestError
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import Barrier, DerivedSource, Reading, ShardSource


class RenamingSource(DerivedSource):
    """The tensors of `source`, under the names of `selection.rename`. See `ShardSource`."""

    def __init__(self, source: ShardSource, selection: TensorSelection) -> None:
        super().__init__(source)
        self._selection = selection
        self._names: dict[str, str] = {}  # the source's name, by the new name

    def _derive(self, given: Reading) -> Reading:
        self._names = {}
        manifest = given.manifest
        tied = tuple((self._selection.renamed(other), self._selection.renamed(name)) for other, name in manifest.tied)
        metas = tuple(map(self._renamed, manifest))
        shards = [replace(shard, meta=self._renamed(shard.meta)) for shard in given.shards]
        return replace(given, manifest=Manifest(metas, tied), shards=shards)

    def gather(self, names: Sequence[str], barrier: Barrier) -> None:
        super().gather([self._names.get(name, name) for name in names], barrier)

    def _renamed(self, meta: TensorMeta) -> TensorMeta:
        name = self._selection.renamed(meta.name)
        if (given := self._names.setdefault(name, meta.name)) != meta.name:
            raise ManifestError(
                f"TensorSelection.rename gives {given} and {meta.name} the same name, {name}; give each tensor its own",
                mismatched={name: f"given to {given} and {meta.name}"},
            )
        return replace_meta(meta, name=name)


def renamed(source: ShardSource, selection: TensorSelection) -> ShardSource:
    """Return a source with the names of `selection.rename`."""
    return source if selection.rename is None else RenamingSource(source, selection)
