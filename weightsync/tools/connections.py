"""The connections of a push with an engine, tried one after the other from both sides."""

from __future__ import annotations

import socket

from weightsync.errors import WeightSyncError
from weightsync.fleet import connect
from weightsync.fleet.fleet import Fleet
from weightsync.net.addresses import host_port, is_here
from weightsync.net.authentication import SET_A_KEY, read_key
from weightsync.net.ranks import Ranks
from weightsync.net.runtime import boot_id
from weightsync.net.wire import PROTOCOL
from weightsync.tools.findings import Finding, Findings, found

_TIMEOUT_S = 60.0


def connections(url: str) -> Findings:
    """Connect to an engine from both sides, as a push does, and release it again."""
    (engine,) = connect(url, _TIMEOUT_S)
    try:
        version = engine.version() or "unknown"
        yield Finding("pass", "engine", f"{url} answers {socket.gethostname()}, and serves version {version}")
        near, key = is_here(engine.host), read_key()
    except (OSError, WeightSyncError) as error:
        yield Finding("FAIL", "engine", str(error))
        return
    needed = "not needed, since the engine is on this host" if near else "needed, since the engine is on another host"
    without = f"not set, and {needed}. {SET_A_KEY}"
    yield found("key", near or bool(key), f"{'set' if key else 'not set'}; {needed}", without)
    if not near and not key:
        return
    ranks = Ranks(_TIMEOUT_S)
    ranks.begin("connect")
    fleet = Fleet([engine], ranks, "keep", _TIMEOUT_S)
    try:
        workers = fleet.connect()
        fleet.release("init")
    except WeightSyncError as error:
        fleet.fail(error)
        yield Finding("FAIL", "workers", str(error))
    else:
        assert ranks.listener is not None
        place, names = (
            host_port(fleet.host, ranks.listener.listening[fleet.host][1]),
            [each.hello.name for each in workers],
        )
        here = sum(each.machine.boot_id == boot_id() for each in workers)
        where = {0: "another host", len(workers): "this host"}.get(here, f"several hosts, {here} on this one")
        yield Finding("pass", "plug-in", f"wire protocol {PROTOCOL} on {len(workers)} workers: {', '.join(names)}")
        proven = "have its key" if key else "are of its user"
        dialled = [host_port(*each.machine.dialled) for each in workers if each.machine.dialled]
        way = f"are reached at {', '.join(dialled)}" if dialled else f"reach this process at {place}"
        yield Finding("pass", "workers", f"on {where}, {way}, and {proven}")
        fleet.close()
    finally:
        ranks.disconnect()
