"""One engine worker's conversation with trainer rank 0. docs/internals/wire.md draws it.

The engine calls `init`, `start`, `update` and `finish` when the trainer asks for them. During `init` and `update` the
worker answers messages on its own connection to the trainer, until the trainer releases it. The end of this connection
shows at once that a trainer has closed, or has died. A thread waits for it between the calls, and unmaps the trainer's
memory. The worker hangs up afterwards: then the trainer's `close` returns.

The open connection is the trainer's hold on the engine. Another trainer gets the engine if the connection is closed. It
also gets the engine if the trainer does not answer a `Ping`, or answers that its push is stuck. The worker then tells
the old trainer that it is fenced off, and closes the connection. The model refuses to answer while its weights are a
mixture, even if a user has woken the engine.

The worker tells the trainer of every failure on that connection. The engine's call returns normally. vLLM's
multi-process executor takes the first failed answer and leaves later workers' answers in their queues. From then on
every call would get an older call's answers. So only the last worker may raise.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from weightsync import errors, telemetry
from weightsync.net import timeouts, wire
from weightsync.net.addresses import ANYWHERE, published_ports
from weightsync.net.connection import Connection, dial
from weightsync.net.fence import TAKEN_OVER, VARIABLE, note_session, several_engines
from weightsync.net.listener import Listener, await_dial
from weightsync.net.runtime import Deadline, boot_id, describe_device, is_running, spawn
from weightsync.planning.layout import Manifest
from weightsync.transports.base import Wait
from weightsync.worker.engine_model import EngineModel
from weightsync.worker.loader import Receiver, Tell

logger = logging.getLogger(__name__)

_NO_TRAINER = wire.InitInfo(session="", engine=0, host="", port=1, token="", timeout_s=1.0, process="")


class WorkerSession:
    """One worker's session. It lives as long as the engine, with one trainer at a time."""

    def __init__(self, model: EngineModel) -> None:
        self.receiver = Receiver(model)
        self.engine_instance = secrets.token_hex(8)
        """A random id. It changes at each start of the engine and whenever a former trainer's mapping is taken away."""
        self._connection: Connection | None = None
        self._trainer = _NO_TRAINER
        """The last trainer that got the engine."""
        self._update_open = False
        self._turn = threading.RLock()  # a Condition's `with` can be left locked by Ctrl-C
        """Held to read or change the trainer's connection, in any thread."""
        self._idle = threading.Condition(self._turn)
        """Notified when this session serves no longer."""
        self._serving = False
        self._fence = os.environ.get(VARIABLE, "")
        self._mapped_by: set[str] = set()
        """The processes with write access to the parameters."""
        self.has_refused = False
        """Whether the model has refused to answer since this was last set to False."""
        self._committed_over: Connection | None = None
        """The connection of the last commit. None once the model has answered: its caches were reset before."""
        model.guard_forward(self._check_whole)
        telemetry.engine_serves(model.identity.name, self.receiver.version)

    @property
    def _name(self) -> str:
        """The name in errors."""
        worker = f"worker {self.receiver.model.identity.name}"
        return worker if self._trainer is _NO_TRAINER else f"engine {self._trainer.engine} {worker}"

    def init(self, info: dict[str, Any]) -> None:
        """Meet the trainer described by `info`, an `InitInfo` as plain values. Answer it until it releases this worker.

        A trainer that cannot have the engine is told the reason and turned away. The last worker raises if it cannot
        meet the trainer, or if the trainer asks for workers of another engine.
        """
        try:
            told = wire.typed(info, wire.InitInfo)
            if told.asks:
                if self._connection is None or self._trainer.session != told.session:
                    raise several_engines()
                return
            is_met = self._meet(told)
        except Exception as error:
            problem = errors.wrap_exception(error, who=self._name, phase="init")
            logger.error("%s cannot connect to a trainer: %s", self._name, problem)
            # There is no connection for the error. The last worker's answer has no other answer behind it in a queue.
            if (identity := self.receiver.model.identity).rank == identity.world - 1:
                raise problem from error
            return
        if is_met:
            self._serve("init")

    def _meet(self, info: wire.InitInfo) -> bool:
        """Connect to the trainer, unless it is connected. Return whether it has the engine now."""
        if self._has_met(info.session) and self._trainer.engine == info.engine:
            return True
        self._look_back()
        place = self.receiver.model.identity.in_engine(info.cores)
        device, gpu_uuid = describe_device(self.receiver.model.device)
        hello = wire.Hello(
            protocol=wire.PROTOCOL,
            role="worker",
            group=info.engine,
            rank=place.rank,
            world=place.world,
            boot_id=boot_id(),
            device=device,
            gpu_uuid=gpu_uuid,
            name=place.name,
            version=self.receiver.version,
            state=self.receiver.state,
            update_open=self._update_open,
            kv_role=place.kv_role,
            shares_experts=place.cores > info.cores,
        )
        connection = self._reach(info, hello)
        try:
            with self._turn:
                self._take_over(info, connection)
        except Exception as error:
            problem = self._tell(connection, error, "init")
            connection.close()
            logger.warning("%s turned a trainer away: %s", self._name, problem)
            return False
        return True

    def _reach(self, info: wire.InitInfo, hello: wire.Hello) -> Connection:
        """Connect to the trainer. If no worker can dial it, wait until it dials this worker."""
        if info.host not in ANYWHERE:
            return dial(info.host, info.port, info.token, hello, "trainer rank 0", Deadline(info.timeout_s))
        self._check_name(info)  # the trainer dials an engine once
        port = published_ports(hello.world)[hello.rank]
        limit = Deadline(min(info.timeout_s, timeouts.GREETING_S))
        with closing(Listener(info.token)) as listener:
            return await_dial(listener, info.host, port, hello, limit, lambda: None)

    def _check_name(self, info: wire.InitInfo) -> None:
        """Raise `ConfigError` if the connected trainer calls this engine by a second name."""
        if self._has_met(info.session):
            raise errors.ConfigError(
                f"engine {self._trainer.engine} and engine {info.engine} are one engine, under two names or addresses: "
                "list each engine once"
            )

    def _has_met(self, session: str) -> bool:
        connection = self._connection
        return connection is not None and self._trainer.session == session and connection.is_open()

    def _take_over(self, info: wire.InitInfo, connection: Connection) -> None:
        """Give the engine to the trainer at the other end of a connection."""
        self._check_name(info)
        self._check_free(info.process, _pong_s(info))
        connection.watch_host(info.timeout_s)
        if self._connection is not None:
            # An invalid frame may have been the trainer's answer to the ping. Tell it of the frame then.
            self._tell(self._connection, self._connection.broken or errors.FencedError(TAKEN_OVER), "")
        self.close()
        if info.process != self._trainer.process:
            self._take_memory_back()
        spawn("trainer's end", partial(_await_end, connection, weakref.WeakMethod(self._let_go)))
        self._connection, self._trainer = connection, info
        if self._fence and self.receiver.model.identity.in_engine(info.cores).rank == 0:
            note_session(self._fence, info.session)

    def _tell(self, connection: Connection, error: BaseException, phase: str) -> errors.WeightSyncError:
        """Tell a trainer of a failure, if it is still connected. Return the error as a `WeightSyncError`."""
        problem = errors.wrap_exception(error, who=self._name, phase=phase)
        connection.try_send(wire.Failure(problem.to_fields()), Deadline(timeouts.WORKER_FAREWELL_S), phase)
        return problem

    def _check_free(self, process: str, pong_s: float) -> None:
        """Raise `EngineBusyError` if `process`, a trainer's rank 0, cannot have the engine now.

        The trainer holding the engine gets `pong_s` to show that it is alive.
        """
        other = self._connection
        if self._serving or (other is not None and other.is_open() and other.answers(pong_s) and other.peer_holds):
            boot, pid = self._trainer.process.split(":")[:2]
            where = "engine's host" if boot == boot_id() else "host of the trainer"
            way = "" if process == self._trainer.process else f", or stop its process, {pid} on the {where}"
            raise errors.EngineBusyError(
                f"another trainer is connected to this engine, or another WeightSync of this trainer: close it{way}",
                who=self._name,
            )
        self._note_release(other)
        writers = [each for each in self._mapped_by if is_running(each)]
        # Memory on a GPU cannot be taken back. No driver call ends another process's mapping, and CUDA graphs have
        # captured the addresses of the parameters.
        if writers and process != self._trainer.process and self.receiver.model.device.type != "cpu":
            pids = ", ".join(each.split(":")[1] for each in writers)
            raise errors.EngineBusyError(
                "a trainer has this engine's memory mapped, does not answer, and may still write there: end its "
                f"processes first ({pids})",
                who=self._name,
            )

    def _take_memory_back(self) -> None:
        """Detach the parameters from memory that the previous trainer's processes may still write to."""
        if any(map(is_running, self._mapped_by)):
            self.engine_instance = secrets.token_hex(8)  # their mappings are no longer this engine's memory
            self.receiver.take_back()
        self._mapped_by.clear()

    def _look_back(self) -> None:
        """Become POISONED if the trainer has failed after the last commit, and may not have reset the caches."""
        with self._turn:
            connection, self._committed_over = self._committed_over, None
            if connection is not None:
                connection.is_open()  # reads what has arrived
                if (problem := connection.reported()) is not None and "poisoned" in problem.facts:
                    self.receiver.state = wire.POISONED

    def _let_go(self, connection: Connection) -> None:
        """Unmap the memory of a trainer after its hang-up or death. Called in another thread."""
        with self._turn:
            self._idle.wait_for(lambda: not self._serving)
            if self._connection is connection:
                connection.is_open()  # reads what has arrived
                self._look_back()
                self._note_release(connection)
                device = self.receiver.model.device
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    self.close()

    def _note_release(self, connection: Connection | None) -> None:
        """Note if the trainer has closed its `WeightSync`: it has then unmapped the parameters."""
        if connection is not None and isinstance(connection.pop(), wire.Release):
            self._mapped_by.clear()

    def _check_whole(self) -> None:
        """Raise if the weights are a mixture, or the caches of other weights, so that the engine does not answer."""
        self._look_back()
        if self.receiver.state == wire.POISONED:
            self.has_refused = True
            raise errors.EngineError(f"this engine does not answer: it is {self.status()}", who=self._name)

    def start(self) -> None:
        """Note that the trainer will push. Do nothing else: no step here may fail on some workers only."""
        self._update_open = True

    def update(self, info: dict[str, Any]) -> None:
        """Answer the trainer until it releases this worker.

        info: {"session"}, which must be the connected trainer's.
        """
        if self._connection is None or info.get("session") != self._trainer.session:
            logger.error("%s ignored an update from a trainer without a connection", self._name)
            return
        self._serve("update")

    def finish(self) -> None:
        """Note that the update is over, committed or given up: see `Receiver.state`."""
        self._update_open = False

    def status(self) -> str:
        """Return the state of the weights in one line for people."""
        if self.receiver.state == wire.POISONED:
            return (
                f"POISONED: a push after version {self.receiver.version} failed half-way and the weights are a "
                "mixture; push again"
            )
        return f"CLEAN at version {self.receiver.version}"

    def close(self) -> None:
        """Unmap the trainer's memory, and disconnect from the trainer: then it may free the memory."""
        with self._turn:
            connection, self._connection = self._connection, None
            with nullcontext() if connection is None else closing(connection):
                self.receiver.disconnect()

    def _serve(self, phase: str) -> None:
        with self._turn:
            if (connection := self._connection) is None:  # the trainer has gone
                return
            self._serving = True
        wait, tell = partial(connection.check, phase), partial(self._tell, connection, phase=phase)
        patience = 1
        try:
            while True:
                message = self._receive(connection, patience, phase)
                patience = timeouts.WORKER_PATIENCE if isinstance(message, (wire.Ready, wire.Go)) else 1
                if isinstance(message, wire.Release):
                    return
                deadline = self._deadline()  # starts when the request arrives, however late
                connection.send(self._answer(message, wait, tell), deadline, phase)
                if isinstance(message, wire.Commit):
                    return
        except BaseException as error:
            failed_elsewhere = connection.has_failure()
            # vLLM's handler of SIGTERM and SIGINT raises `SystemExit` in a worker.
            ended = errors.EngineUnreachableError("the engine was asked to end")
            problem = tell(error if isinstance(error, Exception) else ended)
            self.receiver.disconnect()
            if not connection.is_open():  # else the trainer keeps the engine until it has ended the update
                self.close()
            logger.error("%s gave up: %s. State: %s", self._name, problem, self.status())
            own = None if failed_elsewhere else problem
            telemetry.engine_failed(self.receiver.model.identity.name, own, self.receiver.state == wire.POISONED)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._turn:
                self._serving = False
                self._idle.notify_all()

    def _receive(self, connection: Connection, patience: int, phase: str) -> wire.Message:
        """Wait for the next message, up to `patience` deadlines long while the trainer shows that it is alive."""
        while True:
            try:
                return connection.receive(self._deadline(), phase)
            except errors.SyncTimeoutError:
                patience -= 1
                if connection.reported() or not patience or not connection.answers(_pong_s(self._trainer)):
                    raise

    def _answer(self, message: wire.Message, wait: Wait, tell: Tell) -> wire.Message:
        if not isinstance(message, wire.Commit) and self.receiver.model.is_asleep():
            raise errors.EngineAsleepError(
                'the engine\'s weights are asleep, and nothing was written. Call wake_up(tags=["weights"]) before a '
                'push, and wake_up(tags=["kv_cache"]) after it'
            )
        match message:
            case wire.PlanRequest():
                with self._attended():
                    self.receiver.meet(message, self._deadline())
                    manifest = Manifest(message.tensors, message.tied)
                    return wire.PackedLoadPlan.of(self.receiver.make_plan(manifest, message.keep), manifest.names)
            case wire.Connect():
                with self._attended():
                    self.receiver.connect(message, wait, self._deadline(), tell)
                return wire.Connected()
            case wire.ExportParameters():
                exported = self.receiver.export(self.receiver.model.identity.in_engine(self._trainer.cores).rank)
                self._mapped_by = set(message.processes)
                return wire.ParametersExported(self.engine_instance, *exported)
            case wire.Ready():
                self.receiver.begin_push()
                return wire.Ready()
            case wire.Go():
                # A worker times out after ranks waiting for ranks and before ranks waiting for workers: it knows the
                # missing rank.
                chunk_s = self._trainer.timeout_s + min(timeouts.WORKER_GRACE_S / 2, self._trainer.timeout_s / 4)
                with self._attended():
                    return self.receiver.run(message, wait, lambda: Deadline(chunk_s), tell)
            case wire.Commit():
                loaded = self.receiver.loaded
                committed = wire.Committed(message.version, self.receiver.commit(message.version))
                telemetry.engine_serves(self.receiver.model.identity.name, message.version, loaded)
                self._committed_over = self._connection
                return committed
        raise errors.ProtocolError(f"the trainer sent an unexpected {type(message).__name__}")

    @contextmanager
    def _attended(self) -> Iterator[None]:
        """Answer the trainer's pings during the body, so that it knows this process is alive.

        Post-processing may be collective, and vLLM's collectives have no deadline: if a worker fails there, the others
        wait for ever. They end their process, and so the engine, `timeout_s` after the failure.
        """
        connection = self._connection
        assert connection is not None
        over, reading = threading.Event(), threading.Lock()

        def attend() -> None:
            failed: Deadline | None = None
            while not over.wait(timeouts.WORKER_LEASE_LOOK_S):
                with reading:
                    if over.is_set():
                        return
                    connection.answer_pings()
                    if failed is None and (connection.has_failure() or not connection.is_open()):
                        failed = self._deadline()
                    if failed is not None and failed.passed() and self.receiver.model.all_reduce_max is not None:
                        why = f"after a failed push: {connection.reported() or 'the trainer has gone'}"
                        self.receiver.model.end_process(f"{self._name} waits for other workers {why}")
                        return

        spawn("lease", attend)
        try:
            yield
        finally:
            with reading:  # the lease thread must not read the next message
                over.set()

    def _deadline(self) -> Deadline:
        return Deadline(self._trainer.timeout_s + timeouts.WORKER_GRACE_S)


def _pong_s(trainer: wire.InitInfo) -> float:
    """Return the seconds for a trainer to show that it is alive."""
    return min(timeouts.HOLDER_ANSWER_S, trainer.timeout_s / 2)


def _await_end(connection: Connection, let_go: weakref.WeakMethod[Callable[[Connection], None]]) -> None:
    """Call `let_go` when one end of a connection has hung up. Return if its object is collected before."""
    while not connection.has_ended(timeouts.ENGINE_USE_LOOK_S) and let_go() is not None:
        pass
    if (call := let_go()) is not None:
        call(connection)
