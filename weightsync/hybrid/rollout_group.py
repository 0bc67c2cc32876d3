"""A group of vLLM engines as one object at the controller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
import torch
from tensordict import TensorDict

from weightsync.errors import ConfigError
from weightsync.hybrid.batch import balance, rows, take, union
from weightsync.hybrid.following import KV_CACHE, WEIGHTS, GroupSync
from weightsync.hybrid.pending import Later, Method, Pending
from weightsync.hybrid.pool import ENGINES, ResourcePool
from weightsync.hybrid.worker_group import WorkerGroup

Answer = tuple[list[int], list[float]]
"""The token ids of one answer, and the log-probability of each when it was sampled."""


class RolloutGroup:
    """vLLM engines on the places of a pool, each with `tensor_parallel_size` of them on one node.

        engine = RolloutGroup(pool, model="Qwen/Qwen3-0.6B", tensor_parallel_size=2)
        sync = engine.follow(actor)
        batch = engine.generate(prompts, n=8, max_tokens=512)
        sync.push()

    options: what vLLM's `LLM` takes. weightsync's plug-in is set up, and sleep mode where the GPUs are shared.
    actor: the class of the Ray actor, in place of `weightsync.vllm.rollout.RolloutEngine`.
    timeout_s: how long each call may take.
    names: what errors call each engine, with the address of its node.

    A call raises what one of a `WorkerGroup` does. After the death of an engine `close` the group, make another on the
    same pool, and let it follow. Its engines serve the weights of `model` until the next push.
    """

    def __init__(
        self,
        pool: ResourcePool,
        *,
        model: str,
        tensor_parallel_size: int = 1,
        actor: type | None = None,
        timeout_s: float = 3600.0,
        **options: Any,
    ) -> None:
        first_places = places_of_engines(pool.processes, tensor_parallel_size)
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if options.get(name, 1) != 1:
                raise ConfigError(
                    f"{name}={options[name]}; an engine here has {tensor_parallel_size} workers, all tensor-parallel, "
                    "and more places in the pool are more engines"
                )
        pool.claim(ENGINES)
        self.pool, self._timeout_s = pool, timeout_s
        self._asleep: set[str] = set()
        self._closed = False
        self.actors: list[Any] = []
        self.names = [f"engine {number}" for number in range(len(first_places))]
        options = {
            "model": model,
            "tensor_parallel_size": tensor_parallel_size,
            "weight_transfer_config": {"backend": "weightsync"},
            # Or vLLM takes Ray for its workers, and they look for places that the group does not have.
            "distributed_executor_backend": "mp" if tensor_parallel_size > 1 else None,
            "enable_sleep_mode": pool.gpus > 0 and pool.is_shared,
            **options,
        }
        self.has_sleep_mode = bool(options["enable_sleep_mode"])
        try:
            self._start(first_places, tensor_parallel_size, actor or _engine_class(), options)
        except BaseException:
            self.close()
            raise

    def follow(self, trainer: WorkerGroup, *, transport: Any = None, **options: Any) -> GroupSync:
        """Return the sync whose `push` moves the weights of these workers into all engines.

        transport: as for `WeightSync`. None means "ipc" where all ranks and engines are on one host, else "broadcast".
            `GroupSync.reason` says which and why.
        options: what `WeightSync` takes beside backend, transport and engine.

        Raises `PlacementError` where no transport, or not this one, can move weights between these places.
        """
        return GroupSync(self, trainer, transport, options)

    @property
    def generate(self) -> Method:
        """The answers of the engines to a batch of prompts: its rows, each `n` times in a row, with more columns.

            generate(prompts, **sampling)

        prompts: the column "prompts" has token ids. Where they are padded, "prompt_mask" is true for those that count.
        sampling: what vLLM's `SamplingParams` takes.

        The new columns are "answers", padded with 0, "answer_mask" and "sampled_logprobs". All engines get about as
        many tokens of prompts.
        """
        return Method(self._begin_generate)

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called, and not all was woken again."""
        return bool(self._asleep)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV cache. Level 1 keeps the weights in host memory, level 2 drops them."""
        self._ask("sleep", "sleep", level)
        self._asleep = {WEIGHTS, KV_CACHE}

    def wake_up(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Take back the memory of these, where they sleep. After level 2 the weights are anything until a push."""
        # VLLM would map memory twice that is awake already.
        if due := [tag for tag in tags if tag in self._asleep]:
            self._ask("wake_up", "wake_up", due)
            self._asleep -= set(due)

    def close(self) -> None:
        """End the engines, and give the pool back."""
        if not self._closed:
            for actor in self.actors:
                ray.kill(actor)
            self.pool.release(ENGINES)
        self._closed = True

    def __enter__(self) -> RolloutGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, first_places: list[int], size: int, cls: type, options: dict[str, Any]) -> None:
        devices = self._devices() if self.pool.gpus else []
        for first in first_places:
            own = ",".join(devices[first : first + size])
            self.actors.append(ray.remote(cls).options(**self.pool.options(first)).remote(own, options))
        where = self._ask("start", "__ray_call__", _node)
        self.nodes = [node for node, _ in where]
        self.names = [f"{name} on {address}" for name, (_, address) in zip(self.names, where, strict=True)]

    def _devices(self) -> list[str]:
        """Return what CUDA calls the GPUs of each place of the pool."""
        ask = ray.remote(_visible_devices)
        places = range(self.pool.size)
        refs = {f"place {place}": ask.options(**self.pool.options(place)).remote() for place in places}
        return Pending("start", refs, self._timeout_s).results()

    def _begin_generate(self, prompts: TensorDict, **sampling: Any) -> Later:
        if self._asleep:
            raise ConfigError("the engines are asleep: wake them, or push, before they generate")
        if not rows(prompts):
            raise ConfigError("a batch without rows has no prompts to answer")
        ids = prompts["prompts"]
        mask = prompts["prompt_mask"] if "prompt_mask" in prompts else torch.ones_like(ids, dtype=torch.bool)
        lists = [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]
        parts = balance([len(each) for each in lists], len(self.actors))
        refs = {
            name: actor.generate.remote([lists[row] for row in part], sampling)
            for name, actor, part in zip(self.names, self.actors, parts, strict=True)
            if part
        }
        pending = Pending("generate", refs, self._timeout_s)
        return Later(pending, partial(_batch_of, prompts, [part for part in parts if part]))

    def _ask(self, doing: str, method: str, *args: Any) -> list[Any]:
        refs = {name: getattr(actor, method).remote(*args) for name, actor in zip(self.names, self.actors, strict=True)}
        return Pending(doing, refs, self._timeout_s).results()


def places_of_engines(processes: Sequence[int], tensor_parallel_size: int) -> list[int]:
    """Return the first place of each engine. Raises `ConfigError` where engines do not fill the nodes of a pool."""
    size = tensor_parallel_size
    if size < 1 or any(count % size for count in processes):
        raise ConfigError(
            f"tensor_parallel_size={size} does not fit a pool of {list(processes)} processes: each node's must be a "
            "multiple of it, because an engine's workers are on one node"
        )
    return list(range(0, sum(processes), size))


def _batch_of(prompts: TensorDict, parts: list[list[int]], results: list[list[list[Answer]]]) -> TensorDict:
    answers_of = {
        row: found for part, each in zip(parts, results, strict=True) for row, found in zip(part, each, strict=True)
    }
    repeated = take(prompts, [row for row in range(rows(prompts)) for _ in answers_of[row]])
    answers = [answer for row in range(rows(prompts)) for answer in answers_of[row]]
    longest = max(len(tokens) for tokens, _ in answers)
    ids = torch.zeros(len(answers), longest, dtype=torch.long)
    mask = torch.zeros(len(answers), longest, dtype=torch.bool)
    logprobs = torch.zeros(len(answers), longest)
    for row, (tokens, sampled) in enumerate(answers):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[row, : len(tokens)] = True
        logprobs[row, : len(tokens)] = torch.tensor(sampled)
    found = {"answers": ids, "answer_mask": mask, "sampled_logprobs": logprobs}
    return union(repeated, TensorDict(found, [len(answers)]))


def _engine_class() -> type:
    from weightsync.vllm.rollout import RolloutEngine

    return RolloutEngine


def _node(actor: Any) -> tuple[str, str]:
    """Return the id and the address of an engine's node."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def _visible_devices() -> str:
    import os

    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
