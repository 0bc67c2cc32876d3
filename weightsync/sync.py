"""`WeightSync`: one object, one verb."""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weightsync.agreement import (
    Agreement,
    frozen_buckets,
    frozen_everywhere,
    signature,
    spans_by_bucket,
    spans_told,
)
from weightsync.bucketing import Bucketer, ParameterBucketer, make_bucketer
from weightsync.channel import Hub
from weightsync.checkpoint.restart import push_and_restart
from weightsync.checkpoint.save import save
from weightsync.deadline import Deadline
from weightsync.engines import ENGINE_VARIABLE, LoraAdapter, connect
from weightsync.errors import ConfigError, EngineError, PlacementError, WeightSyncError, foreign
from weightsync.fitting import check_plans, check_quantized, cut, pack_reads, unpack_reads, wire_manifest
from weightsync.kernels.digest import PARTS, WHOLE
from weightsync.layout import Manifest, Placement, merge_manifests
from weightsync.lora import LoraPush
from weightsync.machine import boot_id, describe_device
from weightsync.placing import place
from weightsync.progress import Progress
from weightsync.ranks import RankGroup
from weightsync.report import PushReport, WorkerReport
from weightsync.senders import make_sender
from weightsync.senders.base import Model, Piece, Sender, TensorPolicy
from weightsync.senders.quantize import QuantizingSender, pairs
from weightsync.session import EngineSession, Worker
from weightsync.transports import make_transport
from weightsync.transports.base import SLOTS, Region, Shipment, Transport, WorkerInfo
from weightsync.transports.checkpoint import CheckpointTransport
from weightsync.transports.lora import LoraTransport
from weightsync.transports.single_copy import SingleCopyTransport
from weightsync.wire import (
    Connect,
    Loaded,
    pack_manifest,
    pack_placements,
    unpack_manifest,
    unpack_placements,
)

if TYPE_CHECKING:
    from weightsync.single_copy import AttachedModel, Export

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 * 2**20
PAUSE_MODES = ("keep", "wait", "abort")
VERIFY_MODES = ("sampled", "full", "none")


class WeightSync:
    """Pushes a trainer's weights into running vLLM engines.

        sync = WeightSync(backend="fsdp", transport="ipc", engine=llm)
        for batch in batches:
            train_step(model, batch)
            report = sync.push(model)      # every trainer rank calls this

    When `push` returns, every engine answers as one that was started cold from these weights. When it raises, it
    raises on every rank, the first cause first, and each engine is as it was, or paused and marked `POISONED` until
    a push succeeds.

    backend: how the trainer holds its weights: "fsdp" (FSDP2, FSDP1, DDP, a plain module), "deepspeed" (ZeRO 0 to 3)
        or "megatron" (a Megatron-core `GPTModel`, or the list of its chunks).
    transport: "ipc" (engines on this host) or "broadcast" (any host); "cuda_ipc" and "nccl" are the same and refuse
        CPU tensors. `CheckpointTransport(folder)` leaves a checkpoint of each version behind. "lora", or
        `LoraTransport(...)`, pushes a LoRA adapter alone, under a new name each time. "single_copy", or
        `SingleCopyTransport(...)`, makes the model's parameters the engine's own memory: see `attach` and `writing`. Or
        any other object with the face of `weightsync.transports.base.Transport`.
    engine: an `LLM`, an `AsyncLLM`, a Ray actor handle of either, an "http://..." address, a
        `weightsync.server.VllmServer`, an object with the methods of `weightsync.engines.Engine`, or a list of these;
        only rank 0's is used. None means $WEIGHTSYNC_ENGINE, or else http://localhost:8000; with single_copy, the
        engine whose `vllm_bridge_config.json` is found (see `weightsync.bridge.find`).
    bucketer: "module", "threshold" or "parameter", or an object with a `bucket` method; None means modules for ipc,
        full buckets for all else and for backend="megatron".
    max_bytes: the size of a bucket, 256 MiB when None. What fuses into one engine parameter may be larger, and then a
        broadcast has others as large.
    policy: which tensors travel, how often, and in which dtype; None means all of them, at every push, in the narrower
        of the trainer's and the engine's dtype.
    pause: what happens to requests that are running: "keep" freezes them and recomputes their KV cache with the new
        weights, "wait" lets them finish first, "abort" ends them.
    timeout_s: the longest that any single wait may last, also for all ranks to come. (While rank 0 talks to engines the
        others wait for all that it may wait for, which is several times as long.)
    verify: how much of a bucket that is staged, broadcast or read out of GPU memory is checked, by digests, before it
        is loaded: "full" all of it, "sampled" all of it in the first push, and later in turn a sixteenth that is spread
        over it, "none" nothing.
    quantize: "fp8" or "int8": the weights of linears travel in 8 bits, each with one scale for each output channel
        (`...weight_scale`), to an engine that was started from a compressed-tensors checkpoint of that kind
        (FP8-dynamic, W8A8-int8); see `TensorPolicy.unquantized`. None: weights travel unquantised, and an engine that
        quantises does so itself, with the same outcome.
    progress: a progress bar on rank 0 for long pushes; None means only on a terminal.
    bridge: for backend="megatron", the family whose checkpoint names are used ("mixtral"); None where the names follow
        from the model, as for all families that it knows but Mixtral. For any other family, an object that exports the
        model as Megatron-Bridge's `AutoBridge` or mbridge's `Bridge` does; it gathers every tensor.
    vocab_size: for backend="megatron", the rows of the embedding that the checkpoint has; None means all of them, with
        those that Megatron has padded it with.

    Raises `ConfigError` for what cannot work together, and for an option that would have no effect.
    """

    def __init__(
        self,
        backend: str,
        transport: str | Transport | LoraTransport | SingleCopyTransport = "ipc",
        engine: Any = None,
        *,
        bucketer: str | Bucketer | None = None,
        max_bytes: int | None = None,
        policy: TensorPolicy | None = None,
        pause: str = "keep",
        timeout_s: float = 300.0,
        verify: str = "sampled",
        quantize: str | None = None,
        progress: bool | None = None,
        bridge: Any = None,
        vocab_size: int | None = None,
    ) -> None:
        if pause not in PAUSE_MODES:
            raise ConfigError(f"pause={pause!r}; choose one of {', '.join(PAUSE_MODES)}")
        if verify not in VERIFY_MODES:
            raise ConfigError(f"verify={verify!r}; choose one of {', '.join(VERIFY_MODES)}")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}; it must be positive seconds")
        self._policy = policy or TensorPolicy()
        self._sender: Sender = make_sender(backend, self._policy, bridge=bridge, vocab_size=vocab_size)
        if quantize is not None:
            self._sender = QuantizingSender(self._sender, quantize, self._policy, idle=self._idle, timeout_s=timeout_s)
        if quantize is not None and isinstance(transport, CheckpointTransport) and transport.restart:
            raise ConfigError("restart=True saves the trainer's own tensors; leave quantize out")
        self._saving = {"backend": backend, "policy": self._policy, "bridge": bridge, "vocab_size": vocab_size}
        self._quantize = quantize
        self._padded = backend == "megatron" and vocab_size is None
        if transport == "single_copy":
            transport = SingleCopyTransport()
        if isinstance(transport, SingleCopyTransport) and (backend != "fsdp" or quantize is not None):
            raise ConfigError(
                'single_copy works on a plain model, or one that `parallelize_module` has sharded: backend="fsdp", and '
                f"quantize=None. Got backend={backend!r}, quantize={quantize!r}"
            )
        self._lora: LoraPush | None = None
        if transport == "lora":
            transport = LoraTransport()
        if isinstance(transport, LoraTransport):
            if backend == "megatron" or quantize is not None:
                raise ConfigError('adapters are those of PEFT: backend="fsdp" or "deepspeed", without quantize')
            self._lora = LoraPush(transport, self._sender, engine, timeout_s)
        if not (isinstance(transport, (str, LoraTransport, SingleCopyTransport)) or hasattr(transport, "prepare")):
            raise ConfigError(
                f"transport={transport!r}; it must be a name, or an object with the methods of "
                "weightsync.transports.base.Transport"
            )
        chosen = {"bucketer": bucketer, "max_bytes": max_bytes, "verify": verify, "pause": pause}
        if vain := [name for name in _without_effect(transport) if chosen[name] != _UNCHOSEN[name]]:
            kind = type(transport).__name__
            raise ConfigError(f"{', '.join(vain)}: no effect with this {kind}; leave out what is given for it")
        self._transport = transport
        self._open_transport: Transport | None = None
        if isinstance(transport, str):
            make_transport(transport, timeout_s=timeout_s)  # an unknown name is an error here, not in the first push
        if bucketer is None:
            by_module = transport in ("ipc", "cuda_ipc") and backend != "megatron"
            bucketer = "module" if by_module else "threshold"
        if isinstance(bucketer, str):
            default = None if bucketer == "parameter" else DEFAULT_MAX_BYTES
            bucketer = make_bucketer(bucketer, default if max_bytes is None else max_bytes)
        elif max_bytes is not None:
            raise ConfigError(f"max_bytes={max_bytes} is for a bucketer that is named; give it to {bucketer!r} itself")
        self._bucketer = bucketer
        self._engine = engine
        self._pause = pause
        self._timeout_s = timeout_s
        self._verify = verify
        self._progress = progress
        self._hub: Hub | None = None
        self._ranks: RankGroup | None = None
        self._session: EngineSession | None = None
        self._failed: EngineSession | None = None  # the last one that has, and may still have calls under way
        self._agreed: Agreement | None = None
        self._attached: AttachedModel | None = None
        self._shareable: Manifest | None = None
        self._last_version = 0
        self._phase = "connect"
        self.last_report: PushReport | None = None
        """What the last `push` or `writing` that succeeded came to, on every rank."""

    def push(self, model: Model, version: int | None = None) -> PushReport:
        """Collective: every trainer rank calls this. Make every engine serve `model`'s weights of this moment.

        `version` must be greater than any that an engine has been given, also by earlier trainers; None takes the next.
        Returns the same report on every rank. Raises `WeightSyncError`s (see `weightsync.errors`), the same one on
        every rank.
        """
        if isinstance(self._transport, SingleCopyTransport):
            if self._attached is None:
                raise ConfigError("single_copy pushes the model that `attach` was given: call `attach(model)` first")
            if self._attached.model is not model:
                raise ConfigError("single_copy pushes the model that was given to `attach`, and this is another")
            with self.writing(version):
                pass
            assert self.last_report is not None
            return self.last_report
        with self._as_one():
            _check_version(version)
            if isinstance(self._transport, CheckpointTransport) and self._transport.restart:
                ranks = self._meet()
                save_to = partial(save, model, timeout_s=self._timeout_s, **self._saving)
                self.last_report = push_and_restart(
                    self._transport, self._engine, ranks, save_to, version, self._timeout_s, self._in_phase
                )
                logger.info("saved and restarted %s", self.last_report)
            else:
                self.last_report = self._push(model, version, time.perf_counter())
        return self.last_report

    def attach(self, model: torch.nn.Module) -> None:
        """Collective: every trainer rank calls this, once, with transport="single_copy". Make the parameters of
        `model`, which is on the meta device, views of the engine's: rank i's of worker i's. They have the engine's
        values, and what is written to them is written to the engine; do that inside of `writing()`. Buffers get the
        values that `from_pretrained` gives them, and requires_grad stays what it is.

            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            sync.attach(model)

        For an engine with tensor parallelism, `parallelize_module` the model first. Raises `WeightSyncError`s, the same
        one on every rank; the engine is as it was.
        """
        if not isinstance(self._transport, SingleCopyTransport):
            raise ConfigError('attach is for WeightSync(backend, transport="single_copy")')
        if self._attached is not None:
            raise ConfigError("a model is attached already; close this WeightSync first")
        from weightsync.senders.fsdp import FsdpSender  # as `lay_over`, it costs more to import than all the rest
        from weightsync.single_copy import lay_over

        assert isinstance(self._sender, FsdpSender)
        with self._as_one():
            ranks = self._meet()
            with self._in_phase("plan"):
                pieces = self._sender.sketch(model)
                self._shareable = Manifest(tuple(dict.fromkeys(piece.meta for piece in pieces)))
                self._attached = lay_over(model, pieces, self._share(ranks), ranks)

    @contextmanager
    def writing(self, version: int | None = None) -> Iterator[None]:
        """Collective: every trainer rank enters and leaves this, with transport="single_copy". Inside, generation is
        paused and the attached model may be written:

            with sync.writing():
                optimizer.step()

        When it is left the engine serves what was written, as the next version. The body must take less than
        `timeout_s`. What it raises is raised on every rank, and leaves the engine paused and `POISONED` until the next
        `writing()` succeeds. `last_report` tells how long it took: `pause_s` with the body, `total_s` without.
        """
        attached = self._attached
        if attached is None:
            raise ConfigError("there is no model to write: call `attach` first")
        with self._as_one():
            _check_version(version)
            started = time.perf_counter()
            ranks = self._meet()
            with self._in_phase("plan"):
                attached.check()
                if ranks.share(self._hub is not None and self._session is None, "plan"):
                    self._share(ranks)
                session = self._session
                version = ranks.share(self._next_version(version) if session is not None else None, "plan")
            plan_s = time.perf_counter() - started
            with self._in_phase("pause"):
                if session is not None:
                    session.begin()
                    session.begun()
                    session.load(version, 0)  # from here on the weights are a mixture
                    session.loaded()
                ranks.share(None, "pause")
            paused = time.perf_counter()
            with self._in_phase("write"), attached.open():
                yield
            written = time.perf_counter()
            attached.fence(ranks)
            report: PushReport | None = None
            if session is not None:
                with self._in_phase("commit"):
                    committed = session.commit()
                now = time.perf_counter()
                total_s = now - started - (written - paused)
                workers = _worker_reports(session, [], [answer.load_s for answer in committed])
                report = PushReport(
                    version=version,
                    nbytes=0,
                    plan_s=plan_s,
                    control_s=total_s,
                    load_s=max(w.load_s for w in workers),
                    pause_s=now - started - plan_s,
                    total_s=total_s,
                    workers=workers,
                )
                logger.info("wrote %s", report)
            self._phase = "commit"
            report = PushReport.from_dict(ranks.share(asdict(report) if report is not None else None, "commit"))
            self._last_version, self.last_report = report.version, report

    def _share(self, ranks: RankGroup) -> list[Export]:
        """Collective. What the workers of the engine tell of their parameters; the same engine as before, if there was
        one."""
        from weightsync.single_copy import Export

        assert self._shareable is not None
        assert isinstance(self._transport, SingleCopyTransport)
        rows: list[list[Any]] | None = None
        everyone = ranks.gather([pack_manifest(self._shareable), boot_id()], "plan")
        if self._hub is not None:
            manifest = merge_manifests([unpack_manifest(row) for row, _ in everyone])
            session, workers = self._call_in()
            hosts = [WorkerInfo(f"trainer rank {rank}", "", "", host) for rank, (_, host) in enumerate(everyone)]
            if len(engines := {worker.hello.group for worker in workers}) > 1:
                raise PlacementError(
                    f"single_copy shares the memory of one engine, and {len(engines)} were given; leave out all but "
                    'one, or use transport="ipc"'
                )
            self._transport.check(hosts, [worker.info for worker in workers])
            check_plans(manifest, session.plan(pack_manifest(manifest)), False)
            shared = session.share()
            self._transport.check_epochs([answer.epoch for answer in shared])
            told = zip(workers, shared, strict=True)
            rows = [[s.epoch, w.hello.device, w.hello.gpu_uuid, s.storages, s.placements] for w, s in told]
            session.release("init")
        rows = ranks.share(rows, "connect")
        assert rows is not None
        exports = [
            Export(epoch, device, gpu_uuid, storages, unpack_placements(placements))
            for epoch, device, gpu_uuid, storages, placements in rows
        ]
        if self._attached is not None and self._attached.epochs != [export.epoch for export in exports]:
            raise EngineError(
                "the engine was started anew since `attach`, and the model's parameters are the old one's memory: "
                "close this WeightSync, build the model anew on the meta device, and attach that"
            )
        return exports

    @contextmanager
    def _as_one(self) -> Iterator[None]:
        """Collective. What fails inside on any rank is raised on all, and everything is taken down."""
        try:
            yield
        except Exception as error:
            rank = self._ranks.rank if self._ranks is not None else 0
            problem = foreign(error, who=f"trainer rank {rank}", phase=self._phase)
            problem = self._give_up(problem)
            if problem is error:
                raise
            raise problem from error
        except BaseException:
            self._give_up(WeightSyncError("the trainer was interrupted", phase=self._phase))
            raise

    @property
    def adapter(self) -> LoraAdapter | None:
        """The adapter that was pushed last, with a `LoraTransport`; the same on every rank."""
        return None if self._lora is None else self._lora.adapter

    def close(self) -> None:
        """Let go of the engines. Not collective. Another trainer may push afterwards. An engine's workers give back
        the memory that they have mapped at their next call from a trainer, since only then they look."""
        if self._attached is not None:
            self._attached.release()
            self._attached = None
        self._disconnect()
        if self._lora is not None:
            self._lora.close()

    def _disconnect(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._open_transport is not None:
            self._open_transport.abort()
        if self._ranks is not None:
            self._ranks.close()
        if self._hub is not None:
            self._hub.close()
        self._session = self._open_transport = self._ranks = self._hub = self._agreed = None
        self._sender.close()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _push(self, model: Model, version: int | None, started: float) -> PushReport:
        ranks = self._meet()
        if self._lora is not None:
            pushed = self._lora.push(ranks, model, lambda newest: self._next_version(version, newest), self._in_phase)
            self._last_version = pushed.version
            return pushed
        with self._in_phase("plan"):
            began, sent = self._agree(ranks, model, version)
            agreed, transport, session = self._agreed, self._open_transport, self._session
            assert agreed is not None
            assert transport is not None
            version = ranks.share(self._next_version(version) if session is not None else None, "plan")
        planned = time.perf_counter()

        loads: list[Loaded] = []
        gather_s = opening_s = 0.0
        bucket_bytes, part = agreed.due(), self._part(agreed)
        with Progress(self._progress, f"push {version}", sum(bucket_bytes), ranks.rank == 0) as bar:
            for bucket, nbytes in enumerate(bucket_bytes):
                if session is not None and bucket >= SLOTS:
                    loads += self._collect(session)
                self._phase = "gather"
                ranks.share(None, "gather")
                staging = time.perf_counter()
                self._sender.gather(agreed.buckets[bucket])
                own = transport.stage(bucket, part, self._idle, Deadline(self._timeout_s))
                agreed.check(bucket, part, own)
                digests = b"".join(ranks.gather(struct.pack(f"<{len(own)}Q", *own), "gather"))
                gather_s += time.perf_counter() - staging
                if session is not None:
                    if bucket == 0:
                        staged = time.perf_counter()
                        with self._in_phase("pause"):
                            session.begun()
                        opening_s = time.perf_counter() - staged
                    self._phase = "transfer"
                    session.load(version, bucket, part, agreed.by_worker(bucket, digests))
                    if bucket > 0 or not sent:
                        transport.post(bucket)
                bar.advance(nbytes)
        report: PushReport | None = None
        if session is not None:
            with self._in_phase("load"):
                session.announced()
                while len(loads) < len(bucket_bytes) * len(session.workers):
                    loads += self._collect(session)
                transport.finish(version, self._idle, Deadline(self._timeout_s))
            delivered = time.perf_counter()
            with self._in_phase("commit"):
                committed = session.commit()
            now = time.perf_counter()
            workers = _worker_reports(session, loads, [answer.load_s for answer in committed])
            report = PushReport(
                version=version,
                nbytes=sum(bucket_bytes),
                buckets=len(bucket_bytes),
                plan_s=planned - started,
                control_s=planned - started + opening_s + now - delivered,
                gather_s=gather_s,
                transfer_s=max(w.transfer_s for w in workers),
                verify_s=max(w.verify_s for w in workers),
                load_s=max(w.load_s for w in workers),
                pause_s=now - began,
                total_s=now - started,
                roads=agreed.roads,
                workers=workers,
            )
            logger.info("pushed %s", report)
        self._phase = "commit"
        report = PushReport.from_dict(ranks.share(asdict(report) if report is not None else None, "commit"))
        self._last_version = report.version
        agreed.pushes += 1
        agreed.model = id(model)
        return report

    def _agree(self, ranks: RankGroup, model: Model, version: int | None) -> tuple[float, bool]:
        """Collective: have in `_agreed` what the model is now, and let the engines get ready for it. Gives when they
        began to, and whether the first bucket is on its way.

        Once a model has stayed where it was, they begin while it is looked whether it still has, and so does the first
        bucket; which is taken back where it has not. That ends nobody's request with pause="keep" alone.
        """
        agreed = self._agreed
        likely = agreed is not None and agreed.pushes > 1 and agreed.model == id(model) and self._pause == "keep"
        # Asked together, since no engine is paused for ranks that have yet to come.
        everyone = ranks.gather(likely and agreed is not None and agreed.holds_its_memory(), "plan")
        ahead = ranks.share(all(everyone), "plan")
        began = self._begin(version) if likely else None
        ahead = ahead and self._stage_ahead()
        if ahead:
            ranks.gather(None, "plan")  # workers may look at what all ranks have staged as soon as they are told of it
        sent = ahead and self._session is not None and self._session.has_begun()
        if sent:  # or what takes longer than to look is not waited for
            self._send_ahead(version)
        pieces = self._sender.pieces(model)
        unchanged = agreed is not None and agreed.still_holds(pieces, self._policy)
        if ranks.share(not all(ranks.gather(unchanged, "plan")), "plan"):
            if ahead:
                self._take_back(version, sent)
            if began is not None and self._session is not None:
                self._session.withdraw()
            self._agreed = began = None
            sent = False
            self._agreed = self._negotiate(ranks, self._sender.manifest(model), pieces)
        return self._begin(version) if began is None else began, sent

    def _begin(self, version: int | None) -> float:
        """Rank 0, once there are engines: let them get ready for this version. When that was."""
        if self._session is not None:
            self._next_version(version)  # one that cannot be is refused before anything is paused
            with self._in_phase("pause"):
                self._session.begin()
            self._phase = "plan"
        return time.perf_counter()

    def _stage_ahead(self) -> bool:
        """Collective, while it is not known whether the model is as it was: begin with the first bucket. Whether it may
        be sent, and then must be."""
        agreed, transport = self._agreed, self._open_transport
        assert agreed is not None
        assert transport is not None
        return transport.stage_ahead(0, self._part(agreed), self._idle, Deadline(self._timeout_s))

    def _send_ahead(self, version: int | None) -> None:
        """Rank 0, once the workers listen: the first bucket, which they let arrive and do not load."""
        agreed, transport, session = self._agreed, self._open_transport, self._session
        assert agreed is not None
        assert transport is not None
        assert session is not None
        session.begun()
        session.expect(self._next_version(version), 0, self._part(agreed))
        transport.post(0)

    def _take_back(self, version: int | None, sent: bool) -> None:
        """Collective: the first bucket, which was staged ahead, is not to be. What some ranks may have sent must be
        received, and so all of it is."""
        if self._session is not None and not sent:
            self._send_ahead(version)
        assert self._open_transport is not None
        self._open_transport.withdraw(self._idle, Deadline(self._timeout_s))

    def _part(self, agreed: Agreement) -> int | None:
        """What of each bucket gets a digest in the next push."""
        if self._verify == "none":
            return None
        return WHOLE if self._verify == "full" or agreed.pushes == 0 else agreed.pushes % PARTS

    def _meet(self) -> RankGroup:
        """Collective. The ranks' own connections, made at the first push and after a failure."""
        if self._ranks is None:
            self._phase = "connect"
            is_root = not _distributed() or torch.distributed.get_rank() == 0
            self._hub = Hub() if is_root else None
            self._ranks = RankGroup(self._hub, self._timeout_s)
        else:
            self._ranks.begin("plan")
        return self._ranks

    def _call_in(self) -> tuple[EngineSession, list[Worker]]:
        """Rank 0: the engines' workers, who wait for messages until the session releases them."""
        if self._session is None:
            assert self._hub is not None
            engine = self._engine
            named = engine is not None or ENGINE_VARIABLE in os.environ
            if not named and isinstance(self._transport, SingleCopyTransport):
                engine = self._transport.engine_url()
            if self._failed is not None:
                self._failed.let_end()
                self._failed = None
            engines = connect(engine, self._timeout_s)
            ranks = self._ranks
            assert ranks is not None
            self._session = EngineSession(
                engines, self._hub, self._pause, self._timeout_s, check_ranks=lambda: ranks.idle(0.0)
            )
        workers = self._session.meet()
        self._last_version = max(self._last_version, self._session.last_version())
        return self._session, workers

    def _negotiate(self, ranks: RankGroup, manifest: Manifest, pieces: Sequence[Piece]) -> Agreement:
        """Collective. Agree with every engine worker on what travels, in which dtype, in which buckets, from where."""
        local = signature(pieces, self._policy)
        mine = place(pieces, ranks.rank)
        kind, gpu_uuid = describe_device(_device(mine))
        own = {
            "manifest": pack_manifest(manifest),
            "boot_id": boot_id(),
            "device": kind,
            "gpu_uuid": gpu_uuid,
            "placements": pack_placements(mine),
            "frozen": sorted({p.meta.name for p in pieces if self._policy.freezes(p.meta.name, p.trains)}),
        }
        everyone = ranks.gather(own, "plan")
        answer: dict[str, Any] | None = None
        if self._hub is not None:
            manifest = merge_manifests([unpack_manifest(row["manifest"]) for row in everyone])
            together = pairs(manifest) if self._quantize is not None else []
            if self._quantize is not None and not together:
                raise ConfigError(
                    f"quantize={self._quantize!r}, but none of the {len(manifest)} tensors is a matrix `....weight` "
                    "that is not named in TensorPolicy.unquantized"
                )
            session, workers = self._call_in()
            rank_infos = [
                WorkerInfo(f"trainer rank {n}", row["device"], row["gpu_uuid"], row["boot_id"])
                for n, row in enumerate(everyone)
            ]
            if self._open_transport is None:
                self._open_transport = self._new_transport()
            self._open_transport.check(rank_infos, [worker.info for worker in workers])
            plans = session.plan(pack_manifest(manifest))
            check_quantized(manifest, together, plans)
            check_plans(manifest, plans, self._padded)
            travelling = wire_manifest(manifest, plans, self._policy, {name for pair in together for name in pair})
            buckets, last = cut(self._bucketer, travelling, plans, together, frozen_everywhere(everyone))
            answer = {
                "manifest": pack_manifest(travelling),
                "buckets": [list(bucket.names) for bucket in buckets],
                "frozen": sorted(last),
                "placements": [row for rows in everyone for row in rows["placements"]],
                "reads": [pack_reads(travelling, plan) for plan in plans],
                "host": session.host,
                "roads": {road: sum(plan.roads[road] for plan in plans) for road in plans[0].roads},
            }
        answer = ranks.share(answer, "plan")
        assert answer is not None
        if self._open_transport is None:
            self._open_transport = self._new_transport()
        transport = self._open_transport
        travelling = unpack_manifest(answer["manifest"])
        shipment = Shipment(
            travelling,
            tuple(tuple(names) for names in answer["buckets"]),
            tuple(unpack_placements(answer["placements"])),
            tuple(unpack_reads(rows) for rows in answer["reads"]),
            answer["host"],
            frozenset(answer["frozen"]),
            as_cut=isinstance(self._bucketer, ParameterBucketer),
        )
        self._phase = "connect"
        offer = transport.prepare(shipment, mine, ranks)
        self._last_version = max(self._last_version, offer.newest)
        once = frozen_buckets(offer.buckets, shipment.frozen)
        storages = [transport.storages(worker) for worker in range(len(shipment.reads))]
        own_spans = transport.spans() if self._verify != "none" else []
        everyone = ranks.gather({"storages": storages, "spans": own_spans}, "connect")
        told: list[list[list[int]]] = []
        if self._session is not None:
            session = self._session
            spans = spans_by_bucket([row["spans"] for row in everyone], len(offer.buckets))
            told = spans_told(spans, offer.placements)
            messages = [
                Connect(
                    transport=transport.name,
                    storages=[storage for row in everyone for storage in row["storages"][number]],
                    placements=pack_placements(offer.placements[number]),
                    buckets=[list(names) for names in offer.buckets],
                    once=once,
                    spans=[spans[bucket][n] for bucket, numbers in enumerate(told[number]) for n in numbers],
                    fields={**offer.fields, **transport.invite(number)},
                )
                for number in range(len(session.workers))
            ]
            session.connect(messages, transport.join)
            session.release("init")
        else:
            transport.join(Deadline(self._timeout_s))
        ranks.share(None, "connect")
        transport.joined()
        nbytes = [sum(travelling[name].nbytes for name in names) for names in offer.buckets]
        digested = [len(rows) for rows in spans_by_bucket([own_spans], len(offer.buckets))]
        return Agreement(pieces, local, offer.buckets, nbytes, once, answer["roads"], digested, told)

    def _next_version(self, version: int | None, newest: int = 0) -> int:
        self._last_version = max(self._last_version, newest)
        if version is None:
            return self._last_version + 1
        if version <= self._last_version:
            raise ConfigError(
                f"version {version} is not newer than {self._last_version}, which was pushed already: versions only "
                f"grow. Leave `version` out, or give at least {self._last_version + 1}"
            )
        return version

    def _new_transport(self) -> Transport:
        if isinstance(self._transport, str):
            return make_transport(self._transport, timeout_s=self._timeout_s)
        assert not isinstance(self._transport, (LoraTransport, SingleCopyTransport))
        return self._transport

    def _collect(self, session: EngineSession) -> list[Loaded]:
        with self._in_phase("load"):
            return session.loaded()

    def _idle(self, seconds: float) -> None:
        """Between polls of a transport's wait: notice a rank or a worker that has failed."""
        assert self._ranks is not None
        self._ranks.idle(seconds)
        if self._session is not None:
            self._session.idle()

    def _give_up(self, error: WeightSyncError) -> WeightSyncError:
        """After any failure, on any rank: everyone learns of it, and everything is taken down. The next push starts
        anew. Gives the error to raise."""
        try:
            if self._ranks is not None:
                error = self._ranks.fail(error)
            if self._session is not None:
                self._session.fail(error)
                self._failed = self._session
        finally:
            self._disconnect()
        return error

    @contextmanager
    def _in_phase(self, phase: str) -> Iterator[None]:
        self._phase = phase
        yield


_UNCHOSEN = {"bucketer": None, "max_bytes": None, "verify": "sampled", "pause": "keep"}


def _without_effect(transport: object) -> tuple[str, ...]:
    """The options of a `WeightSync` that say nothing to this way. Pure."""
    if isinstance(transport, SingleCopyTransport):
        return "bucketer", "max_bytes", "verify"  # nothing is sent
    if isinstance(transport, LoraTransport) or (isinstance(transport, CheckpointTransport) and transport.restart):
        return tuple(_UNCHOSEN)  # files, which vLLM loads
    return ()


def _check_version(version: object) -> None:
    if version is not None and not isinstance(version, int):
        raise ConfigError(f"version={version!r}; it must be a whole number, or None for the next")


def _device(placed: Mapping[Placement, Region]) -> torch.device:
    """Where this rank's tensors are; for one that holds none, where its process group works."""
    if placed:
        return next((r.tensor.device for r in placed.values() if r.tensor.is_cuda), torch.device("cpu"))
    on_gpu = _distributed() and torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _worker_reports(
    session: EngineSession, loads: Sequence[Loaded], commit_s: Sequence[float]
) -> tuple[WorkerReport, ...]:
    count = len(session.workers)
    reports = []
    for number, worker in enumerate(session.workers):
        own = loads[number::count]
        reports.append(
            WorkerReport(
                name=worker.channel.peer,
                nbytes=sum(load.nbytes for load in own),
                transfer_s=sum(load.transfer_s for load in own),
                verify_s=sum(load.verify_s for load in own),
                load_s=sum(load.load_s for load in own) + commit_s[number],
            )
        )
    return tuple(reports)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
