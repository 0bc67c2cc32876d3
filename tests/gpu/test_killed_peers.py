"""On GPUs, where a stream waits for what never comes: a peer that dies in the middle of a push is missed in time, and
the engine is mute until the next push heals it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints
import tiny_models
import torch
from engines import Remote

from weightsync import EngineError, WeightSync, WeightSyncError
from weightsync.engines import HttpEngine
from weightsync.net.wire import POISONED
from weightsync.report import Progress
from weightsync.tools.bench.shapes import write_config
from weightsync.tools.processes import Server, generate, visible_gpus

TIMEOUT_S, GRACE_S = 8.0, 5.0
PROMPTS = [[5, 6, 7, 8], [9, 9, 3]]

Outcome = tuple[str, float]
"""The text of what a push raised, "" where it returned, and after how many seconds."""


class Pusher:
    """Lives in a process of its own: a trainer on the first GPU."""

    def __init__(self, folder: Path, url: str, transport: str, options: dict[str, Any]) -> None:
        self.connections: list[Any] = []
        self.model = small(folder).cuda()
        self.sync = WeightSync("fsdp", transport, url, timeout_s=TIMEOUT_S, max_bytes=2**20, **options)

    def push(self, weights: str) -> Outcome:
        tiny_models.fill(self.model, weights)
        since = time.monotonic()
        try:
            self.sync.push(self.model)
        except WeightSyncError as error:
            return str(error), time.monotonic() - since
        return "", time.monotonic() - since

    def push_and_stop(self, weights: str, there: Path) -> Outcome:
        """Push, make the file `there` in the middle, and go on once it is gone."""
        whole = Progress.__iter__

        def halting(bar: Progress) -> Any:
            Progress.__iter__ = whole  # type: ignore[method-assign]
            for number in whole(bar):
                if number == len(bar.iterable) // 2:
                    there.touch()
                    while there.exists():
                        time.sleep(0.005)
                yield number

        Progress.__iter__ = halting  # type: ignore[method-assign]
        return self.push(weights)

    def close(self) -> None:
        self.sync.close()


def small(folder: Path) -> Any:
    """Return a model whose widths 8-bit kernels take."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(write_config("small", folder))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tiny_models.fill(model, "A")
    return model


def wait_for(condition: Any, timeout_s: float) -> float:
    since = time.monotonic()
    while not condition():
        assert time.monotonic() - since < timeout_s
        time.sleep(0.05)
    return time.monotonic() - since


def core_of(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    (core,) = (int(c) for c in children if b"EngineCore" in Path(f"/proc/{c}/cmdline").read_bytes())
    return core


@pytest.mark.parametrize(
    ("transport", "quantization", "options"),
    [
        pytest.param("ipc", "fp8", {}, id="ipc, reloads", marks=pytest.mark.gpu(1)),
        pytest.param("broadcast", "fp8", {}, id="broadcast, reloads", marks=pytest.mark.gpu(2)),
        pytest.param("broadcast", None, {"quantize": "fp8"}, id="broadcast, quantised", marks=pytest.mark.gpu(2)),
    ],
)
def test_who_dies_in_a_push_is_missed(
    tmp_path: Path, transport: str, quantization: str | None, options: dict[str, Any]
) -> None:
    model, checkpoint = small(tmp_path / "config"), tmp_path / "A"
    if quantization is None:
        quantised_checkpoints.save(model, "FP8-dynamic", checkpoint)
    else:
        tiny_models.save(model, checkpoint)
    environment = visible_gpus([0 if transport == "ipc" else 1])
    log = tmp_path / "log"
    engine_options: dict[str, Any] = {"kv_cache_memory_bytes": 2**26}
    if quantization is not None:  # Marlin's tiles are reloaded
        environment["VLLM_TEST_FORCE_FP8_MARLIN"] = "1"
        engine_options |= {"quantization": quantization, "kernel_config": {"linear_backend": "marlin"}}
    server = Server(checkpoint, "auto", log, environment, engine_options)
    there = tmp_path / "there"
    pushers: list[Remote] = []

    def pusher() -> Remote:
        pushers.append(Remote(Pusher, tmp_path / "config", server.url, transport, options))
        return pushers[-1]

    try:
        server.wait(240)
        engine = HttpEngine(server.url, name="the engine", timeout_s=20)
        cold = generate(server.url, PROMPTS)

        killed = pusher()
        assert killed.call(Pusher.push, "B")[0] == ""
        killed.begin(Pusher.push_and_stop, "A", there)
        wait_for(there.exists, 30)
        os.kill(killed.process.pid, signal.SIGKILL)
        there.unlink()
        seconds = wait_for(lambda: "gave up" in log.read_text(), TIMEOUT_S + GRACE_S)
        print(f"{transport}: the worker gave a killed trainer up after {seconds:.1f} s")
        assert POISONED in log.read_text()
        assert engine.call("GET", "/is_paused")["is_paused"]

        stopped = pusher()
        assert stopped.call(Pusher.push, "A")[0] == ""
        assert generate(server.url, PROMPTS) == cold, "healed"
        stopped.begin(Pusher.push_and_stop, "B", there)
        wait_for(there.exists, 30)
        os.kill(core_of(server.pid or 0), signal.SIGKILL)
        there.unlink()
        text, seconds = stopped.result(60)
        print(f"{transport}: a killed engine was missed after {seconds:.1f} s: {text}")
        assert "engine" in text
        assert seconds < TIMEOUT_S + GRACE_S
        with pytest.raises(EngineError):
            generate(server.url, PROMPTS)
    finally:
        for each in pushers:
            if each.process.is_alive():
                each.close()
        server.stop()
