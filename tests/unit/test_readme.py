"""The README is what PyPI shows: short, with links that work there, and figures that were measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 110


def medians_ms(results: Any) -> Iterator[int]:
    """Yield the whole milliseconds of a file's medians: of pushes between training steps, or of peers."""
    for case in results["cases"] if isinstance(results, dict) and "cases" in results else [results]:
        for each in case if isinstance(case, list) else [case]:
            yield from (round(1000 * row["median_s"]) for row in each.get("rows", ()))
            if pushes := each.get("in_training", each.get("in_training_s")):
                seconds = [push["total_s"] if isinstance(push, dict) else push for push in pushes]
                yield round(1000 * median(seconds))


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_links_of_the_readme_are_absolute():
    assert [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link] == []


def test_each_figure_of_the_readme_is_in_its_results():
    figures = re.findall(r"\[(\d+) ms\]\(\S+/(benchmarks/results/[\w.-]+)\)", README)
    assert len(re.findall(r"\d ms\b", README.partition("## Quickstart")[0])) == len(figures) > 3
    assert not {
        (figure, name)
        for figure, name in figures
        if int(figure) not in medians_ms(json.loads((ROOT / name).read_text(encoding="utf-8")))
    }
