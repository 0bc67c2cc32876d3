"""A `vllm.LLM` in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.engines.base import SpmdPart
from weightsync.engines.calls import RESET, CallLock, wait
from weightsync.engines.vllm_engine import VllmEngine, as_request
from weightsync.net.runtime import submit
from weightsync.vllm.llm_object import core_process, died, front_of


class LlmEngine(VllmEngine):
    """A `vllm.LLM` in this process.

    Each call runs in a thread other than the caller's, because a call into an engine whose process died never returns.
    CUDA's current device belongs to a thread, so code that runs beside the model must set its own. No thread may
    generate or enqueue while a call runs.
    """

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(engine, name=name, timeout_s=timeout_s)
        self._turns = CallLock(name, timeout_s, lambda: died(engine))

    @property
    def part(self) -> SpmdPart | None:
        """Return which part of an engine this is, under external_launcher. None: its workers are all its own."""
        parallel = self._engine.llm_engine.vllm_config.parallel_config
        launcher = getattr(parallel, "distributed_executor_backend", None)
        if launcher != "external_launcher" or parallel.world_size == 1:
            return None
        return SpmdPart(parallel.rank // parallel.world_size, parallel.world_size)

    def pause(self, mode: str) -> None:
        """Drop requests that were refused: an engine core in this process would wait for them for ever.

        An `LLM` cannot be paused, and the thread that drives it is not generating now.
        """
        if core_process(self._engine) is None and any(self._call("collective_rpc", _take_refusal)):
            left = list(self._engine.llm_engine.output_processor.request_states)
            self._run("abort", lambda: self._engine.llm_engine.abort_request(left, True))

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        return self._run(doing or method, lambda: getattr(self._engine, method)(*args, **kwargs))

    def _call_front(self, method: str, *args: Any) -> Any:
        return self._run(method, lambda: getattr(front_of(self._engine), method)(*map(as_request, args)))

    def _run(self, doing: str, call: Callable[[], Any]) -> Any:
        # An engine core in its own process does one thing after another. A reset may then be sent while that of an
        # update, which the workers are serving, returns.
        follows = doing == RESET and core_process(self._engine) is not None
        if not (follows and self._turns.join(self._worker_methods["update"])):
            self._turns.acquire(doing)

        def run() -> Any:
            try:
                return call()
            finally:
                self._turns.release()

        try:
            answer = submit(doing, run)
        except RuntimeError:
            self._turns.release()
            raise
        return wait(answer, doing, self.timeout_s, self.name, lambda: died(self._engine))


def _take_refusal(worker: Any) -> bool:
    """Return whether a worker of this process has refused to answer since the last call."""
    plug_in = getattr(worker, "weight_transfer_engine", None)
    session: Any = getattr(plug_in, "session", None) or getattr(worker, "weightsync_session", None)
    if session is None or not session.has_refused:
        return False
    session.has_refused = False
    return True
