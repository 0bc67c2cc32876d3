"""The errors that weightsync raises on purpose.

    WeightSyncError
    +-- ConfigError            (ValueError)        the call itself is wrong; engines are untouched
    +-- ManifestError          (ValueError)        the tensors do not fit the engine's model
    +-- NonFiniteError         (ValueError)        tensors hold NaN or infinity; engines are untouched
    +-- UnsupportedError       (NotImplementedError) this model, layer or machine is not covered, and why
    +-- PlacementError         (ValueError)        trainer ranks and engine workers cannot be paired
    +-- EngineError            (RuntimeError)      the engine refused or broke
    |   +-- EngineUnreachableError (ConnectionError)
    |   +-- EngineBusyError                        another trainer holds the engine
    |   +-- FencedError                            another trainer has taken the engine over
    |   +-- EngineAsleepError                      the engine's weights are put to sleep
    |   +-- FrozenLostError                        the engine has lost what only the first push sends
    +-- PeerError              (ConnectionError)   a trainer rank or an engine worker went away
    +-- SyncTimeoutError       (TimeoutError)      a wait passed its deadline
    +-- ProtocolError          (RuntimeError)      a message that does not follow docs/wire.md, or a stranger
    +-- DigestError            (RuntimeError)      bytes arrived, and they are not the bytes that were sent

Each error is also the builtin that fits, so `except TimeoutError` works. Each keeps its facts as attributes. Errors
survive pickling, which a caller's process pool needs, and the wire (`to_fields`, `from_fields`). Every trainer rank
raises the first cause, as the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

_MOST = 5
"""How many names a message lists of each kind; all are in the error's attributes."""


class ErrorFields(Struct, frozen=True, forbid_unknown_fields=True):
    """An error as it travels. `kind` is the name of its class."""

    kind: str
    message: str
    who: str | None
    phase: str | None
    facts: dict[str, list[str] | dict[str, str]]


class WeightSyncError(Exception):
    """Base of every error that weightsync raises on purpose.

    who: the trainer rank or engine worker that failed ("trainer rank 1", "engine 0 worker tp=1"), or None.
    phase: what that participant was doing ("plan", "transfer", "load", "commit", ...), or None. docs/failures.md lists
        the phases.
    """

    def __init__(self, message: str, *, who: str | None = None, phase: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.who = who
        self.phase = phase
        self.facts: dict[str, Any] = {}
        self.add_facts(**facts)

    def add_facts(self, **facts: Any) -> None:
        """Add attributes that travel with the error."""
        self.facts |= facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.who, f"phase {self.phase}" if self.phase else None) if part)
        return f"{self.message} [{where}]" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.to_fields())

    def to_fields(self) -> ErrorFields:
        """Return the error as it travels."""
        text = self.message.encode(errors="replace").decode()  # a text of another program may not be one in UTF-8
        return ErrorFields(type(self).__name__, text, self.who, self.phase, self.facts)


class ConfigError(WeightSyncError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class ManifestError(WeightSyncError, ValueError):
    """Tensors that do not fit the engine's model. Nothing was written.

    missing: the names that the engine needs and the trainer does not have.
    unexpected: the names that the engine has no place for.
    mismatched: what is wrong with a tensor, by name: its shape, its dtype, or that it is written twice.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, str]

    def __init__(
        self,
        message: str,
        *,
        missing: list[str] | None = None,
        unexpected: list[str] | None = None,
        mismatched: dict[str, str] | None = None,
        who: str | None = None,
        phase: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(
            message,
            who=who,
            phase=phase,
            missing=missing or [],
            unexpected=unexpected or [],
            mismatched=mismatched or {},
            **facts,
        )


class NonFiniteError(WeightSyncError, ValueError):
    """Tensors that hold NaN or infinity. Nothing was written. `tensors` are their names."""

    tensors: list[str]


REFUSALS = ConfigError, ManifestError, NonFiniteError
"""What may be raised before a call has changed anything."""


class UnsupportedError(WeightSyncError, NotImplementedError):
    """Something that weightsync does not cover, with the reason and the way out."""


class PlacementError(WeightSyncError, ValueError):
    """Trainer ranks and engine workers that cannot be paired.

    Reasons are another host, another GPU, memory that cannot be mapped, or a folder that cannot be written or read.
    """


class EngineError(WeightSyncError, RuntimeError):
    """An engine call that the engine refused or broke in."""


class EngineUnreachableError(EngineError, ConnectionError):
    """An engine that has died, or an address at which nothing answers."""


class EngineBusyError(EngineError):
    """An engine that another trainer is connected to."""


class FencedError(EngineError):
    """An engine that another trainer has taken over, since this one did not answer. Nothing of the engine was touched
    after that. Push again once the other trainer has closed its `WeightSync`."""


class EngineAsleepError(EngineError):
    """An engine whose weights are put to sleep (vLLM's sleep levels 1 and 2). Nothing was written into it."""


class FrozenLostError(EngineError):
    """An engine that has lost what later pushes do not send. `WeightSync.push` sends everything then."""


class PeerError(WeightSyncError, ConnectionError):
    """A trainer rank or an engine worker that closed its connection."""


class SyncTimeoutError(WeightSyncError, TimeoutError):
    """A wait that passed its deadline. `waiting_for` names who had not answered yet."""

    waiting_for: list[str]


class ProtocolError(WeightSyncError, RuntimeError):
    """A message that does not follow docs/wire.md, such as one with an unknown field; or a peer that is a stranger."""


class DigestError(WeightSyncError, RuntimeError):
    """Bytes that arrived and are not the bytes that were sent."""


def _classes() -> dict[str, type[WeightSyncError]]:
    found: dict[str, type[WeightSyncError]] = {}
    todo: list[type[WeightSyncError]] = [WeightSyncError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found


def from_fields(fields: ErrorFields) -> WeightSyncError:
    """Return the error that `to_fields` described. An unknown class becomes a `WeightSyncError` that names it."""
    cls = _classes().get(fields.kind)
    if cls is None:
        cls, fields = WeightSyncError, replace(fields, message=f"{fields.kind}: {fields.message}")
    # A fact becomes an attribute, and must not take the place of what every error has.
    facts = {name: fact for name, fact in fields.facts.items() if name != "facts" and not hasattr(cls, name)}
    try:
        return _rebuild(cls, replace(fields, facts=facts))
    except TypeError:
        return ProtocolError(f"a {fields.kind} came with facts that it does not have: {fields.message}")


def _rebuild(cls: type[WeightSyncError], fields: ErrorFields) -> WeightSyncError:
    return cls(fields.message, who=fields.who, phase=fields.phase, **fields.facts)


def first_few(names: Sequence[str]) -> str:
    """Return the first names, as a message has them, and how many more there are."""
    return ", ".join(names[:_MOST]) + (f", and {len(names) - _MOST} more" if len(names) > _MOST else "")


def wrap_exception(error: BaseException, *, who: str, phase: str) -> WeightSyncError:
    """Return any exception as a `WeightSyncError`.

    A `WeightSyncError` keeps its class and gains the `who` and `phase` that it lacked. The message for any other
    exception names the original class.
    """
    if isinstance(error, WeightSyncError):
        error.who = error.who or who
        error.phase = error.phase or phase
        return error
    return WeightSyncError(f"{type(error).__name__}: {error}", who=who, phase=phase)
