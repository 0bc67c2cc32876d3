"""A vLLM server whose engine has died ends the calls of trainers, which the engine does not answer any more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm.shutdown import Shutdown

WAIT_S = 20.0
MOMENT_S = 0.3


class SlowApp:
    """A server's application that answers a call after `takes_s`. `has_ended`: whether a call was ended before."""

    def __init__(self, takes_s: float, fails: bool = False) -> None:
        self.takes_s, self.fails, self.has_ended = takes_s, fails, False
        self.engine = SimpleNamespace(errored=False)
        self.statuses: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.has_ended = True
            raise
        if self.fails:
            raise ZeroDivisionError
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, path: str, dies: bool) -> None:
        """Ask for this. `dies`: the engine dies meanwhile."""

        async def send(message: Any) -> None:
            self.statuses += [message["status"]] if "status" in message else []

        asyncio.get_running_loop().call_later(MOMENT_S / 3, setattr, self.engine, "errored", dies)
        scope = {"type": "http", "path": path, "app": SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))}
        await Shutdown(self)(scope, None, send)


CALLS = ["/update_weights", "/collective_rpc", "/prefix/sleep", "/v1/load_lora_adapter"]
CALLS += ["/is_paused", "/weight_info", "/update_weight_version", "/pause"]
CALLS += ["/reset_mm_cache", "/release_kv_cache_memory", "/start_profile", "/stop_profile"]


@pytest.mark.parametrize("path", CALLS)
def test_call_of_the_core_ends_when_the_engine_has_died(path: str) -> None:
    app = SlowApp(WAIT_S)
    asyncio.run(asyncio.wait_for(app.ask(path, dies=True), WAIT_S / 2))
    assert (app.statuses, app.has_ended) == ([503], True)


@pytest.mark.parametrize(("path", "dies"), [("/update_weights", False), ("/v1/completions", True), ("/health", True)])
def test_other_requests_are_answered_as_ever(path: str, dies: bool) -> None:
    app = SlowApp(MOMENT_S)
    asyncio.run(app.ask(path, dies))
    assert (app.statuses, app.has_ended) == ([200], False)


def test_error_of_a_call_and_its_cancellation_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(SlowApp(0.0, fails=True).ask("/update_weights", dies=False))
    app = SlowApp(WAIT_S)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(app.ask("/update_weights", dies=False), MOMENT_S))
    assert (app.statuses, app.has_ended) == ([], True)
