"""What was negotiated with engines that joined a `WeightSync` together, and what becomes of it when engines change.

The engines of the first push have one session. Engines that join later get one of their own, with a transport of their
own, so that those that stay are asked nothing. A push goes over all sessions, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import Struct

from weightsync.fleet.engine_handle import EngineHandle, Worker
from weightsync.kernels.digest import SAMPLES, WHOLE
from weightsync.net import timeouts
from weightsync.planning.transfer_plan import TransferPlan
from weightsync.transports.base import Transport

_MOST = 4
"""Links at most: each may send the same bytes once more, and has two chunks of memory. More become one."""


@dataclass(eq=False)
class TransferSession:
    """What holds while this rank's shards lie where they lay.

    verify: the option of `WeightSync`.
    workers, handles: those that were negotiated with, and the engines that are left of them, on rank 0.
    pushes: how many every engine has committed.
    """

    transport: Transport
    plan: TransferPlan
    verify: str
    workers: list[Worker]
    handles: list[EngineHandle]
    pushes: int = 0

    @property
    def due(self) -> Sequence[int]:
        """Return the chunks of the next push."""
        return self.plan.due(self.pushes == 0)

    def done_s(self, timeout_s: float) -> float:
        """Return how long workers may take for these once rank 0 has sent its own part."""
        staged = sum(not self.plan.chunks[number].in_place for number in self.due)
        return min(1 + staged, timeouts.WORKERS_DONE_PATIENCE) * timeout_s

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors that travel in the next push, each counted once."""
        return self._nbytes[self.pushes == 0]

    @cached_property
    def _nbytes(self) -> tuple[int, int]:
        # There are tens of thousands of tensors in a mixture of experts, and engines are paused meanwhile.
        return self.plan.nbytes(first=False), self.plan.nbytes(first=True)

    @property
    def left_out(self) -> frozenset[str]:
        """Return the tensors that travel in the first push alone, where that is over."""
        return self._frozen if self.pushes else frozenset()

    @cached_property
    def _frozen(self) -> frozenset[str]:
        return frozenset(name for chunk in self.plan.chunks if chunk.frozen for name in chunk.names)

    @property
    def sample(self) -> int | None:
        """Return which sample of what travels gets digests in the next push."""
        if self.verify == "none":
            return None
        return WHOLE if self.verify == "full" or self.pushes == 0 else self.pushes % SAMPLES

    @property
    def place_sample(self) -> int | None:
        """Return which sample is compared of what is read in place, and was proven in full when it was mapped."""
        if self.verify == "none":
            return None
        return WHOLE if self.verify == "full" else self.pushes

    def prepare_push(self) -> int:
        """Return the digest of this rank's sample of what is read in place."""
        return self.transport.prepare_push(self.place_sample)


class SessionChanges(Struct):
    """What becomes of the sessions in a push, as rank 0 tells all ranks.

    kept: the sessions that stay, each with the workers that it no longer sends to.
    again: the session whose transport connects to the same engines once more. None: another transport does.
    connects: engines get a session, the last one.
    """

    kept: list[tuple[int, list[int]]]
    again: int | None
    connects: bool

    def affect(self, sessions: Sequence[TransferSession]) -> bool:
        """Return whether anything becomes of them."""
        return self.connects or len(self.kept) < len(sessions) or any(left for _, left in self.kept)


def choose_session_changes(
    sessions: Sequence[TransferSession],
    holds: bool,
    handles: Sequence[EngineHandle],
    joining: Sequence[EngineHandle] | None,
    is_only: bool,
) -> SessionChanges:
    """Return what becomes of the sessions, where these engines are there.

    holds: the model lies where it lay. joining: who gets a session, or None for everyone without one. is_only: there is
    one transport, which serves all of them or none.
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
