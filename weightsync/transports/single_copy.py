"""Nothing is moved: the trainer writes into the engine's own memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from weightsync import bridge
from weightsync.errors import ConfigError, PlacementError
from weightsync.transports.base import WorkerInfo


@dataclass(frozen=True)
class SingleCopyTransport:
    """The trainer's model has no memory of its own: `WeightSync.attach` makes its parameters views of the engine's.

    bridge: the engine's `vllm_bridge_config.json`, which names the engine where `WeightSync(engine=None)`; None looks
        where `weightsync.bridge.find` does.
    """

    bridge: str | os.PathLike[str] | None = None

    def engine_url(self) -> str:
        """Where the engine serves that the file names. Raises as `bridge.find`, `read` and `check` do."""
        found = bridge.read(bridge.find(self.bridge))
        bridge.check(found)
        if found.url is None:
            raise ConfigError(
                f"{found.path} was written by an engine that is no server, or was not told its address: give the "
                "engine, WeightSync(engine=...)"
            )
        return found.url

    def check_epochs(self, epochs: Sequence[str]) -> None:
        """Raise `PlacementError` where a file was named, and another engine has written it than the one with these
        epochs."""
        if self.bridge is None:
            return
        found = bridge.read(bridge.find(self.bridge))
        bridge.check(found)
        if [worker.epoch for worker in found.workers] != list(epochs):
            raise PlacementError(
                f"{found.path} is another engine's than the one that answers at this address; name that one's file, or "
                "none"
            )

    def check(self, ranks: Sequence[WorkerInfo], workers: Sequence[WorkerInfo]) -> None:
        """Raise `PlacementError` unless every trainer rank has a worker of its own, on this host."""
        if len(workers) != len(ranks):
            raise PlacementError(
                f"{len(ranks)} trainer ranks cannot share the memory of {len(workers)} engine workers: single_copy "
                "pairs rank i with worker i of one engine. Start as many ranks as the engine has workers, or use "
                'transport="ipc"'
            )
        everyone = [*ranks, *workers]
        if strangers := [one.peer for one in everyone if one.boot_id != ranks[0].boot_id]:
            raise PlacementError(
                f"single_copy shares memory of one host, but {', '.join(strangers)} runs on another than trainer rank "
                '0; use transport="broadcast"'
            )
