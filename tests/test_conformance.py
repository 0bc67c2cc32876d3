"""Our own senders, transports and engine clients pass the conformance suite; and the suite can fail."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from weightsync.testing import check_transport
from weightsync.transports import make_source, make_transport
from weightsync.transports.base import WorkerInfo

pytest_plugins = ["engine_fixtures"]


def here(peer: str, **other: str) -> WorkerInfo:
    return WorkerInfo(**{"peer": peer, "device": "cpu", "gpu_uuid": "", "boot_id": "this host", **other})


WRONG_PAIRINGS: dict[str, Any] = {
    "ipc": [
        ([here("rank 0")], [here("worker 0", boot_id="another host")]),
        ([here("rank 0"), here("rank 1", boot_id="another host")], [here("worker 0")]),
        ([here("rank 0", device="cuda", gpu_uuid="GPU-1")], [here("worker 0")]),
    ],
    "broadcast": [
        ([here("rank 0")], [here("worker 0", device="cuda", gpu_uuid="GPU-1")]),
        (
            [here("rank 0", device="cuda", gpu_uuid="GPU-1")],
            [here("worker 0", device="cuda", gpu_uuid="GPU-1")],
        ),
    ],
}


def transport_named(name: str) -> Any:
    return make_transport(name, timeout_s=20.0)


@pytest.mark.parametrize("in_processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("name", WRONG_PAIRINGS)
def test_transports(name: str, in_processes: bool):
    check_transport(
        functools.partial(transport_named, name),
        functools.partial(make_source, name),
        wrong_pairings=WRONG_PAIRINGS[name],
        in_processes=in_processes,
        timeout_s=20.0,
    )
    assert not list(Path("/dev/shm").glob("weightsync-*")), "shared memory was left behind"
