"""Push a LoRA adapter alone: the strategy of `"lora"` and `LoraTransport`.

Every rank writes its shards into PEFT's files, in memory (`/dev/shm`) or in a folder. Every engine loads them under a
new name. Older adapters are unloaded once no request uses them. Engines do not pause or reset a cache: a request keeps
its first adapter, and an engine caches under the adapter's name. A name is never used again.

    folder/policy-7-3f2a9c01/       version 7 of "policy": adapter_model.safetensors, adapter_config.json

The number at the end is random, so two adapters never share a name or a path.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

from weightsync.checkpoint.locked_folder import LOCK, LockedFolder, lock, unlock
from weightsync.checkpoint.own_files import is_own_folder
from weightsync.checkpoint.safetensors import lay_out
from weightsync.checkpoint.save import share_out
from weightsync.checkpoint.shard_files import check_seen, create, placement_errors, publish, write
from weightsync.checkpoint.sidecars import files_beside
from weightsync.config import check_count
from weightsync.engines import AdapterEngine, LoraAdapter
from weightsync.errors import (
    ConfigError,
    EngineError,
    NonFiniteError,
    PlacementError,
    UnsupportedError,
    WeightSyncError,
    first_few,
    wrap_exception,
)
from weightsync.fleet import EngineList
from weightsync.fleet.engines_of_ranks import OtherRanks
from weightsync.kernels.finite import find_non_finite
from weightsync.net import timeouts
from weightsync.net.addresses import is_here
from weightsync.net.runtime import submit
from weightsync.net.update import Update
from weightsync.net.wire import MAX_VERSION
from weightsync.planning.layout import Manifest, ShardLocation
from weightsync.report import PushReport, WorkerReport
from weightsync.sources.adapter import read_lora
from weightsync.sources.base import Model, Reading, TensorShard
from weightsync.sources.module import ModuleSource
from weightsync.strategies.base import OF_COPIES, Options, UpdateStrategy
from weightsync.strategies.inventory import check_settings

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")
_PRIVATE = "weightsync-lora-"
_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraTransport:
    """Pushes of adapters alone: `WeightSync("fsdp", LoraTransport(), engine)`, or `transport="lora"` for the defaults.

    Each push loads the model's active LoRA adapter into the running engines under a new name. The base stays as it is.
    `WeightSync.adapter` has the name for requests. The engines must have been started with `enable_lora`.

    Args:
        name: The beginning of the adapters' names, such as "policy-7-3f2a9c01".
        folder: The place of the adapters. Each is a folder that PEFT and vLLM load. The folder is made if it is
            missing. All ranks and engines must see it under this path. One trainer at a time. None: memory of this
            host, until `WeightSync.close`. All ranks and engines must then run on this host, as the same user.
        keep_last: The number of newest versions that requests can name.
        base_is_pushed: Whether another `WeightSync` pushes each change of the base, with adapters disabled.

    Raises:
        ConfigError: Arguments that cannot work.
    """

    name: str = "policy"
    folder: str | os.PathLike[str] | None = None
    keep_last: int = 2
    base_is_pushed: bool = False
    demands: ClassVar[str] = "adapter"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise ConfigError(f"name={self.name!r}; expected a file name of letters and digits, with _ . - inside")
        check_count("keep_last", self.keep_last, "the pushed version must stay")

    def open(self, options: Options) -> LoraAdapters:
        """Return the strategy. Raises `ConfigError` for options that it cannot work with."""
        if not isinstance(options.source, ModuleSource) or options.quantize is not None:
            raise ConfigError('adapters need PEFT, backend="fsdp" or "deepspeed", and no quantize')
        options.selection.refuse("this LoraTransport", "exclude", "frozen", "only_trained", "dtypes", "buffers", "keep")
        options.refuse("this LoraTransport", *OF_COPIES, "pause", "hold_s", "non_finite")
        return LoraAdapters(options, options.source, self)


class LoraAdapters(UpdateStrategy):
    """The strategy: each push loads a new adapter into every engine. Rank 0 has the folder and calls the engines.

    A failed push has unloaded its adapter itself, so there is nothing to `reset`.
    """

    def __init__(self, options: Options, source: ModuleSource, transport: LoraTransport) -> None:
        self._options = options
        self._source = source
        self._transport = transport
        self._engines: list[AdapterEngine] = []
        self._folder: AdapterFolder | None = None
        self._version = 0  # the last pushed version
        self._loaded: list[LoraAdapter] = []  # oldest first, earlier trainers' adapters included
        self._unloaded: list[LoraAdapter] = []  # unloaded in the engines, with files still on the disk

    def run(self, update: Update, model: Model) -> PushReport:
        timeline = update.timeline
        with timeline.during("plan"):
            manifest, mine, config, version = self._plan(update, model)
        incoming = self._folder.incoming() if self._folder is not None else None
        outcome: tuple[PushReport, LoraAdapter] | None = None
        try:
            with timeline.during("save"):
                _write(update, manifest, mine, config, incoming)
            with timeline.during("load"):
                if incoming is not None:
                    adapter, workers = self._deliver(incoming, version, manifest.nbytes)
                    report = timeline.report(workers, version=version, nbytes=manifest.nbytes, chunks=1)
                    logger.info("pushed the adapter %s, %s", adapter.name, report)
                    outcome = report, adapter
                pushed: tuple[PushReport, LoraAdapter]
                pushed = update.ranks.broadcast(outcome, "load", tuple[PushReport, LoraAdapter])
        finally:
            if incoming is not None:
                shutil.rmtree(incoming, ignore_errors=True)
        self.adapter, self._version = pushed[1], version
        return pushed[0]

    @property
    def engines(self) -> EngineList:
        return self._options.engines

    def close(self) -> None:
        """Unload and remove adapters in memory. Adapters in a user's folder stay, in the folder and in the engines."""
        if self._folder is not None:
            if self._folder.is_private:
                self._give_back(self._folder)
            self._folder.close()
        self._folder, self.adapter = None, None
        self._engines, self._loaded, self._unloaded = [], [], []

    def _plan(self, update: Update, model: Model) -> tuple[Manifest, list[tuple[ShardLocation, TensorShard]], Any, int]:
        """Return the adapter's tensors, this rank's shards to write, PEFT's config, and the version. Collective."""
        # In every push: a condition on this rank's state would differ between ranks, as after `close` on one of them.
        OtherRanks(self._options.engines, self._options.timeout_s).meet(update.ranks, refuse="lora")
        reading, config, described = read_lora(self._source, model, self._transport.base_is_pushed)
        check_finite(reading)
        # Each rank writes its own shards, so adapters that differ would be mixed in the file.
        check_settings(update.ranks.gather({"": described}, "plan"))
        manifest, mine = share_out(update, reading.manifest, reading.shards)
        version = None
        if update.ranks.rank == 0:
            version = update.choose_version(self._open(max([config.r, *config.rank_pattern.values()])))
        return manifest, mine, config, update.ranks.broadcast(version, "plan")

    # Only rank 0 calls the methods below.

    def _open(self, rank: int) -> int:
        """Check the engines and the folder before anything is written. Return the newest version."""
        engines = [_with_adapters(one) for one in self._options.engines.engines()]
        for engine in engines:
            most = engine.max_lora_rank()
            if most is not None and rank > most:
                raise ConfigError(
                    f"the adapter has rank {rank}, and the engine takes at most {most}; start it with "
                    f"max_lora_rank={rank}, or train with a smaller rank",
                    who=engine.name,
                )
        for engine in engines:
            if self._folder is not None and engine in self._engines:
                continue
            engine.adapters_in_use()  # raises if the engine cannot tell: no adapter could then ever be unloaded
            if self._transport.folder is None and not is_here(engine.host):
                raise PlacementError(
                    f"{engine.host} cannot read adapters in this host's memory; give a folder that both hosts see: "
                    "LoraTransport(folder=...)",
                    who=engine.name,
                )
        self._engines = engines
        if self._folder is None:
            folder = AdapterFolder(self._transport)
            try:
                self._loaded = [_adapter(path) for path in folder.earlier()]
            except OSError as error:
                folder.close()
                raise PlacementError(f"cannot read the adapters in {folder.path}: {error}") from error
            self._folder = folder
        in_folder = [] if self._folder.is_private else [self._folder.version(one.name) or 0 for one in self._loaded]
        return max([self._version, *in_folder])

    def _deliver(self, incoming: Path, version: int, nbytes: int) -> tuple[LoraAdapter, tuple[WorkerReport, ...]]:
        """Name the adapter, load it into every engine, and unload old adapters."""
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
            # Remove its files only after every engine has unloaded it. Otherwise `_retire` unloads it in a later push.
            is_forgotten = _forgotten(self._engines, [adapter])
            if is_forgotten:
                shutil.rmtree(adapter.path, ignore_errors=True)
                self._loaded.remove(adapter)
            raise _failure(adapter, self._engines, [call.exception() for call in calls], is_forgotten)
        self._retire()
        return adapter, tuple(call.result() for call in calls)

    def _retire(self) -> None:
        """Unload adapters older than `keep_last`, and remove the files of adapters that an earlier push unloaded.

        An adapter in use by a request stays, with its files: an engine short of adapter slots loads it again. A failure
        is logged and left to the next push, because engines serve the new adapter already.
        """
        try:
            in_use = set().union(*(engine.adapters_in_use() for engine in self._engines))
        except WeightSyncError as error:
            logger.warning("cannot unload older adapters yet: %s", error)
            return
        due = [(self._remove, adapter) for adapter in self._unloaded]
        due += [(self._unload, adapter) for adapter in self._loaded[: -self._transport.keep_last]]
        for retire, adapter in due:
            if adapter.name not in in_use:
                try:
                    retire(adapter)
                except (WeightSyncError, OSError) as error:
                    logger.warning("cannot unload or remove the adapter %s yet: %s", adapter.name, error)

    def _remove(self, adapter: LoraAdapter) -> None:
        assert self._folder is not None
        self._folder.remove(Path(adapter.path))
        self._unloaded.remove(adapter)

    def _unload(self, adapter: LoraAdapter) -> None:
        for engine in self._engines:
            engine.unload_adapter(adapter)
        self._loaded.remove(adapter)
        self._unloaded.append(adapter)

    def _give_back(self, folder: AdapterFolder) -> None:
        if _forgotten(self._engines, self._loaded + self._unloaded):
            for adapter in self._loaded + self._unloaded:  # includes adapters of killed trainers
                with suppress(OSError):
                    folder.remove(Path(adapter.path))
            shutil.rmtree(folder.path, ignore_errors=True)
        else:
            text = "the adapters in %s may still be in use. This host's next trainer of adapters removes them"
            logger.warning(text, folder.path)


def check_finite(reading: Reading) -> None:
    """Raise `NonFiniteError` for an adapter with NaN or infinity.

    NaN in the KV cache would spoil requests with other adapters too. A push of an adapter clears no KV cache.
    """
    found = find_non_finite([shard.tensor for shard in reading.shards])
    if bad := list(dict.fromkeys(reading.shards[number].meta.name for number in found)):
        raise NonFiniteError(
            f"{len(bad)} tensors of the adapter hold NaN or infinity, and nothing was written: {first_few(bad)}. NaN "
            "in an engine's KV cache would spoil other requests too",
            tensors=bad,
        )


def _write(
    update: Update,
    manifest: Manifest,
    mine: Sequence[tuple[ShardLocation, TensorShard]],
    config: Any,
    incoming: Path | None,
) -> None:
    """Write the adapter to `incoming`, a path given by rank 0. Collective."""
    names = [meta.name for meta in manifest]
    files = lay_out(manifest, [names], manifest.nbytes)
    files = replace(files, files=(replace(files.files[0], name=_FILE),), file_of=dict.fromkeys(names, _FILE))
    if incoming is not None:
        create(incoming, files, files_beside([config], manifest))
    folder = Path(update.ranks.broadcast(str(incoming), "save"))
    advice = "give a folder on a file system that all trainer ranks and engines share, LoraTransport(folder=...)"
    check_seen(folder, f"trainer rank {update.ranks.rank}", advice)
    write(folder, files, ((location, shard.tensor) for location, shard in mine))
    update.ranks.gather(None, "save")  # rank 0 waits here for every rank's shards


def _forgotten(engines: Sequence[AdapterEngine], adapters: Sequence[LoraAdapter]) -> bool:
    """Unload adapters within a few seconds. Return whether every engine has unloaded them, and no request uses them."""

    def forget(engine: AdapterEngine) -> bool:
        if engine.is_alive() is False:
            return True
        for adapter in adapters:
            engine.unload_adapter(adapter)
        return not engine.adapters_in_use() & {adapter.name for adapter in adapters}

    answers = [submit("farewell", partial(forget, engine)) for engine in engines]
    answered, late = wait(answers, timeouts.ADAPTER_FAREWELL_S)
    return not late and all(not answer.exception() and answer.result() for answer in answered)


def _with_adapters(engine: object) -> AdapterEngine:
    if not isinstance(engine, AdapterEngine):
        raise UnsupportedError(f"{engine!r} takes no adapters; it lacks methods of weightsync.engines.AdapterEngine")
    return engine


def _adapter(path: Path) -> LoraAdapter:
    """Return the adapter at `path`. Its id is a hash of its name."""
    return LoraAdapter(path.name, 1 + zlib.crc32(path.name.encode()) % (2**31 - 1), str(path))


def _load(engine: AdapterEngine, adapter: LoraAdapter, nbytes: int) -> WorkerReport:
    started = time.perf_counter()
    engine.load_adapter(adapter)
    return WorkerReport(engine.name, nbytes, 0.0, 0.0, time.perf_counter() - started)


def _failure(
    adapter: LoraAdapter, engines: Sequence[AdapterEngine], errors: Sequence[BaseException | None], is_forgotten: bool
) -> WeightSyncError:
    """Return the first engine's error. Its message adds the state of the other engines."""
    loaded = [engine.name for engine, error in zip(engines, errors, strict=True) if error is None]
    who, first = next((engine.name, error) for engine, error in zip(engines, errors, strict=True) if error is not None)
    problem = wrap_exception(first, who=who, phase="load")
    problem.message += f". The engine reads the adapter from {adapter.path}"
    if loaded and is_forgotten:
        problem.message += f"; unloaded again from {', '.join(loaded)}"
    elif not is_forgotten:
        problem.message += ". An engine may keep it until a later push"
    problem.message += ". Older adapters are untouched"
    return problem


class AdapterFolder(LockedFolder):
    """The adapter folder of one trainer's rank 0, given by the user, or private in memory. Raises as `LockedFolder`."""

    def __init__(self, transport: LoraTransport) -> None:
        self.is_private = transport.folder is None
        self._name = transport.name
        self._pattern = re.compile(rf"{re.escape(transport.name)}-(\d{{1,19}})-[0-9a-f]{{8}}", re.ASCII)
        if transport.folder is not None:
            super().__init__(Path(transport.folder).absolute(), "adapters")
            return
        with placement_errors(f"cannot write adapters to {_MEMORY}"):
            # Lock the folder before the rename: other trainers remove unlocked folders with this name.
            hidden = Path(mkdtemp(prefix=f".{_PRIVATE}", dir=_MEMORY))
            super().__init__(hidden, "adapters")
            self.path = hidden.rename(_MEMORY / hidden.name.removeprefix("."))

    def named(self, version: int) -> Path:
        """Return a new path for version `version` of the adapter."""
        return self.path / f"{self._name}-{version}-{secrets.token_hex(4)}"

    def version(self, name: str) -> int | None:
        """Return the version of the adapter `name`, or None if the name does not fit this folder's adapters."""
        match = self._pattern.fullmatch(name)
        return None if match is None or int(match[1]) > MAX_VERSION else int(match[1])

    def earlier(self) -> list[Path]:
        """Return the adapters of earlier trainers, oldest first: in this folder, or in memory."""
        roots = list(self._abandoned()) if self.is_private else [self.path]
        paths = [path for root in roots for path in self._adapters(root)]
        return sorted(paths, key=lambda path: (path.lstat().st_mtime_ns, path.name))

    def _adapters(self, root: Path) -> list[Path]:
        """Return the adapters in a folder. They must belong to this user, or to the folder's owner.

        They may be writable by others, as under umask 002: a private folder keeps others out.
        """
        owners = (root.stat().st_uid,)
        return [path for path in root.iterdir() if self.version(path.name) is not None and is_own_folder(path, owners)]

    def _abandoned(self) -> Iterator[Path]:
        for root in _MEMORY.glob(f"{_PRIVATE}*"):
            if not is_own_folder(root):  # another user can put anything into its own folder
                continue
            with suppress(OSError):  # another trainer may be removing it
                if root != self.path and (held := lock(root / LOCK)) is not None:
                    unlock(held)
                    if any(not path.name.startswith(".") for path in root.iterdir()):
                        yield root
                    else:
                        shutil.rmtree(root)

    def remove(self, path: Path) -> None:
        """Remove an adapter of this folder or of an earlier trainer's. It may be gone already. Raises `OSError`."""
        with suppress(FileNotFoundError):
            super().remove(path)
        with suppress(FileNotFoundError):
            if path.parent != self.path and not self._adapters(path.parent):
                shutil.rmtree(path.parent)
