"""The selection of tensors for pushes, and of their dtypes."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property, partial

from weightsync.errors import ConfigError, first_few
from weightsync.planning.layout import Manifest, itemsize

logger = logging.getLogger(__name__)

UNQUANTIZED = ("*embed*", "*.wte.weight", "*.wpe.weight", "*lm_head.weight", "*[._]gate.weight", "*router*")
"""Two-dimensional weights left unquantised by quantised checkpoints: embeddings, output layers and routers."""


@dataclass(frozen=True)
class TensorSelection:
    """The tensors of the first push and of later pushes, and their dtypes.

    Patterns are shell patterns on checkpoint names (`*.mlp.gate.weight`), case sensitive. `*` matches dots too. The log
    warns of patterns without effect. A pattern of `keep` without effect is an error.

    Args:
        exclude: Patterns of tensors that no push sends.
        buffers: Whether persistent buffers travel. Non-persistent buffers never travel.
        frozen: Patterns of tensors that only the first push sends. The first push after a failed push or `close` sends
            frozen tensors again. No push notices that the trainer changed a frozen tensor. A frozen tensor still
            travels in each push if the engine loads it with a trained tensor, as k with q and v. vLLM's sleep at level
            2 discards the weights. The next push then sends everything, but not with verify="none".
        only_trained: Whether parameters with `requires_grad=False` and without an adapter are frozen too.
        dtypes: Mapping of a pattern to the name of the torch dtype in which matching tensors travel, such as "float32".
            The first matching pattern counts. Other tensors travel in the narrower of the trainer's and the engine's
            dtype. A tied tensor travels under each name with another dtype, unless the engine ties the names. Scales of
            `WeightSync(quantize=...)` stay float32.
        unquantized: With `WeightSync(quantize=...)`, patterns of the two-dimensional tensors `*.weight` that stay
            unquantised. All others are quantised. Name the tensors that the engine's checkpoint leaves unquantised.
        keep: Patterns of parameters left alone by every push, such as "visual.*" of a frozen vision tower. They match
            the engine's names, as an error about missing parameters lists them. No tensor of the trainer may fill a
            matching parameter. The engine must have been started from a checkpoint. After a sleep of level 2 a push
            raises `UnsupportedError` until the parameters are as at the start again. transport="lora" and
            `CheckpointTransport` refuse `keep`.
        rename: Mapping of a regular expression to the replacement of each match in a name, applied in the mapping's
            order. Or a function from the old name to the new one. `exclude` matches old names. Other patterns of
            tensors match new names. transport="single_copy" refuses `rename`.

    Raises:
        ConfigError: Patterns are no sequence of strings, a dtype is unknown, or `rename` is invalid.
    """

    exclude: Sequence[str] = ()
    buffers: bool = True
    frozen: Sequence[str] = ()
    only_trained: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    unquantized: Sequence[str] = UNQUANTIZED
    keep: Sequence[str] = ()
    rename: Mapping[str, str] | Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        for name in ("exclude", "frozen", "unquantized", "keep"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if not isinstance(self.dtypes, Mapping):
            raise ConfigError(f'dtypes={self.dtypes!r}; expected pattern to dtype, such as {{"*.router.*": "float32"}}')
        for pattern, dtype in self.dtypes.items():
            try:
                itemsize(dtype)
            except ConfigError as error:
                raise ConfigError(f"dtypes[{pattern!r}]: {error.message}") from None
        if not isinstance(self.rename, Mapping | None) and not callable(self.rename):
            raise ConfigError(f"rename={self.rename!r}; expected pattern to replacement, or a function of a name")
        for pattern, replacement in self._renames.items():
            try:
                re.sub(pattern, replacement, "")
            except (re.error, TypeError, IndexError) as error:
                raise ConfigError(f"rename[{pattern!r}]={replacement!r}: {error}") from None

    @cached_property
    def _matched(self) -> set[str]:
        """The patterns of `exclude` and `rename` with a match so far. No field: it is no option."""
        return set()

    @property
    def _renames(self) -> Mapping[str, str]:
        """The patterns of `rename` and their replacements. A function has none."""
        return {} if callable(self.rename) else self.rename or {}

    def refuse(self, where: str, *names: str) -> None:
        """Raise `ConfigError` if any of the named options is given. They have no effect on `where`."""
        if given := [name for name in names if getattr(self, name) != getattr(TensorSelection(), name)]:
            raise ConfigError(f"TensorSelection({', '.join(given)}): no effect with {where}; leave it out")

    def unmatched(self) -> list[str]:
        """Return the patterns of `exclude` and `rename` without a match in the names that this rank has asked for."""
        return [pattern for pattern in (*self.exclude, *self._renames) if pattern not in self._matched]

    def warn_of_idle(self, manifest: Manifest, ranks: Sequence[list[str]], settled: Collection[str] = ()) -> None:
        """Warn of patterns without effect. Most are typing errors.

        Args:
            manifest: The trainer's tensors.
            ranks: The `unmatched` of each rank.
            settled: The names without a dtype of their own: scales of quantised weights, and tensors that every engine
                ties to others.
        """
        names = [*manifest.names, *dict(manifest.tied)]
        others = (*self.frozen, *(each for each in self.unquantized if each not in UNQUANTIZED))
        own = {*names}.difference(settled)
        first = {next(filter(partial(fnmatch.fnmatchcase, name), self.dtypes), "") for name in own}
        idle = sorted({*ranks[0]}.intersection(*ranks), key=ranks[0].index)
        idle += [each for each in others if not fnmatch.filter(names, each)]
        idle += [each for each in self.dtypes if each not in first]
        if idle:
            forms = {re.sub(r"\d+", "*", name) for name in names}  # layers have the same names but for numbers
            near = {form for pattern in idle[:5] for form in get_close_matches(pattern, forms, cutoff=0.0, n=2)}
            text = "TensorSelection has patterns without effect: %s. The trainer's nearest names are %s"
            logger.warning(text, first_few(idle), ", ".join(sorted(near)))

    def renamed(self, name: str) -> str:
        """Return the name of `name` on the wire. Raises `ConfigError` if the `rename` function returns no string."""
        found = self.rename(name) if callable(self.rename) else name
        for pattern, replacement in self._renames.items():
            found, count = re.subn(pattern, replacement, found)
            self._matched.update([pattern] * count)
        if not isinstance(found, str):
            raise ConfigError(f"rename gives {found!r} for {name}; expected a name. Use `exclude` to leave it out")
        return found

    def excludes(self, name: str) -> bool:
        """Return whether `name` never travels."""
        matching = [pattern for pattern in self.exclude if fnmatch.fnmatchcase(name, pattern)]
        self._matched.update(matching)
        return bool(matching)

    def freezes(self, name: str, trains: bool) -> bool:
        """Return whether only the first push sends `name`. `trains` says whether the tensor is trained."""
        return (self.only_trained and not trains) or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.frozen)

    def wire_dtype(self, name: str) -> str | None:
        """Return the declared dtype of `name` on the wire, or None."""
        return next((dtype for pattern, dtype in self.dtypes.items() if fnmatch.fnmatchcase(name, pattern)), None)

    def quantizes(self, name: str) -> bool:
        """Return whether a push with `quantize` quantises `name`, if it has two dimensions."""
        return name.endswith(".weight") and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unquantized)


def _patterns(name: str, given: object) -> tuple[str, ...]:
    """Return patterns as a tuple. Raise `ConfigError` for a single string: its letters would be the patterns."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f'{name}={given!r}; expected a sequence of patterns, such as {name}=("*.mlp.*",)')
    return tuple(given)
