"""The processes of a group: the user's `Worker`s, and the actor that holds them."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from weightsync.config import BackendName, WeightSyncConfig
from weightsync.engines.ray_actor import RayEngine
from weightsync.errors import ConfigError
from weightsync.hybrid.batch import pack, unpack
from weightsync.hybrid.dispatch import Call, Dispatch, Layout, Place, answer
from weightsync.hybrid.pending import Later
from weightsync.report import PushReport
from weightsync.sources import BackendOption
from weightsync.sources.base import Model
from weightsync.sync import WeightSync


class Worker:
    """One rank of a model, in a process of a `WorkerGroup`. Users derive their own class from it.

        class Policy(Worker):
            def init_model(self, path): self.model = ...
            @register(Dispatch.DP)
            def update(self, batch): ...

    `torch.distributed` and this process's place (`rank` to `device`) are set when `init_model` is called. They are not
    set in `__init__`.

    Attributes:
        backend: The model's backend, as for `WeightSync`.
        model: The model that a push sends. `init_model` sets it.
        rank: This process's rank in the group.
        world_size: The number of processes in the group.
        local_rank: This process's number on its node. It is 0 on GPUs: Ray shows each process its own GPU only.
        device: The process's GPU, or the CPU.
        roles: The other workers of this process, by the names of their classes.
    """

    backend: BackendName | BackendOption = "fsdp"
    model: Model
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    roles: dict[str, Worker]
    _syncs: dict[str, FollowedSync]

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """Build the model, and the groups of its parallelism. Called once on every rank, with the group's arguments."""

    def place(self) -> Place:
        """Return this rank's place for `Dispatch.DP`, after `init_model`. A Megatron worker overrides it.

        tp = parallel_state.get_tensor_model_parallel_rank()
        return Place(parallel_state.get_data_parallel_rank(), parallel_state.is_pipeline_last_stage() and tp == 0,
                     tp, parallel_state.get_pipeline_model_parallel_rank())
        """
        return Place(self.rank, True)

    def save_state(self, folder: Path) -> None:
        """Save what `load_state` needs, for `save_job`. Every rank calls this with the same folder, empty at first."""
        raise NotImplementedError(f"{type(self).__name__} has no save_state: write one, or leave its group out")

    def load_state(self, folder: Path) -> None:
        """Go on from the state of `save_state`. Every rank calls this, after `init_model`."""
        raise NotImplementedError(f"{type(self).__name__} has no load_state: write one, or leave its group out")

    def check_folder(self, folder: Path) -> None:
        """Raise `ConfigError` if this node lacks a folder of the controller."""
        if not folder.is_dir():
            raise ConfigError(f"no {folder} on this node, and the controller has made it: save to shared storage")

    def open_sync(self, name: str, transport: Any, options: dict[str, Any]) -> None:
        """Make the `WeightSync` of this name. Every rank calls this."""
        self._syncs[name] = FollowedSync(self.backend, transport, options, self.rank)

    def name_engines(self, name: str, engines: dict[str, Any]) -> None:
        """Take the engines of the next pushes of a `WeightSync`: Ray actors by their names."""
        self._syncs[name].name_engines(engines)

    def push(self, name: str, version: int | None) -> PushReport | None:
        """Push the model, and return the report on rank 0. Collective."""
        report = self._syncs[name].sync.push(self.model, version)
        return report if self.rank == 0 else None  # all ranks have the same report

    def close_sync(self, name: str) -> None:
        """Close a `WeightSync`, if it is open."""
        if (closed := self._syncs.pop(name, None)) is not None:
            closed.sync.close()


class FollowedSync:
    """A `WeightSync` with engines that the controller names. Errors and reports use these names."""

    def __init__(
        self, backend: BackendName | BackendOption, transport: Any, options: dict[str, Any], rank: int
    ) -> None:
        self._engines: dict[str, RayEngine] = {}
        self._timeout_s = options.get("timeout_s", WeightSyncConfig.timeout_s)
        # Rank 0 alone calls engines.
        named = (lambda: list(self._engines.values())) if rank == 0 else None
        self.sync = WeightSync(backend, transport, named, **options)

    def name_engines(self, engines: dict[str, Any]) -> None:
        known = self._engines
        self._engines = {
            name: known.get(name) or RayEngine(actor, name=name, timeout_s=self._timeout_s)
            for name, actor in engines.items()
        }


Unsplit = tuple[Dispatch, Layout]
"""The dispatch mode and layout of a call that arrives whole: its arguments were not known when it began."""


class Process:
    """The Ray actor of one rank. Its workers share the process, and with it `torch.distributed` and the GPU."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: Any = None
        self._workers: dict[str, Worker] = {}

    def node(self) -> tuple[str, str]:
        """Return the id and the address of this process's node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def listen(self, address: str) -> int:
        """Open the store of `torch.distributed`, on rank 0. Return its port."""
        self._store = dist.TCPStore(address, 0, self._world_size, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, address: str, port: int, local_rank: int, timeout_s: float) -> None:
        """Set up `torch.distributed` among the processes of the group. Collective."""
        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._world_size),
            # Ray shows each process its own GPUs alone.
            "LOCAL_RANK": str(0 if torch.cuda.is_available() else local_rank),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        store = self._store or dist.TCPStore(address, port, self._world_size, timeout=timedelta(seconds=timeout_s))
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def add(self, role: str, cls: type[Worker], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Place:
        """Make a worker and its model. Return its place."""
        worker = cls()
        worker.rank, worker.world_size = self._rank, self._world_size
        worker.local_rank, worker.device = self._local_rank, self._device
        worker.roles, worker._syncs = self._workers, {}
        self._workers[role] = worker
        worker.init_model(*args, **kwargs)
        return worker.place()

    def call(
        self, role: str, method: str, rows: int | None, unsplit: Unsplit | None, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        """Call a method of a worker. `rows` is as in `Call`. Return the result, and a sign of success without a value.

        The result is None if `unsplit` leaves this rank out.
        """
        call = Call(tuple(map(_given, args)), {name: _given(value) for name, value in kwargs.items()}, rows)
        own = call if unsplit is None else unsplit[0].split(unsplit[1], call)[self._rank]
        return None if own is None else pack(answer(getattr(self._workers[role], method), own)), None


def _given(value: Any) -> Any:
    return value.fetch() if isinstance(value, Later) else unpack(value)
