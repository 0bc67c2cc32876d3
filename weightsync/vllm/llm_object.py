"""The inner objects of an `LLM` or `AsyncLLM`, read without importing vLLM."""

from __future__ import annotations

from typing import Any


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
