"""Helpers of all checks. A broken promise is an `AssertionError` in plain words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from weightsync.errors import PlacementError, SyncTimeoutError, WeightSyncError

PROMPT_S = 10.0
"""Seconds for a wait to end after a reason to."""
_ERRORS = {"deadline": SyncTimeoutError, "abort": WeightSyncError, "news": PlacementError}


def require(condition: bool, words: str) -> None:
    """Raise `AssertionError` with these words unless the condition holds."""
    if not condition:
        raise AssertionError(words)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bytes."""
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


@contextmanager
def must_end(what: str, reason: str) -> Iterator[Callable[[], None]]:
    """Require that a wait ends soon after a reason to. It may return if there is nothing to wait for."""
    started = time.monotonic()

    def check() -> None:
        if reason == "news" and time.monotonic() - started > 0.2:
            raise PlacementError("bad news")

    try:
        yield check
    except WeightSyncError as error:
        expected = _ERRORS[reason]
        require(isinstance(error, expected), f"{what} raised {error!r} after {reason}, expected {expected.__name__}")
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r} after {reason}, expected a WeightSyncError") from error
    took_s = time.monotonic() - started
    require(took_s < PROMPT_S, f"{what} went on for {took_s:.1f} s after {reason}")
