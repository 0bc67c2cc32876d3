"""The trainer's one object, `WeightSync`, and its options."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup

from weightsync import telemetry
from weightsync.config import (
    BackendName,
    BucketerName,
    Encoding,
    NonFinite,
    OnEngineFailure,
    Pause,
    Quantize,
    Verify,
    WeightSyncConfig,
    read_config,
)
from weightsync.engines import LoraAdapter
from weightsync.errors import ConfigError, FrozenLostError, WeightSyncError
from weightsync.fleet import EngineList
from weightsync.net.ranks import Call, Ranks, collective
from weightsync.net.update import Timeline, Update
from weightsync.net.wire import MAX_VERSION, POISONED
from weightsync.planning.bucketing import Bucketer
from weightsync.report import PushReport
from weightsync.selection import TensorSelection
from weightsync.sources import open_source
from weightsync.sources.base import Model, ShardSource
from weightsync.strategies import open_strategy
from weightsync.strategies.base import Options, StrategyOption
from weightsync.transports.base import Transport

logger = logging.getLogger(__name__)

_SHARED_BY_RANKS = ("backend", "transport", "verify", "quantize", "on_engine_failure", "encoding", "non_finite")
"""The options of which every rank uses its own. Of `selection` too, and what then differs is named by tensor."""


@dataclass
class _Step:
    """One call that no other may come in between. A signal may interrupt it at any moment."""

    is_over: bool = False
    next: dict[int, _Step] = field(default_factory=dict)


class WeightSync:
    """A trainer's connection to the vLLM engines that serve its weights.

        sync = WeightSync(backend="fsdp", transport="ipc", engine=llm)
        for batch in batches:
            train_step(model, batch)
            report = sync.push(model)      # every trainer rank calls this

    When `push` returns, every engine answers as an engine that was started cold from these weights. When it raises, it
    raises the first cause on every rank. Each engine is then as it was, or paused and marked `POISONED` until a push
    succeeds.

    backend: how the trainer holds its weights. "fsdp" stands for FSDP2, FSDP1, DDP and plain modules, "deepspeed" for
        ZeRO 0 to 3, "megatron" for a Megatron-core `GPTModel` or the list of its chunks. "stream" takes pairs of a
        checkpoint name and a whole tensor, one after the other. A `ShardSource` of your own works too.
    transport: "ipc" (engines on this host) or "broadcast" (any host). "cuda_ipc" and "nccl" do the same and refuse
        CPU tensors. `CheckpointTransport(folder)` leaves a checkpoint of each version behind. "lora", or
        `LoraTransport(...)`, pushes a LoRA adapter alone, under a new name each time. "single_copy", or
        `SingleCopyTransport(...)`, makes the model's parameters the engine's own memory: see `attach` and `writing`.
        A `Transport` of your own, or the name of one in the entry point group "weightsync.transports", works too.
    engine: an `LLM`, an `AsyncLLM`, a Ray actor handle of either, an "http://..." address, a
        `weightsync.engines.server.VllmServer`, an object with the methods of `weightsync.engines.Engine`, or a list of
        these; or a callable that returns them, or the `Path` of a file of addresses, which each push reads anew. None
        means $WEIGHTSYNC_ENGINE, or else http://localhost:8000. Rank 0 gives what every process can reach, and the
        other ranks give the same or None. What lives in a rank's process, such as an `LLM`, that rank gives.
    bucketer: "module", "threshold" or "parameter", or an object with a `bucket` method. It decides the order in which
        tensors travel and which travel together. None means modules for ipc, and full buckets for everything else and
        for backend="megatron".
    max_bytes: the largest chunk, 256 MiB when None. Both ends of a transfer hold two chunks. "parameter" takes none:
        its chunks are whole tensors.
    selection: which tensors travel, how often, and in which dtype. None means all of them, at every push, in the
        narrower of the trainer's and the engine's dtype.
    pause: what happens to running requests. "keep", the default, freezes them and recomputes their KV cache with the
        new weights. "wait" lets them finish first, "abort" ends them. "caller": the caller has paused every engine, and
        resumes it after the push. An engine that says that it generates is refused.
    timeout_s: the timeout of each wait, the wait for all ranks to call `push` included. Ranks other than 0 may wait a
        few times longer, because rank 0 performs several waits for them.
    hold_s: how long the engines stay this trainer's after a push, where another trainer asks for them. None, the
        default: until `close`, or the end of the process. Give more than the longest time between two pushes: a trainer
        that hangs there cannot be told from one that computes. A push that has not moved for twice `timeout_s` keeps no
        engine.
    verify: which bytes are compared by digests before the push commits. "full": all. "sampled", the default: all in
        the first push, then a sixteenth of what travels, in turn. Memory that workers read in place is proven in full
        when it is mapped, and by a small sample in each push. "none": nothing. Weights that another thread writes while
        a push reads them are a mixture. "full" finds all such writes. "sampled" finds those that torch counts, and so
        none through `.data`. Neither finds them in a stream.
    quantize: "fp8" or "int8". The weights of linear layers travel in 8 bits, with one scale for each output channel
        (`...weight_scale`). The engine must have been started from a compressed-tensors checkpoint of that kind
        (FP8-dynamic, W8A8-int8). See `TensorSelection.unquantized`. None: weights travel unquantised. An engine that
        quantises does so itself, with the same outcome.
    on_engine_failure: what a push does when an engine of several is lost. "raise", the default, raises, and leaves the
        others paused and `POISONED`; `leave_out_lost` lets the next push go on without it. "drop" pushes again, at
        once, to those that are left, but raises where a stream is an iterator. `PushReport.left_out` names the lost
        ones. A later push includes them when they answer again.
    encoding: with transport="broadcast" and tensors on CPUs. "auto" sends what has changed since the last push, where
        the link is so slow that this is faster. "delta" does so over any link. Both ends keep what was sent last:
        docs/deltas.md says how much memory that takes. None, the default, sends everything.
    non_finite: what becomes of tensors that hold NaN or infinity. "warn", the default, pushes them, and logs their
        names once the engines generate again. On GPUs each push but the first looks at a sixteenth of the tensors, in
        turn. "refuse" raises `NonFiniteError` before an engine is paused, and looks at all. "ignore" does not look.
        Adapters of "lora" are refused in any case.
    progress: a progress bar on rank 0 for long pushes. None means only on a terminal.
    megatron_bridge: for backend="megatron", the family whose checkpoint names are used ("mixtral"). None means that the
        names follow from the model, as for all known families but Mixtral. Any other family needs an object that
        exports the model, such as Megatron-Bridge's `AutoBridge` or mbridge's `Bridge`. It gathers every tensor.
    vocab_size: for backend="megatron", how many rows of the embedding the checkpoint has. None means all rows, with
        Megatron's padding.
    ranks: which processes push together, as "every rank" and "rank 0" mean here. None: the default process group, or
        this process where there is none. A process group: its ranks alone. "alone": this process, which must hold whole
        tensors; so one rank of a job, or each for itself, may push.
    stream_tensors: for backend="stream", what streams give, in their order: an object with `shape` and `dtype` for each
        name, such as a tensor on the meta device. None learns it from the first stream, which is read twice, or is kept
        in CPU memory where it is an iterator. Every rank gives the same.

    Raises `ConfigError` for options that cannot work together, and for an option that would have no effect.
    """

    def __init__(
        self,
        backend: BackendName | ShardSource,
        transport: str | Transport | StrategyOption = "ipc",
        engine: Any = None,
        *,
        bucketer: BucketerName | Bucketer | None = None,
        max_bytes: int | None = None,
        selection: TensorSelection | None = None,
        pause: Pause | None = None,
        timeout_s: float = 300.0,
        hold_s: float | None = None,
        verify: Verify | None = None,
        quantize: Quantize | None = None,
        on_engine_failure: OnEngineFailure | None = None,
        encoding: Encoding | None = None,
        non_finite: NonFinite | None = None,
        progress: bool | None = None,
        megatron_bridge: Any = None,
        vocab_size: int | None = None,
        ranks: Literal["alone"] | ProcessGroup | None = None,
        stream_tensors: Mapping[str, Any] | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "backend": backend,
            "transport": transport,
            "engine": engine,
            "bucketer": bucketer,
            "max_bytes": max_bytes,
            "selection": selection,
            "pause": pause,
            "timeout_s": timeout_s,
            "hold_s": hold_s,
            "verify": verify,
            "quantize": quantize,
            "on_engine_failure": on_engine_failure,
            "encoding": encoding,
            "non_finite": non_finite,
            "progress": progress,
            "megatron_bridge": megatron_bridge,
            "vocab_size": vocab_size,
            "ranks": ranks,
        }
        config = WeightSyncConfig(**given)
        source = open_source(
            backend,
            config.selection,
            bridge=megatron_bridge,
            vocab_size=vocab_size,
            stream_tensors=stream_tensors,
            ranks=ranks,
        )
        self._drops = on_engine_failure == "drop"
        self._lost: list[str] = []
        self._step = _Step(is_over=True)
        self._process: int | None = None  # whose connections these are
        options = Options(**vars(config), source=source, engines=EngineList(engine, timeout_s))
        self._strategy = open_strategy(transport, options)
        shared = {name: given[name] for name in _SHARED_BY_RANKS}
        self._ranks = Ranks(timeout_s, ranks, {name: _told(value) for name, value in shared.items()}, hold_s)
        self.last_report: PushReport | None = None
        """The last report of `push`, `catch_up` or `writing`, on every rank."""

    @classmethod
    def from_config(cls, config: WeightSyncConfig | Mapping[str, Any], **objects: Any) -> WeightSync:
        """Return the `WeightSync` of a config, such as one that OmegaConf has read.

        `objects` are options that no file holds, such as `engine=llm`, and take the place of the config's. Raises
        `ConfigError` as `WeightSync` does, and for a field that is no option.
        """
        return cls(**{**read_config(config), **objects})

    def push(self, model: Model, version: int | None = None, *, label: object = None) -> PushReport:
        """Make every engine serve the weights that `model` has now. Collective: every trainer rank calls this.

        With backend="stream" `model` is the stream of this push: a list, a dict, a function that returns an iterable,
        or an iterator. Rank 0's is sent. The other ranks give the same, since giving may take collectives, or None.

        Blocks until every engine serves them. `version` must be greater than any that an engine has had, from earlier
        trainers too. None takes the next. `label` is what engines report with their answers in the place of the
        version, such as the trainer's step, and may repeat.

        Returns the same report on every rank. Raises the same `WeightSyncError` on every rank; docs/failures.md says
        what each leaves behind.
        """
        refused = ""
        if label is not None and (str(label).startswith(POISONED) or not self._strategy.takes_labels):
            refused = (
                f"label={label!r}; it must not begin with {POISONED}, and has no effect with adapters and restarts"
            )
        told = None if label is None else str(label)
        while True:
            try:
                with self._collective("push", version, told, refused) as update:
                    update.label = told
                    with self._spending(model):
                        report = update.report = self._strategy.run(update, model)
                return report
            except FrozenLostError as error:
                logger.warning("sending everything: %s", error)
            except WeightSyncError as error:
                if not self._drops or not self._lost or not error.facts.get("survivors") or "spent" in error.facts:
                    raise
                logger.warning("pushing again, without %s: %s", ", ".join(self._lost), error)
                self.leave_out_lost()

    async def push_async(self, model: Model, version: int | None = None, *, label: object = None) -> PushReport:
        """Push as `push` does, in a thread, while the event loop goes on. Collective, with ranks that call `push` too.

        The model must not change meanwhile. What the caller's current stream of a GPU has queued is waited for. A task
        that is cancelled ends when the push has ended. Raises as `push` does.
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
        """Push the version of the last push to the engines that lack it, while the others generate on. Collective.

            sync.engines.add("http://10.0.0.7:8000")
            sync.catch_up(model)

        Without it, the next push reaches them as well. Blocks until they serve it. `model` must be as it was pushed,
        else `ConfigError` is raised before anything is written. torch counts most writes. Digests find the others: of a
        4 KiB block of each tensor until the first `catch_up`, of all bytes after it or with verify="full".
        Returns the report, of these engines alone, or None where none lacks it. Raises as `push` does.
        """
        with self._collective("catch_up") as update:
            report = update.report = self._strategy.catch_up(update, model)
        return report

    @property
    def engines(self) -> EngineList:
        """The engines, to add some and to remove some. Raises `ConfigError` where the transport has one engine."""
        return self._strategy.engines

    def leave_out_lost(self) -> list[str]:
        """Leave the engines that the last push has lost out of the next ones, until these answer again.

        Returns their names. Not collective, but every rank calls it.
        """
        lost, self._lost = self._lost, []
        if lost:
            self._strategy.leave_out(lost)
        return lost

    def attach(self, model: nn.Module) -> None:
        """Make the parameters of `model`, which is on the meta device, views of the engine's. Collective.

        Call it once, with transport="single_copy". Rank i gets worker i's parameters, with the engine's values. Writes
        to them are writes to the engine, so do them inside of `writing()`. Buffers get the values that
        `from_pretrained` gives them, and requires_grad stays what it is.

            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            sync.attach(model)

        For an engine with tensor parallelism, call `parallelize_module` on the model first. Raises the same
        `WeightSyncError` on every rank, and the engine is then as it was.
        """
        with self._collective("attach") as update:
            self._strategy.attach(update, model)

    @contextmanager
    def writing(self, version: int | None = None) -> Iterator[None]:
        """Pause generation while the attached model is written, with transport="single_copy". Collective.

            with sync.writing():
                optimizer.step()

        Afterwards the engine serves what was written, as the next version. The body must take less than `timeout_s`.
        An exception in the body is raised on every rank. It leaves the engine paused and `POISONED` until the next
        `writing()` succeeds. `last_report` says how long it took: `pause_s` with the body, `total_s` without.
        """
        with self._collective("writing", version) as update, self._strategy.writing(update):
            yield

    @property
    def adapter(self) -> LoraAdapter | None:
        """Return the adapter that was pushed last, with a `LoraTransport`. It is the same on every rank."""
        return self._strategy.adapter

    def close(self) -> None:
        """Disconnect from the engines. Not collective. Another trainer may push afterwards.

        Workers keep the memory that they have mapped until a trainer calls them next. Raises `ConfigError` in a process
        that was forked from the one that is connected.
        """
        self._check_process()
        if (unended := self._ranks.unended) is not None and self._step.is_over:
            unended.result()
        self._strategy.close()
        self._ranks.disconnect()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process in (None, os.getpid()):  # else a forked process leaves a block of its parent's
            self.close()

    @contextmanager
    def _collective(
        self, name: str, version: int | None = None, label: str | None = None, refused: str = ""
    ) -> Iterator[Update]:
        if version is not None and not isinstance(version, int):
            refused, version = f"version={version!r}; it must be a whole number, or None for the next", None
        elif version is not None and abs(version) > MAX_VERSION:
            refused, version = f"version={version}; the largest that can be is {MAX_VERSION}", None
        self._check_process()
        self._process = os.getpid()
        step, timeline = _Step(), Timeline()
        try:
            self._take_turn(step)
            call, strategy = Call(name, version, label, refused=refused), self._strategy
            ends = strategy.explain, self._reset, strategy.is_untouched, strategy.withdraw
            with collective(self._ranks, call, *ends) as update:
                timeline = update.timeline
                yield update
            step.is_over = True
        except BaseException as error:
            step.is_over = True
            if isinstance(error, WeightSyncError) and self._step is step and self._ranks.rank == 0:
                telemetry.push_failed(timeline, error)
            raise
        finally:
            step.is_over = True  # also where a signal has interrupted one of the lines that say so
        if update.report is not None:
            self.last_report = update.report
            if self._ranks.rank == 0:
                telemetry.push_succeeded(timeline, update.report)

    @contextmanager
    def _spending(self, model: Model) -> Iterator[None]:
        """Note in an error of the body that rank 0's stream cannot be read again. Every rank then raises it."""
        try:
            yield
        except WeightSyncError as error:
            if self._ranks.rank == 0 and isinstance(model, Iterator):
                error.add_facts(spent=["the stream"])
            raise

    def _check_process(self) -> None:
        """Raise `ConfigError` in a process that was forked from the one that is connected, and shares its sockets."""
        if self._process not in (None, os.getpid()):
            raise ConfigError(
                f"this WeightSync is connected by process {self._process}, from which this process, {os.getpid()}, was "
                "forked: use it there, or make another one here"
            )

    def _take_turn(self, step: _Step) -> None:
        """Begin a step where the last one is over. No lock: an interrupted thread might keep it."""
        last = self._step
        while last.next:
            last = last.next[0]
        # Two threads may come here at once, and a dict lets one of them in.
        if not last.is_over or last.next.setdefault(0, step) is not step:
            raise ConfigError("this WeightSync is pushing already, in another thread or task: wait for that push first")
        self._step = step

    def _reset(self, error: WeightSyncError) -> None:
        self._lost = getattr(error, "lost", [])
        self._strategy.reset(error)


def _told(option: object) -> str:
    """Return an option as ranks compare it: an object, which is another one in each process, by its type."""
    return repr(option) if isinstance(option, str | None) else type(option).__qualname__
