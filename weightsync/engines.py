"""The trainer's way to call a running vLLM: one `Engine` for an `LLM`, an `AsyncLLM`, a Ray actor or a server.

`connect` turns whatever the user handed over into engines. Every method of an engine blocks until vLLM has answered,
for at most `timeout_s` (`init` and `update` for longer: see `_SERVING_S`), and raises only `weightsync.errors`. `pause`
and `start` are called at the same time, from two threads; `reset_caches` while `update` still runs, and `finish` when
that has returned. No call is ever repeated: none of vLLM's weight calls may run twice, so a connection that breaks in
the middle is an error, not a retry.

vLLM is not imported here, but for the class that an `LLM` or `AsyncLLM` wants adapters in, and Ray only when an engine
is a Ray actor. This module knows nothing about weights, transports or sessions.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import quote, urlsplit

from weightsync.channel import Deadline
from weightsync.errors import (
    ConfigError,
    EngineError,
    EngineUnreachableError,
    SyncTimeoutError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.threads import in_thread

ENGINE_VARIABLE = "WEIGHTSYNC_ENGINE"
DEFAULT_URL = "http://localhost:8000"
BACKEND = "weightsync"

logger = logging.getLogger(__name__)

_LOCAL = "127.0.0.1"
_POLL_S = 0.1
_SERVING_S = 3600.0
"""`init` and `update` return only when the trainer has released the workers, however many waits that takes; each of
these has its own deadline, on the connections to the workers. This one is for an engine that never answers at all."""
_HEALTH_TIMEOUT_S = 10.0

# What a call is named on the workers, with the plug-in and with the worker extension, to which an update is one call.
_PLUG_IN_METHODS = {
    "init": "init_weight_transfer_engine",
    "start": "start_weight_update",
    "update": "update_weights",
    "finish": "finish_weight_update",
}
_EXTENSION_METHODS = {
    "init": "weightsync_init",
    "update": "weightsync_update",
}

_RESET = "reset_prefix_cache"
_STILL_ASLEEP = "%s generates again only when its memory, which somebody has put to sleep, has been woken up"
# vLLM's words for "no weight transfer", "another backend's init_info" and "the worker has no such method".
_NO_PLUG_IN = re.compile(
    r"Weight transfer not configured|Invalid init_info for (?!WeightSync)\w+|Method 'weightsync_\w+' is not implemented"
)
_LORA_METRIC = "vllm:lora_requests_info"
_LORA_SAMPLE = re.compile(rf"^{_LORA_METRIC}\{{(.*)\}} (\S+)", re.MULTILINE)
_LORA_LABEL = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
_ENGINE_DEAD = "EngineCore encountered an issue"  # the text of vLLM's EngineDeadError


@runtime_checkable
class Engine(Protocol):
    """One running vLLM. A plug-in may hand its own to `connect`; every method follows the rules of this module."""

    @property
    def name(self) -> str:
        """What error messages call it, such as "engine 0 (http://10.0.0.3:8000)"."""

    @property
    def host(self) -> str:
        """Address of the host of its workers, as seen from here; "127.0.0.1" when that is this host."""

    def init(self, init_info: dict[str, Any]) -> None:
        """Hand `init_info`, plain values that JSON can carry, to every worker's weightsync plug-in."""

    def start(self) -> None:
        """Begin a weight update."""

    def update(self, update_info: dict[str, Any]) -> None:
        """Hand `update_info`, plain values that JSON can carry, to every worker. Between `start` and `finish`."""

    def finish(self, version: str | None) -> None:
        """End the weight update and, from vLLM 0.27 on, stamp `version` on all output from now on."""

    def pause(self, mode: str) -> None:
        """Stop generating. Requests in flight are frozen ("keep"), finished first ("wait") or aborted ("abort")."""

    def resume(self) -> None:
        """Generate again."""

    def reset_caches(self) -> None:
        """Forget everything computed with older weights: prefix cache, KV connector, encoder outputs.

        Requests in flight compute their KV again. Raises `EngineError` when vLLM says that it did not succeed. Called
        once the last bucket has been announced; nothing is generated from then on until `resume`.
        """

    def set_version(self, version: str) -> None:
        """Stamp `version` without an update; does nothing before vLLM 0.27."""

    def version(self) -> str | None:
        """The version stamped last; vLLM's own "default" before the first; None before vLLM 0.27."""

    def is_alive(self) -> bool:
        """Whether the engine can still answer. Never raises."""


class LoraAdapter(NamedTuple):
    """An adapter that engines have been given. In a process that has vLLM, `LoRARequest(*adapter)` asks for it; a
    server is asked for the model `name`."""

    name: str
    id: int
    path: str


@runtime_checkable
class AdapterEngine(Protocol):
    """What an engine needs besides, to be pushed adapters to."""

    @property
    def name(self) -> str:
        """As `Engine.name`."""

    @property
    def host(self) -> str:
        """As `Engine.host`."""

    def max_lora_rank(self) -> int | None:
        """The largest rank that it was started for; None when it does not say. Raises `EngineError` when it was
        started without adapters."""

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load it into every worker from `adapter.path`, and make sure that the engine says so. It must not have one of
        this name or id."""

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        """Forget it; nothing, where it is not known. Requests that use it go on, and may load it again."""

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        """Whether it can be asked for this adapter, by its name or else its id."""

    def adapters_in_use(self) -> set[str]:
        """The names of the adapters that requests, running or waiting, have asked for."""

    def is_alive(self) -> bool:
        """As `Engine.is_alive`."""


def connect(engines: object, timeout_s: float) -> list[Engine]:
    """The engines that `engines` names, in order; nothing is contacted yet.

    Accepts an `LLM`, an `AsyncLLM`, a Ray actor handle of either, a server's URL, what has one as its `url`
    (`weightsync.server.VllmServer`), an `Engine`, a list or tuple of these, or None: then the comma-separated URLs in
    $WEIGHTSYNC_ENGINE, or else http://localhost:8000.
    Raises `ConfigError` for anything else.
    """
    if engines is None:
        engines = [url.strip() for url in os.environ.get(ENGINE_VARIABLE, DEFAULT_URL).split(",") if url.strip()]
    given = list(engines) if isinstance(engines, (list, tuple)) else [engines]
    if not given:
        raise ConfigError(f"no engine: the list of engines (or ${ENGINE_VARIABLE}) is empty")
    for i, one in enumerate(given):
        for j, other in enumerate(given[:i]):
            if one is other or (isinstance(one, str) and one == other):
                raise ConfigError(f"engine {i} is engine {j} once more; list each engine once")
    return [_connect_one(one, f"engine {i}", timeout_s) for i, one in enumerate(given)]


def _connect_one(engine: object, label: str, timeout_s: float) -> Engine:
    url = engine if isinstance(engine, str) else getattr(engine, "url", None)
    if isinstance(url, str):  # or a `VllmServer`
        return HttpEngine(url, name=f"{label} ({url})", timeout_s=timeout_s)
    kind = _vllm_class(engine)
    if kind == "AsyncLLM":
        return AsyncEngine(engine, name=f"{label} (AsyncLLM in this process)", timeout_s=timeout_s)
    if kind == "LLM":
        return LlmEngine(engine, name=f"{label} (LLM in this process)", timeout_s=timeout_s)
    if type(engine).__module__.startswith("ray.") and type(engine).__name__ == "ActorHandle":
        return RayEngine(engine, name=f"{label} ({engine!r})", timeout_s=timeout_s)
    if isinstance(engine, Engine):
        return engine
    raise ConfigError(
        f"{label} is a {type(engine).__module__}.{type(engine).__qualname__}; expected a vLLM LLM or AsyncLLM, a Ray "
        f"actor handle of one, a URL such as {DEFAULT_URL!r}, an object with the methods of weightsync.engines.Engine, "
        "or a list of these"
    )


class _VllmEngine(ABC):
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
        """`_setup_of` the engine."""

    @cached_property
    def _worker_methods(self) -> dict[str, str]:
        # Known from the configuration, not found by trying: with several worker processes a call that the first of
        # them refuses leaves the answers of the others in vLLM's queue, and later calls read those.
        setup = self._setup()
        if setup["backend"] == BACKEND:
            return _PLUG_IN_METHODS
        if setup["extension"]:
            return _EXTENSION_METHODS
        backend = setup["backend"]
        found = f"its weight transfer backend is {backend!r}" if backend else "weight transfer is not configured"
        raise _no_plug_in(found, self.name)

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
        if self._call(_RESET, reset_running_requests=True, reset_connector=connector) is False:
            raise _caches_not_reset(self.name)

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


class _Turns:
    """For what cannot do two things at once: each call takes its turn, and gives it when it has ended, which may be
    long after its caller has ceased to wait."""

    def __init__(self, who: str, timeout_s: float) -> None:
        self._who, self._timeout_s = who, timeout_s
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._doing = ""
        self._calls = 0  # that have a part in the turn

    def take(self, doing: str, died: Callable[[], bool]) -> None:
        deadline = Deadline(_limit_s(doing, self._timeout_s) if doing == _RESET else self._timeout_s)
        while not self._lock.acquire(timeout=min(_POLL_S, deadline.left_s())):
            if died():
                raise EngineUnreachableError(f"the engine died before {doing}; its log says why", who=self._who)
            if deadline.passed():
                raise SyncTimeoutError(
                    f"{doing} could not start within {deadline.timeout_s:g} s: {self._doing} is still running",
                    who=self._who,
                    waiting_for=[self._who],
                )
        with self._counting:
            self._doing, self._calls = doing, 1

    def join(self, doing: str) -> bool:
        """Have a part in the turn of a call that is `doing` this, if it is under way: whether it was."""
        with self._counting:
            joined = self._calls > 0 and self._doing == doing
            self._calls += joined
        return joined

    def give(self) -> None:
        """The last call that has a part in the turn ends it."""
        with self._counting:
            self._calls -= 1
            if self._calls == 0:
                self._lock.release()


class LlmEngine(_VllmEngine):
    """A `vllm.LLM` in this process.

    Each call runs in another thread than the caller's: one into an engine whose process has died never returns. (CUDA's
    current device belongs to a thread: code that runs beside the model must set its own.) The caller must not generate
    nor enqueue while a call runs, nor must another thread.
    """

    host = _LOCAL

    def __init__(self, llm: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(name, timeout_s)
        self._llm = llm
        self._turns = _Turns(name, timeout_s)

    def pause(self, mode: str) -> None:
        """Does nothing: an `LLM` cannot be paused, and whoever drives it is here, and not asking it."""

    def resume(self) -> None:
        """Does nothing; see `pause`."""

    def is_alive(self) -> bool:
        return not _died(self._llm)

    def _setup(self) -> dict[str, str]:
        return _setup_of(self._llm)

    def _has(self, method: str) -> bool:
        return hasattr(self._llm, method)

    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        return self._run(doing or method, lambda: getattr(self._llm, method)(*args, **kwargs))

    def _reset_encoder_cache(self) -> None:
        self._run("reset_encoder_cache", self._llm.llm_engine.reset_encoder_cache)

    def _call_lora(self, method: str, argument: LoraAdapter | int | None = None) -> Any:
        return self._run(method, lambda: _call_lora_of(self._llm, method, argument))

    def adapters_in_use(self) -> set[str]:
        return _adapters_in_use(self._llm)

    def _can_follow_update(self) -> bool:
        """Whether a call may be sent while that of an update, which the workers are serving, returns: an engine core in
        a process of its own does one thing after the other, and nothing else is being sent to it."""
        return _core_process(self._llm) is not None

    def _run(self, doing: str, call: Callable[[], Any]) -> Any:
        if not (doing == _RESET and self._can_follow_update() and self._turns.join(self._worker_methods["update"])):
            self._turns.take(doing, lambda: _died(self._llm))
        deadline = Deadline(_limit_s(doing, self.timeout_s))
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
        return _wait(answer, doing, deadline, self.name, lambda: _died(self._llm))


class AsyncEngine(_VllmEngine):
    """A `vllm.AsyncLLM` that lives in an event loop of this process, in a thread other than the caller's."""

    host = _LOCAL

    def __init__(self, engine: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(name, timeout_s)
        self._engine = engine
        try:
            self._loop_here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop_here = None

    def pause(self, mode: str) -> None:
        self._call("sleep", 0, mode, doing="pause")  # for the reasons that `HttpEngine` has
        self._reset_prefix_cache(connector=False)

    def resume(self) -> None:
        if self._call("wake_up", ["scheduling"], doing="resume") is False:
            logger.warning(_STILL_ASLEEP, self.name)

    def is_alive(self) -> bool:
        return not _died(self._engine)

    def _setup(self) -> dict[str, str]:
        return _setup_of(self._engine)

    def _has(self, method: str) -> bool:
        return hasattr(self._engine, method)

    def _call(self, method: str, *args: Any, doing: str = "", **kwargs: Any) -> Any:
        loop = self._loop()
        deadline = Deadline(_limit_s(doing, self.timeout_s))
        answer = asyncio.run_coroutine_threadsafe(getattr(self._engine, method)(*args, **kwargs), loop)
        try:
            return _wait(answer, doing or method, deadline, self.name, lambda: _died(self._engine))
        finally:
            answer.cancel()

    def _call_lora(self, method: str, argument: LoraAdapter | int | None = None) -> Any:
        return self._call(method, *_lora_arguments(argument))

    def adapters_in_use(self) -> set[str]:
        return _adapters_in_use(self._engine)

    def _loop(self) -> asyncio.AbstractEventLoop:
        # The task that handles the engine's output says which loop is the engine's. It starts with the engine, or
        # with the first request when the engine was made outside of any loop.
        task = self._engine.output_handler
        loop = task.get_loop() if task is not None else self._loop_here
        if loop is None:
            raise ConfigError(
                "the AsyncLLM is not in an event loop yet; make it, or the WeightSync, inside the coroutine that "
                "serves it",
                who=self.name,
            )
        if not loop.is_running():
            raise EngineUnreachableError("the event loop that the AsyncLLM lives in is not running", who=self.name)
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            return loop
        if here is loop:
            raise ConfigError(
                "called from the event loop that the AsyncLLM lives in, which must stay free to answer; use "
                "`await asyncio.to_thread(sync.push, model)`",
                who=self.name,
            )
        return loop


class RayEngine(_VllmEngine):
    """A Ray actor that is an `LLM` or `AsyncLLM`, or holds one and passes vLLM's methods on.

    An actor of the user's own class needs `collective_rpc` and `reset_prefix_cache`; around an `AsyncLLM` also
    `pause_generation`, `resume_generation` and `reset_encoder_cache`; for versions `update_weight_version` and
    `get_weight_version`. weightsync must be installed where the actor runs.
    """

    def __init__(self, handle: Any, *, name: str, timeout_s: float) -> None:
        super().__init__(name, timeout_s)
        self._handle = handle
        self._turns = _Turns(name, timeout_s)
        self._require("collective_rpc", "reset_prefix_cache")

    @property
    def host(self) -> str:
        """Address of the actor's node. Asks the actor the first time, and raises as any call does."""
        import ray

        address = self._description["address"]
        return _LOCAL if address == ray.util.get_node_ip_address() else address

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
                self._handle.__ray_call__, _died_inside, doing="died", timeout_s=min(self.timeout_s, _HEALTH_TIMEOUT_S)
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
        return self._answer_to(doing, answer, _limit_s(doing, self.timeout_s))

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
        timeout_s = _limit_s(doing, self.timeout_s) if timeout_s is None else timeout_s
        return self._answer_to(doing, method.remote(*args, **kwargs), timeout_s)

    def _answer_to(self, doing: str, answer: Any, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(answer, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise _too_late(doing, timeout_s, self.name) from error
        except ray.exceptions.RayActorError as error:
            raise EngineUnreachableError(f"the actor is gone ({doing}): {error}", who=self.name) from error
        except ray.exceptions.RayTaskError as error:
            raise _as_ours(error.cause, doing, self.name) from error
        except ray.exceptions.RayError as error:
            raise _as_ours(error, doing, self.name) from error


class HttpEngine:
    """A vLLM server, started with VLLM_SERVER_DEV_MODE=1 for only then it has the routes for weights.

    Proxies of the environment are not used. Each call is a connection of its own: an old one that the server has
    closed would have to be retried. The worker extension is not reachable this way, only the plug-in.
    """

    def __init__(self, url: str, *, name: str, timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not the URL of a server; expected one such as {DEFAULT_URL!r}")
        self.name = name
        self.timeout_s = timeout_s
        self.host = _LOCAL if host == "localhost" else host
        self._address = host, port
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._prefix = parts.path.rstrip("/")

    def init(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start(self) -> None:
        self._post("/start_weight_update")

    def update(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish(self, version: str | None) -> None:
        # Before 0.27 the server does not read the body.
        self._post("/finish_weight_update", {"weight_version": version})

    def pause(self, mode: str) -> None:
        # Level 0 is to pause, without the 20 ms that vLLM's route of that name sleeps afterwards.
        self._post(f"/sleep?level=0&mode={quote(mode)}")
        # Also now: where that cannot be done, nothing has been written yet. Not the connector, which may take it once.
        self._reset_prefix_cache(connector=False)

    def resume(self) -> None:
        # Which does not resume an engine whose memory somebody has put to sleep.
        if self._post("/wake_up?tags=scheduling").get("status") == "sleeping":
            logger.warning(_STILL_ASLEEP, self.name)

    def reset_caches(self) -> None:
        self._reset_prefix_cache()
        self._post("/reset_encoder_cache")

    def _reset_prefix_cache(self, connector: bool = True) -> None:
        external = str(connector).lower()
        answer = self._post(f"/reset_prefix_cache?reset_running_requests=true&reset_external={external}")
        # vLLM 0.25 has no field for it: there a failure is a status 500, and a connector's is not told.
        if not answer.get("success", True):
            raise _caches_not_reset(self.name)

    def set_version(self, version: str) -> None:
        path = "/update_weight_version"
        status, text = self._request("POST", path, {"new_version": version}, self.timeout_s)
        if status != 404:
            self._answer(path, status, text)

    def version(self) -> str | None:
        path = "/weight_info"
        status, text = self._request("GET", path, None, self.timeout_s)
        if status == 404:
            return None
        return str(self._answer(path, status, text)["weight_version"])

    def is_alive(self) -> bool:
        try:
            status, _ = self._request("GET", "/health", None, min(self.timeout_s, _HEALTH_TIMEOUT_S))
        except WeightSyncError:
            return False
        return status == 200

    def max_lora_rank(self) -> int | None:
        return None  # a server tells nobody, and refuses what is too much

    def load_adapter(self, adapter: LoraAdapter) -> None:
        self._change_adapters("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path})
        if self._adapters().get(adapter.name) != adapter.path:
            raise EngineError(
                f"the server says that it has loaded the adapter {adapter.name}, but does not list it in /v1/models; "
                "are there several API servers behind this address? Give each one's own",
                who=self.name,
            )

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        if self.has_adapter(adapter):
            self._change_adapters("/v1/unload_lora_adapter", {"lora_name": adapter.name})

    def _change_adapters(self, path: str, body: dict[str, Any]) -> None:
        status, text = self._request("POST", path, body, self.timeout_s)
        if status == 404 and _message_of(text) == "Not Found":  # an adapter that is not found is named
            raise UnsupportedError(
                f"the server has no route {path} (status 404); vLLM has it only when started with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment",
                who=self.name,
            )
        if status != 200:
            raise _engine_error(_message_of(text), f"{path} (status {status})", self.name)

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        return adapter.name in self._adapters()

    def _adapters(self) -> dict[str, str]:
        """The paths of all adapters that can be asked for, by name, and what stands there for the base."""
        path = "/v1/models"
        answer = self._answer(path, *self._request("GET", path, None, self.timeout_s))
        return {row["id"]: row.get("root") for row in answer.get("data", [])}

    def adapters_in_use(self) -> set[str]:
        path = "/metrics"
        status, text = self._request("GET", path, None, self.timeout_s)
        if status != 200 or _LORA_METRIC not in text:
            raise EngineError(
                f"the server does not say which adapters are in use ({path} has no {_LORA_METRIC}); start it with "
                "--enable-lora, and without --disable-log-stats",
                who=self.name,
            )
        # One sample for each set of adapters that there has been; its value is the time when that was seen last.
        samples = [(float(value), labels) for labels, value in _LORA_SAMPLE.findall(text)]
        newest = [labels for when, labels in samples if when == max(samples)[0]]
        found = {name for labels in newest for names in _LORA_LABEL.findall(labels) for name in names.split(",")}
        return found - {""}

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._answer(path, *self._request("POST", path, body, _limit_s(path.lstrip("/"), self.timeout_s)))

    def _answer(self, path: str, status: int, text: str) -> dict[str, Any]:
        """The JSON object that the server answered, empty when it has no body; any other answer is an error."""
        route = path.partition("?")[0]
        if status == 404:
            raise UnsupportedError(
                f"the server has no route {route} (status 404); vLLM has it only when started with "
                "VLLM_SERVER_DEV_MODE=1 in its environment",
                who=self.name,
            )
        try:
            answer = json.loads(text or "{}")
        except ValueError:
            answer = None
        if status == 200:
            if not isinstance(answer, dict):
                raise EngineError(f"{route}: the answer is not vLLM's: {text[:200]!r}", who=self.name)
            return answer
        message = _message_of(text)
        if status in (502, 503, 504):
            raise EngineUnreachableError(f"{route}: status {status}: {message}", who=self.name)
        raise _engine_error(message, f"{route} (status {status})", self.name)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        """Status and text of the answer to one request."""
        deadline = Deadline(timeout_s)
        route = path.partition("?")[0]
        content = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection = self._connection_class(*self._address, timeout=timeout_s)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise EngineUnreachableError(
                    f"nothing answers there ({error}); is the server running, and is this its address?", who=self.name
                ) from error
            try:
                connection.request(method, self._prefix + path, content, headers)
                connection.sock.settimeout(max(deadline.left_s(), 0.001))
                response = connection.getresponse()
                return response.status, response.read().decode(errors="replace")
            except TimeoutError as error:
                raise _too_late(route, timeout_s, self.name) from error
            except (OSError, http.client.HTTPException) as error:
                raise EngineUnreachableError(
                    f"the server closed the connection without an answer to {route} ({error}); whether it was carried "
                    "out is not known",
                    who=self.name,
                ) from error
        finally:
            connection.close()


def _vllm_class(engine: object) -> str | None:
    """Which of vLLM's classes `engine` is of, or derives from: "LLM", "AsyncLLM" or None."""
    for cls in type(engine).__mro__:
        if cls.__name__ in ("LLM", "AsyncLLM") and cls.__module__.partition(".")[0] == "vllm":
            return cls.__name__
    return None


def _setup_of(engine: Any) -> dict[str, str]:
    """What an `LLM` or `AsyncLLM` was started with: transfer backend, worker extension, and more; "" if not."""
    config = engine.llm_engine.vllm_config if _vllm_class(engine) == "LLM" else engine.vllm_config
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


def _call_lora_of(llm: Any, method: str, argument: LoraAdapter | int | None) -> Any:
    return getattr(llm.llm_engine, method)(*_lora_arguments(argument))


def _lora_arguments(argument: LoraAdapter | int | None) -> list[Any]:
    """What vLLM takes in place of `argument`, in a process that has vLLM."""
    if isinstance(argument, LoraAdapter):
        from weightsync.vllm.lora import request

        return [request(*argument)]
    return [] if argument is None else [argument]


def _adapters_in_use(engine: Any) -> set[str]:
    """The adapters of all requests that an `LLM` or `AsyncLLM` has taken and not answered to their end."""
    front = engine.llm_engine if _vllm_class(engine) == "LLM" else engine
    # In one step, since an event loop in another thread may change it.
    requests = list(front.output_processor.request_states.values())
    return {request.lora_name for request in requests if request.lora_name is not None}


def _died(engine: Any) -> bool:
    """Whether the process that runs the model of an `LLM` or `AsyncLLM` is gone."""
    if _vllm_class(engine) == "AsyncLLM":
        return bool(engine.errored)
    return bool(getattr(_core_process(engine), "engine_dead", False))


def _core_process(llm: Any) -> Any:
    """What an `LLM` has of the process of its engine core; None where that is in this process, and cannot die alone."""
    return getattr(getattr(llm.llm_engine, "engine_core", None), "resources", None)


def _inside(actor: Any) -> Any:
    """The `LLM` or `AsyncLLM` that an actor is or holds, else None. This and the next six run in the actor."""
    candidates: Iterable[Any] = (actor, *getattr(actor, "__dict__", {}).values())
    return next((candidate for candidate in candidates if _vllm_class(candidate)), None)


def _describe(actor: Any) -> dict[str, str]:
    import ray

    engine = _inside(actor)
    # An engine that cannot be seen from its actor is taken to have the plug-in; its workers will say if not.
    unknown = {"backend": BACKEND, "extension": "", "max_lora_rank": "", "encodes": ""}
    setup = unknown if engine is None else _setup_of(engine)
    address: str = ray.util.get_node_ip_address()
    return {"address": address, "kind": _vllm_class(engine) or "", **setup}


def _died_inside(actor: Any) -> bool:
    engine = _inside(actor)
    return engine is not None and _died(engine)


def _reset_encoder_cache_inside(actor: Any) -> None:
    engine = _inside(actor)
    if engine is not None:
        engine.llm_engine.reset_encoder_cache()


def _call_lora_inside(actor: Any, method: str, argument: LoraAdapter | int | None) -> Any:
    return _call_lora_of(_inside(actor), method, argument)


def _lora_request_inside(actor: Any, adapter: LoraAdapter) -> Any:
    return _lora_arguments(adapter)[0]


def _adapters_in_use_inside(actor: Any) -> set[str]:
    return _adapters_in_use(_inside(actor))


def _wait(
    answer: concurrent.futures.Future[Any], doing: str, deadline: Deadline, who: str, died: Callable[[], bool]
) -> Any:
    """The result of `answer`. vLLM leaves the calls of a dead engine unanswered, so its death is looked for too."""
    ended = threading.Event()  # `concurrent.futures.wait` returns 0.05 ms later
    answer.add_done_callback(lambda _: ended.set())
    while not ended.wait(min(_POLL_S, deadline.left_s())):
        if died():
            raise EngineUnreachableError(f"the engine died in {doing}; its log says why", who=who)
        if deadline.passed():
            raise _too_late(doing, deadline.timeout_s, who)
    try:
        return answer.result()
    except concurrent.futures.CancelledError as error:
        raise EngineUnreachableError(f"the engine's event loop ended in {doing}", who=who) from error
    except BaseException as error:
        raise _as_ours(error, doing, who) from error


def _as_ours(error: BaseException, doing: str, who: str) -> WeightSyncError:
    """What was raised beside the engine, as an error of ours; one that is ours already stays as it is."""
    if isinstance(error, WeightSyncError):
        error.who = error.who or who
        return error
    return _engine_error(str(error) or type(error).__name__, doing, who)


def _engine_error(text: str, doing: str, who: str) -> EngineError:
    """The error that vLLM's `text` stands for."""
    if _ENGINE_DEAD in text:
        return EngineUnreachableError(f"{doing}: the engine is dead; its log says why", who=who)
    if _NO_PLUG_IN.search(text):
        return _no_plug_in(text, who)
    return EngineError(f"{doing}: {text}", who=who)


def _no_plug_in(found: str, who: str) -> EngineError:
    return EngineError(
        f"the engine has no weightsync plug-in ({found}). Install weightsync beside vLLM and start the engine with "
        'weight_transfer_config={"backend": "weightsync"}, a server with '
        '--weight-transfer-config \'{"backend": "weightsync"}\'',
        who=who,
    )


def _caches_not_reset(who: str) -> EngineError:
    return EngineError(
        "vLLM could not reset its prefix cache, so it would answer from older weights; see its log", who=who
    )


def _limit_s(doing: str, timeout_s: float) -> float:
    """How long to wait for an answer to this call."""
    serving = {methods[call] for methods in (_PLUG_IN_METHODS, _EXTENSION_METHODS) for call in ("init", "update")}
    if doing.partition("?")[0] == _RESET:
        return 3 * timeout_s  # it may have to wait until the last bucket is loaded, and until that is committed
    return max(_SERVING_S, timeout_s) if doing in serving else timeout_s


def _too_late(doing: str, timeout_s: float, who: str) -> SyncTimeoutError:
    return SyncTimeoutError(f"no answer to {doing} within {timeout_s:g} s", who=who, waiting_for=[who])


def _message_of(text: str) -> str:
    """What an answer that is an error says."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    return _server_message(answer) or text[:2000] or "no message"


def _server_message(answer: Any) -> str:
    """The message in an error answer of vLLM ({"error": {"message": ...}}, {"error": ...}) or FastAPI ({"detail"})."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error", answer.get("detail", answer.get("message", "")))
    if isinstance(error, dict):
        error = error.get("message", error)
    return error if isinstance(error, str) else json.dumps(error)
