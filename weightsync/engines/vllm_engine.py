"""What `LLM`, `AsyncLLM` and their Ray actors share: vLLM's own methods, called by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

from weightsync.engines.base import LoraAdapter
from weightsync.engines.calls import (
    BACKEND,
    EXTENSION_METHODS,
    PLUG_IN_METHODS,
    RESET,
    caches_not_reset,
    no_plug_in,
)
from weightsync.errors import EngineError


class VllmEngine(ABC):
    """What `LLM`, `AsyncLLM` and their Ray actors share: vLLM's own methods, called by name.

    Weight calls go through `collective_rpc` rather than vLLM's methods of the same names, which only wrap it: it is
    the same for all three in every version, takes plain dicts (`AsyncLLM` wants vLLM's request classes, and 0.25
    checks them) and serves the worker extension too.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s

    @abstractmethod
    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        """Call the engine's `method` and wait for its answer; messages call it `doing`, or else by its name."""

    @abstractmethod
    def _has(self, method: str) -> bool:
        """Whether this engine has `method`; what it has depends on vLLM's version."""

    @abstractmethod
    def _setup(self) -> dict[str, str]:
        """`setup_of` the engine."""

    @cached_property
    def _worker_methods(self) -> dict[str, str]:
        # Known from the configuration, not found by trying: with several worker processes a call that the first of
        # them refuses leaves the answers of the others in vLLM's queue, and later calls read those.
        setup = self._setup()
        if setup["backend"] == BACKEND:
            return PLUG_IN_METHODS
        if setup["extension"]:
            return EXTENSION_METHODS
        backend = setup["backend"]
        found = f"its weight transfer backend is {backend!r}" if backend else "weight transfer is not configured"
        raise no_plug_in(found, self.name)

    def _call_workers(self, call: str, *args: Any) -> None:
        if (method := self._worker_methods.get(call)) is not None:
            self._call("collective_rpc", method, args=args, doing=method)

    def init(self, init_info: dict[str, Any]) -> None:
        self._call_workers("init", init_info)

    def start(self) -> None:
        self._call_workers("start")

    def update(self, update_info: dict[str, Any]) -> None:
        self._call_workers("update", update_info)

    def finish(self, version: str | None) -> None:
        self._call_workers("finish")
        if version is not None:
            self.set_version(version)

    def reset_caches(self) -> None:
        self._reset_prefix_cache()
        if self._encodes:
            self._reset_encoder_cache()

    def _reset_prefix_cache(self, connector: bool = True) -> None:
        if self._call(RESET, reset_running_requests=True, reset_connector=connector) is False:
            raise caches_not_reset(self.name)

    @cached_property
    def _encodes(self) -> bool:
        """Whether the model has encoders, and so a cache of what they have made; text alone goes through none."""
        return self._setup()["encodes"] != "no"

    def _reset_encoder_cache(self) -> None:
        self._call("reset_encoder_cache")

    def set_version(self, version: str) -> None:
        if self._has("update_weight_version"):
            self._call("update_weight_version", version)

    def version(self) -> str | None:
        if not self._has("get_weight_version"):
            return None
        return str(self._call("get_weight_version"))

    @abstractmethod
    def _call_lora(self, method: str, argument: LoraAdapter | int | None = None) -> Any:
        """Call `method` of the `AsyncLLM`, or of the engine inside of the `LLM`; it gets an adapter as a
        `LoRARequest`."""

    def max_lora_rank(self) -> int | None:
        rank = self._setup()["max_lora_rank"]
        if not rank:
            raise EngineError("the engine has no adapters; start it with enable_lora=True", who=self.name)
        return int(rank)

    def load_adapter(self, adapter: LoraAdapter) -> None:
        # That its workers list it afterwards cannot be asked for: other requests may have taken its place by then.
        if not self._call_lora("add_lora", adapter):
            raise EngineError(f"vLLM says that its workers have not loaded the adapter {adapter.name}", who=self.name)

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        self._call_lora("remove_lora", adapter.id)

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        return adapter.id in self._call_lora("list_loras")


def vllm_class(engine: object) -> str | None:
    """Which of vLLM's classes `engine` is of, or derives from: "LLM", "AsyncLLM" or None."""
    for cls in type(engine).__mro__:
        if cls.__name__ in ("LLM", "AsyncLLM") and cls.__module__.partition(".")[0] == "vllm":
            return cls.__name__
    return None


def setup_of(engine: Any) -> dict[str, str]:
    """What an `LLM` or `AsyncLLM` was started with: transfer backend, worker extension, and more; "" if not."""
    config = engine.llm_engine.vllm_config if vllm_class(engine) == "LLM" else engine.vllm_config
    return {
        "backend": getattr(config.weight_transfer_config, "backend", None) or "",
        "extension": config.parallel_config.worker_extension_cls or "",
        "max_lora_rank": str(getattr(getattr(config, "lora_config", None), "max_lora_rank", "")),
        "encodes": "no" if _is_text_alone(getattr(config, "model_config", None)) else "",
    }


def _is_text_alone(model_config: Any) -> bool:
    """False where vLLM does not say."""
    kinds = (getattr(model_config, name, True) for name in ("is_multimodal_model", "is_encoder_decoder"))
    return not any(kinds)


def call_lora_of(llm: Any, method: str, argument: LoraAdapter | int | None) -> Any:
    return getattr(llm.llm_engine, method)(*lora_arguments(argument))


def lora_arguments(argument: LoraAdapter | int | None) -> list[Any]:
    """What vLLM takes in place of `argument`, in a process that has vLLM."""
    if isinstance(argument, LoraAdapter):
        from weightsync.vllm.lora import request

        return [request(*argument)]
    return [] if argument is None else [argument]


def lora_names_in_use(engine: Any) -> set[str]:
    """The adapters of all requests that an `LLM` or `AsyncLLM` has taken and not answered to their end."""
    front = engine.llm_engine if vllm_class(engine) == "LLM" else engine
    # In one step, since an event loop in another thread may change it.
    requests = list(front.output_processor.request_states.values())
    return {request.lora_name for request in requests if request.lora_name is not None}


def died(engine: Any) -> bool:
    """Whether the process that runs the model of an `LLM` or `AsyncLLM` is gone."""
    if vllm_class(engine) == "AsyncLLM":
        return bool(engine.errored)
    return bool(getattr(core_process(engine), "engine_dead", False))


def core_process(llm: Any) -> Any:
    """What an `LLM` has of the process of its engine core; None where that is in this process, and cannot die alone."""
    return getattr(getattr(llm.llm_engine, "engine_core", None), "resources", None)
