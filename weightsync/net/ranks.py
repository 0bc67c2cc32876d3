"""The trainer's ranks as one group on the host: collective steps that fail on every rank together.

The ranks talk to trainer rank 0 over the same kind of connection as the engine's workers. A rank that dies is noticed
at once and by name. A rank that waits keeps no device busy.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from weightsync.errors import REFUSALS, ConfigError, PeerError, SyncTimeoutError, WeightSyncError, wrap_exception
from weightsync.net import timeouts
from weightsync.net.addresses import LOOPBACK, is_loopback, local_and_peer_address
from weightsync.net.connection import Connection, dial
from weightsync.net.ending import Ending
from weightsync.net.hold import Hold
from weightsync.net.listener import Listener
from weightsync.net.rendezvous import ALL_PUSH, Rendezvous
from weightsync.net.runtime import Deadline
from weightsync.net.update import Update
from weightsync.net.wire import PROTOCOL, Failure, Hello, Value
from weightsync.planning.wire_types import Plain

ALONE = "alone"
_ROLE = "rank"


class Call(Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank has called, which must be the same on every rank.

    number: how many calls the rank has made since all ranks were in step. A version that the user gives says more.
    refused: why the call cannot be, which all ranks raise. Otherwise the others would wait for this rank.
    """

    name: str = ""
    version: int | None = None
    label: str | None = None
    number: int = 0
    refused: str = ""

    def __str__(self) -> str:
        label = "" if self.label is None else f", label={self.label!r}"
        return f"{self.name}(version={self.version}{label}), call {self.number}"

    def what(self) -> str:
        """Return what is equal for the same call of two ranks."""
        return str(self if self.version is None else replace(self, number=0))


class _Begun(Struct, frozen=True, forbid_unknown_fields=True):
    """What rank 0 tells at the start of a step: whether any rank has connected for it, and what rank 0 has called."""

    is_new: bool
    call: Call


class Ranks:
    """All ranks of a process group, or this process alone.

    members: the group. None: the default group, or this process where there is none. "alone": this process.
    options: what every rank must have been given alike. Compared when ranks connect.
    hold_s: see `Hold`.

    `gather` and `broadcast` are collective. An error on any rank is raised on all, from whichever step they are in.
    `listener` is where the engines' workers connect to rank 0; None on other ranks, and while disconnected.
    """

    def __init__(
        self,
        timeout_s: float,
        members: Any = None,
        options: Mapping[str, str] | None = None,
        hold_s: float | None = None,
    ) -> None:
        self.rank, self.size = place_among(members)
        self._members, self._options = members, dict(options or {})
        self.host = LOOPBACK
        self.timeout_s = timeout_s
        self.listener: Listener | None = None
        self.hold = Hold(timeout_s, hold_s)
        self._peers: dict[int, Connection] = {}  # rank 0: to ranks 1, 2, ...; elsewhere: to rank 0
        self._address = "", 0, ""  # elsewhere than on rank 0: where it listens, and its token
        self.unended: Ending[WeightSyncError] | None = None
        """What must be done of a step that has begun and not ended."""
        self._calls = 0
        self._kept = ""  # what rank 0 calls the state that all ranks have kept after a refusal
        self._may_keep = False  # all ranks have been in this step with what they knew before
        self._has_heard = False  # in the last call, of the failure of a call that other ranks had ended before

    @property
    def connections(self) -> list[Connection]:
        """Those to the other ranks, in rank order, on rank 0. Elsewhere that to rank 0."""
        return list(self._peers.values())

    def begin(self, phase: str, call: Call | None = None) -> bool:
        """Begin a step together, and connect the ranks that are not connected. Collective.

        Returns whether some were not, on all ranks, but for ranks that are apart since a refusal that all have `kept`.
        What such a rank knew of earlier steps may be lost. Raises `SyncTimeoutError` when a rank has not come within
        `timeout_s`, and `ConfigError` when it has other options or has made another `call`.
        """
        self._may_keep = False
        self.rank, self.size = place_among(self._members)
        self._calls += 1
        call = replace(call or Call(), number=self._calls)
        has_heard, self._has_heard = self._has_heard, True
        if self.rank:
            begun = self._follow(call, phase, has_heard)
        else:
            self.listener = self.listener or Listener()
            lost = [rank for rank in range(1, self.size) if self._has_lost(rank, has_heard)]
            if lost:
                self._call(lost, self.listener, call)
            begun = self.broadcast(_Begun(bool(lost), call), phase, _Begun)
        self._has_heard = not all(connection.is_open() for connection in self.connections)
        self._may_keep = not begun.is_new or self._know_each_other(phase)
        self._kept = ""
        if call.refused:
            raise ConfigError(call.refused)
        if call.what() != begun.call.what():
            text = f"rank 0 calls {begun.call}, and rank {self.rank} calls {call}"
            raise ConfigError(
                f"the trainer's ranks are out of step: {text}. Every rank makes the same calls, with the same version "
                "and label; the next call of each is taken for the same one",
                calls=[f"trainer rank 0: {begun.call}", f"trainer rank {self.rank}: {call}"],
            )
        self._calls = begun.call.number
        return not self._may_keep

    def _follow(self, call: Call, phase: str, has_heard: bool) -> _Begun:
        """Return what rank 0 has begun, on another rank.

        A call that rank 0 has given up meanwhile is the same one where this rank comes late, which then hears why. It
        is another one where this rank has left it out. Ranks without versions and labels cannot tell, and so hear of
        one such call at most.
        """
        if self._has_lost(0, has_heard):
            self._join(call, has_heard)
        begun = self._hear(phase)
        if not self._peers[0].is_open() and begun.call.what() != call.what():
            self._join(call, has_heard)
            begun = self._hear(phase)
        return begun

    def _hear(self, phase: str) -> _Begun:
        with _hint(ALL_PUSH):
            begun: _Begun = self._peers[0].expect(Value, Deadline(self.timeout_s), phase).read(_Begun)
        return begun

    def _know_each_other(self, phase: str) -> bool:
        """Return whether all ranks have kept what they knew at the same refusal. Collective.

        Raises `ConfigError`, on rank 0, where another rank has other options. Ranks with other options do not follow
        one protocol, so that what would fail next would name another cause.
        """
        everyone = self.gather((self._kept, self._options), phase, tuple[str, dict[str, str]])
        for rank, (_, theirs) in enumerate(everyone):
            if other := [name for name, ours in self._options.items() if theirs.get(name) != ours]:
                found, expected = (
                    ", ".join(f"{name}={of.get(name)}" for name in other) for of in (theirs, self._options)
                )
                raise ConfigError(
                    f"trainer rank {rank} was given {found}, and rank 0 {expected}: give every rank the same options"
                )
        is_kept = bool(self._kept) and all(kept == self._kept for kept, _ in everyone)
        return bool(self.broadcast(is_kept, phase, bool))

    def gather(self, value: Any, phase: str, kind: Any = Plain) -> list[Any]:
        """Return every rank's value, in rank order, on rank 0; an empty list elsewhere.

        Values are of this `kind`, which msgpack carries.
        """
        self.hold.move()
        deadline = Deadline(self.timeout_s)
        if self.rank:
            self._peers[0].send(Value.of(value), deadline, phase)
            return []
        if self.listener is None or not self._peers:
            return [value]
        with _hint(ALL_PUSH):
            told = self.listener.collect(self.connections, Value, deadline, phase)
        return [value, *(message.read(kind) for message in told)]

    def broadcast(self, value: Any, phase: str, kind: Any = Plain, away_s: float = 0.0) -> Any:
        """Return rank 0's value, which is of this `kind`. Collective.

        The other ranks wait `away_s` longer than usual, for what rank 0 does before.
        """
        if self.rank:
            return (
                self._peers[0]
                .expect(Value, Deadline(timeouts.RANK_PATIENCE * self.timeout_s + away_s), phase)
                .read(kind)
            )
        self.hold.move()
        deadline, message = Deadline(self.timeout_s), Value.of(value)
        for connection in self.connections:
            connection.send(message, deadline, phase)
        return value

    def meet(self, check: Callable[[], None], deadline: Deadline, phase: str) -> None:
        """Return once every rank has come. Collective. Raise when one has failed, and on rank 0 what `check` raises."""
        if self.rank:
            self.gather(None, phase)
        elif self.listener is not None:
            self.listener.collect(self.connections, Value, deadline, phase, check)
        self.broadcast(None, phase)

    def wait(self, seconds: float) -> None:
        """Sleep for that long, during a wait of another kind. Raise when any rank has failed or died."""
        self.hold.move()
        time.sleep(seconds)
        for connection in self.connections:
            connection.check("transfer")

    def agree_on(self, error: WeightSyncError, is_untouched: bool = False) -> WeightSyncError:
        """Tell the others what went wrong here. Return the error that every rank raises: the first that rank 0 met.

        is_untouched: on rank 0, the step was refused before it changed anything. Every rank that hears so has `kept`.
        """
        self._name_silent(error)
        if not self.rank and "calls" in error.facts:
            self._name_out_of_step(error)
        if is_untouched and self._may_keep and not self.rank:
            error.add_facts(kept=[secrets.token_hex(8)])
        deadline = Deadline(timeouts.VERDICT_S)
        for connection in self.connections:
            with suppress(WeightSyncError):  # it is gone, and knows
                connection.send(Failure(error.to_fields()), deadline, "fail")
        agreed = self._verdict(error, deadline) if self.rank and self._peers else error
        if "calls" in agreed.facts:
            self._calls = 0  # on every rank
        self._kept = "".join(agreed.facts.get("kept", ()))
        return agreed

    @property
    def kept(self) -> bool:
        """Return whether what this rank knows outlives the step that was refused, and the connections to engines do."""
        return bool(self._kept)

    def _name_silent(self, error: WeightSyncError) -> None:
        """Name in an error that blames rank 0, which is here and lives, the ranks that do not answer it."""
        if self.rank or "trainer rank 0" not in getattr(error, "waiting_for", []):
            return
        deadline = Deadline(timeouts.RANK_ANSWER_S)
        for connection in self.connections:
            connection.ask(lambda: True)
        while (silent := [each.peer for each in self.connections if each.seconds_since_read]) and not deadline.passed():
            time.sleep(timeouts.RANK_LOOK_S)
            for connection in self.connections:
                connection.answer_pings()  # takes in answers, too
        if silent:
            error.message += f"; {', '.join(silent)} does not answer"
            error.add_facts(waiting_for=silent)

    def _name_out_of_step(self, error: WeightSyncError) -> None:
        """Name in an error of rank 0, which has one rank's call, the other ranks that have made other calls too."""
        calls, deadline = [*error.facts["calls"]], Deadline(timeouts.RANK_ANSWER_S)
        for connection in self.connections:
            # A rank that has made the same call says something as well, and goes on.
            while connection.is_open() and not connection.has_mail() and not deadline.passed():
                time.sleep(timeouts.RANK_LOOK_S)
            said = connection.reported()
            calls += [call for call in getattr(said, "calls", ()) if call not in calls]
        if len(calls) > len(error.facts["calls"]):
            error.message += f"; also {', '.join(calls[len(error.facts['calls']) :])}"
            error.add_facts(calls=calls)

    def _verdict(self, error: WeightSyncError, deadline: Deadline) -> WeightSyncError:
        """Return what rank 0 says the first failure was; `error` when it says the same, or nothing."""
        try:
            while True:
                self._peers[0].receive(deadline, "fail")
        except WeightSyncError:
            verdict = self._peers[0].reported()
        if verdict is None and self._peers[0].is_open() and "trainer rank 0" not in str(error):
            error.message += "; trainer rank 0 does not answer"
        if verdict is None or (type(verdict), str(verdict)) != (type(error), str(error)):
            return verdict or error
        error.add_facts(**verdict.facts)
        return error

    def part(self) -> None:
        """Close the connections to the other ranks. The next `begin` makes new ones."""
        for connection in self.connections:
            connection.close()
        self._peers.clear()

    def disconnect(self) -> None:
        """Close all connections. The next `begin` makes new ones."""
        self.part()
        self._kept = ""
        if self.listener is not None:
            self.listener.close()
        self.listener = None

    def _has_lost(self, rank: int, has_heard: bool) -> bool:
        """Return whether a rank must connect. The mail of one that left is heard first, but once in a row."""
        connection = self._peers.get(rank)
        return connection is None or not (connection.is_open() or (connection.has_mail() and not has_heard))

    def _call(self, lost: list[int], listener: Listener, call: Call) -> None:
        """Wait for these ranks, on rank 0. A rank that cannot connect says why, and all ranks raise."""
        meeting, deadline = Rendezvous(self._members), Deadline(self.timeout_s)
        meeting.invite(lost, call.what())
        try:
            # Rank 0's own name may be that of the loopback on its host. Its interface that faces another rank is not.
            faced = [each for each in meeting.hosts(deadline) if each and not is_loopback(each)]
            try:
                self.host, port = listener.listen(faced[0] if faced else LOOPBACK)
            except (OSError, ConfigError) as error:
                raise PeerError(f"trainer rank 0 cannot listen for the other ranks: {error}") from error
            offer = f"{self.host} {port} {listener.token}"
            meeting.publish(offer)
            listener.reset_role(_ROLE)
            for rank in lost:
                with _hint(ALL_PUSH):
                    ((_, connection),) = listener.admit(_ROLE, rank, deadline, "connect", partial(meeting.check, offer))
                if rank in self._peers:
                    self._peers[rank].close()
                self._peers[rank] = connection
        except WeightSyncError as error:
            meeting.publish("", refusal=error.message)
            raise

    def listen_anew(self, phase: str) -> None:
        """Listen at another port, since a fleet that is over has closed the last one. Collective."""
        if self.listener is not None:
            self.listener.close()
            self.listener = Listener()
            host, port = self.listener.listen(self.host)
            self._address = host, port, self.listener.token
        self._address = self.broadcast(self._address, phase, tuple[str, int, str])

    def _join(self, call: Call, has_heard: bool) -> None:
        """Connect to rank 0, on another rank. Both raise where that fails."""
        self.part()
        meeting, deadline = Rendezvous(self._members), Deadline(self.timeout_s)
        self.host, port, token = meeting.fetch(_own_address(), deadline, call.what(), not has_heard).split()
        self._address = self.host, int(port), token
        try:
            self._peers[0] = self.dial(_ROLE, deadline)
        except WeightSyncError as error:
            meeting.report_failure(str(error))
            raise

    def dial(self, role: str, deadline: Deadline) -> Connection:
        """Connect to rank 0, on another rank, in this role."""
        hello = Hello(
            protocol=PROTOCOL,
            role=role,
            group=self.rank,
            rank=self.rank,
            world=1,
            boot_id="",
            device="",
            gpu_uuid="",
            name=f"trainer rank {self.rank}",
            version=0,
            state="",
            update_open=False,
        )
        host, port, token = self._address
        return dial(host, port, token, hello, "trainer rank 0", deadline)


def place_among(members: Any) -> tuple[int, int]:
    """Return this process's rank among the members of a `Ranks`, and how many these are.

    Raises `ConfigError` for what is no group, and for a group without this process.
    """
    is_available = dist.is_available()
    is_group = is_available and isinstance(members, dist.ProcessGroup)
    is_outside = is_available and members == dist.GroupMember.NON_GROUP_MEMBER
    if members not in (None, ALONE) and not is_group and not is_outside:
        raise ConfigError(f'ranks={members!r}; give a process group, "{ALONE}", or None for the default group')
    if members == ALONE or not is_available or not dist.is_initialized():
        return 0, 1
    if is_outside or dist.get_rank(members) < 0:
        raise ConfigError("this process is not in the process group that `ranks` names: only its ranks push")
    return dist.get_rank(members), dist.get_world_size(members)


def uses_nccl(members: Any) -> bool:
    """Return whether the members of a `Ranks` are a process group in which NCCL carries the tensors of GPUs."""
    is_group = members != ALONE and dist.is_available() and dist.is_initialized()
    # A group may have a backend for each kind of device, and then get_backend does not name NCCL.
    return is_group and "cuda:nccl" in dist.get_backend_config(members).split(",")


@contextmanager
def collective(
    ranks: Ranks,
    call: Call | None = None,
    explain: Callable[[WeightSyncError], WeightSyncError] = lambda error: error,
    reset: Callable[[WeightSyncError], None] = lambda error: None,
    is_untouched: Callable[[], bool] = lambda: False,
    withdraw: Callable[[], bool] = lambda: True,
) -> Iterator[Update]:
    """Run the body as one step of all ranks: the first failure of any rank is raised on every rank. Collective.

    The body runs in `PlainModes`. Ranks compare their `call`s. After a failure `explain` returns the better cause that
    this rank knows. `reset` is called with the error that all ranks raise, and the ranks are disconnected. `reset` is
    called before the body, too, when ranks connect anew. Neither may raise.

    A call may be refused where rank 0 finds that all `is_untouched`. `withdraw` is called then in the place of `reset`.
    It returns whether the engines are as they were, and stay connected. Rank 0 decides alone: no rank goes on from what
    all ranks do alike before rank 0 does.
    """
    if ranks.unended is not None:  # a step that was interrupted before it could end
        ranks.unended.result()
    update = Update(ranks, ranks.timeout_s, call.version if call is not None else None)

    def end(error: WeightSyncError) -> WeightSyncError:
        keeps = False
        try:
            error = explain(error)
            error = ranks.agree_on(error, isinstance(error, REFUSALS) and is_untouched())
            if ranks.kept:
                ranks.part()  # whose failure would break the calls of `withdraw`
                keeps = withdraw()
            if not keeps:
                reset(error)
        finally:
            if not keeps:
                ranks.disconnect()
        ranks.unended = None
        return error

    interrupted = WeightSyncError("the trainer was interrupted")
    try:
        with update.modes:
            try:
                ranks.unended = Ending(partial(end, interrupted))
                ranks.hold.begin()
                if ranks.begin(update.timeline.phase, call):
                    reset(PeerError("the trainer's ranks have connected anew"))
                    ranks.listen_anew(update.timeline.phase)
                yield update
                ranks.unended = None
            except BaseException as cause:
                interrupted.phase = phase = update.timeline.phase
                if isinstance(cause, Exception) and ranks.unended is not None:
                    error = wrap_exception(cause, who=f"trainer rank {ranks.rank}", phase=phase)
                    ranks.unended = Ending(partial(end, error))
                agreed = cause if ranks.unended is None else ranks.unended.result()
                if agreed is cause or not isinstance(cause, Exception):
                    raise
                raise agreed from cause
            finally:
                ranks.hold.end()
    finally:
        # Where a signal has interrupted what is done above to end the step.
        if ranks.unended is not None:
            ranks.unended.result()
        update.modes.leave()


@contextmanager
def _hint(hint: str) -> Iterator[None]:
    """Add to a `SyncTimeoutError` of the body what may be the cause."""
    try:
        yield
    except SyncTimeoutError as error:
        raise SyncTimeoutError(
            f"{error.message}: {hint}", who=error.who, phase=error.phase, waiting_for=error.waiting_for
        ) from error


def _own_address() -> str:
    """Return the address of this rank's host that faces rank 0's, as far as MASTER_ADDR tells."""
    try:
        return local_and_peer_address(os.environ.get("MASTER_ADDR", LOOPBACK))[0]
    except OSError:
        return ""
