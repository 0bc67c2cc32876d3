"""Checks of the trainer's tensors against the engines' parameters, and the division into buckets.

The functions are pure, of manifests and the workers' load plans.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from msgspec.structs import replace

from weightsync.errors import ConfigError, ManifestError, first_few
from weightsync.planning.bucketing import Bucket, Bucketer, never_resent, split
from weightsync.planning.layout import Box, Manifest, connected, coverage, itemsize
from weightsync.planning.load_plan import LoadPlan
from weightsync.planning.prefixes import find_rename
from weightsync.planning.wire_types import ReadRegions
from weightsync.selection import TensorSelection


def check_quantized(manifest: Manifest, together: Sequence[tuple[str, str]], plans: Sequence[LoadPlan]) -> None:
    """Raise one `ManifestError` for all quantised weights without a quantised place in an engine.

    together: each weight's name with its scales' name.
    """
    used = {name for plan in plans for name in plan.used}
    wrong = {}
    for weight, scale in together:
        kinds = {plan.used[weight] for plan in plans if weight in plan.used}
        if weight in used and (scale not in used or kinds != {manifest[weight].dtype}):
            wrong[weight] = f"quantised to {manifest[weight].dtype}, the engine loads {' or '.join(sorted(kinds))}"
    if wrong:
        raise ManifestError(
            f"{len(wrong)} weights come quantised, and the engine does not load them so: {_first(wrong)}. Start the "
            "engine from a compressed-tensors checkpoint with a scale for each output channel. Name unquantised "
            "weights of this checkpoint in TensorSelection.unquantized, or push without `quantize`. Nothing was "
            "written",
            mismatched=wrong,
        )


def check_plans(
    manifest: Manifest, engines: Sequence[tuple[str, Sequence[LoadPlan]]], padded: bool, keep: Sequence[str] = ()
) -> list[str]:
    """Return the tensors that do not travel, because no engine runs their part of the model.

    engines: each engine's name in errors, with the plans of its workers.
    padded: whether the vocabulary has the trainer's padding.
    keep: as for `TensorSelection`.

    Raises one `ManifestError` for all tensors of an engine that are missing, misshapen, or without a place on any of
    its workers.
    """
    plans = [plan for _, own in engines for plan in own]
    kept = [param for plan in plans for param in plan.kept]
    idle = [pattern for pattern in keep if not fnmatch.filter(kept, pattern)]
    for engine, own in engines:
        _check_engine(engine, manifest, own, padded, idle)
    used = set().union(*(plan.used for plan in plans))
    return [name for name in manifest.names if name not in used]


def _check_engine(
    engine: str, manifest: Manifest, plans: Sequence[LoadPlan], padded: bool, idle: Sequence[str]
) -> None:
    mismatched = {name: reason for plan in plans for name, reason in plan.refused.items()}
    used = set().union(*(plan.used for plan in plans))
    mismatched |= _unread(manifest, plans)
    placed = used.union(mismatched, *(plan.left_out for plan in plans), *(plan.duplicates for plan in plans))
    unexpected = [name for name in manifest.names if name not in placed]
    missing = list(dict.fromkeys(name for plan in plans for name in (plan.hints or plan.missing)))
    if set(mismatched) & set(missing):  # not two faults for one tensor: refused, and missing in its parameter
        missing = [name for name in missing if name not in mismatched]
    elif mismatched and not any(plan.hints for plan in plans):
        missing = []
    if not (missing or unexpected or mismatched or idle):
        return
    if not (reasons := [*_explain_prefix(unexpected, missing)]):
        reasons += _explain_missing(missing, manifest)
        reasons += _explain_unexpected(unexpected, missing, manifest, plans)
    reasons += _explain_mismatched(mismatched, padded)
    reasons += [f"TensorSelection.keep={idle}: no module of the engine without tensors matches"] if idle else []
    text = f"the trainer's tensors do not fit {engine}'s model. {'. '.join(reasons)}. Nothing was written"
    raise ManifestError(text, missing=missing, unexpected=unexpected, mismatched=mismatched)


def _explain_prefix(unexpected: Sequence[str], missing: Sequence[str]) -> Iterator[str]:
    lacking = (name.removesuffix(one) for one in unexpected[:1] for name in missing if name.endswith(f".{one}"))
    if not (unexpected and missing and (found := find_rename(unexpected, lacking, lambda new: missing))):
        return
    rename, fitting = found
    old, name = next(iter(fitting.items()))
    advice = "Push the model inside" if len(old) > len(name) else "Push the whole model, not a part of it"
    yield f"{len(fitting)} names have another prefix than in the engine's checkpoint, such as {old} for {name}"
    absent = [other for other in missing if other not in fitting.values()] if len(fitting) == len(unexpected) else []
    way = f", or give WeightSync(selection=TensorSelection(rename={rename}))"
    yield advice + (f": nothing is pushed for {first_few(absent)}" if absent else way)


def _explain_missing(missing: Sequence[str], manifest: Manifest) -> Iterator[str]:
    if missing:
        yield f"Missing {len(missing)}: {first_few(missing)}"
        if absent := _absent_layers(missing, manifest):
            yield (
                f"The trainer pushes nothing of {first_few(absent)}: it has fewer layers, or a pipeline stage did not "
                "push all of its chunks"
            )
        if missing == ["lm_head.weight"]:
            yield "The engine has an output layer of its own, and the trainer has none: push the model with its head"
        else:
            yield "TensorSelection(keep=...) leaves a module to the engine's checkpoint, such as a frozen vision tower"


def _explain_mismatched(mismatched: Mapping[str, str], padded: bool) -> Iterator[str]:
    if mismatched:
        yield f"Not fitting {len(mismatched)}: {first_few([f'{n} ({r})' for n, r in mismatched.items()])}"
        if not padded:
            yield "Trainer and engine must have the same config.json"
        elif any(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in mismatched):
            yield (
                "Megatron pads the vocabulary: give the number of rows in the checkpoint, "
                "MegatronBackend(vocab_size=...)"
            )


def _explain_unexpected(
    unexpected: Sequence[str], missing: Sequence[str], manifest: Manifest, plans: Sequence[LoadPlan]
) -> Iterator[str]:
    if unexpected:
        yield f"Unexpected {len(unexpected)}: {first_few(unexpected)}"
        own = "An output layer is to be excluded only if the trainer ties it to the embedding"
        if heads := _of_tied_shape(unexpected, manifest, plans):
            yield (
                f"The engine ties its output layer to its embedding, and {heads[0]} may be the trainer's own output "
                "layer. Start the engine with tie_word_embeddings=false in config.json, or with "
                f'hf_overrides={{"tie_word_embeddings": False}}. {own}'
            )
        elif not missing:
            yield "Leave them out with TensorSelection(exclude=...), or give the engine the trainer's model"
            if any(name.endswith("lm_head.weight") for name in unexpected):
                yield f"{own}, or if the engine gives no logits"


def make_buckets(
    bucketer: Bucketer,
    manifest: Manifest,
    plans: Sequence[LoadPlan],
    together: Sequence[tuple[str, str]],
    frozen: set[str],
) -> tuple[list[Bucket], frozenset[str]]:
    """Return the buckets of all tensors, and the names of the tensors in the last buckets.

    The last buckets hold the `frozen` tensors, except those loaded together with other tensors. `together` are
    quantised weights with the names of their scales. Raises `ConfigError` if everything is frozen, or if a bucket has a
    weight without its scales.
    """
    groups = connected(
        (name, (n, g)) for n, plan in enumerate(plans) for g, names in enumerate(plan.groups) for name in names
    )
    groups += together
    last = never_resent(manifest, frozen, [*groups, *(names for plan in plans for names in plan.reloads)])
    if last and not any(meta.nbytes for meta in manifest if meta.name not in last):
        raise ConfigError("all tensors with elements are frozen: a second push would change nothing. Freeze fewer")
    buckets = split(bucketer, manifest, groups, last)
    if apart := [w for w, scale in together if not any({w, scale} <= {*b.names} for b in buckets)]:
        raise ConfigError(
            f"the bucketer puts {len(apart)} quantised weights and their scales into different buckets, such as "
            f'{apart[0]}; use bucketer="module" or "threshold"'
        )
    return buckets, last


def reads_of(manifest: Manifest, plans: Sequence[LoadPlan]) -> list[ReadRegions]:
    """Return the regions read by each worker, by name of the tensor. Workers with one plan share them."""
    of_shape = {shape: (Box.full(shape),) for shape in {meta.shape for meta in manifest}}
    whole = {meta.name: of_shape[meta.shape] for meta in manifest}
    distinct = {id(plan): plan for plan in plans}
    reads = {key: {name: whole[name] for name in plan.used} | plan.partial for key, plan in distinct.items()}
    return [reads[id(plan)] for plan in plans]


def duplicates(plans: Sequence[LoadPlan]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of tensors with one place in some engine's memory. The two must be equal."""
    return tuple(dict.fromkeys(pair for plan in plans for pair in plan.duplicates.items()))


def check_duplicates(pairs: Sequence[tuple[str, str]], held: Sequence[Mapping[str, Mapping[str, int]]]) -> None:
    """Raise one `ManifestError` for all unequal pairs.

    held: each rank's digests, by name of the tensor and name of the region.
    """
    wrong = {}
    for other, name in pairs:
        mine, theirs = (
            {box: digest for own in held for box, digest in own.get(one, {}).items()} for one in (other, name)
        )
        if mine.keys() != theirs.keys():
            wrong[other] = f"it is sharded otherwise than {name} and cannot be compared with it"
        elif mine != theirs:
            wrong[other] = f"it differs from {name}"
    if wrong:
        raise ManifestError(
            f"the engine ties tensors that differ in the trainer: {_first(wrong)}. Start the engine from this "
            "trainer's checkpoint, with tie_word_embeddings=false in config.json, or tie the trainer's tensors. "
            "PEFT's ensure_weight_tying=True ties copies of modules_to_save. Nothing was written",
            mismatched=wrong,
        )


def _of_tied_shape(unexpected: Sequence[str], manifest: Manifest, plans: Sequence[LoadPlan]) -> list[str]:
    """Return the unexpected tensors with the shape of a tied tensor. Several engine modules share a tied parameter."""
    shapes = {manifest[name].shape for plan in plans for name in plan.tied if name in manifest}
    return [name for name in unexpected if manifest[name].shape in shapes]


def _absent_layers(missing: Sequence[str], manifest: Manifest) -> list[str]:
    """Return the numbered modules ("model.layers.3") of missing tensors for which the trainer has no tensor at all."""
    came = {_layer(name) for name in manifest.names}
    return list(dict.fromkeys(layer for name in missing if (layer := _layer(name)) and layer not in came))


def _layer(name: str) -> str | None:
    found = re.match(r"\D+\.\d+(?=\.)", name)
    return found[0] if found else None


def _unread(manifest: Manifest, plans: Sequence[LoadPlan]) -> dict[str, str]:
    """Return the faults of tensors with a region that no worker reads, by name.

    vLLM's loaders take their slice out of a tensor that is too large without an error.
    """
    found = {}
    alike: dict[tuple[Any, ...], list[Box]] = {}  # the experts of a model are read alike
    for name in set().union(*(plan.partial for plan in plans)):
        shape, reads = manifest[name].shape, [plan.partial.get(name) for plan in plans if name in plan.used]
        if None in reads:
            continue
        if (key := (shape, *reads)) not in alike:
            alike[key] = coverage(shape, [box for boxes in reads for box in boxes or ()])[0]
        if holes := alike[key]:
            found[name] = f"shape {shape}: the engine has no place for {first_few([str(hole) for hole in holes])}"
    return found


def wire_manifest(
    manifest: Manifest, plans: Sequence[LoadPlan], selection: TensorSelection, as_it_is: Set[str], unread: bool
) -> Manifest:
    """Return the manifest with the dtypes on the wire. `unread`: also of tensors that no engine takes.

    The selection's dtype comes first. Otherwise it is the trainer's dtype, or a narrower dtype common to all engines. A
    cast to a wider dtype is exact, and cheaper on the engine's side. The names in `as_it_is` keep the manifest's dtype.
    """
    held: dict[str, str] = {}  # the widest, or an engine would get less precision than it holds
    differing: set[str] = set()
    for plan in plans:
        for name, kind in plan.used.items():
            if (known := held.setdefault(name, kind)) != kind:
                differing.add(name)
                held[name] = max(known, kind, key=itemsize)
    tensors, wrong = [], {}
    for meta in (meta for meta in manifest if unread or meta.name in held):
        theirs = held.get(meta.name, meta.dtype)
        dtype = meta.dtype if meta.name in as_it_is else selection.wire_dtype(meta.name)
        if dtype is None:
            is_narrower = meta.name not in differing and itemsize(theirs) < itemsize(meta.dtype)
            dtype = theirs if is_narrower else meta.dtype
        if {_is_float(dtype), _is_float(meta.dtype), _is_float(theirs)} == {True, False}:
            wrong[meta.name] = f"the trainer has {meta.dtype}, the engine holds {theirs}"
        tensors.append(meta if dtype == meta.dtype else replace(meta, dtype=dtype))
    if wrong:
        raise ManifestError(
            f"{len(wrong)} tensors have a dtype that the engine cannot take, such as {_first(wrong)}", mismatched=wrong
        )
    return Manifest(tuple(tensors), tuple(pair for pair in manifest.tied if unread or pair[1] in held))


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _first(items: dict[str, str]) -> str:
    return ": ".join(next(iter(items.items())))
