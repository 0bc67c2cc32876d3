"""What the doctor has found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Finding:
    """One line. `text` is what was found, what to do, or why the check was left out."""

    status: str
    check: str
    text: str


Findings: TypeAlias = Iterator[Finding]


def found(check: str, good: bool, text: str, otherwise: str) -> Finding:
    return Finding("pass", check, text) if good else Finding("FAIL", check, otherwise)
