"""A vLLM server, by HTTP."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import re
import socket
import ssl
from contextlib import closing, nullcontext, suppress
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

from msgspec import Meta, Struct, ValidationError, convert

from weightsync.engines import calls
from weightsync.engines.base import LoraAdapter
from weightsync.engines.bound_modules import check_bound
from weightsync.errors import (
    ConfigError,
    EngineError,
    EngineUnreachableError,
    FencedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.net import timeouts
from weightsync.net.fence import HEADER, STATUS, read_refusal
from weightsync.net.runtime import Deadline
from weightsync.net.wire import ADAPTER_MODULES, BACKEND, NEWEST, NOT_LOADED

DEFAULT_URL = "http://localhost:8000"

logger = logging.getLogger(__name__)

_QUESTIONS = 12
"""Number of questions to a server whether its workers have met the trainer. A load balancer between two engines is
found always if it alternates, and 4,095 times in 4,096 if it draws at random."""
_TRIES = 32
"""Most tries of a rollback call behind a load balancer."""
_MOST_BYTES = 1 << 24
"""Most bytes to read of an answer. The largest answer, of /metrics, has some hundred thousand bytes."""
_MESSAGE_CHARS = 2000
_HEALTH, _VERSION, _MODELS, _SERVER_INFO = "/health", "/version", "/v1/models", "/server_info?config_format=json"
_DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
_KEY = "VLLM_API_KEY"
"""The environment variable with the API key. vLLM's server reads it, too, unless it has --api-key."""
_LORA_UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
_LORA_METRIC = "vllm:lora_requests_info"
_LORA_SAMPLE = re.compile(rf"^{_LORA_METRIC}\{{(.*)\}} (\S+)", re.MULTILINE)
_LORA_LABEL = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


T = TypeVar("T")


class _WeightInfo(Struct):
    weight_version: str | int


class _WorldSize(Struct):
    world_size: Annotated[int, Meta(ge=1)] = 1


class _Paused(Struct):
    is_paused: bool | None = None


class _Model(Struct):
    id: str
    root: str | None = None


class _Models(Struct):
    data: list[_Model] = []


class _LoraConfig(Struct, frozen=True):
    max_lora_rank: int | None = None


class _Config(Struct, frozen=True):
    weight_transfer_config: dict[str, Any] | None = None
    parallel_config: dict[str, Any] | None = None
    lora_config: _LoraConfig | None = None


class _ServerInfo(Struct):
    vllm_config: _Config = _Config()


class HttpEngine:
    """A vLLM server with the plug-in, or before vLLM 0.25 with the worker extension.

    The server must be started with VLLM_SERVER_DEV_MODE=1, or it has no routes for weights. Every request carries the
    key in VLLM_API_KEY, if it is set. Proxies in the environment are not used. Each call opens a connection of its own.
    The server may have closed an older one, and the call would have to be repeated.

    Args:
        url: The server's address, without /v1.
        name: The engine's name in errors.
        timeout_s: The most seconds of a call.

    Raises:
        ConfigError: The address of no server, or a key that no header may have.
    """

    def __init__(self, url: str, *, name: str, timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # as a connection does, but its `UnicodeError` is no `OSError`
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not the URL of a server; expected one such as {DEFAULT_URL!r}")
        if parts.username is not None:
            raise ConfigError(f"the URL of {host} names a user, and weightsync sends no user names: leave it out")
        if parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(f"{url!r} is the path of vLLM's OpenAI API; give the server's address, without /v1")
        key = os.environ.get(_KEY, "")
        if not all("!" <= character <= "~" for character in key):  # http.client would show the key in its error
            raise ConfigError(f"{_KEY} has a character that no header may have, such as a space or the end of a line")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.name = name
        self.timeout_s = timeout_s
        self.host = calls.LOCAL if host == "localhost" else host
        self._address = host, port
        self._connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._prefix = quote(parts.path.rstrip("/"), "/%:@!$&'()*+,;=")
        self._has_plug_ins = True
        self._has_workers = False
        self._session = ""
        """The trainer's session, for the server's fence. Empty until `init` has returned."""
        self._meets_others = False
        """Another engine behind this address has refused a call of this session."""

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Send one request, and return the JSON object of the answer, {} for an empty body. Raises `EngineError`s.

        Once another engine behind this address has refused a call, refused calls are repeated. The rollback of the push
        then reaches the right engine.
        """
        route = path.partition("?")[0]
        limit = timeout_s or calls.limit_s(route.lstrip("/"), self.timeout_s)
        for left in reversed(range(_TRIES)):
            status, text = self._request(method, path, body, limit)
            refused = read_refusal(_parsed(text)) if status == STATUS else None
            if refused is None:
                break
            repeats, self._meets_others = self._meets_others, not isinstance(refused, FencedError)
            if not repeats or not self._meets_others or not left:
                refused.who = self.name
                raise refused
        answer = _parsed(self._checked(route, status, text) or "{}")
        if not isinstance(answer, dict):
            raise EngineError(f"{route}: the answer is not vLLM's: {text[:200]!r}", who=self.name)
        return answer

    def _get(self, path: str, kind: type[T]) -> T:
        """Send a GET request, and return the answer as a `kind`. Raises `EngineError`s."""
        answer = self.call("GET", path)
        try:
            return convert(answer, kind)
        except ValidationError as error:
            raise EngineError(f"{path}: the answer is not vLLM's: {error}", who=self.name) from error

    def init(self, init_info: dict[str, Any]) -> None:
        self._session, self._meets_others = "", False
        # Read from the version, not found by trying: see `VllmEngine._worker_methods`. A build of vLLM without git tags
        # has the version 0.1.dev1, and is taken for a new one.
        version = re.match(r"(\d{1,9})\.(\d{1,9})", str(self.call("GET", _VERSION).get("version")))
        release = tuple(map(int, version.groups())) if version is not None else calls.PLUG_INS_SINCE
        self._has_plug_ins = not calls.EXTENSION_SINCE <= release < calls.PLUG_INS_SINCE
        cores = self._count_cores()
        init_info = calls.with_cores(init_info, cores)
        with calls.held_paused(self) if cores > 1 else nullcontext():
            self._call_workers("init", init_info=init_info)
        if session := init_info.get("session"):
            self._session = session
            for _ in range(_QUESTIONS):  # a load balancer would send some of them to another engine
                self._call_workers("init", init_info={**init_info, "asks": True})

    def _count_cores(self) -> int:
        """Return the number of engine cores under data parallelism, behind this server or beside it."""
        route, sizes = "/get_world_size", []
        with suppress(UnsupportedError):
            sizes = [self._get(f"{route}?include_dp={word}", _WorldSize).world_size for word in ("true", "false")]
        return sizes[0] // sizes[1] if sizes else 1

    def start(self) -> None:
        self._call_workers("start")

    def update(self, update_info: dict[str, Any]) -> None:
        self._call_workers("update", update_info=update_info)

    def finish(self, version: str | None) -> None:
        self._call_workers("finish", weight_version=version)  # before 0.27 the server does not read it
        if version is not None and not self._has_plug_ins:
            self.set_version(version)

    def _call_workers(self, call: str, **fields: Any) -> None:
        """Make one of the workers' calls: by its own route, or as a method of the worker extension."""
        if self._has_plug_ins:
            self._post(f"/{calls.PLUG_IN_METHODS[call]}", fields or None)
        elif (method := calls.EXTENSION_METHODS.get(call)) is not None:
            self._call_method(method, *fields.values())

    def _call_method(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of all workers. Return the server's answer, with the workers' under "results", or {}."""
        return self.call(
            "POST", "/collective_rpc", {"method": method, "args": args}, calls.limit_s(method, self.timeout_s)
        )

    def pause(self, mode: str) -> None:
        # Level 0 pauses, and returns sooner than /pause, which sleeps afterwards.
        self._post(f"/sleep?level=0&mode={quote(mode)}")
        # An engine that cannot reset its cache is found before anything is written. Without the connector: it may allow
        # one reset, the one after the update.
        self._reset_prefix_cache(connector=False)

    def is_paused(self) -> bool | None:
        """Return whether generation is paused, by this trainer or another caller. None: the server cannot tell."""
        with suppress(UnsupportedError):
            return self._get("/is_paused", _Paused).is_paused
        return None

    def resume(self) -> None:
        # This does not resume an engine while its memory sleeps.
        if self._post("/wake_up?tags=scheduling").get("status") == "sleeping":
            logger.warning(calls.STILL_ASLEEP, self.name)

    def reset_caches(self) -> None:
        self._reset_prefix_cache()
        self._post("/reset_encoder_cache")

    def _reset_prefix_cache(self, connector: bool = True) -> None:
        external = str(connector).lower()
        answer = self._post(f"/reset_prefix_cache?reset_running_requests=true&reset_external={external}")
        # vLLM 0.25 has no such field: a failure is a status 500 there, and the connector's failure is not reported.
        if not answer.get("success", True):
            raise calls.caches_not_reset(self.name)

    def set_version(self, version: str) -> None:
        with suppress(UnsupportedError):  # before vLLM 0.27
            self._post("/update_weight_version", {"new_version": version})

    def version(self) -> str | None:
        with suppress(UnsupportedError):  # before vLLM 0.27
            return str(self._get("/weight_info", _WeightInfo).weight_version)
        return None

    def is_alive(self) -> bool:
        with suppress(WeightSyncError):
            return self._request("GET", _HEALTH, None, min(self.timeout_s / 2, timeouts.HEALTH_TIMEOUT_S))[0] == 200
        return False

    def max_lora_rank(self) -> int | None:
        lora = self._get(_SERVER_INFO, _ServerInfo).vllm_config.lora_config
        return lora.max_lora_rank if lora is not None else None

    def load_adapter(self, adapter: LoraAdapter) -> None:
        self._check_bound(adapter, NOT_LOADED)
        # PEFT has one tensor for all experts. vLLM ignores the field for adapters without experts.
        body = {"lora_name": adapter.name, "lora_path": adapter.path, "is_3d_lora_weight": True}
        self._change_adapters("/v1/load_lora_adapter", body)
        if self._adapters().get(adapter.name) != adapter.path:
            raise EngineError(
                f"the server has loaded the adapter {adapter.name}, but does not list it in /v1/models", who=self.name
            )
        self._check_bound(adapter, NEWEST)

    def _check_bound(self, adapter: LoraAdapter, number: int) -> None:
        """Raise unless the workers bind every module of an adapter, as `check_bound` does."""
        self._check_workers()
        answers = self._call_method(ADAPTER_MODULES, adapter.path, number).get("results")
        check_bound(adapter, answers, self.name)

    def _check_workers(self) -> None:
        """Raise when several API servers share the address, or the workers have neither plug-in nor extension.

        Reads the server's configuration, since a try could harm: see `VllmEngine._worker_methods`.
        """
        if self._has_workers:
            return
        config = self._get(_SERVER_INFO, _ServerInfo).vllm_config
        if (servers := (config.parallel_config or {}).get("_api_process_count", 1)) != 1:
            raise UnsupportedError(
                f"{servers} API servers share the address, and vLLM lists an adapter in one of them alone. Start the "
                "server with --api-server-count 1. Without it, --data-parallel-size starts one for each core",
                who=self.name,
            )
        backend = (config.weight_transfer_config or {}).get("backend")
        if backend != BACKEND and not (config.parallel_config or {}).get("worker_extension_cls"):
            raise calls.no_plug_in(f"its weight transfer backend is {backend!r}", self.name)
        self._has_workers = True

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        if self.has_adapter(adapter):
            self._change_adapters("/v1/unload_lora_adapter", {"lora_name": adapter.name})

    def _change_adapters(self, path: str, body: dict[str, Any]) -> None:
        self._checked(path, *self._request("POST", path, body, self.timeout_s), needs=_LORA_UPDATING)

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        return adapter.name in self._adapters()

    def _adapters(self) -> dict[str, str | None]:
        """Return the path of each adapter in the server's list, by name. The list has the base model, too."""
        return {row.id: row.root for row in self._get(_MODELS, _Models).data}

    def adapters_in_use(self) -> set[str]:
        path = "/metrics"
        status, text = self._request("GET", path, None, self.timeout_s)
        if status != 200 or _LORA_METRIC not in text:
            raise EngineError(
                f"{path} has no {_LORA_METRIC}, the metric of the adapters in use; start the server with "
                "--enable-lora, and without --disable-log-stats or PROMETHEUS_MULTIPROC_DIR",
                who=self.name,
            )
        # One sample for each set of adapters since the start. Its value is the time when this set was in use last.
        try:
            samples = [(float(value), labels) for labels, value in _LORA_SAMPLE.findall(text)]
        except ValueError as error:
            raise EngineError(f"{path}: the answer is not vLLM's: {error}", who=self.name) from error
        last = max((when for when, _ in samples), default=0.0)
        newest = [names for when, labels in samples if when == last for names in _LORA_LABEL.findall(labels)]
        return {name for names in newest for name in names.split(",")} - {""}

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.call("POST", path, body)

    def _checked(self, route: str, status: int, text: str, needs: str = _DEV_MODE) -> str:
        """Return the text of an answer of status 200. Raise the error for an answer of another status."""
        if status == 200:
            return text
        message = _message_of(text)
        if status == 404 and route in (_VERSION, _MODELS):
            raise UnsupportedError(
                f"there is no route {route} (status 404), which every vLLM server has; check the address, and the "
                "routes of a proxy there",
                who=self.name,
            )
        if status == 404 and (needs == _DEV_MODE or message == "Not Found"):  # else an adapter is missing
            raise UnsupportedError(
                f"the server has no route {route} (status 404); start vLLM with {needs} in its environment, and check "
                "the address",
                who=self.name,
            )
        if status == 401:
            raise EngineError(
                f"{route}: status 401: the server has an API key, and {_KEY} of this process is "
                f"{'another key' if os.environ.get(_KEY) else 'not set'}; set it to the server's key",
                who=self.name,
            )
        if status in (502, 503, 504):
            raise EngineUnreachableError(f"{route}: status {status}: {message}", who=self.name)
        raise calls.engine_error(message, f"{route} (status {status})", self.name)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        """Send one request, and return the status and text of the answer."""
        deadline = Deadline(timeout_s)
        route = path.partition("?")[0]
        content = b"" if body is None else json.dumps(body).encode()
        headers = self.headers | ({} if body is None else {"Content-Type": "application/json"})
        headers |= {HEADER: self._session} if self._session and route != _HEALTH else {}
        with closing(self._connection_class(*self._address, timeout=min(timeout_s, timeouts.REACH_S))) as connection:
            try:
                connection.connect()
            except OSError as error:
                what = "it does not speak https" if isinstance(error, ssl.SSLError) else "nothing answers there"
                raise EngineUnreachableError(
                    f"{what} ({error}), called from {socket.gethostname()}; check that the server runs at this "
                    "address, and its port in the firewall",
                    who=self.name,
                ) from error
            try:
                connection.request(method, self._prefix + path, content, headers)
                connection.response_class = partial(_in_time, deadline)  # type: ignore[assignment]
                response = connection.getresponse()
                content = response.read(_MOST_BYTES + 1)
                if len(content) > _MOST_BYTES:
                    text = f"{route}: the answer has over {_MOST_BYTES} bytes; check that the address is vLLM's"
                    raise EngineError(text, who=self.name)
                is_cut_off = not content if response.length is None and not response.chunked else response.length
                if is_cut_off:
                    raise http.client.IncompleteRead(content)
                return response.status, content.decode(errors="replace")
            except TimeoutError as error:
                raise calls.too_late(route, timeout_s, self.name) from error
            except (OSError, ValueError, http.client.HTTPException) as error:  # a ValueError for a chunk of -5 bytes
                raise EngineUnreachableError(
                    f"the server closed the connection without an answer to {route} ({error}); it may or may not have "
                    "run the call",
                    who=self.name,
                ) from error


class _DeadlineReader(io.RawIOBase):
    """A server's bytes until a deadline. A socket's own timeout begins anew with every byte.

    Counts the bytes, too: for a chunk of -1 bytes `http.client` would read without an end.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._left_bytes = 2 * _MOST_BYTES
        self._sock, self._raw, self._deadline = sock, sock.makefile("rb", buffering=0), deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int | None:
        if self._deadline.passed():
            raise TimeoutError
        self._sock.settimeout(max(self._deadline.left_s(), 0.001))
        if self._left_bytes < 0:
            raise http.client.HTTPException(f"it has over {2 * _MOST_BYTES} bytes")
        count = self._raw.readinto(room)
        self._left_bytes -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _in_time(deadline: Deadline, sock: socket.socket, *level: int, **options: Any) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(_DeadlineReader(sock, deadline), *level, **options)  # type: ignore[arg-type]


def _parsed(text: str) -> Any:
    """Return the value of a JSON text. None: it is not JSON, or nested too deep to be an answer."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _message_of(text: str) -> str:
    """Return an error answer's message: {"error": {"message": ...}} or {"error": ...}, or FastAPI's {"detail": ...}."""
    error = answer = _parsed(text)
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("detail", answer.get("message")))
    if isinstance(error, dict):
        error = error.get("message", error)
    found = error if isinstance(error, str) else "" if error is None else json.dumps(error)
    return (found or text)[:_MESSAGE_CHARS] or "no message"
