"""The weight source for Megatron models that a bridge exports: Megatron-Bridge, mbridge, or one with their interface.

A bridge gathers whole tensors, one after the other, by collectives of the training job. So that the model never is in
memory as a whole, an export runs along with the push: it is advanced until it has given all of the next bucket, and
rank 0 lets go of the bucket before. Every rank advances it alike; rank 0 alone keeps what comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import Model, TensorShard
from weightsync.sources.module import dtype_name


class BridgeSource:
    """The tensors that a bridge exports from a Megatron model. See `WeightSource`.

    Unlike that of other sources, `manifest` is collective. The first one for a model runs an export for the names and
    shapes alone.

    bridge: an object with `export_hf_weights(chunks, cpu=False, show_progress=False)`, as Megatron-Bridge's
        `AutoBridge`, or `export_weights(chunks)`, as mbridge's `Bridge`. Either gives pairs of a checkpoint name and a
        whole tensor, on every rank and in the same order each time.

    Rank 0 holds one group of tensors, and what the bridge exports before the rest of that group. The training job's own
    collectives carry the tensors. The other ranks notice a rank that fails in the middle of an export only when these
    time out. Raises `ConfigError` for an object without either interface, and for a selection that freezes tensors.
    """

    def __init__(self, selection: TensorSelection, bridge: Any) -> None:
        if not (hasattr(bridge, "export_hf_weights") or hasattr(bridge, "export_weights")):
            raise ConfigError(
                f"megatron_bridge={bridge!r} is neither the name of a family nor an object with `export_hf_weights` "
                "(Megatron-Bridge) or `export_weights` (mbridge)"
            )
        if selection.frozen or selection.only_trained:
            raise ConfigError("with a bridge that exports whole tensors all of them are gathered anyway: freeze none")
        self.selection = selection
        self._bridge = bridge
        self._chunks: list[nn.Module] = []
        self._known: dict[str, TensorShard] = {}  # what an export gives, in its order
        self._shards: list[TensorShard] = []
        self._export: Iterator[tuple[str, torch.Tensor]] | None = None
        self._awaited: set[str] = set()  # what the export under way has still to give
        self._bucket: tuple[str, ...] = ()
        self._arrived: dict[str, torch.Tensor] = {}

    def manifest(self, model: Model) -> Manifest:
        chunks = list(model) if isinstance(model, Sequence) else [model]
        if not self._known or [id(chunk) for chunk in chunks] != [id(chunk) for chunk in self._chunks]:
            self._chunks, self._known = chunks, {}
            placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
            for name, tensor in self._run():
                if name in self._known:
                    raise ManifestError(f"the bridge exports {name} twice", mismatched={name: "exported twice"})
                one = placeholders.setdefault((tensor.dtype, tensor.device), tensor.new_zeros(()))
                meta = _meta(name, tensor)
                take = partial(self._arrived.__getitem__, name)
                self._known[name] = TensorShard(meta, Box.full(meta.shape), one.expand(meta.shape), compute=take)
            self._shards = list(self._known.values()) if _rank() == 0 else []
        return Manifest(tuple(piece.meta for piece in self._known.values()))

    def shards(self, model: Model) -> list[TensorShard]:
        self.manifest(model)
        self._export, self._bucket = None, ()
        self._arrived.clear()
        return self._shards

    def close(self) -> None:
        self._chunks, self._known, self._shards, self._export = [], {}, [], None
        self._arrived.clear()

    def gather(self, names: Sequence[str]) -> None:
        if self._export is None:
            self._export = self._run()
            self._awaited = set(self._known)
        for name in self._bucket:
            self._arrived.pop(name, None)
        self._bucket = tuple(names)
        while not self._awaited.isdisjoint(names):
            exported = next(self._export, None)
            if exported is None:
                raise UnsupportedError(f"the bridge's export ended without {min(self._awaited.intersection(names))}")
            name, tensor = exported
            if name not in self._awaited or self._known[name].meta != _meta(name, tensor):
                raise UnsupportedError(
                    f"the bridge exports {name} as {tuple(tensor.shape)} {tensor.dtype}, which is not what it exported "
                    "before; make a new WeightSync when the model has changed"
                )
            self._awaited.remove(name)
            if _rank() == 0:
                self._arrived[name] = tensor

    def _run(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a new export, without what the selection excludes."""
        if hasattr(self._bridge, "export_hf_weights"):
            export = self._bridge.export_hf_weights(self._chunks, cpu=False, show_progress=False)
        else:
            export = self._bridge.export_weights(self._chunks)
        for name, tensor in export:
            if not self.selection.excludes(name):
                yield name, tensor.detach()


def _meta(name: str, tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(name, tuple(tensor.shape), dtype_name(tensor))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
