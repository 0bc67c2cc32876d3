"""The buckets of a push: groups of tensors for one transfer.

A bucket is gathered, sent and loaded as one. A *unit* must not be cut. It has the tensors that fuse into one engine
parameter, by the engine's load plan (see `layout.fuse_groups`). It also has all tensors of one innermost module, so
that a quantised weight stays with its scales. Pure: names and sizes in, names and sizes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weightsync.errors import ConfigError
from weightsync.planning.layout import Manifest, connected

DEFAULT_MAX_BYTES = 256 * 2**20
"""Chunks of this size keep an NVLink busy. With smaller chunks the host becomes the limit."""

Groups = Sequence[Sequence[str]]
"""Inseparable names, from the engine's load plan. A name may occur in several groups."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel and are loaded together. `nbytes` counts them in the manifest's dtypes."""

    names: tuple[str, ...]
    nbytes: int


class Bucketer(Protocol):
    """Cuts a manifest into buckets: every name in exactly one, the same buckets on every rank."""

    def bucket(self, manifest: Manifest, groups: Groups | None) -> list[Bucket]:
        """Cut the manifest. If `groups` is None, no engine is attached, and names decide the grouping.

        Raises `ConfigError` if `groups` has a name that is not in the manifest.
        """


@dataclass(frozen=True)
class ModuleBucketer:
    """One bucket for each module (`self_attn`, `mlp`, all experts of a layer, ...).

    With `max_bytes`, a bucket has as many whole modules as fit. A module larger than `max_bytes` has its own bucket.
    """

    max_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_max_bytes(self.max_bytes)

    def bucket(self, manifest: Manifest, groups: Groups | None) -> list[Bucket]:
        return fill_buckets(manifest, _units(manifest, _module, groups or ()), self.max_bytes)


@dataclass(frozen=True)
class ThresholdBucketer:
    """Buckets filled up to `max_bytes` in export order, never splitting a unit.

    A unit larger than `max_bytes` has its own bucket.
    """

    max_bytes: int

    def __post_init__(self) -> None:
        _check_max_bytes(self.max_bytes)

    def bucket(self, manifest: Manifest, groups: Groups | None) -> list[Bucket]:
        # A weight, its bias and its quantisation scales have the same innermost module.
        together = _module if groups is None else lambda name: name.rpartition(".")[0]
        return fill_buckets(manifest, _units(manifest, together, groups or ()), self.max_bytes)


@dataclass(frozen=True)
class ParameterBucketer:
    """One tensor at a time: the baseline. It ignores groups, so tensors that fuse arrive in several buckets.

    An engine that loads module by module must hold a module open until its last tensor has arrived.
    """

    def bucket(self, manifest: Manifest, groups: Groups | None) -> list[Bucket]:
        return [Bucket((tensor.name,), tensor.nbytes) for tensor in manifest]


def open_bucketer(kind: str, max_bytes: int | None) -> Bucketer:
    """Return the bucketer called `kind`: "module", "threshold" or "parameter".

    max_bytes: None means `DEFAULT_MAX_BYTES`. "parameter" takes None only, and raises `ConfigError` for another value.
    """
    if kind == "parameter":
        if max_bytes is not None:
            raise ConfigError(f'bucketing "parameter" sends one tensor at a time: leave max_bytes={max_bytes} out')
        return ParameterBucketer()
    limit = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
    return ModuleBucketer(limit) if kind == "module" else ThresholdBucketer(limit)


def never_resent(manifest: Manifest, frozen: set[str], groups: Groups) -> frozenset[str]:
    """Return the names in `frozen` that need not travel again.

    They share no group, directly or by a chain, with a name that is not frozen.
    """
    if not frozen:
        return frozenset()
    units = _units(manifest, lambda name: name, groups)
    return frozenset(name for names in units if frozen.issuperset(names) for name in names)


def split(bucketer: Bucketer, manifest: Manifest, groups: Groups, last: frozenset[str]) -> list[Bucket]:
    """Return the bucketer's buckets, with the names in `last` in buckets of their own at the end.

    No group may have names of both kinds.
    """
    if not last:
        return bucketer.bucket(manifest, groups)
    parts = [
        (
            tuple(tensor for tensor in manifest if (tensor.name in last) is at_end),
            [group for group in groups if last.issuperset(group) is at_end],
        )
        for at_end in (False, True)
    ]
    return [bucket for tensors, own in parts if tensors for bucket in bucketer.bucket(Manifest(tensors), own)]


def _check_max_bytes(max_bytes: int | None) -> None:
    if max_bytes is not None and max_bytes <= 0:
        raise ConfigError(f"max_bytes is {max_bytes}; a bucket needs room for at least one byte")


def _module(name: str) -> str:
    """Return the module for bucketing a tensor by its name alone.

    It is `self_attn` for the weights of q, k, v and o, and `mlp` for gate, up and down. It is `experts` for every
    expert of a layer, because engines hold these in one tensor.
    """
    parts = name.split(".")
    depth = parts.index("experts") + 1 if "experts" in parts else len(parts) - 2
    return ".".join(parts[: max(depth, 0)])


def _units(manifest: Manifest, together: Callable[[str], str], groups: Groups) -> list[tuple[str, ...]]:
    """Return the manifest's names in units. Names that share a group, or a result of `together`, are in one unit."""
    if unknown := sorted({name for group in groups for name in group}.difference(manifest.names)):
        raise ConfigError(
            f"{len(unknown)} names of the load plan's groups are not in the manifest, first {unknown[0]!r}: groups and "
            "manifest must be of the same push"
        )
    by_name = ((name, ("module", together(name))) for name in manifest.names)
    by_plan = ((name, ("group", number)) for number, group in enumerate(groups) for name in group)
    return connected((*by_name, *by_plan))


def fill_buckets(manifest: Manifest, units: Iterable[tuple[str, ...]], max_bytes: int | None) -> list[Bucket]:
    """Put units into buckets in their order. Begin a new bucket if the next unit would pass `max_bytes`.

    Without a limit each unit is a bucket.
    """
    buckets: list[Bucket] = []
    for names in units:
        nbytes = sum(manifest[name].nbytes for name in names)
        if buckets and max_bytes is not None and buckets[-1].nbytes + nbytes <= max_bytes:
            last = buckets.pop()
            names, nbytes = last.names + names, last.nbytes + nbytes
        buckets.append(Bucket(names, nbytes))
    return buckets
