"""A vLLM server, by HTTP."""

from __future__ import annotations

import http.client
import json
import logging
import re
import ssl
from typing import Any
from urllib.parse import quote, urlsplit

from weightsync.deadline import Deadline
from weightsync.engines.base import LoraAdapter
from weightsync.engines.calls import (
    HEALTH_TIMEOUT_S,
    LOCAL,
    STILL_ASLEEP,
    caches_not_reset,
    engine_error,
    limit_s,
    too_late,
)
from weightsync.errors import (
    ConfigError,
    EngineError,
    EngineUnreachableError,
    UnsupportedError,
    WeightSyncError,
)

DEFAULT_URL = "http://localhost:8000"

logger = logging.getLogger(__name__)

_LORA_METRIC = "vllm:lora_requests_info"
_LORA_SAMPLE = re.compile(rf"^{_LORA_METRIC}\{{(.*)\}} (\S+)", re.MULTILINE)
_LORA_LABEL = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


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
        if parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(f"{url!r} is where vLLM answers as OpenAI does; give the server's address, without /v1")
        self.name = name
        self.timeout_s = timeout_s
        self.host = LOCAL if host == "localhost" else host
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
            logger.warning(STILL_ASLEEP, self.name)

    def reset_caches(self) -> None:
        self._reset_prefix_cache()
        self._post("/reset_encoder_cache")

    def _reset_prefix_cache(self, connector: bool = True) -> None:
        external = str(connector).lower()
        answer = self._post(f"/reset_prefix_cache?reset_running_requests=true&reset_external={external}")
        # vLLM 0.25 has no field for it: there a failure is a status 500, and a connector's is not told.
        if not answer.get("success", True):
            raise caches_not_reset(self.name)

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
            status, _ = self._request("GET", "/health", None, min(self.timeout_s, HEALTH_TIMEOUT_S))
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
            raise engine_error(_message_of(text), f"{path} (status {status})", self.name)

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
        last = max((when for when, _ in samples), default=0.0)
        newest = [labels for when, labels in samples if when == last]
        found = {name for labels in newest for names in _LORA_LABEL.findall(labels) for name in names.split(",")}
        return found - {""}

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        route = path.partition("?")[0].lstrip("/")
        return self._answer(path, *self._request("POST", path, body, limit_s(route, self.timeout_s)))

    def _answer(self, path: str, status: int, text: str) -> dict[str, Any]:
        """The JSON object that the server answered, empty when it has no body; any other answer is an error."""
        route = path.partition("?")[0]
        if status == 404:
            raise UnsupportedError(
                f"the server has no route {route} (status 404); vLLM has it only when started with "
                "VLLM_SERVER_DEV_MODE=1 in its environment. Is it a vLLM that answers there?",
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
        raise engine_error(message, f"{route} (status {status})", self.name)

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
                what = "it does not speak https" if isinstance(error, ssl.SSLError) else "nothing answers there"
                raise EngineUnreachableError(
                    f"{what} ({error}); is the server running, and is this its address?", who=self.name
                ) from error
            try:
                connection.request(method, self._prefix + path, content, headers)
                connection.sock.settimeout(max(deadline.left_s(), 0.001))
                response = connection.getresponse()
                return response.status, response.read().decode(errors="replace")
            except TimeoutError as error:
                raise too_late(route, timeout_s, self.name) from error
            except (OSError, http.client.HTTPException) as error:
                raise EngineUnreachableError(
                    f"the server closed the connection without an answer to {route} ({error}); whether it was carried "
                    "out is not known",
                    who=self.name,
                ) from error
        finally:
            connection.close()


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
