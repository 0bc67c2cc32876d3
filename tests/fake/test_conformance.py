"""Our own weight sources, transports and engine clients pass the conformance suite, and what is broken does not."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, open_shared_files
from ranks import run_ranks
from tcp_transport import TcpReceiver, TcpTransport
from torch import nn

from weightsync import TensorSelection
from weightsync.fleet import connect
from weightsync.kernels.copies import BatchedCopy
from weightsync.kernels.digest import WHOLE
from weightsync.net.wire import MachineInfo
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.planning.transfer_plan import Chain
from weightsync.sources.base import Reading, TensorShard
from weightsync.sources.fsdp import FsdpSource
from weightsync.tools.testing import check_dead_engine, check_engine, check_source, check_transport
from weightsync.transports import open_receiver, open_transport
from weightsync.transports.base import ChunkLayout, Endpoint, Seal, Transport
from weightsync.transports.files import FilesTransport
from weightsync.transports.ipc import IpcReceiver, IpcTransport


def test_the_suite_needs_neither_pytest_nor_vllm():
    code = "import sys, weightsync.tools.testing; sys.exit(bool({'pytest', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------------------------------------------------
# Weight sources


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


def test_check_source_of_a_plain_module_finds_every_promise_kept():
    model = Tied()
    check_source(FsdpSource, model, expected_of(model))


def check_sharded_sources(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model = Tied().float()
        return model, expected_of(model)

    model, expected = build()
    fully_shard(model.up)
    fully_shard(model)
    check_source(FsdpSource, model, expected)
    for use_orig_params in (True, False):
        model, expected = build()
        wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        check_source(FsdpSource, wrapped, expected)

    # What is wrong on one rank is an error on both.
    model, expected = build()
    if rank == 1:
        expected["up.weight"] = expected["up.weight"] + 1
    with pytest.raises(AssertionError, match=r"rank 1: the shard .* of up.weight has other values"):
        check_source(FsdpSource, model, expected)
    with pytest.raises(AssertionError, match=r"no rank holds up\.weight\[4:9, 0:5\]"):
        check_source(UpperHalves, *build())
    with pytest.raises(AssertionError, match="rank 1 has another manifest than rank 0"):
        check_source(functools.partial(OtherOrder, rank), *build())


def test_check_source_of_two_ranks_finds_every_promise_kept():
    run_ranks(check_sharded_sources, 2)


class UpperHalves(FsdpSource):
    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(super().read(model))
        return Reading(
            manifest,
            [
                TensorShard(p.meta, Box(p.box.start, (4, 5)), p.tensor[:4]) if p.meta.name == "up.weight" else p
                for p in shards
            ],
        )


class OtherOrder(FsdpSource):
    def __init__(self, rank: int, selection: TensorSelection) -> None:
        super().__init__(selection)
        self.rank = rank

    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(reading := super().read(model))
        return Reading(Manifest(manifest.tensors[::-1]), shards[::-1]) if self.rank else reading


class Copies(FsdpSource):
    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(super().read(model))
        return Reading(manifest, [TensorShard(piece.meta, piece.box, piece.tensor.clone()) for piece in shards])


class Forgetful(FsdpSource):
    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(super().read(model))
        return Reading(Manifest(manifest.tensors[1:]), shards)


class Undetached(FsdpSource):
    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(super().read(model))
        params = dict(model.named_parameters())
        return Reading(manifest, [TensorShard(p.meta, p.box, params.get(p.meta.name, p.tensor)) for p in shards])


class Headstrong(FsdpSource):
    def __init__(self, selection: TensorSelection) -> None:
        super().__init__(TensorSelection())


class Misshapen(FsdpSource):
    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(super().read(model))
        return Reading(Manifest(tuple(TensorMeta(t.name, t.shape[::-1], t.dtype) for t in manifest)), shards)


class CachedCopies(FsdpSource):
    """Copies once. Its addresses stay, and so do the values."""

    def __init__(self, selection: TensorSelection) -> None:
        super().__init__(selection)
        self.first: Reading | None = None

    def read(self, model: nn.Module) -> Reading:
        if self.first is None:
            manifest, shards = parts_of(super().read(model))
            self.first = Reading(manifest, [TensorShard(p.meta, p.box, p.tensor.clone()) for p in shards])
        return self.first


class ComputesOnce(FsdpSource):
    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(super().read(model))
        kept = self.__dict__.setdefault("kept", {p.meta.name: p.tensor.clone() for p in shards})
        made = [functools.partial(kept.get, p.meta.name) for p in shards]
        return Reading(
            manifest, [TensorShard(p.meta, p.box, p.tensor, compute=call) for p, call in zip(shards, made, strict=True)]
        )


class AllFrozen(FsdpSource):
    def read(self, model: nn.Module) -> Reading:
        manifest, shards = parts_of(super().read(model))
        return Reading(manifest, [TensorShard(p.meta, p.box, p.tensor, trains=False) for p in shards])


class WithBuffers(FsdpSource):
    def __init__(self, selection: TensorSelection) -> None:
        super().__init__(replace(selection, buffers=True))


def parts_of(reading: Reading) -> tuple[Manifest, list[TensorShard]]:
    return reading.manifest, reading.shards


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Copies, "not views of the trainer's memory"),
        (Forgetful, r"the manifest lacks \['steps'\]"),
        (Undetached, "is not detached"),
        (Headstrong, "leaves .*'steps'.* in the manifest"),
        (CachedCopies, "older values of down.weight than the model"),
        (ComputesOnce, "older values of down.weight than the model"),
        (AllFrozen, "no shard trains"),
        (WithBuffers, r"buffers=False leaves \['steps'\]"),
        (Misshapen, r"embed.weight: shape \(5, 7\), expected \(7, 5\)"),
    ],
)
def test_check_source_of_a_broken_source_raises_which_promise_it_breaks(source: type[FsdpSource], words: str):
    model = Tied()
    with pytest.raises(AssertionError, match=words):
        check_source(source, model, expected_of(model))


# ---------------------------------------------------------------------------------------------------------------
# Transports


def here(peer: str, **other: str) -> MachineInfo:
    return MachineInfo(**{"peer": peer, "device": "cpu", "gpu_uuid": "", "boot_id": "this host", **other})


GPU, OTHER_GPU = ({"device": "cuda", "gpu_uuid": uuid} for uuid in ("GPU-1", "GPU-2"))
WRONG_PAIRINGS: dict[str, Any] = {
    "ipc": [
        ([here("rank 0")], [here("worker 0", boot_id="another host")]),
        ([here("rank 0"), here("rank 1", boot_id="another host")], [here("worker 0")]),
        ([here("rank 0", **GPU)], [here("worker 0")]),
    ],
    "broadcast": [
        ([here("rank 0")], [here("worker 0", **GPU)]),
        ([here("rank 0", **GPU)], [here("worker 0", **GPU)]),
        ([here("rank 0", **OTHER_GPU), here("rank 1", **GPU)], [here("worker 0", **GPU)]),
    ],
}


def ends_of(name: str) -> tuple[Any, Any]:
    return functools.partial(open_transport, name), functools.partial(open_receiver, name)


@pytest.mark.parametrize("name", WRONG_PAIRINGS)
def test_check_transport_of_each_name_finds_every_promise_kept(name: str):
    check_transport(*ends_of(name), wrong_pairings=WRONG_PAIRINGS[name], timeout_s=20.0)
    assert not open_shared_files(), "shared memory was left behind"


def test_check_transport_of_three_workers_finds_a_broadcast_to_all_right():
    check_transport(*ends_of("broadcast"), worker_devices=("cpu",) * 3, timeout_s=20.0)


def broadcast_of_differences() -> Transport:
    transport = open_transport("broadcast")
    transport.encoding = "delta"
    return transport


def test_check_transport_of_differences_along_a_chain_finds_every_promise_kept():
    receiver = ends_of("broadcast")[1]
    check_transport(broadcast_of_differences, receiver, worker_devices=("cpu",) * 3, timeout_s=20.0)


def test_check_transport_of_nixl_over_tcp_along_a_chain_finds_every_promise_kept(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")  # NIXL refuses "tcp" alone where a GPU is
    check_transport(*ends_of("nixl"), worker_devices=("cpu",) * 3)


@pytest.mark.forks
def test_check_transport_of_nixl_over_shared_memory_finds_every_promise_kept():
    pytest.importorskip("nixl")
    check_transport(*ends_of("nixl"), in_processes=True, timeout_s=60.0)


@pytest.mark.gpu
@pytest.mark.forks
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_check_transport_of_nixl_finds_every_promise_kept_on_a_gpu(devices: tuple[str, str]):
    pytest.importorskip("nixl")
    ranks, workers = ((device,) * 2 for device in devices)
    check_transport(*ends_of("nixl"), rank_devices=ranks, worker_devices=workers, in_processes=True, timeout_s=60.0)


def test_check_transport_of_sixty_lines_over_tcp_finds_every_promise_kept():
    check_transport(TcpTransport, TcpReceiver, timeout_s=20.0)


def new_files(folder: str) -> FilesTransport:
    return FilesTransport(Path(folder), 2, 1_000_000, (None, None, None), takes_configs=False)


def test_check_transport_of_files_finds_every_promise_kept_and_nothing_left(tmp_path: Path):
    make = functools.partial(new_files, str(tmp_path))
    check_transport(make, functools.partial(open_receiver, "checkpoint"), timeout_s=20.0)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".lock", "version-00000019", "version-00000020"], "what is under way was left behind"


@pytest.mark.gpu
def test_check_transport_of_files_finds_every_promise_kept_on_a_gpu(tmp_path: Path):
    make = functools.partial(new_files, str(tmp_path))
    devices = ("cuda:0", "cuda:0")
    check_transport(
        make,
        functools.partial(open_receiver, "checkpoint"),
        rank_devices=devices,
        worker_devices=devices,
        in_processes=True,
        timeout_s=60.0,
    )


@pytest.mark.forks
def test_check_transport_between_processes_finds_every_promise_kept():
    check_transport(*ends_of("ipc"), in_processes=True, timeout_s=60.0)


@pytest.mark.gpu
@pytest.mark.forks
def test_check_transport_between_processes_finds_every_promise_kept_on_a_gpu():
    devices = ("cuda:0", "cuda:0")
    check_transport(
        *ends_of("cuda_ipc"), rank_devices=devices, worker_devices=devices, in_processes=True, timeout_s=60.0
    )


class Stale(IpcTransport):
    """Copies nothing after the first push."""

    def send(self, chunks: Any, seal: Any, update: Any) -> None:
        super().send(chunks, seal, update)
        packer = self._sender.packer
        packer._copies = BatchedCopy(*([] for _ in packer._steps))


class WrongDigest(IpcTransport):
    def send(self, chunks: Any, seal: Any, update: Any) -> None:
        super().send(chunks, None, update)


class WrongSample(IpcTransport):
    def send(self, chunks: Any, seal: Any, update: Any) -> None:
        super().send(chunks, seal and Seal(WHOLE, seal.version), update)


class OneRegionLess(IpcTransport):
    def prepare(self, *args: Any) -> list[Endpoint]:
        return [
            replace(each, arrivals=(*each.arrivals[:-1], ChunkLayout(()))) if each.arrivals else each
            for each in super().prepare(*args)
        ]


class NoPlainValues(IpcTransport):
    def prepare(self, *args: Any) -> list[Endpoint]:
        return [replace(each, fields={**each.fields, "device": torch.device("cpu")}) for each in super().prepare(*args)]


class Unproven(IpcTransport):
    """Says nothing of what it has looked at."""

    def prepare_push(self, sample: int | None) -> int:
        return 0


class GathersAlone(IpcTransport):
    """Asks the other ranks for less than they ask for."""

    def prepare(self, plan: Any, tensors: Any, update: Any) -> list[Endpoint]:
        skip = tensors if update.ranks.rank else replace(tensors, gather=lambda names: None)
        return super().prepare(plan, skip, update)


class Trusting(IpcTransport):
    def route(self, *args: Any) -> tuple[Chain, ...]:
        return ()


class Unbegun(IpcTransport):
    """Begins with an older chunk."""

    def begin_send(self, seal: Any) -> None:
        raise AssertionError("a push was begun")


class Undropped(IpcTransport):
    """Says that it sends nothing more to a worker, and waits for it."""

    def drop_workers(self, workers: Any) -> bool:
        return True


class Once(IpcTransport):
    """Cannot be used again after it was aborted."""

    def abort(self) -> None:
        self.aborted = self._sender is not None
        super().abort()

    def prepare(self, *args: Any) -> list[Endpoint]:
        assert not getattr(self, "aborted", False), "I was aborted"
        return super().prepare(*args)


class WrongError(IpcReceiver):
    """Waits, and says in its own words that it waited too long."""

    def chunks(self, numbers: Any, wait: Any, deadline: Any) -> Iterator[int]:
        if deadline().timeout_s < 2:
            raise RuntimeError("too late")
        return super().chunks(numbers, wait, deadline)


class Backwards(IpcReceiver):
    def chunks(self, numbers: Any, wait: Any, deadline: Any) -> Iterator[int]:
        return reversed(list(super().chunks(numbers, wait, deadline)))


@pytest.mark.parametrize(
    ("transport", "receiver", "words"),
    [
        (Stale, IpcReceiver, "arrived with another digest|brings other values"),
        (WrongDigest, IpcReceiver, "arrived with another digest"),
        (WrongSample, IpcReceiver, "arrived with another digest"),
        (OneRegionLess, IpcReceiver, "no chunk brings"),
        (NoPlainValues, IpcReceiver, "cannot be written as msgpack"),
        (Unproven, IpcReceiver, "another digest than the trainer's"),
        (GathersAlone, IpcReceiver, "ranks gather different names|without being gathered|no answer"),
        (Trusting, IpcReceiver, "route accepts the ranks"),
        (Unbegun, IpcReceiver, "a push was begun"),
        (Undropped, IpcReceiver, "did not (send|take) a chunk"),
        (Once, IpcReceiver, "I was aborted"),
        (IpcTransport, WrongError, r"chunks raised RuntimeError\('too late'\) after .*, expected a WeightSyncError"),
        (IpcTransport, Backwards, "brings other values|arrived with another digest|chunks .* came, expected"),
    ],
)
def test_check_transport_of_a_broken_transport_raises_which_promise_it_breaks(
    transport: Any, receiver: Any, words: str
):
    with pytest.raises(AssertionError, match=words):
        check_transport(
            functools.partial(transport, "ipc"), receiver, wrong_pairings=WRONG_PAIRINGS["ipc"], timeout_s=3.0
        )


# ---------------------------------------------------------------------------------------------------------------
# Engine clients


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts a fake engine of the given class, with so many workers."""
    engines: list[FakeEngine] = []

    def make(kind: type[FakeEngine], workers: int = 1) -> FakeEngine:
        hosts = [ModuleHost(TinyEngineModel, checkpoint(1), rank=n, world=workers) for n in range(workers)]
        engines.append(kind(*hosts))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fake_engine(start: Callable[..., Any], workers: int):
    check_engine(start(FakeEngine, workers), timeout_s=10.0)


def test_a_dead_engine():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        (engine,) = connect(f"http://127.0.0.1:{unused.getsockname()[1]}", 5.0)
        check_dead_engine(engine)


class NeverPaused(FakeEngine):
    """Does nothing to pause, and says so."""

    def is_paused(self) -> bool:
        return False


class Impatient(FakeEngine):
    """Does not wait for its workers."""

    def _on_all(self, call: Any) -> None:
        for one in self.sessions:
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
        (NeverPaused, r"after pause\('keep'\) is_paused\(\) is False"),
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
