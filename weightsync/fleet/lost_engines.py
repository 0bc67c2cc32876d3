"""Engines left out of pushes until they answer again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from weightsync.engines.base import Engine
from weightsync.net import timeouts
from weightsync.net.runtime import submit


class LostEngines:
    """The names of lost engines. Each push runs their health checks in other threads."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._asked: dict[str, Future[bool | None]] = {}

    def add(self, names: Iterable[str]) -> None:
        """Leave these engines out from now on."""
        self.names.update(names)

    def present(self, engines: Sequence[Engine]) -> list[Engine]:
        """Return `engines` without the lost ones that still do not answer. Forget lost engines not in `engines`.

        A lost engine has at most one health check at a time: later pushes look at the running one.
        """
        asked = {
            one.name: self._asked.get(one.name) or submit(f"health of {one.name}", one.is_alive)
            for one in engines
            if one.name in self.names
        }
        wait([asked[name] for name in asked.keys() - self._asked.keys()], timeouts.LOST_ENGINE_ANSWER_S)
        self._asked = {name: answer for name, answer in asked.items() if not answer.done()}
        self.names = {name for name, answer in asked.items() if name in self._asked or answer.result() is not True}
        return [one for one in engines if one.name not in self.names]
