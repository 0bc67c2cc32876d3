"""What a key costs: pushes of 1 GiB over `ipc` to a stand-in engine, by turns with one and without.

`PYTHONPATH=. python tests/support/key_cost.py` prints the medians. Both sides are one process, so its processor time is
that of the whole push.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Iterable

import torch
from fake_engine import FakeEngine, ModuleHost, trainer_model
from torch import nn

from weightsync import WeightSync
from weightsync.net.authentication import FrameMac

TURNS = 10
LAYERS, ROWS, WIDTH = 64, 2048, 2048
"""1 GiB in float32."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(LAYERS):
            self.register_parameter(f"w{number}", nn.Parameter(torch.empty(ROWS, WIDTH)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def main() -> None:
    torch.set_num_threads(1)
    weights = {f"w{number}": torch.randn(ROWS, WIDTH) for number in range(LAYERS)}
    engine = FakeEngine(ModuleHost(Layers, weights))
    model = trainer_model(weights)
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    sealing: list[float] = []
    with_seal = FrameMac.of

    def timed(seal: FrameMac, frame: bytes) -> bytes:
        before = time.thread_time()
        found = with_seal(seal, frame)
        sealing[-1] += time.thread_time() - before
        return found

    FrameMac.of = timed  # type: ignore[method-assign]
    key = secrets.token_hex(32)
    for turn in range(2 * TURNS):
        has_key = turn % 2 == 1
        os.environ.pop("WEIGHTSYNC_KEY", None)
        if has_key:
            os.environ["WEIGHTSYNC_KEY"] = key
        with WeightSync("fsdp", "ipc", engine, timeout_s=300.0) as sync:
            sealing.append(0.0)
            sync.push(model)  # connects
            sealing[-1] = 0.0
            before = time.process_time()
            wall_s = sync.push(model).total_s
            seconds[has_key].append((wall_s, time.process_time() - before))
    engine.close()
    for at, what in enumerate(("on the clock", "of both sides' processor time")):
        without, with_key = (statistics.median(each[at] for each in seconds[has_key]) for has_key in (False, True))
        change = 100 * (with_key / without - 1)
        print(f"{what}: without a key {without:.3f} s, with a key {with_key:.3f} s, {change:+.1f} %")
    print(f"all seals of a push, at both ends: {1000 * statistics.median(sealing):.2f} ms of processor time")


if __name__ == "__main__":
    main()
