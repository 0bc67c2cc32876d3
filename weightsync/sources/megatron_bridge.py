"""The weight source for Megatron models that a bridge exports: Megatron-Bridge, mbridge, or one with their interface.

A bridge gathers whole tensors, one after the other, by collectives of the training job. Its export is a stream. Every
rank advances it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from weightsync.errors import ConfigError
from weightsync.selection import TensorSelection
from weightsync.sources.base import Model, Reading
from weightsync.sources.megatron import refuse_overlap
from weightsync.sources.stream import StreamSource


class BridgeSource(StreamSource):
    """The tensors that a bridge exports from a Megatron model. See `ShardSource`.

    `read` is collective, unlike other sources'. The first call for a model runs an export for the names and shapes
    alone.

    bridge: an object with `export_hf_weights(chunks, cpu=False, show_progress=False)`, as Megatron-Bridge's
        `AutoBridge`, or `export_weights(chunks)`, as mbridge's `Bridge`. Either gives pairs of a checkpoint name and a
        whole tensor, on every rank and in the same order each time.

    Rank 0 holds one group of tensors, and the tensors that the bridge exports between them. The training job's own
    collectives carry the tensors. If the bridge fails on one rank, the others notice it when these collectives time
    out. Raises `ConfigError` for an object without either interface, and as `StreamSource` does.
    """

    def __init__(self, selection: TensorSelection, bridge: Any, *, ranks: Any = None) -> None:
        if not (hasattr(bridge, "export_hf_weights") or hasattr(bridge, "export_weights")):
            raise ConfigError(
                f"bridge={bridge!r}; expected the name of a family, or an object with `export_hf_weights` "
                "(Megatron-Bridge) or `export_weights` (mbridge)"
            )
        super().__init__(selection, ranks=ranks)
        self._bridge = bridge
        self._chunks: list[Any] = []

    def read(self, model: Model) -> Reading:
        return super().read(self._export_of(model))

    def close(self) -> None:
        super().close()
        self._chunks = []

    def _export_of(self, model: Model) -> Callable[[], Any]:
        """Return a function that starts an export. Forget the names and shapes of another model."""
        chunks = list(model) if isinstance(model, Sequence) else [model]
        for chunk in [each for each in chunks if isinstance(each, nn.Module)]:
            refuse_overlap(chunk)
        if [id(chunk) for chunk in chunks] != [id(chunk) for chunk in self._chunks]:
            self.close()
            self._chunks = chunks
        if hasattr(self._bridge, "export_hf_weights"):
            return partial(self._bridge.export_hf_weights, chunks, cpu=False, show_progress=False)
        return partial(self._bridge.export_weights, chunks)
