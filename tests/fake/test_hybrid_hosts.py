"""`weightsync.hybrid` on a Ray cluster of several hosts, made of namespaces, of which two are switched off."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from fake_engine import checkpoint, cold
from hosts import Host, Hosts
from hybrid_workers import Learner, StandIn, prompts_of

from weightsync import WeightSyncError
from weightsync.errors import PeerError, PlacementError
from weightsync.hybrid import ResourcePool, RolloutGroup, WorkerGroup
from weightsync.net.authentication import KEY

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif("TEST_HOSTS" not in os.environ, reason="`make test-hosts` runs it"),
]

PORT = 6379
POOL_TIMEOUT_S, CALL_S, NOTICED_S = 5.0, 60.0, 30.0
ROOT = Path(__file__).parents[2]
CLUSTER = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support"))),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}

# ---------------------------------------------------------------------------------------------------------------
# What runs in the controller's process


def connect(host: Host, address: str) -> None:
    os.environ |= CLUSTER
    variables = {KEY: "k" * 32}
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": variables})
    host.model = SimpleNamespace(train=None, rollout=None, actor=None, engine=None, sync=None)


def reserve(host: Host) -> None:
    for name in ("train", "rollout"):
        setattr(host.model, name, ResourcePool([1, 1], timeout_s=POOL_TIMEOUT_S))


def start_workers(host: Host, folder: Path) -> list[str]:
    host.model.actor = WorkerGroup(host.model.train, Learner, folder, timeout_s=2 * CALL_S)
    return list(host.model.actor.processes.names)


def start_engines(host: Host) -> list[str]:
    host.model.engine = RolloutGroup(host.model.rollout, model="none", actor=StandIn, timeout_s=2 * CALL_S)
    return list(host.model.engine.names)


def follow(host: Host) -> str:
    host.model.sync = host.model.engine.follow(host.model.actor, timeout_s=CALL_S)
    return str(host.model.sync.transport)


def train(host: Host) -> tuple[int, list[str]]:
    """Take a step and push. Return the number of steps so far, and what engines have otherwise than a cold one."""
    steps = host.model.actor.step()[0]
    host.model.sync.push()
    expected = cold({name: tensor + steps for name, tensor in checkpoint(0).items()}).state()
    wrong = []
    for number, state in enumerate(ray.get([actor.state.remote() for actor in host.model.engine.actors])):
        wrong += [f"{number}: {name}" for name in expected if not torch.equal(state[name], expected[name])]
    assert len(host.model.engine.generate(prompts_of(4), n=1)) == 4
    return steps, wrong


def fail_to(host: Host, name: str, *args: Any) -> tuple[type[WeightSyncError], str, float]:
    """Return what a call of this process raises, and how long it took."""
    begun = time.monotonic()
    with pytest.raises(WeightSyncError) as raised:
        CALLS[name](host, *args)
    return type(raised.value), str(raised.value), time.monotonic() - begun


def wait_for_all(host: Host) -> None:
    host.model.actor.wait([CALL_S, CALL_S])


def generate_and_wait(host: Host) -> None:
    host.model.engine.generate(prompts_of(4), n=1, wait_s=CALL_S)


def replace_engine(host: Host, name: str) -> list[str]:
    host.model.engine.remove(name)
    return list(host.model.engine.add())


def close(host: Host, name: str) -> None:
    getattr(host.model, name).close()


CALLS: dict[str, Any] = {
    "start workers": start_workers,
    "wait": wait_for_all,
    "generate": generate_and_wait,
    "train": train,
}

# ---------------------------------------------------------------------------------------------------------------


def start_node(hosts: Hosts, name: str, *options: str) -> subprocess.Popen[bytes]:
    address = f"--node-ip-address={hosts.address(name)}"
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        address,
        "--num-cpus=1",
        "--object-store-memory=80000000",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return hosts.start(name, [*command, *options], env={**os.environ, **CLUSTER}, **quiet)


def test_training_goes_on_after_nodes_have_died(tmp_path: Path) -> None:
    with Hosts("A", "B", "C", "D", "E", "F", shared=tmp_path) as hosts:
        host_of = {hosts.address(name): name for name in "ABCDEF"}
        head = f"{hosts.address('A')}:{PORT}"
        assert start_node(hosts, "A", "--head", f"--port={PORT}", "--include-dashboard=false").wait(60) == 0
        nodes = [start_node(hosts, name, f"--address={head}") for name in "BCD"]
        assert [node.wait(60) for node in nodes] == [0, 0, 0]
        controller = hosts.python("A")
        controller.call(connect, head)
        controller.call(reserve)
        ranks = controller.call(start_workers, tmp_path / "weights")
        engines = controller.call(start_engines)
        where = {name: host_of[name.split()[-1]] for name in (*ranks, *engines)}
        assert sorted(where.values()) == ["A", "B", "C", "D"]
        assert controller.call(follow) == "broadcast"
        assert controller.call(train) == (1, [])
        assert controller.call(train) == (2, [])

        def switch_off(lost: str, meanwhile: str) -> str:
            """Switch off the host of a process of which something is asked. Return the error that comes of it."""
            controller.begin(fail_to, meanwhile)
            time.sleep(2)
            hosts.down(where[lost])
            kind, text, seconds = controller.result()
            print(f"{seconds - 2:.1f} s after {lost} was switched off: {text}")
            assert kind is PeerError
            assert seconds < NOTICED_S
            return text

        lost = next(name for name in ranks if where[name] != "A")
        assert f"Learner {lost} died before it answered Learner.wait" in switch_off(lost, "wait")
        controller.call(close, "actor")
        kind, text, _ = controller.call(fail_to, "start workers", tmp_path / "weights")
        assert kind is PlacementError
        assert "found no node for [1] of them" in text
        assert start_node(hosts, "E", f"--address={head}").wait(60) == 0
        ranks = controller.call(start_workers, tmp_path / "weights")
        assert "E" in [host_of[name.split()[-1]] for name in ranks]
        controller.call(follow)
        assert controller.call(train) == (3, [])

        lost = next(name for name in engines if where[name] != "A")
        assert f"{lost} died before it answered generate" in switch_off(lost, "generate")
        assert start_node(hosts, "F", f"--address={head}").wait(60) == 0
        (added,) = controller.call(replace_engine, lost)
        assert host_of[added.split()[-1]] == "F"
        assert controller.call(train) == (4, [])
