"""One engine worker's side of the conversation with trainer rank 0. docs/wire.md draws it.

The engine calls `init`, `start`, `update` and `finish` when the trainer asks for them; during `init` and `update` the
worker listens on its own connection to the trainer until it is released. A trainer that dies is noticed at once, by
its connection.

Whatever goes wrong is told to the trainer on that connection, and the engine's call returns as if nothing had
happened. It must: when one worker of several raises, vLLM's multi-process executor takes the first failed answer and
leaves the others' in their queues, and from then on every call gets an older call's answers.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import asdict
from typing import Any

from weightsync.channel import Channel, dial
from weightsync.deadline import Deadline
from weightsync.errors import EngineBusyError, ProtocolError, WeightSyncError, foreign
from weightsync.machine import boot_id, describe_device
from weightsync.receiver.host import ModelHost
from weightsync.receiver.receiver import Receiver
from weightsync.transports.base import Idle
from weightsync.wire import (
    POISONED,
    PROTOCOL,
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
    pack_placements,
    unpack_manifest,
    unpack_placements,
)

logger = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How much longer than the trainer a worker waits, so that the trainer's error, which knows more, comes first."""


class Conversation:
    """Lives as long as the engine. One trainer at a time."""

    def __init__(self, host: ModelHost) -> None:
        self.receiver = Receiver(host)
        self.epoch = secrets.token_hex(8)
        """Another one for each start of the engine."""
        self._host = host
        self._channel: Channel | None = None
        self._session = ""
        self._update_open = False
        self._serving = False
        self._timeout_s = 0.0
        self._name = f"worker {host.identity.name}"

    def init(self, info: dict[str, Any]) -> None:
        """Meet the trainer that `info` describes: {"session", "engine", "host", "port", "token", "timeout_s"}. Then
        answer it until it releases us. While another trainer is connected it is told so, and turned away."""
        try:
            self._meet(info)
        except Exception as error:
            # There is no connection to say it on; the trainer will find that nobody came.
            logger.error("%s cannot meet the trainer: %s", self._name, foreign(error, who=self._name, phase="init"))
            return
        if self._session == info["session"]:
            self._serve("init")

    def _meet(self, info: dict[str, Any]) -> None:
        expected = {"session", "engine", "host", "port", "token", "timeout_s"}
        if info.keys() != expected:
            raise ProtocolError(f"init needs exactly {sorted(expected)}, got {sorted(info)}")
        if self._channel is not None and self._session == info["session"] and self._channel.is_open():
            return
        timeout_s = float(info["timeout_s"])
        deadline = Deadline(timeout_s)
        identity = self._host.identity
        device, gpu_uuid = describe_device(self._host.device)
        hello = Hello(
            protocol=PROTOCOL,
            token=bytes.fromhex(info["token"]),
            role="worker",
            group=int(info["engine"]),
            rank=identity.rank,
            world=identity.world,
            boot_id=boot_id(),
            device=device,
            gpu_uuid=gpu_uuid,
            name=identity.name,
            version=self.receiver.version,
            state=self.receiver.state,
            update_open=self._update_open,
        )
        channel = dial(info["host"], int(info["port"]), hello, "trainer rank 0", deadline)
        if self._channel is not None and (self._serving or self._channel.is_open()):
            busy = EngineBusyError(
                "another trainer is connected to this engine; close its WeightSync first, or stop it", who=self._name
            )
            channel.send(Failure(busy.to_fields()), deadline, "init")
            channel.close()
            return
        self.close()
        self._channel, self._session, self._timeout_s = channel, info["session"], timeout_s
        self._name = f"engine {info['engine']} worker {identity.name}"

    def start(self) -> None:
        """The trainer will push. Nothing is done yet: nothing may fail half-way between workers here."""
        self._update_open = True

    def update(self, info: dict[str, Any]) -> None:
        """Answer the trainer until it releases us. `info` is {"session"}, which must be the connected trainer's."""
        if self._channel is None or info.get("session") != self._session:
            logger.error("%s got an update from a trainer that is not connected; it is ignored", self._name)
            return
        self._serve("update")

    def finish(self) -> None:
        """The update is over, committed or given up: see `Receiver.state`."""
        self._update_open = False

    def status(self) -> str:
        """One line for people."""
        if self.receiver.state == POISONED:
            return (
                f"POISONED: a push after version {self.receiver.version} failed half-way and the weights are a "
                "mixture; push again"
            )
        return f"CLEAN at version {self.receiver.version}"

    def close(self) -> None:
        """Let go of the trainer and of its memory."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.receiver.disconnect()

    def _serve(self, phase: str) -> None:
        channel = self._channel
        assert channel is not None

        def idle(seconds: float) -> None:
            channel.check(phase, seconds)

        self._serving = True
        try:
            while True:
                message = channel.receive(Deadline(self._timeout_s + _GRACE_S), phase)
                deadline = Deadline(self._timeout_s + _GRACE_S)  # for what it asks for, however late it came
                if isinstance(message, Release):
                    self.receiver.withdraw(idle, deadline)
                    return
                channel.send(self._answer(message, idle, deadline), deadline, phase)
                if isinstance(message, Commit):
                    return
        except BaseException as error:
            problem = foreign(error, who=self._name, phase=phase)
            try:
                channel.send(Failure(problem.to_fields()), Deadline(1.0), phase)
            except WeightSyncError:
                logger.debug("the trainer cannot be told: it is gone")
            self.close()
            logger.error("%s gave up: %s; it is %s", self._name, problem, self.status())
            if not isinstance(error, Exception):
                raise
        finally:
            self._serving = False

    def _answer(self, message: Message, idle: Idle, deadline: Deadline) -> Message:
        match message:
            case Plan():
                return Planned(**asdict(self.receiver.plan(unpack_manifest(message.tensors))))
            case Connect():
                placements = unpack_placements(message.placements)
                self.receiver.connect(
                    message.transport,
                    message.storages,
                    placements,
                    message.buckets,
                    message.once,
                    message.spans,
                    message.fields,
                    idle,
                    deadline,
                )
                return Connected()
            case Share():
                exported, placements = self.receiver.share()
                return Shared(self.epoch, exported, pack_placements(placements))
            case Expect():
                self.receiver.expect(message.version, message.bucket, message.part)
                return Expecting()
            case Load():
                timing = self.receiver.load(
                    message.version, message.bucket, message.part, message.digests, idle, deadline
                )
                return Loaded(bucket=message.bucket, **asdict(timing))
            case Commit():
                return Committed(message.version, self.receiver.commit(message.version))
        raise ProtocolError(f"the trainer sent {type(message).__name__}, which a worker does not expect")
