"""The list of engines: the user's, with later additions and removals, and the client of each engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from weightsync.engines.async_llm import AsyncEngine
from weightsync.engines.base import Engine
from weightsync.engines.http import DEFAULT_URL, HttpEngine
from weightsync.engines.llm import LlmEngine
from weightsync.engines.ray_actor import RayEngine
from weightsync.errors import ConfigError
from weightsync.vllm.llm_object import vllm_class

ENGINE_VARIABLE = "WEIGHTSYNC_ENGINE"
_COMMENT = "#"


class EngineList:
    """The engines of one `WeightSync`: its attribute `engines`.

        sync.engines.add("http://10.0.0.7:8000")
        sync.engines.remove("http://10.0.0.3:8000")

    A push reaches the engines in rank 0's list. If the other ranks were given the same list, change it on every rank.
    If they were given None, change it on rank 0 alone. `add` and `remove` are not collective.

    `connect` lists the kinds of engines. In place of a list there may be a callable that returns it, or the `Path`
    of a file with one address a line. Text after a # in the file is ignored. Rank 0 alone calls or reads it, before
    each push.
    """

    def __init__(self, given: object, timeout_s: float, of: str = "") -> None:
        """Take the user's engines. `of` is the end of their names, such as " of trainer rank 1".

        Raises `ConfigError` for a list as `engines` does. $WEIGHTSYNC_ENGINE, a callable or a file is read later.
        """
        self.given = given
        self._read: Callable[[], object] | None = None
        if isinstance(given, os.PathLike):
            self._read = lambda: _addresses(Path(given))
        elif callable(given) and not (_is_own(given) or vllm_class(given) or public_name(given)):
            self._read = given
        self._listed: list[object] | None = None if given is None or self._read is not None else listed(given)
        self._added: list[object] = []
        self._timeout_s, self._of = timeout_s, of
        self._known: list[tuple[object, Engine]] = []
        self._count = 0
        if self._listed is not None:
            self.engines()  # for its errors: a client also takes the thread, event loop and API key of the first push
            self._known, self._count = [], 0

    def __repr__(self) -> str:
        engines = [public_name(one) or type(one).__name__ for one in self.all()] if self._read is None else self.given
        return f"EngineList({engines!r})"

    def add(self, engine: object) -> None:
        """Add an engine for the next push.

        Args:
            engine: one engine that `connect` accepts.

        Raises:
            ConfigError: the engine is in the list already, or the list comes from a callable or a file.
        """
        if any(_is_same(engine, one) for one in self._changeable()):
            raise ConfigError(f"{engine!r} is among the engines already")
        self._added.append(engine)

    def remove(self, engine: object) -> None:
        """Remove an engine from the list. It continues to serve its current weights.

        Args:
            engine: the engine, as it was given.

        Raises:
            ConfigError: the engine is not in the list, or the list comes from a callable or a file.
        """
        before = self._changeable()
        if not any(_is_same(engine, one) for one in before):
            raise ConfigError(f"{engine!r} is not among the engines {before}")
        self._listed, self._added = [one for one in before if not _is_same(engine, one)], []

    def named(self) -> list[object]:
        """Return the engines given to this process itself. Empty when it was given None, a callable or a file."""
        return [*(self._listed or ()), *self._added]

    def all(self) -> list[object]:
        """Return the current engines as the user gave them. Call the callable or read the file, if there is one."""
        if self._read is not None:
            return listed(self._read())
        return [*(listed(None) if self._listed is None else self._listed), *self._added]

    def engines(self) -> list[Engine]:
        """Return the clients of the current engines, in order. An engine that stays keeps its client object.

        Contacts no engine. Raises `ConfigError` when there is no engine, when an engine is listed twice, and for an
        object that `connect` does not accept.
        """
        given = self.all()
        if not given:
            raise ConfigError(f"no engine: the list of engines (or ${ENGINE_VARIABLE}) is empty")
        for i, one in enumerate(given):
            for j, other in enumerate(given[:i]):
                if _is_same(one, other):
                    raise ConfigError(f"engine {i} is the same as engine {j}; list each engine once")
        found: list[tuple[object, Engine]] = []
        for one in given:
            engine = next((engine for other, engine in self._known if _is_same(one, other)), None)
            if engine is None:
                engine = _connect_one(one, f"engine {self._count}{self._of}", self._timeout_s)
                self._count += 1
            found.append((one, engine))
        self._known = found
        return [engine for _, engine in found]

    def _changeable(self) -> list[object]:
        if self._read is not None:
            raise ConfigError(f"each push reads the list of engines from {self.given!r}; change the list there")
        return self.all()


def connect(engines: object, timeout_s: float, of: str = "") -> list[Engine]:
    """Return the clients of `engines`, in order. Contacts no engine.

    Args:
        engines: an engine, or a list or tuple of engines. An engine is an `LLM`, an `AsyncLLM`, a Ray actor handle of
            either, or an `Engine`. Or it is a server's URL, or an object with a `url`, such as a `VllmServer`. None
            stands for the comma-separated URLs in $WEIGHTSYNC_ENGINE, or else http://localhost:8000.
        timeout_s: the limit of each wait for an engine.
        of: the end of the engines' names, such as " of trainer rank 1".

    Raises:
        ConfigError: `engines` is empty, lists an engine twice, or has another object.
    """
    return EngineList(engines, timeout_s, of).engines()


def listed(engines: object) -> list[object]:
    """Return the user's engines as a list. None stands for the URLs in $WEIGHTSYNC_ENGINE, or else the default URL."""
    if engines is None:
        return [url.strip() for url in os.environ.get(ENGINE_VARIABLE, DEFAULT_URL).split(",") if url.strip()]
    # A configuration's list may be of a class of its own, such as OmegaConf's.
    return list(engines) if isinstance(engines, Sequence) and not isinstance(engines, str) else [engines]


def public_name(engine: Any) -> str | None:
    """Return the URL or Ray actor id of an engine that every process can reach. None: it lives in this process."""
    if _is_own(engine):
        return None
    if (url := _url(engine)) is not None:
        return url.rstrip("/")
    return f"Ray actor {engine._actor_id.hex()}" if _is_ray_actor(engine) else None


def _url(engine: Any) -> str | None:
    """Return the engine itself if it is a URL, or else its `url`, such as a `VllmServer`'s. None: it has neither."""
    url = engine if isinstance(engine, str) else getattr(engine, "url", None)
    return url if isinstance(url, str) else None


def _is_own(given: object) -> TypeGuard[Engine]:
    """Return whether an object has the members of an `Engine`. `isinstance` would read `host`, which may be a call."""
    members = [name for name in vars(Engine) if not name.startswith("_")]
    return all(hasattr(type(given), name) or hasattr(given, name) for name in members)


def _is_same(one: object, other: object) -> bool:
    return one is other or (public_name(one) is not None and public_name(one) == public_name(other))


def _addresses(file: Path) -> list[object]:
    try:
        if file.exists() and not file.is_file():  # reading a pipe would block
            raise OSError("not a file")
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the engines' addresses from {file}: {error}") from error
    return [address for line in lines if (address := line.partition(_COMMENT)[0].strip())]


def _is_ray_actor(engine: Any) -> bool:
    return type(engine).__module__.startswith("ray.") and type(engine).__name__ == "ActorHandle"


def _connect_one(engine: object, label: str, timeout_s: float) -> Engine:
    if _is_own(engine):
        return engine
    if (url := _url(engine)) is not None:
        return HttpEngine(url, name=f"{label} ({url})", timeout_s=timeout_s)
    kind = vllm_class(engine)
    if kind == "AsyncLLM":
        return AsyncEngine(engine, name=f"{label} (AsyncLLM in this process)", timeout_s=timeout_s)
    if kind == "LLM":
        return LlmEngine(engine, name=f"{label} (LLM in this process)", timeout_s=timeout_s)
    if _is_ray_actor(engine):
        return RayEngine(engine, name=f"{label} ({engine!r})", timeout_s=timeout_s)
    raise ConfigError(
        f"{label} is a {type(engine).__module__}.{type(engine).__qualname__}. Expected a vLLM LLM or AsyncLLM, its "
        f"Ray actor handle, a URL such as {DEFAULT_URL!r}, another `weightsync.engines.Engine`, or a list of these"
    )
