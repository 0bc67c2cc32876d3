"""`WeightSync`: one object, one verb."""

from __future__ import annotations

import logging
import os
import re
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weightsync.bucketing import Bucketer, ParameterBucketer, lasting, make_bucketer, split
from weightsync.channel import Deadline, Hub
from weightsync.checkpoint.restart import push_and_restart
from weightsync.checkpoint.save import save
from weightsync.engines import ENGINE_VARIABLE, LoraAdapter, connect
from weightsync.errors import ConfigError, EngineError, ManifestError, ProtocolError, WeightSyncError, foreign
from weightsync.kernels.digest import PARTS, WHOLE
from weightsync.layout import Box, Manifest, Placement, TensorMeta, connected, coverage, itemsize, merge_manifests
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
from weightsync.transports.base import Reads, Region, Shipment, Transport, WorkerInfo
from weightsync.transports.checkpoint import CheckpointTransport
from weightsync.transports.lora import LoraTransport
from weightsync.transports.single_copy import SingleCopyTransport
from weightsync.wire import (
    Connect,
    Loaded,
    Planned,
    pack_manifest,
    pack_placements,
    unpack_manifest,
    unpack_placements,
)

if TYPE_CHECKING:
    from weightsync.single_copy import AttachedModel, Export

logger = logging.getLogger(__name__)

SLOTS = 2
"""Buckets that may be under way at once: one being read, one being filled."""
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
    engine: an `LLM`, an `AsyncLLM`, a Ray actor handle of either, an "http://..." address, or a list of these; only
        rank 0's is used. None means $WEIGHTSYNC_ENGINE, or else http://localhost:8000; with single_copy, the engine
        whose `vllm_bridge_config.json` is found (see `weightsync.bridge.find`).
    bucketer: "module", "threshold" or "parameter", or an object with a `bucket` method; None means modules for ipc,
        full buckets for all else and for backend="megatron".
    max_bytes: the size of a bucket, 256 MiB when None. What fuses into one engine parameter may be larger, and then a
        broadcast has others as large.
    policy: which tensors travel, how often, and in which dtype; None means all of them, at every push, in the dtype
        that the engine holds.
    pause: what happens to requests that are running: "keep" freezes them and recomputes their KV cache with the new
        weights, "wait" lets them finish first, "abort" ends them.
    timeout_s: the longest that any single wait may last.
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
        self._agreed: _Agreement | None = None
        self._attached: AttachedModel | None = None
        self._shareable: Manifest | None = None
        self._last_version = 0
        self._phase = "connect"
        self.last_report: PushReport | None = None
        """What the last `push` or `writing` that succeeded came to, on every rank."""

    def push(self, model: Model, version: int | None = None) -> PushReport:
        """Collective: every trainer rank calls this. Make every engine serve `model`'s weights of this moment.

        `version` must be greater than any that an engine has been given; None takes the next. Returns the same report
        on every rank. Raises `WeightSyncError`s (see `weightsync.errors`), the same one on every rank.
        """
        if isinstance(self._transport, SingleCopyTransport):
            if self._attached is None or self._attached.model is not model:
                raise ConfigError("single_copy pushes the model that was given to `attach`, and this is another")
            with self.writing(version):
                pass
            assert self.last_report is not None
            return self.last_report
        with self._as_one():
            if isinstance(self._transport, CheckpointTransport) and self._transport.restart:
                ranks = self._meet()
                save_to = partial(save, model, timeout_s=self._timeout_s, **self._saving)
                self.last_report = push_and_restart(
                    self._transport, self._engine, ranks, save_to, version, self._timeout_s
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
            self._transport.check(hosts, [worker.info for worker in workers])
            _check_plans(manifest, session.plan(pack_manifest(manifest)), False)
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
            likely = self._is_likely_unchanged(model)
            # Together, since no engine is paused for ranks that have yet to come.
            ahead = ranks.share(all(ranks.gather(likely and self._is_ready(), "plan")), "plan")
            began = self._begin(version) if likely else None
            ahead = ahead and self._stage_ahead()
            sent = ahead and self._session is not None and self._session.has_begun()
            if sent:  # or what takes longer than to look is not waited for
                self._send_ahead(version)
            pieces = self._sender.pieces(model)
            if self._agreed is not None and self._agreed.pieces is pieces:
                local = self._agreed.local
            else:
                local = _signature(pieces, self._policy)
            unchanged = self._agreed is not None and self._agreed.local == local
            if unchanged and self._agreed is not None and self._agreed.pieces is not pieces:
                self._agreed.rest_on(pieces)
            if ranks.share(not all(ranks.gather(unchanged, "plan")), "plan"):
                if ahead:
                    self._take_back(version, sent)
                    sent = False
                if began is not None and self._session is not None:
                    self._session.withdraw()
                self._agreed = began = None
                self._agreed = self._negotiate(ranks, self._sender.manifest(model), pieces, local)
            if began is None:
                began = self._begin(version)
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

    def _is_likely_unchanged(self, model: Model) -> bool:
        """Whether to let the engines get ready before it is known that nothing has moved: it was so the last time, and
        to take it back ends nobody's request."""
        agreed = self._agreed
        return agreed is not None and agreed.pushes > 1 and agreed.model == id(model) and self._pause == "keep"

    def _is_ready(self) -> bool:
        """Whether what was agreed on can be read before it is known to be the model: none of it is computed, and its
        memory is there, which goes away under it where storages are emptied, as those do that offload a model."""
        return self._agreed is not None and self._agreed.holds_its_memory()

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

    def _part(self, agreed: _Agreement) -> int | None:
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

    def _negotiate(
        self, ranks: RankGroup, manifest: Manifest, pieces: Sequence[Piece], local: _Signature
    ) -> _Agreement:
        """Collective. Agree with every engine worker on what travels, in which dtype, in which buckets, from where."""
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
            _check_quantized(manifest, together, plans)
            _check_plans(manifest, plans, self._padded)
            travelling = self._wire_manifest(manifest, plans, {name for pair in together for name in pair})
            groups = connected(
                (name, (n, g)) for n, plan in enumerate(plans) for g, names in enumerate(plan.groups) for name in names
            )
            groups += together
            reloads = [names for plan in plans for names in plan.reloads]
            last = lasting(travelling, _frozen(everyone), [*groups, *reloads])
            if len(last) == len(travelling):
                raise ConfigError(f"all {len(last)} tensors are frozen: there is nothing for a second push to change")
            buckets = split(self._bucketer, travelling, groups, last)
            if apart := [w for w, scale in together if not any({w, scale} <= {*b.names} for b in buckets)]:
                raise ConfigError(
                    f"the bucketer tears {len(apart)} quantised weights from their scales, such as {apart[0]}; use "
                    'bucketer="module" or "threshold"'
                )
            answer = {
                "manifest": pack_manifest(travelling),
                "buckets": [list(bucket.names) for bucket in buckets],
                "frozen": sorted(last),
                "placements": [row for rows in everyone for row in rows["placements"]],
                "reads": [_reads(travelling, plan) for plan in plans],
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
            tuple(_unpack_reads(rows) for rows in answer["reads"]),
            answer["host"],
            frozenset(answer["frozen"]),
            as_cut=isinstance(self._bucketer, ParameterBucketer),
        )
        self._phase = "connect"
        offer = transport.prepare(shipment, mine, ranks)
        self._last_version = max(self._last_version, offer.newest)
        once = _frozen_buckets(offer.buckets, shipment.frozen)
        storages = [transport.storages(worker) for worker in range(len(shipment.reads))]
        own_spans = transport.spans() if self._verify != "none" else []
        everyone = ranks.gather({"storages": storages, "spans": own_spans}, "connect")
        told: list[list[list[int]]] = []
        if self._session is not None:
            session = self._session
            spans = _by_bucket([row["spans"] for row in everyone], len(offer.buckets))
            told = _told(spans, offer.placements)
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
        digested = [len(rows) for rows in _by_bucket([own_spans], len(offer.buckets))]
        return _Agreement(pieces, local, offer.buckets, nbytes, once, answer["roads"], digested, told)

    def _wire_manifest(self, manifest: Manifest, plans: Sequence[Planned], as_it_is: Set[str]) -> Manifest:
        """The manifest with the dtypes that travel: what the policy declares, else what the trainer has, or what all
        engines hold where that is narrower (a cast to a wider dtype is exact, and cheaper on the engine's side).
        What is named in `as_it_is` keeps the manifest's."""
        held: dict[str, str] = {}  # the widest, so that no engine gets less than it holds
        for plan in plans:
            for name, kind in plan.used.items():
                held[name] = max(held.get(name, kind), kind, key=itemsize)
        tensors, wrong = [], {}
        for meta in manifest:
            dtype = meta.dtype if meta.name in as_it_is else self._policy.wire_dtype(meta.name)
            if dtype is None:
                alike = all(plan.used.get(meta.name, held[meta.name]) == held[meta.name] for plan in plans)
                dtype = held[meta.name] if alike and itemsize(held[meta.name]) < itemsize(meta.dtype) else meta.dtype
            if _is_float(dtype) != _is_float(meta.dtype) or _is_float(dtype) != _is_float(held[meta.name]):
                wrong[meta.name] = f"the trainer has {meta.dtype}, the engine holds {held[meta.name]}"
            tensors.append(TensorMeta(meta.name, meta.shape, dtype))
        if wrong:
            raise ManifestError(
                f"{len(wrong)} tensors have a dtype that the engine cannot take, such as {_first(wrong)}",
                mismatched=wrong,
            )
        return Manifest(tuple(tensors))

    def _next_version(self, version: int | None, newest: int = 0) -> int:
        self._last_version = max(self._last_version, newest)
        if version is None:
            return self._last_version + 1
        if version <= self._last_version:
            raise ConfigError(f"version {version} is not newer than {self._last_version}: versions only grow")
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


_Signature = list[tuple[Any, ...]]


class _Agreement:
    """What was agreed in a negotiation, and the local facts that it rests on. `once` of the buckets, the last ones, are
    frozen; `pushes` counts those that every engine has committed since, the first of all buckets; `model` is the `id`
    of what was pushed last. `digested` counts the spans of each bucket on this rank; `told` has, on rank 0, for each
    worker and bucket, which of the ranks' digests are its."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        local: _Signature,
        buckets: Sequence[Sequence[str]],
        bucket_bytes: list[int],
        once: int,
        roads: dict[str, int],
        digested: Sequence[int],
        told: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        self.rest_on(pieces)
        self.local = local
        self.buckets = buckets
        self.bucket_bytes = bucket_bytes
        self.once = once
        self.roads = roads
        self.digested = digested
        self.told = told
        self.pushes = 0
        self.model: int | None = None

    def rest_on(self, pieces: Sequence[Piece]) -> None:
        """These pieces are what was agreed on; perhaps in other objects than before."""
        self.pieces = pieces
        self._tensors = [p.tensor for p in pieces]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._computes = any(p.compute is not None for p in pieces)

    def holds_its_memory(self) -> bool:
        """Whether all that was agreed on still lies where it did, though the model may consist of something else."""
        return not self._computes and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses

    def due(self) -> list[int]:
        """The bytes of each bucket of the next push."""
        return self.bucket_bytes[: len(self.bucket_bytes) - (self.once if self.pushes else 0)]

    def check(self, bucket: int, part: int | None, digests: Sequence[int]) -> None:
        """Raise `ProtocolError` unless a transport gives this rank's digests as it has announced them."""
        expected = 0 if part is None else self.digested[bucket]
        if len(digests) != expected:
            raise ProtocolError(f"the transport gave {len(digests)} digests of bucket {bucket}, expected {expected}")

    def by_worker(self, bucket: int, digests: bytes) -> list[bytes]:
        """Of the digests of all ranks' spans of a bucket, those for each worker."""
        return [
            digests if 8 * len(numbers) == len(digests) else b"".join(digests[8 * n : 8 * n + 8] for n in numbers)
            for numbers in (buckets[bucket] for buckets in self.told)
        ]


def _device(placed: Mapping[Placement, Region]) -> torch.device:
    """Where this rank's tensors are; for one that holds none, where its process group works."""
    if placed:
        return next((r.tensor.device for r in placed.values() if r.tensor.is_cuda), torch.device("cpu"))
    on_gpu = _distributed() and torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _signature(pieces: Sequence[Piece], policy: TensorPolicy) -> _Signature:
    """Compares equal as long as the tensors that this rank holds, the place of each in its memory, which are computed,
    and which are frozen, stay what they are. All ranks' together tell of every tensor of the model."""
    return [
        (
            p.meta,
            p.box,
            p.tensor.data_ptr(),
            p.tensor.stride(),
            p.tensor.device,
            p.compute is not None,
            policy.freezes(p.meta.name, p.trains),
        )
        for p in pieces
    ]


def _frozen(everyone: Sequence[dict[str, Any]]) -> set[str]:
    """What is frozen on every rank that holds any of it."""
    changing = [{row[0] for row in own["placements"]}.difference(own["frozen"]) for own in everyone]
    return set().union(*(own["frozen"] for own in everyone)).difference(*changing)


def _frozen_buckets(buckets: Sequence[Sequence[str]], frozen: frozenset[str]) -> int:
    """How many of the buckets, counted from the end, hold nothing but what is frozen."""
    return next((n for n, names in enumerate(reversed(buckets)) if not frozen.issuperset(names)), len(buckets))


def _by_bucket(spans: Sequence[Sequence[list[int]]], buckets: int) -> list[list[list[int]]]:
    """The rows of all ranks' spans, rank after rank in each bucket: the order in which their digests come. Raises
    `ProtocolError` for those of no bucket."""
    found: list[list[list[int]]] = [[] for _ in range(buckets)]
    for row in (row for rows in spans for row in rows):
        if not 0 <= row[0] < buckets:
            raise ProtocolError(f"the transport announced digests of bucket {row[0]}, of {buckets}")
        found[row[0]].append(row)
    return found


def _told(spans: Sequence[Sequence[list[int]]], placements: Sequence[Sequence[Placement]]) -> list[list[list[int]]]:
    """For each worker and bucket, the numbers of those spans that are of storages which the worker is told of."""
    of_storage: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for bucket, rows in enumerate(spans):
        for number, (_, rank, storage, *_) in enumerate(rows):
            of_storage[rank, storage].append((bucket, number))
    found: list[list[list[int]]] = []
    for own in placements:
        found.append([[] for _ in spans])
        for known in {(p.rank, p.storage) for p in own}:
            for bucket, number in of_storage.get(known, ()):
                found[-1][bucket].append(number)
        for numbers in found[-1]:
            numbers.sort()
    return found


def _check_quantized(manifest: Manifest, together: Sequence[tuple[str, str]], plans: Sequence[Planned]) -> None:
    """Raise one `ManifestError` for all weights, each with the name of its scales, that come quantised to an engine
    which has no place for them so."""
    used = {name for plan in plans for name in plan.used}
    wrong = {}
    for weight, scale in together:
        kinds = {plan.used[weight] for plan in plans if weight in plan.used}
        if weight in used and (scale not in used or kinds != {manifest[weight].dtype}):
            wrong[weight] = f"quantised to {manifest[weight].dtype}, the engine loads {' or '.join(sorted(kinds))}"
    if wrong:
        raise ManifestError(
            f"{len(wrong)} weights come quantised, and the engine does not load them so: {_first(wrong)}. Start the "
            "engine from a compressed-tensors checkpoint that has a scale for each output channel, name in "
            "TensorPolicy.unquantized what that leaves as it is, or push without `quantize`. Nothing was written",
            mismatched=wrong,
        )


def _check_plans(manifest: Manifest, plans: Sequence[Planned], padded: bool) -> None:
    """Raise one `ManifestError` for all that is missing, misshapen, or without a place on any engine worker. `padded`:
    the vocabulary comes with whatever padding the trainer has."""
    mismatched = {name: reason for plan in plans for name, reason in plan.refused.items()}
    used = set().union(*(plan.used for plan in plans))
    mismatched |= _unread(manifest, plans)
    unexpected = [name for name in manifest.names if name not in used and name not in mismatched]
    missing = list(dict.fromkeys(name for plan in plans for name in (plan.hints or plan.missing)))
    if set(mismatched) & set(missing):  # what a refused tensor would have filled is no second fault
        missing = [name for name in missing if name not in mismatched]
    elif mismatched and not any(plan.hints for plan in plans):
        missing = []
    if not (missing or unexpected or mismatched):
        return
    parts = []
    if missing:
        parts.append(f"missing {len(missing)}: {_some(missing)}")
        if absent := _absent_layers(missing, manifest):
            parts.append(f"nothing came of {_some(absent)}: did every pipeline stage push, with all of its chunks?")
    if mismatched:
        parts.append(f"not fitting {len(mismatched)}: {_some([f'{n} ({r})' for n, r in mismatched.items()])}")
        if padded and any(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in mismatched):
            parts.append(
                "Megatron pads the vocabulary: say how many rows the checkpoint has, WeightSync(vocab_size=...)"
            )
    if unexpected:
        parts.append(
            f"unexpected {len(unexpected)}: {_some(unexpected)} (leave them out with TensorPolicy(exclude=...), or "
            "check that trainer and engine have the same model)"
        )
    raise ManifestError(
        f"the trainer's tensors do not fit the engine's model; {'; '.join(parts)}. Nothing was written",
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
    )


def _reads(manifest: Manifest, plan: Planned) -> dict[str, list[Any]]:
    """Which regions a worker reads, by name of the tensor, as (start, size)."""
    return {
        name: plan.partial.get(name, [[(0,) * len(manifest[name].shape), manifest[name].shape]]) for name in plan.used
    }


def _unpack_reads(rows: Mapping[str, Sequence[Any]]) -> Reads:
    return {name: tuple(Box(tuple(start), tuple(size)) for start, size in boxes) for name, boxes in rows.items()}


def _absent_layers(missing: Sequence[str], manifest: Manifest) -> list[str]:
    """The numbered modules ("model.layers.3") that tensors are missing from, and of which there is none at all."""
    came = {_layer(name) for name in manifest.names}
    return list(dict.fromkeys(layer for name in missing if (layer := _layer(name)) and layer not in came))


def _layer(name: str) -> str | None:
    found = re.match(r"\D+\.\d+(?=\.)", name)
    return found[0] if found else None


def _unread(manifest: Manifest, plans: Sequence[Planned]) -> dict[str, str]:
    """Tensors of which some region is read by no worker: a loader that takes its slice of a tensor which is too large
    does not complain."""
    found = {}
    for name in set().union(*(plan.partial for plan in plans)):
        readers = [plan for plan in plans if name in plan.used]
        if all(name in plan.partial for plan in readers):
            boxes = [Box(tuple(start), tuple(size)) for plan in readers for start, size in plan.partial[name]]
            if holes := coverage(manifest[name].shape, boxes)[0]:
                found[name] = (
                    f"shape {manifest[name].shape}: the engine has no place for {_some([str(h) for h in holes])}"
                )
    return found


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


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def _first(items: dict[str, str]) -> str:
    name = next(iter(items))
    return f"{name}: {items[name]}"


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
