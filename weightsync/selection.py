"""Which tensors travel, how often, and in which dtype."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from weightsync.errors import ConfigError
from weightsync.planning.layout import itemsize

UNQUANTIZED = (
    "*embed*",
    "*.wte.weight",
    "*.wpe.weight",
    "*lm_head.weight",
    "*.gate.weight",
    "*_gate.weight",
    "*router*",
)
"""Two-dimensional weights that quantised checkpoints leave as they are: embeddings, output layers and routers."""


@dataclass(frozen=True)
class TensorSelection:
    """Which tensors travel, and as what.

    Patterns are shell patterns on checkpoint names (`*.mlp.gate.weight`), case sensitive. `*` matches dots too. Raises
    `ConfigError` for anything but a sequence of strings.

    exclude: tensors that are never pushed.
    buffers: whether persistent buffers travel. The others never do.
    dtypes: pattern to torch's dtype name on the wire, in place of the narrower of the trainer's and the engine's. The
        first match counts. Raises `ConfigError` for a dtype that does not exist.
    unquantized: with `WeightSync(quantize=...)`, the two-dimensional tensors `....weight` that travel as they are. All
        others of these are quantised. It must be what the engine's checkpoint has left as it is.
    frozen: tensors that the first push sends and later pushes do not, until the `WeightSync` is closed or a push fails.
        A frozen tensor that changes after all is not noticed. One that shares an engine parameter with something that
        trains, or a module that must be loaded whole, still travels. Where an engine has lost weights in between, as in
        vLLM's sleep at level 2, a push sends everything. With verify="none" that is not noticed.
    only_trained: whether parameters that need no gradient, and have no adapter, are frozen as well.
    rename: regular expression to what takes the place of each match in a name, in this order; or a function that
        returns the new name. `exclude` is of the names before, all other patterns are of those after. Where a push
        copies weights or saves them.
    """

    exclude: Sequence[str] = ()
    buffers: bool = True
    frozen: Sequence[str] = ()
    only_trained: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    unquantized: Sequence[str] = UNQUANTIZED
    rename: Mapping[str, str] | Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        for name in ("exclude", "frozen", "unquantized"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        if not isinstance(self.dtypes, Mapping):
            raise ConfigError(f'dtypes={self.dtypes!r}; expected pattern to dtype, such as {{"*.router.*": "float32"}}')
        for pattern, dtype in self.dtypes.items():
            try:
                itemsize(dtype)
            except ConfigError as error:
                raise ConfigError(f"dtypes[{pattern!r}]: {error.message}") from None
        if not isinstance(self.rename, Mapping):
            if self.rename is not None and not callable(self.rename):
                raise ConfigError(f"rename={self.rename!r}; expected pattern to replacement, or a function of a name")
            return
        for pattern, replacement in self.rename.items():
            try:
                re.sub(pattern, replacement, "")
            except (re.error, TypeError, IndexError) as error:
                raise ConfigError(f"rename[{pattern!r}]={replacement!r}: {error}") from None

    def unmatched_patterns(self, names: Sequence[str]) -> list[str]:
        """Return the patterns of `frozen` and `dtypes` that match none of the names, most likely by a typo."""
        return [pattern for pattern in (*self.frozen, *self.dtypes) if not fnmatch.filter(names, pattern)]

    def renamed(self, name: str) -> str:
        """Return the name under which `name` travels. Raises `ConfigError` where a function returns none."""
        if self.rename is None:
            return name
        if isinstance(self.rename, Mapping):
            for pattern, replacement in self.rename.items():
                name = re.sub(pattern, replacement, name)
            return name
        found = self.rename(name)
        if not isinstance(found, str):
            raise ConfigError(f"rename gives {found!r} for {name}; expected a name. TensorSelection.exclude leaves out")
        return found

    def excludes(self, name: str) -> bool:
        """Return whether `name` never travels."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def freezes(self, name: str, trains: bool) -> bool:
        """Return whether only the first push sends `name`, which `trains` or does not."""
        return (self.only_trained and not trains) or any(fnmatchcase(name, pattern) for pattern in self.frozen)

    def wire_dtype(self, name: str) -> str | None:
        """Return the dtype that `name` is declared to travel in, or None."""
        return next((dtype for pattern, dtype in self.dtypes.items() if fnmatchcase(name, pattern)), None)

    def quantizes(self, name: str) -> bool:
        """Return whether `name`, if it has two dimensions, is quantised where weights are."""
        return name.endswith(".weight") and not any(fnmatchcase(name, pattern) for pattern in self.unquantized)


def _patterns(name: str, given: object) -> tuple[str, ...]:
    """Return patterns as a tuple. Raise `ConfigError` for one string, which would be read letter by letter."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f'{name}={given!r}; expected a sequence of patterns, such as {name}=("*.mlp.*",)')
    return tuple(given)
