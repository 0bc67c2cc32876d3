"""The trainer's interfaces of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from weightsync.planning.layout import Count


@runtime_checkable
class Engine(Protocol):
    """One running vLLM. A user may implement it. Every method follows the rules of `weightsync.engines`."""

    @property
    def name(self) -> str:
        """The engine's name for error messages, such as "engine 0 (http://10.0.0.3:8000)"."""

    @property
    def host(self) -> str:
        """The address of the workers' host, as seen from this process. "127.0.0.1" for this host."""

    def init(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info` to every worker's weightsync plug-in.

        Args:
            init_info: plain values for JSON.
        """

    def start(self) -> None:
        """Begin a weight update."""

    def update(self, update_info: dict[str, Any]) -> None:
        """Hand `update_info` to every worker. Called between `start` and `finish`.

        Args:
            update_info: plain values for JSON.
        """

    def finish(self, version: str | None) -> None:
        """End the weight update.

        Args:
            version: from vLLM 0.27 on, stamped on all later output. None: the version stays.
        """

    def pause(self, mode: str) -> None:
        """Stop generating.

        Args:
            mode: for requests in flight. "keep" freezes them, "wait" finishes them first, "abort" aborts them.
        """

    def resume(self) -> None:
        """Generate again."""

    def reset_caches(self) -> None:
        """Drop everything computed with older weights: prefix cache, KV connector, encoder outputs.

        Requests in flight compute their KV again. Called while all workers serve an update, or later. The engine then
        generates nothing until `resume`.

        Raises:
            EngineError: vLLM answers that a cache was not reset.
        """

    def set_version(self, version: str) -> None:
        """Stamp `version` without an update. Do nothing before vLLM 0.27."""

    def version(self) -> str | None:
        """Return the version stamped last. vLLM's own is "default". None: vLLM before 0.27."""

    def is_alive(self) -> bool | None:
        """Return whether the engine can still answer. None: it may be busy. Never raises. Takes seconds."""


def reports_paused(engine: Engine) -> bool | None:
    """Return whether an engine's generation is paused. None: it does not report this, as not every engine can."""
    found: bool | None = getattr(engine, "is_paused", lambda: None)()
    return found


AwaitAnswer = Callable[[], None]
"""A function that waits for the answer to a call, and raises the call's error."""


@runtime_checkable
class QueueingEngine(Engine, Protocol):
    """An engine that may take calls before it has answered earlier ones. It then serves them in their order.

    Its `pause` and `resume` do nothing.
    """

    def takes_calls_ahead(self) -> bool:
        """Return whether it takes calls ahead, by the methods below."""

    def send_update(self, mark: str | None, update_info: dict[str, Any]) -> list[AwaitAnswer]:
        """Send the calls of `set_version(mark)`, unless it is None, of `start` and of `update`.

        Also send `reset_caches()` before `update` if the engine fills no cache until `update` returns. Returns before
        any answer. The last `AwaitAnswer` is for `update`.
        """

    def send_finish(self) -> list[AwaitAnswer]:
        """Send the calls of `finish(None)`, and of `reset_caches()` unless `send_update` has, to follow `update`."""


class CalledEngine(ABC):
    """An `Engine` that forwards its methods to another object, by the method's name. A subclass has `is_alive`."""

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

    @abstractmethod
    def _call(self, method: str, *args: Any) -> Any:
        """Call the other object's method. Return its answer, or raise its error."""


class SpmdPart(NamedTuple):
    """The engine of an `LLM` under external_launcher, and the number of the engine's parts. Equal for all its parts."""

    engine: Count
    parts: Count


class LoraAdapter(NamedTuple):
    """An adapter in the engines.

    A request to an `LLM` or `AsyncLLM` names it by `LoRARequest(*adapter)`. A request to a server names it as its
    model.
    """

    name: str
    id: int
    path: str


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine for pushes of adapters."""

    def max_lora_rank(self) -> int | None:
        """Return the engine's largest LoRA rank. None: the engine does not report it.

        Raises:
            EngineError: the engine was started without adapters.
        """

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load an adapter into every worker from `adapter.path`, and check that the engine has it.

        The engine must not have an adapter of this name or id.

        Raises:
            UnsupportedError: a module of the adapter is bound to no module of the engine.
            EngineError: the engine did not load the adapter.
        """

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Remove an adapter if the engine has it. Running requests with it continue, and may load it again."""

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        """Return whether the engine has this adapter, by its name or else its id."""

    def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters of all running and waiting requests."""
