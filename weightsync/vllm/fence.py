"""The fence of a vLLM server: ASGI middleware that refuses the calls of trainers which do not hold the engine.

`python -m weightsync.vllm.serve` adds it. A server started otherwise takes it as
`--middleware weightsync.vllm.fence.Fence`, with `WEIGHTSYNC_FENCE` in its environment: the path of a file in a folder
that no other user may write to.
"""

from __future__ import annotations

import json
import os
from typing import Any

from weightsync.net.fence import HEADER, STATUS, VARIABLE, refusal, write_refusal

_HEADER = HEADER.lower().encode()


class Fence:
    """Passes on each request but a trainer's whose session does not hold the engine, which is answered by a refusal.

    The engine does calls in the order in which they come. A call that was passed on before another trainer took the
    engine over is thus done before the first call of that trainer.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._path = os.environ.get(VARIABLE, "")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sessions = [value for name, value in scope.get("headers", ()) if name == _HEADER]
        problem = refusal(self._path, sessions[0].decode("latin-1")) if sessions and self._path else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        content = json.dumps(write_refusal(problem)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": STATUS, "headers": headers})
        await send({"type": "http.response.body", "body": content})
