"""What runs in a trainer's process: a rank that pushes, and stops where it is told to."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import stand_in
import tiny_models
import torch
from torch import nn

from weightsync import CheckpointTransport, ModuleBucketer, WeightSync, WeightSyncError, strategies
from weightsync.fleet.fleet import Fleet
from weightsync.net.ranks import Ranks
from weightsync.report import Progress
from weightsync.strategies.lora import LoraAdapters
from weightsync.transports import nccl
from weightsync.transports.changes import HEAD_BYTES
from weightsync.transports.nccl_sender import Sender

RAY, RAY_NAMESPACE, RAY_ACTOR = "Ray", "failure-matrix", "the engine"
MAX_BYTES = 48
"""Of a chunk, so that there is a middle."""

Outcome = tuple[str, str, float]
"""The class and the text of what a push raised, "" and "" where it returned, and after how many seconds."""


class Rank:
    """Lives in a trainer's process, rank `rank` of `size`."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        torch.set_num_threads(1)
        self.rank, self.size = rank, size
        self.connections: list[Connection] = []
        self.sync: WeightSync | None = None
        self.model: Any = None
        self.is_attached = self.copies = True
        self.transport = ""
        self.sent_bytes: list[int] = []  # of each push since `connect`
        if size > 1:
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)

    def connect(self, client: str, transport: str, engine: Any, timeout_s: float, folder: Path) -> None:
        """Make a new model and a new `WeightSync`."""
        self.release()
        self.transport, self.copies = transport, transport != "single_copy"
        if transport == "changes":
            nccl.finds_words = lambda device: True  # as between GPUs
        strategies.lora._MEMORY = memory_of(folder)
        self.model = model_of(client, transport, self.size)
        self.is_attached = transport != "single_copy"
        self.sync = WeightSync(
            "fsdp",
            {"checkpoint": CheckpointTransport(folder, keep_last=2), "changes": "broadcast"}.get(transport, transport),
            self.reach(client, engine, timeout_s) if self.rank == 0 else None,
            timeout_s=timeout_s,
            bucketer=bucketer_of(client) if transport in ("ipc", "broadcast", "changes", "checkpoint") else None,
            encoding="delta" if transport == "changes" else None,
        )
        self.sent_bytes = []

    def reach(self, client: str, engine: Any, timeout_s: float) -> Any:
        """Return the engine at an address, as `WeightSync` takes it."""
        if client == RAY:
            import ray

            ray.init(engine, namespace=RAY_NAMESPACE, ignore_reinit_error=True, log_to_driver=False)
            return ray.get_actor(RAY_ACTOR)
        return stand_in.StandInEngine(*engine, timeout_s) if client.startswith("stand-in") else engine

    def push(self, weights: str) -> Outcome:
        started = time.monotonic()
        try:
            self._push(weights)
        except WeightSyncError as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return "", "", time.monotonic() - started

    def _push(self, weights: str) -> None:
        assert self.sync is not None
        if not self.is_attached:
            self.sync.attach(self.model)
            self.is_attached = True
        if self.copies:
            (stand_in.fill if self.transport == "changes" else tiny_models.fill)(self.model, weights)
            self.sent_bytes.append(self.sync.push(self.model).sent_bytes)
            return
        with self.sync.writing():
            in_the_middle()
            tiny_models.fill(self.model, weights)

    def sent_everything(self) -> bool:
        """Return whether the last push sent as much as the first. A single copy sends nothing."""
        return not self.sent_bytes or self.sent_bytes[-1] >= self.sent_bytes[0]

    def arm(self, phase: str, there: Path, link: str, damages: bool = False) -> None:
        """Stop in this phase of the next push, once: close the connection that `link` names, make the file `there`,
        and go on when somebody has removed it. `damages`: spoil what is sent next."""

        def stop() -> None:
            if link:
                self.connection(link)._sock.shutdown(socket.SHUT_RDWR)
            if damages:
                spoil_next(HEAD_BYTES if phase == "last" else HEAD_BYTES + 1)
            there.touch()
            while there.exists():
                time.sleep(0.005)

        owner, name, before = (ADAPTER_POINTS if self.transport == "lora" else POINTS)[phase]
        if owner is Progress and not self.copies:
            owner, name, before = sys.modules[__name__], "in_the_middle", always
        original = getattr(owner, name)

        def stopping(*args: Any, **kwargs: Any) -> Any:
            if before and not before(args):
                return original(*args, **kwargs)
            setattr(owner, name, original)
            if before:
                stop()
                return original(*args, **kwargs)
            value = original(*args, **kwargs)
            stop()
            return value

        def stopping_halfway(bar: Progress) -> Iterator[int]:
            setattr(owner, name, original)
            for number in original(bar):
                if number == len(bar.iterable) // 2:
                    stop()
                yield number

        setattr(owner, name, stopping_halfway if owner is Progress else stopping)

    def connection(self, link: str) -> Any:
        assert self.sync is not None
        if link == "rank 0 - rank 1":
            return self.sync._ranks.connections[0]
        fleet: Any = self.sync._strategy._fleet  # type: ignore[attr-defined]
        return fleet.workers[0].connection

    def threads(self, settles_s: float = 6.0) -> list[str]:
        """Return the threads of weightsync that are busy, and still are after a while."""
        deadline = time.monotonic() + settles_s
        while busy := [t.name for t in threading.enumerate() if t.name.startswith("weightsync ")]:
            busy = [name for name in busy if name != "weightsync idle"]
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return busy

    def release(self) -> None:
        if self.sync is not None:
            self.sync.close()
        self.sync = self.model = None
        gc.collect()  # an attached model keeps the engine's memory

    close = release


def in_the_middle() -> None:
    """Is where rank 0 stops in the phase "run" of a trainer that writes into the engine's memory."""


def spoil_next(least_bytes: int) -> None:
    """Change a bit of the next data that this rank sends, of so many bytes or more."""
    name = "_start"
    start = getattr(Sender, name)

    def spoil(sender: Sender, number: int, sends: Any, *args: Any) -> Any:
        if data := [each for each, _ in sends if each.numel() >= least_bytes]:
            setattr(Sender, name, start)
            data[0].view(torch.uint8)[-1] ^= 1
        return start(sender, number, sends, *args)

    setattr(Sender, name, spoil)


def always(args: tuple[Any, ...]) -> bool:
    return True


POINTS: dict[str, tuple[Any, str, Callable[[tuple[Any, ...]], bool] | None]] = {
    "connect": (Fleet, "connect", None),
    "plan": (Fleet, "plan", None),
    "open": (Fleet, "wait_open", None),
    "go": (Fleet, "go", None),
    "run": (Progress, "__iter__", None),
    "last": (Ranks, "gather", lambda args: args[1] is True),
    "done": (Fleet, "wait_done", always),
    "commit": (Fleet, "commit", always),
    "close": (Fleet, "_all", lambda args: args[1] == "resume"),
}
"""The method of rank 0 that stands for each phase: it stops when this has returned, or before a call that fits."""
ADAPTER_POINTS: dict[str, tuple[Any, str, Callable[[tuple[Any, ...]], bool] | None]] = {
    "plan": (LoraAdapters, "_open", None),
    "save": (strategies.lora, "write", always),
    "load": (LoraAdapters, "_deliver", always),
    "loaded": (LoraAdapters, "_retire", always),
}


def bucketer_of(client: str) -> ModuleBucketer:
    return ModuleBucketer(MAX_BYTES) if client.startswith("stand-in") else ModuleBucketer()


def memory_of(folder: Path) -> Path:
    """Return what stands for `/dev/shm` where adapters are: other trainers of this machine have theirs there, too."""
    memory = folder.parent / "memory"
    memory.mkdir(exist_ok=True)
    return memory


def model_of(client: str, transport: str, size: int) -> nn.Module:
    if transport == "lora":
        model: Any = stand_in.adapted_model()
        if size > 1:
            from torch.distributed.fsdp import fully_shard

            for layer in model.base_model.model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        return model
    if not client.startswith("stand-in"):
        model = tiny_models.build("qwen3", "A")
        return tiny_models.shard(model) if size > 1 else model
    model = stand_in.TrainerModel()
    if transport == "single_copy":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        with torch.device("meta"):
            model = stand_in.TrainerModel()
        names = [f"layers.{layer}.{part}" for layer in range(stand_in.LAYERS) for part in "qkv"]
        return parallelize_module(model, init_device_mesh("cpu", (size,)), {name: ColwiseParallel() for name in names})
    if size > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model
