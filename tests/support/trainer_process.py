"""A trainer in a process of its own, which fails where it is told: `python trainer_process.py TRANSPORT URL...`.

It reads one order a line, as JSON, and answers each with a line.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fake_engine import checkpoint, trainer_model
from faults import FaultyTransport

from weightsync import ModuleBucketer, WeightSync, WeightSyncError

TIMEOUT_S = 2.0
"""Of each of its waits."""
CHUNK_BYTES = 64


class TrainerProcess:
    """The process, as a test has it."""

    def __init__(self, folder: Path, transport: str, urls: Sequence[str]) -> None:
        self.transport = transport
        self._errors = (folder / "trainers.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, __file__, transport, *urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def order(self, **order: Any) -> None:
        """Tell it what to do: `push` the checkpoint of this seed, with a `fault`, or `close`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return how the order ended: the "version" that was pushed, or the "error" and its "text"."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"the trainer has not answered within {timeout_s:g} s")
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            assert pipe is not None
            pipe.close()


class _Trainer:
    def __init__(self, transport: str, urls: Sequence[str]) -> None:
        self.transport = FaultyTransport(transport)
        self.sync = WeightSync(
            "fsdp", self.transport, list(urls), bucketer=ModuleBucketer(CHUNK_BYTES), timeout_s=TIMEOUT_S
        )

    def push(self, seed: int, fault: str = "", at: int = 0, slowness_s: float = 0.0) -> dict[str, Any]:
        """Push, and wait so long before each chunk. The fault comes before chunk `at`."""

        def before(chunk: int) -> None:
            time.sleep(slowness_s)
            if chunk == at and fault == "raise":
                raise MemoryError("no memory left")
            if chunk == at and fault == "drop":
                self.drop()

        self.transport.before_chunk = before
        self.transport.flip_a_byte_of = at if fault == "flip" else None
        try:
            return {"version": self.sync.push(trainer_model(checkpoint(seed))).version}
        except WeightSyncError as error:
            return {"error": type(error).__name__, "text": str(error)}

    def drop(self) -> None:
        """Lose the connection to the last engine, as a network does."""
        self.sync._strategy._fleet.workers[-1].connection._sock.shutdown(2)  # type: ignore[attr-defined]

    def close(self) -> dict[str, Any]:
        self.sync.close()
        return {}


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    trainer = _Trainer(sys.argv[1], sys.argv[2:])
    for line in sys.stdin:
        order = json.loads(line)
        found = trainer.close() if order.pop("close", False) else trainer.push(order.pop("push"), **order)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
