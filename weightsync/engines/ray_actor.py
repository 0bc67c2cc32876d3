"""A Ray actor that is a vLLM, or holds one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from weightsync.engines.base import LoraAdapter
from weightsync.engines.calls import BACKEND, HEALTH_TIMEOUT_S, LOCAL, as_ours, limit_s, too_late
from weightsync.engines.turns import Turns
from weightsync.engines.vllm_engine import (
    VllmEngine,
    call_lora_of,
    died,
    lora_arguments,
    lora_names_in_use,
    setup_of,
    vllm_class,
)
from weightsync.errors import (
    ConfigError,
    EngineUnreachableError,
    SyncTimeoutError,
    UnsupportedError,
    WeightSyncError,
)


class RayEngine(VllmEngine):
    """A Ray actor that is an `LLM` or `AsyncLLM`, or holds one and passes vLLM's methods on.

    An actor of the user's own class needs `collective_rpc` and `reset_prefix_cache`; around an `AsyncLLM` also
    `pause_generation`, `resume_generation` and `reset_encoder_cache`; for versions `update_weight_version` and
    `get_weight_version`. weightsync must be installed where the actor runs.
    """

    def __init__(self, handle: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(name, timeout_s)
        self._handle = handle
        self._turns = Turns(name, timeout_s)
        self._require("collective_rpc", "reset_prefix_cache")

    @property
    def host(self) -> str:
        """Address of the actor's node. Asks the actor the first time, and raises as any call does."""
        import ray

        address = self._description["address"]
        return LOCAL if address == ray.util.get_node_ip_address() else address

    def pause(self, mode: str) -> None:
        """Around an `LLM` does nothing, as for `LlmEngine`: the actor runs one call at a time."""
        if self._is_async:
            self._require("pause_generation", "resume_generation")
            self._call("pause_generation", mode=mode, clear_cache=True)

    def resume(self) -> None:
        """See `pause`."""
        if self._is_async:
            self._call("resume_generation")

    def is_alive(self) -> bool:
        try:
            return not self._get(
                self._handle.__ray_call__, _died_inside, doing="died", timeout_s=min(self.timeout_s, HEALTH_TIMEOUT_S)
            )
        except SyncTimeoutError:
            return True  # an actor that is busy does not answer, but lives
        except WeightSyncError:
            return False

    def _has(self, method: str) -> bool:
        return hasattr(self._handle, method)

    def _require(self, *methods: str) -> None:
        missing = [method for method in methods if not self._has(method)]
        if missing:
            raise ConfigError(
                f"the Ray actor lacks {', '.join(missing)}: give its class vLLM's methods of these names, or make the "
                "actor of a subclass of LLM or AsyncLLM",
                who=self.name,
            )

    @cached_property
    def _description(self) -> dict[str, str]:
        description: dict[str, str] = self._get(self._handle.__ray_call__, _describe, doing="describe")
        return description

    @property
    def _is_async(self) -> bool:
        return self._description["kind"] == "AsyncLLM" or self._has("pause_generation")

    def _setup(self) -> dict[str, str]:
        return self._description

    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        return self._in_turn(getattr(self._handle, method), *args, doing=doing or method, **kwargs)

    def _in_turn(self, method: Any, *args: Any, doing: str, **kwargs: Any) -> Any:
        """An `LLM` takes one call at a time, and its actor may be of a kind that takes several."""
        if self._is_async:
            return self._get(method, *args, doing=doing, **kwargs)
        self._turns.take(doing, lambda: False)
        try:
            answer = method.remote(*args, **kwargs)
        except BaseException:
            self._turns.give()
            raise
        answer.future().add_done_callback(lambda _: self._turns.give())
        return self._answer_to(doing, answer, limit_s(doing, self.timeout_s))

    def _reset_encoder_cache(self) -> None:
        if self._is_async:
            self._require("reset_encoder_cache")
            super()._reset_encoder_cache()
        else:
            self._in_turn(self._handle.__ray_call__, _reset_encoder_cache_inside, doing="reset_encoder_cache")

    def max_lora_rank(self) -> int | None:
        if not self._description["kind"]:
            raise UnsupportedError(
                "the actor holds no LLM or AsyncLLM that can be seen from here, which adapters need; keep it in an "
                "attribute of the actor",
                who=self.name,
            )
        return super().max_lora_rank()

    def _call_lora(self, method: str, argument: LoraAdapter | int | None = None) -> Any:
        if self._description["kind"] == "LLM":
            return self._in_turn(self._handle.__ray_call__, _call_lora_inside, method, argument, doing=method)
        self._require("add_lora", "remove_lora", "list_loras")
        arguments = [] if argument is None else [argument]
        if isinstance(argument, LoraAdapter):
            # Made there, and handed from one call to the other there: this process may be without vLLM.
            arguments = [self._handle.__ray_call__.remote(_lora_request_inside, argument)]
        return self._get(getattr(self._handle, method), *arguments, doing=method)

    def adapters_in_use(self) -> set[str]:
        found: set[str] = self._get(self._handle.__ray_call__, _adapters_in_use_inside, doing="adapters_in_use")
        return found

    def _get(self, method: Any, *args: Any, doing: str, timeout_s: float | None = None, **kwargs: Any) -> Any:
        timeout_s = limit_s(doing, self.timeout_s) if timeout_s is None else timeout_s
        return self._answer_to(doing, method.remote(*args, **kwargs), timeout_s)

    def _answer_to(self, doing: str, answer: Any, timeout_s: float) -> Any:
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


def _inside(actor: Any) -> Any:
    """The `LLM` or `AsyncLLM` that an actor is or holds, else None. This and the next six run in the actor."""
    candidates: Iterable[Any] = (actor, *getattr(actor, "__dict__", {}).values())
    return next((candidate for candidate in candidates if vllm_class(candidate)), None)


def _describe(actor: Any) -> dict[str, str]:
    import ray

    engine = _inside(actor)
    # An engine that cannot be seen from its actor is taken to have the plug-in; its workers will say if not.
    unknown = {"backend": BACKEND, "extension": "", "max_lora_rank": "", "encodes": ""}
    setup = unknown if engine is None else setup_of(engine)
    address: str = ray.util.get_node_ip_address()
    return {"address": address, "kind": vllm_class(engine) or "", **setup}


def _died_inside(actor: Any) -> bool:
    engine = _inside(actor)
    return engine is not None and died(engine)


def _reset_encoder_cache_inside(actor: Any) -> None:
    engine = _inside(actor)
    if engine is not None:
        engine.llm_engine.reset_encoder_cache()


def _call_lora_inside(actor: Any, method: str, argument: LoraAdapter | int | None) -> Any:
    return call_lora_of(_inside(actor), method, argument)


def _lora_request_inside(actor: Any, adapter: LoraAdapter) -> Any:
    return lora_arguments(adapter)[0]


def _adapters_in_use_inside(actor: Any) -> set[str]:
    return lora_names_in_use(_inside(actor))
