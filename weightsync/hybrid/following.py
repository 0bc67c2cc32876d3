"""The push of a worker group into a rollout group: which transport, and what sleeps and wakes around it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightsync.hybrid.worker_group import WorkerGroup
from weightsync.report import PushReport

if TYPE_CHECKING:
    from weightsync.hybrid.rollout_group import RolloutGroup

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class GroupSync:
    """The connection that `RolloutGroup.follow` makes. `push` makes all engines serve the workers' weights.

    transport, reason: what was chosen, and why.
    """

    def __init__(self, engines: RolloutGroup, trainer: WorkerGroup, transport: str | None, options: dict[str, Any]):
        self._engines, self._trainer = engines, trainer
        self._shares_gpus = engines.pool is trainer.processes.pool and engines.pool.gpus > 0
        chosen, self.reason = choose_transport(trainer.processes.nodes, engines.nodes)
        if transport is not None:
            self.reason = "it was asked for"
        self.transport = transport or chosen
        logger.info("%s pushes over %s: %s", trainer.role, self.transport, self.reason)
        trainer.call_all("open_sync", self.transport, engines.actors, options)

    def push(self, version: int | None = None) -> PushReport:
        """Make every engine serve the weights that the workers have now, and return when they do.

        Of engines that sleep, the weights wake before and the KV cache after it, so that a push has memory.
        Raises what `WeightSync.push` raises. Engines that slept then have no KV cache until a push succeeds.
        """
        self._engines.wake_up([WEIGHTS])
        report: PushReport = self._trainer.call_all("push", version)[0]
        self._engines.wake_up([KV_CACHE])
        return report

    def sleep(self, level: int = 2) -> None:
        """Put engines to sleep that are on the workers' GPUs, which then have their memory.

        Do nothing where the engines have GPUs of their own.
        """
        if self._shares_gpus:
            self._engines.sleep(level)

    def close(self) -> None:
        """Disconnect the workers from the engines."""
        self._trainer.call_all("close_sync")

    def __enter__(self) -> GroupSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choose_transport(trainer: Sequence[str], engines: Sequence[str]) -> tuple[str, str]:
    """Return the transport between the nodes of all ranks and those of all engines, and the reason."""
    if len({*trainer, *engines}) == 1:
        return "ipc", "all ranks and engines are on one host, so that engines map the ranks' memory"
    return "broadcast", f"ranks and engines are on {len({*trainer, *engines})} hosts, which share no memory"
