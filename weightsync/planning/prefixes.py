"""Renames of tensors with a prefix too many or too few, such as a wrapped model's. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

_MOST_PARTS = 3
"""Most parts of a prefix to take away, as in "policy.module."."""


@dataclass(frozen=True)
class Rename:
    """An item of `TensorSelection.rename`."""

    pattern: str
    replacement: str

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the new name of each name that changes."""
        new = {name: re.sub(self.pattern, self.replacement, name) for name in names}
        return {name: other for name, other in new.items() if other != name}


def find_rename(
    names: Sequence[str], beginnings: Iterable[str], find: Callable[[dict[str, str]], Collection[str]]
) -> tuple[Rename, dict[str, str]] | None:
    """Return the first rename with a place for most of its new names, and these names by the old ones. None: no rename.

    Args:
        names: Names without a place.
        beginnings: Prefixes that the names may lack, such as "model.".
        find: Returns the new names with a place, given all new names by the old ones.
    """
    for rename in _renames(names, beginnings):
        new = rename.of(names)
        placed = find(new) if new else ()
        kept = {old: name for old, name in new.items() if name in placed}
        if 2 * len(kept) > len(new):
            return rename, kept
    return None


def _renames(names: Sequence[str], beginnings: Iterable[str]) -> Iterator[Rename]:
    """Yield renames: without the first parts or another part of most names, then with one of `beginnings` added."""
    ((first, _),) = Counter(name.partition(".")[0] for name in names).most_common(1)
    parts = next(name for name in names if name.partition(".")[0] == first).split(".")
    for count in range(1, min(_MOST_PARTS + 1, len(parts))):
        yield Rename(f"^{re.escape('.'.join(parts[:count]))}\\.", "")
    yield from (Rename(f"{re.escape(part)}\\.", "") for part in parts[1:-1] if not part.isdigit())
    yield from (Rename("^", beginning) for beginning in beginnings)
