"""Runs cells of the failure matrix: an engine, two trainer ranks that fail, and a new trainer that heals."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import CUT_OFF, DAMAGED, DEAD, IN_RANK, LINKS, MUTE, NEW, ON_HOSTS, RANKS, Cell, expected
from engines import Remote
from hosts import Host, Hosts
from looks import KNOWN, Look, known_of, state_of
from own_engine import OwnEngineSide, RaySide
from servers import AdapterServer, ServerSide
from stand_in import TP, StandInWorker
from trainer import RAY, Outcome, Rank, memory_of

from weightsync.net.wire import POISONED

GRACE_S = 5.0
"""How much later than `timeout_s` an error may come."""
BUSY_S = 3.0
"""What all else may take on a machine that has more to do."""
PATIENT_S = 30.0
"""The timeout where nothing is expected to take it."""
_PORTS = "1024-65000"


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


class StandIn:
    """The stand-in engine, and what the driver knows of it."""

    victims = ("core", "worker")

    def __init__(self, folder: Path, transport: str, hosts: Hosts | None) -> None:
        self._paths = [str(folder / f"engine-{rank}") for rank in range(TP)]
        self.address = self._paths, "127.0.0.1" if hosts is None else hosts.address("B")
        self._hosts, self._transport, self._known = hosts, transport, known_of(transport)
        self._workers: list[Remote] = []
        self.weights, self.version = "", 0
        self.start()

    def start(self) -> None:
        self.close()
        for path in self._paths:
            Path(path).unlink(missing_ok=True)
        self._workers = [process(self._hosts, "B", StandInWorker, rank, "A", p) for rank, p in enumerate(self._paths)]
        wait_for(lambda: all(map(os.path.exists, self._paths)), 60)
        self.weights, self.version = "A", 0

    def pids(self) -> dict[str, int]:
        return {who: pid_of(worker) for who, worker in zip(self.victims, self._workers, strict=True)}

    def kill(self, who: str) -> None:
        end(self._workers[self.victims.index(who)])

    def weights_of_workers(self) -> list[str]:
        """Return the weights that each worker has whole, "" for a mixture."""
        return [worker.call(StandInWorker.look, self._known, timeout_s=20)[1] for worker in self._workers]

    def look(self) -> Look | None:
        """Return None where the engine is dead, or a part of it."""
        try:
            looks = [worker.call(StandInWorker.look, self._known, timeout_s=20) for worker in self._workers]
            newest = self._workers[0].call(StandInWorker.look_at_adapter, KNOWN, timeout_s=60)
        except (AssertionError, OSError, EOFError):
            return None
        weights = {found for _, found, *_ in looks}
        _, _, is_paused, version, _ = looks[0]
        if self._transport == "lora":
            return Look(newest[0] if weights == {"A"} else "", False, is_paused, newest[1])
        return Look(
            weights.pop() if len(weights) == 1 else "",
            any(state == POISONED for state, *_ in looks),
            is_paused,
            version,
        )

    def wait_until_given_up(self, timeout_s: float) -> None:
        """Wait until no worker serves a trainer."""
        wait_for(lambda: not any(w.call(StandInWorker.look, "")[-1] for w in self._workers), timeout_s)

    def unknown(self) -> Sequence[str]:
        """Return nothing: what is to be found after a push is known."""
        return ()

    def learn(self, weights: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        for worker in self._workers:
            end(worker)


ENGINES: dict[str, Callable[..., Any]] = {
    "stand-in": StandIn,
    ON_HOSTS: StandIn,
    "HTTP": ServerSide,
    "HTTP, lora": AdapterServer,
    RAY: RaySide,
}


class Bench:
    """One engine and its trainers, for the cells of one client and transport."""

    def __init__(self, client: str, transport: str, folder: Path, timeout_s: float) -> None:
        self.client, self.transport, self.folder, self.timeout_s = client, transport, folder, timeout_s
        self.short_s, self.known = timeout_s, known_of(transport)
        self.hosts = Hosts("A", "B", "C", shared=folder).__enter__() if client == ON_HOSTS else None
        self.engine: Any = None
        if client in IN_RANK:
            self.engine = OwnEngineSide(folder, client)
        else:
            kind = ENGINES.get(f"{client}, {transport}", ENGINES[client])
            self.engine = kind(folder, transport, self.hosts)
        self.settles_s = 6.0
        self._count = itertools.count()
        self.ranks: list[Remote] = []
        self.pids: set[int] = set()  # of all that there were
        self.healers: list[Remote] = []  # a new trainer, where the engine is in nobody's process
        self.start_healer()
        self.held: dict[int, Counter[str]] = {}

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
        self.start_healer()
        self.engine.start()

    def start_healer(self) -> None:
        for healer in self.healers:
            end(healer)
        if self.client not in IN_RANK:
            self.healers = [process(self.hosts, "A", Rank, 0, 1, self.folder / "none")]

    def close(self) -> None:
        for each in self.processes():
            end(each)
        self.engine.close()
        if self.hosts is not None:
            self.hosts.__exit__()

    def _run(self, cell: Cell, result: Result) -> None:
        want = expected(cell)
        self.timeout_s = PATIENT_S
        self.make_ready()
        if cell.how in ("stopped", *CUT_OFF):  # the others do not wait for anything
            self.timeout_s = self.short_s
        before = self.engine.weights
        failing, healing = [weights for weights in self.known if weights != before]
        self.connect(self.ranks)
        if cell.phase not in ("connect", "plan") or self.transport == "lora":
            self.push_well(self.ranks, before)
        if self.transport == "changes":
            self.push_well(self.ranks, before)
            if self.ranks[0].call(Rank.sent_everything):
                raise NotReadyError("a push without changes sent everything")
        version = self.engine.version
        outcomes = self.fail(cell, result, failing, healing)
        told = {outcome[:2] for outcome in outcomes}
        result.outcome = " / ".join(sorted(kind or "returned" for kind, _ in told))
        has_pushed = ("", "") in told
        if has_pushed and want.may_return and cell.who == LINKS[0]:  # what rank 0 could not tell the other
            told.discard(("", ""))
        if told - {("", "")} or not (want.may_return or not want.kinds):
            result.faults += wrong_errors(told, want.kinds, want.words, cell.who in ("rank 0", LINKS[0]))
        limit_s = self.timeout_s + GRACE_S
        if result.seconds > limit_s + BUSY_S:
            result.faults.append(f"the error came after {result.seconds:.1f} s, not within {limit_s:g} s")
        states = (NEW,) if has_pushed and DEAD not in want.states else want.states
        if (cell.who, cell.how) == ("rank 0", "stopped"):
            failing, version = healing, self.engine.version - 1
        result.state = self.settle(states, before, failing, version)
        if result.state not in states:
            result.faults.append(f"the engine is {result.state}, not {' or '.join(states)}")
        if result.state == MUTE and cell.transport == "changes" and "" in self.engine.weights_of_workers():
            result.faults.append("a worker has written some of its changes")
        if result.state == DEAD:
            self.engine.start()
            if self.client in IN_RANK:  # and its trainer with it
                self.make_ready()
            if self.client in (*IN_RANK, RAY) or self.transport == "single_copy":  # they have the old one
                self.connect(self.ranks)
        self.heal(cell, result, next(weights for weights in self.known if weights not in (before, failing)), has_pushed)
        self.release()
        result.faults += self.leaks()

    # The failure

    def fail(self, cell: Cell, result: Result, weights: str, healing: str) -> list[Outcome]:
        """Let the cell's failure happen in a push, and return what the ranks that are left raise."""
        there = self.folder / f"there-{next(self._count)}"
        conductor, second = self.ranks[0], self.ranks[-1]
        conductor.call(Rank.arm, cell.phase, there, cell.who if cell.how == "closed" else "", cell.how == DAMAGED)
        for rank in self.ranks:
            rank.begin(Rank.push, weights)
        wait_for(there.exists, 30)

        def go_on(*those: Remote) -> list[Outcome]:
            there.unlink()
            since = time.monotonic()
            outcomes = [self.outcome(rank) for rank in those]
            result.seconds = time.monotonic() - since
            return outcomes

        match cell.who, cell.how:
            case _, "closed" | "damaged":
                return go_on(*self.ranks)
            case who, "killed" if who in RANKS:
                end(victim := self.ranks[RANKS.index(who)])
                return go_on(*(rank for rank in self.ranks if rank is not victim))
            case who, "killed":
                self.engine.kill(who)
                return go_on(*self.ranks)
            case "rank 0", "stopped":
                with Stopped(pid_of(conductor)):
                    go_on()
                    self.engine.wait_until_given_up(1.5 * self.timeout_s + GRACE_S + BUSY_S)
                    self.connect(self.healers)
                    (taken,) = self.push(self.healers, healing)
                    if taken[0]:
                        result.faults.append(f"another trainer got {taken}")
                return [self.outcome(rank) for rank in self.ranks]
            case "rank 1", "stopped":
                with Stopped(pid_of(second)):
                    outcomes = go_on(conductor)
                return [*outcomes, self.outcome(second)]
            case who, "stopped":
                with Stopped(self.engine.pids()[who]):
                    return go_on(*self.ranks)
        away = cell.who == LINKS[0]
        with self.cut_off("C" if away else "B", cell.how):
            outcomes = go_on(*(self.ranks[:1] if away else self.ranks))
        return [*outcomes, self.outcome(second)] if away else outcomes

    @contextmanager
    def cut_off(self, host: str, how: str) -> Iterator[None]:
        """Meanwhile nothing that is sent to a host arrives. It is dropped, or refused."""
        assert self.hosts is not None
        if how == "dropped":
            self.hosts.cut(host)
        else:
            self.hosts.block(host, _PORTS, refuse=True)
        try:
            yield
        finally:
            if how == "dropped":
                self.hosts.heal(host)
            else:
                self.hosts.unblock(host, _PORTS, refuse=True)

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

    def heal(self, cell: Cell, result: Result, weights: str, has_pushed: bool) -> None:
        """Push again, by the ranks if both are left, or else by a new trainer: the engine then serves these weights."""
        healers = self.ranks
        if (cell.who, cell.how) == ("rank 0", "stopped"):
            self.healers[0].call(Rank.release)  # while it holds the engine, the ranks are turned away
            if self.transport == "single_copy":  # whose model is the engine's memory no more
                self.connect(self.ranks)
        elif cell.how == "killed" and cell.who in RANKS:
            self.release()  # the rank that is left
            if self.transport == "single_copy":  # which has the engine's memory mapped
                self.end_ranks()
            healers = self.healers
            self.connect(healers)
        told = self.push(healers, weights)
        # An engine that went away when the last push was complete is found out by the next one, which says so.
        # Nor does a worker notice at once that what comes to it is refused, and another trainer's call waits for it.
        if (cell.phase == "close" or cell.how == "refused") and any(kind for kind, _ in told):
            told = self.push(healers, weights)
        if any(kind for kind, _ in told):
            result.faults.append(f"the next push does not heal: {told}")
            self.start_anew()
            return
        if not (has_pushed or healers[0].call(Rank.sent_everything)):
            result.faults.append("the next push does not send everything")
        look = self.engine.look()
        state = state_of(look, "", weights, self.engine.version - 1)
        if state != NEW:
            result.faults.append(f"after the next push the engine is {state}: {look}")
            self.engine.start()

    # What there is before and after

    def make_ready(self) -> None:
        if self.client in IN_RANK:
            self.ranks = [self.engine.trainer]
        elif not self.ranks:
            store = self.folder / f"store-{next(self._count)}"
            self.ranks = [process(self.hosts, host, Rank, rank, 2, store) for rank, host in enumerate("AC")]
        pids = self.now()
        if pids != set(self.held):  # one is new, and has not opened all that it keeps open
            for trainers in (self.healers, self.ranks):
                if not trainers:
                    continue
                self.connect(trainers)
                for weights in (*self.engine.unknown(), self.engine.weights):
                    self.push_well(trainers, weights)
                self.release()
            self.held = {pid: descriptors(pid) for pid in pids}
            self.pids |= pids

    def now(self) -> set[int]:
        """Return the processes that there are."""
        alive = [each for each in self.processes() if each.process.is_alive()]
        return {*map(pid_of, alive), *self.engine.pids().values()}

    def processes(self) -> list[Remote]:
        return [*self.ranks, *self.healers]

    def connect(self, trainers: list[Remote]) -> None:
        # Alone it cannot share the memory of two workers.
        transport = "ipc" if trainers == self.healers and self.transport == "single_copy" else self.transport
        # One folder of checkpoints is one trainer's.
        folder = self.folder / ("healing" if trainers == self.healers else "failing")
        for each in trainers:
            each.begin(Rank.connect, self.client, transport, self.engine.address, self.timeout_s, folder)
        for each in trainers:
            each.result(60)

    def push(self, trainers: list[Remote], weights: str) -> list[tuple[str, str]]:
        for each in trainers:
            each.begin(Rank.push, weights)
        told = [self.outcome(each)[:2] for each in trainers]
        if not any(kind for kind, _ in told):
            look = self.look()
            self.engine.learn(weights)
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

    def leaks(self) -> list[str]:
        """Return what is left of a cell in the processes that are left, and in /dev/shm; forget those that are gone."""
        found: list[str] = []
        for number, rank in enumerate(self.ranks):
            if rank.process.is_alive():
                found += [f"rank {number} has a thread {name}" for name in set(rank.call(Rank.threads, self.settles_s))]
        for pid, before in self.held.items():
            if pid in self.now() and (more := grown(pid, before, self.settles_s)):
                found.append(f"process {pid} has more open: {dict(more)}")
        if not all(rank.process.is_alive() for rank in self.ranks):
            self.end_ranks()
        names = [path.name for path in Path("/dev/shm").glob("weightsync-[0-9]*")]
        found += [f"/dev/shm/{name} is left" for name in names if int(name.split("-")[1]) in self.pids]
        return found + [f"{path} is left" for path in memory_of(self.folder / "any").iterdir()]

    def end_ranks(self) -> None:
        for rank in self.ranks if self.client not in IN_RANK else ():  # whose engine ends with it
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


def process(hosts: Hosts | None, host: str, kind: Callable[..., Any], *args: Any) -> Remote:
    """Start a process that makes a `kind(*args)`, on this machine or on one of the hosts."""
    if hosts is None:
        return Remote(kind, *args)
    return Remote(on_host, host, hosts._pid(host), kind, *args)


def on_host(name: str, pid: int, kind: Callable[..., Any], *args: Any) -> Any:
    Host(name, pid)
    os.environ |= {"MASTER_ADDR": "A", "WEIGHTSYNC_KEY": "a key that only the failure matrix has"}
    return kind(*args)


def pid_of(remote: Remote) -> int:
    pid = remote.process.pid
    assert pid is not None
    return pid


def end(remote: Remote) -> None:
    remote.process.kill()
    remote.process.join(10)
    with suppress(OSError):
        remote.connection.close()


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
            found[re.sub(r"(?<=^/dev/shm/).*|[0-9a-f]{6,}|\d+", "N", os.readlink(link))] += 1
    return found


def grown(pid: int, before: Counter[str], settles_s: float) -> Counter[str]:
    """Return what a process has more of than before, and still has after a while."""
    more = descriptors(pid) - before
    deadline = time.monotonic() + settles_s
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
