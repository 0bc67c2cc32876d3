"""A `vllm.LLM` in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from weightsync.engines.base import AwaitAnswer, SpmdPart
from weightsync.engines.calls import RESET, CallLock, as_ours, caches_not_reset, wait
from weightsync.engines.vllm_engine import VllmEngine, invoke
from weightsync.net import timeouts
from weightsync.net.runtime import submit
from weightsync.vllm.llm_object import STAMP, core_process, died, send_to_core, takes_calls_ahead


class LlmEngine(VllmEngine):
    """A `vllm.LLM` in this process.

    Each call runs in another thread than the caller's, since a call never returns after the death of the engine's
    process. CUDA's current device belongs to a thread, so code beside the model must set its own. No thread may
    generate or enqueue requests while a call runs.
    """

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(engine, name=name, timeout_s=timeout_s)
        self._turns = CallLock(name, timeout_s, lambda: died(engine))
        self._has_reset = False  # the update under way was sent behind a reset of the caches

    @property
    def part(self) -> SpmdPart | None:
        """The engine's part in this process, under external_launcher. None: the engine has no other parts."""
        parallel = self._engine.llm_engine.vllm_config.parallel_config
        launcher = getattr(parallel, "distributed_executor_backend", None)
        if launcher != "external_launcher" or parallel.world_size == 1:
            return None
        return SpmdPart(parallel.rank // parallel.world_size, parallel.world_size)

    def pause(self, mode: str) -> None:
        """Abort all requests if a worker has refused to run them: a core in this process would wait for them forever.

        An `LLM` needs no pause: its thread does not generate during a push. Under data parallelism its core may step
        with the cores of other processes.
        """
        if self._setup["pauses"]:
            super().pause(mode)
        if core_process(self._engine) is None and any(self._call("collective_rpc", _take_refusal)):
            left = list(self._engine.llm_engine.output_processor.request_states)
            self._run("abort", lambda: self._engine.llm_engine.abort_request(left, True))

    def start(self) -> None:
        self._has_reset = False  # of an earlier push
        super().start()

    def takes_calls_ahead(self) -> bool:
        return not self._setup["in_step"] and takes_calls_ahead(self._engine)

    def send_update(self, mark: str | None, update_info: dict[str, Any]) -> list[AwaitAnswer]:
        # Without requests the core steps in no update, and caches no values of older weights.
        self._has_reset = not (self._setup["connector"] or self._engine.llm_engine.has_unfinished_requests())
        self._turns.acquire(self._worker_methods["update"])
        calls = [] if mark is None else [(STAMP, mark)]
        calls += [*self._to_workers("start"), *self._resets(self._has_reset), *self._to_workers("update", update_info)]
        return self._send(calls, self.timeout_s)

    def send_finish(self) -> list[AwaitAnswer]:
        calls = [*self._to_workers("finish"), *self._resets(not self._has_reset)]
        if calls and not self._turns.join(self._worker_methods["update"]):
            self._turns.acquire(RESET)
        return self._send(calls, timeouts.SERVING_S) if calls else []

    def _resets(self, are_due: bool) -> list[tuple[Any, ...]]:
        encoders = [] if self._setup["encodes"] == "no" else [("reset_encoder_cache",)]
        return [(RESET, True, bool(self._setup["connector"])), *encoders] if are_due else []

    def _to_workers(self, call: str, *args: Any) -> list[tuple[Any, ...]]:
        method = self._worker_methods.get(call)
        return [] if method is None else [("collective_rpc", method, None, args, None)]

    def _send(self, calls: Sequence[tuple[Any, ...]], timeout_s: float) -> list[AwaitAnswer]:
        """Send calls to the core. The answer to the last one ends this thread's share of the turn."""
        try:
            answers = [send_to_core(self._engine, *call) for call in calls]
        except BaseException as error:
            self._turns.release()
            raise as_ours(error, str(calls[-1][0]), self.name) from error
        answers[-1].add_done_callback(lambda _: self._turns.release())
        return [partial(self._await, answer, call, timeout_s) for answer, call in zip(answers, calls, strict=True)]

    def _await(self, answer: Future[Any], call: tuple[Any, ...], timeout_s: float) -> None:
        doing = call[1] if call[0] == "collective_rpc" else call[0]
        if wait(answer, doing, timeout_s, self.name, lambda: died(self._engine)) is False and doing == RESET:
            raise caches_not_reset(self.name)

    def _call(self, method: str, *args: Any, doing: str = "", front: bool = False, **kwargs: Any) -> Any:
        return self._run(doing or method, partial(invoke, self._engine, front, method, args, kwargs))

    def _run(self, doing: str, call: Callable[[], Any]) -> Any:
        self._turns.acquire(doing)
        try:
            answer = submit(doing, call)
        except RuntimeError:
            self._turns.release()
            raise
        answer.add_done_callback(lambda _: self._turns.release())
        return wait(answer, doing, self.timeout_s, self.name, lambda: died(self._engine))


def _take_refusal(worker: Any) -> bool:
    """Return whether the model of a worker has refused to run since the last call of this function."""
    plug_in = getattr(worker, "weight_transfer_engine", None)
    session: Any = getattr(plug_in, "session", None) or getattr(worker, "weightsync_session", None)
    if session is None or not session.has_refused:
        return False
    session.has_refused = False
    return True
