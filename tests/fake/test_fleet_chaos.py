"""A trainer pushes while engines, each a process, are added, removed, killed, stopped and revived where a seed says.

At each moment every engine answers from one whole version that a push has had, and reports that version, or is mute.
`make fleet PUSHES=200 SEED=7` runs more of it. A failure prints the seed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess, fingerprint
from fake_engine import checkpoint, cold, trainer_model

from weightsync import ModuleBucketer, PushReport, WeightSync, WeightSyncError
from weightsync.net.wire import POISONED

PUSHES = int(os.environ.get("FLEET_PUSHES", "20"))
SEED = int(os.environ.get("FLEET_SEED", "1"))
IS_SHORT = PUSHES <= 20
ENGINES = 3 if IS_SHORT else 5
TIMEOUT_S = 60.0 if IS_SHORT else 5.0
CHUNK_BYTES = 64
ACTIONS = ("none", "add", "add", "remove", "kill", "kill in a push", "revive", "revive", "move")
SLOW = () if IS_SHORT else ("stop",)
"""Which takes a push as long as the timeout."""
ASK_EVERY_S = 0.02


def changed_in_part(number: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint of which a later one has every fifth value otherwise: its difference is the shorter one."""
    tensors = checkpoint(0)
    for tensor in tensors.values():
        tensor.view(-1)[::5] += number
    return tensors


class Fleet:
    """The engines. A push has a number, which is the seed of the checkpoint that it pushes.

    listed: those that pushes are to reach. pushed: the number of each version that a report has had.
    tried: the numbers of pushes that have raised, or are under way. seen: what was answered at any moment.
    """

    def __init__(self, draw: random.Random, folder: Path, transport: str, encoding: str | None) -> None:
        self.draw = draw
        self.checkpoint = checkpoint if encoding is None else changed_in_part
        with ThreadPoolExecutor(ENGINES) as pool:
            self.engines = list(pool.map(EngineProcess, [folder] * ENGINES))
        self.dead: set[EngineProcess] = set()
        self.stopped: set[EngineProcess] = set()
        self.listed = self.engines[:2]
        self.left_at: dict[EngineProcess, dict[str, Any]] = {}
        self.pushed = {"default": 0}
        self.tried = {0}
        self.seen: set[tuple[str, str]] = set()
        self.outcomes: Counter[str] = Counter()
        self.weights = {fingerprint(cold(checkpoint(0))): 0}
        self.model = trainer_model(checkpoint(0))
        self.sync = WeightSync(
            "fsdp",
            transport,
            [one.url for one in self.listed],
            bucketer=ModuleBucketer(CHUNK_BYTES),
            timeout_s=TIMEOUT_S,
            on_engine_failure="drop",
            encoding=encoding,
        )
        self.over = threading.Event()
        self.watch = threading.Thread(target=self.keep_asking)
        self.watch.start()

    def keep_asking(self) -> None:
        """Note what engines answer, also in the middle of pushes."""
        draw = random.Random(SEED)
        while not self.over.wait(ASK_EVERY_S):
            one = draw.choice(self.engines)
            if one not in self.stopped:
                with suppress(WeightSyncError):  # it is dead, or dies
                    found = one.ask()
                    if "weights" in found:
                        self.seen.add((found["version"], found["weights"]))

    def step(self, number: int) -> str:
        """Change the fleet, push, check every engine, and return what was done."""
        action = self.draw.choice(ACTIONS + SLOW)
        timer = self.change(action)
        if self.draw.random() < 0.5:
            self.catch_up()
        self.tried.add(number)
        self.weights[fingerprint(cold(self.checkpoint(number)))] = number
        self.model.load_state_dict(self.checkpoint(number))
        report: PushReport | None = None
        outcome = "pushed"
        try:
            report = self.sync.push(self.model)
            self.pushed[str(report.version)] = number
        except WeightSyncError as error:
            outcome = f"{type(error).__name__}: {error}"
        if timer is not None:
            timer.join()
        self.outcomes[f"{action}: {outcome.partition(':')[0]}"] += 1
        done = f"{number}: {action}, {len(self.listed)} listed, {len(self.dead)} dead: {outcome}, {report}"
        self.check(number, report, done)
        return done

    def change(self, action: str) -> threading.Timer | None:
        """Do to the fleet what the action says, if it can be done."""
        running = [one for one in self.engines if one not in self.dead]
        idle = [one for one in running if one not in self.listed and one not in self.stopped]
        active = [one for one in self.listed if one in running and one not in self.stopped]
        if action == "add" and idle:
            one = self.draw.choice(idle)
            self.sync.engines.add(one.url)
            self.listed.append(one)
            self.left_at.pop(one, None)
        elif action == "remove" and len(active) > 1:
            one = self.draw.choice(self.listed)
            self.sync.engines.remove(one.url)
            self.listed.remove(one)
            if one in active:
                self.left_at[one] = one.ask()
        elif action.startswith("kill") and len(active) > 1:
            one = self.draw.choice(active)
            self.dead.add(one)
            timer = threading.Timer(self.draw.uniform(0.0, 0.1) if action != "kill" else 0.0, one.kill)
            timer.start()
            if action == "kill":
                timer.join()
            return timer
        elif action == "stop" and len(active) > 1:
            one = self.draw.choice(active)
            self.stopped.add(one)
            one.signal(signal.SIGSTOP)
        elif action == "revive" and self.stopped:
            one = self.stopped.pop()
            one.signal(signal.SIGCONT)
        elif action == "revive" and self.dead:
            one = self.draw.choice(sorted(self.dead, key=lambda each: each.port))
            one.launch()
            self.dead.remove(one)
        elif action == "move":
            self.model = trainer_model(checkpoint(0))
        return None

    def catch_up(self) -> None:
        """Bring those that have joined to the version of the others, where the model is as it was pushed."""
        try:
            report = self.sync.catch_up(self.model)
        except WeightSyncError as error:
            self.outcomes[f"catch up: {type(error).__name__}"] += 1
            self.sync.leave_out_lost()
        else:
            self.outcomes[f"catch up: {'nobody' if report is None else 'pushed'}"] += 1

    def check(self, number: int, report: PushReport | None, done: str) -> None:
        """Raise unless each engine answers from one whole version, which is this one where the push reached it."""
        for one in self.engines:
            if one in self.dead or one in self.stopped:
                continue
            found = one.ask()
            if report is not None and one in self.listed and not any(one.url in name for name in report.left_out):
                assert found["version"] == str(report.version), f"{done}: {one.url}, {found}"
                assert self.weights.get(found.get("weights", "")) == number, f"{done}: {one.url}, {found}"
            elif "mute" in found:
                assert found["version"].startswith(POISONED), f"{done}: {found}"
                assert one not in self.left_at, f"{done}: an engine that has left is {found}"
            else:
                assert found["weights"] in self.weights, f"{done}: {one.url} serves a mixture, {found}"
            if one in self.left_at:
                assert found == self.left_at[one], f"{done}: it has left, and has changed"
        for version, weights in self.seen.copy():
            assert weights in self.weights, f"{done}: a mixture was served as version {version}"
            if version in self.pushed:
                assert self.weights[weights] == self.pushed[version], f"{done}: other weights were version {version}"
        self.seen.clear()

    def close(self) -> None:
        self.over.set()
        self.watch.join()
        for one in self.engines:
            one.kill()
        self.sync.close()


@pytest.mark.parametrize(
    ("transport", "encoding"),
    [("ipc", None), ("broadcast", None), ("broadcast", "delta")][: 1 if IS_SHORT else 3],
)
@pytest.mark.forks
def test_every_engine_serves_one_whole_version_while_engines_come_and_go(
    transport: str, encoding: str | None, tmp_path: Path
) -> None:
    fleet = Fleet(random.Random(SEED), tmp_path, transport, encoding)
    log: list[str] = []
    began = time.monotonic()
    try:
        log += [fleet.step(number) for number in range(1, PUSHES + 1)]
        assert len(fleet.pushed) > PUSHES // 2, "most pushes must succeed, or little was seen"
    except BaseException:
        print(f"seed {SEED}:", *log[-10:], sep="\n")
        raise
    finally:
        fleet.close()
        print(
            f"seed {SEED}: {len(log)} pushes, {time.monotonic() - began:.0f} s, {dict(sorted(fleet.outcomes.items()))}"
        )
