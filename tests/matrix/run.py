"""Runs the failure matrix, and writes docs/evidence/failure-matrix.md from what it came to.

    python tests/matrix/run.py --client stand-in --transport ipc broadcast [--match "rank 0 killed"] [--most-s 480]
    python tests/matrix/run.py --page

What was run is kept in a folder, and only what is missing there is run. `--again` runs what did not hold, too. The page
keeps what it says of cells that are not in the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "support"), str(HERE.parent)]

import conftest  # noqa: E402,F401  the engines' environment
import page  # noqa: E402
from cells import Cell, cells_of  # noqa: E402
from driver import Bench  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", default="stand-in")
    parser.add_argument("--transport", nargs="+", default=["ipc"])
    parser.add_argument("--match", default="", help="run only cells with this text in their name")
    parser.add_argument("--timeout-s", type=float, default=6.0, help="of pushes in which something is waited for")
    parser.add_argument("--most-s", type=float, default=1e9, help="begin no cell after so long")
    parser.add_argument("--results", type=Path, default=Path(".matrix"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the page, and run nothing")
    args = parser.parse_args()
    args.results.mkdir(exist_ok=True)
    known = page.read(args.results)
    if args.page:
        path = Path("docs/evidence/failure-matrix.md")
        path.write_text(page.page_of(page.signs_on(path.read_text()) | {c: page.sign(r) for c, r in known.items()}))
        return
    done = {cell for cell, result in known.items() if result.holds or not args.again}
    ends = time.monotonic() + args.most_s
    for transport in args.transport:
        due = [cell for cell in cells_of(args.client, transport) if args.match in str(cell) and cell not in done]
        if due:
            with (args.results / f"{args.client}-{transport}.jsonl").open("a", buffering=1) as file:
                run(due, args.timeout_s, ends, file)


def run(due: Sequence[Cell], timeout_s: float, ends: float, file: TextIO) -> None:
    """Run cells of one client and transport, and note what they came to."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Bench(due[0].client, due[0].transport, Path(folder), timeout_s)) as bench,
    ):
        for number, cell in enumerate(due):
            if time.monotonic() > ends:
                print(f"{len(due) - number} cells are left")
                break
            result = bench.run(cell)
            file.write(json.dumps(asdict(result)) + "\n")
            print(f"{cell}: {result.outcome} after {result.seconds:.1f} s, {result.state}", flush=True)
            for fault in result.faults:
                print(f"    {fault}", flush=True)


if __name__ == "__main__":
    main()
