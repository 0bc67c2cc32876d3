"""Sessions: the plan and transport of engines that joined together, and the changes when engines come or go.

The engines of the first push have one session. Engines that join later get a session and a transport of their own. So
the earlier engines need no new negotiation. A push goes over all sessions, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from weightsync.fleet.engine_handle import ConnectedWorker, EngineHandle
from weightsync.kernels.digest import SAMPLES, WHOLE
from weightsync.net import timeouts
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.transports.base import Transport

_MOST = 4
"""Most sessions. Each may send the same bytes once more, and has two chunks of memory. More become one."""


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

    @property
    def sample(self) -> int | None:
        """The number of the sample with digests in the next push. None: no digests."""
        if self.verify == "none":
            return None
        return WHOLE if self.verify == "full" or self.pushes == 0 else self.pushes % SAMPLES

    @property
    def place_sample(self) -> int | None:
        """The number of the sample to compare of bytes read in place. Their first comparison covered all bytes."""
        if self.verify == "none":
            return None
        return WHOLE if self.verify == "full" else self.pushes

    def prepare_push(self) -> int:
        """Return the digest of this rank's sample of the bytes read in place."""
        return self.transport.prepare_push(self.place_sample)


class SessionChanges(Struct):
    """The changes of sessions in a push, sent by rank 0 to all ranks.

    kept: the number of each remaining session, with the workers that it no longer sends to.
    again: the old session with a transport to reuse, because the same engines connect once more. None: a new transport.
    connects: whether engines get a new session, the last one.
    """

    kept: list[tuple[int, list[int]]]
    again: int | None
    connects: bool

    def affect(self, sessions: Sequence[TransferSession]) -> bool:
        """Return whether any session changes."""
        return self.connects or len(self.kept) < len(sessions) or any(left for _, left in self.kept)


def choose_session_changes(
    sessions: Sequence[TransferSession],
    holds: bool,
    handles: Sequence[EngineHandle],
    joining: Sequence[EngineHandle] | None,
    is_only: bool,
) -> SessionChanges:
    """Return the changes of sessions for these engines.

    holds: whether the model's tensors have kept their addresses.
    joining: the engines that get a session. None: every engine without one.
    is_only: whether there is just one transport. It serves all engines or none.
    """
    kept = []
    linked: list[EngineHandle] = []
    for number, session in enumerate(sessions) if holds else ():
        staying = [one for one in session.handles if one in handles]
        left: list[int] = []
        if len(staying) < len(session.handles):
            left = [
                at for at, worker in enumerate(session.workers) if all(worker not in one.workers for one in staying)
            ]
        if staying and (not left or session.transport.drop_workers(left)):
            kept.append((number, left))
            linked += staying
    wanted = [one for one in handles if one not in linked] if joining is None else [*joining]
    if wanted and (is_only or len(kept) >= _MOST):
        kept = []
        wanted = [*handles] if joining is None else wanted
    dropped = [number for number in range(len(sessions)) if number not in dict(kept)]
    again = next((number for number in dropped if set(sessions[number].handles) == set(wanted)), None)
    return SessionChanges(kept, again, bool(wanted))
