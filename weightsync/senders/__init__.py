"""The trainer backends: which tensors there are, under their checkpoint names, and where their bytes lie."""

from __future__ import annotations

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.senders.base import Sender, TensorPolicy


def make_sender(backend: str, policy: TensorPolicy) -> Sender:
    """The sender of a trainer backend. Raises `ConfigError` for an unknown one, `UnsupportedError` for one to come."""
    if backend == "fsdp":
        from weightsync.senders.fsdp import FsdpSender  # DTensor and FSDP cost more to import than all the rest

        return FsdpSender(policy)
    if backend == "deepspeed":
        from weightsync.senders.deepspeed import DeepSpeedSender

        return DeepSpeedSender(policy)
    if backend == "megatron":
        raise UnsupportedError('backend="megatron" comes in a later release; this one has "fsdp" and "deepspeed"')
    raise ConfigError(f'backend={backend!r} is unknown; choose "fsdp" or "deepspeed", or later "megatron"')
