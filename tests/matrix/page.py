"""Writes docs/evidence/failure-matrix.md from what cells came to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from cells import DEAD, MUTE, NEW, PAUSED, UNTOUCHED, Cell, cells_of, phases_of
from driver import Result

SIGNS = {UNTOUCHED: "=", MUTE: "P", NEW: "n", PAUSED: "np", DEAD: "†"}
FAILS = "✗"
_SLOW_S = 1.0
_ABOUT = """# The failure matrix

`make matrix` writes this page, and keeps what it says of cells that were not run again. Each cell of its tables is
a push in which something was killed, stopped or cut off, at the moment that the column names.
[Failures](../operate/failures.md) says what users see of it.

{ran} cells were run, {real} of them with vLLM. {held} hold. A cell holds when all of this is true:

- The error comes within `timeout_s` and 5 s. Three more seconds were allowed for, on a busy machine.
- It is of the right class, names what failed, and is the same on every rank that is left.
- The engine then is as it was, or mute. A push that was complete before the failure may also have left the new version.
- The next push makes the engine serve its weights. A stand-in then has the bits of a cold start, and vLLM its answers.
- Processes that are left have no thread and no open file more than before. Nothing is left in `/dev/shm`.

The engine is a stand-in of two processes, a vLLM server, an `AsyncLLM` in an actor of Ray, or an `LLM` or `AsyncLLM` in
the process of the only rank. Else there are two ranks. The core is the process that vLLM's scheduler is in. An `LLM`
may have it in the rank's process. An `LLM` cannot be paused: where it is mute, it is `POISONED`.

A new trainer makes the next push where a rank was killed, and else the same one. Where rank 0 is stopped, another
trainer takes the engine over meanwhile, and rank 0 finds that out when it goes on. With `single_copy` the ranks then
attach models anew. What is stopped or cut off comes back after the others have raised. The push after that may fail
once more where the failure was in `close`, or packets were refused. What broke behind the last message is found by the
next one, and a worker that hears nothing waits for it. Where it is the connection between two ranks, rank 0 has pushed,
and the other rank raises.

| sign | the engine after the failure |
| --- | --- |
| = | is as it was, and generates |
| P | is paused and `POISONED` |
| n | has the new version |
| np | has the new version, and is paused |
| † | has ended, and was started anew |
| ✗ | does not hold: see the notes |

A number is the seconds until the error came, where that took more than one.

| column | where rank 0 is |
| --- | --- |
| connect | the engine's workers have come |
| plan | they have said how they load |
| open | generation is paused and the update open; nothing is written |
| go | the workers were told to go; rank 0 has sent nothing |
| run | in the middle of its chunks |
| done | it has sent all |
| commit | all have loaded; nobody was told to commit |
| close | the version is stamped; generation is still paused |

With `changes` few weights have changed since the push before, `broadcast` has an `encoding`, and changed words are
sent, as between GPUs. A worker writes nothing before the last heads have come. So each worker of a stand-in at P has
all bits of the old weights or all bits of the new ones. After an error the next push sends everything. "Damaged" is a
bit of the bytes that rank 0 sends next: of its changes, or in last of a head.

| column | where rank 0 is, with `changes` |
| --- | --- |
| run | in the middle of its parts |
| last | it has sent all changes, and not the last heads |

With `lora` adapters alone are pushed, and the weights stay as they are. There "=" means that the newest adapter is the
one before, and "n" that it is the pushed one. An adapter whose files all ranks have written is not taken back where a
rank is lost.

| column | where rank 0 is, with `lora` |
| --- | --- |
| plan | the engines were asked what they take |
| save | the files are made, and rank 0 has written nothing |
| load | all ranks have written |
| loaded | the engines have loaded the adapter; no other rank was told |
"""


def read(folder: Path) -> dict[Cell, Result]:
    """Return the last result of each cell that was run."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            cell = Cell(**row.pop("cell"))
            found[cell] = Result(cell, **row)
    return found


def sign(result: Result) -> str:
    if not result.holds:
        return f"{FAILS} {'; '.join(result.faults)}".replace("\n", " ")[:600]
    seconds = f" {result.seconds:.0f}" if result.seconds > _SLOW_S else ""
    return SIGNS[result.state] + seconds


def signs_on(page: str) -> dict[Cell, str]:
    """Return what a page says of each cell that there still is."""
    notes = dict(re.findall(r"^(\d+)\. [^:]+: [^:]+: (.*)", page, re.MULTILINE))
    found = {}
    for title, text in re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE):
        client, transport = title.rsplit(", ", 1)
        header, _, *rows = ([part.strip() for part in line[1:-1].split("|")] for line in text.splitlines())
        for name, *row in rows:
            who, how = name.rsplit(" ", 1)
            for phase, told in zip(header[1:], row, strict=True):
                cell = Cell(client, transport, who, how, phase)
                if told and cell in cells_of(client, transport):
                    found[cell] = f"{FAILS} {notes[told.split()[1]]}" if told.startswith(FAILS) else told
    return found


def page_of(signs: dict[Cell, str]) -> str:
    held = sum(not told.startswith(FAILS) for told in signs.values())
    real = sum(not cell.client.startswith("stand-in") for cell in signs)
    parts = [_ABOUT.format(ran=len(signs), real=real, held=held)]
    notes: list[str] = []
    for client in dict.fromkeys(cell.client for cell in sorted(signs, key=lambda cell: cell.client != "stand-in")):
        of_client = {cell: told for cell, told in signs.items() if cell.client == client}
        for transport in dict.fromkeys(cell.transport for cell in of_client):
            cells = {cell: told for cell, told in of_client.items() if cell.transport == transport}
            parts.append(f"## {client}, {transport}\n\n" + "\n".join(table(cells, notes)) + "\n")
    if notes:
        parts.append("## Cells that do not hold\n\n" + "\n".join(notes) + "\n")
    return "\n".join(parts)


def table(cells: dict[Cell, str], notes: list[str]) -> Iterator[str]:
    """Yield the lines of a table, and note the cells that do not hold."""
    columns = phases_of(next(iter(cells)).transport)
    phases = [phase for phase in columns if any(cell.phase == phase for cell in cells)]
    yield f"| | {' | '.join(phases)} |"
    yield "| --- |" + " --- |" * len(phases)
    shown = dict(cells)
    for cell, told in cells.items():
        if told.startswith(FAILS):
            notes.append(f"{len(notes) + 1}. {cell}: {told.removeprefix(FAILS).strip()}")
            shown[cell] = f"{FAILS} {len(notes)}"
    for who, how in dict.fromkeys((cell.who, cell.how) for cell in cells):
        row = {cell.phase: told for cell, told in shown.items() if (cell.who, cell.how) == (who, how)}
        yield f"| {who} {how} | {' | '.join(row.get(phase, '') for phase in phases)} |"
