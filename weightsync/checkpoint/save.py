"""Save the trainer's weights as a checkpoint: `weightsync.save`, and the code shared by strategies that write files."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from weightsync.checkpoint import shard_files
from weightsync.checkpoint.safetensors import MAX_SHARD_BYTES, lay_out
from weightsync.checkpoint.sidecars import Ties, apart_when_loaded, files_beside, with_configs
from weightsync.config import BackendName, read_selection
from weightsync.errors import ConfigError, ManifestError
from weightsync.net.ranks import Ranks, collective
from weightsync.net.update import Update
from weightsync.planning.bucketing import ThresholdBucketer
from weightsync.planning.grouping import grouped
from weightsync.planning.layout import Manifest, ShardLocation, choose_owners, row_major
from weightsync.planning.merge import merge_manifests
from weightsync.selection import TensorSelection
from weightsync.sources import BackendOption, open_source
from weightsync.sources.base import Model, ShardSource, TensorShard, await_writes
from weightsync.sources.rename import renamed

_BUCKET_BYTES = 256 * 2**20
"""The bytes of computed tensors, such as merged adapters, that are gathered at once."""


class _Held(Struct):
    """The tensors of one rank, or of all ranks with the rank that writes each."""

    manifest: Manifest
    locations: list[ShardLocation]


def save(
    model: Model,
    folder: str | PathLike[str],
    backend: BackendName | BackendOption | ShardSource = "fsdp",
    *,
    selection: TensorSelection | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Any = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    timeout_s: float = 300.0,
) -> None:
    """Write the current weights of `model` to `folder`, as `save_pretrained` would. Collective: every rank calls it.

    All ranks write at once, and no tensor is gathered. When `save` returns, everything is on the disk. Until then
    `folder` does not exist, or is empty. All ranks must see the parent of `folder`.

    Args:
        model: The model, as for `WeightSync.push`.
        folder: A new or empty folder, not a link, the same on every rank.
        backend: As for `WeightSync`.
        selection: The saved tensors, their names and dtypes. None: every tensor in the trainer's own dtype. Options
            about engines and later pushes are refused.
        max_shard_bytes: The most bytes of a file, as for `CheckpointTransport`.
        config: An object with `save_pretrained`. None: the config of a transformers model.
        generation_config: The same for the generation config.
        tokenizer: An object with `save_pretrained`. None: no tokenizer is saved.
        timeout_s: The seconds of each wait.

    Raises:
        ConfigError: The arguments cannot work. Every error is the same on every rank, and leaves nothing behind.
        PlacementError: Files cannot be written.
        WeightSyncError: Any other failure.
    """
    selection = read_selection(selection)
    selection.refuse("save, which writes every tensor", "frozen", "only_trained", "unquantized", "keep")
    source = open_source(backend, selection)
    target = Path(folder).absolute()
    ranks = Ranks(timeout_s, name=f"save {target}")  # another thread may save to another folder
    try:
        with collective(ranks) as update:
            beside = (config, generation_config, tokenizer)
            incoming = target.with_name(f".{target.name}.incoming-{secrets.token_hex(4)}")
            save_tensors(update, model, source, incoming, target, selection, max_shard_bytes, beside)
    finally:
        ranks.disconnect()


def save_tensors(
    update: Update,
    model: Model,
    source: ShardSource,
    incoming: Path,
    target: Path,
    selection: TensorSelection,
    max_shard_bytes: int,
    beside: tuple[Any, Any, Any],
) -> int:
    """Write a checkpoint of `model` to `target`, and return the bytes of its tensors. Collective.

    Until it is complete, it lies in rank 0's `incoming`. `beside` is the config, the generation config and the
    tokenizer. Raises as `save` does.
    """
    ranks = update.ranks
    source = renamed(source, selection)
    try:
        with update.timeline.during("plan"):
            if ranks.rank == 0:
                _refuse_full(target)
            reading = source.read(model)
            manifest, mine = share_out(update, _in_saved_dtypes(reading.manifest, selection), reading.shards)
            bucketer = ThresholdBucketer(min(_BUCKET_BYTES, max_shard_bytes))
            buckets = [bucket.names for bucket in bucketer.bucket(manifest, None)]
            apart = ranks.broadcast(apart_when_loaded(manifest, model) if ranks.rank == 0 else (), "plan", Ties)
            files = lay_out(Manifest(manifest.tensors, apart), buckets, max_shard_bytes)
            by_name = grouped(mine, lambda pair: pair[0].name)
            unmatched = ranks.gather(selection.unmatched(), "plan", list[str])
        with update.timeline.during("save"):
            if ranks.rank == 0:
                selection.warn_of_idle(manifest, unmatched)
                found = files_beside(with_configs(model, *beside), manifest)
                with shard_files.placement_errors(f"cannot make {target.parent}"):
                    shard_files.make_folder(target.parent)
                shard_files.create(incoming, files, found)
            incoming = Path(ranks.broadcast(str(incoming), "save"))
            shard_files.check_seen(incoming, f"trainer rank {ranks.rank}")
            for names in (*buckets, ()):
                source.gather(names, update.meet)
                own = (part for name in names for part in by_name.get(name, ()))
                shard_files.write(incoming, files, ((location, shard.values()) for location, shard in own))
            update.meet()
            if ranks.rank == 0:
                shard_files.publish(incoming, target)
            ranks.broadcast(None, "save")
    finally:
        if ranks.rank == 0:
            shutil.rmtree(incoming, ignore_errors=True)
    return manifest.nbytes


def share_out(
    update: Update, manifest: Manifest, shards: Sequence[TensorShard]
) -> tuple[Manifest, list[tuple[ShardLocation, TensorShard]]]:
    """Return the tensors of all ranks, and the shards that this rank writes. Collective.

    One rank writes each replicated shard. Raises `PlacementError` if the ranks do not hold every tensor in full.
    """
    ranks = update.ranks
    await_writes(shards)
    held = {ShardLocation(s.meta.name, s.box, ranks.rank, 0, 0, row_major(s.box.size), s.meta.dtype): s for s in shards}
    everyone: list[_Held] = ranks.gather(_Held(manifest, list(held)), "plan", _Held)
    answer = None
    if ranks.rank == 0:
        merged = merge_manifests([own.manifest for own in everyone])
        locations = [location for own in everyone for location in own.locations]
        shard_files.check_whole(merged, locations)
        answer = _Held(merged, choose_owners(locations))
    all_held: _Held = ranks.broadcast(answer, "plan", _Held)
    return all_held.manifest, [(owner, held[owner]) for owner in all_held.locations if owner.rank == ranks.rank]


def _in_saved_dtypes(manifest: Manifest, selection: TensorSelection) -> Manifest:
    saved = [replace(meta, dtype=selection.wire_dtype(meta.name) or meta.dtype) for meta in manifest]
    if wrong := {
        meta.name: f"the trainer has {meta.dtype}, the selection says {other.dtype}"
        for meta, other in zip(manifest, saved, strict=True)
        if ("float" in meta.dtype) != ("float" in other.dtype)
    }:
        name, reason = next(iter(wrong.items()))
        raise ManifestError(f"{len(wrong)} tensors cannot be saved, such as {name}: {reason}", mismatched=wrong)
    return Manifest(tuple(saved), manifest.tied)


def _refuse_full(target: Path) -> None:
    with shard_files.placement_errors(f"cannot look at {target}"):
        if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
            raise ConfigError(f"{target} is a link, or exists and is not empty; save to a new folder")
