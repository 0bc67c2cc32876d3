"""A source with new tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_field

from msgspec.structs import replace

from weightsync.errors import ManifestError
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import Model, ShardSource, TensorShard


class RenamingSource:
    """The tensors of `source`, under the names of `selection.rename`. See `ShardSource`."""

    def __init__(self, source: ShardSource, selection: TensorSelection) -> None:
        self._source = source
        self._selection = selection
        self._inner: list[TensorShard] | None = None
        self._shards: list[TensorShard] = []
        self._given: dict[str, str] = {}  # the source's name, by the new name

    def manifest(self, model: Model) -> Manifest:
        self._given = {}
        given = self._source.manifest(model)
        tied = tuple((self._selection.renamed(other), self._selection.renamed(name)) for other, name in given.tied)
        return Manifest(tuple(map(self._renamed, given)), tied)

    def shards(self, model: Model) -> list[TensorShard]:
        if (inner := self._source.shards(model)) is not self._inner:
            self._shards = [replace_field(shard, meta=self._renamed(shard.meta)) for shard in inner]
            self._inner = inner
        return self._shards

    def gather(self, names: Sequence[str]) -> None:
        self._source.gather([self._given.get(name, name) for name in names])

    def close(self) -> None:
        self._inner, self._shards, self._given = None, [], {}
        self._source.close()

    def _renamed(self, meta: TensorMeta) -> TensorMeta:
        name = self._selection.renamed(meta.name)
        if (given := self._given.setdefault(name, meta.name)) != meta.name:
            raise ManifestError(
                f"TensorSelection.rename gives {given} and {meta.name} the same name, {name}: every tensor travels "
                "under a name of its own",
                mismatched={name: f"given to {given} and {meta.name}"},
            )
        return replace(meta, name=name)


def renamed(source: ShardSource, selection: TensorSelection) -> ShardSource:
    """Return a source with the names of `selection.rename`."""
    return source if selection.rename is None else RenamingSource(source, selection)
