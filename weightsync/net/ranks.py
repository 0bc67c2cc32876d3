"""The trainer's ranks as one group on the CPU: collective steps that fail on every rank together.

The other ranks talk to trainer rank 0 over connections like those of the engine's workers. The EOF of a connection
shows at once which rank has died. A waiting rank keeps no device busy.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import replace

from weightsync.errors import REFUSALS, ConfigError, PeerError, SyncTimeoutError, WeightSyncError, wrap_exception
from weightsync.net import timeouts
from weightsync.net.addresses import LOOPBACK, is_loopback, local_and_peer_address
from weightsync.net.connection import Connection, dial
from weightsync.net.hold import Hold
from weightsync.net.listener import Listener
from weightsync.net.rendezvous import ALL_PUSH, Rendezvous
from weightsync.net.runtime import Deadline
from weightsync.net.uninterrupted import UninterruptedWork
from weightsync.net.update import Update
from weightsync.net.wire import PROTOCOL, Failure, Hello, Value
from weightsync.planning.wire_types import Plain

ALONE = "alone"
_ROLE = "rank"


class CollectiveCall(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's call of a collective method. Every rank must make the same call.

    number: count of the rank's calls since all ranks were in step. Not compared when the user gives a version.
    refused: the reason why the call is invalid. All ranks raise it, or the others would wait for this rank.
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
        """Return a text, equal for the same call of two ranks."""
        return str(self if self.version is None else replace(self, number=0))


_UNNAMED = CollectiveCall()


class _Begun(Struct, frozen=True, forbid_unknown_fields=True):
    """Rank 0's message at the start of a step: its call, and whether any rank has connected for the step."""

    is_new: bool
    call: CollectiveCall


class Ranks:
    """All ranks of a process group, or this process alone.

    members: the group. None: the default group, or this process if there is none. "alone": this process.
    options: must be equal on every rank. Compared when ranks connect.
    hold_s: see `Hold`.
    name: the name of these ranks among all `Ranks` of the job, the same on every rank. Ranks of two names never meet.

    `gather` and `broadcast` are collective. An error on any rank is raised on all, from the step that each is in.
    `listener` takes the connections of the engines' workers and of the other ranks. It is None on other ranks than 0,
    and while disconnected.
    """

    def __init__(
        self,
        timeout_s: float,
        members: Any = None,
        options: Mapping[str, str] | None = None,
        hold_s: float | None = None,
        name: str = "",
    ) -> None:
        self.rank, self.size = place_among(members)
        self.name = name
        self._members, self._options = members, dict(options or {})
        self.host = LOOPBACK
        self.timeout_s = timeout_s
        self.listener: Listener | None = None
        self.hold = Hold(timeout_s, hold_s)
        self._peers: dict[int, Connection] = {}  # rank 0: to ranks 1, 2, ...; elsewhere: to rank 0
        self._address = "", 0, ""  # of rank 0, on other ranks: address, port and token
        self.cleanup: UninterruptedWork[WeightSyncError] | None = None
        """The work that ends a failed step. None: no step is open."""
        self._calls = 0
        self.kept = ""
        """Rank 0's random name for the state that all ranks have kept after a refusal. "": no state is kept."""
        self._may_keep = False  # every rank has entered this step with its state of earlier steps
        self._has_heard = False  # the last call has raised the failure of a call that other ranks had ended before

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "name": ""}  # of the process where it was made

    @property
    def connections(self) -> list[Connection]:
        """On rank 0: the connections to the other ranks, in rank order. On other ranks: the one to rank 0."""
        return list(self._peers.values())

    def begin(self, phase: str, call: CollectiveCall = _UNNAMED) -> bool:
        """Begin a step on every rank, and connect ranks that are not connected. Collective.

        Returns, on every rank, whether any rank has connected anew: its state of earlier steps may be lost. Returns
        False after a refusal that all ranks have `kept`, though they connect anew then too.

        Raises `SyncTimeoutError` when a rank does not come within `timeout_s`. Raises `ConfigError` when a rank has
        other options, or has made another `call`.
        """
        self._may_keep = False
        self.rank, self.size = place_among(self._members)
        self._calls += 1
        call = replace(call, number=self._calls)
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
        self.kept = ""
        if call.refused:
            raise ConfigError(call.refused)
        if call.what() != begun.call.what():
            text = f"rank 0 calls {begun.call}, and rank {self.rank} calls {call}"
            raise ConfigError(
                f"the trainer's ranks are out of step: {text}. Make the same calls on every rank, with the same "
                "version and label. The next call of each rank counts as the same call",
                calls=[f"trainer rank 0: {begun.call}", f"trainer rank {self.rank}: {call}"],
            )
        self._calls = begun.call.number
        return not self._may_keep

    def _follow(self, call: CollectiveCall, phase: str, has_heard: bool) -> _Begun:
        """Return rank 0's `_Begun`, on another rank.

        Rank 0 may have given its call up meanwhile. If this rank makes the same call, it is late, and raises rank 0's
        failure. If it makes another one, it has skipped rank 0's call, and joins the next. Calls without a version look
        the same in both cases. So two calls in a row never raise such a failure.
        """
        if self._has_lost(0, has_heard):
            self._join(call, has_heard)
        begun = self._hear(phase)
        if not self._peers[0].is_open() and begun.call.what() != call.what():
            self._join(call, has_heard)
            begun = self._hear(phase)
        return begun

    def _hear(self, phase: str) -> _Begun:
        with _naming_the_cause():
            begun: _Begun = self._peers[0].expect(Value, Deadline(self.timeout_s), phase).read(_Begun)
        return begun

    def _know_each_other(self, phase: str) -> bool:
        """Return whether all ranks have kept their state at the same refusal. Collective.

        Raises `ConfigError`, on rank 0, when another rank has other options. Such ranks would take different steps, and
        a later failure would name another cause.
        """
        everyone = self.gather((self.kept, self._options), phase, tuple[str, dict[str, str]])
        for rank, (_, theirs) in enumerate(everyone):
            if other := [name for name, ours in self._options.items() if theirs.get(name) != ours]:
                found, expected = (
                    ", ".join(f"{name}={of.get(name)}" for name in other) for of in (theirs, self._options)
                )
                raise ConfigError(
                    f"trainer rank {rank} was given {found}, and rank 0 {expected}: give every rank the same options"
                )
        is_kept = bool(self.kept) and all(kept == self.kept for kept, _ in everyone)
        return bool(self.broadcast(is_kept, phase, bool))

    def gather(
        self,
        value: Any,
        phase: str,
        kind: Any = Plain,
        check: Callable[[], None] | None = None,
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """Return every rank's value, in rank order, on rank 0. Return an empty list on other ranks. Collective.

        kind: the type of the values, encodable by msgpack.
        check: called on rank 0 while it waits, and may raise.
        deadline: the limit of rank 0's wait. None: `timeout_s` from now.
        """
        self.hold.move()
        deadline = deadline or Deadline(self.timeout_s)
        if self.rank:
            self._peers[0].send(Value.of(value), deadline, phase)
            return []
        if self.listener is None or not self._peers:
            return [value]
        with _naming_the_cause():
            others = self.listener.collect(self.connections, Value, deadline, phase, check)
        return [value, *(message.read(kind) for message in others)]

    def broadcast(self, value: Any, phase: str, kind: Any = Plain, away_s: float = 0.0) -> Any:
        """Return rank 0's value, of this `kind`. Collective.

        away_s: seconds added to the other ranks' wait, for rank 0's work before it calls this.
        """
        if self.rank:
            patient = Deadline(timeouts.RANK_PATIENCE * self.timeout_s + away_s)
            return self._peers[0].expect(Value, patient, phase).read(kind)
        self.hold.move()
        if not self._peers:
            return value
        deadline, message = Deadline(self.timeout_s), Value.of(value)
        for connection in self.connections:
            connection.send(message, deadline, phase)
        return value

    def wait(self, seconds: float) -> None:
        """Sleep for this time. Raise when any rank has failed or died. For the loops of other waits."""
        self.hold.move()
        if seconds:  # even a sleep of 0 s gives Python's lock away
            time.sleep(seconds)
        for connection in self.connections:
            connection.check("transfer")

    def agree_on(self, error: WeightSyncError, is_untouched: bool = False) -> WeightSyncError:
        """Tell the other ranks this rank's error. Return the error that every rank raises: the first to reach rank 0.

        is_untouched: on rank 0, the step was refused before it changed anything. Every rank that gets rank 0's error
        then has `kept` its state.
        """
        self._name_silent(error)
        if not self.rank and "calls" in error.facts:
            self._name_out_of_step(error)
        if is_untouched and self._may_keep and not self.rank:
            error.add_facts(kept=[secrets.token_hex(8)])
        deadline = Deadline(timeouts.VERDICT_S)
        for connection in self.connections:
            connection.try_send(Failure(error.to_fields()), deadline, "fail")
        agreed = self._verdict(error, deadline) if self.rank and self._peers else error
        if "calls" in agreed.facts:
            self._calls = 0  # on every rank
        self.kept = "".join(agreed.facts.get("kept", ()))
        return agreed

    def _name_silent(self, error: WeightSyncError) -> None:
        """Add the silent ranks to an error that blames rank 0. Rank 0 runs this, so the error is wrong about it."""
        if self.rank or "trainer rank 0" not in getattr(error, "waiting_for", []):
            return
        deadline = Deadline(timeouts.RANK_ANSWER_S)
        for connection in self.connections:
            connection.ask(lambda: True)
        while (silent := [each.peer for each in self.connections if each.ping_unanswered_s]) and not deadline.passed():
            time.sleep(timeouts.RANK_LOOK_S)
            for connection in self.connections:
                connection.answer_pings()  # reads `Pong`s, too
        if silent:
            error.message += f"; {', '.join(silent)} does not answer"
            error.add_facts(waiting_for=silent)

    def _name_out_of_step(self, error: WeightSyncError) -> None:
        """Add the calls of further ranks to rank 0's out-of-step error, made for the first such rank."""
        calls, deadline = [*error.facts["calls"]], Deadline(timeouts.RANK_ANSWER_S)
        for connection in self.connections:
            # A rank with the same call sends a message as well, so this wait ends for every rank.
            while connection.is_open() and not connection.has_mail() and not deadline.passed():
                time.sleep(timeouts.RANK_LOOK_S)
            said = connection.reported()
            calls += [call for call in getattr(said, "calls", ()) if call not in calls]
        if len(calls) > len(error.facts["calls"]):
            error.message += f"; also {', '.join(calls[len(error.facts['calls']) :])}"
            error.add_facts(calls=calls)

    def _verdict(self, error: WeightSyncError, deadline: Deadline) -> WeightSyncError:
        """Return the first failure according to rank 0. Return `error` if rank 0 names the same one, or none."""
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
        self.kept = ""
        if self.listener is not None:
            self.listener.close()
        self.listener = None

    def _has_lost(self, rank: int, has_heard: bool) -> bool:
        """Return whether a rank must connect anew.

        The messages of a rank that has left are read first, but not in two calls in a row.
        """
        connection = self._peers.get(rank)
        return connection is None or not (connection.is_open() or (connection.has_mail() and not has_heard))

    def _call(self, lost: list[int], listener: Listener, call: CollectiveCall) -> None:
        """Wait until these ranks connect, on rank 0. A rank that cannot connect reports why, and all ranks raise."""
        meeting, deadline = Rendezvous(self._members, self.name), Deadline(self.timeout_s)
        meeting.invite(lost, call.what())
        try:
            # Rank 0's host name may resolve to the loopback. The interface that faces another rank is reachable.
            faced = [each for each in meeting.hosts(deadline) if each and not is_loopback(each)]
            try:
                self.host, port = listener.listen(faced[0] if faced else LOOPBACK)
            except (OSError, ConfigError) as error:
                raise PeerError(f"trainer rank 0 cannot listen for the other ranks: {error}") from error
            offer = f"{self.host} {port} {listener.token}"
            meeting.publish(offer)
            listener.reset_role(_ROLE)
            for rank in lost:
                with _naming_the_cause():
                    ((_, connection),) = listener.admit(_ROLE, rank, deadline, "connect", partial(meeting.check, offer))
                if rank in self._peers:
                    self._peers[rank].close()
                self._peers[rank] = connection
        except WeightSyncError as error:
            meeting.publish(wrap_exception(error, who=f"trainer rank {self.rank}", phase="connect"))
            raise

    def listen_anew(self, phase: str) -> None:
        """Listen at another port: a failed fleet has closed the last listener. Collective."""
        if self.listener is not None:
            self.listener.close()
            self.listener = Listener()
            host, port = self.listener.listen(self.host)
            self._address = host, port, self.listener.token
        self._address = self.broadcast(self._address, phase, tuple[str, int, str])

    def _join(self, call: CollectiveCall, has_heard: bool) -> None:
        """Connect to rank 0, on another rank. On failure both ranks raise."""
        self.part()
        meeting, deadline = Rendezvous(self._members, self.name), Deadline(self.timeout_s)
        self.host, port, token = meeting.fetch(_own_address(), deadline, call.what(), not has_heard).split()
        self._address = self.host, int(port), token
        try:
            self._peers[0] = self.dial(_ROLE, deadline)
        except WeightSyncError as error:
            meeting.report_failure(str(error))
            raise

    def dial(self, role: str, deadline: Deadline) -> Connection:
        """Connect to rank 0, on another rank, in this role."""
        hello = Hello(PROTOCOL, role, self.rank, self.rank, world=1, name=f"trainer rank {self.rank}")
        host, port, token = self._address
        return dial(host, port, token, hello, "trainer rank 0", deadline)


def place_among(members: Any) -> tuple[int, int]:
    """Return this process's rank among the members of a `Ranks`, and the number of members.

    Raises `ConfigError` when `members` is not a group, or a group without this process.
    """
    is_available = dist.is_available()
    is_group = is_available and isinstance(members, dist.ProcessGroup)
    is_outside = is_available and members == dist.GroupMember.NON_GROUP_MEMBER
    if members not in (None, ALONE) and not is_group and not is_outside:
        raise ConfigError(f'ranks={members!r}; give a process group, "{ALONE}", or None for the default group')
    if members == ALONE or not is_available or not dist.is_initialized():
        return 0, 1
    if is_outside or dist.get_rank(members) < 0:
        raise ConfigError("this process is not in the process group of `ranks`: only ranks of the group push")
    return dist.get_rank(members), dist.get_world_size(members)


def uses_nccl(members: Any) -> bool:
    """Return whether the members of a `Ranks` are a process group with NCCL as its backend for GPU tensors."""
    is_group = members != ALONE and dist.is_available() and dist.is_initialized()
    # A group may have a backend for each kind of device, and then get_backend does not name NCCL. torch 2.15 also has
    # "nccl2", "nccl-lazy" and "nccl-legacy".
    return is_group and "cuda:nccl" in dist.get_backend_config(members)


class Recovery:
    """The part of a failed step that is not the ranks' own. No method may raise."""

    def explain(self, error: WeightSyncError) -> WeightSyncError:
        """Return the cause of a failure, as far as this rank knows."""
        return error

    def reset(self, error: WeightSyncError) -> None:
        """Undo the step, with the error that all ranks raise. May take seconds.

        Every rank calls this before the ranks are disconnected, and before a step when a rank has connected anew.
        """

    def is_untouched(self) -> bool:
        """Return whether a refusal at this point has changed nothing on any rank. Called on each rank.

        Rank 0's answer counts: no rank changes anything before rank 0 does.
        """
        return False

    def withdraw(self) -> bool:
        """Take back, after a refusal, what engines were asked. Return whether they are as before.

        Called in place of `reset` if the refusal changed nothing else. The ranks then stay connected to the engines.
        """
        return True


_NONE = Recovery()


@contextmanager
def collective(ranks: Ranks, call: CollectiveCall = _UNNAMED, recovery: Recovery = _NONE) -> Iterator[Update]:
    """Run the body as one step of all ranks: the first failure of any rank is raised on every rank. Collective.

    The body runs in `PlainModes`. Every rank must make the same `call`, named or not.
    """
    if ranks.cleanup is not None:  # an earlier step, interrupted before its end
        ranks.cleanup.result()
    update = Update(ranks, ranks.timeout_s, call.version, call.label)

    def end(error: WeightSyncError) -> WeightSyncError:
        keeps = False
        try:
            error = recovery.explain(error)
            error = ranks.agree_on(error, isinstance(error, REFUSALS) and recovery.is_untouched())
            if ranks.kept:
                ranks.part()  # or the other ranks' `Failure`s and EOFs would break the calls of `withdraw`
                keeps = recovery.withdraw()
            if not keeps:
                recovery.reset(error)
        finally:
            if not keeps:
                ranks.disconnect()
        ranks.cleanup = None
        return error

    interrupted = WeightSyncError("the trainer was interrupted")
    try:
        with update.modes:
            try:
                ranks.cleanup = UninterruptedWork(partial(end, interrupted))
                ranks.hold.begin()
                if ranks.begin(update.timeline.phase, call):
                    recovery.reset(PeerError("the trainer's ranks have connected again"))
                    ranks.listen_anew(update.timeline.phase)
                yield update
                ranks.cleanup = None
            except BaseException as cause:
                who, phase = interrupted.who, interrupted.phase = f"trainer rank {ranks.rank}", update.timeline.phase
                if isinstance(cause, Exception) and ranks.cleanup is not None:
                    error = wrap_exception(cause, who=who, phase=phase)
                    ranks.cleanup = UninterruptedWork(partial(end, error))
                agreed = cause if ranks.cleanup is None else ranks.cleanup.result()
                if agreed is cause or not isinstance(cause, Exception):
                    raise
                raise agreed from cause
            finally:
                ranks.hold.end()
    finally:
        # A signal may have interrupted the code above that ends the step.
        if ranks.cleanup is not None:
            ranks.cleanup.result()
        update.modes.leave()


@contextmanager
def _naming_the_cause() -> Iterator[None]:
    """Add the probable cause to a `SyncTimeoutError` of the body: a rank that does not push."""
    try:
        yield
    except SyncTimeoutError as error:
        error.message += f": {ALL_PUSH}"
        raise


def _own_address() -> str:
    """Return this host's address that faces $MASTER_ADDR, the host of rank 0. "": there is no route."""
    try:
        return local_and_peer_address(os.environ.get("MASTER_ADDR", LOOPBACK))[0]
    except OSError:
        return ""
