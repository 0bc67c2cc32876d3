"""What was measured: one object for each case, and what is made of them for readers. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weightsync.bench.cases import WEIGHTSYNC, Case
from weightsync.report import format_bytes

SCHEMA = 1
PHASES = ("control_s", "gather_s", "register_s", "save_s", "transfer_s", "verify_s", "load_s")
"""The parts of a push, in their order; those of weightsync are explained at `PushReport`, `save_s` is that of files,
`register_s` that of checkpoint-engine: into pinned memory of the host."""


@dataclass(frozen=True)
class Spread:
    """Of several repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Result:
    """One case. `first` and each of `repeats` are seconds by name, "total_s" and some of `PHASES`; warm-up pushes are
    left out. `answers` is what was compared after the timing: the largest gap of log-probabilities to a cold start
    from the same weights, infinite when token ids differ. `error` says why there is nothing; then the rest is empty."""

    case: Case
    environment: dict[str, Any]
    limits: dict[str, float]
    nbytes: int
    floor_s: float
    floor_limit: str
    first: dict[str, float] = field(default_factory=dict)
    repeats: tuple[dict[str, float], ...] = ()
    answers: float | None = None
    error: str | None = None

    @property
    def right(self) -> bool:
        """Whether the engines answered exactly as cold ones."""
        return self.error is None and self.answers == 0

    def spread(self, name: str = "total_s") -> Spread:
        return Spread.of([repeat[name] for repeat in self.repeats])

    def phases(self) -> dict[str, Spread]:
        """Of each phase that the repeats have."""
        return {name: self.spread(name) for name in PHASES if self.repeats and name in self.repeats[0]}


def to_json(results: Iterable[Result]) -> str:
    """A list with one object for each case, which stands for itself: the case, where and beside which limits it was
    measured, every repeat, and their median, least and most. An infinite gap is the text "other tokens"."""
    rows = []
    for result in results:
        row = {"schema": SCHEMA, **asdict(result), "right": result.right}
        if result.answers == float("inf"):
            row["answers"] = "other tokens"
        row["seconds"] = (
            {name: asdict(spread) for name, spread in {"total_s": result.spread(), **result.phases()}.items()}
            if result.repeats
            else {}
        )
        rows.append(row)
    return json.dumps(rows, indent=1)


def from_json(text: str) -> list[Result]:
    """What `to_json` wrote."""
    results = []
    for row in json.loads(text):
        fields = {key: value for key, value in row.items() if key not in ("schema", "right", "seconds")}
        fields["case"] = Case(**fields["case"])
        fields["repeats"] = tuple(fields["repeats"])
        if fields["answers"] == "other tokens":
            fields["answers"] = float("inf")
        results.append(Result(**fields))
    return results


EXPLAINED = (
    "A push, or what a peer has in its place, on the trainer's clock. Lower bound: what that limit of the machine "
    "takes for the bytes that must pass it; under 1 ms no ratio to it is given. Answers: token ids and "
    "log-probabilities after the last push, against a cold start from the same weights."
)
COLUMNS = ("median", "min - max", "first push", "lower bound", "times bound", "answers", "case")
_LEAST_BOUND_S = 1e-3
"""A ratio to less than this would be one of fixed costs."""


def row_of(result: Result) -> tuple[str, ...]:
    """A result as the columns of a table."""
    case = f"{result.case} ({format_bytes(result.nbytes)})"
    bound = lower_bound(result.floor_s, result.floor_limit)
    if not result.repeats:
        return "failed", "", "", bound, "", "", case
    total = result.spread()
    answers = "equal" if result.right else "other tokens" if result.answers == float("inf") else "other logps"
    return (
        milliseconds(total.median),
        f"{milliseconds(total.least)} - {milliseconds(total.most)}",
        milliseconds(result.first["total_s"]),
        bound,
        "-" if result.floor_s < _LEAST_BOUND_S else f"{total.median / result.floor_s:.1f} x",
        answers,
        case,
    )


def lower_bound(seconds: float, limit: str) -> str:
    """Such as device copy: 7.6 ms."""
    return f"{limit}: {milliseconds(seconds)}"


def milliseconds(seconds: float) -> str:
    """Such as 0.1 ms, 36 ms: two or three figures that mean something."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def markdown(results: Sequence[Result], refused: Sequence[tuple[Case, str]], plots: Sequence[str]) -> str:
    """The report: where, limits, times, phases, what was left out, and the plots, by file name."""
    lines = ["# weightsync bench", ""]
    if results:
        lines += [f"- {name}: {value}" for name, value in results[0].environment.items()]
        lines += ["", "## Limits of this machine", "", *markdown_table(("limit", "GB/s"), _limits(results)), ""]
        lines += [
            "## Times",
            "",
            EXPLAINED,
            "",
            *markdown_table(COLUMNS, [row_of(result) for result in results]),
            "",
            "## Phases",
            "",
            "Medians. They overlap, so they do not add up to the whole.",
            "",
            *markdown_table(
                ("case", *(name.removesuffix("_s") for name in PHASES)),
                [(str(r.case), *_phase_row(r)) for r in results if r.repeats],
            ),
            "",
        ]
    if failed := [(str(result.case), result.error.splitlines()[0]) for result in results if result.error]:
        lines += ["## Failed", "", *markdown_table(("case", "error"), failed), ""]
    if refused:
        lines += ["## Not measured", "", *markdown_table(("case", "why"), reasons(refused)), ""]
    lines += [f"![{name}]({name})" for name in plots]
    return "\n".join(lines).rstrip() + "\n"


def reasons(refused: Iterable[tuple[Case, str]]) -> list[tuple[str, str]]:
    """Each reason once, with the cases that it holds for."""
    found: dict[str, list[Case]] = {}
    for case, why in refused:
        found.setdefault(why, []).append(case)
    return [(f"{cases[0]}{_and_more(len(cases) - 1)}", why) for why, cases in found.items()]


def _and_more(cases: int) -> str:
    return f", and {cases} more case{'s' if cases > 1 else ''}" if cases else ""


def failures(results: Iterable[Result]) -> list[Result]:
    """The pushes of weightsync that failed, or after which an engine did not answer as a cold one."""
    return [result for result in results if result.case.way == WEIGHTSYNC and not result.right]


def _limits(results: Sequence[Result]) -> list[tuple[str, ...]]:
    return [(name, f"{speed:.1f}") for name, speed in results[0].limits.items()]


def _phase_row(result: Result) -> list[str]:
    phases = result.phases()
    return [milliseconds(phases[name].median) if name in phases else "" for name in PHASES]


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Its lines, for a terminal. `alignment` has "<" or ">" for each column: where its cells begin or end alike."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(f"{cell:{a}{width}}" for cell, a, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Its lines."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
