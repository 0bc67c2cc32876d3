"""A Ray actor that is or holds a vLLM."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from weightsync.engines.async_llm import AsyncEngine
from weightsync.engines.calls import LOCAL, CallLock, as_ours, limit_s, too_late
from weightsync.engines.vllm_engine import Answer, VllmEngine, invoke, setup_of
from weightsync.errors import ConfigError, EngineUnreachableError, SyncTimeoutError, WeightSyncError
from weightsync.net import timeouts
from weightsync.net.runtime import Deadline
from weightsync.vllm.llm_object import died, vllm_class


class RayEngine(VllmEngine):
    """A Ray actor that is an `LLM` or `AsyncLLM`, or holds one in an attribute.

    The actor's class needs no methods for this: Ray carries functions into the actor, and they call the engine inside.
    weightsync must be installed in the actor's environment.

    A call of an `LLM` runs between the actor's own methods. A call of an `AsyncLLM` runs in its event loop. One
    function begins it, and another polls for its answer: Ray starts no other method of the actor while a function
    waits.
    """

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(engine, name=name, timeout_s=timeout_s)
        self._turns = CallLock(name, timeout_s)

    @property
    def host(self) -> str:
        """The address of the actor's node. The first read calls the actor, and raises as any call does."""
        import ray

        address = self._setup["address"]
        return LOCAL if address == ray.util.get_node_ip_address() else address

    def pause(self, mode: str) -> None:
        """Pause an `AsyncLLM`. Reset the prefix cache of an `LLM`, once the actor's running method has returned.

        An `LLM` under data parallelism is paused too: its core may step with the cores of other actors.
        """
        if self._setup["pauses"]:
            super().pause(mode)
        else:
            self._reset_prefix_cache(connector=False)  # as `engines_of_ranks` does, for the same reason

    def is_alive(self) -> bool | None:
        try:
            return not self._ask(died, timeout_s=min(self.timeout_s / 2, timeouts.HEALTH_TIMEOUT_S))
        except SyncTimeoutError:
            return None  # a busy actor does not answer, nor does a stopped one
        except WeightSyncError:
            return False

    @cached_property
    def _setup(self) -> dict[str, str]:
        return self._ask(_describe)

    @property
    def _is_async(self) -> bool:
        return self._setup["kind"] == "AsyncLLM"

    def _call(self, method: str, *args: Any, doing: str = "", front: bool = False, **kwargs: Any) -> Any:
        doing = doing or method
        if not self._is_async:
            return self._take_turn(doing, _call, front, method, args, kwargs)
        deadline = Deadline(limit_s(doing, self.timeout_s))
        call, wait_s = secrets.token_hex(8), timeouts.RAY_POLL_S
        self._wait(self._remote(_begin, call, method, args, kwargs), doing, self.timeout_s)
        while not (answer := self._wait(self._remote(_look, call), doing, self.timeout_s)):
            if deadline.passed():
                raise too_late(doing, deadline.timeout_s, self.name)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, timeouts.RAY_LONGEST_POLL_S)
        return answer[0]

    def _ask(self, question: Callable[[Any], Answer], timeout_s: float | None = None) -> Answer:
        found: Answer = self._wait(self._remote(_answer, question), question.__name__, timeout_s or self.timeout_s)
        return found

    def _take_turn(self, doing: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the actor, one at a time even if the actor has several threads."""
        self._turns.acquire(doing)
        try:
            answer = self._remote(function, *args)
        except BaseException:
            self._turns.release()
            raise
        answer.future().add_done_callback(lambda _: self._turns.release())
        return self._wait(answer, doing, limit_s(doing, self.timeout_s))

    def _remote(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._engine.__ray_call__.remote(function, *args)

    def _wait(self, answer: Any, doing: str, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(answer, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise too_late(doing, timeout_s, self.name) from error
        except ray.exceptions.RayActorError as error:
            raise EngineUnreachableError(f"the actor is gone ({doing}): {error}", who=self.name) from error
        except ray.exceptions.RayTaskError as error:
            raise as_ours(error.cause, doing, self.name) from error
        except ray.exceptions.RayError as error:
            raise as_ours(error, doing, self.name) from error


# These run in the actor.

_begun: dict[str, concurrent.futures.Future[Any]] = {}


def _inside(actor: Any) -> Any:
    """Return the actor itself or its first attribute that is an `LLM` or `AsyncLLM`. Raise `ConfigError` for none."""
    candidates: Iterable[Any] = (actor, *getattr(actor, "__dict__", {}).values())
    found = next((candidate for candidate in candidates if vllm_class(candidate)), None)
    if found is None:
        raise ConfigError(
            f"the Ray actor, a {type(actor).__name__}, has no LLM or AsyncLLM in an attribute: keep it in an "
            "attribute of the actor"
        )
    return found


def _describe(engine: Any) -> dict[str, str]:
    import ray

    address: str = ray.util.get_node_ip_address()
    return {"address": address, "kind": vllm_class(engine) or "", **setup_of(engine)}


def _answer(actor: Any, question: Callable[[Any], Answer]) -> Answer:
    return question(_inside(actor))


def _call(actor: Any, front: bool, method: str, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    return invoke(_inside(actor), front, method, args, kwargs)


def _begin(actor: Any, call: str, method: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Begin a call of an `AsyncLLM` in its event loop. `_look` returns the answer."""
    loop = AsyncEngine(_inside(actor), name="the actor's AsyncLLM", timeout_s=0.0).loop()
    _begun[call] = asyncio.run_coroutine_threadsafe(_call(actor, False, method, args, kwargs), loop)


def _look(actor: Any, call: str) -> list[Any]:
    """Return a list with the answer of a begun call, or an empty list while the call runs."""
    if _begun[call].done():
        return [_begun.pop(call).result()]
    if died(_inside(actor)):
        _begun.pop(call).cancel()
        raise EngineUnreachableError("the engine died in a call; look into its log")
    return []
