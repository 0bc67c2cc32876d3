"""What a cell of the failure matrix is, which there are, and what must be true after each.

The expectation follows from the state table of docs/architecture.md alone: where the push was when it ended, and who
is left to take back what was done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PHASES = ("connect", "plan", "open", "go", "run", "done", "commit", "close")
"""Where rank 0 is when it happens: the workers have come; they have answered how they load; the update is open and
nothing is written; they were told to go; rank 0 is in the middle of its chunks; it has sent all; all have loaded; the
version is stamped and generation is still paused."""
UNTOUCHED, MUTE, NEW, PAUSED, DEAD = "as it was", "mute", "new", "new, paused", "dead"

ON_HOSTS = "stand-in on another host"
RANKS = ("rank 0", "rank 1")
LINKS = ("rank 0 - rank 1", "rank 0 - worker")
CUT_OFF = ("dropped", "refused")
"""What becomes of the packets of a connection, and of new connections, until the others have raised."""


@dataclass(frozen=True)
class Cell:
    """One failure: `how` it happens to `who`, a process or a connection, when rank 0 is in `phase`."""

    client: str
    transport: str
    who: str
    how: str
    phase: str

    def __str__(self) -> str:
        return f"{self.client}, {self.transport}: {self.who} {self.how} in {self.phase}"


@dataclass(frozen=True)
class Expected:
    """What must follow.

    states: what the engine may be afterwards.
    kinds: the classes of error that the ranks that are left may raise. Empty: the push must return.
    words: any of these is in the error's text.
    may_return: the push may also be complete, which the order of two processes decides.
    """

    states: tuple[str, ...]
    kinds: tuple[str, ...]
    words: tuple[str, ...]
    may_return: bool = False


def expected(cell: Cell) -> Expected:
    """Return what must follow of a cell."""
    engine_dies = cell.how == "killed" and cell.who not in RANKS
    conductor_is_gone = (cell.who, cell.how) == ("rank 0", "killed")
    match cell.phase:
        case "connect" | "plan":
            states = (UNTOUCHED,)
        case "open":
            # It was marked before anything is written, and with the way to its workers goes the right to touch it.
            # Who has stopped is not missed before the workers were told to go.
            unseen = conductor_is_gone or cell.how in ("stopped", *CUT_OFF) or cell.who == "rank 0 - worker"
            states = (MUTE,) if unseen else (UNTOUCHED,)
        case "close":
            states = (PAUSED,) if conductor_is_gone else (NEW,)
        case _:
            states = (MUTE,)
    if engine_dies:
        states = (DEAD,)
    if cell.how == "stopped":
        if cell.who == "rank 0":  # another trainer takes the engine over meanwhile
            # The other rank has no verdict until then, and may have raised that rank 0 does not answer.
            words = ("another trainer has taken over this engine", "trainer rank 0")
            return Expected((NEW,), ("FencedError", "SyncTimeoutError"), words)
        if cell.who == "rank 1" and cell.phase in ("commit", "close"):  # nothing is wanted of it any more
            return Expected((NEW,), (), ())
        kinds: tuple[str, ...] = ("SyncTimeoutError", "EngineUnreachableError")
    elif engine_dies:
        kinds = ("PeerError", "EngineUnreachableError")
    else:
        kinds = ("PeerError",)
    if cell.how in CUT_OFF:
        kinds = ("SyncTimeoutError", "PeerError", "EngineUnreachableError")
    words = ("trainer rank 0", "trainer rank 1") if cell.who == LINKS[0] else _named(cell.who)
    # What all have loaded is not taken back, and a connection that breaks after its last message is not missed.
    may_return = cell.phase == "done" and cell.how in ("stopped", *CUT_OFF)
    may_return |= cell.how in CUT_OFF and (cell.phase == "close" or (cell.who, cell.phase) == (LINKS[0], "commit"))
    may_return |= cell.phase == "close" and (cell.who, cell.how) in (
        ("rank 0 - worker", "closed"),
        ("rank 1", "killed"),
        ("worker", "stopped"),
        ("worker", "killed"),
    )
    return Expected(states, kinds, words, may_return)


def _named(who: str) -> tuple[str, ...]:
    return (f"trainer {who}",) if who in RANKS else ("engine 0", "engine worker")


def cells_of(client: str, transport: str) -> Iterator[Cell]:
    """Yield the cells of one client and transport, those that spare processes first."""
    whos: dict[str, tuple[str, ...]] = {
        ON_HOSTS: (),
        "stand-in": ("core", "worker"),
        "HTTP": ("core", "worker", "server"),
    }
    hows = [(who, how) for how in CUT_OFF for who in LINKS] if client == ON_HOSTS else hows_of(whos[client])
    for who, how in hows:
        for phase in PHASES:
            yield Cell(client, transport, who, how, phase)


def hows_of(victims: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return what happens to whom on one host, where `victims` are the engine's processes."""
    hows = [(who, "closed") for who in LINKS]
    hows += [(who, "killed") for who in RANKS]
    hows += [(who, how) for how in ("stopped", "killed") for who in victims]
    return hows + [(who, "stopped") for who in RANKS]
