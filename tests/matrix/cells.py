"""What a cell of the failure matrix is, which there are, and what must be true after each.

The expectation follows from the state table of docs/internals/architecture.md alone: where the push was when it ended,
and who is left to take back what was done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PHASES = ("connect", "plan", "open", "go", "run", "done", "commit", "close")
"""Where rank 0 is when it happens: the workers have come; they have answered how they load; the update is open and
nothing is written; they were told to go; rank 0 is in the middle of its chunks; it has sent all; all have loaded; the
version is stamped and generation is still paused."""
CHANGE_PHASES = ("open", "go", "run", "last", "done", "commit", "close")
"""The same where few weights have changed, and only changed words are sent: rank 0 is in the middle of its parts; its
changes are sent, and no worker knows yet that they are all."""
DAMAGED_PHASES = ("go", "run", "last")
"""Those of them after which rank 0 sends changes, or a head."""
ADAPTER_PHASES = ("plan", "save", "load", "loaded")
"""The same where adapters alone are pushed: the engines were asked what they take; the files are made, and rank 0 has
written nothing; all ranks have written; every engine has loaded the adapter."""
UNTOUCHED, MUTE, NEW, PAUSED, DEAD = "as it was", "mute", "new", "new, paused", "dead"

ON_HOSTS = "stand-in on another host"
IN_ONE_PROCESS = "LLM in one process"
IN_RANK = ("LLM", "AsyncLLM", IN_ONE_PROCESS)
"""Clients whose engine is in the process of the only rank."""
RANKS = ("rank 0", "rank 1")
RANKS_NAMED = ("trainer rank 0", "trainer rank 1")
LINKS = ("rank 0 - rank 1", "rank 0 - worker")
DAMAGED = "damaged"
"""What becomes of the next changes that rank 0 sends, or of its last head."""
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


def phases_of(transport: str) -> tuple[str, ...]:
    """Return the columns of a transport's table."""
    return {"lora": ADAPTER_PHASES, "changes": CHANGE_PHASES}.get(transport, PHASES)


def expected_of_adapter(cell: Cell) -> Expected:
    """Return what must follow of a cell in which an adapter is pushed. The weights stay as they are."""
    is_loaded = cell.phase == "loaded"
    words = _named(cell.who) if cell.who != LINKS[0] else RANKS_NAMED
    if cell.who not in RANKS and cell.how == "killed":
        # Whether older adapters may go is asked after the new one is served, and left to the next push.
        return Expected((DEAD,), ("EngineUnreachableError",), words, may_return=is_loaded)
    if cell.who not in (*RANKS, *LINKS):  # stopped
        states = (NEW,) if is_loaded else (UNTOUCHED,)
        return Expected(states, ("SyncTimeoutError", "EngineUnreachableError"), words, may_return=is_loaded)
    if (cell.who, cell.how) == ("rank 0", "killed"):
        return Expected((NEW,) if is_loaded else (UNTOUCHED,), ("PeerError",), words)
    # Engines load what all ranks have written. That a rank has gone since is found when it is told.
    is_written = cell.phase in ("load", "loaded")
    may_be_written = is_written or (cell.phase == "save" and cell.who == "rank 1")
    if cell.how == "stopped":
        kinds = () if is_written else ("SyncTimeoutError",)
        return Expected((NEW,) if is_written else (UNTOUCHED,), kinds, words, may_be_written)
    return Expected((NEW,) if is_written else (UNTOUCHED,), ("PeerError",), words, may_be_written)


def expected(cell: Cell) -> Expected:
    """Return what must follow of a cell."""
    if cell.transport == "lora":
        return expected_of_adapter(cell)
    if cell.how == DAMAGED:
        return Expected((MUTE,), ("DigestError", "ProtocolError"), ("engine 0", "engine worker"))
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
            if (cell.who, cell.how) == (LINKS[0], "refused"):  # the next message finds it, before Go or after it
                states = (UNTOUCHED, MUTE)
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
    words = RANKS_NAMED if cell.who == LINKS[0] else _named(cell.who)
    # What all have loaded is not taken back, and a connection that breaks after its last message is not missed.
    may_return = cell.phase == "done" and cell.how in ("stopped", *CUT_OFF)
    may_return |= cell.how in CUT_OFF and cell.phase == "close"
    # The other rank may have done its part before, and is told later that rank 0 has pushed.
    sends_alone = cell.transport != "changes" or cell.phase == "commit"  # changes are sent by all ranks or none
    sends_alone &= cell.phase in ("open", "go", "run", "commit")
    may_return |= sends_alone and cell.how in CUT_OFF and cell.who == LINKS[0]
    may_return |= (cell.transport, cell.who, cell.how, cell.phase) == ("checkpoint", "rank 1", "stopped", "run")
    # All its bytes may be in the kernel's buffers before, or in slots that need no code of its.
    in_buffers = cell.transport in ("broadcast", "nixl") and (cell.who, cell.how) == ("rank 1", "stopped")
    may_return |= in_buffers and cell.phase in ("open", "go", "run")
    may_return |= cell.phase == "close" and (cell.who, cell.how) in (
        ("rank 0 - worker", "closed"),
        ("rank 1", "killed"),
        ("worker", "stopped"),
        ("worker", "killed"),
    )
    may_return |= cell.phase == "close" and cell.client.startswith("LLM")  # which is not paused, so nothing is asked
    return Expected(states, kinds, words, may_return)


def _named(who: str) -> tuple[str, ...]:
    return (f"trainer {who}",) if who in RANKS else ("engine 0", "engine worker")


def cells_of(client: str, transport: str) -> Iterator[Cell]:
    """Yield the cells of one client and transport, those that spare processes first."""
    victims: dict[str, tuple[str, ...]] = {
        "stand-in": ("core", "worker"),
        "HTTP": ("core", "worker", "server"),
        "Ray": ("core", "worker", "actor"),
        **dict.fromkeys(IN_RANK, ("core", "worker")),
        IN_ONE_PROCESS: (),
    }
    hows = [(who, how) for how in CUT_OFF for who in LINKS] if client == ON_HOSTS else hows_of(victims[client])
    if client in IN_RANK:
        hows = [(who, how) for who, how in hows if who != LINKS[0] and who not in RANKS]
    if transport == "lora":  # of which the workers know nothing, and another trainer may push beside this one
        hows = [
            (who, how) for who, how in hows if who not in (LINKS[1], "worker") and (who, how) != ("rank 0", "stopped")
        ]
    if transport == "changes" and client != ON_HOSTS:
        hows = [*hows, (LINKS[1], DAMAGED)]
    for who, how in hows:
        for phase in phases_of(transport) if how != DAMAGED else DAMAGED_PHASES:
            yield Cell(client, transport, who, how, phase)


def hows_of(victims: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return what happens to whom on one host, where `victims` are the engine's processes."""
    hows = [(who, "closed") for who in LINKS]
    hows += [(who, "killed") for who in RANKS]
    hows += [(who, how) for how in ("stopped", "killed") for who in victims]
    return hows + [(who, "stopped") for who in RANKS]
