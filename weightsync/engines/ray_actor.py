"""A Ray actor that is a vLLM, or holds one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from weightsync.engines.base import LoraAdapter
from weightsync.engines.calls import BACKEND, HEALTH_TIMEOUT_S, LOCAL, Turns, as_ours, limit_s, too_late
from weightsync.engines.vllm_engine import Answer, VllmEngine, as_request, call_front, died, setup_of, vllm_class
from weightsync.errors import (
    ConfigError,
    EngineUnreachableError,
    SyncTimeoutError,
    UnsupportedError,
    WeightSyncError,
)

_ADAPTERS = ("add_lora", "remove_lora", "list_loras")


class RayEngine(VllmEngine):
    """A Ray actor that is an `LLM` or `AsyncLLM`, or holds one and passes vLLM's methods on.

    An actor of the user's own class needs `collective_rpc` and `reset_prefix_cache`. Around an `AsyncLLM` it also needs
    `pause_generation`, `resume_generation` and `reset_encoder_cache`. Versions need `update_weight_version` and
    `get_weight_version`. weightsync must be installed where the actor runs.
    """

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(engine, name=name, timeout_s=timeout_s)
        self._turns = Turns(name, timeout_s)
        self._require("collective_rpc", "reset_prefix_cache")

    @property
    def host(self) -> str:
        """Return the address of the actor's node. Asks the actor the first time, and raises as any call does."""
        import ray

        address = self._setup["address"]
        return LOCAL if address == ray.util.get_node_ip_address() else address

    def pause(self, mode: str) -> None:
        """Pause an `AsyncLLM`. Do nothing around an `LLM`, as `LlmEngine`: the actor runs one call at a time."""
        if self._is_async:
            self._require("pause_generation", "resume_generation")
            self._call("pause_generation", mode=mode, clear_cache=True)

    def resume(self) -> None:
        """See `pause`."""
        if self._is_async:
            self._call("resume_generation")

    def is_alive(self) -> bool:
        try:
            return not self._ask(died, timeout_s=min(self.timeout_s / 2, HEALTH_TIMEOUT_S))
        except SyncTimeoutError:
            return True  # an actor that is busy does not answer, but lives
        except WeightSyncError:
            return False

    def max_lora_rank(self) -> int | None:
        if not self._setup["kind"]:
            raise UnsupportedError(
                "the actor holds no LLM or AsyncLLM that can be seen from here, which adapters need; keep it in an "
                "attribute of the actor",
                who=self.name,
            )
        return super().max_lora_rank()

    def _require(self, *methods: str) -> None:
        missing = [method for method in methods if not self._has(method)]
        if missing:
            raise ConfigError(
                f"the Ray actor lacks {', '.join(missing)}: give its class vLLM's methods of these names, or make the "
                "actor of a subclass of LLM or AsyncLLM",
                who=self.name,
            )

    @cached_property
    def _setup(self) -> dict[str, str]:
        return self._ask(_describe)

    @property
    def _is_async(self) -> bool:
        return self._setup["kind"] == "AsyncLLM" or self._has("pause_generation")

    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        return self._send(getattr(self._engine, method), *args, doing=doing or method, **kwargs)

    def _call_front(self, method: str, *args: Any) -> Any:
        if not self._is_async:
            return self._send(self._engine.__ray_call__, _call_front_inside, method, *args, doing=method)
        self._require(*(_ADAPTERS if method in _ADAPTERS else (method,)))
        # Requests are made in the actor and handed from one call to the other there, since vLLM may be missing here.
        inside = [self._request(value) if isinstance(value, LoraAdapter) else value for value in args]
        return self._call(method, *inside)

    def _request(self, adapter: LoraAdapter) -> Any:
        return self._engine.__ray_call__.remote(_request_inside, adapter)

    def _ask(self, question: Callable[[Any], Answer], timeout_s: float | None = None) -> Answer:
        remote = self._engine.__ray_call__.remote(_ask_inside, question)
        found: Answer = self._wait(remote, question.__name__, timeout_s or self.timeout_s)
        return found

    def _send(self, method: Any, *args: Any, doing: str, **kwargs: Any) -> Any:
        """Call a method of the actor. Around an `LLM` one call runs at a time, also where the actor takes several."""
        if self._is_async:
            return self._wait(method.remote(*args, **kwargs), doing, limit_s(doing, self.timeout_s))
        self._turns.take(doing)
        try:
            answer = method.remote(*args, **kwargs)
        except BaseException:
            self._turns.give()
            raise
        answer.future().add_done_callback(lambda _: self._turns.give())
        return self._wait(answer, doing, limit_s(doing, self.timeout_s))

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


def _inside(actor: Any) -> Any:
    """Return the `LLM` or `AsyncLLM` that an actor is or holds, else None."""
    candidates: Iterable[Any] = (actor, *getattr(actor, "__dict__", {}).values())
    return next((candidate for candidate in candidates if vllm_class(candidate)), None)


def _describe(engine: Any) -> dict[str, str]:
    import ray

    # An engine that cannot be seen from its actor is taken to have the plug-in; its workers will say if not.
    unknown = {"backend": BACKEND, "extension": "", "max_lora_rank": "", "encodes": ""}
    setup = unknown if engine is None else setup_of(engine)
    address: str = ray.util.get_node_ip_address()
    return {"address": address, "kind": vllm_class(engine) or "", **setup}


def _ask_inside(actor: Any, question: Callable[[Any], Answer]) -> Answer:
    return question(_inside(actor))


def _call_front_inside(actor: Any, method: str, *args: Any) -> Any:
    engine = _inside(actor)
    return None if engine is None else call_front(engine, method, *args)


def _request_inside(actor: Any, adapter: LoraAdapter) -> Any:
    return as_request(adapter)
