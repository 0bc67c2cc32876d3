"""The weight sources. Each lists a trainer's tensors under their checkpoint names, and this rank's shards of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.errors import ConfigError
from weightsync.selection import TensorSelection
from weightsync.sources.base import ShardSource


def open_source(
    backend: str | ShardSource,
    selection: TensorSelection,
    *,
    bridge: Any = None,
    vocab_size: int | None = None,
    stream_tensors: Mapping[str, Any] | None = None,
    ranks: Any = None,
) -> ShardSource:
    """Return the weight source of a trainer backend. `backend` may be a source itself.

    `bridge` and `vocab_size` are for "megatron", `stream_tensors` for "stream" (see `WeightSync`). Raises `ConfigError`
    for an unknown backend, and for options without effect for this backend.
    """
    if backend != "megatron" and (bridge is not None or vocab_size is not None):
        raise ConfigError(f'megatron_bridge and vocab_size are for backend="megatron"; this is backend={backend!r}')
    if backend == "stream":
        from weightsync.sources.stream import StreamSource

        return StreamSource(selection, stream_tensors, ranks=ranks)
    if stream_tensors is not None:
        raise ConfigError(f'stream_tensors is for backend="stream"; this is backend={backend!r}')
    if backend == "megatron":
        if bridge is not None and not isinstance(bridge, str):
            from weightsync.sources.megatron_bridge import BridgeSource

            if vocab_size is not None:
                raise ConfigError("a bridge that exports whole tensors knows the vocabulary: leave vocab_size out")
            return BridgeSource(selection, bridge, ranks=ranks)
        from weightsync.sources.megatron import MegatronSource

        return MegatronSource(selection, bridge=bridge, vocab_size=vocab_size)
    if backend == "fsdp":
        from weightsync.sources.fsdp import FsdpSource  # DTensor and FSDP cost more to import than all the rest

        return FsdpSource(selection)
    if backend == "deepspeed":
        from weightsync.sources.deepspeed import DeepSpeedSource

        return DeepSpeedSource(selection)
    if not isinstance(backend, ShardSource):
        raise ConfigError(
            f'backend={backend!r} is unknown; choose "fsdp" (also for DDP and plain modules), "deepspeed", '
            '"megatron" or "stream", or give an object with the methods of weightsync.sources.base.ShardSource'
        )
    if selection.exclude or not selection.buffers:
        raise ConfigError("a weight source of your own decides what travels: leave exclude and buffers out")
    return backend
