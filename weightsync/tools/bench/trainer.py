"""One trainer rank of `weightsync bench`. The command starts it with torchrun's variables. All ranks run the same case.

    fill A, start engines, note their answers         rank 0 starts engines from a checkpoint of A, or without weights
    push A                                            "first": connects, plans and maps; the answers must stay. After a
                                                      start without weights, these are the first answers
    fill B, push several times                        "back_to_back"; the answers must change
    generate, step, wait, push; several times         "in_training": as users push
    fill A, push                                      the answers must be the first ones again, to the last bit

Rank 0 writes the measured fields of a result, as JSON, to the file that its order names.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from weightsync.net.child import end_with_parent
from weightsync.strategies.restart import CheckpointTransport
from weightsync.sync import WeightSync
from weightsync.tools.bench.cases import PEERS, Case, lay_out
from weightsync.tools.bench.engines import PROMPTS, Engines, start_engines
from weightsync.tools.bench.models import (
    changer,
    fill,
    gather_ranks,
    join,
    make_trainer,
    save_checkpoint,
    share_memory,
    source_of,
    stepper,
)
from weightsync.tools.bench.peers import make_peer_push
from weightsync.tools.processes import Answer, ChildError, difference

_WAIT_S = 0.3
"""Seconds between a step and its push. Meanwhile the processor's caches lose the bytes of the last push."""
_POLL_S = 0.05

Seconds = dict[str, float]


def main() -> None:
    end_with_parent()
    logging.basicConfig(level=logging.WARNING)
    order, rank = Namespace(**json.loads(sys.argv[1])), os.environ["RANK"]
    try:
        found = run(order)
    except Exception:
        logging.getLogger(__name__).exception("this trainer rank has failed")
        os._exit(1)  # at once: other ranks and engines may hang
    if rank == "0":
        Path(order.result).write_text(json.dumps(found))
    os._exit(0)


def run(order: Namespace) -> dict[str, Any]:
    """Measure one case, and return the fields of a result on rank 0. Collective. Raise any failure."""
    case, folder, gpus = Case(**order.case), Path(order.folder), order.gpus
    config = str(folder / f"{case.shape}-config")
    rank = int(os.environ["RANK"])
    layout = lay_out(case, gpus)
    device = torch.device("cuda", layout.trainers[rank]) if gpus and not order.trainer_on_cpu else torch.device("cpu")
    join(device, alone=case.backend == "plain")
    # A CPU draws other numbers than a GPU, and engines start from the numbers of rank 0.
    draw = torch.device("cuda", layout.trainers[rank]) if gpus else torch.device("cpu")
    model = make_trainer(case.backend, config, getattr(torch, case.dtype), device)
    if case.transport == "ipc" and gpus == 0:
        share_memory(model, case.backend)
    fill(model, case.backend, "A", draw)
    engines = _start(case, layout.engines, config, folder, order.graphs, draw, order.timeout_s)
    try:
        push = _make_push(case, model, engines, folder, order.max_bytes, order.timeout_s)
        expected = _answers(engines)
        found: dict[str, Any] = {"first": push()}
        if not case.starts_cold:
            expected = _answers(engines)
        elif _gap(engines, expected) != 0:
            raise ChildError("a push of the engine's own weights has changed its answers")
        fill(model, case.backend, "B", draw)
        for _ in range(order.num_iters_warmup):
            push()
        for engine in engines:
            engine.extra_bytes(start=True)
        found["back_to_back"] = [push() for _ in range(order.num_iters)]
        found["extra_bytes"] = [nbytes for engine in engines for nbytes in engine.extra_bytes(start=False)]
        if old := unchanged(engines, expected):
            raise ChildError(f"a push of other weights has not changed {old} answers of the engines")
        step = stepper(model, case.backend) if case.changed == 1 else changer(model, case.backend, case.changed)
        found["in_training"] = []
        for _ in range(order.num_iters):
            _answers(engines)
            step()
            time.sleep(_WAIT_S)
            gather_ranks(device)  # the push's time must not include the ranks' skew after a step
            found["in_training"].append(push())
        fill(model, case.backend, "A", draw)
        push()
        found["answers"] = _gap(engines, expected)
        return found
    finally:
        for engine in engines:
            engine.stop()


def _answers(engines: Engines) -> list[list[Answer]]:
    return [engine.generate(PROMPTS) for engine in engines]


def _gap(engines: Engines, expected: list[list[Answer]]) -> float:
    """Return the largest difference of an engine's log-probabilities to the expected ones. 0 without engines."""
    return max((difference(a, b) for a, b in zip(_answers(engines), expected, strict=True)), default=0.0)


def unchanged(engines: Engines, expected: list[list[Answer]]) -> int:
    """Return how many answers are the expected ones. Each core of an engine answers some of the prompts."""
    pairs = zip(chain(*_answers(engines)), chain(*expected), strict=True)
    return sum(difference([one], [other]) == 0 for one, other in pairs)


def _start(
    case: Case, gpus: Any, config: str, folder: Path, graphs: str, draw: torch.device, timeout_s: float
) -> Engines:
    """Start the engines on rank 0. Other ranks wait until they answer."""
    place = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    ready = folder / "ready"
    if place["RANK"] == "0":
        model = folder / case.shape if case.starts_cold else Path(config)
        if case.starts_cold:
            save_checkpoint(config, "A", model, draw)
        own = {name: os.environ.pop(name) for name in ("LOCAL_RANK",) if name in os.environ}  # DeepSpeed's
        engines = start_engines(case, model, gpus, graphs, folder)
        os.environ.update(own)
        ready.touch()
        return engines
    ends = time.monotonic() + timeout_s
    while not ready.exists():  # poll on the host: an NCCL barrier would take time from an engine on this GPU
        if time.monotonic() > ends:
            raise ChildError(f"rank 0 has started no engines within {timeout_s:g} s")
        time.sleep(_POLL_S)
    return []


def _make_push(
    case: Case, model: Any, engines: Engines, folder: Path, max_bytes: int | None, timeout_s: float
) -> Callable[[], Seconds]:
    """Return a function that pushes the current weights and returns the seconds of its phases. Collective.

    "total_s" is the time of the whole call, on this process's clock.
    """
    phases: Callable[[], Seconds]
    if case.way in PEERS:
        phases = make_peer_push(case, model, engines, folder / "pushed")
    else:
        transport: Any = CheckpointTransport(folder / "pushed") if case.transport == "checkpoint" else case.transport
        targets = [engine.target for engine in engines] or None
        backend: Any = source_of(case.backend)
        options: Any = {"bucketer": case.bucketer, "max_bytes": max_bytes, "timeout_s": timeout_s, "progress": False}
        if case.encoding != "none":
            options["encoding"] = case.encoding
        sync = WeightSync(backend, transport, targets, **options)

        def phases() -> Seconds:
            return {name: value for name, value in vars(sync.push(model)).items() if name.endswith("_s")}

    def push() -> Seconds:
        started = time.perf_counter()
        return {**phases(), "total_s": time.perf_counter() - started}

    return push


if __name__ == "__main__":
    main()
