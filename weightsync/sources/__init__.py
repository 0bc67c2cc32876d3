"""The weight sources. Each lists a trainer's tensors under their checkpoint names, and this rank's shards of them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from weightsync.errors import ConfigError
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import Barrier, Model, Reading, ShardSource, TensorShard, dtype_name

__all__ = [
    "BackendOption",
    "Barrier",
    "Box",
    "Manifest",
    "Model",
    "Reading",
    "ShardSource",
    "TensorMeta",
    "TensorShard",
    "dtype_name",
]


@runtime_checkable
class BackendOption(Protocol):
    """An option object for `WeightSync(backend=...)`, in place of a name. It opens its own source."""

    def open(self, selection: TensorSelection, ranks: Any) -> ShardSource:
        """Return the source.

        Args:
            selection: The tensors that travel.
            ranks: As for `WeightSync`.

        Raises:
            ConfigError: Options that the source cannot work with.
        """


def open_source(
    backend: str | BackendOption | ShardSource, selection: TensorSelection, ranks: Any = None
) -> ShardSource:
    """Return the weight source of a trainer backend: a name, an option object, or a `ShardSource`.

    Raises `ConfigError` for anything else, and for a selection without effect on the source.
    """
    if isinstance(backend, ShardSource):
        selection.refuse("your own weight source, which selects the tensors", "exclude", "buffers")
        return backend
    match backend:
        case "fsdp":
            from weightsync.sources.fsdp import FsdpSource  # DTensor and FSDP cost more to import than all the rest

            return FsdpSource(selection)
        case "deepspeed":
            from weightsync.sources.deepspeed import DeepSpeedSource

            return DeepSpeedSource(selection)
        case "megatron":
            from weightsync.sources.megatron import MegatronBackend

            backend = MegatronBackend()
        case "stream":
            from weightsync.sources.stream import StreamBackend

            backend = StreamBackend()
    if not isinstance(backend, BackendOption):
        absent = [name for name in ("read", "gather", "close") if not hasattr(backend, name)]
        raise ConfigError(
            f'backend={backend!r}. Choose "fsdp" (also for DDP and plain modules), "deepspeed", "megatron", "stream", '
            "a MegatronBackend, a StreamBackend, or an object with the methods of "
            f"`weightsync.sources.base.ShardSource`. A {type(backend).__name__} lacks {', '.join(absent)}"
        )
    return backend.open(selection, ranks)
