"""Many pushes to one engine, and what they leave behind on both sides: memory, descriptors, threads, shared memory.

`make endurance` runs it over each transport, and prints how much grew in the second half of the pushes. This process is
the trainer, and a stand-in engine has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from engine_process import EngineProcess, fingerprint, trim
from fake_engine import checkpoint, cold, trainer_model

from weightsync import ModuleBucketer, WeightSync
from weightsync.transports.shared_handles import SHARED_MEMORY

TRANSPORTS = "ipc", "broadcast"
SAMPLES = 200
NOISE = {"memory": 1024.0, "descriptors": 2.0, "threads": 2.0, "shm files": 1.0}
"""What a second half may grow by: KiB, and numbers. A call that is under way has a descriptor or two, and a thread."""

Sample = dict[str, float]


def look(pid: int) -> Sample:
    """Return what a process that was trimmed has now. Its memory is what it shares with nobody, in KiB."""
    process = Path("/proc", str(pid))
    memory = next(line for line in (process / "status").read_text().splitlines() if line.startswith("RssAnon"))
    return {
        "memory": float(memory.split()[1]),
        "descriptors": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "shm files": float((process / "maps").read_text().count(f" {SHARED_MEMORY}/#")),
    }


def endure(transport: str, pushes: int, reconnects: int, folder: Path) -> dict[str, list[Sample]]:
    """Push so often, closing and connecting anew so often, and return samples of each side."""
    engine = EngineProcess(folder)
    sides = {"trainer": os.getpid(), "engine": engine.pid}
    models = [trainer_model(checkpoint(seed)) for seed in (1, 2)]
    found: dict[str, list[Sample]] = {side: [] for side in sides}

    def connected() -> WeightSync:
        return WeightSync("fsdp", transport, engine.url, bucketer=ModuleBucketer(64), timeout_s=60.0)

    try:
        sync = connected()
        for number in range(pushes):
            if number and number % (pushes // (reconnects + 1)) == 0:
                sync.close()
                sync = connected()
            sync.push(models[number % 2])
            if number % max(1, pushes // SAMPLES) == 0:
                trim()
                engine.trim()
                for side, pid in sides.items():
                    found[side].append({"push": number, **look(pid)})
        sync.close()
        assert engine.ask()["weights"] == fingerprint(cold(checkpoint(2 - pushes % 2)))
    finally:
        engine.kill()
    return found


def growth(samples: Sequence[Sample], what: str) -> float:
    """Return by how much the line through the second half of the samples rises."""
    half = samples[len(samples) // 2 :]
    x, y = [each["push"] for each in half], [each[what] for each in half]
    return statistics.linear_regression(x, y).slope * (x[-1] - x[0])


def table(found: dict[str, dict[str, list[Sample]]]) -> str:
    rows = ["| transport | side | " + " | ".join(NOISE) + " |", "| --- | --- |" + " ---: |" * len(NOISE)]
    for transport, sides in found.items():
        for side, samples in sides.items():
            cells = []
            for what in NOISE:
                grown, unit = growth(samples, what), " KiB" if what == "memory" else ""
                cells.append(f"{grown:+.1f}{unit} ({samples[len(samples) // 2][what]:.0f} to {samples[-1][what]:.0f})")
            rows.append(f"| `{transport}` | {side} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def grown(found: dict[str, list[Sample]]) -> list[str]:
    """Return what has grown by more than noise."""
    return [
        f"{side}: {what} by {by:.1f}"
        for side, samples in found.items()
        for what, noise in NOISE.items()
        if (by := growth(samples, what)) > noise
    ]


def plot(found: dict[str, dict[str, list[Sample]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    for axes, what in zip(figure.subplots(2, 2, sharex=True).flat, NOISE, strict=True):
        for transport, sides in found.items():
            for side, samples in sides.items():
                first = samples[0][what] if what == "memory" else 0.0
                y = [each[what] - first for each in samples]
                axes.plot([each["push"] for each in samples], y, label=f"{transport}, {side}", linewidth=1)
        axes.set_title("memory since the first push, KiB" if what == "memory" else what, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    axes.set_xlabel("pushes")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = argparse.ArgumentParser(description="Push often, and say what grows.")
    options.add_argument("pushes", type=int)
    options.add_argument("reconnects", type=int)
    options.add_argument("--samples", type=Path, help="write all samples as JSON here")
    options.add_argument("--svg", type=Path, help="draw them here")
    options = options.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for transport in TRANSPORTS:
            begun = time.monotonic()
            found[transport] = endure(transport, options.pushes, options.reconnects, Path(folder))
            print(f"{transport}: {options.pushes} pushes in {time.monotonic() - begun:.0f} s", flush=True)
    print(table(found))
    if options.samples:
        options.samples.write_text(json.dumps(found))
    if options.svg:
        plot(found, options.svg)
    raise SystemExit("\n".join(f"{transport}, {line}" for transport in found for line in grown(found[transport])) or 0)


if __name__ == "__main__":
    main()
