"""Runs cells of the failure matrix: an engine, two trainer ranks that fail, and a new trainer that heals."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import DEAD, LINKS, MUTE, NEW, PAUSED, RANKS, UNTOUCHED, Cell, expected
from engines import Remote
from stand_in import TP, StandInWorker
from trainer import Outcome, Rank

from weightsync.control.wire import POISONED

GRACE_S = 5.0
"""How much later than `timeout_s` an error may come."""
BUSY_S = 3.0
"""What all else may take on a machine that has more to do."""
PATIENT_S = 30.0
"""The timeout where nothing is expected to take it."""
KNOWN = "ABC"


class NotReadyError(Exception):
    """A push before the failure did not succeed, as on a machine that is too busy."""


@dataclass
class Result:
    """What came of a cell. It holds where nothing is in `faults`."""

    cell: Cell
    outcome: str = ""
    seconds: float = 0.0
    state: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.faults


@dataclass(frozen=True)
class Look:
    """What an engine is: the weights that it has whole, "" for a mixture; whether it would answer if it were asked."""

    weights: str
    is_guarded: bool
    is_paused: bool
    version: str
    is_serving_a_trainer: bool


class StandIn:
    """The stand-in engine, and what the driver knows of it."""

    victims = ("core", "worker")

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()
        self._workers: list[Remote] = []
        self.weights, self.version = "", 0
        self.start()

    def start(self) -> None:
        self.close()
        self.address = [str(self._folder / f"engine-{next(self._count)}") for _ in range(TP)]
        self._workers = [Remote(StandInWorker, rank, "A", address) for rank, address in enumerate(self.address)]
        wait_for(lambda: all(map(os.path.exists, self.address)), 60)
        self.weights, self.version = "A", 0

    def pids(self) -> dict[str, int]:
        return {who: pid_of(worker) for who, worker in zip(self.victims, self._workers, strict=True)}

    def kill(self, who: str) -> None:
        end(self._workers[self.victims.index(who)])

    def look(self) -> Look | None:
        """Return None where the engine is dead, or a part of it."""
        try:
            looks = [worker.call(StandInWorker.look, KNOWN, timeout_s=20) for worker in self._workers]
        except (AssertionError, OSError, EOFError):
            return None
        weights = {found for _, found, *_ in looks}
        _, _, is_paused, version, _ = looks[0]
        return Look(
            weights.pop() if len(weights) == 1 else "",
            any(state == POISONED for state, *_ in looks),
            is_paused,
            version,
            any(serving for *_, serving in looks),
        )

    def close(self) -> None:
        for worker in self._workers:
            end(worker)


class Bench:
    """One engine and its trainers, for the cells of one client and transport."""

    def __init__(self, client: str, transport: str, folder: Path, timeout_s: float) -> None:
        self.client, self.transport, self.folder, self.timeout_s = client, transport, folder, timeout_s
        self.short_s = timeout_s
        self.engine = StandIn(folder)
        self._count = itertools.count()
        self.ranks: list[Remote] = []
        self.pids: set[int] = set()  # of all that there were
        self.healer = Remote(Rank, 0, 1, folder / "none")
        self.held: dict[int, Counter[str]] = {}
        # gloo keeps the sockets of what it has not done until its own deadline, which is 8 times ours.
        self.gloo_s = 9 * PATIENT_S if transport == "broadcast" else 0.0
        self.owed: list[tuple[Result, int, Counter[str]]] = []

    def run(self, cell: Cell, tries: int = 3) -> Result:
        result = Result(cell)
        try:
            self._run(cell, result)
        except NotReadyError as error:
            self.start_anew()
            if tries > 1:
                return self.run(cell, tries - 1)
            result.faults.append(f"the driver: a push before the failure failed: {error}")
        except Exception as error:
            result.faults.append(f"the driver: {type(error).__name__}: {error}")
            self.start_anew()
        return result

    def start_anew(self) -> None:
        self.end_ranks()
        end(self.healer)
        self.healer = Remote(Rank, 0, 1, self.folder / "none")
        self.engine.start()

    def settle_descriptors(self) -> None:
        """Wait until gloo has given back what it kept, and note where it has not."""
        deadline = time.monotonic() + self.gloo_s
        for result, pid, before in self.owed:
            while pid in self.now() and (more := descriptors(pid) - before):
                if time.monotonic() > deadline:
                    result.faults.append(f"process {pid} has more open for good: {dict(more)}")
                    break
                time.sleep(0.2)
        self.owed.clear()

    def close(self) -> None:
        self.end_ranks()
        end(self.healer)
        self.engine.close()

    def _run(self, cell: Cell, result: Result) -> None:
        want = expected(cell)
        self.timeout_s = PATIENT_S
        self.make_ready()
        if cell.how not in ("killed", "closed"):  # the others do not wait for anything
            self.timeout_s = self.short_s
        before = self.engine.weights
        failing, healing = [weights for weights in KNOWN if weights != before]
        self.connect(self.ranks)
        if cell.phase not in ("connect", "plan"):
            self.push_well(self.ranks, before)
        version = self.engine.version
        outcomes = self.fail(cell, result, failing, healing)
        told = {outcome[:2] for outcome in outcomes}
        result.seconds = max((seconds for *_, seconds in outcomes), default=0.0)
        result.outcome = " / ".join(sorted(kind or "returned" for kind, _ in told))
        returned = told == {("", "")}
        if not (returned and (want.may_return or not want.kinds)):
            result.faults += wrong_errors(told, want.kinds, want.words, cell.who == LINKS[0])
        if cell.how != "stopped" or cell.who not in RANKS:
            limit_s = self.timeout_s + GRACE_S
            if result.seconds > limit_s + BUSY_S:
                result.faults.append(f"the error came after {result.seconds:.1f} s, not within {limit_s:g} s")
        states = (NEW,) if returned else want.states
        if cell.who == "rank 0" and cell.how == "stopped":
            failing, version = healing, self.engine.version - 1
        result.state = self.settle(states, before, failing, version)
        if result.state not in states:
            result.faults.append(f"the engine is {result.state}, not {' or '.join(states)}")
        if result.state == DEAD:
            self.engine.start()
        self.heal(cell, result, next(weights for weights in KNOWN if weights not in (before, failing)))
        self.release()
        result.faults += self.leaks(result)

    # The failure

    def fail(self, cell: Cell, result: Result, weights: str, healing: str) -> list[Outcome]:
        """Let the cell's failure happen in a push, and return what the ranks that are left raise."""
        there = self.folder / f"there-{next(self._count)}"
        conductor = self.ranks[0]
        conductor.call(Rank.arm, cell.phase, there, cell.who if cell.who in LINKS else "")
        for rank in self.ranks:
            rank.begin(Rank.push, weights)
        wait_for(there.exists, 30)
        left = list(self.ranks)
        match cell.who, cell.how:
            case who, "killed" if who in RANKS:
                left.remove(victim := self.ranks[RANKS.index(who)])
                end(victim)
                there.unlink()
            case who, "killed":
                self.engine.kill(who)
                there.unlink()
            case "rank 0", "stopped":
                with Stopped(pid_of(conductor)):
                    there.unlink()
                    wait_for(lambda: not self.look().is_serving_a_trainer, self.timeout_s + GRACE_S + BUSY_S)
                    self.connect([self.healer])
                    taken = self.push([self.healer], healing)
                    if taken != [("", "")]:
                        result.faults.append(f"another trainer cannot take the engine over: {taken}")
            case who, "stopped":
                victim = self.ranks[1] if who == "rank 1" else None
                others = [rank for rank in self.ranks if rank is not victim]
                with Stopped(pid_of(victim) if victim else self.engine.pids()[who]):
                    there.unlink()
                    outcomes = [self.outcome(rank) for rank in others]
                    result.seconds = max(seconds for *_, seconds in outcomes)
                    if (late := result.seconds - self.timeout_s - GRACE_S) > BUSY_S:
                        result.faults.append(f"the error came {late:.1f} s late")
                return [*outcomes, self.outcome(victim)] if victim else outcomes
            case _:
                there.unlink()
        return [self.outcome(rank) for rank in left]

    def outcome(self, rank: Remote) -> Outcome:
        found: Outcome = rank.result(10 * self.timeout_s + 20)
        return found

    def settle(self, states: tuple[str, ...], before: str, failing: str, version: int) -> str:
        """Return what the engine is, as soon as it is one of these, or after a while."""
        deadline = time.monotonic() + self.timeout_s + GRACE_S + BUSY_S
        while True:
            state = state_of(self.engine.look(), before, failing, version)
            if state in states or time.monotonic() > deadline:
                return state
            time.sleep(0.05)

    def look(self) -> Look:
        look = self.engine.look()
        assert look is not None, "the engine is dead"
        return look

    # The next push

    def heal(self, cell: Cell, result: Result, weights: str) -> None:
        """Push again, by the ranks if both are left, or else by a new trainer: the engine then serves these weights."""
        healers = self.ranks
        if (cell.who, cell.how) == ("rank 0", "stopped"):
            self.healer.call(Rank.release)  # while it holds the engine, the ranks are turned away
        elif cell.how == "killed" and cell.who in RANKS:
            self.release()  # the rank that is left
            healers = [self.healer]
            self.connect(healers)
        told = self.push(healers, weights)
        # An engine that went away when the last push was complete is found out by the next one, which says so.
        if cell.phase == "close" and {kind for kind, _ in told} <= {"PeerError"}:
            told = self.push(healers, weights)
        if any(kind for kind, _ in told):
            result.faults.append(f"the next push does not heal: {told}")
        look = self.engine.look()
        state = state_of(look, "", weights, self.engine.version - 1)
        if state != NEW:
            result.faults.append(f"after the next push the engine is {state}: {look}")
            self.engine.start()

    # What there is before and after

    def make_ready(self) -> None:
        if not self.ranks:
            store = self.folder / f"store-{next(self._count)}"
            self.ranks = [Remote(Rank, rank, 2, store) for rank in range(2)]
        pids = self.now()
        if pids != set(self.held):  # one is new, and has not opened all that it keeps open
            for trainers in ([self.healer], self.ranks):
                self.connect(trainers)
                self.push_well(trainers, self.engine.weights)
                self.release()
            self.held = {pid: descriptors(pid) for pid in pids}
            self.pids |= pids

    def now(self) -> set[int]:
        """Return the processes that there are."""
        alive = [each for each in self.processes() if each._process.is_alive()]
        return {*map(pid_of, alive), *self.engine.pids().values()}

    def processes(self) -> list[Remote]:
        return [*self.ranks, self.healer]

    def connect(self, trainers: list[Remote]) -> None:
        for each in trainers:
            each.begin(Rank.connect, self.client, self.transport, self.engine.address, self.timeout_s, self.folder)
        for each in trainers:
            each.result(60)

    def push(self, trainers: list[Remote], weights: str) -> list[tuple[str, str]]:
        for each in trainers:
            each.begin(Rank.push, weights)
        told = [self.outcome(each)[:2] for each in trainers]
        if not any(kind for kind, _ in told):
            look = self.look()
            self.engine.weights, self.engine.version = weights, int(look.version)
        return told

    def push_well(self, trainers: list[Remote], weights: str) -> None:
        told = self.push(trainers, weights)
        if any(kind for kind, _ in told):
            raise NotReadyError(str(told))

    def release(self) -> None:
        for each in self.processes():
            with suppress(AssertionError, OSError):
                each.call(Rank.release, timeout_s=30)

    def leaks(self, result: Result) -> list[str]:
        """Return what is left of a cell in the processes that are left, and in /dev/shm; forget those that are gone."""
        found: list[str] = []
        for number, rank in enumerate(self.ranks):
            if rank._process.is_alive():
                found += [f"rank {number} has a thread {name}" for name in rank.call(Rank.threads)]
        for pid, before in self.held.items():
            if pid in self.now() and (more := grown(pid, before)):
                if self.gloo_s:
                    self.owed.append((result, pid, before))
                else:
                    found.append(f"process {pid} has more open: {dict(more)}")
        if not all(rank._process.is_alive() for rank in self.ranks):
            self.end_ranks()
        names = [path.name for path in Path("/dev/shm").glob("weightsync-[0-9]*")]
        found += [f"/dev/shm/{name} is left" for name in names if int(name.split("-")[1]) in self.pids]
        return found

    def end_ranks(self) -> None:
        for rank in self.ranks:
            end(rank)
        self.ranks = []


def wrong_errors(
    told: set[tuple[str, str]], kinds: tuple[str, ...], words: tuple[str, ...], differ: bool
) -> Iterator[str]:
    """Yield what is wrong with the errors that ranks raised. `differ`: each may say its own."""
    if len(told) > 1 and not differ:
        yield f"the ranks raised different errors: {sorted(told)}"
    for kind, text in told:
        if kind not in kinds:
            yield f"expected {' or '.join(kinds) or 'no error'}, got {kind or 'no error'} {text}"
        elif not any(word in text for word in words):
            yield f"the error does not name {' or '.join(words)}: {text}"


def state_of(look: Look | None, before: str, failing: str, version: int) -> str:
    """Return the state of an engine that served the weights `before` as `version` and was pushed `failing`."""
    if look is None:
        return DEAD
    if look.version.startswith(POISONED):
        if look.is_paused:
            return MUTE if look.is_guarded or look.weights else f"a mixture that would answer when it is woken: {look}"
        return f"marked and not paused: {look}"
    if look.is_guarded:
        return f"POISONED without a mark: {look}"
    number = int(look.version) if look.version.isdigit() else 0
    if (look.weights, number) == (before, version):
        return UNTOUCHED if not look.is_paused else f"as it was, and paused: {look}"
    if (look.weights, number) == (failing, version + 1):
        return PAUSED if look.is_paused else NEW
    return f"a LIE: {look}, after {before!r} as version {version} and a push of {failing!r}"


def pid_of(remote: Remote) -> int:
    pid = remote._process.pid
    assert pid is not None
    return pid


def end(remote: Remote) -> None:
    remote._process.kill()
    remote._process.join(10)
    with suppress(OSError):
        remote._connection.close()


class Stopped:
    """A context in which a process is stopped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGCONT)


def descriptors(pid: int) -> Counter[str]:
    """Return what a process has open, by kind."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found[re.sub(r"[0-9a-f]{6,}|\d+", "N", os.readlink(link))] += 1
    return found


def grown(pid: int, before: Counter[str]) -> Counter[str]:
    """Return what a process has more of than before, and still has after a moment."""
    more = descriptors(pid) - before
    deadline = time.monotonic() + 3
    while more and time.monotonic() < deadline:
        time.sleep(0.1)
        more = descriptors(pid) - before
    return more


def wait_for(condition: Callable[[], Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s")
        time.sleep(0.01)
