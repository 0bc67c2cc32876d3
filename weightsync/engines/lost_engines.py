"""Engines that pushes leave out until they answer again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from weightsync.control.runtime import Deadline, in_thread
from weightsync.engines.base import Engine

_ANSWER_S = 0.2
"""How long a push waits for those that it has asked. A host that is gone answers nothing, for many seconds."""


class LostEngines:
    """The engines that were lost, by name. Each push asks them whether they answer, beside what else it does."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._asked: dict[str, _Question] = {}

    def add(self, names: Iterable[str]) -> None:
        """Leave these out from now on."""
        self.names.update(names)

    def present(self, engines: Sequence[Engine]) -> list[Engine]:
        """Return those of `engines` that are not lost, or answer again. Forget those that are none of `engines`.

        An engine that does not answer at once is asked only once at a time, however many pushes there are meanwhile.
        """
        asked = {one.name: self._asked.get(one.name) or _Question(one) for one in engines if one.name in self.names}
        deadline = Deadline(_ANSWER_S)
        for name in asked.keys() - self._asked.keys():
            asked[name].answered.wait(deadline.left_s())
        self._asked = {name: question for name, question in asked.items() if not question.answered.is_set()}
        self.names = {name for name, question in asked.items() if not question.is_alive}
        return [one for one in engines if one.name not in self.names]


class _Question:
    """An engine that is being asked whether it is alive."""

    def __init__(self, engine: Engine) -> None:
        self.answered, self.is_alive = threading.Event(), False
        self._engine = engine
        in_thread(f"health of {engine.name}", self._ask)

    def _ask(self) -> None:
        self.is_alive = self._engine.is_alive() is True
        self.answered.set()
