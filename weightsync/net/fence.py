"""The fence of an engine's HTTP server: the server refuses calls of any trainer's session but the last.

vLLM's own routes, such as /sleep and /update_weight_version, never reach a worker, so no worker can refuse them. The
engine's worker 0 writes each new session into a file, and the server compares every call with the file's last session.
Without the fence a trainer that had hung could still pause or mark an engine taken over by another trainer.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from weightsync.errors import EngineError, FencedError

VARIABLE = "WEIGHTSYNC_FENCE"
"""Name of the environment variable with the file's path. `weightsync.vllm.serve` sets it in an engine's environment."""
HEADER = "WeightSync-Session"
"""The HTTP header with a call's session."""
STATUS = 409
"""The HTTP status of a refusal."""
TAKEN_OVER = "another trainer has taken over this engine, because this trainer did not answer"
_MOST = 64
"""Most sessions in the file. A call of an older session is refused too, with the error for an unknown trainer."""


def note_session(path: str, session: str) -> None:
    """Append a session to the engine's file: it has the engine now. Raises `OSError`."""
    sessions = [*_sessions(path), session][-_MOST:]
    draft = Path(f"{path}.{secrets.token_hex(4)}")
    draft.write_text("\n".join(sessions))
    draft.replace(path)  # atomic: the server reads the old file or the new one, never a part


def refusal(path: str, session: str) -> EngineError | None:
    """Return the error that refuses a call of this session. None: the session is the last in the engine's file."""
    sessions = _sessions(path)
    if sessions and sessions[-1] == session:
        return None
    return FencedError(TAKEN_OVER) if session in sessions else several_engines()


def several_engines() -> EngineError:
    """Return the error for a call to an engine that has not met the calling trainer."""
    return EngineError(
        "this call was refused: this engine's workers have not connected to the trainer. If the address is a load "
        'balancer\'s, give each engine\'s own address, engine=["http://first:8000", "http://second:8000"]. One server '
        "has one address, for all of its cores and API servers. If the engine was restarted, push again"
    )


def read_refusal(answer: object) -> EngineError | None:
    """Return the error in the parsed body of a refusal. None: another program wrote the body."""
    said = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(said, dict) or said.get("by") != HEADER:
        return None
    kind = FencedError if said.get("type") == FencedError.__name__ else EngineError
    return kind(str(said.get("message")))


def write_refusal(error: EngineError) -> dict[str, dict[str, str]]:
    """Return the body of a refusal, in the form of vLLM's errors."""
    return {"error": {"message": str(error), "type": type(error).__name__, "by": HEADER}}


def _sessions(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except FileNotFoundError:
        return []
