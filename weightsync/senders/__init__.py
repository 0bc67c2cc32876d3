"""The trainer backends: which tensors there are, under their checkpoint names, and where their bytes lie."""

from __future__ import annotations

from typing import Any

from weightsync.errors import ConfigError
from weightsync.senders.base import Sender, TensorPolicy


def make_sender(backend: str, policy: TensorPolicy, *, bridge: Any = None, vocab_size: int | None = None) -> Sender:
    """The sender of a trainer backend. `bridge` and `vocab_size` are for "megatron" (see `WeightSync`). Raises
    `ConfigError` for an unknown backend or for options of another one."""
    if backend == "megatron":
        if bridge is not None and not isinstance(bridge, str):
            from weightsync.senders.megatron_export import ExportSender

            if vocab_size is not None:
                raise ConfigError("a bridge that exports whole tensors knows the vocabulary: leave vocab_size out")
            return ExportSender(policy, bridge)
        from weightsync.senders.megatron import MegatronSender

        return MegatronSender(policy, bridge=bridge, vocab_size=vocab_size)
    if bridge is not None or vocab_size is not None:
        raise ConfigError(f'bridge and vocab_size are for backend="megatron"; this is backend={backend!r}')
    if backend == "fsdp":
        from weightsync.senders.fsdp import FsdpSender  # DTensor and FSDP cost more to import than all the rest

        return FsdpSender(policy)
    if backend == "deepspeed":
        from weightsync.senders.deepspeed import DeepSpeedSender

        return DeepSpeedSender(policy)
    raise ConfigError(
        f'backend={backend!r} is unknown; choose "fsdp" (also for DDP and plain modules), "deepspeed" or "megatron"'
    )
