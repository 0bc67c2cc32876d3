"""The clients of vLLM: what each accepts, exactly what it asks, and what each failure becomes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import json
import os
import socket
import threading
import time
from collections import UserList
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray_workers

from weightsync import WeightSync
from weightsync.engines import AdapterEngine, HttpEngine, LoraAdapter
from weightsync.engines.async_llm import AsyncEngine
from weightsync.engines.bound_modules import ask_worker
from weightsync.engines.llm import LlmEngine
from weightsync.engines.ray_actor import RayEngine
from weightsync.errors import (
    ConfigError,
    EngineError,
    EngineUnreachableError,
    ManifestError,
    ProtocolError,
    SyncTimeoutError,
    UnsupportedError,
)
from weightsync.fleet import EngineList, connect
from weightsync.fleet.spmd_engine import join
from weightsync.net.wire import POISONED

# ---------------------------------------------------------------------------------------------------------------
# What connect accepts


class PlugInEngine:
    """An engine of somebody else's making."""

    name = "the other engine"
    host = "10.0.0.9"

    def init(self, init_info): ...
    def start(self): ...
    def update(self, update_info): ...
    def finish(self, version): ...
    def pause(self, mode): ...
    def resume(self): ...
    def reset_caches(self): ...
    def set_version(self, version): ...
    def version(self): ...
    def is_alive(self): ...


def test_without_an_engine_the_variable_and_then_the_default_address_are_taken(monkeypatch):
    monkeypatch.delenv("WEIGHTSYNC_ENGINE", raising=False)
    (engine,) = connect(None, 1.0)
    assert (engine.name, engine.host) == ("engine 0 (http://localhost:8000)", "127.0.0.1")

    monkeypatch.setenv("WEIGHTSYNC_ENGINE", "http://10.0.0.3:8000, https://rollout.example/vllm ,")
    first, second = connect(None, 1.0)
    assert (first.name, first.host) == ("engine 0 (http://10.0.0.3:8000)", "10.0.0.3")
    assert (second.name, second.host) == ("engine 1 (https://rollout.example/vllm)", "rollout.example")


def test_a_list_may_mix_kinds_and_keeps_its_order():
    other = PlugInEngine()
    engines = connect(["http://10.0.0.3:8000", fake_llm(), other, AsyncLLM()], 1.0)
    assert [type(engine) for engine in engines] == [HttpEngine, LlmEngine, PlugInEngine, AsyncEngine]
    assert engines[2] is other
    assert engines[1].name == "engine 1 (LLM in this process)"
    assert engines[3].name == "engine 3 (AsyncLLM in this process)"
    assert engines[1].host == engines[3].host == "127.0.0.1"


def test_a_list_of_a_configuration_is_a_list():
    """OmegaConf's is no list of Python's."""
    assert [engine.name for engine in connect(UserList(["http://a:1", "http://b:2"]), 1.0)] == [
        "engine 0 (http://a:1)",
        "engine 1 (http://b:2)",
    ]


def test_an_engine_of_ones_own_may_know_its_address():
    own = PlugInEngine()
    own.url = "http://10.0.0.3:8000"
    assert connect(own, 1.0) == [own]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (42, "builtins.int. Expected a vLLM LLM or AsyncLLM"),
        (SimpleNamespace(name="x", host="y", init=print), "types.SimpleNamespace. Expected"),
        ([], "empty"),
        ("localhost:8000", "not the URL of a server"),
        ("ftp://host:1", "not the URL of a server"),
        ("http://host:8000?x=1", "not the URL of a server"),
        ("http://host:port", "not a URL"),
        ("http://.host:8000", "not a URL"),
        ("http://host:8000/v1", "without /v1"),
        ("http://user:secret@host:8000", "^(?!.*secret).*names a user"),
        ("http://a:1,http://b:2", "not a URL"),
        (["http://a:1", "http://b:1", "http://a:1"], "engine 2 is the same as engine 0"),
    ],
)
def test_anything_else_is_refused_with_what_is_accepted(given, words):
    with pytest.raises(ConfigError, match=words):
        connect(given, 1.0)


@pytest.mark.parametrize("given", [8000, [], "localhost:8000", "/some/path", ["http://a:1", "http://a:1/"]])
def test_engines_are_checked_when_they_are_given(given):
    with pytest.raises(ConfigError, match=r"Expected a vLLM|no engine|not the URL|the same as engine 0"):
        WeightSync("fsdp", engine=given)


def test_engines_that_are_read_at_each_push_are_not_read_before(tmp_path, monkeypatch):
    monkeypatch.setenv("WEIGHTSYNC_ENGINE", "localhost:8000")
    for given in (None, tmp_path / "missing", lambda: 1 / 0):
        WeightSync("fsdp", engine=given)


def test_reprs_name_what_pushes_to_which_engines(tmp_path):
    sync = WeightSync("fsdp", "broadcast", ["http://a:1", fake_llm()])
    assert repr(sync.engines) == "EngineList(['http://a:1', 'VersionedLLM'])"
    sync.engines.remove("http://a:1")
    assert (
        repr(sync)
        == "<WeightSync(backend='fsdp', transport='broadcast', engine=EngineList(['VersionedLLM'])), no push yet>"
    )
    assert repr(WeightSync("fsdp", engine=tmp_path).engines) == f"EngineList({tmp_path!r})"


def test_an_empty_variable_is_refused(monkeypatch):
    monkeypatch.setenv("WEIGHTSYNC_ENGINE", " , ")
    with pytest.raises(ConfigError, match="WEIGHTSYNC_ENGINE"):
        connect(None, 1.0)


def test_list_that_cannot_be_used_once_changes_no_engine():
    """An engine's name and the turns of its calls belong to the object."""
    given: list[object] = ["http://a:1", "http://b:2"]
    engines = EngineList(lambda: given, 1.0)
    before = engines.engines()
    given.insert(1, 5)
    with pytest.raises(ConfigError, match=r"is a builtins\.int"):
        engines.engines()
    given.remove(5)
    assert engines.engines() == before


# ---------------------------------------------------------------------------------------------------------------
# HTTP


class Server:
    """A server that records every request and answers from `replies`: path or route -> (status, body)."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.authorizations: list[str | None] = []
        self.replies: dict[str, tuple[int, str]] = {}
        self.instead_of_answering: Any = None
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                server.authorizations.append(self.headers.get("Authorization"))
                server.requests.append((self.command, self.path, json.loads(body) if body else None))
                if server.instead_of_answering is not None:
                    server.instead_of_answering()
                    return
                known = server.replies.get(self.path.partition("?")[0], (200, "{}"))
                status, text = server.replies.get(self.path, known)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST  # noqa: N815 (http.server calls it so)

            def log_message(self, *args: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def http_engine(url: str, timeout_s: float = 5.0) -> HttpEngine:
    (engine,) = connect(url, timeout_s)
    assert isinstance(engine, HttpEngine)
    return engine


ASKED_FOR_CORES = [("GET", f"/get_world_size?include_dp={word}", None) for word in ("true", "false")]


def test_a_path_before_the_routes_travels_as_browsers_send_it(server):
    http_engine(f"{server.url}/mod\xe8le a/%2f:b/").start()
    assert server.requests == [("POST", "/mod%C3%A8le%20a/%2f:b/start_weight_update", None)]


def test_http_sends_what_vllm_expects(server, monkeypatch):
    # A proxy of the environment that nobody runs: it must not be used.
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    server.replies["/reset_prefix_cache"] = (200, '{"success": true}')
    server.replies["/weight_info"] = (200, '{"weight_version": "7"}')
    engine = http_engine(server.url + "/")
    engine.pause("keep")
    engine.init({"protocol": 1})
    engine.start()
    engine.update({"bucket": [1, 2]})
    engine.finish("7")
    engine.reset_caches()
    engine.set_version("8")
    engine.resume()
    assert engine.version() == "7"
    assert engine.is_alive()
    assert server.requests == [
        ("POST", "/sleep?level=0&mode=keep", None),
        ("POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=false", None),
        ("GET", "/version", None),
        *ASKED_FOR_CORES,
        ("POST", "/init_weight_transfer_engine", {"init_info": {"protocol": 1}}),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"bucket": [1, 2]}}),
        ("POST", "/finish_weight_update", {"weight_version": "7"}),
        ("POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
        ("POST", "/reset_encoder_cache", None),
        ("POST", "/update_weight_version", {"new_version": "8"}),
        ("POST", "/wake_up?tags=scheduling", None),
        ("GET", "/weight_info", None),
        ("GET", "/health", None),
    ]


def test_http_sends_the_key_of_the_environment_and_says_it_nowhere(server, monkeypatch, caplog):
    route = "/v1/load_lora_adapter"
    server.replies = WITH_ADAPTERS | {route: (401, '{"error": "Unauthorized"}')}
    for key, said in ((None, "is not set"), ("", "is not set"), ("sk-3cret", "is another key")):
        monkeypatch.setenv("VLLM_API_KEY", key) if key is not None else monkeypatch.delenv("VLLM_API_KEY", False)
        engine = http_engine(server.url)
        with pytest.raises(EngineError, match=f"{route}.*401.*API key.*VLLM_API_KEY.*{said}") as raised:
            engine.load_adapter(ADAPTER)
        assert "3cret" not in f"{raised.value!r} {raised.value.to_fields()} {engine!r} {caplog.text}"
    engine.start()
    assert server.authorizations == [None] * 6 + ["Bearer sk-3cret"] * 4


@pytest.mark.parametrize("key", ["sk-3cret\n", "sk-3cr\u00e9t", "sk 3cret"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY has a character") as raised:
        http_engine("http://localhost:8000")
    assert "3cr" not in str(raised.value)


@pytest.mark.parametrize("version", ["0.24.0", "0.20.1rc1.dev3+g12ab"])
def test_http_calls_the_worker_extension_of_a_vllm_without_plug_ins(server, version):
    server.replies["/version"] = (200, json.dumps({"version": version}))
    server.replies["/collective_rpc"] = (200, '{"results": [null, null]}')
    server.replies["/update_weight_version"] = (404, '{"detail": "Not Found"}')
    engine = http_engine(server.url)
    engine.init({"a": 1})
    engine.start()
    engine.update({"b": 2})
    engine.finish(None)
    engine.finish("5")
    assert server.requests == [
        ("GET", "/version", None),
        *ASKED_FOR_CORES,
        ("POST", "/collective_rpc", {"method": "weightsync_init", "args": [{"a": 1}]}),
        ("POST", "/collective_rpc", {"method": "weightsync_update", "args": [{"b": 2}]}),
        ("POST", "/update_weight_version", {"new_version": "5"}),
    ]
    server.replies["/collective_rpc"] = (
        500,
        '{"error": {"message": "Method \'weightsync_init\' is not implemented."}}',
    )
    with pytest.raises(EngineError, match=r"no weightsync plug-in.*--worker-extension-cls"):
        engine.init({})


@pytest.mark.parametrize("version", ["0.25.0", "1.0.0", "dev", "0.1.dev1+g12ab", None])
def test_http_calls_the_plug_in_of_every_other_vllm(server, version):
    server.replies["/version"] = (200, json.dumps({} if version is None else {"version": version}))
    http_engine(server.url).init({})
    assert [path for method, path, _ in server.requests if method == "POST"] == ["/init_weight_transfer_engine"]


@pytest.mark.parametrize(("is_paused", "around"), [(False, True), (None, True), (True, False)])
def test_http_holds_cores_that_step_together_while_they_meet_the_trainer(server, is_paused, around):
    server.replies |= {
        "/get_world_size?include_dp=true": (200, '{"world_size": 8}'),
        "/get_world_size?include_dp=false": (200, '{"world_size": 2}'),
        "/is_paused": (200, json.dumps({} if is_paused is None else {"is_paused": is_paused})),
    }
    http_engine(server.url).init({"a": 1})
    init = "/init_weight_transfer_engine"
    sent = [(path.partition("?")[0], body) for method, path, body in server.requests if method == "POST"]
    assert (init, {"init_info": {"a": 1, "cores": 4}}) in sent
    held = ["/sleep", "/reset_prefix_cache", init, "/wake_up"]
    assert [path for path, _ in sent] == (held if around else [init])


def test_http_takes_a_server_that_does_not_tell_its_size_for_one_core(server):
    server.replies["/get_world_size"] = (404, '{"detail": "Not Found"}')
    http_engine(server.url).init({"a": 1})
    assert server.requests[-1] == ("POST", "/init_weight_transfer_engine", {"init_info": {"a": 1}})


def test_who_wakes_an_engine_whose_memory_sleeps_is_told(server, caplog):
    server.replies["/wake_up"] = (200, '{"status": "sleeping", "tags": ["scheduling"]}')
    http_engine(server.url).resume()
    assert "its memory has been put to sleep" in caplog.text
    caplog.clear()
    llm = AsyncLLM()
    (engine,) = connect(llm, 5.0)
    with loop_in_a_thread() as loop:
        serve(llm, loop)
        engine.resume()
        assert "put to sleep" not in caplog.text
        llm.memory_sleeps = True
        engine.resume()
    assert "its memory has been put to sleep" in caplog.text


@pytest.mark.parametrize(
    ("reply", "paused"),
    [
        ((200, '{"is_paused": true}'), True),
        ((200, '{"is_paused": false}'), False),
        ((404, '{"detail": "Not Found"}'), None),
    ],
)
def test_a_server_says_whether_it_is_paused_where_it_can(server, reply, paused):
    server.replies["/is_paused"] = reply
    assert http_engine(server.url).is_paused() is paused


def test_an_async_llm_says_whether_it_is_paused_where_it_can():
    older, llm = AsyncLLM(), AsyncLLM()
    llm.is_paused = lambda: llm.record("is_paused")  # type: ignore[attr-defined]
    with loop_in_a_thread() as loop:
        for each, paused in ((older, None), (llm, True)):
            serve(each, loop)
            (engine,) = connect(each, 5.0)
            assert isinstance(engine, AsyncEngine)
            assert engine.is_paused() is paused


def test_http_keeps_the_path_of_the_url(server):
    http_engine(server.url + "/replica/3/").start()
    assert server.requests == [("POST", "/replica/3/start_weight_update", None)]


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, '{"detail": "Not Found"}', UnsupportedError, "VLLM_SERVER_DEV_MODE=1"),
        (500, '{"error": {"message": "q_proj is missing"}}', EngineError, "update_weights.*500.*: q_proj is missing"),
        (400, '{"error": "mode must be keep"}', EngineError, "mode must be keep"),
        (422, '{"detail": [{"loc": ["body"]}]}', EngineError, r"\[\{\"loc\": \[\"body\"\]\}\]"),
        (500, '{"error": "Failed to reset KV cache."}', EngineError, "cache. An open session with streamed input"),
        (500, "", EngineError, "no message"),
        (500, "Internal Server Error", EngineError, "Internal Server Error"),
        (200, "<html>hello</html>", EngineError, "not vLLM's: '<html>"),
        (503, "", EngineUnreachableError, "503"),
        (
            500,
            '{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}',
            EngineUnreachableError,
            "engine is dead",
        ),
        (
            500,
            '{"error": {"message": "Call to collective_rpc method failed: Weight transfer not configured."}}',
            EngineError,
            "no weightsync plug-in.*--weight-transfer-config",
        ),
        (
            400,
            '{"error": {"message": "Invalid init_info for NCCLWeightTransferEngine: unexpected keyword"}}',
            EngineError,
            "no weightsync plug-in.*NCCL",
        ),
    ],
)
def test_http_answers_become_errors(server, status, body, error, words):
    server.replies["/update_weights"] = (status, body)
    with pytest.raises(error, match=words) as raised:
        http_engine(server.url).update({})
    assert type(raised.value) is error
    assert raised.value.who == f"engine 0 ({server.url})"
    assert len(server.requests) == 1  # never a second try


def test_our_own_plug_in_that_refuses_init_info_is_not_called_missing(server):
    server.replies["/init_weight_transfer_engine"] = (
        400,
        '{"error": {"message": "Invalid init_info for WeightSyncEngine: protocol 9"}}',
    )
    with pytest.raises(EngineError, match="protocol 9") as raised:
        http_engine(server.url).init({})
    assert "plug-in" not in str(raised.value)


def test_an_address_without_the_routes_of_every_vllm_is_wrong(server):
    server.replies["/version"] = server.replies["/v1/models"] = (404, '{"detail": "Not Found"}')
    for call in (lambda: http_engine(server.url).init({}), lambda: http_engine(server.url).has_adapter(ADAPTER)):
        with pytest.raises(UnsupportedError, match="every vLLM server has; check the address") as raised:
            call()
        assert "VLLM_SERVER_DEV_MODE" not in str(raised.value)


def test_a_server_older_than_versions_has_none(server):
    server.replies["/weight_info"] = server.replies["/update_weight_version"] = (404, '{"detail": "Not Found"}')
    engine = http_engine(server.url)
    assert engine.version() is None
    engine.set_version("3")
    assert [path for _, path, _ in server.requests] == ["/weight_info", "/update_weight_version"]


def test_a_cache_that_was_not_reset_is_an_error(server):
    server.replies["/reset_prefix_cache"] = (200, '{"success": false}')
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        http_engine(server.url).reset_caches()
    server.replies["/reset_prefix_cache"] = (200, "")  # vLLM 0.25 says nothing, and fails by status
    http_engine(server.url).reset_caches()


ADAPTER = LoraAdapter("policy-1-ab", 7, "/run/policy-1-ab")


def listed(*rows: tuple[str, str]) -> tuple[int, str]:
    """What /v1/models answers."""
    return 200, json.dumps({"data": [{"id": name, "root": path} for name, path in (("base", "/base"), *rows)]})


def configured(backend: str | None = "weightsync", extension: str = "", api_servers: int = 1) -> tuple[int, str]:
    """What /server_info answers."""
    transfer = {"backend": backend} if backend else None
    parallel = {"worker_extension_cls": extension, "_api_process_count": api_servers}
    found: dict[str, Any] = {"weight_transfer_config": transfer, "parallel_config": parallel}
    found["lora_config"] = {"max_lora_rank": 8, "max_loras": 1}
    return 200, json.dumps({"vllm_config": found, "vllm_env": {}})


WITH_ADAPTERS: dict[str, tuple[int, str]] = {
    "/server_info": configured(),
    "/collective_rpc": (200, '{"results": [{"unbound": []}]}'),
    "/v1/load_lora_adapter": (200, "Success: added."),
}
UNBOUND = {"unbound": ["layers.0.q_proj"], "modules": ["model.layers.0.q_proj", "model.layers.0.o_proj"]}


def test_http_changes_adapters(server):
    engine = http_engine(server.url)
    assert isinstance(engine, AdapterEngine)
    server.replies["/server_info"] = 200, '{"vllm_config": {"lora_config": null}}'
    assert engine.max_lora_rank() is None
    server.replies["/server_info"] = configured()
    assert engine.max_lora_rank() == 8
    server.replies = WITH_ADAPTERS | {"/v1/models": listed((ADAPTER[0], ADAPTER[2]))}
    engine.load_adapter(ADAPTER)
    assert engine.has_adapter(ADAPTER)
    engine.unload_adapter(ADAPTER)
    server.replies["/v1/models"] = listed()
    assert not engine.has_adapter(ADAPTER)
    engine.unload_adapter(ADAPTER)  # which it does not have
    asked = "POST", "/collective_rpc"
    assert [row for row in server.requests if row[0] == "POST"] == [
        (*asked, {"method": "weightsync_adapter_modules", "args": ["/run/policy-1-ab", 0]}),
        (
            "POST",
            "/v1/load_lora_adapter",
            {"lora_name": "policy-1-ab", "lora_path": "/run/policy-1-ab", "is_3d_lora_weight": True},
        ),
        (*asked, {"method": "weightsync_adapter_modules", "args": ["/run/policy-1-ab", -1]}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "policy-1-ab"}),
    ]
    with pytest.raises(EngineError, match="does not list it in /v1/models"):
        engine.load_adapter(ADAPTER)


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (404, {"detail": "Not Found"}, UnsupportedError, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        (404, {"error": {"message": "Not Found", "type": "NotFoundError"}}, UnsupportedError, "start vLLM with"),
        (404, {"error": {"message": "No adapter found for /run"}}, EngineError, r"404\): No adapter found for /run"),
        (400, {"error": {"message": "LoRA rank 16 is greater than"}}, EngineError, "LoRA rank 16 is greater"),
    ],
)
def test_http_adapters_that_are_refused(server, status, body, error, words):
    server.replies = WITH_ADAPTERS | {"/v1/load_lora_adapter": (status, json.dumps(body))}
    with pytest.raises(error, match=words):
        http_engine(server.url).load_adapter(ADAPTER)


@pytest.mark.parametrize(
    ("replies", "error", "words"),
    [
        ({"/server_info": (404, "{}")}, UnsupportedError, "no route /server_info .*VLLM_SERVER_DEV_MODE=1"),
        ({"/server_info": configured(None)}, EngineError, "no weightsync plug-in .*backend is None"),
        ({"/server_info": configured("nccl")}, EngineError, "no weightsync plug-in .*backend is 'nccl'"),
        ({"/server_info": (200, "{}")}, EngineError, "no weightsync plug-in"),
        ({"/server_info": configured(api_servers=2)}, UnsupportedError, "2 API servers .*--api-server-count 1"),
        ({"/collective_rpc": (200, json.dumps({"results": [UNBOUND]}))}, UnsupportedError, r"layers\.0\.q_proj"),
        (
            {"/collective_rpc": (200, '{"results": [{"error": "no file"}]}')},
            EngineError,
            "cannot take the adapter policy-1-ab: no file",
        ),
        (
            {"/collective_rpc": (200, '{"results": []}')},
            EngineError,
            "cannot take the adapter policy-1-ab: no worker answers",
        ),
        ({"/collective_rpc": (200, '{"results": ["?"]}')}, ProtocolError, "the peer sent no list"),
        ({"/collective_rpc": (200, "{}")}, ProtocolError, "the peer sent no list"),
    ],
)
def test_http_adapters_whose_modules_are_not_proven_are_not_loaded(server, replies, error, words):
    server.replies = WITH_ADAPTERS | replies
    with pytest.raises(error, match=words):
        http_engine(server.url).load_adapter(ADAPTER)
    assert not [row for row in server.requests if "load" in row[1]]


def test_http_asks_the_worker_extension_too_and_for_the_configuration_once(server):
    server.replies = WITH_ADAPTERS | {
        "/server_info": configured(None, "weightsync.vllm.extension.WeightSyncWorkerExtension"),
        "/v1/models": listed((ADAPTER[0], ADAPTER[2])),
    }
    engine = http_engine(server.url)
    for _ in range(2):
        engine.load_adapter(ADAPTER)
    assert [row[1] for row in server.requests].count("/server_info?config_format=json") == 1


def test_http_adapters_in_use_are_those_of_the_newest_sample(server):
    engine = http_engine(server.url)
    family = "# HELP vllm:lora_requests_info Running stats on lora requests.\n# TYPE vllm:lora_requests_info gauge\n"
    sample = 'vllm:lora_requests_info{max_lora="1",running_lora_adapters="%s",waiting_lora_adapters="%s"} %s\n'
    for samples, expected in [
        ([], set()),
        ([("a", "", "1.7638e+09"), ("b,c", "d", "1.76380002e+09"), ("", "", "1.76380001e+09")], {"b", "c", "d"}),
        ([("a", "", "1.7638e+09"), ("", "", "1.76380001e+09")], set()),
    ]:
        server.replies["/metrics"] = (200, family + "".join(sample % row for row in samples))
        assert engine.adapters_in_use() == expected
    server.replies["/metrics"] = (200, "python_info 1.0\n")
    with pytest.raises(
        EngineError, match=r"--enable-lora, and without --disable-log-stats or PROMETHEUS_MULTIPROC_DIR"
    ):
        engine.adapters_in_use()


def test_a_server_that_does_not_answer_runs_into_the_deadline(server):
    release = threading.Event()
    server.instead_of_answering = lambda: release.wait(10)
    engine = http_engine(server.url, timeout_s=0.3)
    begin = time.monotonic()
    with pytest.raises(SyncTimeoutError, match=r"no answer to /start_weight_update within 0\.3 s") as raised:
        engine.start()
    assert time.monotonic() - begin < 8
    assert raised.value.waiting_for == [engine.name]
    assert not engine.is_alive()
    release.set()


def test_http_works_for_who_watches_what_is_said(server, monkeypatch, capsys):
    monkeypatch.setattr(http.client.HTTPConnection, "debuglevel", 1)
    http_engine(server.url).start()
    assert "/start_weight_update" in capsys.readouterr().out


@pytest.mark.parametrize("whole", ["HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"])
def test_a_server_that_drips_runs_into_the_deadline(whole):
    ended = threading.Event()

    def drip() -> None:
        one, _ = listening.accept()
        with one, contextlib.suppress(OSError):
            one.recv(10_000)
            one.sendall(whole.encode())
            for _ in range(160):
                one.sendall(b"x")
                if ended.wait(0.05):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        dripping = threading.Thread(target=drip)
        dripping.start()
        begin = time.monotonic()
        with pytest.raises(SyncTimeoutError, match=r"no answer to /start_weight_update within 0\.3 s"):
            http_engine(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.3).start()
        assert time.monotonic() - begin < 5
        ended.set()
        dripping.join(10)


def test_a_server_that_dies_in_a_call_is_unreachable(server):
    server.instead_of_answering = lambda: None  # the connection closes without a word
    engine = http_engine(server.url)
    with pytest.raises(EngineUnreachableError, match="it may or may not have run the call"):
        engine.update({})
    assert len(server.requests) == 1
    assert not engine.is_alive()


def test_nobody_at_the_address():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        engine = http_engine(f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(EngineUnreachableError, match=r"nothing answers there.*refused"):
            engine.init({})
        assert not engine.is_alive()
    with pytest.raises(EngineUnreachableError, match="nothing answers there"):
        http_engine("http://no-such-host.invalid:8000").init({})


def test_a_server_that_does_not_speak_https(server):
    with pytest.raises(EngineUnreachableError, match="does not speak https"):
        http_engine(server.url.replace("http:", "https:")).init({})


# ---------------------------------------------------------------------------------------------------------------
# LLM


def config(backend: str | None = "weightsync", extension: str = "", **parallel: Any) -> SimpleNamespace:
    return SimpleNamespace(
        lora_config=SimpleNamespace(max_lora_rank=8),
        weight_transfer_config=SimpleNamespace(backend=backend) if backend else None,
        parallel_config=SimpleNamespace(worker_extension_cls=extension, **parallel),
    )


class Adapters:
    """What the engine inside of an `LLM` does with adapters. One of its two requests is for policy-1-ab."""

    def __init__(self) -> None:
        self.loaded: dict[int, Any] = {}
        self.takes = True
        asked = [SimpleNamespace(lora_name=name) for name in ("policy-1-ab", None)]
        self.output_processor = SimpleNamespace(request_states=dict(enumerate(asked)))

    def add_lora(self, request):
        self.loaded[request.lora_int_id] = (request.lora_name, request.lora_path)
        return self.takes

    def remove_lora(self, number):
        return self.loaded.pop(number, None) is not None

    def list_loras(self):
        return set(self.loaded)


def change_adapters(engine: Any) -> None:
    assert isinstance(engine, AdapterEngine)
    assert engine.max_lora_rank() == 8
    assert not engine.has_adapter(ADAPTER)
    engine.load_adapter(ADAPTER)
    assert engine.has_adapter(ADAPTER)
    assert engine.adapters_in_use() == {"policy-1-ab"}
    engine.unload_adapter(ADAPTER)
    engine.unload_adapter(ADAPTER)
    assert not engine.has_adapter(ADAPTER)


class LLM:
    """What `connect` takes for vLLM's `LLM` before 0.27. Records its calls; `on_rpc` runs inside `collective_rpc`."""

    __module__ = "vllm.entrypoints.llm"

    def __init__(self, vllm_config: SimpleNamespace) -> None:
        self.calls: list[Any] = []
        self.threads: set[threading.Thread] = set()
        self.on_rpc: Any = lambda method, args: None
        self.reset_answer = True
        self.adapters = Adapters()
        self.llm_engine = SimpleNamespace(
            **{name: getattr(self.adapters, name) for name in ("add_lora", "remove_lora", "list_loras")},
            output_processor=self.adapters.output_processor,
            vllm_config=vllm_config,
            engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=False)),
            reset_encoder_cache=lambda: self.calls.append(("reset_encoder_cache",)),
            has_unfinished_requests=lambda: bool(self.adapters.output_processor.request_states),
        )

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append((method, *args))
        self.threads.add(threading.current_thread())
        return [self.on_rpc(method, args) or {}]

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.calls.append(("reset_prefix_cache", reset_running_requests, reset_connector))
        if reset_connector and not hasattr(self.llm_engine.vllm_config, "kv_transfer_config"):
            return False  # as vLLM before 0.23
        return self.reset_answer


class VersionedLLM(LLM):
    """The same from 0.27 on."""

    def update_weight_version(self, new_version):
        self.calls.append(("update_weight_version", new_version))

    def get_weight_version(self):
        return self.calls[-1][1]


def fake_llm(vllm_config: SimpleNamespace | None = None) -> VersionedLLM:
    return VersionedLLM(vllm_config or config())


def push_once(engine: Any) -> None:
    engine.pause("wait")
    engine.init({"a": 1})
    engine.start()
    engine.update({"b": 2})
    engine.finish("5")
    engine.reset_caches()
    engine.resume()


TO_THE_PLUG_IN = ["init_weight_transfer_engine", "start_weight_update"], ["update_weights", "finish_weight_update"]
TO_THE_EXTENSION = ["weightsync_init"], ["weightsync_update"]


@pytest.mark.parametrize(
    ("vllm_config", "methods"),
    [
        (config("weightsync", "weightsync.vllm.extension.WeightSyncWorkerExtension"), TO_THE_PLUG_IN),
        (config(None, "weightsync.vllm.extension.WeightSyncWorkerExtension"), TO_THE_EXTENSION),
        (config("nccl", "my.own.ExtensionThatMixesOursIn"), TO_THE_EXTENSION),
    ],
)
def test_llm_calls_its_workers_in_a_thread_of_its_own(vllm_config, methods):
    llm = fake_llm(vllm_config)
    (engine,) = connect(llm, 5.0)
    push_once(engine)
    forgets = ["reset_prefix_cache", "reset_encoder_cache"]
    first, then = methods
    then = [*then, "update_weight_version"]
    assert [call[0] for call in llm.calls] == first + then + forgets
    expected = [(first[0], {"a": 1}), (then[0], {"b": 2}), ("reset_prefix_cache", True, False), (then[-1], "5")]
    assert all(call in llm.calls for call in expected)
    assert threading.current_thread() not in llm.threads
    engine.set_version("6")
    assert engine.version() == "6"


def test_an_llm_forgets_when_its_update_has_returned():
    llm = fake_llm()
    in_update, returning = threading.Event(), threading.Event()

    def on_rpc(method: str, args: Any) -> None:
        if method == "update_weights":
            in_update.set()
            assert returning.wait(30.0)

    llm.on_rpc = on_rpc
    (engine,) = connect(llm, 30.0)
    engine.start()
    threads = [threading.Thread(target=call, daemon=True) for call in (lambda: engine.update({}), engine.reset_caches)]
    threads[0].start()
    assert in_update.wait(30.0)
    threads[1].start()
    threads[1].join(0.3)
    assert ("reset_prefix_cache", True, False) not in llm.calls
    returning.set()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert ("reset_prefix_cache", True, False) in llm.calls
    engine.reset_caches()  # asked for outside of any push
    assert llm.calls.count(("reset_prefix_cache", True, False)) == 2


class EngineCoreRequestType:
    UTILITY = "a call"


class SyncMPClient:
    """vLLM's client of an engine core in a process of its own. A test answers the calls."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.utility_results: dict[int, Future[Any]] = {}
        self.requests: dict[int, Any] = {}
        self.sent: list[tuple[Any, ...]] = []

    def _send_input(self, kind, request):
        if self.resources.engine_dead:
            raise RuntimeError("EngineCore encountered an issue")
        index, _, method, arguments = request
        assert (kind, index) == ("a call", 0)
        self.sent.append((method, *arguments))

    def answer(self, value: Any = None) -> None:
        """Answer the oldest call."""
        self.utility_results.pop(next(iter(self.utility_results))).set_result(value)


@pytest.fixture
def queued(request):
    """The client of an `LLM` with two requests, and its core. Each wait takes 0.5 s at most."""
    llm = fake_llm(request.param)
    llm.llm_engine.engine_core = core = SyncMPClient()
    core.requests = llm.adapters.output_processor.request_states
    (engine,) = connect(llm, 0.5)
    return engine, core


PLUG_IN = config("weightsync")
EXTENSION = config(None, "weightsync.vllm.extension.WeightSyncWorkerExtension")


@pytest.mark.parametrize("queued", [PLUG_IN], indirect=True)
def test_a_core_gets_all_calls_of_a_push_before_it_has_answered_one(queued, monkeypatch):
    monkeypatch.setattr(SyncMPClient, "set_weight_version", None, raising=False)
    engine, core = queued
    assert engine.takes_calls_ahead()
    waits = engine.send_update("a mark", {"session": "s"})
    finish = engine.send_finish()
    assert core.sent == [
        ("set_weight_version", "a mark"),
        ("collective_rpc", "start_weight_update", None, (), None),
        ("collective_rpc", "update_weights", None, ({"session": "s"},), None),
        ("collective_rpc", "finish_weight_update", None, (), None),
        ("reset_prefix_cache", True, False),
        ("reset_encoder_cache",),
    ]
    with pytest.raises(SyncTimeoutError, match=r"start_weight_update could not start within 0\.5 s: update_weights"):
        engine.start()  # one thread at a time sends
    for wait in waits:
        core.answer()
        wait()
    with pytest.raises(SyncTimeoutError):
        engine.start()
    for answer in (None, False, None):
        core.answer(answer)
    finish[0]()
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        finish[1]()
    engine.start()


CONNECTED = config("weightsync")
CONNECTED.kv_transfer_config = object()


@pytest.mark.parametrize(
    ("queued", "requests", "is_ahead"),
    [(PLUG_IN, 0, True), (PLUG_IN, 1, False), (EXTENSION, 0, True), (EXTENSION, 1, False), (CONNECTED, 0, False)],
    indirect=["queued"],
)
def test_a_core_resets_before_the_update_only_if_nothing_can_fill_its_caches(queued, requests, is_ahead):
    engine, core = queued
    connected = not (requests or is_ahead)
    resets = [("reset_prefix_cache", True, connected), ("reset_encoder_cache",)]
    core.requests.clear()
    core.requests |= dict.fromkeys(range(requests))
    *_, update = engine.send_update(None, {})
    at = len(core.sent)
    assert (core.sent[-3:-1] == resets) is is_ahead
    assert core.sent[-1][1] in ("update_weights", "weightsync_update")
    waits = engine.send_finish()
    assert (core.sent[-2:] == resets and at < len(core.sent) - 1) is not is_ahead
    while core.utility_results:
        core.answer()
    for wait in (update, *waits):
        wait()
    engine.send_update(None, {})  # the turn is over


@pytest.mark.parametrize("queued", [PLUG_IN], indirect=True)
def test_a_core_resets_behind_an_update_that_is_called(queued):
    engine, core = queued
    core.requests.clear()
    engine.send_update(None, {})
    engine.send_finish()
    while core.utility_results:
        core.answer()
    engine.start()  # as the first push of another connection does, and each push with pause="caller"
    engine.send_finish()
    assert core.sent[-2:] == [("reset_prefix_cache", True, False), ("reset_encoder_cache",)]


@pytest.mark.parametrize("queued", [PLUG_IN], indirect=True)
def test_a_reset_ahead_that_fails_is_told_before_the_update(queued):
    engine, core = queued
    core.requests.clear()
    _, reset, *_ = engine.send_update(None, {})
    core.answer()
    core.answer(False)
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        reset()


@pytest.mark.parametrize("queued", [EXTENSION], indirect=True)
def test_an_update_of_the_extension_is_one_call_and_ends_with_the_engine(queued):
    engine, core = queued
    (update,) = engine.send_update(None, {})
    assert core.sent == [("collective_rpc", "weightsync_update", None, ({},), None)]
    core.resources.engine_dead = True
    with pytest.raises(EngineUnreachableError, match="the engine died in weightsync_update"):
        update()
    with pytest.raises(EngineUnreachableError):
        engine.send_finish()


def test_an_llm_of_another_kind_takes_no_calls_ahead(monkeypatch):
    llm = fake_llm()
    (engine,) = connect(llm, 5.0)
    assert not engine.takes_calls_ahead()
    llm.llm_engine.engine_core = SyncMPClient()
    assert not engine.takes_calls_ahead()  # it has versions, and the client stamps none
    monkeypatch.setattr(SyncMPClient, "set_weight_version", None, raising=False)
    assert engine.takes_calls_ahead()


@pytest.mark.parametrize(("multimodal", "encoder", "resets"), [(False, False, 0), (True, False, 1), (False, True, 1)])
def test_an_engine_without_encoders_is_not_asked_to_forget_what_they_made(multimodal, encoder, resets):
    kinds = SimpleNamespace(is_multimodal_model=multimodal, is_encoder_decoder=encoder)
    llm = fake_llm(SimpleNamespace(**vars(config()), model_config=kinds))
    (engine,) = connect(llm, 5.0)
    push_once(engine)
    assert llm.calls.count(("reset_encoder_cache",)) == resets


@pytest.mark.filterwarnings("ignore")
def test_llm_changes_adapters():
    llm = fake_llm()
    (engine,) = connect(llm, 60.0)  # the first call imports vLLM
    change_adapters(engine)
    asked = [call for call in llm.calls if call[0] == "weightsync_adapter_modules"]
    assert asked == [("weightsync_adapter_modules", ADAPTER.path, number) for number in (0, ADAPTER.id)]
    llm.adapters.takes = False
    with pytest.raises(EngineError, match="have not loaded the adapter policy-1-ab"):
        engine.load_adapter(ADAPTER)
    llm.on_rpc = lambda method, args: UNBOUND if args[1] == ADAPTER.id else {}
    llm.adapters.takes = True
    with pytest.raises(UnsupportedError, match=r"would have no effect: layers\.0\.q_proj\. The engine binds"):
        engine.load_adapter(ADAPTER)
    without = config()
    without.lora_config = None
    with pytest.raises(EngineError, match="no adapters; start it with enable_lora=True"):
        connect(fake_llm(without), 5.0)[0].max_lora_rank()
    with pytest.raises(EngineError, match="no weightsync plug-in"):  # of whose workers nothing can be asked
        connect(fake_llm(config(None)), 5.0)[0].load_adapter(ADAPTER)
    here = fake_llm(config(None))
    here.llm_engine.engine_core = None
    connect(here, 5.0)[0].load_adapter(ADAPTER)
    assert [call[0] for call in here.calls] == [ask_worker] * 2


def test_llm_older_than_versions_has_none():
    llm = LLM(config())
    (engine,) = connect(llm, 5.0)
    engine.finish("5")
    engine.set_version("6")
    assert engine.version() is None
    assert llm.calls == [("finish_weight_update",)]


@pytest.mark.parametrize(("backend", "words"), [(None, "is not configured"), ("nccl", "backend is 'nccl'")])
def test_llm_without_the_plug_in_is_not_touched(backend, words):
    llm = fake_llm(config(backend))
    with pytest.raises(EngineError, match=f"no weightsync plug-in .*{words}.*weight_transfer_config="):
        connect(llm, 5.0)[0].init({})
    assert llm.calls == []


def parts_of_engines(count: int, workers: int) -> list[LlmEngine]:
    """The `LLM`s of as many ranks, under external_launcher, of engines with that many workers."""
    found = []
    for rank in range(count):
        of_a_rank = config()
        launched = {"distributed_executor_backend": "external_launcher", "world_size": workers, "rank": rank}
        vars(of_a_rank.parallel_config).update(launched)
        found.append(LlmEngine(fake_llm(of_a_rank), name=f"part {rank}", timeout_s=5.0))
    return found


def test_llms_that_are_parts_of_engines_are_called_as_one():
    parts = parts_of_engines(4, workers=2)
    one, other = join(parts)
    assert (one.name, other.name) == ("part 0 and its parts in 1 other ranks", "part 2 and its parts in 1 other ranks")
    other.init({})
    assert [len(part._engine.calls) for part in parts] == [0, 0, 1, 1]
    other.set_version("7")
    parts[3].set_version(POISONED)
    assert other.version() == POISONED
    assert one.is_alive()

    def fail(method, args):
        raise RuntimeError("CUDA error: invalid argument")

    parts[3]._engine.on_rpc = fail
    with pytest.raises(EngineError, match="invalid argument") as raised:
        other.update({})
    assert raised.value.who == "part 3"


def test_llms_that_are_no_parts_stay_as_they_are():
    engines = parts_of_engines(2, workers=1)
    assert join(engines) == engines


def test_engine_whose_parts_are_not_all_there_is_refused():
    with pytest.raises(ConfigError, match=r"in 2 ranks .external_launcher., and 1 of these ranks gave their LLM"):
        join(parts_of_engines(3, workers=2))


def test_llm_workers_without_the_extension_have_no_plug_in():
    llm = fake_llm(config(None, "somebody.elses.Extension"))

    def refuse(method, args):
        raise NotImplementedError(f"Method {method!r} is not implemented.")

    llm.on_rpc = refuse
    with pytest.raises(EngineError, match="no weightsync plug-in"):
        connect(llm, 5.0)[0].init({})


def test_llm_errors_keep_their_words_and_ours_their_class():
    llm = fake_llm()
    (engine,) = connect(llm, 5.0)

    def fail(method, args):
        raise RuntimeError("CUDA error: invalid argument")

    def miss(method, args):
        raise ManifestError("one tensor is missing", missing=["q"], who="engine worker tp=0")

    llm.on_rpc = fail
    with pytest.raises(EngineError, match="update_weights: CUDA error: invalid argument") as raised:
        engine.update({})
    assert raised.value.who == "engine 0 (LLM in this process)"
    llm.on_rpc = miss
    with pytest.raises(ManifestError) as ours:
        engine.update({})
    assert (ours.value.missing, ours.value.who) == (["q"], "engine worker tp=0")
    llm.reset_answer = False
    with pytest.raises(EngineError, match="could not reset its prefix cache"):
        engine.reset_caches()


def test_llm_that_hangs_runs_into_the_deadline_and_is_not_entered_twice():
    llm = fake_llm()
    (engine,) = connect(llm, 0.2)
    release = threading.Event()
    llm.on_rpc = lambda method, args: release.wait(10) if method == "start_weight_update" else None
    with pytest.raises(SyncTimeoutError, match="no answer to start_weight_update") as raised:
        engine.start()
    assert raised.value.waiting_for == ["engine 0 (LLM in this process)"]
    with pytest.raises(SyncTimeoutError, match=r"finish_weight_update could not start.*start_weight_update"):
        engine.finish("1")
    assert [call[0] for call in llm.calls] == ["start_weight_update"]
    release.set()
    engine.timeout_s = 30.0
    engine.update({})
    assert [call[0] for call in llm.calls] == ["start_weight_update", "update_weights"]


def test_an_update_may_last_longer_than_a_single_wait():
    llm = fake_llm()
    (engine,) = connect(llm, 0.1)
    llm.on_rpc = lambda method, args: time.sleep(0.5)
    engine.update({})


def test_llm_whose_process_dies_in_a_call_is_unreachable_at_once():
    llm = fake_llm()
    (engine,) = connect(llm, 30.0)
    assert engine.is_alive()
    release = threading.Event()

    def die(method, args):
        llm.llm_engine.engine_core.resources.engine_dead = True
        release.wait(10)

    llm.on_rpc = die
    begin = time.monotonic()
    with pytest.raises(EngineUnreachableError, match="died in update_weights"):
        engine.update({})
    with pytest.raises(EngineUnreachableError, match="died before finish_weight_update"):
        engine.finish(None)
    assert time.monotonic() - begin < 5
    assert not engine.is_alive()
    release.set()


def test_an_llm_is_entered_by_one_call_at_a_time():
    llm = fake_llm()
    (engine,) = connect(llm, 5.0)
    inside, together = [], []

    def stay(method, args):
        inside.append(method)
        time.sleep(0.5)
        together.append(len(inside))
        inside.remove(method)

    llm.on_rpc = stay
    calls = [threading.Thread(target=call) for call in (engine.start, lambda: engine.finish(None))]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert together == [1, 1]


# ---------------------------------------------------------------------------------------------------------------
# AsyncLLM


class AsyncLLM:
    """What `connect` takes for vLLM's `AsyncLLM`. Records its calls and the loops they ran in."""

    __module__ = "vllm.v1.engine.async_llm"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()
        self.errored = False
        self.memory_sleeps = False
        self.hang = False
        self.output_handler: Any = None
        self.adapters = Adapters()
        self.output_processor = self.adapters.output_processor
        self.vllm_config = config()
        self.engine_core: Any = None

    async def record(self, *call):
        self.calls.append(call)
        self.loops.add(asyncio.get_running_loop())
        if self.hang:
            await asyncio.sleep(60)
        return True

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        await self.record(method, *args)
        return [{}]

    async def sleep(self, level=1, mode="abort"):
        await self.record("sleep", level, mode)

    async def wake_up(self, tags=None):
        await self.record("wake_up", tags)
        return not self.memory_sleeps

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        await self.record("pause", mode, clear_cache)

    async def resume_generation(self):
        await self.record("resume")

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return await self.record("reset_prefix_cache", reset_running_requests, reset_connector)

    async def reset_encoder_cache(self):
        await self.record("reset_encoder_cache")

    async def update_weight_version(self, new_version):
        await self.record("update_weight_version", new_version)

    async def add_lora(self, lora_request):
        return self.adapters.add_lora(lora_request)

    async def remove_lora(self, lora_id):
        return self.adapters.remove_lora(lora_id)

    async def list_loras(self):
        return self.adapters.list_loras()


@contextlib.contextmanager
def loop_in_a_thread():
    """An event loop that runs in a thread of its own."""

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def serve(llm: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Give a fake AsyncLLM the output handler that the real one has in its loop."""

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.sleep(60))

    llm.output_handler = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)


def test_async_calls_run_in_the_loop_of_the_engine():
    llm = AsyncLLM()
    (engine,) = connect(llm, 5.0)
    with loop_in_a_thread() as loop:
        serve(llm, loop)
        push_once(engine)
        assert llm.loops == {loop}
    assert llm.calls == [
        ("sleep", 0, "wait"),
        ("reset_prefix_cache", True, False),
        ("init_weight_transfer_engine", {"a": 1}),
        ("start_weight_update",),
        ("update_weights", {"b": 2}),
        ("finish_weight_update",),
        ("update_weight_version", "5"),
        ("reset_prefix_cache", True, False),
        ("reset_encoder_cache",),
        ("wake_up", ["scheduling"]),
    ]
    assert engine.version() is None  # this one cannot tell


class LLMOfSeveral(LLM):
    """One of several `LLM`s, each the core of a process, that step together."""

    def sleep(self, level=1, mode="abort"):
        self.calls.append(("sleep", level, mode))

    def wake_up(self, tags=None):
        self.calls.append(("wake_up", tags))


def test_the_core_of_an_llm_that_steps_with_others_is_paused():
    llm = LLMOfSeveral(config(data_parallel_size=2))
    (engine,) = connect(llm, 5.0)
    push_once(engine)
    pause = [("sleep", 0, "wait"), ("reset_prefix_cache", True, False)]
    held = [("sleep", 0, "keep"), ("reset_prefix_cache", True, False), ("init_weight_transfer_engine", {"a": 1})]
    assert llm.calls[:6] == [*pause, *held, ("wake_up", ["scheduling"])]
    assert llm.calls[-1] == ("wake_up", ["scheduling"])


def test_cores_that_step_together_are_held_while_they_meet_the_trainer():
    llm = AsyncLLM()
    llm.vllm_config = config(data_parallel_size=2)
    llm.engine_core = SimpleNamespace(core_engines=[b"0", b"1"])
    (engine,) = connect(llm, 5.0)
    with loop_in_a_thread() as loop:
        serve(llm, loop)
        engine.init({"a": 1})
    assert llm.calls == [
        ("sleep", 0, "keep"),
        ("reset_prefix_cache", True, False),
        ("init_weight_transfer_engine", {"a": 1, "cores": 2}),
        ("wake_up", ["scheduling"]),
    ]


@pytest.mark.filterwarnings("ignore")
def test_async_engine_changes_adapters():
    llm = AsyncLLM()
    with loop_in_a_thread() as loop:
        serve(llm, loop)
        change_adapters(connect(llm, 60.0)[0])


def test_async_engine_must_not_be_called_from_its_own_loop():
    async def main():
        llm = AsyncLLM()  # without an output handler yet, so the loop is the one that connect ran in
        (engine,) = connect(llm, 5.0)
        with pytest.raises(ConfigError, match="push_async"):
            engine.start()
        assert llm.calls == []
        await asyncio.to_thread(engine.start)
        assert llm.calls == [("start_weight_update",)]

    asyncio.run(main())


def test_async_engine_may_be_called_from_another_loop():
    async def main():
        engine.start()

    llm = AsyncLLM()
    (engine,) = connect(llm, 5.0)
    with loop_in_a_thread() as loop:
        serve(llm, loop)
        asyncio.run(main())
    assert llm.calls == [("start_weight_update",)]


def test_async_engine_outside_of_any_loop_is_refused():
    with pytest.raises(ConfigError, match="has no event loop yet"):
        connect(AsyncLLM(), 5.0)[0].start()


def test_async_engine_whose_loop_has_ended_is_unreachable():
    async def make() -> Any:
        return connect(AsyncLLM(), 5.0)[0]

    engine = asyncio.run(make())
    with pytest.raises(EngineUnreachableError, match=r"event loop is not running"):
        engine.start()


def test_async_engine_that_hangs_or_dies_ends_the_wait():
    llm = AsyncLLM()
    (engine,) = connect(llm, 0.3)
    with loop_in_a_thread() as loop:
        serve(llm, loop)
        llm.hang = True
        with pytest.raises(SyncTimeoutError, match=r"no answer to start_weight_update within 0\.3 s"):
            engine.start()
        engine.timeout_s = 30.0
        assert engine.is_alive()
        begin = time.monotonic()
        threading.Timer(0.2, setattr, (llm, "errored", True)).start()
        with pytest.raises(EngineUnreachableError, match="died in pause"):
            engine.pause("keep")
        assert time.monotonic() - begin < 5
        assert not engine.is_alive()


# ---------------------------------------------------------------------------------------------------------------
# Ray


class LlmActor:
    """An actor of a user's own class that holds an `LLM`, and passes none of its methods on."""

    def __init__(self, backend: str | None) -> None:
        self.llm = fake_llm(config(backend))
        self.llm.on_rpc = self.on_rpc

    def on_rpc(self, method, args):
        if method == "finish_weight_update":
            time.sleep(5)
        if args == ({"bad": True},):
            raise ManifestError("one tensor is missing", missing=["q"])
        if args == ({"bad": 2},):
            raise RuntimeError("worker 0 fell over")

    def generate(self, seconds):
        time.sleep(seconds)

    def calls(self):
        return self.llm.calls


class AsyncActor:
    """An actor of a user's own class that holds an `AsyncLLM`, and whose methods have other arguments than vLLM's."""

    def __init__(self) -> None:
        self.engine = AsyncLLM()
        self.engine.output_handler = asyncio.get_running_loop().create_task(asyncio.sleep(600))

    async def collective_rpc(self, unlike_vllm): ...

    async def calls(self):
        return self.engine.calls

    async def let_die(self):
        self.engine.hang = True
        asyncio.get_running_loop().call_later(0.2, setattr, self.engine, "errored", True)


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        here = Path(__file__).parent
        folders = (here, here.parent / "support", here.parent.parent)
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
        with ray_workers.started_here():
            ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False)
            yield ray
            ray.shutdown()


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore")
def test_ray_actors_are_called_like_what_they_hold(ray):
    actor = ray.remote(num_cpus=0)(LlmActor).remote("weightsync")
    async_actor = ray.remote(num_cpus=0)(AsyncActor).remote()
    engine, async_engine = connect([actor, async_actor], 120.0)
    assert isinstance(engine, RayEngine)
    assert engine.name.startswith("engine 0 (Actor(LlmActor")
    assert engine.host == async_engine.host == "127.0.0.1"
    push_once(engine)
    assert ray.get(actor.calls.remote()) == [
        ("reset_prefix_cache", True, False),
        ("init_weight_transfer_engine", {"a": 1}),
        ("start_weight_update",),
        ("update_weights", {"b": 2}),
        ("finish_weight_update",),
        ("update_weight_version", "5"),
        ("reset_prefix_cache", True, False),
        ("reset_encoder_cache",),
    ]
    push_once(async_engine)
    calls = ray.get(async_actor.calls.remote())
    assert [call[0] for call in calls] == [
        "sleep",
        "reset_prefix_cache",
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
        "reset_prefix_cache",
        "reset_encoder_cache",
        "wake_up",
    ]
    engine.set_version("6")
    assert (engine.version(), async_engine.version()) == ("6", None)  # as the stand-ins say
    change_adapters(engine)
    change_adapters(async_engine)

    # Failures keep their words; ours keep their class.
    with pytest.raises(EngineError, match="update_weights: worker 0 fell over"):
        engine.update({"bad": 2})
    with pytest.raises(ManifestError) as ours:
        engine.update({"bad": True})
    assert ours.value.missing == ["q"]
    assert ours.value.who == engine.name

    # The pause of an LLM ends when what its actor does is done.
    busy = actor.generate.remote(1.5)
    engine.pause("keep")
    assert ray.wait([busy], timeout=0)[0]

    # A busy actor passes its deadline and may live; a killed one is gone.
    engine.timeout_s = 0.5
    with pytest.raises(SyncTimeoutError, match=r"no answer to finish_weight_update within 0\.5 s"):
        engine.finish(None)
    assert engine.is_alive() is None
    engine.timeout_s = 120.0
    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayActorError):  # it returns before the actor is dead
        while True:
            ray.get(actor.calls.remote())
    with pytest.raises(EngineUnreachableError, match="the actor is gone"):
        engine.start()
    assert not engine.is_alive()
    ray.get(async_actor.let_die.remote())
    with pytest.raises(EngineUnreachableError, match="the engine died in a call"):
        async_engine.start()
    assert not async_engine.is_alive()
    ray.kill(async_actor)


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore")
def test_ray_actors_that_cannot_serve_are_refused(ray):
    bare = ray.remote(num_cpus=0)(PlugInEngine).remote()
    (engine,) = connect(bare, 120.0)
    with pytest.raises(ConfigError, match="has no LLM or AsyncLLM in an attribute"):
        engine.init({})
    without_plug_in = ray.remote(num_cpus=0)(LlmActor).remote("nccl")
    (engine,) = connect(without_plug_in, 120.0)
    with pytest.raises(EngineError, match=r"no weightsync plug-in .*'nccl'"):
        engine.init({})
    assert ray.get(without_plug_in.calls.remote()) == []
    for actor in (bare, without_plug_in):
        ray.kill(actor)
