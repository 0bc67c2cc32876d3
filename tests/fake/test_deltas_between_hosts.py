"""Pushes over a link of 200 Mbit/s that send what has changed: how many bytes, and how long they take."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, module_of
from fake_server import FakeServer
from hosts import Host, Hosts
from torch import nn

from weightsync import WeightSync
from weightsync.kernels.digest import digest
from weightsync.net.authentication import KEY
from weightsync.tools.simulate import Topology, predict

all_hosts = pytest.mark.skipif("TEST_HOSTS" not in os.environ, reason="`make test-hosts` runs it")

PORT, TIMEOUT_S, SECRET = 8000, 60.0, "k" * 32
RATE = "200mbit"
WIDTH, ROWS = 1024, 512
LAYER_BYTES = 2 * WIDTH * ROWS
TOPOLOGY = "hosts=2,gpus_per_host=1,ranks=1,tp=1,network=0.0238,chunk_mib=4,fixed_s=0.025"
"""Links of `RATE` without what headers take of it, as `plan --simulate` is told."""
NETWORK = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}
"""NCCL sees two hosts by their names and boot ids, and goes over their cables."""
ALL_OTHER = 0.0
"""In place of a learning rate: each push has other weights altogether."""


def weights(layers: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"layers.{n}": 0.02 * torch.randn(ROWS, WIDTH, generator=draw) for n in range(layers)}


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.empty(ROWS, WIDTH, dtype=torch.bfloat16) for _ in range(layers))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


# ---------------------------------------------------------------------------------------------------------------
# What runs on the hosts


def serve(host: Host, layers: int, device: str = "cpu") -> None:
    os.environ |= {KEY: SECRET, **NETWORK}
    torch.set_num_threads(1)
    tensors = {name: tensor.bfloat16() for name, tensor in weights(layers, 0).items()}
    engine = ModuleHost(lambda: Layers(layers), tensors)
    engine.device = torch.device(device)
    engine.live.to(device)
    server = FakeServer(FakeEngine(engine), PORT)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host.kept.append(server)


class Trainer:
    """A policy in float32, of which bfloat16 is pushed."""

    def __init__(self, layers: int, urls: list[str], encoding: str | None, device: str = "cpu") -> None:
        self.device = device
        self.master = {name: tensor.to(device) for name, tensor in weights(layers, 1).items()}
        self.model = module_of({name: tensor.bfloat16() for name, tensor in self.master.items()})
        self.sync = WeightSync(
            "fsdp", "broadcast", urls, encoding=encoding, timeout_s=TIMEOUT_S, max_bytes=4 * LAYER_BYTES
        )

    def step(self, lr: float, seed: int) -> float:
        """Return the share of values that it has changed."""
        changed = 0
        draw = torch.Generator(self.device).manual_seed(seed)
        for name, param in self.model.named_parameters():
            step = torch.randn(ROWS, WIDTH, generator=draw, device=self.device)
            self.master[name] = 0.02 * step if lr == ALL_OTHER else self.master[name] + 0.3 * lr * step
            before = param.data.clone()
            param.data.copy_(self.master[name])
            changed += int((param.data != before).sum())
        return changed / sum(param.numel() for param in self.model.parameters())

    def close(self) -> None:
        self.sync.close()


def connect(host: Host, *arguments: Any) -> None:
    os.environ |= {KEY: SECRET, **NETWORK}
    torch.set_num_threads(1)
    host.kept.append(Trainer(*arguments))
    host.kept[0].sync.push(host.kept[0].model)


def step_and_push(host: Host, lr: float, seed: int) -> tuple[int, float, float, float]:
    """Return the bytes sent, the seconds and the processor time of a push, and the share of values that has changed."""
    trainer = host.kept[0]
    changed = trainer.step(lr, seed)
    processor_s = time.process_time()
    report = trainer.sync.push(trainer.model)
    return report.sent_bytes, report.total_s, time.process_time() - processor_s, changed


def catch_up(host: Host, url: str) -> int:
    """Give an engine that joins the last version. Return the bytes sent."""
    trainer = host.kept[0]
    trainer.sync.engines.add(url)
    return trainer.sync.catch_up(trainer.model).sent_bytes


def served(host: Host) -> dict[str, int]:
    return digests(host.kept[0].engine.hosts[0].live)


def pushed(host: Host) -> dict[str, int]:
    return digests(host.kept[0].model)


def digests(model: nn.Module) -> dict[str, int]:
    """Return the digest of each parameter's bytes."""
    return {name: digest(param.data.cpu().view(-1).view(torch.uint8)) for name, param in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------------


def left(hosts: Hosts, name: str) -> int:
    """Return how many bytes have left a host through its cable."""
    row = next(line for line in hosts.sh(name, "cat /proc/net/dev").splitlines() if "eth0:" in line)
    return int(row.partition(":")[2].split()[8])


def test_a_slow_link_carries_what_has_changed_alone(tmp_path: Path):
    layers = 8
    with Hosts("A", "B", shared=tmp_path) as hosts:
        engine, trainer = hosts.python("B"), hosts.python("A")
        engine.call(serve, layers)
        for name in "AB":
            hosts.link(name, rate=RATE)
        trainer.call(connect, layers, [f"http://B:{PORT}"], "delta")  # "auto" depends on how busy the processors are
        for seed in (2, 3):
            before = left(hosts, "A")
            trainer.call(step_and_push, 1e-6, seed)
            assert left(hosts, "A") - before < layers * LAYER_BYTES / 10
            assert engine.call(served) == trainer.call(pushed)


def test_an_engine_that_has_caught_up_is_sent_nothing_more_by_the_trainer(tmp_path: Path):
    layers = 8
    with Hosts(*"ABCD", shared=tmp_path) as hosts:
        engines, trainer = [hosts.python(name) for name in "BCD"], hosts.python("A")
        for engine in engines:
            engine.call(serve, layers)
        for name in "ABCD":
            hosts.link(name, rate=RATE)
        trainer.call(connect, layers, [f"http://{name}:{PORT}" for name in "BC"], "delta")
        before_it = trainer.call(step_and_push, 1e-6, 2)[0]
        trainer.call(catch_up, f"http://D:{PORT}")
        for seed in (3, 4):
            before = left(hosts, "A")
            assert trainer.call(step_and_push, 1e-6, seed)[0] < 1.3 * before_it
            assert left(hosts, "A") - before < 1.3 * before_it + layers * LAYER_BYTES / 100
            assert [engine.call(served) for engine in engines] == [trainer.call(pushed)] * 3


@all_hosts
@pytest.mark.parametrize("encoding", [None, "auto"])
def test_seconds_of_a_push_to_a_fleet_that_grows(tmp_path: Path, encoding: str | None):
    """Print rows of docs/evidence/deltas.md: the push after an engine has caught up, and the median of later ones."""
    layers, count = 28, 5
    with Hosts(*"ABCDEF", shared=tmp_path) as hosts:
        engines, trainer = [hosts.python(name) for name in "BCDEF"], hosts.python("A")
        urls = [f"http://{name}:{PORT}" for name in "BCDEF"]
        for engine in engines:
            engine.call(serve, layers)
        for name in "ABCDEF":
            hosts.link(name, rate=RATE)
        trainer.call(connect, layers, urls[:3], encoding)
        for size in (3, 4, 5):
            if size > 3:
                trainer.call(catch_up, urls[size - 1])
            rows = []
            for seed in range(1 + count):
                before = left(hosts, "A")
                seconds = trainer.call(step_and_push, 1e-6, 100 * size + seed)[1]
                rows.append((seconds, (left(hosts, "A") - before) / 1e6))
            (first_s, first_mb), later = rows[0], [median(row[at] for row in rows[1:]) for at in range(2)]
            print(
                f"| {encoding} | {size} | {first_s:.2f} s, {first_mb:.2f} MB | {later[0]:.2f} s, {later[1]:.2f} MB |",
                flush=True,
            )
            held = trainer.call(pushed)
            assert all(engine.call(served) == held for engine in engines[:size])


@all_hosts
@pytest.mark.parametrize(("rate", "of_each"), [(RATE, 1), (RATE, 3), ("1gbit", 1), ("", 1)])
def test_seconds_of_a_push(tmp_path: Path, rate: str, of_each: int):
    """Print a row of docs/evidence/deltas.md for each learning rate: medians, in turns, so that a load is on all."""
    layers, count = 28, 9
    fleets = "BCD"[:of_each], "EFG"[:of_each]
    with Hosts("A", *"".join(fleets), shared=tmp_path) as hosts:
        engines = [[hosts.python(name) for name in fleet] for fleet in fleets]
        trainers = [hosts.python("A") for _ in engines]
        for engine in [*engines[0], *engines[1]]:
            engine.call(serve, layers)
        for name in "A" + "".join(fleets) if rate else "":
            hosts.link(name, rate=rate)
        for trainer, fleet, encoding in zip(trainers, fleets, (None, "auto"), strict=True):
            trainer.call(connect, layers, [f"http://{name}:{PORT}" for name in fleet], encoding)
        print(f"\n{rate or 'no limit'}, engines: {of_each}, {layers * LAYER_BYTES / 1e6:.1f} MB")
        for lr in (1e-6, 1e-5, 1e-4, ALL_OTHER):
            rows = [[trainer.call(step_and_push, lr, 10 + n) for trainer in trainers] for n in range(count)]
            dense, encoded = ([median(row[end][at] for row in rows) for at in range(3)] for end in range(2))
            print(
                f"| {lr or 'all other'} | {dense[1]:.3f} s | {encoded[1]:.3f} s | {dense[1] / encoded[1]:.2f} "
                f"| {dense[0] / encoded[0]:.1f} | processor {dense[2]:.3f} s, {encoded[2]:.3f} s",
                flush=True,
            )
            if rate == RATE and of_each == 1 and lr != ALL_OTHER:
                topology = f"{TOPOLOGY},changed={rows[0][1][3]}"
                prediction = next(
                    p for p in predict(layers * LAYER_BYTES, Topology.parse(topology)) if p.transport == "deltas"
                )
                print(f"of {rows[0][1][3]:.4f} values, predicted {prediction.seconds:.3f} s")
                assert abs(encoded[1] / prediction.seconds - 1) < 0.15
            for fleet, trainer in zip(engines, trainers, strict=True):
                held = trainer.call(pushed)
                assert all(engine.call(served) == held for engine in fleet)


@all_hosts
@pytest.mark.gpu(2)
@pytest.mark.parametrize("rate", [RATE, "1gbit", "10gbit"])
def test_seconds_of_a_push_between_gpus_of_two_hosts(tmp_path: Path, rate: str):
    """Print a row of docs/evidence/deltas.md for each learning rate, as between CPUs."""
    print_turns(tmp_path, rate, ("cuda:0", "cuda:1"))


def print_turns(tmp_path: Path, rate: str, devices: tuple[str, str]) -> None:
    layers, count = 28 if rate == RATE else 280, 5
    with Hosts("A", "B", "C", shared=tmp_path) as hosts:
        engines, trainers = [hosts.python(name) for name in "BC"], [hosts.python("A") for _ in "BC"]
        for engine in engines:
            engine.call(serve, layers, devices[1])
        for name in "ABC":
            hosts.link(name, rate=rate)
        for trainer, name, encoding in zip(trainers, "BC", (None, "delta"), strict=True):
            trainer.call(connect, layers, [f"http://{name}:{PORT}"], encoding, devices[0])
        print(f"\n{rate}, GPUs, {layers * LAYER_BYTES / 1e6:.1f} MB")
        for lr in (1e-6, 1e-5):
            rows = [[trainer.call(step_and_push, lr, 10 + n) for trainer in trainers] for n in range(count)]
            whole, changes = ([median(row[end][at] for row in rows) for at in range(2)] for end in range(2))
            share = rows[-1][1][3]
            print(
                f"| {rate} | {share:.2%} | {whole[1]:.3f} s | {changes[1]:.3f} s | {whole[0] / 1e6:.1f} MB "
                f"| {changes[0] / 1e6:.2f} MB |",
                flush=True,
            )
            for engine, trainer in zip(engines, trainers, strict=True):
                assert engine.call(served) == trainer.call(pushed)
