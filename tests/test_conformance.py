"""Our own senders, transports and engine clients pass the conformance suite, and what is broken does not."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TIMEOUT_S, Engines, Remote
from fake_engine import EngineModel, FakeEngine, ModuleHost, checkpoint
from ranks import run_ranks
from torch import nn

from weightsync import CheckpointTransport, TensorPolicy
from weightsync.engines import connect
from weightsync.kernels.digest import WHOLE
from weightsync.layout import Box, Manifest, TensorMeta
from weightsync.senders.base import Piece
from weightsync.senders.fsdp import FsdpSender
from weightsync.testing import check_dead_engine, check_engine, check_sender, check_transport
from weightsync.transports import make_source, make_transport
from weightsync.transports.base import Idle, Offer, WorkerInfo
from weightsync.transports.ipc import IpcSource, IpcTransport

pytest_plugins = ["engine_fixtures"]


def test_the_suite_needs_neither_pytest_nor_vllm():
    code = "import sys, weightsync.testing; sys.exit(bool({'pytest', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------------------------------------------------
# Senders


class Tied(nn.Module):
    """A bit of everything: tied weights, a persistent buffer and another one, a scalar, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.down = nn.Linear(9, 5, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def expected_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}


def test_the_fsdp_sender_with_a_plain_module():
    model = Tied()
    check_sender(FsdpSender, model, expected_of(model))


def check_sharded_senders(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model = Tied().float()
        return model, expected_of(model)

    model, expected = build()
    fully_shard(model.up)
    fully_shard(model)
    check_sender(FsdpSender, model, expected)
    for use_orig_params in (True, False):
        model, expected = build()
        wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        check_sender(FsdpSender, wrapped, expected)

    # What is wrong on one rank is an error on both.
    model, expected = build()
    if rank == 1:
        expected["up.weight"] = expected["up.weight"] + 1
    with pytest.raises(AssertionError, match=r"rank 1: the piece .* of up.weight has other values"):
        check_sender(FsdpSender, model, expected)
    with pytest.raises(AssertionError, match=r"no rank holds up\.weight\[4:9, 0:5\]"):
        check_sender(UpperHalves, *build())
    with pytest.raises(AssertionError, match="rank 1 has another manifest than rank 0"):
        check_sender(functools.partial(OtherOrder, rank), *build())


def test_the_fsdp_sender_with_two_ranks():
    run_ranks(check_sharded_senders, 2)


class UpperHalves(FsdpSender):
    def pieces(self, model: nn.Module) -> list[Piece]:
        return [
            Piece(p.meta, Box(p.box.start, (4, 5)), p.tensor[:4]) if p.meta.name == "up.weight" else p
            for p in super().pieces(model)
        ]


class OtherOrder(FsdpSender):
    def __init__(self, rank: int, policy: TensorPolicy) -> None:
        super().__init__(policy)
        self.rank = rank

    def manifest(self, model: nn.Module) -> Manifest:
        manifest = super().manifest(model)
        return Manifest(manifest.tensors[::-1]) if self.rank else manifest

    def pieces(self, model: nn.Module) -> list[Piece]:
        return super().pieces(model)[::-1] if self.rank else super().pieces(model)


class Copies(FsdpSender):
    def pieces(self, model: nn.Module) -> list[Piece]:
        return [Piece(piece.meta, piece.box, piece.tensor.clone()) for piece in super().pieces(model)]


class Forgetful(FsdpSender):
    def manifest(self, model: nn.Module) -> Manifest:
        return Manifest(super().manifest(model).tensors[1:])


class Undetached(FsdpSender):
    def pieces(self, model: nn.Module) -> list[Piece]:
        params = dict(model.named_parameters())
        return [Piece(p.meta, p.box, params.get(p.meta.name, p.tensor)) for p in super().pieces(model)]


class Headstrong(FsdpSender):
    def __init__(self, policy: TensorPolicy) -> None:
        super().__init__(TensorPolicy())


class Misshapen(FsdpSender):
    def manifest(self, model: nn.Module) -> Manifest:
        return Manifest(tuple(TensorMeta(t.name, t.shape[::-1], t.dtype) for t in super().manifest(model)))


@pytest.mark.parametrize(
    ("sender", "words"),
    [
        (Copies, "not views of the trainer's memory"),
        (Forgetful, r"the manifest lacks \['steps'\]"),
        (Undetached, "is not detached"),
        (Headstrong, "leaves .*'steps'.* in the manifest"),
        (Misshapen, r"embed.weight: shape \(5, 7\), expected \(7, 5\)"),
    ],
)
def test_a_broken_sender_is_found_out(sender: type[FsdpSender], words: str):
    model = Tied()
    with pytest.raises(AssertionError, match=words):
        check_sender(sender, model, expected_of(model))


# ---------------------------------------------------------------------------------------------------------------
# Transports


def here(peer: str, **other: str) -> WorkerInfo:
    return WorkerInfo(**{"peer": peer, "device": "cpu", "gpu_uuid": "", "boot_id": "this host", **other})


GPU = {"device": "cuda", "gpu_uuid": "GPU-1"}
WRONG_PAIRINGS: dict[str, Any] = {
    "ipc": [
        ([here("rank 0")], [here("worker 0", boot_id="another host")]),
        ([here("rank 0"), here("rank 1", boot_id="another host")], [here("worker 0")]),
        ([here("rank 0", **GPU)], [here("worker 0")]),
    ],
    "broadcast": [
        ([here("rank 0")], [here("worker 0", **GPU)]),
        ([here("rank 0", **GPU)], [here("worker 0", **GPU)]),
    ],
}


def ends_of(name: str) -> tuple[Any, Any]:
    return functools.partial(make_transport, name, timeout_s=20.0), functools.partial(make_source, name)


@pytest.mark.parametrize("name", WRONG_PAIRINGS)
def test_transports(name: str):
    check_transport(*ends_of(name), wrong_pairings=WRONG_PAIRINGS[name], timeout_s=20.0)
    assert not list(Path("/dev/shm").glob(f"weightsync-{os.getpid()}-*")), "shared memory was left behind"


def test_a_broadcast_to_more_workers_than_the_ranks_can_serve_one_by_one():
    check_transport(*ends_of("broadcast"), worker_devices=("cpu",) * 3, timeout_s=20.0)


def new_checkpoints(folder: str) -> CheckpointTransport:
    return CheckpointTransport(folder, keep_last=2, max_shard_bytes=1000)


def test_checkpoints_as_a_transport(tmp_path: Path):
    make = functools.partial(new_checkpoints, str(tmp_path))
    check_transport(make, functools.partial(make_source, "checkpoint"), timeout_s=20.0)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".lock", "version-00000014", "version-00000015"], "what is under way was left behind"


@pytest.mark.gpu
def test_checkpoints_as_a_transport_on_a_gpu(tmp_path: Path):
    make = functools.partial(new_checkpoints, str(tmp_path))
    devices = ("cuda:0", "cuda:0")
    check_transport(
        make,
        functools.partial(make_source, "checkpoint"),
        rank_devices=devices,
        worker_devices=devices,
        in_processes=True,
        timeout_s=60.0,
    )


def test_a_transport_between_processes():
    check_transport(*ends_of("ipc"), in_processes=True, timeout_s=60.0)


@pytest.mark.gpu
def test_a_transport_between_processes_on_a_gpu():
    devices = ("cuda:0", "cuda:0")
    check_transport(
        *ends_of("cuda_ipc"), rank_devices=devices, worker_devices=devices, in_processes=True, timeout_s=60.0
    )


class Stale(IpcTransport):
    """Copies each bucket once, and never again."""

    def stage(self, bucket: int, *args: Any) -> list[int]:
        done = self.__dict__.setdefault("done", set())
        if bucket in done:
            self._packers[bucket].fill = lambda: None
        done.add(bucket)
        return super().stage(bucket, *args)


class WrongDigest(IpcTransport):
    def stage(self, *args: Any) -> list[int]:
        return [value ^ 1 for value in super().stage(*args)]


class WrongSample(IpcTransport):
    def stage(self, bucket: int, part: int | None, *args: Any) -> list[int]:
        return super().stage(bucket, None if part is None else WHOLE, *args)


class AlwaysDigests(IpcTransport):
    def stage(self, bucket: int, part: int | None, *args: Any) -> list[int]:
        return super().stage(bucket, WHOLE if part is None else part, *args)


class OneBucketLess(IpcTransport):
    def prepare(self, *args: Any) -> Offer:
        offer = super().prepare(*args)
        return Offer(offer.placements, offer.buckets[1:], offer.fields)


class NoPlainValues(IpcTransport):
    def storages(self, worker: int) -> list[list[Any]]:
        return [[*row[:3], {**row[3], "path": Path(row[3]["path"])}] for row in super().storages(worker)]


class Trusting(IpcTransport):
    def check(self, ranks: Any, workers: Any) -> None:
        return


class Once(IpcTransport):
    """Cannot be used again after it was aborted."""

    def abort(self) -> None:
        self.aborted = self._arena is not None
        super().abort()

    def prepare(self, *args: Any) -> Offer:
        assert not getattr(self, "aborted", False), "I was aborted"
        return super().prepare(*args)


class WrongError(IpcSource):
    """Waits, and says in its own words that it waited too long."""

    def fetch(self, bucket: int, following: int | None, idle: Idle, deadline: Any) -> None:
        if bucket == 1 and deadline.timeout_s < 2:
            raise RuntimeError("too late")


@pytest.mark.parametrize(
    ("transport", "source", "words"),
    [
        (Stale, IpcSource, "reads other values of rows.bool"),
        (WrongDigest, IpcSource, "arrived with another digest"),
        (WrongSample, IpcSource, "arrived with another digest"),
        (AlwaysDigests, IpcSource, "gives 1 digests of bucket . where part is None, expected 0"),
        (OneBucketLess, IpcSource, "buckets of the offer are not every tensor once"),
        (NoPlainValues, IpcSource, "PosixPath"),
        (Trusting, IpcSource, "check accepts the ranks"),
        (Once, IpcSource, "I was aborted"),
        (IpcTransport, WrongError, r"fetch raised RuntimeError\('too late'\), which is no WeightSyncError"),
    ],
)
def test_a_broken_transport_is_found_out(transport: Any, source: Any, words: str):
    with pytest.raises(AssertionError, match=words):
        check_transport(
            functools.partial(transport, "ipc"), source, wrong_pairings=WRONG_PAIRINGS["ipc"], timeout_s=5.0
        )


# ---------------------------------------------------------------------------------------------------------------
# Engine clients


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts a fake engine of the given class, with so many workers."""
    engines: list[FakeEngine] = []

    def make(kind: type[FakeEngine], workers: int = 1) -> FakeEngine:
        hosts = [ModuleHost(EngineModel, checkpoint(1), rank=n, world=workers) for n in range(workers)]
        engines.append(kind(*hosts))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fake_engine(start: Callable[..., Any], workers: int):
    check_engine(start(FakeEngine, workers), timeout_s=10.0)


def check_llm(engines: Engines) -> None:
    (engine,) = connect(engines.llm, TIMEOUT_S)
    check_engine(engine, timeout_s=TIMEOUT_S)


@pytest.mark.engine
def test_a_real_llm(engines: Remote):
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    engines.call(check_llm)
    assert engines.call(Engines.ask) == cold["A"]


def test_a_dead_engine():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        (engine,) = connect(f"http://127.0.0.1:{unused.getsockname()[1]}", 5.0)
        check_dead_engine(engine)


class Impatient(FakeEngine):
    """Does not wait for its workers."""

    def _on_all(self, call: Any) -> None:
        for one in self.conversations:
            threading.Thread(target=call, args=(one,), daemon=True).start()


class Unversioned(FakeEngine):
    def finish(self, version: str | None) -> None:
        super().finish(None)


class Unable(FakeEngine):
    def pause(self, mode: str) -> None:
        if mode == "wait":
            raise NotImplementedError


class Deaf(FakeEngine):
    def init(self, init_info: dict[str, Any]) -> None:
        raise RuntimeError("no such method")


class Single(FakeEngine):
    """Does one thing at a time, and does not let another wait."""

    def __init__(self, *hosts: ModuleHost) -> None:
        super().__init__(*hosts)
        self.begun = threading.Event()

    def pause(self, mode: str) -> None:
        if mode == "keep" and self.begun.wait(0.5):
            raise RuntimeError("busy")

    def start(self) -> None:
        self.begun.set()
        time.sleep(1.0)
        self.begun.clear()
        super().start()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Single, r"called at once with .*, raised RuntimeError\('busy'\)"),
        (Impatient, "init returned before its workers were released"),
        (Unversioned, r"after finish version\(\) is 'conformance 0'"),
        (Unable, r"pause\('wait'\) raised NotImplementedError"),
        (Deaf, "init raised .*no such method"),
    ],
)
def test_a_broken_engine_is_found_out(start: Callable[..., Any], kind: type[FakeEngine], words: str):
    with pytest.raises(AssertionError, match=words):
        check_engine(start(kind), timeout_s=5.0)


def test_a_dead_engine_that_does_not_say_so_is_found_out(start: Callable[..., Any]):
    with pytest.raises(AssertionError, match="must be False"):
        check_dead_engine(start(FakeEngine))
