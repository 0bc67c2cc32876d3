"""ASGI middleware of a vLLM server: it resumes the engine if a trainer was killed before the engine had paused.

An engine may take seconds to pause. The trainer resumes it, and a dead trainer cannot. Nothing then marks the reason
for the engine's silence. Only the server sees the end of the trainer's connection.

`weightsync serve` adds this middleware. Any other server takes it by an option:
`--middleware weightsync.vllm.pauses.Pauses`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from weightsync.net.fence import HEADER

_HEADER = HEADER.lower().encode()
_PAUSE, _RESUME, _SCHEDULING = "/sleep", "/wake_up", b"tags=scheduling"


class Pauses:
    """Middleware that passes on each request, and undoes a trainer's pause if the trainer left before the answer.

    The pause stays if another pause has come since: it may be the next trainer's.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._count = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(_PAUSE):
            await self._app(scope, receive, send)
            return
        self._count += 1
        number = self._count
        query = parse_qs(scope["query_string"].decode("latin-1"))
        is_trainers = any(name == _HEADER for name, _ in scope["headers"]) and query.get("level") == ["0"]
        if await self._pass_on(scope, receive, send) and is_trainers and number == self._count:
            path = scope["path"].removesuffix(_PAUSE) + _RESUME
            again = {**scope, "path": path, "raw_path": path.encode(), "query_string": _SCHEDULING}
            await self._app(again, _no_body, _unanswered)

    async def _pass_on(self, scope: Any, receive: Any, send: Any) -> bool:
        """Pass a request on. Return whether its caller had disconnected before the answer began."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        is_gone = had_gone = False

        async def listen() -> None:
            nonlocal is_gone
            while not is_gone:
                message = await receive()
                is_gone = message["type"] == "http.disconnect"
                await messages.put(message)

        async def answer(message: Any) -> None:
            nonlocal had_gone
            if message["type"] == "http.response.start":
                had_gone = is_gone
            await send(message)

        listening = asyncio.create_task(listen())
        try:
            await self._app(scope, messages.get, answer)
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
        return had_gone


async def _no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _unanswered(message: Any) -> None:
    return
