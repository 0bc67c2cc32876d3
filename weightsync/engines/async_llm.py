"""A `vllm.AsyncLLM` in this process."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engines.base import LoraAdapter
from weightsync.engines.calls import LOCAL, STILL_ASLEEP, limit_s, wait
from weightsync.engines.vllm_engine import VllmEngine, died, lora_arguments, lora_names_in_use, setup_of
from weightsync.errors import ConfigError, EngineUnreachableError

logger = logging.getLogger(__name__)


class AsyncEngine(VllmEngine):
    """A `vllm.AsyncLLM` that lives in an event loop of this process, in a thread other than the caller's."""

    host = LOCAL

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(name, timeout_s)
        self._engine = engine
        try:
            self._loop_here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop_here = None

    def pause(self, mode: str) -> None:
        self._call("sleep", 0, mode, doing="pause")  # for the reasons that `HttpEngine` has
        self._reset_prefix_cache(connector=False)

    def resume(self) -> None:
        if self._call("wake_up", ["scheduling"], doing="resume") is False:
            logger.warning(STILL_ASLEEP, self.name)

    def is_alive(self) -> bool:
        return not died(self._engine)

    def _setup(self) -> dict[str, str]:
        return setup_of(self._engine)

    def _has(self, method: str) -> bool:
        return hasattr(self._engine, method)

    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        loop, doing = self._loop(), doing or method
        deadline = Deadline(limit_s(doing, self.timeout_s))
        answer = asyncio.run_coroutine_threadsafe(getattr(self._engine, method)(*args, **kwargs), loop)
        try:
            return wait(answer, doing, deadline, self.name, lambda: died(self._engine))
        finally:
            answer.cancel()

    def _call_lora(self, method: str, argument: LoraAdapter | int | None = None) -> Any:
        return self._call(method, *lora_arguments(argument))

    def adapters_in_use(self) -> set[str]:
        return lora_names_in_use(self._engine)

    def _loop(self) -> asyncio.AbstractEventLoop:
        # The task that handles the engine's output says which loop is the engine's. It starts with the engine, or
        # with the first request when the engine was made outside of any loop.
        task = self._engine.output_handler
        loop = task.get_loop() if task is not None else self._loop_here
        if loop is None:
            raise ConfigError(
                "the AsyncLLM is not in an event loop yet; make it, or the WeightSync, inside the coroutine that "
                "serves it",
                who=self.name,
            )
        if not loop.is_running():
            raise EngineUnreachableError("the event loop that the AsyncLLM lives in is not running", who=self.name)
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            return loop
        if here is loop:
            raise ConfigError(
                "called from the event loop that the AsyncLLM lives in, which must stay free to answer; use "
                "`await asyncio.to_thread(sync.push, model)`",
                who=self.name,
            )
        return loop
