"""Pairs of trainer tensors with one place in an engine, such as tied embeddings and a separate head of the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weightsync.errors import ConfigError
from weightsync.kernels.digest import digest
from weightsync.net.update import Update
from weightsync.sources.base import Model, ShardSource, TensorShard
from weightsync.strategies.plan_checks import check_duplicates
from weightsync.strategies.transfer_session import TransferSession

Pairs = dict[tuple[str, str], torch.dtype]
"""Two names with one place, and their dtype on the wire."""


def places_of_two(sessions: Sequence[TransferSession]) -> Pairs:
    """Return the pairs of tensors with one place in an engine of these sessions."""
    return {
        pair: getattr(torch, session.plan.manifest[pair[1]].dtype)
        for session in sessions
        for pair in session.plan.duplicates
    }


def refuse_different(
    update: Update, source: ShardSource, model: Model, shards: Sequence[TensorShard], pairs: Pairs, is_stream: bool
) -> None:
    """Raise `ManifestError` if the two tensors of a pair differ. Collective. A stream is read for this."""
    if is_stream and isinstance(model, Iterator):
        other, name = next(iter(pairs))
        raise ConfigError(
            f"the stream gives {other} and {name}, and the engine has one place for both. An iterator cannot be read "
            "twice to compare them: push a list, or a function that returns an iterable"
        )
    dtypes = {name: dtype for pair, dtype in pairs.items() for name in pair}
    source.gather([*dtypes], update.meet)
    own: dict[str, dict[str, int]] = {name: {} for name in dtypes}
    for shard in shards:
        if shard.meta.name in own:
            values = shard.values().to(dtypes[shard.meta.name]).contiguous()
            own[shard.meta.name][str(shard.box)] = digest(values.reshape(-1).view(torch.uint8))
    everyone = update.ranks.gather(own, "plan")
    source.gather((), update.meet)
    if update.ranks.rank == 0:
        check_duplicates([*pairs], everyone)
