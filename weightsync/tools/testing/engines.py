"""The conformance checks of engine clients."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from weightsync.engines import Engine
from weightsync.engines.base import reports_paused
from weightsync.errors import EngineUnreachableError, WeightSyncError
from weightsync.fleet.engine_call import BackgroundCall
from weightsync.net.connection import Connection
from weightsync.net.listener import Listener
from weightsync.net.runtime import Deadline
from weightsync.net.wire import Committed, Release
from weightsync.tools.testing.assertions import PROMPT_S, require


def check_engine(engine: Engine, *, timeout_s: float = 60.0) -> None:
    """Check a client of a running engine with the weightsync plug-in. No trainer may be connected to the engine.

    The check connects the engine's workers like a trainer, and releases them without a push. The weights stay
    unchanged. The engine's version changes.

    Args:
        engine: The client to check.
        timeout_s: The timeout of each wait.

    Raises:
        AssertionError: The client breaks a promise.
    """
    require(isinstance(engine, Engine), f"{type(engine).__name__} lacks a method of weightsync.engines.Engine")
    require(bool(engine.name), "name must be a text for error messages")
    require(bool(engine.host), "host must be the address of the workers' host")
    require(engine.is_alive() is True, "is_alive() of a running engine must be True")

    for mode in ("keep", "wait", "abort"):
        _succeed(f"pause({mode!r})", lambda mode=mode: engine.pause(mode))  # type: ignore[misc]
        require(reports_paused(engine) is not False, f"after pause({mode!r}) is_paused() is False")
        _succeed("reset_caches()", engine.reset_caches)
        _succeed("resume()", engine.resume)
        require(reports_paused(engine) is not True, "after resume() is_paused() is True")
    expected_version = "conformance 0" if engine.version() is not None else None  # None: an engine without versions
    _succeed("set_version()", lambda: engine.set_version("conformance 0"))
    _require_version(engine, expected_version, "after set_version")

    trainers = [_Trainer(engine, timeout_s) for _ in range(2)]
    try:
        first, second = trainers
        first.call_in()
        first.release("init")
        first.call_in_again()
        first.release("init, called by the same trainer again,")

        _succeed_at_once({"pause('keep')": lambda: engine.pause("keep"), "start()": engine.start})
        first.update()
        resetting = BackgroundCall(first.listener, "reset_caches", engine.reset_caches)
        first.release("update")
        _succeed("finish()", lambda: engine.finish("conformance 1"))
        resetting.join(timeout_s)
        require(not resetting.is_alive(), f"reset_caches(), called during an update, took more than {timeout_s:g} s")
        require(resetting.error is None, f"reset_caches(), called during an update, raised {resetting.error!r}")
        _succeed("resume()", engine.resume)
        _require_version(engine, expected_version and "conformance 1", "after finish")

        _succeed("start(), for a second update,", engine.start)
        first.update()
        first.offend()
        require(engine.is_alive() is True, "workers that gave an update up must leave the engine alive")
        _succeed("finish(None)", lambda: engine.finish(None))
        _require_version(engine, expected_version and "conformance 1", "after finish(None), which stamps none,")
        first.close()

        second.call_in()
        second.release("init, called by another trainer,")
    finally:
        for trainer in trainers:
            trainer.close()
    _succeed("reset_caches()", engine.reset_caches)
    require(engine.is_alive() is True, "the engine did not live through the check")


def _succeed(what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        raise AssertionError(f"{what} raised {error!r}") from error


def _succeed_at_once(calls: dict[str, Callable[[], None]]) -> None:
    """Make each call in a thread of its own, as a push does, and require that all succeed."""
    with ThreadPoolExecutor(len(calls)) as threads:
        ended = {what: threads.submit(call) for what, call in calls.items()}
    for what, future in ended.items():
        _succeed(
            f"{what}, called at once with {' and '.join(other for other in calls if other != what)},", future.result
        )


def _require_version(engine: Engine, expected: str | None, when: str) -> None:
    found = engine.version()
    require(found == expected, f"{when} version() is {found!r}, expected {expected!r}")


def check_dead_engine(engine: Engine) -> None:
    """Check a client of a dead or unreachable engine: its calls must say so, and promptly.

    Args:
        engine: The client to check.

    Raises:
        AssertionError: A call returns, raises another error than `EngineUnreachableError`, or takes too long.
    """
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: engine.init({}),
        "start": engine.start,
        "update": lambda: engine.update({}),
        "finish": lambda: engine.finish("1"),
        "pause": lambda: engine.pause("keep"),
        "resume": engine.resume,
        "reset_caches": engine.reset_caches,
        "set_version": lambda: engine.set_version("1"),
        "version": engine.version,
    }
    require(engine.is_alive() is False, "is_alive() of a dead engine must be False")
    for name, call in calls.items():
        started = time.monotonic()
        try:
            call()
        except EngineUnreachableError as error:
            require(bool(error.who), f"the error of {name} has no engine's name in `who`")
        except Exception as error:
            raise AssertionError(
                f"{name} of a dead engine raised {error!r}, expected EngineUnreachableError"
            ) from error
        else:
            raise AssertionError(f"{name} of a dead engine must raise EngineUnreachableError; it returned")
        took_s = time.monotonic() - started
        require(took_s < PROMPT_S, f"{name} of a dead engine took {took_s:.1f} s to raise")


@dataclass
class _Trainer:
    """A trainer's end: it connects an engine's workers and releases them."""

    engine: Engine
    timeout_s: float
    listener: Listener = field(default_factory=Listener)
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    connections: list[Connection] = field(default_factory=list)
    call: BackgroundCall | None = None

    def call_in(self) -> None:
        self._init()
        arrived = self.listener.admit("worker", 0, Deadline(self.timeout_s), "init", self._check)
        self.connections = [connection for _, connection in arrived]
        self._must_still_run("init")

    def call_in_again(self) -> None:
        """Call `init` again. The workers are connected already, and wait for a message."""
        self._init()
        self._must_still_run("init, called by the same trainer again,")

    def update(self) -> None:
        self.call = BackgroundCall(self.listener, "update", self.engine.update, {"session": self.session})
        self._must_still_run("update")

    def release(self, what: str) -> None:
        for connection in self.connections:
            connection.send(Release(), Deadline(self.timeout_s), what)
        self._must_return(what)

    def offend(self) -> None:
        """Send a message that no worker expects.

        Workers must report the error on the connection, and the engine's call must return as after a good update.
        """
        for connection in self.connections:
            connection.send(Committed(1, 0.0), Deadline(self.timeout_s), "update")
        for connection in self.connections:
            try:
                message = connection.receive(Deadline(self.timeout_s), "update")
            except WeightSyncError:
                continue
            raise AssertionError(f"{connection.peer} answered {message} to an unknown message")
        self._must_return("update, given up by its workers,")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.listener.close()

    def _init(self) -> None:
        info = self.listener.invitation(self.session, 0, self.engine.host, self.timeout_s)
        self.call = BackgroundCall(self.listener, "init", self.engine.init, info)

    def _check(self) -> None:
        assert self.call is not None
        if self.call.error is not None:
            raise AssertionError(f"init raised {self.call.error!r} before any worker had come")

    def _must_still_run(self, what: str) -> None:
        assert self.call is not None
        self.call.join(0.2)
        require(self.call.error is None, f"{what} raised {self.call.error!r}")
        require(self.call.is_alive(), f"{what} returned before its workers were released")

    def _must_return(self, what: str) -> None:
        assert self.call is not None
        self.call.join(self.timeout_s)
        require(not self.call.is_alive(), f"{what} did not return within {self.timeout_s:g} s")
        require(self.call.error is None, f"{what} raised {self.call.error!r}")
