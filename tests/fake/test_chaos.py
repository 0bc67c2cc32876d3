"""Two trainers take turns at two engines, each a process of its own, and fail where a seed says.

After every step each engine serves one whole version, or is mute. `make chaos STEPS=300 SEED=7` runs more of it. A
failure prints has the seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, fingerprint
from fake_engine import checkpoint, cold
from trainer_process import TIMEOUT_S, TrainerProcess

STEPS = int(os.environ.get("CHAOS_STEPS", "300"))
CHAOS_S = float(os.environ.get("CHAOS_S", "15"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
CHUNKS = 4
STALL_S = 1.5 * TIMEOUT_S
ANSWER_S = 120.0
PATIENCE_S, RETRY_S = 90.0, 1.0
"""How long a trainer that nothing is in the way of may try. What an earlier failure left to be finished keeps an engine
busy for a moment, and on a busy machine a wait may run out."""
FAULTS = (
    *["none"] * 5,
    *["raise", "flip", "drop"],
    *["kill trainer", "kill engine", "stop trainer", "stop engine", "overtake"],
)


class Chaos:
    """The processes. Each push has a number, which is the seed of the checkpoint that it pushes.

    serves: the number that each engine serves, or served before it became mute.
    holder: the trainer that may hold engines, if any does.
    """

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw, self.folder = draw, folder
        self.engines = [EngineProcess(folder) for _ in range(2)]
        self.serves = [0, 0]
        self.number = 0
        self.holder: str | None = None
        self.trainers = {name: self.new_trainer() for name in "AB"}
        self.seen: Counter[str] = Counter()

    def new_trainer(self) -> TrainerProcess:
        return TrainerProcess(self.folder, self.draw.choice(["ipc", "broadcast"]), [one.url for one in self.engines])

    def step(self) -> str:
        """Let one trainer push, check the engines, and return what was done."""
        name, other = self.draw.sample("AB", 2)
        fault, meanwhile = self.draw.choice(FAULTS), self.draw.choice(["closes", "stops", "stays"])
        if meanwhile == "closes" or fault == "overtake":
            self.ask(other, close=True)
            self.holder = None if self.holder == other else self.holder
        elif meanwhile == "stops":
            self.trainers[other].process.send_signal(signal.SIGSTOP)
        first, is_free = self.number + 1, self.holder != other or meanwhile == "stops"
        outcome = self.push_until_done(name) if fault == "none" and is_free else self.push(name, fault)
        if fault == "overtake":
            outcome = self.push_until_done(other)
            self.trainers[name].process.send_signal(signal.SIGCONT)
            self.trainers[name].answer(ANSWER_S)
            name, other = other, name
        self.trainers[other].process.send_signal(signal.SIGCONT)
        done = f"{first}: {name}, {fault}, {other} {meanwhile}, {self.holder} held: {outcome}"
        self.check(first, outcome, done)
        if "version" in outcome:
            self.holder = name
        elif self.holder == name:
            self.holder = None
        self.seen[f"{fault}: {'pushed' if 'version' in outcome else outcome['error']}"] += 1
        return done

    def push_until_done(self, name: str) -> dict[str, Any]:
        """Let a trainer push that nothing is in the way of."""
        ends = time.monotonic() + PATIENCE_S
        while "version" not in (outcome := self.push(name, "none")):
            assert time.monotonic() < ends, outcome
            time.sleep(RETRY_S)
        return outcome

    def ask(self, name: str, **order: Any) -> dict[str, Any]:
        self.trainers[name].order(**order)
        return self.trainers[name].answer(ANSWER_S)

    def push(self, name: str, fault: str) -> dict[str, Any]:
        """Let a trainer push, do to a process what the fault says, and return how the push ended."""
        draw, trainer = self.draw, self.trainers[name]
        self.number += 1
        slowness_s = draw.choice([0.0, 0.02, 0.05])
        trainer.order(push=self.number, fault=fault, at=draw.randrange(CHUNKS), slowness_s=slowness_s)
        verb, _, whom = fault.partition(" ")
        engine, after_s = draw.randrange(2), draw.uniform(0.0, 0.4)
        if whom or fault == "overtake":
            time.sleep(after_s)
        victim = trainer if whom == "trainer" else self.engines[engine]
        if fault == "overtake":
            trainer.process.send_signal(signal.SIGSTOP)
            return {}
        if verb == "stop":
            victim.process.send_signal(signal.SIGSTOP)
            time.sleep(STALL_S)
            victim.process.send_signal(signal.SIGCONT)
        elif verb == "kill":
            victim.kill()
        if fault == "kill trainer":
            self.trainers[name] = self.new_trainer()
            return {"error": "killed"}
        outcome = trainer.answer(ANSWER_S)
        if fault == "kill engine":
            self.engines[engine].launch()
            self.serves[engine] = 0
        return outcome

    def check(self, first: int, outcome: dict[str, Any], done: str) -> None:
        """Raise unless each engine serves one whole version, which is this one where the push succeeded, or is mute."""
        for at, engine in enumerate(self.engines):
            found = engine.ask()
            is_pushed = "version" in outcome and found["version"] != "default"  # as a killed one says that was started
            if "mute" in found:
                assert not is_pushed, f"{done}: {found}"
                assert found["version"].startswith("POISONED"), f"{done}: {found}"
                continue
            numbers = [self.number] if is_pushed else [self.serves[at], *range(first, self.number + 1)]
            whole = {fingerprint(cold(checkpoint(number))): number for number in numbers}
            assert found["weights"] in whole, f"{done}: engine {at} serves none of {numbers}, {found}"
            self.serves[at] = whole[found["weights"]]

    def close(self) -> None:
        for one in (*self.trainers.values(), *self.engines):
            one.kill()


@pytest.mark.forks
def test_engines_serve_one_whole_version_or_are_mute(tmp_path: Path) -> None:
    chaos = Chaos(random.Random(SEED), tmp_path)
    log: list[str] = []
    try:
        ends = time.monotonic() + CHAOS_S
        for _ in range(STEPS):
            if time.monotonic() > ends:
                break
            log.append(chaos.step())
    except BaseException:
        print(f"seed {SEED}:", *log[-10:], sep="\n")
        raise
    finally:
        chaos.close()
        print(f"seed {SEED}: {len(log)} steps, {chaos.number} pushes, {dict(sorted(chaos.seen.items()))}")
