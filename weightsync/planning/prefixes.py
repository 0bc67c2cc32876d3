"""Renames of tensors with a prefix too many or too few, such as a wrapped model's. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

_MOST_PARTS = 3
"""Most parts of a prefix to take away, as in "policy.module."."""


def find_rename(
    names: Sequence[str], beginnings: Iterable[str], find: Callable[[dict[str, str]], Collection[str]]
) -> tuple[dict[str, str], dict[str, str]] | None:
    """Return a `TensorSelection.rename` with a place for most of its new names, and these by the old ones, or None.

    Args:
        names: Names without a place.
        beginnings: Prefixes that the names may lack, such as "model.".
        find: Returns the new names with a place, given all new names by the old ones.
    """
    for pattern, replacement in _renames(names, beginnings):
        renamed = {name: re.sub(pattern, replacement, name) for name in names}
        new = {old: name for old, name in renamed.items() if name != old}
        placed = find(new) if new else ()
        kept = {old: name for old, name in new.items() if name in placed}
        if 2 * len(kept) > len(new):
            return {pattern: replacement}, kept
    return None


def _renames(names: Sequence[str], beginnings: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield patterns with replacements: to take parts of most names away, then to add one of `beginnings`."""
    ((first, _),) = Counter(name.partition(".")[0] for name in names).most_common(1)
    parts = next(name for name in names if name.partition(".")[0] == first).split(".")
    for count in range(1, min(_MOST_PARTS + 1, len(parts))):
        yield f"^{re.escape('.'.join(parts[:count]))}\\.", ""
    yield from ((f"{re.escape(part)}\\.", "") for part in parts[1:-1] if not part.isdigit())
    yield from (("^", beginning) for beginning in beginnings)
