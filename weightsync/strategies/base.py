"""The interface of a strategy: one way to make engines serve a new version of the weights."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from weightsync.config import WeightSyncConfig
from weightsync.engines import LoraAdapter
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.fleet import EngineList
from weightsync.fleet.fleet import Fleet
from weightsync.fleet.roster import Roster
from weightsync.net.ranks import Recovery
from weightsync.net.update import Update
from weightsync.net.wire import Committed, Done
from weightsync.planning.layout import ShardLocation
from weightsync.planning.load_plan import LoadPlan
from weightsync.report import PushReport, WorkerReport
from weightsync.sources.base import Model, ShardSource, TensorShard
from weightsync.transports.base import LocalTensor
from weightsync.worker.engine_model import DRAFTER

logger = logging.getLogger(__name__)

OF_COPIES = ("bucketer", "max_bytes", "verify", "on_engine_failure", "encoding", "encoding_base", "rolling", "progress")
"""Options with an effect only on pushes that copy weights."""


@dataclass(frozen=True)
class Options(WeightSyncConfig):
    """The checked options of a `WeightSync`. None: the user left the option out.

    Attributes:
        source: The weight source of `backend`.
        engines: The engines of `engine`.
    """

    source: ShardSource = field(kw_only=True)
    engines: EngineList = field(kw_only=True)

    @property
    def is_stream(self) -> bool:
        """Whether the source is a stream. It gives everything once to all engines."""
        from weightsync.sources.stream import StreamSource

        return isinstance(self.source, StreamSource)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize is None:
            self.selection.refuse("quantize=None", "unquantized")

    def refuse(self, strategy: str, *names: str) -> None:
        """Raise `ConfigError` if the user gave any of the named options. They have no effect on `strategy`.

        False is no such option: nothing rolls, and no bar is shown.
        """
        values = {name: getattr(self, name) for name in names}
        if given := [name for name, value in values.items() if value is not None and value is not False]:
            raise ConfigError(f"{', '.join(given)}: no effect with {strategy}; leave these options out")


class UpdateStrategy(Recovery, ABC):
    """One way to make engines serve a new version.

    Every rank calls `run`, `catch_up`, `attach` and `writing` together. Every rank calls `explain` and `reset` after a
    failure. Any rank may call `close` between them.
    """

    adapter: LoraAdapter | None = None
    """The adapter of the last push, if the strategy pushes adapters."""
    takes_labels = False
    """Whether engines can report a label in place of the version."""
    lost: Sequence[str] = ()
    """The engines lost by the last push."""

    @abstractmethod
    def run(self, update: Update, model: Model) -> PushReport:
        """Make every engine serve the current weights of `model`. Collective.

        Raises:
            WeightSyncError: Any failure. Every rank calls `reset` next.
        """

    @abstractmethod
    def close(self) -> None:
        """Release engines and memory."""

    @property
    def engines(self) -> EngineList:
        """The list of engines. The user may change it. Raises `ConfigError` if the engine is fixed."""
        raise ConfigError("this transport has one fixed engine: engines cannot be added or removed")

    def leave_out(self, engines: Sequence[str]) -> None:
        """Push to all engines but these, until they answer again.

        Args:
            engines: Names of engines.

        Raises:
            ConfigError: The strategy does not copy weights.
        """
        raise ConfigError("leave_out_lost is for transports that copy weights")

    def catch_up(self, update: Update, model: Model) -> PushReport | None:
        """Push the last version to the engines without it. Collective.

        Returns:
            The report, or None if every engine has the version.

        Raises:
            ConfigError: The strategy does not copy weights, or the model has changed.
        """
        raise ConfigError("catch_up is for transports that copy weights")

    def attach(self, update: Update, model: nn.Module) -> None:
        """Make the parameters of `model` views of the engine's own. Collective."""
        raise ConfigError('attach is for WeightSync(backend, transport="single_copy")')

    def writing(self, update: Update) -> AbstractContextManager[None]:
        """Return a context for writes to the attached model. Its exit sets `update.report`. Collective."""
        raise ConfigError('writing is for WeightSync(backend, transport="single_copy"), after attach')


class FleetStrategy(UpdateStrategy):
    """A strategy with connections to the engines' workers that last from one push to the next."""

    takes_labels = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self._fleet: Fleet | None = None  # rank 0 only
        self._failed: Fleet | None = None
        self._roster = Roster(options.engines, options.timeout_s)

    def explain(self, error: WeightSyncError) -> WeightSyncError:
        return error if self._fleet is None else self._fleet.explain(error)

    def reset(self, error: WeightSyncError) -> None:
        self.lost = error.facts.get("lost", ())
        if self._fleet is not None:
            self._fleet.fail(error)
            self._fleet, self._failed = None, self._fleet

    def withdraw(self) -> bool:
        try:
            if self._fleet is not None:
                self._fleet.cancel()
        except WeightSyncError:
            return False
        return True

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None
        self._roster.others.close()

    def _open_fleet(self, update: Update) -> Fleet:
        """Return the fleet, on rank 0. Make it if there is none, without a call to an engine."""
        options, ranks = self._options, update.ranks
        if self._fleet is None:
            pause = options.pause or "keep"
            self._fleet = Fleet(self._roster.engines(), ranks, pause, options.timeout_s, self._failed)
            self._failed = None
        update.check = self._fleet.check
        return self._fleet

    def _sync_engines(self, update: Update) -> bool:
        """Update the fleet to the roster, on rank 0. Return whether the fleet has the same engines as before."""
        if self._fleet is None:
            return False
        update.check = self._fleet.check
        return self._fleet.follow(self._roster.engines())


class StrategyOption(Protocol):
    """An option object for `WeightSync(transport=...)`, in place of a name. It opens its own strategy.

    Attributes:
        demands: The caller's duty besides `push`. "writing": run steps inside of `writing()`. "adapter": name an
            adapter in each request. "server": use an engine started by weightsync. None: no duty.
    """

    @property
    def demands(self) -> str | None: ...

    def open(self, options: Options) -> UpdateStrategy:
        """Return the strategy.

        Raises:
            ConfigError: Options that the strategy cannot work with.
        """


def locate(shards: Sequence[TensorShard], rank: int) -> dict[ShardLocation, LocalTensor]:
    """Return the location and tensor of each of this rank's shards. Its storages are numbered from 1."""
    numbers: dict[int, int] = {}
    located: dict[ShardLocation, LocalTensor] = {}
    for shard in shards:
        tensor = shard.tensor
        number = numbers.setdefault(tensor.untyped_storage().data_ptr(), len(numbers) + 1)
        offset, stride = int(tensor.storage_offset()), tuple(tensor.stride())
        location = ShardLocation(shard.meta.name, shard.box, rank, number, offset, stride, shard.meta.dtype)
        located[location] = LocalTensor(tensor, shard.compute)
    return located


def worker_reports(fleet: Fleet, done: Sequence[Done], committed: Sequence[Committed]) -> tuple[WorkerReport, ...]:
    """Return each worker's row of a report, from its two answers in a push."""
    return tuple(
        WorkerReport(worker.connection.peer, one.nbytes, one.transfer_s, one.verify_s, one.load_s + last.load_s)
        for worker, one, last in zip(fleet.workers, done, committed, strict=True)
    )


def warn_of_kept(plans: Sequence[LoadPlan]) -> None:
    """Warn of parameters in an engine's drafter that no push changes."""
    every = dict.fromkeys(param for plan in plans for param in plan.kept)
    if kept := [param for param in every if param.startswith(f"{DRAFTER}.")]:
        logger.warning(
            "%d parameters of the engine's drafter keep their values, such as %s: the trainer has no tensors for "
            "them. The engine may accept fewer drafted tokens",
            len(kept),
            kept[0],
        )
