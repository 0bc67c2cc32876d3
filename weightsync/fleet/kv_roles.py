"""The checks and the order of pauses of engines with shared keys and values of requests, by vLLM's `kv_role`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from weightsync.errors import ConfigError
from weightsync.fleet.engine_handle import CALLER, EngineHandle


def check_roles(handles: Sequence[EngineHandle], pause: str | None, rolling: bool | None = None) -> None:
    """Raise `ConfigError` for a push after which engines of two versions would share keys and values."""
    roles = {worker.hello.kv_role for one in handles for worker in one.workers} - {""}
    shared = f"an engine of kv_role={'/'.join(sorted(roles))!r} shares keys and values of requests with other engines"
    if rolling and roles:
        raise ConfigError(f"{shared}. With rolling=True these serve another version meanwhile: leave rolling out")
    if pause != CALLER and roles in ({"kv_producer"}, {"kv_consumer"}):
        raise ConfigError(
            f"{shared}, and this push leaves these at another version. Give the engines of both roles, in one list. "
            f"Or pause all of them until each has the version: WeightSync(pause={CALLER!r})"
        )


def turns(handles: Sequence[EngineHandle]) -> list[list[EngineHandle]]:
    """Return groups of engines, in the order of their pauses.

    An engine that prefills comes first. Its pause ends when engines that decode have taken its requests over.
    """

    def turn(one: EngineHandle) -> float:
        return {"kv_both": 1.0 + one.number, "kv_consumer": math.inf}.get(one.workers[0].hello.kv_role, 0.0)

    return [[*group] for _, group in itertools.groupby(sorted(handles, key=turn), turn)]
