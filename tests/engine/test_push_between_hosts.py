"""Ranks on two hosts push to vLLM on two others: both answer as one that was started from the weights."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import tiny_models
import torch
import torch.distributed as dist
import zero
from engines import NOT_COMPILED, PROMPTS, Remote
from hosts import Host, Hosts
from safetensors.torch import load_file

from weightsync import MegatronBackend, WeightSync, WeightSyncError
from weightsync.fleet import connect
from weightsync.net.addresses import HOST, PORTS
from weightsync.net.authentication import KEY
from weightsync.tools.processes import Answer, difference, engine_environment, generate

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("TEST_HOSTS" not in os.environ, reason="`make test-hosts` runs it"),
]

OPTIONS = ("--skip-tokenizer-init", "--enforce-eager", "--max-model-len=256", "--dtype=bfloat16", "--bridge=none")
MODEL, BACKENDS = "qwen3", ("fsdp", "deepspeed", "megatron")
PORT, GROUP_PORT, HUB_PORT = 8000, 29500, 29600
START_S, TIMEOUT_S = 600.0, 60.0
TRAINER = {KEY: "k" * 32, PORTS: f"{HUB_PORT}-{HUB_PORT + 3}"}


def join(host: Host, rank: int, backend: str, engines: list[str]) -> None:
    os.environ |= TRAINER
    port = GROUP_PORT + BACKENDS.index(backend)  # those before may still have theirs
    os.environ |= {"MASTER_ADDR": "A", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    config = tiny_models.CONFIGS[MODEL]()
    holder: Any = backend
    if backend == "megatron":
        host.model = megatron_models.build(config, megatron_models.Mesh(tp=2), torch.bfloat16, padding=5)
        holder = MegatronBackend(vocab_size=config.vocab_size)
    elif backend == "deepspeed":
        host.model = zero.initialize(tiny_models.build(MODEL, "A"), zero.config(3))
    else:
        host.model = tiny_models.shard(tiny_models.build(MODEL, "A"))
    host.kept.append(WeightSync(holder, "broadcast", engines, timeout_s=TIMEOUT_S))


def push(host: Host, backend: str, checkpoint: Path) -> str:
    if backend == "megatron":
        state = load_file(checkpoint / "model.safetensors")
        megatron_models.load(host.model, tiny_models.CONFIGS[MODEL](), state)
    elif backend == "deepspeed":
        params = list(host.model.module.parameters())
        with zero.prepare().zero.GatheredParameters(params, modifier_rank=0):
            tiny_models.fill(host.model.module, checkpoint.name)
    else:
        tiny_models.fill(host.model, checkpoint.name)
    try:
        host.kept[0].push(host.model)
    except WeightSyncError as error:
        return str(error)
    return ""


def leave(host: Host) -> None:
    host.kept.pop().close()
    dist.destroy_process_group()


def wait_for(host: Host, url: str) -> None:
    (engine,) = connect(url, TIMEOUT_S)
    deadline = time.monotonic() + START_S
    while not engine.is_alive():
        assert time.monotonic() < deadline, url
        time.sleep(0.5)


def ask(host: Host, url: str) -> list[Answer]:
    return generate(url, PROMPTS)


def join_behind_nat(host: Host, engine: str) -> None:
    os.environ |= TRAINER | {HOST: "none"}
    host.model = tiny_models.build(MODEL, "A")
    host.kept.append(WeightSync("fsdp", "broadcast", engine, timeout_s=TIMEOUT_S))


def serve(hosts: Hosts, name: str, folder: Path, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "weightsync.vllm.serve", str(folder), "--host=0.0.0.0", f"--port={PORT}"]
    environment = {**os.environ, **engine_environment(), **NOT_COMPILED, KEY: TRAINER[KEY], **variables}
    with (folder.parent / f"{name}.log").open("wb") as log:
        return hosts.start(name, [*command, *OPTIONS, *options], stdout=log, stderr=log, env=environment)


def on_both(ranks: list[Remote], fn: Callable[..., Any], *args: Any) -> list[Any]:
    for remote in ranks:
        remote.begin(fn, *args)
    return [remote.result() for remote in ranks]


@pytest.mark.parametrize("tp", [1, 2])
def test_pushed_equals_cold_between_hosts(tmp_path: Path, tp: int) -> None:
    folders = {weights: tiny_models.save(tiny_models.build(MODEL, weights), tmp_path / weights) for weights in "AB"}
    with Hosts("A", "B", "C", "D", "E", shared=tmp_path) as hosts:
        urls = [f"http://{name}:{PORT}" for name in "CE"]
        user = hosts.python("A")

        def trainers(backend: str) -> list[Remote]:
            ranks = [hosts.python(name) for name in "AB"]
            for rank, remote in enumerate(ranks):
                remote.begin(join, rank, backend, urls)
            for remote in ranks:
                remote.result()
            return ranks

        def answers(url: str) -> list[Answer]:
            user.call(wait_for, url, timeout_s=START_S + 10)
            return user.call(ask, url)

        serve(hosts, "D", folders["B"], f"--tensor-parallel-size={tp}")
        cold = answers(f"http://D:{PORT}")
        hosts.down("D")
        for name in "CE":
            serve(hosts, name, folders["A"], f"--tensor-parallel-size={tp}")
        first = answers(urls[0])
        assert difference(first, cold) > 0
        assert difference(first, answers(urls[1])) == 0

        # The engine is whole after an init that has failed: the answers of its workers stay in order.
        ranks = trainers(BACKENDS[0])
        blocked = f"pref 5 to {hosts.address('A')} ipproto tcp dport {HUB_PORT}-{HUB_PORT + 3} prohibit"
        hosts.sh("C", f"ip rule add {blocked}")
        for text in on_both(ranks, push, BACKENDS[0], folders["B"]):
            assert f"worker tp={tp - 1} pp=0 dp=0 on C could not reach trainer rank 0 at 10.77.0.1:{HUB_PORT}" in text
        hosts.sh("C", f"ip rule del {blocked}")
        assert [difference(answers(url), first) for url in urls] == [0, 0]

        for backend in BACKENDS:
            ranks = ranks or trainers(backend)
            for weights, expected in (("B", cold), ("A", first)):
                assert on_both(ranks, push, backend, folders[weights]) == ["", ""]
                # The engine on C has passed the weights on to the one on E.
                assert [difference(answers(url), expected) for url in urls] == [0, 0], (backend, weights)
            on_both(ranks, leave)
            ranks = []


def test_pushed_equals_cold_from_a_trainer_that_no_engine_can_dial(tmp_path: Path) -> None:
    """As a notebook behind NAT, and an engine with a published port for its server and one for each worker."""
    folders = {weights: tiny_models.save(tiny_models.build(MODEL, weights), tmp_path / weights) for weights in "AB"}
    with Hosts("A", "C", "D", shared=tmp_path) as hosts:
        user = hosts.python("A")
        url = f"http://C:{PORT}"

        def answers(url: str) -> list[Answer]:
            user.call(wait_for, url, timeout_s=START_S + 10)
            return user.call(ask, url)

        serve(hosts, "D", folders["B"], "--tensor-parallel-size=2")
        cold = answers(f"http://D:{PORT}")
        hosts.down("D")
        ports = f"{HUB_PORT}-{HUB_PORT + 1}"
        serve(hosts, "C", folders["A"], "--tensor-parallel-size=2", **{PORTS: ports})
        first = answers(url)
        assert difference(first, cold) > 0
        # The engine's host begins no connection to the trainer's host, and answers those that come from there.
        hosts.sh("C", f"ip rule add pref 5 to {hosts.address('A')} ipproto tcp sport 32768-60999 prohibit")
        trainer = hosts.python("A")
        trainer.call(join_behind_nat, url)
        for weights, expected in (("B", cold), ("A", first), ("B", cold)):
            assert trainer.call(push, BACKENDS[0], folders[weights]) == ""
            assert difference(answers(url), expected) == 0, weights
