"""`weightsync.save`: the trainer's weights as a checkpoint, without an engine."""

from __future__ import annotations

import copy
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from weightsync.bucketing import ThresholdBucketer
from weightsync.channel import Hub
from weightsync.checkpoint.beside import files_beside
from weightsync.checkpoint.files import check_seen, check_whole, create, publish, write
from weightsync.checkpoint.shards import MAX_SHARD_BYTES, Shards, lay_out
from weightsync.errors import ConfigError, ManifestError, PlacementError, foreign
from weightsync.layout import Manifest, Placement, choose_owners, merge_manifests
from weightsync.placing import place
from weightsync.ranks import RankGroup
from weightsync.senders import make_sender
from weightsync.senders.base import Model, Sender, TensorPolicy
from weightsync.transports.base import Region
from weightsync.wire import pack_manifest, pack_placements, unpack_manifest, unpack_placements

_BUCKET_BYTES = 256 * 2**20
"""What is computed for a checkpoint, as with adapters, is fetched for this many bytes at once."""


def save(
    model: Model,
    folder: str | PathLike[str],
    backend: str = "fsdp",
    *,
    policy: TensorPolicy | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Any = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    bridge: Any = None,
    vocab_size: int | None = None,
    timeout_s: float = 300.0,
) -> None:
    """Collective: every trainer rank calls this. Write `model`'s weights of this moment to `folder`, as
    `save_pretrained` would, but from all ranks at once and without gathering a tensor. Returns when everything is on
    the disk; until then `folder` has nothing.

    Tensors are saved in the trainer's own dtypes, unless `policy` says others; what it excludes is left out. Config and
    generation config are those of a transformers model, unless others are given; the tokenizer is saved when it is
    given. `backend`, `bridge` and `vocab_size` are as for `WeightSync`, `max_shard_bytes` as for `CheckpointTransport`.

    `folder` must not exist, or be empty, and all ranks must see the folder that it is in. Raises `WeightSyncError`s,
    the same one on every rank, and then leaves nothing: `ConfigError` for arguments that cannot work, `PlacementError`
    when files cannot be written. No wait lasts longer than `timeout_s`.
    """
    policy = policy or TensorPolicy()
    sender = make_sender(backend, policy, bridge=bridge, vocab_size=vocab_size)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    hub = Hub() if not distributed or torch.distributed.get_rank() == 0 else None
    ranks: RankGroup | None = None
    target = Path(folder).absolute()
    incoming = target.with_name(f".{target.name}.incoming-{secrets.token_hex(4)}")
    try:
        ranks = RankGroup(hub, timeout_s)
        if ranks.rank == 0 and target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise ConfigError(f"{target} exists and is not empty; save to a new folder")
        shards, buckets = _agree(ranks, sender, model, policy, max_shard_bytes)
        if ranks.rank == 0:
            _make_parents(target)
            beside = _beside(model, config, generation_config)
            create(incoming, shards, files_beside([*beside, tokenizer], shards.manifest))
        incoming = Path(ranks.share(str(incoming), "save"))
        check_seen(incoming, f"trainer rank {ranks.rank}")
        for number, (names, own) in enumerate(buckets):
            ranks.share(None, "save")  # or nobody would learn of a rank that has failed
            sender.gather(names)
            write(incoming, shards, number, ((p, region.read()) for p, region in own), part=None)
        ranks.gather(None, "save")
        if ranks.rank == 0:
            publish(incoming, target)
        ranks.share(None, "save")
    except Exception as error:
        rank = ranks.rank if ranks is not None else 0
        problem = foreign(error, who=f"trainer rank {rank}", phase="save")
        problem = ranks.fail(problem) if ranks is not None else problem
        if problem is error:
            raise
        raise problem from error
    finally:
        if hub is not None:  # rank 0
            shutil.rmtree(incoming, ignore_errors=True)
            hub.close()
        if ranks is not None:
            ranks.close()


def _agree(
    ranks: RankGroup, sender: Sender, model: Model, policy: TensorPolicy, max_shard_bytes: int
) -> tuple[Shards, list[tuple[Sequence[str], list[tuple[Placement, Region]]]]]:
    """Collective. The files, and for each bucket its names and what this rank writes of it."""
    mine = place(sender.pieces(model), ranks.rank)
    everyone = ranks.gather([pack_manifest(sender.manifest(model)), pack_placements(mine)], "plan")
    answer = None
    if ranks.rank == 0:
        merged = merge_manifests([unpack_manifest(rows) for rows, _ in everyone])
        answer = [pack_manifest(_in_saved_dtypes(merged, policy)), [row for _, rows in everyone for row in rows]]
    rows, placements = ranks.share(answer, "plan")
    manifest, held = unpack_manifest(rows), unpack_placements(placements)
    check_whole(manifest, held)
    buckets = [bucket.names for bucket in ThresholdBucketer(min(_BUCKET_BYTES, max_shard_bytes)).bucket(manifest, None)]
    number = {name: n for n, names in enumerate(buckets) for name in names}
    own: list[list[tuple[Placement, Region]]] = [[] for _ in buckets]
    for owner in choose_owners(held):
        if owner.rank == ranks.rank:
            own[number[owner.name]].append((owner, mine[owner]))
    return lay_out(manifest, buckets, max_shard_bytes), list(zip(buckets, own, strict=True))


def _in_saved_dtypes(manifest: Manifest, policy: TensorPolicy) -> Manifest:
    saved = [replace(meta, dtype=policy.wire_dtype(meta.name) or meta.dtype) for meta in manifest]
    wrong = {
        meta.name: f"the trainer has {meta.dtype}, the policy says {other.dtype}"
        for meta, other in zip(manifest, saved, strict=True)
        if ("float" in meta.dtype) != ("float" in other.dtype)
    }
    if wrong:
        name, reason = next(iter(wrong.items()))
        raise ManifestError(f"{len(wrong)} tensors cannot be saved, such as {name}: {reason}", mismatched=wrong)
    return Manifest(tuple(saved))


def _beside(model: Model, config: Any, generation_config: Any) -> list[Any]:
    """The config and the generation config of a transformers model, where none is given."""
    from weightsync.senders.names import unwrapped  # DTensor costs more to import than all the rest

    if isinstance(model, torch.nn.Module):
        own = unwrapped(model)
        if config is None and hasattr(getattr(own, "config", None), "save_pretrained"):
            config = copy.deepcopy(own.config)
            config.architectures = [type(own).__name__.removeprefix("FSDP")]  # what FSDP2 puts before a class's name
        if generation_config is None and hasattr(getattr(own, "generation_config", None), "save_pretrained"):
            generation_config = own.generation_config
    return [config, generation_config]


def _make_parents(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlacementError(f"cannot make {target.parent}: {error}") from error
