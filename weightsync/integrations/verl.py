"""weightsync in verl: a checkpoint engine that verl finds by its configuration alone.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl
    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=weightsync.integrations.verl_worker.WorkerExtension

verl gives every trainer rank a generator of gathered tensors for each update, and pauses each vLLM meanwhile. Its
`CheckpointEngineManager` asks only the workers of its own replicas to prepare for the update. A trainer finds the
replicas from these workers: each server knows its workers, for any name of its actor. The workers of replicas on the
trainer's GPUs are the trainer's ranks themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import ray
import torch
from torch import nn
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from weightsync.config import BackendName
from weightsync.errors import ConfigError, EngineUnreachableError, first_few
from weightsync.strategies import demands_of
from weightsync.sync import WeightSync

_SERVER = "server_"
"""Part of the name of every server's actor in verl: "vllm_server_0_0", "vllm_server_decode_0_1"."""
_ANSWER_S = 30.0
"""Seconds for a server to answer with its workers."""

Weights: TypeAlias = "Iterator[tuple[str, torch.Tensor]] | nn.Module"
"""The tensors of an update, gathered by verl, or the model itself."""


class _Replica(NamedTuple):
    """The answer of a server of verl's.

    Attributes:
        workers: The actor ids of its workers.
        has_engine: Whether it has an `AsyncLLM`. A replica's servers on further nodes have none.
        adapter_apart: Whether verl expects an adapter beside the base (`lora.merge=false`).
    """

    workers: list[str]
    has_engine: bool
    adapter_apart: bool


@CheckpointEngineRegistry.register("weightsync")
class WeightSyncCheckpointEngine(CheckpointEngine):
    """Either end of verl's updates. Only the trainer's end acts: it calls vLLM's workers.

    Args:
        bucket_size: verl's own, without effect. Each replica still has a buffer of `bucket_size`.
        is_master: verl's own, without effect.
        transport: As for `WeightSync`, from `checkpoint_engine.engine_kwargs.weightsync`.
        **options: As for `WeightSync`, from the same place.

    Raises:
        ConfigError: The transport demands more than pushes: "single_copy", "lora".
    """

    def __init__(self, bucket_size: int, is_master: bool = False, transport: str = "ipc", **options: Any) -> None:
        if demands_of(transport) is not None:
            raise ConfigError(
                f"engine_kwargs.weightsync.transport={transport!r}; verl's trainers push, and its requests name no "
                'adapter: choose "ipc" or "broadcast"'
            )
        self._transport, self._options = transport, options
        self._sync: WeightSync | None = None
        self._own_sync: WeightSync | None = None  # to the replicas on the trainer's own GPUs
        self._workers: Sequence[str] | None = None

    def prepare(self) -> dict[str, Any]:
        """Return this worker's actor id, for `build_topology`."""
        return {"worker": ray.get_runtime_context().get_actor_id()}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any:
        """Tell trainers the workers of all current replicas of verl's manager. They come last in `metadata`."""
        workers = [each["worker"] for each in metadata[actor_wg_world_size:]]
        return {"workers": [workers] * actor_wg_world_size}, {}

    def init_process_group(self, workers: Sequence[str] | None = None) -> None:
        """Take the workers of the next update's replicas."""
        self._workers = workers

    def finalize(self) -> None:
        self._workers = None

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, Any]:
        """Push a model, or the tensors of `weights`, to the manager's replicas. Return metrics for verl's trackers.

        verl gives an iterator, and `weightsync.integrations.verl_trainer` may give the model. Raises `ConfigError` if
        the manager has not named its replicas.
        """
        if self._workers is None:
            raise ConfigError(
                "verl's CheckpointEngineManager has not told this trainer of its replicas: call its `update_weights`"
            )
        if self._sync is None:
            self._sync = self._open(weights, self._transport, "caller", lambda: self._workers or ())
        return (await self._sync.push_async(weights, label=global_steps)).metrics()

    async def send_weights_to_own(self, weights: Weights, global_steps: int | None, sleeps: bool) -> dict[str, Any]:
        """Push to the replicas on the trainer's own GPUs. Collective: every trainer rank calls this.

        The transport is "ipc", the only one within a GPU. `sleeps`: vLLM's memory for weights is awake, and for the KV
        cache is asleep. vLLM generates nothing until both are awake.
        """
        if self._own_sync is None:
            ranks = await asyncio.to_thread(_gather_ranks, self.prepare()["worker"])
            self._own_sync = self._open(weights, "ipc", "caller" if sleeps else "keep", lambda: ranks)
        return (await self._own_sync.push_async(weights, label=global_steps)).metrics()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield nothing: vLLM's workers have the weights already."""
        return
        yield

    def _open(self, weights: Weights, transport: str, pause: str, workers: Callable[[], Sequence[str]]) -> WeightSync:
        """Return the `WeightSync` for such weights, to the replicas of these workers."""
        is_stream = not isinstance(weights, nn.Module)
        backend: BackendName = "stream" if is_stream else "fsdp"
        options = {"pause": pause, **self._options}
        return WeightSync(backend, transport, lambda: find_servers(workers(), is_stream), **options)


def _gather_ranks(worker: str) -> list[str]:
    """Return the actor ids of all trainer ranks. Collective. verl's default group has gloo for CPU tensors."""
    own = torch.frombuffer(bytearray.fromhex(worker), dtype=torch.uint8)
    ranks = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, own)
    return [bytes(each.tolist()).hex() for each in ranks]


def find_servers(workers: Sequence[str], as_stream: bool = False) -> list[Any]:
    """Return the servers with an `AsyncLLM` of the replicas with these workers: prefill and decode, each one.

    Raises `EngineUnreachableError` if some worker's server is not found. Raises `ConfigError` for servers of adapters
    apart from the base if `as_stream`: verl's stream of tensors then has the base alone.
    """
    actors = {}
    for name in filter(lambda name: _SERVER in name, ray.util.list_named_actors()):
        with suppress(ValueError):  # it has died meanwhile
            actors[name] = ray.get_actor(name)
    asked = {actor.__ray_call__.remote(_describe): name for name, actor in actors.items()}
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    found, of = [], dict.fromkeys(workers, "")
    for ref in sorted(answered, key=asked.__getitem__):
        replica = _answer(ref)
        if mine := [worker for worker in replica.workers if worker in of]:
            of |= dict.fromkeys(mine, asked[ref])
            found += [actors[asked[ref]]] if replica.has_engine else []
            if as_stream and replica.adapter_apart:
                raise ConfigError(
                    "verl gathers the base without its adapter, and the replicas would answer without it: set "
                    "actor_rollout_ref.model.lora.merge=true"
                )
    if without := [worker for worker, server in of.items() if not server]:
        raise EngineUnreachableError(
            f"verl has replicas of {len(workers)} workers, but no server was found of {first_few(without)}. "
            f"Answered within {_ANSWER_S:g} s: {first_few([asked[ref] for ref in answered]) or 'no server'}. Did not: "
            f"{first_few([asked[ref] for ref in silent]) or 'none'}"
        )
    return found


def _describe(server: Any) -> _Replica:
    workers = [worker._actor_id.hex() for worker in getattr(server, "workers", ())]
    return _Replica(workers, getattr(server, "node_rank", 0) == 0, getattr(server, "lora_as_adapter", False))


def _answer(ref: Any) -> _Replica:
    """Return an actor's answer. An actor that has died or is no server of verl's has no workers."""
    try:
        found: _Replica = ray.get(ref)
    except ray.exceptions.RayError:
        return _Replica([], False, False)
    return found
