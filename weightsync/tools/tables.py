"""Tables of text for a terminal, as wide as their cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> None:
    """Print `columns` above `rows`. `alignment` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = (f"{cell:{a}{width}}" for cell, a, width in zip(row, alignment, widths, strict=True))
        print_line(console, "  ".join(cells).rstrip())


def print_line(console: Console, text: str) -> None:
    """Print `text` as it stands, without markup, on one line."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
