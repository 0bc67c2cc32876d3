"""ASGI middleware of a vLLM server: it ends calls of the engine's core when the engine has died.

vLLM ends the engine's core at a SIGTERM, and its server then waits for the answers to all requests. A dead core never
answers a call. Without this middleware a server that gets a SIGTERM during a push therefore does not end.

`weightsync serve` adds this middleware. Any other server takes it by an option:
`--middleware weightsync.vllm.shutdown.Shutdown`.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.responses import PlainTextResponse

from weightsync.net import timeouts

_CALLS = re.compile(
    r"/(collective_rpc|is_\w+|load_lora_adapter|pause|re(lease|set)_\w+_(cache|memory)|resume|sleep|(start|stop)_profile|"
    r"wake_up|\w*weight\w*)"
)
"""Routes that wait for a call of the engine's core. Those for generation are not among them: vLLM ends these."""
_UNAVAILABLE = 503
_BODY = "the engine has died, or its server is ending"


class Shutdown:
    """Middleware that passes on requests, and answers calls of the core with status 503 once the engine has died."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not _CALLS.fullmatch(scope["path"], scope["path"].rfind("/")):
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        call = asyncio.ensure_future(self._app(scope, receive, send))
        try:
            while not (await asyncio.wait([call], timeout=timeouts.CALL_POLL_S))[0]:
                if engine.errored:
                    call.cancel()
            if not call.cancelled():
                call.result()
                return
        finally:
            call.cancel()
        await PlainTextResponse(_BODY, _UNAVAILABLE)(scope, receive, send)
