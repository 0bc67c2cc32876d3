"""The push of a worker group into a rollout group: its transport, and the sleep of engines around it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError, PlacementError, WeightSyncError
from weightsync.hybrid.worker_group import WorkerGroup
from weightsync.report import PushReport
from weightsync.strategies import demands_of

if TYPE_CHECKING:
    from weightsync.hybrid.rollout_group import RolloutGroup

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"


class GroupSync:
    """The connection of a `WorkerGroup` to a `RolloutGroup`. `RolloutGroup.follow` makes it.

    Attributes:
        transport: The chosen transport.
        reason: The reason for this transport, as text.
        drops: Whether the group goes on without engines that die.
    """

    def __init__(self, engines: RolloutGroup, trainer: WorkerGroup, asked: Any, options: dict[str, Any]):
        if not isinstance(trainer, WorkerGroup):
            raise ConfigError(f"engines follow a WorkerGroup, got a {type(trainer).__name__}")
        check_usable(asked)
        self._engines, self._trainer = engines, trainer
        if self._shares_gpus and not engines.has_sleep_mode:
            raise ConfigError(
                "the engines share the workers' GPUs and cannot sleep: make the WorkerGroup before the RolloutGroup, "
                "or give the RolloutGroup enable_sleep_mode=True"
            )
        nodes = trainer.processes.nodes, engines.nodes
        self.transport, self.reason = choose_transport(*nodes, shares_gpus=self._shares_gpus, asked=asked)
        logger.info("%s pushes over %s: %s", trainer.role, self.transport, self.reason)
        self.drops = options.get("on_engine_failure") == "drop"
        self._id = secrets.token_hex(8)  # tells several syncs of the workers apart
        self._told: dict[str, Any] = {}
        self._is_closed = False
        trainer.call_all("open_sync", self._id, self.transport, options)

    def push(self, version: int | None = None) -> PushReport:
        """Make every engine serve the workers' current weights, and return when all do.

        Sleeping engines get the memory of their weights back before the push, and of their KV cache after it. So the
        push has room. Added engines get prompts from now on, if they have started. The error of an engine that could
        not start is raised once, before the push.

        Args:
            version: As for `WeightSync.push`.

        Returns:
            The report of rank 0. With on_engine_failure="drop", its `left_out` names the lost engines.
            These get no prompts.

        Raises:
            ConfigError: The sync was closed, or the engines follow another sync.
            WeightSyncError: As for `WeightSync.push`. Engines that slept then have no KV cache until a push succeeds.
                Or the failure of an earlier `remote` call, if no `result()` has raised it.
        """
        if self._is_closed or not self._engines.is_followed_by(self):
            raise ConfigError(
                f"the engines no longer follow this GroupSync of {self._trainer.role}: it was closed, or `follow` was "
                "called again. Push through the newest GroupSync"
            )
        self._trainer.processes.check_steps("the push")
        self._engines.take_in()
        self._engines.wake_up([WEIGHTS])
        self.check_placement()
        if (engines := self._engines.to_push()) != self._told:
            self._trainer.call_all("name_engines", self._id, engines)
            self._told = engines
        report: PushReport = self._trainer.call_all("push", self._id, version)[0]
        self._engines.was_pushed(report.version, engines, report.left_out)
        self._engines.wake_up([KV_CACHE])
        return report

    def check_placement(self) -> None:
        """Raise `PlacementError` if the transport does not reach all current engines."""
        nodes = self._trainer.processes.nodes, self._engines.nodes
        choose_transport(*nodes, shares_gpus=self._shares_gpus, asked=self.transport)

    def sleep(self, level: int = 2) -> None:
        """Put engines on the GPUs of any workers to sleep, so that the workers can use their memory.

        Do nothing if the engines have GPUs of their own. `level` is as for `RolloutGroup.sleep`.
        """
        if self._engines.takes_turns:
            self._engines.sleep(level)

    def close(self) -> None:
        """Disconnect the workers from the engines."""
        self._is_closed = True
        self._trainer.call_all("close_sync", self._id)

    def __enter__(self) -> GroupSync:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except WeightSyncError:
            if kind is None:  # else it follows from the body's error, and would hide it
                raise

    @property
    def _shares_gpus(self) -> bool:
        return self._engines.shares_gpus(self._trainer.processes.pool)


def check_usable(transport: Any) -> None:
    """Raise `ConfigError` for a transport that a group cannot use, by name or as an object."""
    match demands_of(transport):
        case "writing":
            raise ConfigError(
                'single_copy needs steps inside of `writing()`, and a WorkerGroup pushes: choose "ipc", or leave the '
                "transport out"
            )
        case "adapter":
            raise ConfigError(
                'RolloutGroup.generate asks for no adapter, and would answer with the base model. Choose "ipc" to '
                "merge adapters as they travel, or leave the transport out"
            )
        case "server":
            raise ConfigError(
                "CheckpointTransport(restart=True) restarts servers, and the engines of a RolloutGroup are Ray "
                "actors: leave out restart"
            )


def choose_transport(
    trainer: Sequence[str], engines: Sequence[str], *, shares_gpus: bool, asked: Any = None
) -> tuple[Any, str]:
    """Return the transport between the nodes of all ranks and the nodes of all engines, and the reason.

    Raises `PlacementError` if the transport `asked`, or every transport, cannot work.
    """
    hosts = len({*trainer, *engines})
    transport = asked or ("ipc" if hosts == 1 else "broadcast")
    if transport in ("ipc", "cuda_ipc") and hosts > 1:
        raise PlacementError(
            f"transport={transport!r} is for ranks and engines on one host, got {hosts} hosts: leave the transport out"
        )
    if transport in ("broadcast", "nccl") and shares_gpus:
        raise PlacementError(
            f"engines share GPUs with ranks on {hosts} hosts: {transport!r} needs a GPU for each rank and engine, and "
            "'ipc' one host. Give the engines a pool of their own, take a pool of one node, or follow with "
            "transport=CheckpointTransport(folder)"
        )
    if asked is not None:
        return transport, "it was given"
    if hosts == 1:
        return transport, "all ranks and engines are on one host, and engines map the ranks' memory"
    return transport, f"ranks and engines are on {hosts} hosts, and hosts share no memory"
