"""A source with the names of tensors on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_meta

from weightsync.errors import ManifestError
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import Barrier, DerivedSource, Reading, ShardSource


class RenamingSource(DerivedSource):
    """The tensors of `source`, under the names of `selection.rename`. See `ShardSource`.

    A tied tensor comes under each name with another dtype of `selection.dtypes`.
    """

    def __init__(self, source: ShardSource, selection: TensorSelection) -> None:
        super().__init__(source)
        self._selection = selection
        self._names: dict[str, str] = {}  # the source's name, by the new name

    def _derive(self, given: Reading) -> Reading:
        self._names, renamed, manifest, shards = {}, self._selection.renamed, given.manifest, given.shards
        dtypes = {name: self._selection.wire_dtype(renamed(name)) for pair in manifest.tied for name in pair}
        ties = [(other, name) for other, name in manifest.tied if dtypes[other] in (None, dtypes[name])]
        apart = [pair for pair in manifest.tied if pair not in ties]
        more = [replace_meta(manifest[name], name=other) for other, name in apart if name in manifest]
        again = [(shard, other) for other, name in apart for shard in shards if shard.meta.name == name]
        shards = shards + [replace(shard, meta=replace_meta(shard.meta, name=other)) for shard, other in again]
        metas = tuple(map(self._renamed, (*manifest, *more)))
        shards = [replace(shard, meta=self._renamed(shard.meta)) for shard in shards]
        self._names |= {renamed(other): name for other, name in apart}
        tied = tuple((renamed(other), renamed(name)) for other, name in ties)
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
    """Return a source with the names on the wire."""
    return source if selection.rename is None and not selection.dtypes else RenamingSource(source, selection)
