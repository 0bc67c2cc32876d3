"""The trainer's way to call a running vLLM: one `Engine` for an `LLM`, an `AsyncLLM`, a Ray actor or a server.

`connect` turns what the user gave into engines. For every method of an engine:

- It blocks until vLLM has answered, for at most `timeout_s`, or longer as `calls.limit_s` says.
- It raises only `weightsync.errors`.
- `pause` and `start` are called at the same time, from two threads. `reset_caches` may be called while `update` runs,
  and `finish` when `update` has returned.
- It never repeats a call, since none of vLLM's weight calls may run twice. A connection that breaks is an error.

vLLM is imported only for the class that an `LLM` or `AsyncLLM` wants adapters in, and Ray only when an engine is a Ray
actor. This package knows nothing about weights or transports.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from weightsync.engines.async_llm import AsyncEngine
from weightsync.engines.base import AdapterEngine, Engine, LoraAdapter
from weightsync.engines.http import DEFAULT_URL, HttpEngine
from weightsync.engines.llm import LlmEngine
from weightsync.engines.ray_actor import RayEngine
from weightsync.engines.vllm_engine import vllm_class
from weightsync.errors import ConfigError

__all__ = [
    "ENGINE_VARIABLE",
    "AdapterEngine",
    "AsyncEngine",
    "Engine",
    "HttpEngine",
    "LlmEngine",
    "LoraAdapter",
    "RayEngine",
    "connect",
    "listed",
    "public_name",
]

ENGINE_VARIABLE = "WEIGHTSYNC_ENGINE"


def connect(engines: object, timeout_s: float, of: str = "") -> list[Engine]:
    """Return the engines that `engines` names, in order. Contacts none of them. Their names say whose they are, `of`.

    Accepts an `LLM`, an `AsyncLLM`, a Ray actor handle of either, a server's URL, a `VllmServer` or another object with
    a `url`, an `Engine`, or a list or tuple of these. None stands for the comma-separated URLs in $WEIGHTSYNC_ENGINE,
    or else http://localhost:8000. Raises `ConfigError` for anything else.
    """
    given = listed(engines)
    if not given:
        raise ConfigError(f"no engine: the list of engines (or ${ENGINE_VARIABLE}) is empty")
    for i, one in enumerate(given):
        for j, other in enumerate(given[:i]):
            if one is other or (isinstance(one, str) and one == other):
                raise ConfigError(f"engine {i} is engine {j} once more; list each engine once")
    return [_connect_one(one, f"engine {i}{of}", timeout_s) for i, one in enumerate(given)]


def listed(engines: object) -> list[object]:
    """Return the engines that the user gave, one by one, and those that None stands for."""
    if engines is None:
        return [url.strip() for url in os.environ.get(ENGINE_VARIABLE, DEFAULT_URL).split(",") if url.strip()]
    # A configuration's list may be of a class of its own, such as OmegaConf's.
    return list(engines) if isinstance(engines, Sequence) and not isinstance(engines, str) else [engines]


def public_name(engine: Any) -> str | None:
    """Return the URL or the Ray actor's id by which every process reaches an engine. None: it lives in this process."""
    if isinstance(engine, Engine):
        return None
    url = engine if isinstance(engine, str) else getattr(engine, "url", None)
    if isinstance(url, str):  # or a `VllmServer`
        return url.rstrip("/")
    return f"Ray actor {engine._actor_id.hex()}" if _is_ray_actor(engine) else None


def _is_ray_actor(engine: Any) -> bool:
    return type(engine).__module__.startswith("ray.") and type(engine).__name__ == "ActorHandle"


def _connect_one(engine: object, label: str, timeout_s: float) -> Engine:
    if isinstance(engine, Engine):
        return engine
    url = engine if isinstance(engine, str) else getattr(engine, "url", None)
    if isinstance(url, str):  # or a `VllmServer`
        return HttpEngine(url, name=f"{label} ({url})", timeout_s=timeout_s)
    kind = vllm_class(engine)
    if kind == "AsyncLLM":
        return AsyncEngine(engine, name=f"{label} (AsyncLLM in this process)", timeout_s=timeout_s)
    if kind == "LLM":
        return LlmEngine(engine, name=f"{label} (LLM in this process)", timeout_s=timeout_s)
    if _is_ray_actor(engine):
        return RayEngine(engine, name=f"{label} ({engine!r})", timeout_s=timeout_s)
    raise ConfigError(
        f"{label} is a {type(engine).__module__}.{type(engine).__qualname__}; expected a vLLM LLM or AsyncLLM, a Ray "
        f"actor handle of one, a URL such as {DEFAULT_URL!r}, an object with the methods of weightsync.engines.Engine, "
        "or a list of these"
    )
