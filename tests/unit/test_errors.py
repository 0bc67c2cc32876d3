"""Every error keeps its class and its facts wherever it goes."""

from __future__ import annotations

import pickle
import re

import msgspec
import pytest

import weightsync.errors as errors
from weightsync.errors import ErrorFields, ProtocolError, WeightSyncError, from_fields, wrap_exception
from weightsync.net.wire import Failure, decode, encode


def subclasses(cls: type[WeightSyncError]) -> list[type[WeightSyncError]]:
    """All of weightsync's own, `cls` first."""
    own = [sub for sub in cls.__subclasses__() if sub.__module__ == "weightsync.errors"]
    return [cls, *(found for sub in own for found in subclasses(sub))]


ALL = subclasses(WeightSyncError)
FACTS = {
    "ManifestError": {"missing": ["a.weight"], "unexpected": ["b"], "mismatched": {"c": "shape (1,) is not (2,)"}},
    "SyncTimeoutError": {"waiting_for": ["engine 0 worker tp=1", "trainer rank 3"]},
    "PlacementError": {"problems": ["a[0:4] is held by no rank"]},
}


def example(cls: type[WeightSyncError]) -> WeightSyncError:
    return cls("it broke", who="trainer rank 1", phase="gather", **FACTS.get(cls.__name__, {}))


def assert_same(found: WeightSyncError, error: WeightSyncError) -> None:
    assert type(found) is type(error)
    assert str(found) == str(error) == "it broke [trainer rank 1, phase gather]"
    assert (found.message, found.who, found.phase) == ("it broke", "trainer rank 1", "gather")
    assert found.to_fields() == error.to_fields()
    for name, value in FACTS.get(type(error).__name__, {}).items():
        assert getattr(found, name) == value


@pytest.mark.parametrize("cls", ALL)
def test_errors_survive_pickling(cls):
    error = example(cls)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_same(pickle.loads(pickle.dumps(error, protocol)), error)  # noqa: S301


@pytest.mark.parametrize("cls", ALL)
def test_errors_survive_the_wire(cls):
    error = example(cls)
    error.add_facts(lost=["engine 1"])
    message = decode(encode(Failure(error.to_fields()))[4:])
    assert isinstance(message, Failure)
    found = from_fields(message.error)
    assert_same(found, error)
    assert found.lost == ["engine 1"]


@pytest.mark.parametrize("cls", ALL)
def test_errors_without_facts_are_whole_too(cls):
    found = from_fields(msgspec.convert(msgspec.to_builtins(cls("short").to_fields()), ErrorFields))
    assert (type(found), str(found), found.who, found.phase) == (cls, "short", None, None)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        ("ConfigError", ValueError),
        ("ManifestError", ValueError),
        ("UnsupportedError", NotImplementedError),
        ("PlacementError", ValueError),
        ("EngineError", RuntimeError),
        ("EngineUnreachableError", ConnectionError),
        ("EngineBusyError", RuntimeError),
        ("PeerError", ConnectionError),
        ("SyncTimeoutError", TimeoutError),
        ("ProtocolError", RuntimeError),
        ("DigestError", RuntimeError),
    ],
)
def test_each_is_also_the_builtin_that_fits_it(cls, builtin):
    with pytest.raises(builtin, match="it broke"):
        raise example(getattr(errors, cls))


def test_the_tree_in_the_docstring_is_the_tree():
    def lines(cls: type[WeightSyncError], depth: int) -> list[tuple[int, str, set[str]]]:
        bases = {base.__name__ for base in cls.__bases__ if base.__module__ == "builtins" and base is not Exception}
        own = [(depth, cls.__name__, bases)]
        for sub in cls.__subclasses__():
            if sub.__module__ == "weightsync.errors":
                own += lines(sub, depth + 1)
        return own

    drawn = []
    for indent, name, builtin in re.findall(r"^    ([ |+\-]*)(\w+Error)(?: +\((\w+)\))?", errors.__doc__, re.MULTILINE):
        drawn.append((len(indent) // 4, name, {builtin} - {""}))
    assert drawn == lines(WeightSyncError, 0)


def test_every_class_is_in_the_package():
    import weightsync

    for cls in ALL:
        assert getattr(weightsync, cls.__name__) is cls


def test_where_is_said_as_far_as_it_is_known():
    assert str(WeightSyncError("m")) == "m"
    assert str(WeightSyncError("m", who="rank 1")) == "m [rank 1]"
    assert str(WeightSyncError("m", phase="load")) == "m [phase load]"


def test_a_manifest_error_always_has_its_three_lists():
    error = errors.ManifestError("m")
    assert (error.missing, error.unexpected, error.mismatched) == ([], [], {})


def test_an_error_of_a_class_that_is_not_known_here_keeps_its_name():
    found = from_fields(ErrorFields("QuantumError", "it tunnelled", None, None, {}))
    assert (type(found), str(found)) == (WeightSyncError, "QuantumError: it tunnelled")


def test_foreign_exceptions_become_ours_and_ours_gain_what_they_lacked():
    made = wrap_exception(ZeroDivisionError("1/0"), who="rank 2", phase="plan")
    assert (type(made), str(made)) == (WeightSyncError, "ZeroDivisionError: 1/0 [rank 2, phase plan]")
    error = errors.DigestError("m", who="worker 1")
    assert wrap_exception(error, who="rank 2", phase="load") is error
    assert (error.who, error.phase) == ("worker 1", "load")


def test_a_fact_of_a_reserved_name_is_refused_while_an_exception_is_handled():
    fields = ErrorFields("DigestError", "boo", "worker", "load", {"who": ["x"]})
    try:
        raise BlockingIOError
    except BlockingIOError:
        found = from_fields(fields)
    assert isinstance(found, ProtocolError)
    assert "a DigestError came with facts of another class: boo" in str(found)
