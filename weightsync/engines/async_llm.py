"""A `vllm.AsyncLLM` in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from weightsync.engines.calls import wait
from weightsync.engines.vllm_engine import VllmEngine, invoke
from weightsync.errors import ConfigError, EngineUnreachableError
from weightsync.vllm.llm_object import died


class AsyncEngine(VllmEngine):
    """A `vllm.AsyncLLM` in this process, in an event loop of another thread than the caller's."""

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(engine, name=name, timeout_s=timeout_s)
        self._loop_here = _running_loop()

    def _call(self, method: str, *args: Any, doing: str = "", front: bool = False, **kwargs: Any) -> Any:
        loop = self.loop()  # may raise, so before the coroutine is made: Python warns of one that never runs
        answer = asyncio.run_coroutine_threadsafe(invoke(self._engine, front, method, args, kwargs), loop)
        try:
            return wait(answer, doing or method, self.timeout_s, self.name, lambda: died(self._engine))
        finally:
            answer.cancel()

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the engine's event loop.

        Raises `ConfigError` when the engine has no loop yet, or the caller runs in it. Raises `EngineUnreachableError`
        when the loop does not run.
        """
        # The engine's output task knows the loop. The task starts with the engine, or with the first request if the
        # engine was made outside of any loop.
        task = self._engine.output_handler
        loop: asyncio.AbstractEventLoop | None = task.get_loop() if task is not None else self._loop_here
        if loop is None:
            raise ConfigError(
                "the AsyncLLM has no event loop yet; make it, or the WeightSync, inside of its serving coroutine",
                who=self.name,
            )
        if not loop.is_running():
            raise EngineUnreachableError("the AsyncLLM's event loop is not running", who=self.name)
        if _running_loop() is loop:
            raise ConfigError(
                "called from the AsyncLLM's event loop, but this loop must stay free to answer; use `await "
                "sync.push_async(model)`",
                who=self.name,
            )
        return loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
