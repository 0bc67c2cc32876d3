"""Results of the doctor's checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Finding:
    """One line. `text` has the result, the remedy, or the reason for a check left out."""

    status: str
    check: str
    text: str


Findings: TypeAlias = Iterator[Finding]


def found(check: str, good: bool, text: str, otherwise: str) -> Finding:
    return Finding("pass", check, text) if good else Finding("FAIL", check, otherwise)
