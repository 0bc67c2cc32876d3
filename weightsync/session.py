"""Trainer rank 0 and the engines: the frame of a push.

    negotiate            once, and again whenever what travels or where it lies has changed
        init call  ->  every worker connects, and answers Plan and Connect
    push
        pause -> start -> update call -> Expect -> Load* -> caches reset, Commit -> finish (version) -> resume

Up to the first Load nothing is written, and all can be taken back: the trainer sees meanwhile whether anything has
changed, and sends its first bucket.

The engine's calls are made in threads, since each returns only when its workers are released. This module knows
nothing about models, placements or how bytes travel.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from weightsync.channel import Call, Channel, Hub
from weightsync.deadline import Deadline
from weightsync.engines import Engine
from weightsync.errors import EngineError, EngineUnreachableError, PeerError, SyncTimeoutError, WeightSyncError
from weightsync.transports.base import WorkerInfo
from weightsync.wire import (
    POISONED,
    Commit,
    Committed,
    Connect,
    Connected,
    Expect,
    Expecting,
    Failure,
    Hello,
    Load,
    Loaded,
    Message,
    Plan,
    Planned,
    Release,
    Share,
    Shared,
)

M = TypeVar("M", bound=Message)

_FAREWELL_S = 5.0
"""How long an engine may take to end its calls after a failure."""
_LOOK_S = 0.1
"""How often a wait for an engine looks at the trainer's other ranks."""
_HEAD_START_S = 0.0002
"""What the first call into an engine gets before the trainer goes on: Python lets one thread at a time run, and would
leave the call waiting for as long as the trainer has anything to compute, up to 5 ms."""
_ARRIVAL_S = 3.0
"""How long a worker may take to connect once its engine says that it has been told to."""


@dataclass(frozen=True)
class Worker:
    """One connected engine worker."""

    hello: Hello
    channel: Channel

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.channel.peer, self.hello.device, self.hello.gpu_uuid, self.hello.boot_id)


class EngineSession:
    """Rank 0 only."""

    def __init__(
        self, engines: Sequence[Engine], hub: Hub, pause: str, timeout_s: float, check_ranks: Callable[[], None]
    ) -> None:
        """`check_ranks` raises when a trainer rank has failed; it is called by whoever calls the methods."""
        self.workers: list[Worker] = []
        self._check_ranks = check_ranks
        self._engines = list(engines)
        self._hub = hub
        self._pause = pause
        self._timeout_s = timeout_s
        self._id = secrets.token_hex(8)
        self._calls: list[Call] = []
        self._changing: list[Call] = []  # this push's calls that change what an engine does
        self._resets: list[Call] = []  # of these, those that reset caches
        self._opening: Call | None = None
        self._opener: int | None = None  # the thread that it runs in
        self._is_expected = False  # a bucket, and not every worker has answered
        self._is_served = False  # an answer shows that every worker serves this push's update
        self._paused = self._touched = self._poisoned = False
        self._over = False  # it has failed
        self._undoing = threading.Lock()
        self._left_open: list[Engine] = []  # engines whose update another trainer has started and not finished
        self._open: list[Engine] = []  # engines whose update we have
        self._version = 0

    @property
    def host(self) -> str:
        """This process's address that every engine reaches."""
        addresses = [self._hub.listen(engine.host)[0] for engine in self._engines]
        return next((address for address in addresses if not address.startswith("127.")), addresses[0])

    def last_version(self) -> int:
        """The newest version that any worker says it has."""
        return max(worker.hello.version for worker in self.workers)

    def meet(self) -> list[Worker]:
        """Call the workers of every engine in; they wait for our messages until `release`."""
        deadline = Deadline(self._timeout_s)
        for number, engine in enumerate(self._engines):
            try:
                host, port = self._hub.listen(engine.host)
            except OSError as error:
                raise EngineUnreachableError(f"there is no way to {engine.host}: {error}", who=engine.name) from error
            info = {
                "session": self._id,
                "engine": number,
                "host": host,
                "port": port,
                "token": self._hub.token.hex(),
                "timeout_s": self._timeout_s,
            }
            self._calls.append(Call(self._hub, f"init of {engine.name}", engine.init, info))
        if not self.workers:
            for number in range(len(self._engines)):
                admitted = self._hub.admit("worker", number, deadline, "init", self._check_arrivals(deadline))
                self.workers += [Worker(hello, channel) for hello, channel in admitted]
            # Whoever pushed last may have died: between start and finish, or with the weights half loaded.
            left_open = {worker.hello.group for worker in self.workers if worker.hello.update_open}
            self._left_open = [self._engines[number] for number in left_open]
            self._poisoned = any(worker.hello.state == POISONED for worker in self.workers)
        return self.workers

    def plan(self, tensors: list[list[Any]]) -> list[Planned]:
        """What each worker's model makes of these tensors."""
        deadline = Deadline(self._timeout_s)
        self._send(Plan(tensors), deadline, "plan")
        return self._collect(Planned, deadline, "plan")

    def share(self) -> list[Shared]:
        """Where each worker's parameters lie."""
        deadline = Deadline(self._timeout_s)
        self._send(Share(), deadline, "connect")
        return self._collect(Shared, deadline, "connect")

    def connect(self, messages: Sequence[Connect], join: Callable[[Deadline], None]) -> None:
        """Let every worker map or join the storages; `join` runs while they do."""
        deadline = Deadline(self._timeout_s)
        for worker, message in zip(self.workers, messages, strict=True):
            worker.channel.send(message, deadline, "connect")
        meeting = Call(self._hub, "join", join, deadline)
        self._calls.append(meeting)
        self._collect(Connected, deadline, "connect")
        self._wait([meeting], deadline, "connect")
        self._calls.remove(meeting)

    def release(self, phase: str) -> None:
        """Let the workers' engine calls return, and wait until they have."""
        deadline = Deadline(self._timeout_s)
        self._send(Release(), deadline, phase)
        self._await_calls(deadline, phase)

    def _await_calls(self, deadline: Deadline, phase: str) -> None:
        calls, self._calls = self._calls, []
        self._wait(calls, deadline, phase)

    def begin(self) -> None:
        """Set going what leads up to the first `load`: pause generation, open the update. Does not wait."""
        for worker in self.workers:  # another engine may have been started at the same address; leave it alone
            worker.channel.check("pause")
        self._changing, self._resets = [], []
        self._is_expected = self._is_served = False
        self._opening = Call(self._hub, "begin", self._begin)
        self._calls.append(self._opening)
        time.sleep(_HEAD_START_S)

    def _begin(self) -> None:
        self._opener = threading.get_ident()
        try:
            self._open_update()
        except WeightSyncError as error:
            error.phase = error.phase or "pause"
            raise
        finally:
            self._opener = None

    def _open_update(self) -> None:
        self._all("pause", self._left_open, lambda engine: engine.finish(None))
        self._left_open = []
        # Both at once: what is running has to end its step, or all of its tokens.
        self._all("pause", self._engines, self._pause_one, self._start)
        if self._over:
            return
        for engine in self._engines:
            self._calls.append(Call(self._hub, f"update of {engine.name}", engine.update, {"session": self._id}))

    def has_begun(self) -> bool:
        """Whether `begun` would return at once."""
        return self._opening is None or not self._opening.is_alive()

    def begun(self) -> None:
        """What `begin` set going has been done: generation is paused, and the workers wait for `load`."""
        if (opening := self._opening) is None:
            return
        while opening.is_alive():  # each of its calls has a deadline of its own
            opening.join(_LOOK_S)
            self._check_ranks()
        self._opening = None
        self._calls.remove(opening)
        if opening.error is not None:
            raise opening.error

    def withdraw(self) -> None:
        """Take `begin` back, before the first `load`: the engines generate again, as after an update of nothing. What
        they `expect` must be on its way."""
        self.begun()
        self._hear_expecting("pause")
        self.idle()
        self.release("pause")
        self._all("pause", self._engines, lambda engine: self._finish(engine, None))
        self._all("pause", self._engines, lambda engine: engine.resume())
        self._paused = False

    def expect(self, version: int, bucket: int, part: int | None) -> None:
        """Tell every worker that a bucket is on its way which `load` will announce, or else `withdraw` follow. They
        write nothing."""
        self._send(Expect(version, bucket, part), Deadline(self._timeout_s), "plan")
        self._is_expected = True

    def _hear_expecting(self, phase: str) -> None:
        if self._is_expected:
            self._collect(Expecting, Deadline(self._timeout_s), phase)
            self._is_expected, self._is_served = False, True

    def load(self, version: int, bucket: int, part: int | None = None, digests: Sequence[bytes] = ()) -> None:
        """Announce a bucket of this version to every worker, to each with its own digests of this part."""
        self._version = version
        self._touched = True
        deadline = Deadline(self._timeout_s)
        for number, worker in enumerate(self.workers):
            own = digests[number] if digests else b""
            worker.channel.send(Load(version, bucket, part, own), deadline, "transfer")

    def loaded(self) -> list[Loaded]:
        """Every worker's answer to the oldest announcement that is still open."""
        self._hear_expecting("load")
        answers = self._collect(Loaded, Deadline(self._timeout_s), "load")
        self._is_served = True
        return answers

    def announced(self) -> None:
        """Every bucket has been announced: engines, which do one thing after the other, may be asked to forget what
        older weights computed, and will when their update is over."""
        self._hear_expecting("load")
        if self._is_served:  # else a call of the update may yet be on its way to the engine
            self._reset_caches()

    def _reset_caches(self) -> None:
        if not self._resets:
            self._resets = [self._call("commit", engine, lambda one: one.reset_caches()) for engine in self._engines]

    def commit(self) -> list[Committed]:
        """Every worker has everything: declare it complete, stamp the version, drop what was computed with the old
        weights, and resume. Gives the workers' answers."""
        deadline = Deadline(self._timeout_s)
        self._send(Commit(self._version), deadline, "commit")
        self._reset_caches()
        answers = self._collect(Committed, deadline, "commit")
        self._await_calls(deadline, "commit")  # which have nothing left to do but to return
        version = str(self._version)
        self._all("commit", self._engines, lambda engine: self._finish(engine, version))
        self._wait(self._resets, Deadline(self._timeout_s), "commit")
        self._touched = self._poisoned = False  # only now: an engine that remembers old weights must not resume
        self._all("resume", self._engines, lambda engine: engine.resume())
        self._paused = False
        return answers

    def idle(self) -> None:
        """Raise when a worker, an engine call or a trainer rank has failed."""
        for worker in self.workers:
            worker.channel.check("transfer")
        self._check_calls()

    def fail(self, error: WeightSyncError) -> None:
        """After any failure: tell the workers, end the engines' calls, leave each engine as it was, or marked. Never
        raises, and takes seconds at most; the session is over."""
        self._over = True
        deadline = Deadline(_FAREWELL_S)
        for worker in self.workers:
            with suppress(WeightSyncError):  # it is gone
                worker.channel.send(Failure(error.to_fields()), deadline, "fail")
            worker.channel.close()
        self._hub.close()  # or a worker that is only just connecting would wait to be admitted, and its engine with it
        for call in (*self._calls, *self._changing):
            call.join(deadline.left_s())
        self._undo()
        if self._touched:
            # Say so where people look: the version that vLLM reports with every answer. Generation stays paused.
            mark = f"{POISONED}: the push of version {self._version} failed"
            self._try_all("mark", self._engines, lambda engine: engine.set_version(mark))

    def _undo(self) -> None:
        """End the update, and go on generating where nothing was written."""
        with self._undoing:
            # vLLM takes no other way out of an update; the version stays, and what it is worth is marked.
            self._try_all("give up", [*self._open], lambda engine: self._finish(engine, None))
            if self._paused and not self._touched and not self._poisoned:
                self._paused = False
                self._try_all("resume", self._engines, self._resume_unmarked)

    def _resume_unmarked(self, engine: Engine) -> None:
        # Its workers' weights may be whole, and what it remembers not be theirs. (vLLM before 0.27 keeps no mark.)
        if not (engine.version() or "").startswith(POISONED):
            engine.resume()

    def let_end(self) -> None:
        """After `fail`, before another session begins: wait for the calls that it has ceased to wait for, since each of
        them may yet pause an engine, or resume it."""
        deadline = Deadline(self._timeout_s)
        while under_way := [call for call in (self._opening, *self._changing) if call is not None and call.is_alive()]:
            if deadline.passed():
                raise SyncTimeoutError(
                    f"{under_way[0].name}, of the push that failed, did not return within {self._timeout_s:g} s",
                    phase="init",
                    waiting_for=[call.name for call in under_way],
                )
            under_way[0].join(min(_LOOK_S, deadline.left_s()))

    def close(self) -> None:
        for worker in self.workers:
            worker.channel.close()

    def _send(self, message: Message, deadline: Deadline, phase: str) -> None:
        for worker in self.workers:
            worker.channel.send(message, deadline, phase)

    def _collect(self, kind: type[M], deadline: Deadline, phase: str) -> list[M]:
        channels = [worker.channel for worker in self.workers]
        try:
            return self._hub.collect(channels, kind, deadline, phase, self._check_calls)
        except PeerError:
            self._check_ranks()  # what a rank has done to a worker is the better cause
            raise

    def _check_calls(self) -> None:
        self._check_ranks()
        for call in self._calls:
            if not call.is_alive() and call.error is not None:
                raise call.error

    def _check_arrivals(self, deadline: Deadline) -> Callable[[], None]:
        returned: dict[Call, float] = {}

        def check() -> None:
            self._check_calls()
            for call in self._calls:
                if not call.is_alive():
                    since = returned.setdefault(call, time.monotonic())
                    if time.monotonic() - since > _ARRIVAL_S or deadline.passed():
                        raise EngineError(
                            f"{call.name} returned, but no worker connected: either the engine's weight transfer "
                            'backend is not weightsync (start it with weight_transfer_config={"backend": '
                            '"weightsync"}), or its workers cannot reach this process: see the engine\'s log',
                            phase="init",
                        )

        return check

    def _pause_one(self, engine: Engine) -> None:
        if self._over:
            return
        self._paused = True
        try:
            engine.pause(self._pause)
        finally:
            if self._over:  # and `fail` has waited no longer: what it resumed then was not paused yet
                self._paused = True
                self._undo()

    def _start(self, engine: Engine) -> None:
        if self._over:
            return
        engine.start()
        self._open.append(engine)
        if self._over:
            self._undo()

    def _finish(self, engine: Engine, version: str | None) -> None:
        self._open.remove(engine)  # before: whatever comes of it, vLLM's workers must not be asked twice
        engine.finish(version)

    def _all(self, phase: str, engines: Sequence[Engine], *methods: Callable[[Engine], None]) -> None:
        """These calls on each of these engines, all at once."""
        jobs = [(method, engine) for method in methods for engine in engines]
        here = jobs.pop() if len(engines) == 1 else None  # which saves a thread
        calls = [self._call(phase, engine, method) for method, engine in jobs]
        if here is not None:
            method, engine = here
            method(engine)
        self._wait(calls, Deadline(self._timeout_s), phase)

    def _try_all(self, phase: str, engines: Sequence[Engine], method: Callable[[Engine], None]) -> None:
        deadline = Deadline(_FAREWELL_S)
        for call in [self._call(phase, engine, method) for engine in engines]:
            call.join(deadline.left_s())

    def _call(self, phase: str, engine: Engine, method: Callable[[Engine], None]) -> Call:
        call = Call(self._hub, f"{phase} of {engine.name}", method, engine)
        self._changing.append(call)
        return call

    def _wait(self, calls: Sequence[Call], deadline: Deadline, phase: str) -> None:
        for call in calls:
            while call.is_alive() and not deadline.passed():
                call.join(min(_LOOK_S, deadline.left_s()))
                if threading.get_ident() != self._opener:  # or whoever has called `begin` does
                    self._check_ranks()
            if call.is_alive():
                raise SyncTimeoutError(
                    f"{call.name} did not return within {deadline.timeout_s:g} s", phase=phase, waiting_for=[call.name]
                )
            if call.error is not None:
                call.error.phase = call.error.phase or phase
                raise call.error
