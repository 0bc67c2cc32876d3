"""Trainer rank 0 and the engines: the calls and messages of a push, and the rollback of a failed push.

    follow              engines come and go
    connect             once for an engine: its `init` connects its workers, for PlanRequest and Connect
    open, wait_open     finish an update left open by another trainer, pause, start; then call `update`
    go, wait_done       workers run the plan
    commit              workers commit; caches are reset, the update is finished under its version, generation resumes

`UpdateState` has the states of an engine in a push, and the calls that follow a failure in each.

An engine is marked POISONED before anything is written, so its version is right even if the trainer dies. The open
connection to its workers is a trainer's hold on it. When a worker closes the connection, the engine has died or another
trainer has taken it over. This trainer then makes no more calls to the engine.

Engine calls run in threads, since each returns only when its workers are released. A `QueueingEngine` gets all calls of
`open` at once, and the calls of `commit` behind `Go`. None waits for an earlier one's answer. This module knows nothing
about models, plans or transports.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from weightsync.engines import Engine
from weightsync.engines.base import AwaitAnswer
from weightsync.errors import (
    EngineAsleepError,
    EngineError,
    EngineUnreachableError,
    FencedError,
    FrozenLostError,
    PeerError,
    SyncTimeoutError,
    WeightSyncError,
)
from weightsync.fleet.engine_call import BackgroundCall, EngineCalls, await_calls, join, repeat, wait_at_exit
from weightsync.fleet.engine_handle import CALLER, ConnectedWorker, EngineHandle, UpdateState, admit, find_lost
from weightsync.fleet.kv_roles import turns
from weightsync.net import timeouts, wire
from weightsync.net.addresses import is_behind_nat, is_loopback, local_and_peer_address, published_ports
from weightsync.net.listener import Listener
from weightsync.net.ranks import Ranks
from weightsync.net.runtime import Deadline, spawn
from weightsync.planning.layout import Manifest
from weightsync.planning.load_plan import LoadPlan
from weightsync.report import EngineReport

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=wire.Message)
_Method = Callable[[EngineHandle], None]
_Check = Callable[[], None]

_REFUSALS = FencedError, EngineAsleepError, FrozenLostError
"""Errors of a worker on leaving a push. Their effects on the other workers may be reported before them."""


class Fleet:
    """The engines of one `WeightSync`, on rank 0. Every method but `fail` raises `WeightSyncError`s.

    Messages and calls go to the active engines: all, or the handles given to `connect` or `open`. Other engines
    continue to generate.
    """

    def __init__(
        self, engines: Sequence[Engine], ranks: Ranks, pause: str, timeout_s: float, failed: Fleet | None = None
    ) -> None:
        """Take these engines. `failed`: the fleet before this one. `connect` waits for its unfinished calls."""
        assert ranks.listener is not None, "a fleet is rank 0's"
        self.newest_version: int = failed.newest_version if failed is not None else 0
        self._numbers = itertools.count()
        self.handles = self._active = [EngineHandle(one, next(self._numbers)) for one in engines]
        self._ranks = ranks
        self._listener: Listener = ranks.listener
        self._listener.reset_role("worker")
        self._pause = pause
        self._timeout_s = timeout_s
        self._id = secrets.token_hex(8)
        self._version = 0
        self._calls: EngineCalls = EngineCalls(ranks.listener, failed._calls if failed is not None else None)
        self._ended = threading.Event()
        spawn("lease", partial(repeat, weakref.WeakMethod(self._answer_pings), timeouts.LEASE_LOOK_S, self._ended))
        spawn("health", partial(repeat, weakref.WeakMethod(self._ask_health), timeouts.HEALTH_LOOK_S, self._ended))

    def report(self) -> list[EngineReport]:
        """Return the reports of the active engines. Call it right after `commit`."""
        now = time.perf_counter()
        return [EngineReport(one.engine.name, now - one.paused_at) for one in self._active]

    @property
    def workers(self) -> list[ConnectedWorker]:
        """The workers of the active engines."""
        return [worker for one in self._active for worker in one.workers]

    @property
    def host(self) -> str:
        """This process's address for the active engines. The loopback only if they are all on this host."""
        addresses = [self._listener.listen(one.engine.host)[0] for one in self._active]
        return next((address for address in addresses if not is_loopback(address)), addresses[0])

    def follow(self, engines: Sequence[Engine]) -> bool:
        """Remove all engines but these, and add new ones. Return whether neither was needed.

        No engine is called. A removed engine serves its weights, and another trainer may push to it. An engine that has
        closed its connections, such as one started anew, is removed and added again. Raises `FencedError` for an engine
        of another trainer.
        """
        for one in self.handles:
            one.check_fence()
        staying = [one for one in self.handles if one.engine in engines and one.is_held()]
        left = [one for one in self.handles if one not in staying]
        known = [one.engine for one in staying]
        joined = [EngineHandle(one, next(self._numbers)) for one in engines if one not in known]
        if left or joined:
            self.handles = self._active = [*staying, *joined]
        _hang_up(left)
        for what, those in (("releases", left), ("takes in", joined)):
            if those:
                logger.info("a push %s %s", what, ", ".join(one.engine.name for one in those))
        return not left and not joined

    def connect(self, handles: Sequence[EngineHandle] | None = None) -> list[ConnectedWorker]:
        """Call `init` on all engines, or on these, and return their workers.

        The workers wait for messages until `release`.
        """
        self._active = [*(self.handles if handles is None else handles)]
        self._calls.await_earlier({one.engine.name for one in self._active}, self._timeout_s)
        deadline = Deadline(self._timeout_s)
        ports = published_ports() if is_behind_nat() else ()
        calls = {one: self._call_in(one) for one in self._active}
        self._dial_workers(calls, ports)
        early: list[EngineHandle] = []
        for one in self._active:
            if not one.workers:
                admit(one, calls, early, self._listener, self._check_everyone, deadline)
        self.newest_version = max([self.newest_version, *(one.newest_version for one in self._active)])
        for worker in self.workers:  # a transport through shared memory does not notice a lost network
            worker.connection.watch_host(self._timeout_s)
            worker.connection.holds = self._ranks.hold.lasts
        if early:
            await_calls([calls[one] for one in early], deadline, "init", self._check_waiting)
            calls |= {one: self._call_in(one) for one in early}
            self._calls.running = [*calls.values()]
        return self.workers

    def _call_in(self, one: EngineHandle) -> BackgroundCall:
        """Begin an engine's `init` call."""
        where = one.engine.host  # outside of `try`: it may call the engine and raise a `SyncTimeoutError`, an `OSError`
        try:
            info = self._listener.invitation(self._id, one.number, where, self._timeout_s)
        except OSError as error:
            raise EngineUnreachableError(f"no route to {where}: {error}", who=one.engine.name) from error
        return self._calls.run("init", one.engine.init, info, who=one.engine.name)

    def _dial_workers(self, calls: Mapping[EngineHandle, BackgroundCall], ports: Sequence[int]) -> None:
        """Dial the workers of these `init` calls at these ports, until all have answered. Returns at once."""

        def is_wanted() -> bool:
            return any(not one.workers and call.is_alive() for one, call in calls.items())

        hosts = {local_and_peer_address(one.engine.host)[1] for one in calls if ports}
        for host, port in itertools.product(hosts, ports):
            spawn("dial", partial(self._listener.dial, host, port, is_wanted))

    def plan(
        self, manifest: Manifest, keep: Sequence[str], transport: str = "", invitations: Sequence[dict[str, Any]] = ()
    ) -> list[LoadPlan]:
        """Return each worker's load plan for these tensors. Equal plans are one object.

        keep: as for `TensorSelection`.
        invitations: for each worker, its invitation to meet the others over `transport` meanwhile. Empty: no meeting.
        """
        requests = [
            wire.PlanRequest(manifest.tensors, manifest.tied, tuple(keep), transport if each else "", each)
            for each in invitations or [{}] * len(self.workers)
        ]
        found: list[tuple[wire.PackedLoadPlan, LoadPlan]] = []
        for packed in self._ask(requests, wire.PackedLoadPlan, "plan"):
            plan = next((plan for known, plan in found if known == packed), None)
            found.append((packed, plan or packed.read(manifest.names)))
        return [plan for _, plan in found]

    def export(self, processes: Sequence[str]) -> list[wire.ParametersExported]:
        """Return the locations of each worker's parameters. `processes`: the names of the processes writing there."""
        requests = [wire.ExportParameters(list(processes))] * len(self.workers)
        return self._ask(requests, wire.ParametersExported, "connect")

    def connect_transport(self, messages: Sequence[wire.Connect], link: Callable[[], None]) -> None:
        """Send every worker its `Connect`, and wait for every `Connected`. `link` runs in a thread meanwhile."""
        deadline = Deadline(self._timeout_s)
        self._send(messages, deadline, "connect")
        linking = self._calls.run("connect", link)
        self._collect(wire.Connected, deadline, "connect")
        await_calls([linking], deadline, "connect", self._check_waiting)
        self._calls.running.remove(linking)

    def release(self, phase: str) -> None:
        """Release the workers from their engine calls, and wait until the calls have returned."""
        deadline = Deadline(self._timeout_s)
        self._send([wire.Release()] * len(self.workers), deadline, phase)
        self._await_running(deadline, phase)

    def open(self, handles: Sequence[EngineHandle] | None = None) -> None:
        """Begin to pause generation and to open the update, on all engines or on these.

        Returns at once. `wait_open` waits.
        """
        self._active = [*(self.handles if handles is None else handles)]
        for worker in self.workers:  # raises before a call could reach an engine restarted at this address
            worker.connection.check("pause")
        self._enter(UpdateState.OPEN)
        self._calls.changes, self._calls.finishes = [], []
        if self._pause == CALLER or any(one.served is None or one.queue is None for one in self._active):
            self._calls.opening = self._calls.run("open", self._open)
            return
        sent = threading.Event()
        self._calls.opening = self._calls.run("open", self._send_open, sent)
        sent.wait(self._timeout_s)  # or the sending would wait for Python's lock while this thread reads the model

    def wait_open(self) -> None:
        """Wait until generation is paused everywhere and every worker serves the update. Raise a worker's refusal."""
        opening = self._calls.opening
        if opening is None:
            return
        while opening.is_alive():  # ends: each of its calls has a deadline
            opening.join(timeouts.CALL_LOOK_S)
            self._check_ranks()
        self._calls.opening = None
        if opening.error is not None:
            opening.error.phase = opening.error.phase or "pause"
            raise opening.error
        # Finds a worker that cannot take part, or does not answer, before anything is written anywhere.
        self._collect(wire.Ready, Deadline(self._timeout_s), "pause")

    def cancel(self) -> None:
        """Close the open update before `go`, if there is one. The engines then generate as before."""
        if any(one.state is UpdateState.OPEN for one in self._active):
            self.wait_open()
            self.check()
            self.release("pause")
            self._all("pause", self._active, EngineHandle.roll_back)
            self._enter(UpdateState.CLOSED)

    def go(self, message: wire.Go, handles: Sequence[EngineHandle] | None = None) -> None:
        """Send `Go` to all workers, or to the workers of these engines: run your part of the plan.

        From here on the engines' weights are a mixture. Raises before if a rank or a worker is known to be gone.
        """
        self._check_ranks()
        self.check()
        self._version = message.version
        deadline = Deadline(self._timeout_s)
        handles = self._active if handles is None else handles
        for one in handles:
            one.go(message, deadline)
        self._calls.finishes += [
            self._calls.change("commit", one.send_finish, who=one.engine.name) for one in handles if one.queue
        ]

    def wait_done(self, timeout_s: float | None = None) -> list[wire.Done]:
        """Wait for every worker's `Done`: it has verified and loaded everything.

        timeout_s: the limit. None: the limit of a single wait.
        """
        return self._collect(wire.Done, Deadline(timeout_s or self._timeout_s), "load")

    def commit(self, label: str | None = None) -> list[wire.Committed]:
        """Commit the version: reset caches, stamp the version or its `label`, resume generation."""
        deadline = Deadline(self._timeout_s)
        # Set before sending: once a worker may have this version, no other weights may get its number.
        self.newest_version = max(self.newest_version, self._version)
        self._send([wire.Commit(self._version)] * len(self.workers), deadline, "commit")
        # An engine serves one call at a time. Queued behind `update`, the reset saves a round trip.
        called = [one for one in self._active if one.queue is None]
        resets = [self._change("commit", one, lambda each: each.engine.reset_caches()) for one in called]
        answers = self._collect(wire.Committed, deadline, "commit")
        self._enter(UpdateState.FINISHING)
        self._await_running(deadline, "commit")
        await_calls(self._calls.finishes, deadline, "commit", self._check_waiting)
        version, text = self._version, str(self._version) if label is None else label
        silent = [one for one in self._active if one.queue is not None and one.version is None]
        for one in silent:  # no call is left
            one.finish(version, text)
        calling = [one for one in self._active if one not in silent]
        self._all("commit", calling, lambda one: one.finish(version, text))
        await_calls(resets, Deadline(self._timeout_s), "commit", self._check_waiting)
        # After the resets: an engine with a KV cache of the old weights must not resume.
        self._enter(UpdateState.COMMITTED)
        if self._pause != CALLER:
            self._all("resume", called, lambda one: one.engine.resume())
        self._enter(UpdateState.CLOSED)
        return answers

    def check(self) -> None:
        """Raise when a worker or an engine call has failed, or does not answer."""
        for worker in self.workers:
            worker.connection.check("transfer")
        self._calls.check()
        self._check_health()

    def explain(self, error: WeightSyncError) -> WeightSyncError:
        """Return the cause of `error`: a worker's own error, or else `error` itself. Its text names POISONED engines.

        Adds the names of lost engines as the fact `lost`, and of the others as `survivors`.
        """
        cause = self._cause(error)
        if mixed := [one.engine.name for one in self.handles if (one.is_dirty or one.is_poisoned) and one.is_held()]:
            cause.message += f"; {wire.POISONED} until the next success: {', '.join(mixed)}"
        return cause

    def _cause(self, error: WeightSyncError) -> WeightSyncError:
        if isinstance(error, PeerError) and self._is_dirty():
            time.sleep(timeouts.WORKER_MESSAGE_S)
        for worker in self.workers:
            worker.connection.is_open()  # reads the worker's messages into the inbox
        said = [worker.connection.reported() for worker in self.workers]
        for kind in _REFUSALS:
            if (refusal := next((each for each in said if isinstance(each, kind)), None)) is not None:
                return refusal
        if isinstance(error, (PeerError, EngineError, SyncTimeoutError)) and (lost := find_lost(self.handles, error)):
            error.add_facts(lost=lost, survivors=[o.engine.name for o in self.handles if o.engine.name not in lost])
        elif isinstance(error, PeerError):
            # The transfer may break before the `Failure` of the worker that broke it arrives.
            return next((e for e in said if e is not None and not isinstance(e, (PeerError, SyncTimeoutError))), error)
        return error

    def fail(self, error: WeightSyncError) -> None:
        """Roll the push back by the table of `UpdateState`. Never raises. Takes seconds. Ends the fleet.

        Calls to silent engines are made, but not waited for before this process exits. A silent engine serves them when
        it continues. An engine is silent, too, if a call has reached its deadline: further calls wait behind this call.
        """
        is_dirty = self._is_dirty()
        silent = {*getattr(error, "lost", []), *getattr(error, "waiting_for", [])}
        deadline = Deadline(0.0 if silent.issuperset(one.engine.name for one in self.handles) else timeouts.FAREWELL_S)
        held = [one for one in self._active if one.is_held()]
        mixed = [one for one in held if is_dirty and (one.is_dirty or one.is_poisoned)]
        self._enter(UpdateState.FAILED)
        everyone = [worker for one in self.handles for worker in one.workers]
        spoilt = [worker for one in mixed for worker in one.workers]
        for worker in everyone:
            fields = error.to_fields(poisoned=[]) if worker in spoilt else error.to_fields()
            worker.connection.try_send(wire.Failure(fields), deadline, "fail")
        # Otherwise a worker that is connecting would wait for its admission, and block its engine.
        self._listener.close()
        join([*self._calls.running, *self._calls.changes], silent, deadline)
        silent |= self._try_all("give up", held, EngineHandle.roll_back, silent, deadline)
        # vLLM reports the version with every answer, so users see the mark. Generation stays paused.
        mark = f"{wire.POISONED}: the push of version {self._version} failed"
        self._try_all("mark", mixed, lambda one: one.engine.set_version(mark), silent, deadline)
        wait_at_exit(self._calls.unfinished())
        self._ended.set()
        for worker in everyone:
            worker.connection.close()

    def close(self) -> None:
        """Disconnect from the workers, as `_hang_up` does. Another trainer may push afterwards."""
        self._ended.set()
        _hang_up(self.handles)

    def _answer_pings(self) -> None:
        """Answer the workers' `Ping`s and send them ours. In a thread, so other threads' work does not delay it."""
        for one in self.handles:
            for worker in one.workers:
                if worker.connection.answer_pings():
                    self._listener.wake()  # the main thread's poll does not see bytes that were read here
            one.ask_workers()

    def _ask_health(self) -> None:
        """Run the engines' health checks, while a push or a call is under way."""
        for one in self._active:
            if self._calls.running or one.state is not UpdateState.CLOSED:
                one.ask_whether_alive()

    def _enter(self, state: UpdateState) -> None:
        for one in self._active:
            one.state = state

    def _is_dirty(self) -> bool:
        return any(one.is_dirty for one in self._active)

    def _open(self) -> None:
        met = [one for one in self._active if one.served is None]
        change = partial(self._all, "pause", look=self._check_health)
        change(met, EngineHandle.finish_left_open)
        change(met, EngineHandle.read_version)
        for group in turns(self._active):
            # Both at once: `pause` first waits for running requests, for one step or for all of their tokens.
            change(group, partial(EngineHandle.pause, mode=self._pause), EngineHandle.start)
        change(self._active, EngineHandle.mark)
        for one in self._active:
            if one.state is UpdateState.OPEN:
                self._calls.run("update", one.engine.update, {"session": self._id}, who=one.engine.name)
        self._ask_whether_ready()

    def _send_open(self, sent: threading.Event) -> None:
        """Do as `_open`, with engines that take calls ahead. Set `sent` when the calls are sent."""
        earlier: list[AwaitAnswer] = []
        try:
            for one in self._active:
                if one.has_failed:
                    return
                *waits, update = one.send_update({"session": self._id})
                self._calls.run("update", update, who=one.engine.name)
                earlier += waits
            self._ask_whether_ready()
        finally:
            sent.set()
        for wait in earlier:
            wait()

    def _ask_whether_ready(self) -> None:
        """Ask every worker whether it can take a push. It answers once it serves the update."""
        self._send([wire.Ready()] * len(self.workers), Deadline(self._timeout_s), "pause")

    def _ask(self, messages: Sequence[wire.Message], kind: type[M], phase: str) -> list[M]:
        """Send each worker its message, and return their answers."""
        deadline = Deadline(self._timeout_s)
        self._send(messages, deadline, phase)
        return self._collect(kind, deadline, phase)

    def _send(self, messages: Sequence[wire.Message], deadline: Deadline, phase: str) -> None:
        for worker, message in zip(self.workers, messages, strict=True):
            worker.connection.send(message, deadline, phase)

    def _collect(self, kind: type[M], deadline: Deadline, phase: str) -> list[M]:
        connections = [worker.connection for worker in self.workers]
        try:
            return self._listener.collect(connections, kind, deadline, phase, self._check_everyone)
        except PeerError:
            self._check_ranks()  # a rank's death may be the cause of the worker's
            raise

    def _check_ranks(self) -> None:
        self._ranks.wait(0.0)

    def _check_health(self) -> None:
        for one in self._active:
            one.check_health(self._timeout_s)

    def _check_waiting(self) -> None:
        self._check_health()
        self._check_ranks()

    def _check_everyone(self) -> None:
        self._check_ranks()
        self._calls.check(timeouts.WORKER_MESSAGE_S)  # a worker's own `Failure` is a better error than a failed call's
        self._check_health()

    def _await_running(self, deadline: Deadline, phase: str) -> None:
        try:
            await_calls(self._calls.running, deadline, phase, self._check_waiting)
        finally:
            self._calls.running = []

    def _all(self, phase: str, handles: Sequence[EngineHandle], *methods: _Method, look: _Check | None = None) -> None:
        """Call these methods with each of these engines, all at the same time. Wait for all calls.

        look: called meanwhile, on a thread that must not read the ranks' connections.
        """
        calls = [self._change(phase, one, method) for method in methods for one in handles]
        await_calls(calls, Deadline(self._timeout_s), phase, look or self._check_waiting)

    def _try_all(
        self, phase: str, handles: Sequence[EngineHandle], method: _Method, silent: Collection[str], deadline: Deadline
    ) -> set[str]:
        """Call this method with each of these engines. Wait and return as `join` does. Errors are ignored."""
        calls = [self._change(phase, one, method) for one in handles]
        return join(calls, silent, Deadline(max(deadline.left_s(), timeouts.NEXT_CALL_S)))

    def _change(self, phase: str, one: EngineHandle, method: _Method) -> BackgroundCall:
        return self._calls.change(phase, one.call, method, who=one.engine.name)


def _hang_up(handles: Sequence[EngineHandle]) -> None:
    """Release the workers of these engines, and wait until they have unmapped the trainer's memory. Never raises."""
    deadline = Deadline(timeouts.ENGINE_FAREWELL_S)
    connections = [worker.connection for one in handles for worker in one.workers]
    for connection in connections:
        connection.finish(wire.Release(), deadline, "close")
    for connection in connections:
        # While Python ends, no thread of a worker in this process runs.
        if not (sys.is_finalizing() or connection.has_ended(deadline.left_s())):
            logger.warning("%s has not unmapped the trainer's memory: is its process stopped or busy?", connection.peer)
        connection.close()
