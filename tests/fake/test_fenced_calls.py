"""Calls by HTTP that reach an engine which does not expect them: through a load balancer, or from a fenced trainer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from fake_server import Balancer, FakeServer
from recorders import RecordedEngine

from weightsync import EngineError, FencedError, WeightSync
from weightsync.fleet import connect
from weightsync.net import fence
from weightsync.net.runtime import spawn
from weightsync.vllm.fence import Fence

TIMEOUT_S = 20.0
BALANCER = r'the address is a load balancer.* engine=\["http://first'


def serve(stack: ExitStack, server: Any) -> Any:
    spawn("server", server.serve_forever)
    return stack.enter_context(closing(server))


@pytest.fixture(params=["fenced", "plain"])
def servers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with ExitStack() as stack:
        made = []
        for number in range(2):
            path = str(tmp_path / f"sessions-{number}") if request.param == "fenced" else None
            if path:
                monkeypatch.setenv(fence.VARIABLE, path)
            engine = RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(1)))
            made.append(serve(stack, FakeServer(engine, 0, path)))
        yield made


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def assert_untouched(servers: Any) -> None:
    for server in servers:
        engine = server.engine
        assert torch.equal(engine.hosts[0].live.embed.weight, cold(checkpoint(1)).embed.weight)
        assert engine.version() == "default"
        engine.hosts[0].check_before_answer()
        assert not is_paused(engine)


def is_paused(engine: RecordedEngine) -> bool:
    return [call for call in engine.calls if call in ("pause keep", "resume")][-1:] == ["pause keep"]


def test_two_engines_behind_one_address_are_refused_and_left_as_they_were(servers: Any) -> None:
    with ExitStack() as stack:
        balancer = serve(stack, Balancer(servers))
        with WeightSync("fsdp", "ipc", url(balancer), timeout_s=TIMEOUT_S) as sync:
            for _ in range(3):
                with pytest.raises(EngineError, match=BALANCER):
                    sync.push(trainer_model(checkpoint(2)))
        assert_untouched(servers)
        with WeightSync("fsdp", "ipc", [url(server) for server in servers], timeout_s=TIMEOUT_S) as sync:
            sync.push(trainer_model(checkpoint(2)))
        assert {server.engine.version() for server in servers} == {"1"}


@pytest.mark.parametrize("servers", ["fenced"], indirect=True)
@pytest.mark.parametrize("calls", range(4))
def test_an_engine_that_joins_behind_the_address_between_pushes_is_refused(servers: Any, calls: int) -> None:
    """The balancer brings any call of the second push to the new engine first."""
    with ExitStack() as stack:
        balancer = serve(stack, Balancer(servers[:1]))
        with WeightSync("fsdp", "ipc", url(balancer), timeout_s=TIMEOUT_S) as sync:
            sync.push(trainer_model(checkpoint(1)))
            ports = [server.server_port for server in servers]
            alone = iter([ports[0]] * calls)
            balancer.ports = iter(lambda: next(alone, 0) or ports.append(ports.pop(0)) or ports[0], 0)
            with pytest.raises(EngineError, match=BALANCER):
                sync.push(trainer_model(checkpoint(2)))
        first, second = (server.engine for server in servers)
        assert first.version() == "1"
        assert torch.equal(first.hosts[0].live.embed.weight, cold(checkpoint(1)).embed.weight)
        assert not is_paused(first)
        assert second.calls == []


@pytest.mark.parametrize("servers", ["fenced"], indirect=True)
def test_late_calls_of_a_trainer_that_has_lost_the_engine_are_refused(servers: Any) -> None:
    server = servers[0]
    with WeightSync("fsdp", "ipc", url(server), timeout_s=TIMEOUT_S) as first:
        first.push(trainer_model(checkpoint(2)))
        (late,) = first.engines.engines()
    with WeightSync("fsdp", "ipc", url(server), timeout_s=TIMEOUT_S) as second:
        second.push(trainer_model(checkpoint(3)))
        server.engine.heard()
        for call in (
            lambda: late.pause("keep"),
            lambda: late.start(),
            lambda: late.set_version("POISONED: a push is under way"),
            lambda: late.finish("9"),
            lambda: late.resume(),
            lambda: late.reset_caches(),
        ):
            with pytest.raises(FencedError, match="another trainer has taken over this engine"):
                call()
        assert late.is_alive()
        assert server.engine.heard() == ""
        assert server.engine.version() == "2"
        second.push(trainer_model(checkpoint(2)))


def test_calls_without_a_session_pass_a_fence(servers: Any) -> None:
    with WeightSync("fsdp", "ipc", url(servers[0]), timeout_s=TIMEOUT_S) as sync:
        sync.push(trainer_model(checkpoint(2)))
        (users,) = connect(url(servers[0]), TIMEOUT_S)
        users.pause("keep")
        users.resume()


def answer_of(path: str, headers: list[tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what a server with the middleware sends."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("the app's")

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setenv(fence.VARIABLE, path)
    asyncio.run(Fence(app)({"type": "http", "headers": headers}, None, send))
    return sent


def test_middleware_refuses_by_what_the_worker_has_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "sessions")
    of = {name: [(b"accept", b"*"), (b"weightsync-session", name.encode())] for name in ("old", "new", "other")}
    assert answer_of(path, [], monkeypatch) == ["the app's"]
    assert answer_of(path, of["old"], monkeypatch)[0]["status"] == 409, "no trainer has met this engine"
    for session in ("old", "new"):
        fence.note_session(path, session)
        assert answer_of(path, of[session], monkeypatch) == ["the app's"]
    assert answer_of("", of["old"], monkeypatch) == ["the app's"], "a server that was given no file"
    for session, kind in (("old", FencedError), ("other", EngineError)):
        start, body = answer_of(path, of[session], monkeypatch)
        assert start["status"] == fence.STATUS
        problem = fence.read_refusal(json.loads(body["body"]))
        assert type(problem) is kind
    for stranger in (None, [], {"error": "x"}, {"error": {"type": "FencedError", "message": "x"}}):
        assert fence.read_refusal(stranger) is None
    for number in range(200):
        fence.note_session(path, f"s{number}")
    assert len(Path(path).read_text()) < 1000
