"""The base class of the clients of `LLM`, `AsyncLLM` and their Ray actors. It calls vLLM's own methods by name."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar

from weightsync.engines import calls
from weightsync.engines.base import LoraAdapter
from weightsync.engines.bound_modules import ask_worker, check_bound
from weightsync.errors import EngineError
from weightsync.net.wire import ADAPTER_MODULES, BACKEND, NOT_LOADED
from weightsync.vllm.llm_object import core_process, died, front_of, vllm_class

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class VllmEngine(ABC):
    """The client of an `LLM`, an `AsyncLLM` or a Ray actor of one.

    Weight calls go through `collective_rpc`, not through vLLM's methods of the same names: these only wrap it.
    `collective_rpc` is the same for all three in every version, and serves the worker extension, too. It takes plain
    dicts. `AsyncLLM`'s own methods take vLLM's request classes, and 0.25 checks the classes.
    """

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._engine = engine

    @property
    def host(self) -> str:
        return calls.LOCAL

    def pause(self, mode: str) -> None:
        """Pause an `AsyncLLM` by the same calls as `HttpEngine.pause`, for the same reasons."""
        self._call("sleep", 0, mode, doing="pause")
        self._reset_prefix_cache(connector=False)

    def is_paused(self) -> bool | None:
        """Return whether generation is paused, by this trainer or another caller. None: vLLM does not say."""
        return bool(self._call("is_paused")) if "is_paused" in self._setup["methods"] else None

    def resume(self) -> None:
        """Resume an engine that `pause` has paused."""
        if self._setup["pauses"] and self._call("wake_up", ["scheduling"], doing="resume") is False:
            logger.warning(calls.STILL_ASLEEP, self.name)

    @abstractmethod
    def _call(self, method: str, *args: Any, doing: str = "", front: bool = False, **kwargs: Any) -> Any:
        """Make a call as `invoke` does, and wait for the answer. Errors name the call `doing`, or else `method`."""

    def _ask(self, question: Callable[[Any], Answer]) -> Answer:
        """Return `question(engine)`, called in the engine's process. Does not wait for the engine's other calls."""
        return question(self._engine)

    @cached_property
    def _setup(self) -> dict[str, str]:
        return self._ask(setup_of)

    @cached_property
    def _worker_methods(self) -> dict[str, str]:
        # Read from the configuration, not found by trying. If the first of several workers refuses a call, the answers
        # of the others stay in vLLM's queues, and later calls get these answers.
        backend = self._setup["backend"]
        if backend == BACKEND:
            return calls.PLUG_IN_METHODS
        if self._setup["extension"]:
            return calls.EXTENSION_METHODS
        found = f"its weight transfer backend is {backend!r}" if backend else "weight transfer is not configured"
        raise calls.no_plug_in(found, self.name)

    def _call_workers(self, call: str, *args: Any) -> None:
        if (method := self._worker_methods.get(call)) is not None:
            self._call("collective_rpc", method, args=args, doing=method)

    def init(self, init_info: dict[str, Any]) -> None:
        with calls.held_paused(self) if self._setup["in_step"] else nullcontext():
            self._call_workers("init", calls.with_cores(init_info, int(self._setup["cores"])))

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
        if self._setup["encodes"] != "no":
            self._call("reset_encoder_cache", front=True)

    def _reset_prefix_cache(self, connector: bool = True) -> None:
        connector &= bool(self._setup["connector"])  # vLLM before 0.23 refuses to reset a connector that is not there
        if self._call(calls.RESET, reset_running_requests=True, reset_connector=connector) is False:
            raise calls.caches_not_reset(self.name)

    def set_version(self, version: str) -> None:
        if "update_weight_version" in self._setup["methods"]:
            self._call("update_weight_version", version)

    def version(self) -> str | None:
        return str(self._call("get_weight_version")) if "get_weight_version" in self._setup["methods"] else None

    def is_alive(self) -> bool | None:
        return not self._ask(died)

    def max_lora_rank(self) -> int | None:
        rank = self._setup["max_lora_rank"]
        if not rank:
            raise EngineError("the engine has no adapters; start it with enable_lora=True", who=self.name)
        return int(rank)

    def load_adapter(self, adapter: LoraAdapter) -> None:
        self._check_bound(adapter, NOT_LOADED)
        # Its workers' lists are no proof afterwards: adapters of other requests may have replaced it by then.
        if not self._call("add_lora", adapter, front=True):
            raise EngineError(f"vLLM's workers have not loaded the adapter {adapter.name}", who=self.name)
        self._check_bound(adapter, adapter.id)

    def _check_bound(self, adapter: LoraAdapter, number: int) -> None:
        """Raise unless the workers bind every module of an adapter, as `check_bound` does."""
        # An engine core in the `LLM`'s process takes a function. Otherwise vLLM takes only the name of a method.
        question: Any = ask_worker if self._setup["core"] == "here" else ADAPTER_MODULES
        if question is ADAPTER_MODULES:
            _ = self._worker_methods  # raises for an engine without the plug-in and the extension
        answers = self._call("collective_rpc", question, args=(adapter.path, number), doing=ADAPTER_MODULES)
        check_bound(adapter, answers, self.name)

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        self._call("remove_lora", adapter.id, front=True)

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        return adapter.id in self._call("list_loras", front=True)

    def adapters_in_use(self) -> set[str]:
        return self._ask(lora_names_in_use)


# These functions run in the engine's process, perhaps a Ray actor.


def invoke(engine: Any, front: bool, method: str, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call a method of an engine, or of `front_of(engine)`."""
    return getattr(front_of(engine) if front else engine, method)(*map(_as_request, args), **kwargs)


def _as_request(argument: Any) -> Any:
    """Return the `LoRARequest` of a `LoraAdapter`. Return other arguments unchanged."""
    if not isinstance(argument, LoraAdapter):
        return argument
    from weightsync.vllm.compat import lora_request

    return lora_request(*argument)


def setup_of(engine: Any) -> dict[str, str]:
    """Return an engine's configuration and abilities: transfer backend, worker extension, and more. "": it has none."""
    config = front_of(engine).vllm_config
    core = "here" if vllm_class(engine) == "LLM" and core_process(engine) is None else ""
    client = getattr(front_of(engine), "engine_core", None)
    size = getattr(config.parallel_config, "data_parallel_size", 1)
    launcher = getattr(config.parallel_config, "distributed_executor_backend", None)
    in_step = size > 1 and not core
    # A model without these attributes is taken to have encoders, and so a cache of their outputs to reset.
    kinds = (getattr(getattr(config, "model_config", None), name, True) for name in _ENCODING)
    return {
        "backend": getattr(config.weight_transfer_config, "backend", None) or "",
        "extension": config.parallel_config.worker_extension_cls or "",
        "core": core,
        "max_lora_rank": str(getattr(getattr(config, "lora_config", None), "max_lora_rank", "")),
        "encodes": "" if any(kinds) else "no",
        "connector": "yes" if getattr(config, "kv_transfer_config", None) is not None else "",
        "methods": " ".join(name for name in _METHODS if hasattr(engine, name)),
        "cores": str(size if launcher == "external_launcher" else len(getattr(client, "core_engines", [engine]))),
        "in_step": "yes" if in_step else "",
        "pauses": "yes" if in_step or vllm_class(engine) == "AsyncLLM" else "",
    }


_METHODS = ("update_weight_version", "get_weight_version", "is_paused")  # the first two from 0.27 on
_ENCODING = ("is_multimodal_model", "is_encoder_decoder")


def lora_names_in_use(engine: Any) -> set[str]:
    """Return the names of the adapters of an engine's unfinished requests."""
    # Copied in one step: an event loop in another thread may change the dict meanwhile.
    requests = list(front_of(engine).output_processor.request_states.values())
    return {request.lora_name for request in requests if request.lora_name is not None}
