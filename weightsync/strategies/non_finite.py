"""The option `WeightSync(non_finite=...)`: the check of a push for NaN or infinity."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence

from weightsync.errors import ConfigError, NonFiniteError, first_few
from weightsync.net.update import Update
from weightsync.sources.base import Model, ShardSource, await_writes
from weightsync.sources.finite import FiniteSource
from weightsync.strategies.base import Options

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Number of computed tensors gathered together: a few layers' weights."""


class FiniteCheck:
    """The option `non_finite` of one `WeightSync`, on one rank. Its methods are collective.

    source: the checking source, around the source that was given. With "ignore" it is that source itself.
    """

    def __init__(self, options: Options, source: ShardSource) -> None:
        self._option = options.non_finite or "warn"
        self._is_stream = options.is_stream
        is_checked = self._option != "ignore"
        self._checked = FiniteSource(source, takes_turns=self._option == "warn") if is_checked else None
        self.source = self._checked or source

    def refuse(self, update: Update, model: Model) -> None:
        """Raise `NonFiniteError` on every rank if any rank's tensor is not finite, with "refuse"."""
        if self._option != "refuse" or self._checked is None:
            return
        if self._is_stream and isinstance(model, Iterator):
            raise ConfigError(
                'non_finite="refuse" reads all tensors before the push, and an iterator can be read once: push a '
                "list, or a function that returns an iterable"
            )
        ranks = update.ranks
        shards = self._checked.read(model).shards
        await_writes(shards)
        computed = [shard for shard in shards if shard.compute is not None]
        names = ranks.broadcast(_of_all(update, [shard.meta.name for shard in computed], "plan"), "plan", list[str])
        for first in range(0, len(names), _AT_ONCE):
            group = names[first : first + _AT_ONCE]
            self._checked.gather(group, update.meet)
            for shard in computed:
                if shard.meta.name in group:
                    shard.values()
        if names:
            self._checked.gather((), update.meet)
        if bad := ranks.broadcast(_of_all(update, self._checked.non_finite(), "plan"), "plan", list[str]):
            raise NonFiniteError(
                f"{len(bad)} tensors hold NaN or infinity, and nothing was written: {first_few(bad)}. Push finite "
                'weights, or set non_finite="warn"',
                tensors=bad,
            )

    def begin(self, left_out: Collection[str] = ()) -> None:
        """Queue the GPUs' part of `look`. Not collective."""
        if self._checked is not None:
            self._checked.begin_search(left_out)

    def look(self, left_out: Collection[str] = ()) -> list[str]:
        """Return the names of this rank's tensors with NaN or infinity, as far as this push checks. Not collective.

        left_out: the tensors that did not travel.
        """
        return [] if self._checked is None else self._checked.non_finite(left_out)

    def warn(self, update: Update, version: int, seen: Sequence[str]) -> None:
        """Warn of the tensors that the ranks have `seen` by `look`, now served."""
        if self._checked is not None and (bad := _of_all(update, seen, "commit")):
            logger.warning(
                "the engines serve version %d with NaN or infinity in %d tensors: %s", version, len(bad), first_few(bad)
            )


def _of_all(update: Update, seen: Sequence[str], phase: str) -> list[str]:
    """Return the names that any rank has seen, on rank 0. Return an empty list elsewhere. Collective."""
    everyone = update.ranks.gather(seen, phase, list[str])
    return list(dict.fromkeys(name for each in everyone for name in each))
