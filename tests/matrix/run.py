"""Runs the failure matrix: `python tests/matrix/run.py [--client NAME ...] [--transport NAME ...] [--match TEXT]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parent)]

import conftest  # noqa: E402,F401  the engines' environment
from cells import cells_of  # noqa: E402
from driver import Bench  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--client", default="stand-in")
    parser.add_argument("--transport", default="ipc")
    parser.add_argument("--match", default="")
    parser.add_argument("--timeout-s", type=float, default=6.0)
    parser.add_argument("--most-s", type=float, default=500.0)
    parser.add_argument("--results", type=Path, default=Path(".matrix"))
    args = parser.parse_args()
    args.results.mkdir(exist_ok=True)
    results = args.results / f"{args.client}-{args.transport}.jsonl"
    known = (
        {json.dumps(json.loads(line)["cell"]) for line in results.read_text().splitlines()}
        if results.exists()
        else set()
    )
    due = [
        cell
        for cell in cells_of(args.client, args.transport)
        if args.match in str(cell) and json.dumps(asdict(cell)) not in known
    ]
    ends = time.monotonic() + args.most_s
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Bench(args.client, args.transport, Path(folder), args.timeout_s)) as bench,
    ):
        found = []
        for number, cell in enumerate(due):
            if time.monotonic() > ends:
                print(f"{len(due) - number} cells are left")
                break
            found.append(result := bench.run(cell))
            print(f"{cell}: {result.outcome} after {result.seconds:.1f} s, {result.state}", flush=True)
            for fault in result.faults:
                print(f"    {fault}", flush=True)
        bench.settle_descriptors()
        with results.open("a") as file:
            for result in found:
                file.write(json.dumps(asdict(result)) + "\n")


if __name__ == "__main__":
    main()
