"""A vLLM server goes on generating where the trainer that paused it was killed before the answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from weightsync.net.fence import HEADER
from weightsync.net.runtime import spawn
from weightsync.vllm.pauses import Pauses

PAUSE, RESUME = "/sleep?level=0&mode=keep", "/wake_up?tags=scheduling"
TRAINERS = f"{HEADER}: 1a"
WAIT_S = 20.0


class SlowServer:
    """A server whose engine pauses once the test lets it.

    calls: what the engine was asked for. left: how many callers did not wait. ended: how many requests are over.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left = self.ended = 0
        self.may_pause = False
        self._pauses = Pauses(self._answer)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._pauses(scope, receive, send)
        self.ended += 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        self.calls.append(f"{scope['path']}?{scope['query_string'].decode()}")
        if scope["path"] == "/sleep":
            leaving = asyncio.create_task(receive())
            while not self.may_pause:
                await asyncio.sleep(0.01)
                if leaving.done() and leaving.result()["type"] == "http.disconnect":
                    self.left, leaving = self.left + 1, asyncio.create_task(asyncio.sleep(WAIT_S, {"type": ""}))
            leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})


@contextmanager
def served(app: SlowServer) -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    spawn("server", lambda: asyncio.run(server.serve([listening])))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def asked(routes: list[str], header: str = TRAINERS, *, leaves: bool = True) -> list[str]:
    """Ask for these, one after the other. Return what the engine was asked for, when the first caller has gone."""
    app = SlowServer()
    with served(app) as port:
        callers = []
        for number, route in enumerate(routes, 1):
            callers.append(socket.create_connection(("127.0.0.1", port)))
            callers[-1].sendall(f"POST {route} HTTP/1.1\r\nHost: a\r\n{header}\r\nContent-Length: 0\r\n\r\n".encode())
            wait_until(lambda number=number: len(app.calls) == number)
        if leaves:
            callers[0].close()
            wait_until(lambda: app.left == 1)
        app.may_pause = True
        wait_until(lambda: app.ended == len(routes))
        for caller in callers:
            caller.close()
    return app.calls


def test_pause_of_a_trainer_that_has_gone_is_taken_back() -> None:
    assert asked([PAUSE]) == [PAUSE, RESUME]


@pytest.mark.parametrize(
    ("routes", "more"),
    [
        ([PAUSE], {"leaves": False}),
        ([PAUSE, PAUSE], {}),  # the second one is another trainer's, which writes
        (["/sleep?level=1"], {}),  # memory is no trainer's to wake
        ([PAUSE], {"header": "Accept: */*"}),  # a user's own
    ],
    ids=["it waits", "paused again", "sleep", "a user"],
)
def test_other_pauses_stay(routes: list[str], more: dict[str, Any]) -> None:
    assert asked(routes, **more) == routes
