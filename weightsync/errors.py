"""The errors that weightsync raises on purpose.

    WeightSyncError
    +-- ConfigError            (ValueError)        the call itself is wrong; engines are untouched
    +-- ManifestError          (ValueError)        the tensors do not fit the engine's model
    +-- NonFiniteError         (ValueError)        tensors hold NaN or infinity; engines are untouched
    +-- UnsupportedError       (NotImplementedError) a model, layer or machine without support
    +-- PlacementError         (ValueError)        trainer ranks and engine workers cannot be paired
    +-- EngineError            (RuntimeError)      the engine refused or broke
    |   +-- EngineUnreachableError (ConnectionError) the engine is dead or does not answer
    |   +-- EngineBusyError                        another trainer holds the engine
    |   +-- FencedError                            another trainer has taken the engine over
    |   +-- EngineAsleepError                      the engine's weights are in vLLM's sleep mode
    |   +-- FrozenLostError                        the engine has lost its frozen tensors
    +-- PeerError              (ConnectionError)   a trainer rank or an engine worker closed its connection
    +-- SyncTimeoutError       (TimeoutError)      a wait passed its deadline
    +-- ProtocolError          (RuntimeError)      a message breaks the protocol, or a peer lacks the shared key
    +-- DigestError            (RuntimeError)      the received bytes differ from the sent bytes

The builtin class in brackets is a second base class, so `except TimeoutError` works too. Subclasses inherit the second
base class. Attributes such as `missing` and `who` hold the names of tensors and ranks. A caller's process pool can
pickle errors. `to_fields` and `from_fields` carry errors between ranks and workers. When a call fails on one rank,
every trainer rank raises an error of the same class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

_MOST = 5
"""Most names of each kind in a message. The error's attributes have all names."""


class ErrorFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of an error on the wire. `kind` is the name of its class."""

    kind: str
    message: str
    who: str | None
    phase: str | None
    facts: dict[str, list[str] | dict[str, str]]


class WeightSyncError(Exception):
    """Base of all errors raised on purpose by weightsync.

    Attributes:
        message: The text, without `who` and `phase`. `str()` adds them.
        who: The failed trainer rank or engine worker ("trainer rank 1", "engine 0 worker tp=1"), or None.
        phase: The activity of that rank or worker ("plan", "transfer", "load", "commit", ...), or None.
            docs/operate/failures.md lists the phases.
        facts: The attributes of `add_facts`, by name.
    """

    def __init__(self, message: str, *, who: str | None = None, phase: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.who = who
        self.phase = phase
        self.facts: dict[str, Any] = {}
        self.add_facts(**facts)

    def add_facts(self, **facts: Any) -> None:
        """Add attributes. They travel with the error."""
        self.facts |= facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.who, f"phase {self.phase}" if self.phase else None) if part)
        return f"{self.message} [{where}]" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.to_fields())

    def to_fields(self, **facts: Any) -> ErrorFields:
        """Return the error in its form for the wire, with further facts."""
        text = self.message.encode(errors="replace").decode()  # other programs may put lone surrogates into a text
        return ErrorFields(type(self).__name__, text, self.who, self.phase, self.facts | facts)


class ConfigError(WeightSyncError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class ManifestError(WeightSyncError, ValueError):
    """Tensors that do not fit the engine's model. Nothing was written.

    Attributes:
        missing: Names required by the engine, without a tensor of the trainer.
        unexpected: The trainer's names without a place in the engine.
        mismatched: The fault of a tensor, by name: its shape, its dtype, or a second write of it.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, str]

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message, **{"missing": [], "unexpected": [], "mismatched": {}, **facts})


class NonFiniteError(WeightSyncError, ValueError):
    """Tensors with NaN or infinity. Nothing was written. `tensors` are their names."""

    tensors: list[str]


REFUSALS = ConfigError, ManifestError, NonFiniteError
"""Errors that a call may raise before it has changed anything."""


class UnsupportedError(WeightSyncError, NotImplementedError):
    """A model, layer or machine without support in weightsync. The message has the reason and the way out."""


class PlacementError(WeightSyncError, ValueError):
    """Trainer ranks and engine workers that cannot be paired.

    Reasons are another host, another GPU, or a failure to map memory, or to write or read a folder.
    """


class EngineError(WeightSyncError, RuntimeError):
    """An engine call refused by the engine, or an engine broken during the call."""


class EngineUnreachableError(EngineError, ConnectionError):
    """A dead engine, or an address without an answer."""


class EngineBusyError(EngineError):
    """An engine connected to another trainer."""


class FencedError(EngineError):
    """An engine taken over by another trainer, because this trainer did not answer.

    This trainer changed nothing in the engine afterwards. Push again once the other trainer has closed its
    `WeightSync`.
    """


class EngineAsleepError(EngineError):
    """An engine with sleeping weights (vLLM's sleep levels 1 and 2). Nothing was written into it."""


class FrozenLostError(EngineError):
    """An engine without its frozen tensors: it has lost them. `WeightSync.push` then sends all tensors."""


class PeerError(WeightSyncError, ConnectionError):
    """A trainer rank or an engine worker that closed its connection."""


class SyncTimeoutError(WeightSyncError, TimeoutError):
    """A wait past its deadline. `waiting_for` names the ranks, workers or engines without an answer."""

    waiting_for: list[str]


class ProtocolError(WeightSyncError, RuntimeError):
    """A message that breaks the wire protocol, such as one with an unknown field, or a peer without the key."""


class DigestError(WeightSyncError, RuntimeError):
    """Received bytes that differ from the sent bytes."""


def _family(cls: type[WeightSyncError]) -> Iterator[type[WeightSyncError]]:
    yield cls
    for each in cls.__subclasses__():
        yield from _family(each)


def from_fields(fields: ErrorFields) -> WeightSyncError:
    """Return the error of `to_fields`. An unknown class becomes a `WeightSyncError` that names it."""
    cls = next((each for each in _family(WeightSyncError) if each.__name__ == fields.kind), None)
    if cls is None:
        cls, fields = WeightSyncError, replace(fields, message=f"{fields.kind}: {fields.message}")
    # A fact becomes an attribute, and must not hide a method or attribute of its class.
    facts = {name: fact for name, fact in fields.facts.items() if name != "facts" and not hasattr(cls, name)}
    try:
        return _rebuild(cls, replace(fields, facts=facts))
    except (TypeError, KeyError):  # Python 3.11 raises `KeyError` for a fact named "who" while it handles an exception
        return ProtocolError(f"a {fields.kind} came with facts of another class: {fields.message}")


def _rebuild(cls: type[WeightSyncError], fields: ErrorFields) -> WeightSyncError:
    return cls(fields.message, who=fields.who, phase=fields.phase, **fields.facts)


def first_few(names: Sequence[str]) -> str:
    """Return the first names for a message, and the number of further names."""
    return ", ".join(names[:_MOST]) + (f", and {len(names) - _MOST} more" if len(names) > _MOST else "")


def wrap_exception(error: BaseException, *, who: str, phase: str) -> WeightSyncError:
    """Return any exception as a `WeightSyncError`.

    A `WeightSyncError` keeps its class, and gets `who` and `phase` if it has none. The message for any other exception
    names its original class.
    """
    if isinstance(error, WeightSyncError):
        error.who = error.who or who
        error.phase = error.phase or phase
        return error
    return WeightSyncError(f"{type(error).__name__}: {error}", who=who, phase=phase)
