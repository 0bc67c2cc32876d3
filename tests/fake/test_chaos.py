"""Two trainers that take turns at one engine, with failures drawn from a seed: it serves one whole version, or is mute.

`CHAOS_S=3600 python -m pytest tests/fake/test_chaos.py` goes on for an hour. What a failure prints has the seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
import torch
from fake_engine import ModuleHost, TinyEngineModel, checkpoint, cold, fail_once_after, trainer_model
from faults import FaultyTransport
from recorders import RecordedEngine

from weightsync import EngineBusyError, EngineError, FencedError, ModuleBucketer, WeightSync, WeightSyncError
from weightsync.control import fleet
from weightsync.control.wire import POISONED
from weightsync.receiver import worker

CHAOS_S = float(os.environ.get("CHAOS_S", "15"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
CHUNKS = 4


class Chaos:
    """One engine, and two trainers of which at most one holds it.

    served: the seed of the weights that the engine serves.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.engine = RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(0)))
        self.served = 0
        self.transports: dict[str, FaultyTransport] = {}
        self.trainers = {name: self.new_trainer(name) for name in "AB"}

    def new_trainer(self, name: str) -> WeightSync:
        transport = self.transports[name] = FaultyTransport(self.draw.choice(["ipc", "broadcast"]))
        return WeightSync("fsdp", transport, self.engine, bucketer=ModuleBucketer(64), timeout_s=20.0)

    def step(self, number: int) -> str:
        """Let one trainer push, and return what was done."""
        name = self.draw.choice("AB")
        other = self.trainers["B" if name == "A" else "A"]
        holds = other._strategy._fleet is not None
        before = self.draw.choice(["close", "stop", "stay"]) if holds else "away"
        if before == "close":
            other.close()
        elif before == "stop":  # as SIGSTOP does: it answers nobody
            for each in other._strategy._fleet.workers:
                each.connection.answer_pings = lambda: None
        fault = self.draw.choice(["none", "none", "send", "flip", "load", "start", "drop"])
        self.prepare(fault, name)
        done = f"{number}: {name} pushes, fault {fault}, the other {before}"
        try:
            self.trainers[name].push(trainer_model(checkpoint(number)))
        except EngineBusyError:
            assert before == "stay", done
        except FencedError:
            assert holds or before == "away", done
        except WeightSyncError:
            assert fault != "none", done
        else:
            assert before != "stay", done
            self.served = number
        self.engine.start_error = self.transports[name].before_chunk = None
        self.transports[name].flip_a_byte_of = None
        vars(self.engine.sessions[0].receiver).pop("run", None)
        if fault == "drop":  # as a trainer that is killed: its sockets close, and nothing else is said
            self.drop(name)
        return done

    def prepare(self, fault: str, name: str) -> None:
        at, transport = self.draw.randrange(CHUNKS), self.transports[name]
        if fault == "send":
            transport.before_chunk = raising_at(at)
        elif fault == "flip":
            transport.flip_a_byte_of = at
        elif fault == "load":
            fail_once_after(self.engine.sessions[0].receiver, at)
        elif fault == "start":
            self.engine.start_error = EngineError("an update is under way")

    def drop(self, name: str) -> None:
        trainer = self.trainers[name]
        if trainer._strategy._fleet is not None:
            trainer._strategy._fleet._ended.set()
            for each in trainer._strategy._fleet.workers:
                each.connection.close()
        trainer._strategy._fleet = None
        trainer.close()
        self.trainers[name] = self.new_trainer(name)

    def check(self, done: str) -> None:
        """Raise unless the engine serves one whole version, under its number, or is mute and says so."""
        session, host = self.engine.sessions[0], self.engine.hosts[0]
        if session.receiver.state == POISONED:
            with pytest.raises(EngineError, match="does not answer"):
                host.check_before_answer()
            assert self.engine.version().startswith(POISONED), done
            return
        host.check_before_answer()
        live, expected = host.live.state_dict(), cold(checkpoint(self.served)).state_dict()
        wrong = [key for key, tensor in expected.items() if not torch.equal(live[key], tensor)]
        assert not wrong, f"seed {SEED}, {done}: serves something else than {self.served} in {wrong}"
        assert self.engine.version() in ("default", str(session.receiver.version)), done


def raising_at(at: int) -> Callable[[int], None]:
    def fail(chunk: int) -> None:
        if chunk == at:
            raise MemoryError("no memory left")

    return fail


def test_engine_serves_one_whole_version_or_is_mute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_PING_LOOK_S", 0.02)
    monkeypatch.setattr(worker, "_PONG_S", 0.5)
    chaos = Chaos(random.Random(SEED))
    ends, number, log = time.monotonic() + CHAOS_S, 0, []
    while time.monotonic() < ends:
        number += 1
        log.append(chaos.step(number))
        chaos.check("\n".join(log[-10:]))
    for trainer in chaos.trainers.values():
        trainer.close()
    last = WeightSync("fsdp", "ipc", chaos.engine, timeout_s=20.0)
    with last:
        last.push(trainer_model(checkpoint(number + 1)))
    chaos.served = number + 1
    chaos.check("the last push heals")
    chaos.engine.close()
