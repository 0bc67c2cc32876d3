"""What an engine is when it is looked at, and which state of a cell that is."""

from __future__ import annotations

from dataclasses import dataclass

from cells import DEAD, MUTE, NEW, PAUSED, UNTOUCHED

from weightsync.control.wire import POISONED

KNOWN = "ABC"
"""The weights that are pushed, each by a letter."""
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
