"""Results of a benchmark as a picture: a bar from each case's lower bound to its median in training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError
from weightsync.report import format_bytes, format_seconds
from weightsync.tools.bench.cases import WEIGHTSYNC, Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PEERS, INK = "#56B4E9", "#E69F00", "#333333"
"""Colours apart to all kinds of colour vision, as in Okabe and Ito's palette."""
STYLE: dict[str, Any] = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "weightsync", "axes.edgecolor": INK}
_COLUMNS = ((62, "median"), (118, "limit"), (180, "first push"))
"""The right edge of each column of numbers, in points right of the bars."""
_ROW_INCHES = 0.34


def check_plot(path: Path) -> None:
    """Raise `ConfigError` for a picture that cannot be drawn here."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: expected a name that ends in .svg or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'weightsync[plot]'")


def describe(rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return a title of the properties that all cases share, and a label of the other ones for each case."""
    properties = []
    for row in rows:
        case = Case(**row["case"])
        way = case.transport if case.way == WEIGHTSYNC else case.way
        size = f"{case.shape} ({format_bytes(row['nbytes'])})"
        start = "" if case.starts_cold else "from dummy weights"
        quantization = "unquantised" if case.quantization == "none" else case.quantization
        trainer, bucketer = f"trainer {case.backend} x{case.ranks}", case.bucketer and f"by {case.bucketer}"
        client, graphs = f"client {case.client}", f"CUDA graphs {row['graphs']}" if row.get("graphs") else ""
        gpus = ", ".join(dict.fromkeys(row["environment"]["gpus"])) or row["environment"]["cpu"]
        engine = (f"engine {case.engine}", quantization, client, start, graphs)
        properties.append((gpus, size, trainer, case.dtype, way, bucketer, *engine))
    shared = [len({*values} - {""}) <= 1 for values in zip(*properties, strict=True)]
    title = [next(filter(None, values), "") for values in zip(*properties, strict=True)]
    labels = [
        ", ".join(value for value, same in zip(values, shared, strict=True) if value and not same)
        for values in properties
    ]
    return ", ".join(value for value, same in zip(title, shared, strict=True) if value and same), labels


def numbers(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a case's median in training, lower bound and first push, as the picture writes them."""
    if "error" in row:
        return "failed", format_seconds(row["floor_s"]), ""
    median = row["seconds"]["in_training"]["total_s"]["median"]
    return format_seconds(median), format_seconds(row["floor_s"]), format_seconds(row["first"]["total_s"])


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw measured cases into an SVG or PNG file. Equal rows make equal bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    title, labels = describe(rows)
    with rc_context(STYLE):
        width = max(6 + max(map(len, labels)) / 15, len(title) / 12)
        figure = Figure(figsize=(width, 1.4 + _ROW_INCHES * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.use_sticky_edges = False
        for y, row in enumerate(rows):
            floor_s, peer = row["floor_s"], row["case"]["way"] != WEIGHTSYNC
            axes.plot([floor_s] * 2, [y - 0.35, y + 0.35], color=INK, linewidth=2, zorder=3)
            _write(axes, y, numbers(row))
            if "error" not in row:
                total = row["seconds"]["in_training"]["total_s"]
                axes.barh(y, total["median"] - floor_s, 0.5, floor_s, color=PEERS if peer else OURS)
                axes.plot([total["least"], total["most"]], [y, y], color=INK, linewidth=1, marker="|", markersize=6)
        _write(axes, -0.8, [name for _, name in _COLUMNS], weight="bold")
        axes.set_xscale("log")
        low, high = (math.log10(seconds) for seconds in axes.get_xlim())
        axes.set_xlim(10 ** math.floor(low), 10 ** math.ceil(high))
        axes.set(yticks=range(len(rows)), yticklabels=labels, ylim=(len(rows) - 0.5, -0.5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds * 1e3:g} ms"))
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel("a whole push in training, log scale")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["left", "right", "top"]].set_visible(False)
        _explain(figure, any(row["case"]["way"] != WEIGHTSYNC for row in rows))
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture without dates and versions."""
    figure.savefig(
        path, dpi=150, metadata=dict.fromkeys(("Date", "Creator") if path.suffix == ".svg" else ("Software",))
    )


def _write(axes: Axes, y: float, texts: Sequence[str], **style: Any) -> None:
    """Write one line into the columns of numbers."""
    for (x, _), text in zip(_COLUMNS, texts, strict=True):
        transform = axes.get_yaxis_transform()
        axes.annotate(text, (1, y), (x, 0), transform, "offset points", ha="right", va="center", **style)


def _explain(figure: Figure, peers: bool) -> None:
    """Add the legend of `draw`."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    limit = Line2D([], [], color=INK, marker="|", markersize=10, markeredgewidth=2, linestyle="", label="lower bound")
    median = Patch(color=OURS, label="from there to the median")
    most = Line2D([], [], color=INK, linewidth=1, marker="|", label="least to most")
    handles = [limit, median, *[Patch(color=PEERS, label="the same, a peer")] * peers, most]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)
