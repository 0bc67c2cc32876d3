"""The engines of a push: the user's and the other ranks', without lost engines."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait

from weightsync.engines.base import Engine
from weightsync.errors import EngineUnreachableError
from weightsync.fleet.engine_list import EngineList
from weightsync.fleet.engines_of_ranks import OtherRanks
from weightsync.fleet.spmd_engine import join
from weightsync.net import timeouts
from weightsync.net.runtime import submit


class Roster:
    """The engines of the next push. Rank 0 asks once in a push, and nothing else knows them all.

    others: the engines in other ranks' processes.
    lost: the names of engines left out until they answer again. Each push runs their health checks in other threads.
    """

    def __init__(self, engines: EngineList, timeout_s: float) -> None:
        self.others = OtherRanks(engines, timeout_s)
        self.lost: set[str] = set()
        self._list = engines
        self._asked: dict[str, Future[bool | None]] = {}

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave these engines out from now on."""
        self.lost.update(names)

    def engines(self) -> list[Engine]:
        """Return the engines of this push, on rank 0. Parts of one engine in several ranks are one engine.

        A lost engine has at most one health check at a time: later pushes look at the running one. An engine that is no
        longer in the list is forgotten.

        Raises `ConfigError` as `EngineList.engines` and `join` do, and `EngineUnreachableError` when all are lost.
        """
        engines = join([*self._list.engines(), *self.others.engines])
        asked = {
            one.name: self._asked.get(one.name) or submit(f"health of {one.name}", one.is_alive)
            for one in engines
            if one.name in self.lost
        }
        wait([asked[name] for name in asked.keys() - self._asked.keys()], timeouts.LOST_ENGINE_ANSWER_S)
        self._asked = {name: answer for name, answer in asked.items() if not answer.done()}
        self.lost = {name for name, answer in asked.items() if name in self._asked or answer.result() is not True}
        if not (present := [one for one in engines if one.name not in self.lost]):
            raise EngineUnreachableError(f"all engines are lost: {', '.join(one.name for one in engines)}")
        return present
