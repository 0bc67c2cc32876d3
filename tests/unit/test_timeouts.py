"""The order of the constants in seconds: which wait ends before which, so that the error that knows most is raised."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from weightsync.net import timeouts
from weightsync.worker import session

ROOT = Path(__file__).resolve().parents[2]

# Each is less than the next.
ORDERS = [
    # Rank 0 gives up on workers before these give up on others, and before ranks give up on rank 0.
    ["WORKERS_DONE_PATIENCE", "WORKER_PATIENCE"],
    ["WORKERS_DONE_PATIENCE", "RANK_PATIENCE"],
    # A listener turns a silent newcomer away before the dialer gives the listener up, and tells it why.
    ["LISTENER_POLL_S", "NEWCOMER_S", "GREETING_S"],
    ["NEWCOMER_LEAST_S", "NEWCOMER_S"],
    # A trainer that is alive answers a Ping several times over before it loses its engine.
    ["LEASE_LOOK_S", "HOLDER_ANSWER_S"],
    ["WORKER_LEASE_LOOK_S", "ENGINE_ANSWER_S", "HOLDER_ANSWER_S"],
    ["PONG_SENT_S", "HOLDER_ANSWER_S", "HOST_LOST_S"],
    # An engine is asked for its health again before its first silence counts.
    ["HEALTH_LOOK_S", "HEALTH_TIMEOUT_S"],
    ["LOST_ENGINE_ANSWER_S", "ENGINE_ANSWER_S", "HEALTH_TIMEOUT_S"],
    # A worker's own message comes before what others conclude from its silence.
    ["RANK_DEATH_S", "WORKER_MESSAGE_S", "WORKER_ARRIVAL_S"],
    ["RANK_LOOK_S", "RANK_ANSWER_S", "VERDICT_S"],
    ["CHUNK_LOOK_S", "WORKER_MESSAGE_S"],
    # A process that exits waits longer than a failed push does.
    ["WORKER_FAREWELL_S", "FAREWELL_S", "EXIT_S"],
    # An object that is collected waits until its engines and adapters have been let go.
    ["ENGINE_FAREWELL_S", "ADAPTER_FAREWELL_S", "CLOSING_S"],
    ["CALL_LOOK_S", "NEXT_CALL_S", "FAREWELL_S"],
    ["RENDEZVOUS_POLL_S", "RENDEZVOUS_LONGEST_POLL_S"],
    ["STAGING_POLL_S", "STAGING_LONGEST_POLL_S"],
    ["RAY_POLL_S", "RAY_LONGEST_POLL_S"],
    ["SERVING_S", "MAX_TIMEOUT_S"],
]


@pytest.mark.parametrize("names", ORDERS, ids=" < ".join)
def test_waits_end_in_this_order(names: list[str]):
    values = [getattr(timeouts, name) for name in names]
    assert all(one < other for one, other in pairwise(values))


def test_thread_of_a_collected_engine_ends_whatever_the_pause_between_pings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeouts, "WORKER_LEASE_LOOK_S", 3600.0)
    monkeypatch.setattr(timeouts, "ENGINE_USE_LOOK_S", 0.25)
    connection = mock.Mock(**{"has_ended.return_value": False})
    session._await_end(connection, mock.Mock(side_effect=[print, None, None]))
    assert connection.has_ended.mock_calls == [mock.call(0.25), mock.call(0.25)]


def test_the_kernel_gives_a_lost_host_up_when_we_do():
    probes_s = timeouts.KEEPALIVE_PROBES * timeouts.KEEPALIVE_INTERVAL_S
    assert timeouts.KEEPALIVE_IDLE_S + probes_s == timeouts.HOST_LOST_S


def test_graces_end_in_the_order_of_what_is_known():
    """A worker may wait for the trainer as long as a rank waits for a rank that waits for workers."""
    assert timeouts.RANK_GRACE_S <= timeouts.WORKER_GRACE_S


# Outside of pushes: a progress bar, the buckets of a histogram, a framework's own waits.
ELSEWHERE = {"report.py", "telemetry.py", "hybrid/pending.py", "hybrid/worker_group.py", "integrations/verl.py"}


def test_constants_in_seconds_stand_in_one_file():
    found = set()
    for path in sorted((ROOT / "weightsync").rglob("*.py")):
        place = path.relative_to(ROOT / "weightsync").as_posix()
        if place.startswith("tools/") or place == "net/timeouts.py":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            if any(name.endswith("_S") for name in names):
                found.add(place)
    assert found == ELSEWHERE
