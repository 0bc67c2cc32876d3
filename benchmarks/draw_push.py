"""A picture of the stages of pushes: a bar for each stage of the trainer and of a worker, on one clock.

python benchmarks/draw_push.py benchmarks/results/2026-11-27-h200-push-timeline.json docs/internals/push.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from weightsync.report import format_bytes, format_seconds
from weightsync.tools.bench.plot import INK, OURS, PEERS, STYLE, save

COLOURS = {"trainer": OURS, "worker": PEERS}


def title(found: dict[str, Any], push: dict[str, Any]) -> str:
    """Return the heading of one push."""
    phases = ", ".join(f"{name.removesuffix('_s')} {format_seconds(s)}" for name, s in push["worker_s"].items())
    what = f"{found['shape']} ({format_bytes(found['nbytes'])}) by {found['transport']}"
    return f"{what}, {push['push']}: {format_seconds(push['total_s'])}. Worker, chunk after chunk: {phases}"


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw each push with an axis of its own."""
    sizes = [len(push["stages"]) + 2 for push in found["pushes"]]
    with rc_context(STYLE):
        figure = Figure(figsize=(9.5, 0.24 * sum(sizes)), layout="constrained")
        panels = figure.subplots(len(sizes), height_ratios=sizes, squeeze=False)[:, 0]
        for axes, push in zip(panels, found["pushes"], strict=True):
            for y, stage in enumerate(push["stages"]):
                colour, end = COLOURS[stage["lane"]], stage["start_ms"] + stage["ms"]
                axes.barh(y, stage["ms"], 0.7, stage["start_ms"], color=colour, edgecolor=colour)
                axes.annotate(
                    format_seconds(stage["ms"] / 1e3), (end, y), (4, 0), textcoords="offset points", va="center"
                )
            labels = [f"{stage['lane']}: {stage['stage']}" for stage in push["stages"]]
            axes.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.4, -0.6))
            axes.set_xlim(0, push["total_s"] * 1e3 * 1.08)
            axes.set_title(title(found, push), loc="right", fontsize=9, color=INK)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["left", "right", "top"]].set_visible(False)
        panels[-1].set_xlabel("ms since the push began")
        save(figure, path)


def main() -> None:
    options = argparse.ArgumentParser(description="Draw the stages of pushes.")
    options.add_argument("results", type=Path)
    options.add_argument("picture", type=Path)
    options = options.parse_args()
    draw(json.loads(options.results.read_text()), options.picture)


if __name__ == "__main__":
    main()
