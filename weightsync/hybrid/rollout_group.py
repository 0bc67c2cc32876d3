"""A group of vLLM engines as one object at the controller."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import ray
from tensordict import TensorDict

from weightsync.errors import ConfigError, PeerError, WeightSyncError
from weightsync.hybrid.batch import balance, pack, rows
from weightsync.hybrid.following import KV_CACHE, WEIGHTS, GroupSync
from weightsync.hybrid.generation import Generation, Share, batch_of, prompts_of
from weightsync.hybrid.pending import CallFuture, Method, Pending, has_died
from weightsync.hybrid.pool import ENGINES, ResourcePool
from weightsync.hybrid.worker_group import WorkerGroup

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """The state of an engine in its group. Engines that serve get prompts."""

    STARTING = auto()
    """The engine was added, and its actor has not started so far. It gets no calls."""
    SERVING = auto()
    NEW = auto()
    """The engine was added, and no push has reached it. Its weights differ from the serving engines'."""
    LOST = auto()
    """A push left the engine out, because it did not answer. It gets no calls until a push reaches it."""


@dataclass(eq=False)
class GroupEngine:
    """One engine of a group.

    pool, place: the place of its first worker.
    start: the wait for the start of the actor.
    asleep: the sleeping parts of its memory. After a failed call they may be awake.
    discarded: whether sleep of level 2 has dropped its weights, and no push has followed.
    """

    name: str
    node: str
    actor: Any
    pool: ResourcePool
    place: int
    start: Pending
    state: EngineState = EngineState.STARTING
    asleep: set[str] = field(default_factory=set)
    discarded: bool = False


class RolloutGroup:
    """vLLM engines on the places of a pool. Each engine has `tensor_parallel_size` places of one node.

        engine = RolloutGroup(pool, model="Qwen/Qwen3-0.6B", tensor_parallel_size=2)
        sync = engine.follow(actor)
        batch = engine.generate(prompts, n=8, max_tokens=512)
        sync.push()

    Engines serve the weights of `model` until the next push. After the death of an engine `remove` it, and `add`
    another. With `follow(actor, on_engine_failure="drop")` the group continues without it.

    Calls raise the same errors as calls of a `WorkerGroup`.

    Attributes:
        version: The version of the last push, 0 before the first one.
        pushes: The number of successful pushes.

    Args:
        pool: The places of the engines' workers.
        model: The model, as for vLLM's `LLM`.
        tensor_parallel_size: The workers of each engine.
        actor: The class of the Ray actor. None means `weightsync.vllm.rollout.RolloutEngine`.
        timeout_s: The timeout of each call.
        **options: The options of vLLM's `LLM`. The group sets up weightsync's plug-in, and sleep mode on shared GPUs.
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
        places_of_engines(pool.processes, tensor_parallel_size)
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if options.get(name, 1) != 1:
                raise ConfigError(
                    f"{name}={options[name]}; an engine has {tensor_parallel_size} workers, all tensor-parallel: for "
                    "more engines, give a larger pool"
                )
        pool.claim(ENGINES)
        self.pool, self._pools, self._timeout_s = pool, [pool], timeout_s
        self._size, self._class = tensor_parallel_size, actor
        self._engines: list[GroupEngine] = []
        self._count = 0
        self._sync: GroupSync | None = None
        self.version = self.pushes = 0
        self._options = {
            "model": model,
            "tensor_parallel_size": tensor_parallel_size,
            "weight_transfer_config": {"backend": "weightsync"},
            # By default vLLM starts workers on Ray, and they look for places that the group does not have.
            "distributed_executor_backend": "mp" if tensor_parallel_size > 1 else None,
            "enable_sleep_mode": pool.gpus > 0 and pool.is_shared,
            **options,
        }
        try:
            self._join(self._start(pool))
        except BaseException:
            self.close()
            raise

    @property
    def actors(self) -> list[Any]:
        """The Ray actors of the engines, without lost ones and ones that start."""
        return [one.actor for one in self._present()]

    @property
    def names(self) -> list[str]:
        """The names of `actors` in errors and reports, each with the address of its node."""
        return [one.name for one in self._present()]

    @property
    def nodes(self) -> list[str]:
        """The Ray nodes of the engines, without those of lost ones."""
        return [one.node for one in self._engines if one.state is not EngineState.LOST]

    def follow(self, trainer: WorkerGroup, *, transport: Any = None, **options: Any) -> GroupSync:
        """Return a sync. Its `push` moves the weights of these workers into all engines.

        An earlier sync of this group cannot push any more. The workers may push to other groups as well.

        Args:
            trainer: The workers.
            transport: As for `WeightSync`, except adapters and "single_copy". None means "ipc" if all ranks and engines
                are on one host, else "broadcast". `GroupSync.reason` gives the reason.
            **options: The options of `WeightSync`, except backend, transport and engine. With on_engine_failure="drop"
                the group goes on without engines that die.

        Raises:
            PlacementError: No transport, or not this one, can move weights between these places.
            ConfigError: A group cannot use the transport.
        """
        self._sync = GroupSync(self, trainer, transport, options)
        return self._sync

    def add(self, pool: ResourcePool | None = None, *, wait: bool = True) -> list[str]:
        """Start engines at all free places of a pool, or of the group's own pools.

        If the group was pushed to before, new engines get no prompts until a push has reached them.

        Args:
            pool: A further pool. None means the pools that the group has.
            wait: Whether to wait until the engines have started. False: they join at the first push after their start.

        Returns:
            The names of the new engines.

        Raises:
            PlacementError: A node has died and no other has room, or the group's transport does not reach the new
                engines. No new engine is left running.
            ConfigError: No place is free.
        """
        if pool is not None and pool not in self._pools:
            places_of_engines(pool.processes, self._size)
            pool.claim(ENGINES)
            self._pools.append(pool)
        started: list[GroupEngine] = []
        try:
            for one in list(self._pools) if pool is None else [pool]:
                one.wait_until_reserved()  # after a node's death its engines' places move
                started += self._start(one)
            if not started:
                raise ConfigError("no place is free for another engine: give a pool, or remove an engine first")
            if self._sync is not None:
                self._sync.check_placement()
            if wait:
                self._join(started)
        except BaseException:
            for engine in started:
                self._end(engine)
            if pool is not None:
                self._give_back(pool)
            raise
        return [one.name for one in started]

    def remove(self, name: str) -> None:
        """End the engine of this name, and free its place. Other engines answer its prompts.

        `add` can use the place again. If the group has no other engine on the pool, another group can claim the pool.
        Raises `ConfigError` for an unknown name, and for the only engine.
        """
        engine = next((one for one in self._engines if one.name == name), None)
        if engine is None:
            raise ConfigError(
                f"{name!r} is no engine of the group; expected one of {[one.name for one in self._engines]}"
            )
        if all(one is engine or one.state is EngineState.STARTING for one in self._engines):
            raise ConfigError(f"{name} is the only engine of the group: close the group, or add another first")
        self._end(engine)
        self._give_back(engine.pool)

    @property
    def generate(self) -> Method:
        """The engines' answers to a batch of prompts: `generate(prompts, **sampling)`.

        Each row of `prompts` comes `n` times in a row, with the new columns "answers", padded with 0, "answer_mask",
        "sampled_logprobs" and "version". The version is that of the begin of the call. If a push interrupts an
        `AsyncLLM`, the next tokens are of a later version. With `pause="abort"` all tokens are. All engines get about
        as many tokens of prompts.

        prompts: the column "prompts" has token ids, padded or nested. For padded ones "prompt_mask" is true for real
            tokens.
        sampling: the arguments of vLLM's `SamplingParams`.
        """
        return Method(self._begin_generate)

    @property
    def has_sleep_mode(self) -> bool:
        """Whether the engines can sleep."""
        return bool(self._options["enable_sleep_mode"])

    @property
    def is_asleep(self) -> bool:
        """Whether any memory of an engine sleeps."""
        return any(one.asleep for one in self._present())

    def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV cache. Level 1 keeps the weights in host memory, level 2 drops them.

        Waits for every engine. After an error all engines count as asleep until `wake_up` or a push, because the failed
        engine may sleep too.

        Raises:
            ConfigError: The engines have no sleep mode, or the level is another one.
            WeightSyncError: The first failure of an engine. It names the engine.
        """
        if level not in (1, 2):
            raise ConfigError(f"level={level}; expected 1 to keep the weights in host memory, or 2 to drop them")
        if not self.has_sleep_mode:
            raise ConfigError(
                "the engines have no sleep mode, and sleep would free no memory: make the RolloutGroup with "
                "enable_sleep_mode=True"
            )
        calls = {one: one.actor.sleep.remote(level) for one in self._present()}
        for one in calls:
            one.asleep = {WEIGHTS, KV_CACHE}
            one.discarded |= level > 1
        self._call("sleep", calls)

    def wake_up(self, tags: Sequence[str] = (WEIGHTS, KV_CACHE)) -> None:
        """Take back the memory of these parts if they sleep. After level 2 the weights are undefined until a push.

        Waits for every engine. A part counts as asleep on an engine that has failed to wake it.

        Raises:
            ConfigError: A tag is neither "weights" nor "kv_cache".
            WeightSyncError: The first failure of an engine. It names the engine.
        """
        if not {*tags} <= {WEIGHTS, KV_CACHE}:
            raise ConfigError(f"tags={tags!r}; expected a list of {WEIGHTS!r}, {KV_CACHE!r} or both")
        for tag in (WEIGHTS, KV_CACHE):  # one by one: vLLM wakes nothing if one of the tags is awake already
            due = [one for one in self._present() if tag in one.asleep] if tag in tags else []
            self._call("wake_up", {one: one.actor.wake_up.remote([tag]) for one in due}, woken=[tag])

    @property
    def takes_turns(self) -> bool:
        """Whether workers use the GPUs of engines."""
        return any(pool.gpus and pool.is_shared for pool in self._pools)

    def shares_gpus(self, pool: ResourcePool) -> bool:
        """Return whether engines are on the GPUs of a pool."""
        return pool.gpus > 0 and any(pool.overlaps(one) for one in self._pools)

    def is_followed_by(self, sync: GroupSync) -> bool:
        """Return whether this sync is the last one that `follow` made."""
        return self._sync is sync

    def to_push(self) -> dict[str, Any]:
        """Return the actors for the next push, by name. Lost ones are among them: they may answer again."""
        started = (one for one in self._engines if one.state is not EngineState.STARTING)
        return {one.name: one.actor for one in started if WEIGHTS not in one.asleep}

    def take_in(self) -> None:
        """Add started engines of `add` to the group. Raise the error of a start, and end its engine."""
        for one in [one for one in self._engines if one.state is EngineState.STARTING and one.start.has_ended()]:
            try:
                one.start.results()
            except BaseException:
                self._end(one)
                self._give_back(one.pool)
                raise
            self._join([one])

    def was_pushed(self, version: int, engines: Collection[str], left_out: Collection[str]) -> None:
        """Note that these engines serve a new version, without the engines left out by the push."""
        self.version = version
        self.pushes += 1
        for one in [one for one in self._engines if one.name in engines]:
            if one.name not in left_out:
                one.state, one.discarded = EngineState.SERVING, False
            elif one.state is not EngineState.LOST:
                one.state = EngineState.LOST
                if has_died(one.actor.__ray_call__.remote(_nothing)):
                    self._end(one)

    def close(self) -> None:
        """End the engines, and give the pools back."""
        for one in list(self._engines):
            self._end(one)
        for pool in list(self._pools):
            self._give_back(pool)

    def __enter__(self) -> RolloutGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _present(self) -> list[GroupEngine]:
        return [one for one in self._engines if one.state in (EngineState.SERVING, EngineState.NEW)]

    def _start(self, pool: ResourcePool) -> list[GroupEngine]:
        """Begin to start an engine at each free place of a pool."""
        taken = {one.place for one in self._engines if one.pool is pool}
        free = [place for place in places_of_engines(pool.processes, self._size) if place not in taken]
        if pool.gpus and pool.is_shared and not self.has_sleep_mode:
            raise ConfigError(
                "the engines would share the GPUs of workers, and cannot sleep: give a pool without a WorkerGroup, or "
                "make the RolloutGroup with enable_sleep_mode=True"
            )
        cls = ray.remote(self._class or _engine_class())
        devices = self._devices(pool, free) if pool.gpus else {}
        started = []
        for place in free:
            node, address = pool.node_of(place)
            name = f"engine {self._count} on {address}"
            own = ",".join(devices[at] for at in range(place, place + self._size) if at in devices)
            # Engines of one seed would give equal prompts equal answers.
            options = {**self._options, "seed": (self._options.get("seed") or 0) + self._count}
            actor = cls.options(**pool.options(place)).remote(own, options)
            start = Pending("start", {actor.__ray_call__.remote(_nothing): name}, self._timeout_s)
            started.append(GroupEngine(name, node, actor, pool, place, start))
            self._count += 1
        self._engines += started
        return started

    def _join(self, engines: Sequence[GroupEngine]) -> None:
        """Wait until engines have started, and let them join the group."""
        Pending("start", {ref: one.name for one in engines for ref in one.start.refs}, self._timeout_s).results()
        for one in engines:
            one.state = EngineState.NEW if self.pushes else EngineState.SERVING

    def _devices(self, pool: ResourcePool, first_places: Sequence[int]) -> dict[int, str]:
        """Return CUDA's name of the GPU of each place, for engines that begin at these places."""
        ask = ray.remote(_visible_devices)
        places = [place for first in first_places for place in range(first, first + self._size)]
        refs = {ask.options(**pool.options(place)).remote(): f"place {place}" for place in places}
        return dict(zip(places, Pending("start", refs, self._timeout_s).results(), strict=True))

    def _end(self, engine: GroupEngine) -> None:
        ray.kill(engine.actor)
        self._engines.remove(engine)

    def _give_back(self, pool: ResourcePool) -> None:
        """Release a pool without engines of this group, so that another group can have it."""
        if pool in self._pools and all(one.pool is not pool for one in self._engines):
            self._pools.remove(pool)
            pool.release(ENGINES)

    def _begin_generate(self, prompts: TensorDict | CallFuture, **sampling: Any) -> CallFuture:
        batch = prompts.result() if isinstance(prompts, CallFuture) else prompts
        if not rows(batch):
            raise ConfigError("a batch without rows has no prompts to answer")
        ids = prompts_of(batch)
        asked = Generation(len(ids), partial(self._ask, ids, sampling), self._leave_out, self._timeout_s)
        return CallFuture(asked, partial(batch_of, pack(batch), self.version, asked.numbers))

    def _ask(self, prompts: list[list[int]], sampling: dict[str, Any], numbers: list[int]) -> list[Share]:
        """Share the prompts of these numbers out over the serving engines."""
        serving = [one for one in self._engines if one.state is EngineState.SERVING]
        for one in [one for one in serving if one.asleep or one.discarded]:
            if has_died(one.actor.__ray_call__.remote(_nothing)):  # `wake_up` and pushes cannot wake it
                died = f"{one.name} died before it answered generate, asleep: remove it, and add another"
                self._leave_out(PeerError(died, who=one.name, phase="generate"))
                serving.remove(one)
        if any(one.discarded for one in serving):
            raise ConfigError("the engines' weights were dropped by sleep of level 2: push before generate")
        if any(one.asleep for one in serving):
            raise ConfigError("the engines are asleep: call wake_up or push before generate")
        if not serving:
            raise ConfigError("no engine of the group serves the weights of the last push: push first")
        parts = balance([len(prompts[number]) for number in numbers], len(serving))
        shares = [(one, [numbers[at] for at in part]) for one, part in zip(serving, parts, strict=True) if part]
        return [
            Share(one.name, own, one.actor.generate.remote([prompts[number] for number in own], sampling))
            for one, own in shares
        ]

    def _call(self, doing: str, refs: Mapping[GroupEngine, Any], woken: Collection[str] = ()) -> None:
        """Wait for calls of engines, and note the parts `woken` by each answer. Then raise the first failure."""
        calls = {one: Pending(doing, {ref: one.name}, self._timeout_s) for one, ref in refs.items()}
        failures: dict[GroupEngine, WeightSyncError] = {}
        for one, call in calls.items():
            try:
                call.results()
                one.asleep -= {*woken}
            except WeightSyncError as error:
                failures[one] = error
        for one, failure in failures.items():
            if not isinstance(failure, PeerError) or failure.who != one.name:
                raise failure
            self._leave_out(failure)

    def _leave_out(self, error: PeerError) -> None:
        """End the dead engine of an error, if the group goes on without it. Else raise the error.

        Do nothing for an engine of an earlier `remove`.
        """
        dead = next((one for one in self._engines if one.name == error.who), None)
        if dead is None:
            return
        others = any(one is not dead and one.state is EngineState.SERVING for one in self._engines)
        if not others or self._sync is None or not self._sync.drops:
            raise error
        logger.warning("the group continues without %s: %s", dead.name, error)
        self._end(dead)


def places_of_engines(processes: Sequence[int], tensor_parallel_size: int) -> list[int]:
    """Return the first place of each engine. Raise `ConfigError` if engines do not fill the nodes of a pool."""
    size = tensor_parallel_size
    if size < 1 or any(count % size for count in processes):
        raise ConfigError(
            f"tensor_parallel_size={size} does not fit a pool of {list(processes)} processes. An engine's workers are "
            f"on one node: give each node a multiple of {size}"
        )
    return list(range(0, sum(processes), size))


def _engine_class() -> type:
    from weightsync.vllm.rollout import RolloutEngine

    return RolloutEngine


def _nothing(actor: Any) -> None: ...


def _visible_devices() -> str:
    import os

    return os.environ.get("CUDA_VISIBLE_DEVICES", "")
