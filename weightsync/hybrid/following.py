"""The push of a worker group into a rollout group: which transport, and what sleeps and wakes around it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError, PlacementError, WeightSyncError
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

    def __init__(self, engines: RolloutGroup, trainer: WorkerGroup, asked: Any, options: dict[str, Any]):
        self._engines, self._trainer = engines, trainer
        self._shares_gpus = engines.pool is trainer.processes.pool and engines.pool.gpus > 0
        if self._shares_gpus and not engines.has_sleep_mode:
            raise ConfigError(
                "the engines share the workers' GPUs and cannot sleep: make the WorkerGroup before the RolloutGroup, "
                "or give the RolloutGroup enable_sleep_mode=True"
            )
        nodes = trainer.processes.nodes, engines.nodes
        self.transport, self.reason = choose_transport(*nodes, shares_gpus=self._shares_gpus, asked=asked)
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except WeightSyncError:
            if kind is None:  # else it follows from what the body has raised, and would take its place
                raise


def choose_transport(
    trainer: Sequence[str], engines: Sequence[str], *, shares_gpus: bool, asked: Any = None
) -> tuple[Any, str]:
    """Return the transport between the nodes of all ranks and those of all engines, and the reason.

    Raises `PlacementError` where the transport that was asked for, or each one, cannot work.
    """
    hosts = len({*trainer, *engines})
    transport = asked or ("ipc" if hosts == 1 else "broadcast")
    if transport in ("ipc", "cuda_ipc") and hosts > 1:
        raise PlacementError(
            f"transport={transport!r} is for ranks and engines on one host, and these are on {hosts}: ask for none"
        )
    if transport in ("broadcast", "nccl") and shares_gpus:
        raise PlacementError(
            f"engines share GPUs with ranks, on {hosts} hosts in all: {transport!r} needs a GPU for each of them, and "
            "'ipc' one host. Give the engines a pool of their own, take a pool of one node, or follow with "
            "transport=CheckpointTransport(folder)"
        )
    if asked is not None:
        return transport, "it was asked for"
    if hosts == 1:
        return transport, "all ranks and engines are on one host, so that engines map the ranks' memory"
    return transport, f"ranks and engines are on {hosts} hosts, which share no memory"
