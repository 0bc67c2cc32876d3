"""FSDP2 ranks on two hosts push to vLLM on two others: both answer as one that was started from the weights."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_models
import torch.distributed as dist
from engines import NOT_COMPILED, PROMPTS
from hosts import Host, Hosts

from weightsync import WeightSync, WeightSyncError
from weightsync.control.addresses import PORTS
from weightsync.control.handshake import KEY
from weightsync.engines import connect
from weightsync.tools.processes import Answer, difference, engine_environment, generate

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("TEST_HOSTS" not in os.environ, reason="`make test-hosts` runs it"),
]

OPTIONS = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=256", "--dtype=bfloat16", "--bridge=none")
PORT, GROUP_PORT, HUB_PORT = 8000, 29500, 29600
START_S, TIMEOUT_S = 300.0, 60.0
TRAINER = {KEY: "k" * 32, PORTS: f"{HUB_PORT}-{HUB_PORT + 3}"}


def join(host: Host, rank: int, engines: list[str]) -> None:
    os.environ |= TRAINER
    os.environ |= {"MASTER_ADDR": "A", "MASTER_PORT": str(GROUP_PORT), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    model = tiny_models.shard(tiny_models.build("qwen3", "A"))
    host.kept.append(WeightSync("fsdp", "broadcast", engines, timeout_s=TIMEOUT_S))
    host.model = model


def push(host: Host, weights: str) -> str:
    tiny_models.fill(host.model, weights)
    try:
        host.kept[0].push(host.model)
    except WeightSyncError as error:
        return str(error)
    return ""


def wait_for(host: Host, url: str) -> None:
    (engine,) = connect(url, TIMEOUT_S)
    deadline = time.monotonic() + START_S
    while not engine.is_alive():
        assert time.monotonic() < deadline, url
        time.sleep(0.5)


def ask(host: Host, url: str) -> list[Answer]:
    return generate(url, PROMPTS)


def serve(hosts: Hosts, name: str, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "weightsync.vllm.serve", str(folder), "--host=0.0.0.0", f"--port={PORT}"]
    environment = {**os.environ, **engine_environment(), **NOT_COMPILED, KEY: TRAINER[KEY]}
    with (folder.parent / f"{name}.log").open("wb") as log:
        return hosts.start(name, [*command, *OPTIONS, *options], stdout=log, stderr=log, env=environment)


@pytest.mark.parametrize("tp", [1, 2])
def test_pushed_equals_cold_between_hosts(tmp_path: Path, tp: int) -> None:
    folders = {weights: tiny_models.save(tiny_models.build("qwen3", weights), tmp_path / weights) for weights in "AB"}
    with Hosts("A", "B", "C", "D", "E", shared=tmp_path) as hosts:
        urls = [f"http://{name}:{PORT}" for name in "CE"]
        ranks = [hosts.python(name) for name in "AB"]
        for rank, remote in enumerate(ranks):
            remote.begin(join, rank, urls)
        for remote in ranks:
            remote.result()

        def answers(url: str) -> list[Answer]:
            ranks[0].call(wait_for, url, timeout_s=START_S + 10)
            return ranks[0].call(ask, url)

        serve(hosts, "D", folders["B"], f"--tensor-parallel-size={tp}")
        cold = answers(f"http://D:{PORT}")
        hosts.down("D")
        for name in "CE":
            serve(hosts, name, folders["A"], f"--tensor-parallel-size={tp}")
        first = answers(urls[0])
        assert difference(first, cold) > 0
        assert difference(first, answers(urls[1])) == 0

        # The engine is whole after an init that has failed: the answers of its workers stay in order.
        blocked = f"pref 5 to {hosts.address('A')} ipproto tcp dport {HUB_PORT}-{HUB_PORT + 3} prohibit"
        hosts.sh("C", f"ip rule add {blocked}")
        for remote in ranks:
            remote.begin(push, "B")
        for text in [remote.result() for remote in ranks]:
            assert f"worker tp={tp - 1} pp=0 dp=0 on C could not reach trainer rank 0 at 10.77.0.1:{HUB_PORT}" in text
        hosts.sh("C", f"ip rule del {blocked}")
        assert [difference(answers(url), first) for url in urls] == [0, 0]

        for weights, expected in (("B", cold), ("A", first)):
            for remote in ranks:
                remote.begin(push, weights)
            assert [remote.result() for remote in ranks] == ["", ""]
            # The engine on C has passed the weights on to the one on E.
            assert [difference(answers(url), expected) for url in urls] == [0, 0], weights
