"""A push of an adapter alone: gathered to trainer rank 0, written as PEFT's files, loaded by every engine under a new
name, and older ones unloaded when nobody uses them any more.

Nothing is paused and no cache is reset. A request keeps the adapter that it began with, and what an engine caches of an
adapter it keeps under the adapter's name, which is never used again.
"""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weightsync.bucketing import ThresholdBucketer
from weightsync.checkpoint.beside import files_beside
from weightsync.checkpoint.files import check_whole, create, memory_of, publish, write
from weightsync.checkpoint.shards import Shards, lay_out
from weightsync.deadline import Deadline
from weightsync.engines import AdapterEngine, LoraAdapter, connect
from weightsync.errors import ConfigError, EngineError, PlacementError, UnsupportedError, WeightSyncError, foreign
from weightsync.layout import Box, Manifest, Placement, choose_owners, merge_manifests, row_major
from weightsync.machine import address_facing
from weightsync.placing import place
from weightsync.ranks import RankGroup
from weightsync.report import PushReport, WorkerReport
from weightsync.senders.base import Model, Sender
from weightsync.transports.base import Region
from weightsync.transports.lora import AdapterFolder, LoraTransport
from weightsync.wire import pack_manifest, pack_placements, unpack_manifest, unpack_placements

if TYPE_CHECKING:
    from weightsync.senders.lora import Lora

logger = logging.getLogger(__name__)

_FILE = "adapter_model.safetensors"
_BUCKET_BYTES = 32 * 2**20
"""Gathered at once; a larger factor has a bucket of its own."""
_FAREWELL_S = 5.0
"""How long engines may take to forget adapters that are no longer wanted."""


class LoraPush:
    """What `WeightSync` does with a `LoraTransport`. Rank 0 has the folder and calls the engines; the others only give
    what they hold of the adapter."""

    def __init__(self, transport: LoraTransport, sender: Sender, engine: Any, timeout_s: float) -> None:
        self.adapter: LoraAdapter | None = None
        self._transport = transport
        self._sender = sender
        self._engine = engine
        self._timeout_s = timeout_s
        self._engines: list[AdapterEngine] = []
        self._folder: AdapterFolder | None = None
        self._loaded: list[LoraAdapter] = []  # the oldest first; also those of trainers before, which may be
        self._unloaded: list[LoraAdapter] = []  # whose files are still there

    def push(
        self,
        ranks: RankGroup,
        model: Model,
        choose_version: Callable[[int], int],
        in_phase: Callable[[str], AbstractContextManager[None]],
    ) -> PushReport:
        """Collective: every trainer rank calls this. `choose_version` gets the newest version that is known and gives
        the next one. When this raises, every engine has the adapters that it had."""
        started = time.perf_counter()
        with in_phase("plan"):
            lora, shards, mine, version = self._plan(ranks, model, choose_version)
        planned = time.perf_counter()
        incoming = None if self._folder is None else self._folder.incoming()  # on rank 0
        outcome: list[Any] | None = None
        try:
            with in_phase("gather"):
                _gather(ranks, shards, mine, lora.config, incoming)
            gathered = time.perf_counter()
            if incoming is not None:
                with in_phase("load"):
                    adapter, workers = self._deliver(incoming, version, shards.manifest.nbytes)
                report = PushReport(
                    version=version,
                    nbytes=shards.manifest.nbytes,
                    buckets=len(shards.buckets),
                    plan_s=planned - started,
                    control_s=planned - started,
                    gather_s=gathered - planned,
                    load_s=max(worker.load_s for worker in workers),
                    total_s=time.perf_counter() - started,
                    workers=workers,
                )
                logger.info("pushed the adapter %s, %s", adapter.name, report)
                outcome = [asdict(report), list(adapter)]
        finally:
            if incoming is not None:
                shutil.rmtree(incoming, ignore_errors=True)
        with in_phase("load"):
            fields, adapter_fields = ranks.share(outcome, "load")
        self.adapter = LoraAdapter(*adapter_fields)
        return PushReport.from_dict(fields)

    def close(self) -> None:
        """Not collective. What lies in memory is unloaded and given back; what lies in a folder of the user's stays, as
        do the adapters that engines have loaded from there."""
        if self._folder is not None:
            if self._folder.is_private:
                self._give_back(self._folder)
            self._folder.close()
        self._folder, self.adapter = None, None
        self._engines, self._loaded, self._unloaded = [], [], []

    def _plan(
        self, ranks: RankGroup, model: Model, choose_version: Callable[[int], int]
    ) -> tuple[Lora, Shards, dict[Placement, Region], int]:
        """Collective. The adapter, the file that it will be, what of it this rank gives, and its version."""
        from weightsync.senders.lora import read_lora  # FSDP costs more to import than all the rest
        from weightsync.senders.tensors import ModuleSender

        assert isinstance(self._sender, ModuleSender)
        lora = read_lora(self._sender, model)
        held = place(lora.pieces, ranks.rank)
        everyone = ranks.gather([pack_manifest(lora.manifest), pack_placements(held)], "plan")
        answer = None
        if ranks.rank == 0:
            manifest = merge_manifests([unpack_manifest(rows) for rows, _ in everyone])
            placements = unpack_placements([row for _, rows in everyone for row in rows])
            check_whole(manifest, placements)
            self._open(lora.rank)
            version = choose_version(self._newest())
            answer = [pack_manifest(manifest), pack_placements(choose_owners(placements)), version]
        rows, owners, version = ranks.share(answer, "plan")
        mine = {placement: held[placement] for placement in unpack_placements(owners) if placement.rank == ranks.rank}
        return lora, _lay_out(unpack_manifest(rows)), mine, version

    # The rest is rank 0's.

    def _open(self, rank: int) -> None:
        """Everything that can be refused before anything is written."""
        if not self._engines:
            self._engines = [_with_adapters(engine) for engine in connect(self._engine, self._timeout_s)]
        for engine in self._engines:
            most = engine.max_lora_rank()
            if most is not None and rank > most:
                raise ConfigError(
                    f"the adapter has rank {rank}, and the engine was started for at most {most}; start it with "
                    f"max_lora_rank={rank}, or train with a smaller one",
                    who=engine.name,
                )
        if self._folder is None:
            for engine in self._engines:
                engine.adapters_in_use()  # or nobody would know when an adapter may go
                if self._transport.folder is None and not _is_here(engine.host):
                    raise PlacementError(
                        f"adapters in memory of this host cannot be read on {engine.host}; give a folder that both "
                        "see: LoraTransport(folder=...)",
                        who=engine.name,
                    )
            folder = AdapterFolder(self._transport)
            try:
                self._loaded = [_adapter(path) for path in folder.earlier()]
            except OSError as error:
                folder.close()
                raise PlacementError(f"cannot read the adapters in {folder.path}: {error}") from error
            self._folder = folder

    def _newest(self) -> int:
        """The newest version that the user's folder has."""
        assert self._folder is not None
        if self._folder.is_private:
            return 0
        return max((self._folder.version(adapter.name) or 0 for adapter in self._loaded), default=0)

    def _deliver(self, incoming: Path, version: int, nbytes: int) -> tuple[LoraAdapter, tuple[WorkerReport, ...]]:
        """Give the adapter its name, let every engine load it, and let go of what is too old."""
        assert self._folder is not None
        adapter = _adapter(self._folder.named(version))
        for engine in self._engines:
            if engine.has_adapter(adapter):
                raise EngineError(
                    f"the engine has an adapter with the id {adapter.id} of {adapter.name}; push again, for another id",
                    who=engine.name,
                )
        publish(incoming, Path(adapter.path))
        self._loaded.append(adapter)
        with ThreadPoolExecutor(len(self._engines)) as pool:
            calls = [pool.submit(_load, engine, adapter, nbytes) for engine in self._engines]
        if any(call.exception() is not None for call in calls):
            self._take_back(adapter)
            raise _failure(adapter, self._engines, [call.exception() for call in calls])
        self._retire()
        return adapter, tuple(call.result() for call in calls)

    def _retire(self) -> None:
        """Remove the files of what was unloaded at an earlier push, and unload what is too old, unless a request uses
        it: an engine that has no room for all adapters at once loads those in use from their files again. What fails
        here is logged, and comes again at the next push: the new adapter is there nevertheless."""
        try:
            in_use = set().union(*(engine.adapters_in_use() for engine in self._engines))
        except WeightSyncError as error:
            logger.warning("cannot let go of older adapters yet: %s", error)
            return
        due = [(self._remove, adapter) for adapter in self._unloaded]
        due += [(self._unload, adapter) for adapter in self._loaded[: -self._transport.keep_last]]
        for retire, adapter in due:
            if adapter.name not in in_use:
                try:
                    retire(adapter)
                except (WeightSyncError, OSError) as error:
                    logger.warning("cannot let go of the adapter %s yet: %s", adapter.name, error)

    def _remove(self, adapter: LoraAdapter) -> None:
        assert self._folder is not None
        self._folder.remove(Path(adapter.path))
        self._unloaded.remove(adapter)

    def _unload(self, adapter: LoraAdapter) -> None:
        for engine in self._engines:
            engine.unload_adapter(adapter)
        self._loaded.remove(adapter)
        self._unloaded.append(adapter)

    def _take_back(self, adapter: LoraAdapter) -> None:
        """After a failure: no engine is to have it. Its files go when all have said that they do not; or else it is
        unloaded as others are, when it is old."""
        if _forgotten(self._engines, [adapter]):
            shutil.rmtree(adapter.path, ignore_errors=True)
            self._loaded.remove(adapter)

    def _give_back(self, folder: AdapterFolder) -> None:
        if _forgotten(self._engines, self._loaded + self._unloaded):
            shutil.rmtree(folder.path, ignore_errors=True)
        else:
            logger.warning(
                "the adapters in %s may still be in use, and stay there until another trainer on this host pushes "
                "adapters",
                folder.path,
            )


def _forgotten(engines: Sequence[AdapterEngine], adapters: Sequence[LoraAdapter]) -> bool:
    """Let engines forget adapters, in a few seconds at most. Whether all have, and no request uses any."""
    forgotten: list[AdapterEngine] = []

    def forget(engine: AdapterEngine) -> None:
        with suppress(WeightSyncError):
            if engine.is_alive():
                for adapter in adapters:
                    engine.unload_adapter(adapter)
                if engine.adapters_in_use() & {adapter.name for adapter in adapters}:
                    return
            forgotten.append(engine)

    deadline = Deadline(_FAREWELL_S)
    threads = [threading.Thread(target=forget, args=(engine,), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.left_s())
    return len(forgotten) == len(engines)


def _with_adapters(engine: object) -> AdapterEngine:
    if not isinstance(engine, AdapterEngine):
        raise UnsupportedError(
            f"{engine!r} takes no adapters; see weightsync.engines.AdapterEngine for the methods that it lacks"
        )
    return engine


def _is_here(host: str) -> bool:
    address = socket.gethostbyname(host)
    return address == address_facing(address)


def _adapter(path: Path) -> LoraAdapter:
    """The adapter at `path`, with an id that follows from its name."""
    return LoraAdapter(path.name, 1 + zlib.crc32(path.name.encode()) % (2**31 - 1), str(path))


def _lay_out(manifest: Manifest) -> Shards:
    """One file, with the name that PEFT gives it."""
    shards = lay_out(manifest, _buckets(manifest), manifest.nbytes)
    return replace(shards, files=(replace(shards.files[0], name=_FILE),))


def _buckets(manifest: Manifest) -> list[tuple[str, ...]]:
    """What is gathered one after the other."""
    return [tuple(bucket.names) for bucket in ThresholdBucketer(_BUCKET_BYTES).bucket(manifest, None)]


def _gather(
    ranks: RankGroup, shards: Shards, mine: Mapping[Placement, Region], config: Any, incoming: Path | None
) -> None:
    """Collective. Every rank gives its regions, of one bucket after the other, and rank 0 writes them to `incoming`."""
    if incoming is not None:
        create(incoming, shards, files_beside([config], shards.manifest))
    for number, names in enumerate(map(set, _buckets(shards.manifest))):
        ranks.share(None, "gather")  # or nobody would learn of a rank that has failed
        own = [
            [placement.name, list(placement.box.start), list(placement.box.size), _bytes(region.read())]
            for placement, region in mine.items()
            if placement.name in names and placement.box.numel
        ]
        rows = [row for rank_rows in ranks.gather(own, "gather") for row in rank_rows]
        if incoming is not None:
            write(incoming, shards, number, (_region(shards.manifest, *row) for row in rows), part=None)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(memory_of(tensor.to("cpu").contiguous().view(-1).view(torch.uint8)))


def _region(
    manifest: Manifest, name: str, start: list[int], size: list[int], content: bytes
) -> tuple[Placement, torch.Tensor]:
    dtype = manifest[name].dtype
    values = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).view(size)
    box = Box(tuple(start), tuple(size))
    return Placement(name, box, 0, 0, 0, row_major(box.size), dtype), values


def _load(engine: AdapterEngine, adapter: LoraAdapter, nbytes: int) -> WorkerReport:
    started = time.perf_counter()
    engine.load_adapter(adapter)
    return WorkerReport(engine.name, nbytes, 0.0, 0.0, time.perf_counter() - started)


def _failure(
    adapter: LoraAdapter, engines: Sequence[AdapterEngine], errors: Sequence[BaseException | None]
) -> WeightSyncError:
    """The first engine's error, with what became of the others."""
    loaded = [engine.name for engine, error in zip(engines, errors, strict=True) if error is None]
    who, first = next((engine.name, error) for engine, error in zip(engines, errors, strict=True) if error is not None)
    problem = foreign(first, who=who, phase="load")
    problem.message += f". The adapter was in {adapter.path}, where the engine must see it"
    if loaded:
        problem.message += f"; it was taken back from {', '.join(loaded)}"
    problem.message += ". The adapters before it are untouched"
    return problem
