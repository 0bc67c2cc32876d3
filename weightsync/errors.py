"""Everything that weightsync raises on purpose.

    WeightSyncError
    +-- ConfigError            (ValueError)        the call itself is wrong; engines are untouched
    +-- ManifestError          (ValueError)        the tensors do not fit the engine's model
    +-- UnsupportedError       (NotImplementedError) this model, layer or machine is not covered, and why
    +-- PlacementError         (ValueError)        trainer ranks and engine workers cannot be paired
    +-- EngineError            (RuntimeError)      the engine refused or broke
    |   +-- EngineUnreachableError (ConnectionError)
    |   +-- EngineBusyError                        another trainer holds the engine
    +-- PeerError              (ConnectionError)   a trainer rank or an engine worker went away
    +-- SyncTimeoutError       (TimeoutError)      a wait passed its deadline
    +-- ProtocolError          (RuntimeError)      a message that does not follow docs/wire.md
    +-- DigestError            (RuntimeError)      bytes arrived, and they are not the bytes that were sent

Each one is also the builtin that fits it, so `except TimeoutError` works. Each keeps its facts as attributes
and survives both pickling (a caller's process pool needs that) and the wire (`to_fields` / `from_fields`): the
first cause is raised, as the same class, on every trainer rank.
"""

from __future__ import annotations

from typing import Any


class WeightSyncError(Exception):
    """Base of every error that weightsync raises on purpose.

    `who` names the trainer rank or engine worker it happened on ("trainer rank 1", "engine 0 worker tp=1"), and
    `phase` what it was doing ("plan", "gather", "transfer", "load", "commit", ...); both may be None.
    """

    def __init__(self, message: str, *, who: str | None = None, phase: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.who = who
        self.phase = phase
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.who, f"phase {self.phase}" if self.phase else None) if part)
        return f"{self.message} [{where}]" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.to_fields())

    def to_fields(self) -> dict[str, Any]:
        """The error as plain values that msgpack can carry."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "who": self.who,
            "phase": self.phase,
            "facts": self.facts,
        }


class ConfigError(WeightSyncError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class ManifestError(WeightSyncError, ValueError):
    """The tensors to be pushed do not fit the engine's model; nothing was written.

    `missing` names what the engine needs and nobody offers, `unexpected` what is offered and the engine has no
    place for, `mismatched` maps a name to what is wrong with it (shape, dtype, or written twice).
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
    ) -> None:
        super().__init__(
            message,
            who=who,
            phase=phase,
            missing=missing or [],
            unexpected=unexpected or [],
            mismatched=mismatched or {},
        )


class UnsupportedError(WeightSyncError, NotImplementedError):
    """Something that weightsync does not cover, with the reason and the way out."""


class PlacementError(WeightSyncError, ValueError):
    """Trainer ranks and engine workers cannot be paired: another host, another GPU, memory that cannot be mapped, a
    folder that cannot be written or read."""


class EngineError(WeightSyncError, RuntimeError):
    """The engine refused a call or broke in it."""


class EngineUnreachableError(EngineError, ConnectionError):
    """Nothing answers at the engine's address, or the engine has died."""


class EngineBusyError(EngineError):
    """Another trainer holds this engine."""


class PeerError(WeightSyncError, ConnectionError):
    """A trainer rank or an engine worker closed its connection in the middle of a push."""


class SyncTimeoutError(WeightSyncError, TimeoutError):
    """A wait passed its deadline. `waiting_for` names who was still owed an answer."""

    waiting_for: list[str]


class ProtocolError(WeightSyncError, RuntimeError):
    """A message that does not follow docs/wire.md: wrong protocol number, wrong token, unknown type, bad field."""


class DigestError(WeightSyncError, RuntimeError):
    """The bytes that arrived are not the bytes that were sent."""


def _classes() -> dict[str, type[WeightSyncError]]:
    found: dict[str, type[WeightSyncError]] = {}
    todo: list[type[WeightSyncError]] = [WeightSyncError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return found


def from_fields(fields: dict[str, Any]) -> WeightSyncError:
    """The error that `to_fields` described; an unknown class becomes a plain `WeightSyncError` that names it."""
    cls = _classes().get(fields["kind"])
    message = fields["message"]
    if cls is None:
        cls, message = WeightSyncError, f"{fields['kind']}: {message}"
    return cls(message, who=fields.get("who"), phase=fields.get("phase"), **fields.get("facts", {}))


def _rebuild(cls: type[WeightSyncError], fields: dict[str, Any]) -> WeightSyncError:
    return cls(fields["message"], who=fields["who"], phase=fields["phase"], **fields["facts"])


def foreign(error: BaseException, *, who: str, phase: str) -> WeightSyncError:
    """Any exception as one of ours: ours keeps its class and gains the `who` and `phase` it lacked; any other
    becomes a `WeightSyncError` that names the original class."""
    if isinstance(error, WeightSyncError):
        error.who = error.who or who
        error.phase = error.phase or phase
        return error
    return WeightSyncError(f"{type(error).__name__}: {error}", who=who, phase=phase)
