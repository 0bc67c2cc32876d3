"""`WeightSync`, the trainer's one object, and its options."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from weightsync import telemetry
from weightsync.config import (
    BackendName,
    BucketerName,
    Encoding,
    EncodingBase,
    NonFinite,
    OnEngineFailure,
    Pause,
    Quantize,
    Verify,
    WeightSyncConfig,
    read_config,
    read_selection,
)
from weightsync.engines import LoraAdapter
from weightsync.errors import ConfigError, FrozenLostError, WeightSyncError
from weightsync.fleet import EngineList
from weightsync.net.ranks import CollectiveCall, Ranks, collective
from weightsync.net.runtime import close_in_thread
from weightsync.net.uninterrupted import UninterruptedWork
from weightsync.net.update import Timeline, Update
from weightsync.net.wire import MAX_VERSION, POISONED
from weightsync.planning.bucketing import Bucketer
from weightsync.report import PushReport
from weightsync.selection import TensorSelection
from weightsync.sources import BackendOption, open_source
from weightsync.sources.base import Model, ShardSource
from weightsync.strategies import open_strategy
from weightsync.strategies.base import Options, StrategyOption, UpdateStrategy
from weightsync.transports.base import Transport

logger = logging.getLogger(__name__)

_SHARED_BY_RANKS = (
    *("backend", "transport", "verify", "quantize", "on_engine_failure", "encoding", "encoding_base", "non_finite"),
    "rolling",
)
"""Options used by every rank, and compared. `selection` is used but not compared: later errors name differing
tensors."""

_connected: weakref.WeakSet[WeightSync] = weakref.WeakSet()
_names: dict[str, int] = {}
"""The names of the ranks of objects that were not closed, in the current default process group, with the objects' ids.
"""
_named_for: Callable[[], object] | None = None
"""A weak reference to that group, once there is one."""


@dataclass
class _Turn:
    """One call of `WeightSync`. Calls do not overlap. A signal may interrupt a call at any line."""

    is_over: bool = False
    next: dict[int, _Turn] = field(default_factory=dict)


class WeightSync:
    """A trainer's connection to the vLLM engines that serve its weights.

        sync = WeightSync(backend="fsdp", transport="ipc", engine=llm)
        for batch in batches:
            train_step(model, batch)
            report = sync.push(model)      # every trainer rank calls this

    After a successful `push`, every engine answers like an engine started cold from the pushed weights. A failed `push`
    raises the first cause on every rank. Each engine then has its old weights, or is paused and marked `POISONED` until
    a push succeeds.

    Args:
        backend: "fsdp" (FSDP2, FSDP1, DDP, plain modules), "deepspeed" (ZeRO 0 to 3), "megatron" (a Megatron-core
            `GPTModel` or the list of its chunks), "stream" (pairs of a checkpoint name and a whole tensor, or vLLM's
            `WeightSource`). `MegatronBackend(...)` and `StreamBackend(...)` are "megatron" and "stream" with options. A
            `ShardSource` works too.
        transport: "ipc" (engines on this host), "broadcast" or "nixl" (any host). "cuda_ipc" and "nccl" are "ipc" and
            "broadcast" for GPU tensors alone. `CheckpointTransport(folder)` also keeps a checkpoint of each version.
            "lora", or `LoraTransport(...)`, pushes a LoRA adapter alone, under a new name each time. "single_copy", or
            `SingleCopyTransport(...)`, makes the model's parameters views of the engine's memory: see `attach` and
            `writing`. A `Transport`, or its name in the entry point group "weightsync.transports", works too.
        engine: An `LLM`, an `AsyncLLM`, a Ray actor handle of either, an "http://..." address, a
            `weightsync.engines.VllmServer`, a `weightsync.engines.Engine`, or a list of engines. Or a callable
            that returns engines, or the `Path` of a file with one address a line. Rank 0 calls or reads it anew before
            each push. None: $WEIGHTSYNC_ENGINE, or else http://localhost:8000. Rank 0 gives the engines that every
            process can reach. Other ranks give the same or None. Each rank gives its own process's, such as an `LLM`.
        bucketer: The rule that groups tensors into buckets. "module": as many whole modules as `max_bytes` holds.
            "threshold": as many tensors as `max_bytes` holds. "parameter": one tensor. An object with a `bucket` method
            works too. None: "module" for ipc, but "threshold" from "megatron" and "stream" and for other transports.
        max_bytes: The most bytes of a chunk, also as text such as "64MiB". None: 256 MiB. Each rank and each worker
            holds two chunks, or over "nixl" three smaller ones. With "parameter" each chunk is a whole tensor.
        selection: A `TensorSelection`: the tensors of the first and later pushes, and their dtypes. None: all tensors,
            at every push, in the narrower of the trainer's and the engine's dtype.
        pause: "keep", the default, freezes running requests and recomputes their KV cache with the new weights. "wait"
            lets the requests finish first. "abort" ends the requests. "caller": the caller pauses every engine before
            the push and resumes it afterwards. With "caller", a push refuses an engine that still generates.
        rolling: Whether engines are updated one after the other, each paused for its own update alone. Two versions are
            served meanwhile: see docs/use/rolling.md. None: all at once, after all have loaded the version.
        timeout_s: The most seconds of each wait, including the wait for all ranks to call `push`. Other ranks wait up
            to eight times as long for rank 0, because rank 0 waits several times meanwhile.
        hold_s: Seconds after a push during which no other trainer can take the engines. None, the default: until
            `close`, the end of the process, or the end of the last reference to this object. A hold shorter than the
            time between two pushes can lose the engines to another trainer. Another trainer can also take the engines
            from a push without progress for twice `timeout_s`.
        verify: Bytes compared by digests before the push commits. "full": all bytes. "sampled", the default: all bytes
            in the first push, then another sixteenth in each push. Memory that workers read in place is compared in
            full when it is mapped, then by a small sample in each push. "none": no bytes. If another thread writes
            weights during a push, engines get a mixture. "full" finds all such writes. "sampled" finds the writes in
            torch's version counters, so no writes through `.data`. With backend="stream", neither finds such writes.
        quantize: "fp8" or "int8". The weights of linear layers travel in 8 bits, with one scale for each output channel
            (`...weight_scale`). The engine must run a compressed-tensors checkpoint: FP8-dynamic for "fp8", W8A8-int8
            for "int8". See `TensorSelection.unquantized`. None: the weights travel unquantised. A quantised engine then
            quantises the weights itself, with the same result.
        on_engine_failure: The action when one of several engines does not answer. "raise", the default, raises, and the
            other engines stay paused and `POISONED`. After `leave_out_lost()`, the next push goes to the other engines
            alone. "drop" pushes again at once to the other engines. A stream's iterator is used up, so "drop" then
            raises. `PushReport.left_out` names the lost engines. Later pushes include lost engines that answer again.
        encoding: The form of the bytes, for transport="broadcast" with `verify`. "delta" sends changes since the last
            push, "auto" when this is faster. The trainer keeps the last push: see docs/use/slow-links.md. None: all.
        encoding_base: The memory of a GPU trainer for the last push. "device", the default, or "host", pinned.
        non_finite: The action for tensors with NaN or infinity. "warn", the default, pushes such tensors and logs their
            names once the engines generate again. "warn" checks all CPU tensors in each push. All GPU tensors are
            checked in the first push, then another sixteenth. "refuse" checks all tensors, and raises `NonFiniteError`
            before an engine is paused. "ignore" checks none. transport="lora" always refuses.
        progress: Whether rank 0 shows a bar while weights are copied for over a second. None: only on a terminal.
        ranks: The processes that push together, in the docs "every rank". The first one is "rank 0". None: the default
            process group, or this process if there is none. A process group: its ranks alone. All make their objects in
            the same order. "alone": this process, with whole tensors. Any rank of a job may push "alone".

    Raises:
        ConfigError: Options cannot work together, or an option has no effect.
    """

    def __init__(
        self,
        backend: BackendName | BackendOption | ShardSource,
        transport: str | Transport | StrategyOption = "ipc",
        engine: Any = None,
        *,
        bucketer: BucketerName | Bucketer | None = None,
        max_bytes: int | str | None = None,
        selection: TensorSelection | None = None,
        pause: Pause | None = None,
        rolling: bool | None = None,
        timeout_s: float = 300.0,
        hold_s: float | None = None,
        verify: Verify | None = None,
        quantize: Quantize | None = None,
        on_engine_failure: OnEngineFailure | None = None,
        encoding: Encoding | None = None,
        encoding_base: EncodingBase | None = None,
        non_finite: NonFinite | None = None,
        progress: bool | None = None,
        ranks: Literal["alone"] | ProcessGroup | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        given["selection"] = selection = read_selection(selection)
        config = WeightSyncConfig(**given)
        source = open_source(backend, selection, ranks)
        self._drops = on_engine_failure == "drop"
        self._turn = _Turn(is_over=True)
        self._process: int | None = None  # the process that connected
        options = Options(**vars(config), source=source, engines=EngineList(engine, timeout_s))
        self._shown = _comparable(backend), _comparable(transport), options.engines
        self._strategy = open_strategy(transport, options)
        shared = {name: given[name] for name in _SHARED_BY_RANKS}
        self._members = ranks
        self._ranks = Ranks(timeout_s, ranks, {name: _comparable(value) for name, value in shared.items()}, hold_s)
        self._take_name()
        self.last_report: PushReport | None = None
        """The last report of `push`, `catch_up` or `writing`, on every rank."""

    def __repr__(self) -> str:
        backend, transport, engines = self._shown
        served = "no push yet" if self.last_report is None else f"last version {self.last_report.version}"
        return f"<WeightSync(backend={backend}, transport={transport}, engine={engines!r}), {served}>"

    def __getstate__(self) -> dict[str, Any]:
        if self._process is not None:
            raise TypeError(
                "a WeightSync that has pushed holds connections, and cannot be copied or pickled. Make another one in "
                "the process that is to push, as by WeightSync.from_config"
            )
        return vars(self)

    @classmethod
    def from_config(cls, config: WeightSyncConfig | Mapping[str, Any], **objects: Any) -> WeightSync:
        """Return the `WeightSync` of a config, such as one read by OmegaConf.

        Args:
            config: The options, or a mapping of them by name.
            objects: Options that a file cannot hold, such as `engine=llm`. They override the config's.

        Raises:
            ConfigError: As `WeightSync` does, and for an unknown field.
        """
        return cls(**{**read_config(config), **objects})

    def push(self, model: Model, version: int | None = None, *, label: object = None) -> PushReport:
        """Make every engine serve the current weights of `model`. Collective: every trainer rank calls this.

        Blocks until every engine serves them.

        Args:
            model: The model. With backend="stream" the stream of this push: a list, a dict, a function that returns an
                iterable, or an iterator. Rank 0's stream is sent. Other ranks give None, or the same stream if reading
                it runs collectives. Of vLLM's `WeightSource`, every rank gives its own.
            version: A number greater than every earlier version of the engines, other trainers' included. None: the
                next.
            label: A value that engines report in place of the version, such as the trainer's step. It may repeat.

        Returns:
            The report, the same on every rank.

        Raises:
            WeightSyncError: The same on every rank. docs/operate/failures.md lists the state of the engines after each.
        """
        refused = ""
        if label is not None and not self._strategy.takes_labels:
            refused = f"label={label!r}; it has no effect with adapters and restarts: leave it out"
        elif label is not None and str(label).startswith(POISONED):
            refused = f"label={label!r}; it must not begin with {POISONED}"
        text = None if label is None else str(label)
        while True:
            try:
                with self._collective("push", version, text, refused) as update, self._spending(model):
                    report = update.report = self._strategy.run(update, model)
                return report
            except FrozenLostError as error:
                if "spent" in error.facts:
                    raise
                logger.warning("sending everything: %s", error)
            except WeightSyncError as error:
                can_drop = self._drops and self._strategy.lost and error.facts.get("survivors")
                if not can_drop or "spent" in error.facts:
                    raise
                logger.warning("pushing again, without %s: %s", ", ".join(self._strategy.lost), error)
                self.leave_out_lost()

    async def push_async(self, model: Model, version: int | None = None, *, label: object = None) -> PushReport:
        """Push as `push` does, in a thread, while the event loop goes on. Collective, also with ranks that call `push`.

        The model must not change meanwhile. The push starts after the work queued on the caller's current GPU stream. A
        cancelled task ends when the push has ended. Raises as `push` does.
        """
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def run() -> PushReport:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                return self.push(model, version, label=label)

        pushing = asyncio.ensure_future(asyncio.to_thread(run))
        try:
            return await asyncio.shield(pushing)
        except asyncio.CancelledError:
            await asyncio.wait([pushing])
            raise

    def catch_up(self, model: Model) -> PushReport | None:
        """Push the last version to the engines without it, while the other engines generate on. Collective.

            sync.engines.add("http://10.0.0.7:8000")
            sync.catch_up(model)

        Without this call, the next push reaches them as well. Blocks until they serve the version.

        Args:
            model: The model, unchanged since the last push. torch's version counters find most changes, and digests the
                others. They cover a 4 KiB block of each tensor until the first `catch_up`, then all bytes. With
                verify="full" they cover all bytes from the start.

        Returns:
            The report of these engines alone, or None if every engine has the version.

        Raises:
            ConfigError: The model has changed, an engine without the version has had an equal or a newer one, or
                verify="none". Nothing was written.
            WeightSyncError: As `push` does.
        """
        with self._collective("catch_up") as update:
            report = update.report = self._strategy.catch_up(update, model)
        return report

    @property
    def engines(self) -> EngineList:
        """The engines, to add some and to remove some. Raises `ConfigError` if the transport has one fixed engine."""
        return self._strategy.engines

    def leave_out_lost(self) -> list[str]:
        """Leave the engines lost by the last push out of later pushes, until these engines answer again.

        Not collective, but every rank calls it.

        Returns:
            The names of these engines.
        """
        lost, self._strategy.lost = [*self._strategy.lost], ()
        if lost:
            self._strategy.leave_out(lost)
        return lost

    def attach(self, model: nn.Module) -> None:
        """Make the parameters of `model` views of the engine's parameters. Collective.

        Call it once, with transport="single_copy". Rank i gets worker i's parameters, with the engine's values. Writes
        to them are writes to the engine, so do them inside of `writing()`. Buffers get the values of `from_pretrained`.
        `requires_grad` stays as it is.

            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            sync.attach(model)

        Args:
            model: A model on the meta device. For an engine with tensor parallelism, call `parallelize_module` on it
                first.

        Raises:
            WeightSyncError: The same on every rank. The engine is then unchanged.
        """
        with self._collective("attach") as update:
            self._strategy.attach(update, model)

    @contextmanager
    def writing(self, version: int | None = None) -> Iterator[None]:
        """Pause generation while the trainer writes the attached model, with transport="single_copy". Collective.

            with sync.writing():
                optimizer.step()

        Afterwards the engine serves the written weights, as the next version. The body must take less than `timeout_s`.
        An exception in the body is raised on every rank. It leaves the engine paused and `POISONED` until the next
        `writing()` succeeds. `last_report` has the times: `pause_s` includes the body, `total_s` does not.
        """
        with self._collective("writing", version) as update, self._strategy.writing(update):
            yield

    @property
    def adapter(self) -> LoraAdapter | None:
        """The adapter of the last push with a `LoraTransport`, the same on every rank."""
        return self._strategy.adapter

    def close(self) -> None:
        """Disconnect from the engines. Not collective. Another trainer, or this object, may push afterwards.

        When rank 0's call returns, workers have unmapped the memory of all ranks, and it can be freed. A stopped worker
        is waited for a few seconds. The next push maps it again. If others are made afterwards, every rank closes its
        objects, in the same order.

        Raises:
            ConfigError: This process was forked from the connected process, or a call of another thread is under way.
        """
        self._check_process()
        if not self._turn.is_over:
            raise ConfigError("this WeightSync is pushing, in another thread or task: close it when that is done")
        try:
            UninterruptedWork(lambda: _disconnect(self._strategy, self._ranks)).result()
        finally:
            if _names.get(self._ranks.name) == id(self):
                del _names[self._ranks.name]

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Disconnect, in the process that connected. Not a weak reference's callback: in a cycle none is called."""
        if not _is_finalizing() and getattr(self, "_process", None) == os.getpid():
            close_in_thread(_disconnect, self._strategy, self._ranks)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process in (None, os.getpid()):  # else a forked child leaves its parent's `with` block
            self.close()

    def _take_name(self) -> None:
        """Take the first free name for the ranks, so that the ranks of two objects never meet.

        All ranks make and close their objects in the same order. One may be collected at another time on each, so its
        name stays taken.
        """
        global _named_for
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is not None:
            if _named_for is not None and _named_for() is not world:  # perhaps with new processes, which count from 0
                _names.clear()
            _named_for = weakref.ref(world)
        group = getattr(self._members, "group_name", self._members)
        name = next(name for number in itertools.count() if (name := f"sync {group} {number}") not in _names)
        _names[name], self._ranks.name = id(self), name

    @contextmanager
    def _collective(
        self, name: str, version: int | None = None, label: str | None = None, refused: str = ""
    ) -> Iterator[Update]:
        if version is not None and type(version) is not int:  # subclasses, as bool, do not travel as ints
            refused, version = f"version={version!r}; it must be a whole number, or None for the next", None
        elif version is not None and abs(version) > MAX_VERSION:
            refused, version = f"version={version}; the largest version is {MAX_VERSION}", None
        self._check_process()
        if self._process is None:
            self._process = os.getpid()
            if _connected:
                gc.collect()  # frees one that has only a cycle left, such as a failed call's traceback
            _connected.add(self)
        turn, timeline = _Turn(), Timeline()
        try:
            self._take_turn(turn)
            if not self._ranks.name or _names.setdefault(self._ranks.name, id(self)) != id(self):
                self._take_name()  # another object has taken it since `close`, or this one is a copy
            call = CollectiveCall(name, version, label, refused=refused)
            with collective(self._ranks, call, self._strategy) as update:
                timeline = update.timeline
                yield update
            turn.is_over = True
        except BaseException as error:
            turn.is_over = True
            if isinstance(error, WeightSyncError) and self._turn is turn and self._ranks.rank == 0:
                logger.error("%s failed: %s", name, str(error))  # a handler may keep the record, and so the traceback
                telemetry.push_failed(timeline, error)
            raise
        finally:
            turn.is_over = True  # also if a signal interrupted one of the assignments above
        if update.report is not None:
            self.last_report = update.report
            if self._ranks.rank == 0:
                telemetry.push_succeeded(timeline, update.report)

    @contextmanager
    def _spending(self, model: Model) -> Iterator[None]:
        """Mark an error of the body as `spent` if rank 0's stream cannot be read again. Every rank then raises it."""
        try:
            yield
        except WeightSyncError as error:
            if self._ranks.rank == 0 and isinstance(model, Iterator):
                error.add_facts(spent=["the stream"])
            raise

    def _check_process(self) -> None:
        """Raise `ConfigError` in a forked child of the connected process: both would use the same sockets."""
        if self._process not in (None, os.getpid()):
            raise ConfigError(
                f"this WeightSync is connected in process {self._process}, and process {os.getpid()} is a fork: use "
                f"it in process {self._process}, or make another WeightSync here"
            )

    def _take_turn(self, turn: _Turn) -> None:
        """Begin a turn if the last one is over. No lock: an interrupted thread might never release it."""
        last = self._turn
        while last.next:
            last = last.next[0]
        # Two threads may get here at once. `dict.setdefault` is atomic and lets one of them in.
        if not last.is_over or last.next.setdefault(0, turn) is not turn:
            raise ConfigError("this WeightSync is pushing already, in another thread or task: wait until it is done")
        self._turn = turn


def _disconnect(strategy: UpdateStrategy, ranks: Ranks) -> None:
    """End an interrupted step, and disconnect from the engines and the other ranks."""
    if (cleanup := ranks.cleanup) is not None:
        cleanup.result()
    strategy.close()
    ranks.disconnect()


def _comparable(option: object) -> str:
    """Return an option in comparable form. An object differs in each process and is compared by its type."""
    return repr(option) if isinstance(option, str | bool | None) else type(option).__qualname__
