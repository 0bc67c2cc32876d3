"""The fence in a call to an engine's HTTP server: which trainer's session the call is of.

vLLM's own routes, such as /sleep and /update_weight_version, never reach a worker, so that no worker can refuse them.
The engine's worker 0 notes in a file which sessions have had the engine. The server reads that file, and refuses a call
of any session but the last one. A trainer that stopped answering thus cannot pause or mark the engine of the next one.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from weightsync.errors import EngineError, FencedError

VARIABLE = "WEIGHTSYNC_FENCE"
"""Set in an engine's environment, it names the file. `weightsync.vllm.serve` sets it."""
HEADER = "WeightSync-Session"
"""The header of a call that has the session."""
STATUS = 409
"""The status of the answer to a call that is refused."""
TAKEN_OVER = "another trainer has taken over this engine, since this one did not answer"
_MOST = 64
"""How many sessions the file remembers. A call of an older one is refused too, with less to say."""


def note_session(path: str, session: str) -> None:
    """Note in the engine's file that a session has the engine now. Raises `OSError`."""
    sessions = [*_sessions(path), session][-_MOST:]
    draft = Path(f"{path}.{secrets.token_hex(4)}")
    draft.write_text("\n".join(sessions))
    draft.replace(path)  # the server reads the old file, or the new one


def refusal(path: str, session: str) -> EngineError | None:
    """Return why the engine of this file must refuse a call of this session. None: the session has the engine."""
    sessions = _sessions(path)
    if sessions and sessions[-1] == session:
        return None
    return FencedError(TAKEN_OVER) if session in sessions else several_engines()


def several_engines() -> EngineError:
    """Return the error of a trainer's call that has come to an engine which does not know the trainer."""
    return EngineError(
        "this call has come to another engine than the one whose workers have met the trainer, and was refused. A load "
        "balancer behind the address, or replicas, would leave engines half updated: give each engine's own address, "
        'engine=["http://first:8000", "http://second:8000"]; or the engine was started anew, then push again'
    )


def read_refusal(answer: object) -> EngineError | None:
    """Return the error in the parsed body of a refusal, None for the body of another program."""
    said = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(said, dict) or said.get("by") != HEADER:
        return None
    kind = FencedError if said.get("type") == FencedError.__name__ else EngineError
    return kind(str(said.get("message")))


def write_refusal(error: EngineError) -> dict[str, dict[str, str]]:
    """Return the body of a refusal, in the form that vLLM gives to errors."""
    return {"error": {"message": str(error), "type": type(error).__name__, "by": HEADER}}


def _sessions(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except FileNotFoundError:
        return []
