"""The pictures of a benchmark, as PNG. Needs matplotlib: the extra `bench`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightsync.bench.cases import WEIGHTSYNC, Case
from weightsync.bench.results import PHASES, Result

_WIDTH, _HEIGHT, _DPI = 9.0, 5.0, 120
_CUT = 6.0


def draw(results: Sequence[Result], folder: Path) -> list[str]:
    """Draw into `folder` what the results have enough points for; gives the names of the files. Raises
    `ModuleNotFoundError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    measured = [result for result in results if result.repeats]
    plots: dict[str, tuple[bool, Callable[[Any, Sequence[Result]], None]]] = {
        "phases.png": (bool(measured), _phases),
        "bytes.png": (len({result.nbytes for result in measured}) > 1, _bytes),
        "receivers.png": (len({result.case.receivers for result in measured}) > 1, _receivers),
    }
    drawn = []
    for name, (enough, plot) in plots.items():
        if enough:
            height = max(_HEIGHT, 1.0 + 0.35 * len(measured)) if plot is _phases else _HEIGHT
            figure, axes = pyplot.subplots(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
            axes.set_prop_cycle(color=pyplot.get_cmap("tab20")(range(20)))  # there may be more than ten ways
            plot(axes, measured)
            figure.savefig(folder / name)
            pyplot.close(figure)
            drawn.append(name)
    return drawn


def _phases(axes: Any, results: Sequence[Result]) -> None:
    """Medians of the phases, stacked, and the whole as a mark, since phases overlap. What takes much longer than any
    push of weightsync is cut off, and its time written there: next to files nothing else could be seen."""
    ordered = sorted(results, key=lambda r: (r.case.way, r.case.transport))
    names = [str(result.case) for result in ordered]
    left = [0.0] * len(ordered)
    for phase in PHASES:
        widths = [result.phases()[phase].median * 1e3 if phase in result.phases() else 0.0 for result in ordered]
        if any(widths):
            axes.barh(names, widths, left=left, label=phase.removesuffix("_s"))
            left = [a + b for a, b in zip(left, widths, strict=True)]
    totals = [result.spread().median * 1e3 for result in ordered]
    axes.plot(totals, names, "k|", markersize=14, label="whole push")
    ours = [total for total, result in zip(totals, ordered, strict=True) if result.case.way == WEIGHTSYNC]
    if ours and max(totals) > (edge := _CUT * max(ours)):
        axes.set_xlim(0, edge)
        for name, total in zip(names, totals, strict=True):
            if total > edge:
                axes.text(edge, name, f"{total:.0f} ms", ha="right", va="center", fontsize=8, backgroundcolor="white")
    axes.set_xlabel("ms, median")
    axes.tick_params(axis="y", labelsize=7)
    axes.figure.legend(fontsize=8, loc="outside upper right", ncols=len(PHASES) + 1)


def _bytes(axes: Any, results: Sequence[Result]) -> None:
    """Time against bytes, log axes; a dashed line is what the limit would take."""
    for way, own in _series(results, lambda r: r.nbytes, lambda c: f"{c.engines} x TP={c.tp}").items():
        spreads = [result.spread() for result in own]
        sizes = [result.nbytes / 1e9 for result in own]
        (line,) = axes.plot(sizes, [spread.median for spread in spreads], "o-", label=way)
        axes.plot(sizes, [result.floor_s for result in own], "--", color=line.get_color(), alpha=0.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("GB that travel")
    axes.set_ylabel("s (dashed: the limit)")
    axes.legend(fontsize=7)


def _receivers(axes: Any, results: Sequence[Result]) -> None:
    """Time against the number of engine workers."""
    for way, own in _series(results, lambda r: r.case.receivers, lambda c: f"{c.shape}, TP={c.tp}").items():
        axes.plot([r.case.receivers for r in own], [r.spread().median * 1e3 for r in own], "o-", label=way)
    axes.set_xticks(sorted({result.case.receivers for result in results}))
    axes.set_xlabel("engine workers")
    axes.set_ylabel("ms, median")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _series(
    results: Sequence[Result], along: Callable[[Result], int], rest: Callable[[Case], str]
) -> dict[str, list[Result]]:
    """Results that are alike but for `along`, in its order; `rest` tells what else sets series apart."""
    series: dict[str, list[Result]] = defaultdict(list)
    for result in sorted(results, key=along):
        case = result.case
        way = f"{case.transport}/{case.bucketer}" if case.way == WEIGHTSYNC else case.way
        series[f"{way}, {case.backend} x{case.ranks} {case.dtype}, {rest(case)}"].append(result)
    return series
