"""The interfaces of an engine, as the trainer sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from weightsync.planning.layout import Count


@runtime_checkable
class Engine(Protocol):
    """One running vLLM. A user's own engine may be one; every method follows the rules of `weightsync.engines`."""

    @property
    def name(self) -> str:
        """Return its name for error messages, such as "engine 0 (http://10.0.0.3:8000)"."""

    @property
    def host(self) -> str:
        """Return the address of its workers' host, as seen from here; "127.0.0.1" when that is this host."""

    def init(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info`, plain values that JSON can carry, to every worker's weightsync plug-in."""

    def start(self) -> None:
        """Begin a weight update."""

    def update(self, update_info: dict[str, Any]) -> None:
        """Hand `update_info`, plain values that JSON can carry, to every worker. Between `start` and `finish`."""

    def finish(self, version: str | None) -> None:
        """End the weight update and, from vLLM 0.27 on, stamp `version` on all output from now on."""

    def pause(self, mode: str) -> None:
        """Stop generating. Requests in flight are frozen ("keep"), finished first ("wait") or aborted ("abort")."""

    def resume(self) -> None:
        """Generate again."""

    def reset_caches(self) -> None:
        """Forget everything computed with older weights: prefix cache, KV connector, encoder outputs.

        Requests in flight compute their KV again. Raises `EngineError` when vLLM says that it did not succeed. Called
        when all workers serve an update, or later. The engine then generates nothing until `resume`.
        """

    def set_version(self, version: str) -> None:
        """Stamp `version` without an update. Do nothing before vLLM 0.27."""

    def version(self) -> str | None:
        """Return the version stamped last: vLLM's own "default" before the first, None before vLLM 0.27."""

    def is_alive(self) -> bool | None:
        """Return whether the engine can still answer, or None when it may be busy. Never raises, takes seconds."""


class CalledEngine(ABC):
    """An `Engine` whose methods are calls of the same names elsewhere."""

    def init(self, init_info: dict[str, Any]) -> None:
        self._call("init", init_info)

    def start(self) -> None:
        self._call("start")

    def update(self, update_info: dict[str, Any]) -> None:
        self._call("update", update_info)

    def finish(self, version: str | None) -> None:
        self._call("finish", version)

    def pause(self, mode: str) -> None:
        self._call("pause", mode)

    def resume(self) -> None:
        self._call("resume")

    def reset_caches(self) -> None:
        self._call("reset_caches")

    def set_version(self, version: str) -> None:
        self._call("set_version", version)

    def version(self) -> str | None:
        version: str | None = self._call("version")
        return version

    def is_alive(self) -> bool:
        return self._call("is_alive") is True

    @abstractmethod
    def _call(self, method: str, *args: Any) -> Any:
        """Call the method there. Return its answer, or raise its error."""


class SpmdPart(NamedTuple):
    """Which part of which engine an `LLM` is."""

    engine: Count
    parts: Count


class LoraAdapter(NamedTuple):
    """An adapter that engines have been given.

    In a process that has vLLM, `LoRARequest(*adapter)` asks for it. A server is asked for the model `name`.
    """

    name: str
    id: int
    path: str


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that adapters can be pushed to."""

    def max_lora_rank(self) -> int | None:
        """Return the largest rank that it was started for, or None when it does not say.

        Raises `EngineError` when it was started without adapters.
        """

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load it into every worker from `adapter.path`, and make sure that the engine says so.

        The engine must not have an adapter of this name or id.
        """

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Forget it, if it is known. Requests that use it go on, and may load it again."""

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        """Return whether it can be asked for this adapter, by its name or else its id."""

    def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters that requests, running or waiting, have asked for."""
