"""The inner objects of an `LLM` or `AsyncLLM`, read without importing vLLM."""

from __future__ import annotations

import sys
import uuid
from concurrent.futures import Future
from typing import Any

STAMP = "set_weight_version"
"""The core's method to stamp a version, from vLLM 0.27 on."""


def vllm_class(engine: object) -> str | None:
    """Return the vLLM class of `engine`, or of a base class: "LLM", "AsyncLLM" or None."""
    for cls in type(engine).__mro__:
        if cls.__name__ in ("LLM", "AsyncLLM") and cls.__module__.partition(".")[0] == "vllm":
            return cls.__name__
    return None


def front_of(engine: Any) -> Any:
    """Return the object with an `AsyncLLM`'s methods: the engine inside an `LLM`, or the `AsyncLLM` itself."""
    return engine.llm_engine if vllm_class(engine) == "LLM" else engine


def died(engine: Any) -> bool:
    """Return whether the process with the model has ended."""
    if vllm_class(engine) == "AsyncLLM":
        return bool(engine.errored)
    return bool(getattr(core_process(engine), "engine_dead", False))


def core_process(llm: Any) -> Any:
    """Return an `LLM`'s record of its engine core's process, or None for a core in this process."""
    return getattr(getattr(getattr(llm, "llm_engine", None), "engine_core", None), "resources", None)


def takes_calls_ahead(llm: Any) -> bool:
    """Return whether `send_to_core` works: the core of an `LLM` is another process, with vLLM's own client."""
    client = getattr(llm.llm_engine, "engine_core", None)
    is_known = type(client).__name__ == "SyncMPClient" and hasattr(client, "utility_results")
    return is_known and (hasattr(client, STAMP) or not hasattr(llm, "update_weight_version"))


def send_to_core(llm: Any, method: str, *args: Any) -> Future[Any]:
    """Send a call to an `LLM`'s engine core, as its client's `call_utility` does, and return the answer's future.

    `call_utility` itself waits for the answer. The core serves calls in their order.
    """
    client, number, answer = llm.llm_engine.engine_core, uuid.uuid4().int >> 64, Future[Any]()
    client.utility_results[number] = answer
    kinds = sys.modules[type(client).__module__].EngineCoreRequestType
    client._send_input(kinds.UTILITY, (0, number, method, args))
    return answer
