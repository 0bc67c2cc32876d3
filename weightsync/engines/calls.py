"""Calls into vLLM: their names, time limits, order, and errors."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weightsync.errors import EngineError, EngineUnreachableError, SyncTimeoutError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline

EXTENSION_SINCE, PLUG_INS_SINCE = (0, 20), (0, 25)
"""The first releases of vLLM for the worker extension and for the plug-in."""
LOCAL = "127.0.0.1"

# Names of the workers' methods. With the worker extension an update is a single call.
PLUG_IN_METHODS = {
    "init": "init_weight_transfer_engine",
    "start": "start_weight_update",
    "update": "update_weights",
    "finish": "finish_weight_update",
}
EXTENSION_METHODS = {"init": "weightsync_init", "update": "weightsync_update"}

RESET = "reset_prefix_cache"
_SERVED = "init", "update"
_SERVING = {RESET, "reset_caches", *_SERVED}  # with both names: vLLM's, and that for an engine of another rank
_SERVING |= {methods[call] for methods in (PLUG_IN_METHODS, EXTENSION_METHODS) for call in _SERVED}
STILL_ASLEEP = "%s generates again after wake_up: its memory has been put to sleep"
# vLLM's texts for: no weight transfer; init_info of another backend; a method that the workers lack.
_NO_PLUG_IN = re.compile(
    r"Weight transfer not configured|Invalid init_info for (?!WeightSync)\w+|Method 'weightsync_\w+' is not implemented"
)
_ENGINE_DEAD = "EngineCore encountered an issue"  # the text of vLLM's EngineDeadError
_BLOCKS_IN_USE = "Failed to reset KV cache"
_SESSION = '. An open session with streamed input holds blocks as well: end it, or push with pause="abort"'


class CallLock:
    """A lock for one call at a time, for an engine that serves no two calls at once.

    A call holds its turn until it has ended, perhaps long after the caller's timeout.
    """

    def __init__(self, who: str, timeout_s: float, died: Callable[[], bool] = lambda: False) -> None:
        self._who, self._timeout_s, self._died = who, timeout_s, died
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._doing = ""
        self._calls = 0  # number of calls that share the turn

    def acquire(self, doing: str) -> None:
        """Wait for the turn. Raises `SyncTimeoutError`, or `EngineUnreachableError` when the engine has died."""
        deadline = Deadline(limit_s(doing, self._timeout_s) if doing == RESET else self._timeout_s)
        while not self._lock.acquire(timeout=min(timeouts.CALL_POLL_S, deadline.left_s())):
            if self._died():
                raise EngineUnreachableError(f"the engine died before {doing}; look into its log", who=self._who)
            if deadline.passed():
                raise SyncTimeoutError(
                    f"{doing} could not start within {deadline.timeout_s:g} s: {self._doing} is still running",
                    who=self._who,
                    waiting_for=[self._who],
                )
        with self._counting:
            self._doing, self._calls = doing, 1

    def join(self, doing: str) -> bool:
        """Share the turn of the current call if it is `doing` this. Return whether it is."""
        with self._counting:
            joined = self._calls > 0 and self._doing == doing
            self._calls += joined
        return joined

    def release(self) -> None:
        """End this call's share of the turn. The last share ends the turn."""
        with self._counting:
            self._calls -= 1
            if self._calls == 0:
                self._lock.release()


def with_cores(init_info: dict[str, Any], cores: int) -> dict[str, Any]:
    """Return an `init_info` for an engine of this many cores."""
    return {**init_info, "cores": cores} if cores > 1 else init_info


@contextmanager
def held_paused(engine: Any) -> Iterator[None]:
    """Pause an engine with data parallelism meanwhile, unless it is paused.

    Its cores step together, and `init` returns in no core before it has reached all cores. A core in `init` would wait
    for a core in a step, and the core in the step for the core in `init`.
    """
    if engine.is_paused():
        yield
        return
    engine.pause("keep")
    try:
        yield
    finally:
        engine.resume()


def wait(
    answer: concurrent.futures.Future[Any], doing: str, timeout_s: float, who: str, died: Callable[[], bool]
) -> Any:
    """Return the result of `answer`. Polls `died` meanwhile, since vLLM never answers the calls of a dead engine."""
    deadline = Deadline(limit_s(doing, timeout_s))
    ended = threading.Event()  # `concurrent.futures.wait` is slower
    answer.add_done_callback(lambda _: ended.set())
    while not ended.wait(min(timeouts.CALL_POLL_S, deadline.left_s())):
        if died():
            raise EngineUnreachableError(f"the engine died in {doing}; look into its log", who=who)
        if deadline.passed():
            raise too_late(doing, deadline.timeout_s, who)
    try:
        return answer.result()
    except concurrent.futures.CancelledError as error:
        raise EngineUnreachableError(f"the engine's event loop ended in {doing}", who=who) from error
    except BaseException as error:
        raise as_ours(error, doing, who) from error


def as_ours(error: BaseException, doing: str, who: str) -> WeightSyncError:
    """Return an engine's exception as a `WeightSyncError`. A `WeightSyncError` is returned itself."""
    if isinstance(error, WeightSyncError):
        error.who = error.who or who
        return error
    return engine_error(str(error) or type(error).__name__, doing, who)


def engine_error(text: str, doing: str, who: str) -> EngineError:
    """Return the error for an error text of vLLM."""
    if _ENGINE_DEAD in text:
        return EngineUnreachableError(f"{doing}: the engine is dead; look into its log", who=who)
    if _NO_PLUG_IN.search(text):
        return no_plug_in(text, who)
    if _BLOCKS_IN_USE in text:
        text = text.rstrip(".") + _SESSION
    return EngineError(f"{doing}: {text}", who=who)


def no_plug_in(found: str, who: str) -> EngineError:
    return EngineError(
        f"the engine has no weightsync plug-in ({found}). Install weightsync beside vLLM and start the engine with "
        'weight_transfer_config={"backend": "weightsync"}, a server with '
        '--weight-transfer-config \'{"backend": "weightsync"}\'. Before vLLM 0.25, give worker_extension_cls or '
        "--worker-extension-cls weightsync.vllm.extension.WeightSyncWorkerExtension in its place",
        who=who,
    )


def caches_not_reset(who: str) -> EngineError:
    return EngineError(
        "vLLM could not reset its prefix cache or its KV connector, and would answer from older weights; look into "
        "its log",
        who=who,
    )


def limit_s(doing: str, timeout_s: float) -> float:
    """Return the time limit of the call `doing`, in seconds."""
    return max(timeouts.SERVING_S, timeout_s) if doing in _SERVING else timeout_s


def too_late(doing: str, timeout_s: float, who: str) -> SyncTimeoutError:
    return SyncTimeoutError(f"no answer to {doing} within {timeout_s:g} s", who=who, waiting_for=[who])
