"""Engines that pushes leave out until they answer again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from weightsync.engines.base import Engine
from weightsync.net import timeouts
from weightsync.net.runtime import submit


class LostEngines:
    """The engines that were lost, by name. Each push asks them whether they answer, beside what else it does."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._asked: dict[str, Future[bool | None]] = {}

    def add(self, names: Iterable[str]) -> None:
        """Leave these out from now on."""
        self.names.update(names)

    def present(self, engines: Sequence[Engine]) -> list[Engine]:
        """Return those of `engines` that are not lost, or answer again. Forget those that are none of `engines`.

        An engine that does not answer at once is asked only once at a time, however many pushes there are meanwhile.
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
