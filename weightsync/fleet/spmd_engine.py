"""An engine with workers in the processes of several ranks, as under vLLM's external_launcher.

Each rank's `LLM` is one part of the engine: one worker, and a scheduler. All parts' schedulers take the same decisions.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from functools import partial
from typing import Any

from weightsync.engines.base import CalledEngine, Engine
from weightsync.errors import ConfigError
from weightsync.net.addresses import is_loopback
from weightsync.net.runtime import submit
from weightsync.net.wire import POISONED
from weightsync.planning.grouping import grouped


def join(engines: Sequence[Engine]) -> list[Engine]:
    """Return these engines, with one `SpmdEngine` in place of the parts of each engine.

    Raises `ConfigError` when parts of an engine are missing.
    """
    parts: dict[Any, list[Engine]] = grouped(engines, lambda engine: getattr(engine, "part", None))
    whole = parts.pop(None, [])
    for (_, count), those in parts.items():
        if len(those) != count:
            raise ConfigError(
                f"the workers of one engine are in {count} ranks (external_launcher), and {len(those)} of these ranks "
                "gave their LLM. Give each rank's LLM to its own WeightSync",
                who=those[0].name,
            )
    return [*whole, *map(SpmdEngine, parts.values())]


class SpmdEngine(CalledEngine):
    """The parts of one engine. Each call goes to all parts at once. Two are equal if their parts are the same."""

    def __init__(self, parts: Sequence[Engine]) -> None:
        self.name = f"{parts[0].name} and its parts in {len(parts) - 1} other ranks"
        self._parts = tuple(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpmdEngine) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    @property
    def host(self) -> str:
        hosts = [part.host for part in self._parts]
        return next((host for host in hosts if not is_loopback(host)), hosts[0])

    def version(self) -> str | None:
        versions: list[str | None] = self._call_all("version")
        return next((one for one in versions if one is not None and one.startswith(POISONED)), versions[0])

    def is_alive(self) -> bool:
        return all(self._call_all("is_alive"))

    def _call(self, method: str, *args: Any) -> Any:
        return self._call_all(method, *args)[0]

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Return every part's answer. Raise the first error of any part, without waiting for the other parts."""
        calls = ((part.name, partial(getattr(part, method), *args)) for part in self._parts)
        answers = [submit(f"{method} of {name}", call) for name, call in calls]
        done, _ = concurrent.futures.wait(answers, return_when=concurrent.futures.FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        return [answer.result() for answer in answers]
