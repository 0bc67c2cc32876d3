"""Sessions: the plan and transport of engines that joined together, and the changes when engines come or go.

The engines of the first push have one session. Engines that join later get a session and a transport of their own. So
the earlier engines need no new negotiation. A push goes over all sessions, one after the other. Sessions with chains
become one in the first push after all their engines have the version. Each byte is then sent once again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from msgspec import Struct

from weightsync.errors import ConfigError
from weightsync.fleet.engine_handle import ConnectedWorker, EngineHandle
from weightsync.fleet.fleet import Fleet
from weightsync.kernels.digest import SAMPLES, WHOLE
from weightsync.net import timeouts
from weightsync.net.update import Update
from weightsync.net.wire import Connect, Go
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.planning.wire_types import ByteRange, Storage
from weightsync.strategies.base import Options
from weightsync.transports.base import LocalTensors, Seal, Transport

logger = logging.getLogger(__name__)

_MOST = 4
"""Most sessions. Each may send the same bytes once more, and has two chunks of memory. More become one."""


class Memory(Struct):
    """One rank's storages for each worker, its byte ranges read in place, and their digest."""

    storages: list[list[Storage]]
    in_place: list[ByteRange]
    proof: int


@dataclass(eq=False)
class TransferSession:
    """A negotiated plan with its transport. It is valid while this rank's shards keep their addresses.

    verify: the option of `WeightSync`.
    workers: the workers of the negotiation, on rank 0.
    handles: the engines still in the session, on rank 0.
    pushes: the number of pushes committed by every engine.
    """

    transport: Transport
    plan: TransferPlan
    verify: str
    workers: list[ConnectedWorker]
    handles: list[EngineHandle]
    pushes: int = 0

    @property
    def due(self) -> Sequence[int]:
        """The chunks of the next push."""
        return self.plan.due(self.pushes == 0)

    def done_s(self, timeout_s: float) -> float:
        """Return the time limit of workers for the chunks that are due, after rank 0 has sent its own part."""
        staged = sum(not self.plan.chunks[number].in_place for number in self.due)
        return min(1 + staged, timeouts.WORKERS_DONE_PATIENCE) * timeout_s

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors in the next push, each counted once."""
        return self._nbytes[self.pushes == 0]

    @cached_property
    def _nbytes(self) -> tuple[int, int]:
        # Cached: a mixture of experts has tens of thousands of tensors, and engines are paused meanwhile.
        return self.plan.nbytes(first=False), self.plan.nbytes(first=True)

    @property
    def left_out(self) -> frozenset[str]:
        """The tensors that only the first push sends. Empty before that push has ended."""
        return self._frozen if self.pushes else frozenset()

    @cached_property
    def _frozen(self) -> frozenset[str]:
        return frozenset(name for chunk in self.plan.chunks if chunk.frozen for name in chunk.names)

    def seal(self, version: int) -> Seal | None:
        """Return the digests of the next push, with this version. None: no digests."""
        if self.verify == "none":
            return None
        return Seal(WHOLE if self.verify == "full" or self.pushes == 0 else self.pushes % SAMPLES, version)

    def go(self, version: int, digests: list[int]) -> Go:
        """Return the workers' order to load the next push.

        digests: of each rank's sample of bytes read in place.
        """
        seal = self.seal(version)
        return Go(version, None if seal is None else seal.sample, self.place_sample, digests)

    @property
    def place_sample(self) -> int | None:
        """The number of the sample to compare of bytes read in place. Their first comparison covered all bytes."""
        if self.verify == "none":
            return None
        return WHOLE if self.verify == "full" else self.pushes

    def connect(self, update: Update, tensors: LocalTensors, fleet: Fleet | None) -> None:
        """Connect transport and workers, and compare digests of the bytes read in place. Collective.

        fleet: on rank 0, with the session's engines.
        """
        ranks, transport, plan = update.ranks, self.transport, self.plan
        if fleet is not None:
            logger.info(
                "planned a push over %s: %d tensors in %d chunks, from %d ranks to %d workers of %s",
                *(transport.name, len(plan.manifest), len(plan.chunks), ranks.size, plan.workers),
                ", ".join(one.engine.name for one in self.handles),
            )
        endpoints = transport.prepare(plan, tensors, update)
        proof = transport.prepare_push(WHOLE if self.verify != "none" else None)
        own = Memory([each.storages for each in endpoints], transport.in_place(), proof)
        everyone: list[Memory] = ranks.gather(own, "connect", Memory)
        if fleet is None:
            transport.connect(update.deadline_after_workers())
        else:
            messages = [
                Connect(
                    transport=transport.name,
                    storages=[row for memory in everyone for row in memory.storages[number]],
                    chunks=list(endpoint.arrivals),
                    frozen=plan.frozen_chunks,
                    in_place=[run for memory in everyone for run in memory.in_place],
                    proof=[memory.proof for memory in everyone] if self.verify != "none" else [],
                    fields=endpoint.fields,
                )
                for number, endpoint in enumerate(endpoints)
            ]
            fleet.connect_transport(messages, partial(transport.connect, update.deadline_after_workers()))
            fleet.release("init")
        ranks.broadcast(None, "connect")


class SessionChanges(Struct):
    """The changes of sessions in a push, sent by rank 0 to all ranks.

    kept: the number of each remaining session, with the workers that it no longer sends to.
    again: the dropped sessions of the engines that connect, if all had one. The first one's transport is reused.
    connects: whether engines get new sessions, the last ones.
    """

    kept: list[tuple[int, list[int]]]
    again: list[int]
    connects: bool

    def affect(self, sessions: Sequence[TransferSession]) -> bool:
        """Return whether any session changes."""
        return self.connects or len(self.kept) < len(sessions) or any(left for _, left in self.kept)


class Sessions:
    """The sessions of a strategy, and the transports behind them.

    negotiated: all sessions, the oldest first.
    again: during a negotiation, the plans of the dropped sessions of its engines, if all had one.
    """

    def __init__(self, options: Options, transport: Transport, another: Callable[[], Transport] | None) -> None:
        """Connect engines over `transport`, or each session over a transport of `another`.

        With `rolling=True` each engine has a session of its own, for any number of engines.

        Raises `ConfigError` for an encoding that `transport` does not know.
        """
        if options.encoding is not None and options.encoding not in transport.encodings:
            known = ", ".join(map(repr, transport.encodings))
            advice = f"choose {known}, or leave it out" if known else 'leave it out, or use transport="broadcast"'
            raise ConfigError(f"transport {transport.name!r} has no encoding={options.encoding!r}; {advice}")
        self._transport, self._another, self._of_one = transport, another, options.rolling is True
        self._encoding = options.encoding, options.encoding_base
        self.negotiated: list[TransferSession] = []
        self.again: list[TransferPlan] = []
        self._joining: list[Transport] = []  # the transport of the session under negotiation

    def prepare_push(self) -> list[int]:
        """Return the digest of each session's sample of this rank's bytes read in place."""
        return [session.transport.prepare_push(session.place_sample) for session in self.negotiated]

    def choose(
        self, holds: bool, handles: Sequence[EngineHandle], joining: Sequence[EngineHandle] | None
    ) -> SessionChanges:
        """Return the changes of sessions for these engines. Rank 0 calls it.

        holds: whether the model's tensors have kept their addresses.
        joining: the engines that get a session. None: every engine without one.
        """
        kept: list[tuple[int, list[int]]] = []
        linked: list[EngineHandle] = []
        merges = joining is None and self.merges(handles)
        for number, session in enumerate(self.negotiated) if holds and not merges else ():
            staying = [one for one in session.handles if one in handles]
            left: list[int] = []
            if len(staying) < len(session.handles):
                still = [worker for one in staying for worker in one.workers]
                left = [at for at, worker in enumerate(session.workers) if worker not in still]
            if staying and (not left or session.transport.drop_workers(left)):
                kept.append((number, left))
                linked += staying
        wanted = [one for one in handles if one not in linked] if joining is None else [*joining]
        most = len(handles) if self._of_one else _MOST
        if wanted and (self._another is None or len(kept) >= most):  # one transport serves all engines or none
            kept = []
            wanted = [*handles] if joining is None else wanted
        dropped = [number for number in range(len(self.negotiated)) if number not in dict(kept)]
        again = [number for number in dropped if not set(wanted).isdisjoint(self.negotiated[number].handles)]
        had = {one for number in again for one in self.negotiated[number].handles}
        return SessionChanges(kept, again if had.issuperset(wanted) else [], bool(wanted))

    def merges(self, handles: Sequence[EngineHandle]) -> bool:
        """Return whether the sessions of these engines become one in the next push: their workers form chains again."""
        had = [{*session.handles}.intersection(handles) for session in self.negotiated if session.plan.chains]
        return not self._of_one and sum(map(bool, had)) > 1 and set().union(*had) == {*handles}

    def apply(self, changes: SessionChanges, handles: Sequence[EngineHandle] | None) -> Transport | None:
        """Drop sessions. Return the transport for a new session, or None if there is to be none.

        handles: all engines, on rank 0. There, `choose` has dropped the workers that left.
        """
        before = self.negotiated
        again = before[changes.again[0]].transport if changes.again else None
        self.again = [before[number].plan for number in changes.again]
        for number, left in changes.kept:
            if handles is not None:
                before[number].handles = [one for one in before[number].handles if one in handles]
            elif left:
                before[number].transport.drop_workers(left)
        self.negotiated = [before[number] for number, _ in changes.kept]
        for session in before:
            if session not in self.negotiated and session.transport is not again:
                session.transport.release()
        return self.begin(again) if changes.connects else None

    def keeps(self, plan: TransferPlan) -> bool:
        """Return whether the workers of a new session have the bytes of the last push at their places in `plan`."""
        return bool(self.again) and all(plan.is_laid_out_as(each) for each in self.again)

    def begin(self, again: Transport | None = None) -> Transport:
        """Return the transport for a new session. `again`: one to reuse."""
        transport = again or (self._transport if self._another is None else self._another())
        transport.claim(self, *self._encoding)
        self._joining = [transport]
        return transport

    def add(self, session: TransferSession) -> None:
        """Keep a new session that is connected."""
        self.negotiated, self._joining, self.again = [*self.negotiated, session], [], []

    def sort(self, seconds: Sequence[float]) -> None:
        """Order the sessions by these seconds, one number for each. Every rank gives the same numbers."""
        order = sorted(range(len(self.negotiated)), key=seconds.__getitem__)
        self.negotiated = [self.negotiated[at] for at in order]

    def disconnect(self) -> None:
        """Drop all sessions, also one under negotiation."""
        for transport in (*(session.transport for session in self.negotiated), *self._joining):
            transport.release()
        self.negotiated, self._joining = [], []
