"""vLLM's calls: what they are named, how long they may take, and what their answers mean."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Callable
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import EngineError, EngineUnreachableError, SyncTimeoutError, WeightSyncError

BACKEND = "weightsync"
LOCAL = "127.0.0.1"
POLL_S = 0.1
_SERVING_S = 3600.0
"""`init` and `update` return only when the trainer has released the workers, however many waits that takes, and so does
a reset that is asked for meanwhile. Each of these waits has a deadline of its own, on the connections to the workers;
this one is for an engine that never answers at all."""
HEALTH_TIMEOUT_S = 10.0

# What a call is named on the workers, with the plug-in and with the worker extension, to which an update is one call.
PLUG_IN_METHODS = {
    "init": "init_weight_transfer_engine",
    "start": "start_weight_update",
    "update": "update_weights",
    "finish": "finish_weight_update",
}
EXTENSION_METHODS = {
    "init": "weightsync_init",
    "update": "weightsync_update",
}

RESET = "reset_prefix_cache"
_SERVING = {RESET, *(methods[call] for methods in (PLUG_IN_METHODS, EXTENSION_METHODS) for call in ("init", "update"))}
STILL_ASLEEP = "%s generates again only when its memory, which somebody has put to sleep, has been woken up"
# vLLM's words for "no weight transfer", "another backend's init_info" and "the worker has no such method".
_NO_PLUG_IN = re.compile(
    r"Weight transfer not configured|Invalid init_info for (?!WeightSync)\w+|Method 'weightsync_\w+' is not implemented"
)
_ENGINE_DEAD = "EngineCore encountered an issue"  # the text of vLLM's EngineDeadError


def wait(
    answer: concurrent.futures.Future[Any], doing: str, deadline: Deadline, who: str, died: Callable[[], bool]
) -> Any:
    """The result of `answer`. vLLM leaves the calls of a dead engine unanswered, so its death is looked for too."""
    ended = threading.Event()  # `concurrent.futures.wait` returns 0.05 ms later
    answer.add_done_callback(lambda _: ended.set())
    while not ended.wait(min(POLL_S, deadline.left_s())):
        if died():
            raise EngineUnreachableError(f"the engine died in {doing}; its log says why", who=who)
        if deadline.passed():
            raise too_late(doing, deadline.timeout_s, who)
    try:
        return answer.result()
    except concurrent.futures.CancelledError as error:
        raise EngineUnreachableError(f"the engine's event loop ended in {doing}", who=who) from error
    except BaseException as error:
        raise as_ours(error, doing, who) from error


def as_ours(error: BaseException, doing: str, who: str) -> WeightSyncError:
    """What was raised beside the engine, as an error of ours; one that is ours already stays as it is."""
    if isinstance(error, WeightSyncError):
        error.who = error.who or who
        return error
    return engine_error(str(error) or type(error).__name__, doing, who)


def engine_error(text: str, doing: str, who: str) -> EngineError:
    """The error that vLLM's `text` stands for."""
    if _ENGINE_DEAD in text:
        return EngineUnreachableError(f"{doing}: the engine is dead; its log says why", who=who)
    if _NO_PLUG_IN.search(text):
        return no_plug_in(text, who)
    return EngineError(f"{doing}: {text}", who=who)


def no_plug_in(found: str, who: str) -> EngineError:
    return EngineError(
        f"the engine has no weightsync plug-in ({found}). Install weightsync beside vLLM and start the engine with "
        'weight_transfer_config={"backend": "weightsync"}, a server with '
        '--weight-transfer-config \'{"backend": "weightsync"}\'',
        who=who,
    )


def caches_not_reset(who: str) -> EngineError:
    return EngineError(
        "vLLM could not reset its prefix cache, so it would answer from older weights; see its log", who=who
    )


def limit_s(doing: str, timeout_s: float) -> float:
    """How long to wait for an answer to this call."""
    return max(_SERVING_S, timeout_s) if doing in _SERVING else timeout_s


def too_late(doing: str, timeout_s: float, who: str) -> SyncTimeoutError:
    return SyncTimeoutError(f"no answer to {doing} within {timeout_s:g} s", who=who, waiting_for=[who])
