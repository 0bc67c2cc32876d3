"""What an engine is when it is looked at, and which state of a cell that is."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cells import DEAD, MUTE, NEW, PAUSED, UNTOUCHED

from weightsync.engines import Engine
from weightsync.errors import WeightSyncError
from weightsync.net.wire import POISONED

KNOWN = "ABC"
"""The weights that are pushed, each by a letter."""


def known_of(transport: str) -> str:
    """Return the weights to push: for "changes", some that differ from A in few values."""
    return "Abc" if transport == "changes" else KNOWN


UNSEEN = "?"
"""The weights of an engine that is paused and cannot be asked."""


@dataclass(frozen=True)
class Look:
    """What an engine is.

    weights: the name of those that it has whole, "" for a mixture.
    is_guarded: it would not answer if it were woken.
    """

    weights: str
    is_guarded: bool
    is_paused: bool
    version: str


def look_at(
    engine: Engine, is_paused: Callable[[], bool | None], ask: Callable[[], Any], answers: dict[str, Any]
) -> Look | None:
    """Return what a vLLM is, None where it is dead. `ask` says what it answers, and `answers` to which weights.

    `is_paused` returns None where that cannot be: what is POISONED is not asked then either, since it would end.
    """
    with suppress(WeightSyncError, OSError, http.client.HTTPException):
        if engine.is_alive() is False:
            return None
        version = str(engine.version())
        is_poisoned = version.startswith(POISONED)
        paused = bool(is_poisoned if (told := is_paused()) is None else told)
        if paused or is_poisoned:
            return Look(UNSEEN, paused and is_poisoned, paused, version)
        found = ask()
        return Look(next((each for each, answer in answers.items() if answer == found), ""), False, False, version)
    return None


def state_of(look: Look | None, before: str, failing: str, version: int) -> str:
    """Return the state of an engine that served the weights `before` as `version` and was pushed `failing`."""
    if look is None:
        return DEAD
    if look.version.startswith(POISONED):
        if look.is_paused:
            return MUTE if look.is_guarded or look.weights else f"a mixture that would answer when it is woken: {look}"
        return f"marked and not paused: {look}"
    if look.is_guarded:
        return f"POISONED without a mark: {look}"
    number = int(look.version) if look.version.isdigit() else 0
    if look.weights in (before, UNSEEN) and number == version:
        return UNTOUCHED if not look.is_paused else f"as it was, and paused: {look}"
    if look.weights in (failing, UNSEEN) and number == version + 1:
        return PAUSED if look.is_paused else NEW
    return f"a LIE: {look}, after {before!r} as version {version} and a push of {failing!r}"
