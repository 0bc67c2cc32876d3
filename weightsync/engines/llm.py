"""A `vllm.LLM` in this process."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

from weightsync.deadline import Deadline
from weightsync.engines.base import LoraAdapter
from weightsync.engines.calls import LOCAL, RESET, limit_s, wait
from weightsync.engines.turns import Turns
from weightsync.engines.vllm_engine import VllmEngine, call_lora_of, core_process, died, lora_names_in_use, setup_of
from weightsync.threads import in_thread


class LlmEngine(VllmEngine):
    """A `vllm.LLM` in this process.

    Each call runs in another thread than the caller's: one into an engine whose process has died never returns. (CUDA's
    current device belongs to a thread: code that runs beside the model must set its own.) The caller must not generate
    nor enqueue while a call runs, nor must another thread.
    """

    host = LOCAL

    def __init__(self, llm: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(name, timeout_s)
        self._llm = llm
        self._turns = Turns(name, timeout_s)

    def pause(self, mode: str) -> None:
        """Does nothing: an `LLM` cannot be paused, and whoever drives it is here, and not asking it."""

    def resume(self) -> None:
        """Does nothing; see `pause`."""

    def is_alive(self) -> bool:
        return not died(self._llm)

    def _setup(self) -> dict[str, str]:
        return setup_of(self._llm)

    def _has(self, method: str) -> bool:
        return hasattr(self._llm, method)

    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        return self._run(doing or method, lambda: getattr(self._llm, method)(*args, **kwargs))

    def _reset_encoder_cache(self) -> None:
        self._run("reset_encoder_cache", self._llm.llm_engine.reset_encoder_cache)

    def _call_lora(self, method: str, argument: LoraAdapter | int | None = None) -> Any:
        return self._run(method, lambda: call_lora_of(self._llm, method, argument))

    def adapters_in_use(self) -> set[str]:
        return lora_names_in_use(self._llm)

    def _can_follow_update(self) -> bool:
        """Whether a call may be sent while that of an update, which the workers are serving, returns: an engine core in
        a process of its own does one thing after the other, and nothing else is being sent to it."""
        return core_process(self._llm) is not None

    def _run(self, doing: str, call: Callable[[], Any]) -> Any:
        if not (doing == RESET and self._can_follow_update() and self._turns.join(self._worker_methods["update"])):
            self._turns.take(doing, lambda: died(self._llm))
        deadline = Deadline(limit_s(doing, self.timeout_s))
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._turns.give()

        try:
            in_thread(doing, run)
        except RuntimeError:
            self._turns.give()
            raise
        return wait(answer, doing, deadline, self.name, lambda: died(self._llm))
