"""Engines in the processes of other trainer ranks than rank 0, such as an `LLM` in each rank.

Rank 0 calls them through a second connection from their rank. A call runs in a thread of the engine's process. It has
the same errors and timeouts as a call of an engine in rank 0's process.

    other rank      Hello(role="engines"), once
    rank 0          Value(EngineCall), any number at a time
    other rank      Value(EngineAnswer), in any order
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Struct

from weightsync.engines.async_llm import AsyncEngine
from weightsync.engines.base import CalledEngine, Engine, SpmdPart, reports_paused
from weightsync.engines.calls import LOCAL, as_ours, wait
from weightsync.errors import (
    ConfigError,
    EngineUnreachableError,
    ErrorFields,
    ProtocolError,
    SyncTimeoutError,
    WeightSyncError,
    from_fields,
)
from weightsync.fleet import EngineList, connect, public_name
from weightsync.net import timeouts
from weightsync.net.addresses import address_facing, is_loopback
from weightsync.net.connection import Connection
from weightsync.net.ranks import Ranks
from weightsync.net.runtime import Deadline, spawn
from weightsync.net.wire import Value
from weightsync.planning.layout import Count
from weightsync.planning.wire_types import Plain

_ROLE = "engines"


class EngineCall(Struct, frozen=True, forbid_unknown_fields=True):
    number: Count
    engine: Count
    method: str
    args: list[Plain]


class EngineAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    number: Count
    value: Plain
    error: ErrorFields | None


class OwnEngine(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    host: str
    part: SpmdPart | None


class Offer(Struct, frozen=True, forbid_unknown_fields=True):
    """The engines given to one rank.

    named: the public names of engines that every process can reach. Rank 0 must have them too.
    own: the engines in this rank's process.
    """

    named: list[str]
    own: list[OwnEngine]


class OtherRanks:
    """The engines in the processes of other ranks than rank 0. Every rank has one `OtherRanks`."""

    def __init__(self, engines: EngineList, timeout_s: float) -> None:
        self._engines, self._timeout_s = engines, timeout_s
        self._private: list[object] | None = None
        self._own: list[Engine] = []
        self._connection: Connection | None = None  # on another rank: to rank 0
        self._found: dict[int, tuple[_Calls, list[Engine]]] = {}  # on rank 0: by the other rank

    @property
    def engines(self) -> list[Engine]:
        """On rank 0: the engines of all other ranks, in rank order. Empty on other ranks."""
        return [engine for _, (_, those) in sorted(self._found.items()) for engine in those]

    def meet(self, ranks: Ranks, refuse: str = "") -> None:
        """Connect rank 0 to the engines in other ranks' processes. Collective.

        Args:
            ranks: all ranks of the trainer.
            refuse: the name of a strategy without support for engines in other ranks' processes, or "".

        Raises:
            ConfigError: another rank was given an engine that no push would reach, because rank 0 was not given it, or
                because of `refuse`.
        """
        offer = self._offer(ranks) if ranks.rank else Offer([], [])
        everyone = ranks.gather(offer, "plan", Offer)
        self._check(everyone, refuse)
        connected = {rank for rank, (calls, _) in self._found.items() if calls.end is None}
        strangers = [rank for rank, each in enumerate(everyone) if each.own and rank not in connected]
        strangers = ranks.broadcast(strangers, "plan", list[int])
        if ranks.rank in strangers:
            self.close()
            self._connection = ranks.dial(_ROLE, Deadline(self._timeout_s))
            spawn("engines", partial(_serve, self._own, self._connection))
        elif ranks.rank == 0:
            for rank in strangers:
                self._found[rank] = self._admit(ranks, rank, everyone[rank].own)

    def close(self) -> None:
        """Close the connections between rank 0 and these ranks. On any rank, at any time."""
        for connection in (self._connection, *(calls.connection for calls, _ in self._found.values())):
            if connection is not None:
                connection.close()
        self._connection, self._found = None, {}

    def _offer(self, ranks: Ranks) -> Offer:
        named = [public_name(one) for one in self._engines.named()]
        if self._private is None:
            self._private = self._in_this_process()
            of = f" of trainer rank {ranks.rank}"
            self._own = connect(self._private, self._timeout_s, of) if self._private else []
        here = LOCAL if is_loopback(ranks.host) else address_facing(ranks.host)
        own = [
            OwnEngine(one.name, here if one.host == LOCAL else one.host, getattr(one, "part", None))
            for one in self._own
        ]
        return Offer([name for name in named if name], own)

    def check_unchanged(self, rank: int) -> None:
        """Raise `ConfigError` when the engines in this process have changed, on another rank than rank 0."""
        if rank and self._private is not None and self._private != self._in_this_process():
            raise ConfigError(
                f"an engine in the process of trainer rank {rank} was added or removed. Only engines that rank 0 "
                "reaches may change: make a new WeightSync"
            )

    def _in_this_process(self) -> list[object]:
        return [one for one in self._engines.named() if public_name(one) is None]

    def _check(self, everyone: Sequence[Offer], refuse: str) -> None:
        known = {public_name(one) for one in self._engines.all()} if any(offer.named for offer in everyone) else set()
        for rank, offer in enumerate(everyone):
            if strange := [name for name in offer.named if name not in known]:
                raise ConfigError(
                    f"trainer rank {rank} was given the engine {strange[0]}, and rank 0 was not. Give rank 0 the list "
                    "of all engines with an address"
                )
            if offer.own and refuse:
                raise ConfigError(
                    f"trainer rank {rank} was given an engine of its own, {offer.own[0].name}, but {refuse} reaches "
                    "the engines of rank 0 alone. Give the other ranks none, or choose another transport"
                )

    def _admit(self, ranks: Ranks, rank: int, own: Sequence[OwnEngine]) -> tuple[_Calls, list[Engine]]:
        assert ranks.listener is not None
        ranks.listener.reset_role(_ROLE)
        deadline = Deadline(self._timeout_s)
        ((_, connection),) = ranks.listener.admit(_ROLE, rank, deadline, "plan", partial(ranks.wait, 0.0))
        calls = _Calls(connection)
        return calls, [RankEngine(calls, i, about, self._timeout_s) for i, about in enumerate(own)]


class RankEngine(CalledEngine):
    """Rank 0's client of an engine in another rank's process."""

    def __init__(self, calls: _Calls, number: int, about: OwnEngine, timeout_s: float) -> None:
        self.name, self.host, self.part = about.name, about.host, about.part
        self._calls, self._number, self._timeout_s = calls, number, timeout_s

    def is_alive(self) -> bool:
        try:
            return self._call("is_alive", timeout_s=min(self._timeout_s, timeouts.HEALTH_TIMEOUT_S)) is True
        except WeightSyncError:
            return False

    def is_paused(self) -> bool | None:
        found: bool | None = self._call("is_paused")
        return found

    def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        answer = self._calls.send(self._number, method, args, self.name)
        patience_s = (timeout_s or self._timeout_s) + timeouts.OTHER_RANK_GRACE_S
        return wait(answer, method, patience_s, self.name, lambda: False)


_METHODS = {"is_alive", "is_paused", *(name for name in vars(CalledEngine) if not name.startswith("_"))}


class _Calls:
    """Rank 0's calls into the engines of one other rank, and the thread that receives the answers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._answers: dict[int, concurrent.futures.Future[Any]] = {}
        self.end: WeightSyncError | None = None
        spawn(f"answers of {connection.peer}", self._receive)

    def send(self, engine: int, method: str, args: Sequence[Any], who: str) -> concurrent.futures.Future[Any]:
        """Send a call, and return the future of its answer. Raises `EngineUnreachableError`."""
        number = next(self._count)
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self._answers[number] = answer
            end = self.end
        try:
            if end is not None:
                raise end
            call = EngineCall(number, engine, method, list(args))
            self.connection.send(Value.of(call), Deadline(timeouts.OTHER_RANK_GRACE_S), method)
        except (WeightSyncError, OSError) as error:
            raise EngineUnreachableError(f"the engine's process, {self.connection.peer}, is gone", who=who) from error
        return answer

    def _receive(self) -> None:
        try:
            while True:
                answer = _next(self.connection).read(EngineAnswer)
                with self._lock:
                    future = self._answers.pop(answer.number)
                if answer.error is not None:
                    future.set_exception(from_fields(answer.error))
                else:
                    future.set_result(answer.value)
        except Exception as error:
            self.connection.close()
            gone = f"the engine's process, {self.connection.peer}, is gone: {error}"
            with self._lock:
                self.end = EngineUnreachableError(gone)
                left, self._answers = self._answers, {}
            for future in left.values():
                future.set_exception(EngineUnreachableError(gone))


def _serve(engines: Sequence[Engine], connection: Connection) -> None:
    """Answer rank 0's calls of this rank's engines, until the connection closes."""

    def answer(call: EngineCall) -> None:
        value: Any = None
        error: ErrorFields | None = None
        try:
            engine = engines[call.engine]
            is_question = call.method == "is_paused"
            value = reports_paused(engine) if is_question else getattr(engine, call.method)(*call.args)
            if call.method == "pause" and not isinstance(engine, AsyncEngine):
                # An `LLM` is not paused, and rank 0 may die between the commit and the reset of caches. None are then
                # left. The pause of an `AsyncLLM` has reset them.
                engine.reset_caches()
        except Exception as problem:
            error = as_ours(problem, call.method, engines[call.engine].name).to_fields()
        with suppress(WeightSyncError, OSError):  # rank 0 is gone
            connection.send(
                Value.of(EngineAnswer(call.number, value, error)), Deadline(timeouts.OTHER_RANK_GRACE_S), call.method
            )

    with suppress(Exception):  # rank 0 is gone, or is no rank 0
        while True:
            call = _next(connection).read(EngineCall)
            if call.method not in _METHODS or call.engine >= len(engines):
                raise ProtocolError(
                    f"rank 0 called {call.method} of engine {call.engine}, and this rank has {len(engines)} engines"
                )
            spawn(f"{call.method} for rank 0", partial(answer, call))
    connection.close()


def _next(connection: Connection) -> Value:
    """Return the next message. Wait without a limit."""
    while True:
        with suppress(SyncTimeoutError):
            return connection.expect(Value, Deadline(timeouts.OTHER_RANK_LOOK_S), "call")
