"""The fence of a vLLM server: ASGI middleware to refuse the calls of trainers without a hold on the engine.

`weightsync serve` adds it. Any other server takes it as `--middleware weightsync.vllm.fence.Fence`.
`WEIGHTSYNC_FENCE` in the server's environment must then be the path of a file, in a folder that no other user may write
to.
"""

from __future__ import annotations

import os
from typing import Any

from starlette.responses import JSONResponse

from weightsync.net.fence import HEADER, STATUS, VARIABLE, refusal, write_refusal

_HEADER = HEADER.lower().encode()


class Fence:
    """Middleware that refuses a trainer's request without a hold on the engine, and passes on any other request.

    A session holds the engine until another trainer takes it over. The engine handles calls in the order of their
    arrival. A call passed on before the takeover is therefore done before the first call of the new trainer.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._path = os.environ.get(VARIABLE, "")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sessions = [value for name, value in scope.get("headers", ()) if name == _HEADER]
        problem = refusal(self._path, sessions[0].decode("latin-1")) if sessions and self._path else None
        answer = self._app if problem is None else JSONResponse(write_refusal(problem), STATUS)
        await answer(scope, receive, send)
