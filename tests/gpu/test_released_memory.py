"""GPU memory that a trainer frees after it has closed its `WeightSync` is free at once, though workers mapped it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]

ROOM_BYTES = 2**30
LEAST_BYTES = ROOM_BYTES * 3 // 4
"""What has to come free of it: other processes may take memory of the same GPU meanwhile."""
APART = {"distributed_executor_backend": "mp"}
"""The engine's worker is a process of its own. In the trainer's process it would map nothing."""


def in_large_memory(weights: str) -> Any:
    """Return a trainer's model on the GPU, one of whose tensors lies in `ROOM_BYTES` of memory."""
    model = tiny_models.build("qwen3", weights).cuda()
    norm, room = model.model.norm.weight, torch.empty(ROOM_BYTES, dtype=torch.uint8, device="cuda")
    norm.data = room[: norm.nbytes].view(norm.dtype).copy_(norm.detach())
    return model


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def close_and_free(engines: Engines) -> int:
    """Return the bytes that come free on the GPU with the model of a trainer that has closed."""
    engines.start(engines.checkpoint("qwen3", "A"), **APART)
    model = in_large_memory("B")
    sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    sync.push(model)
    sync.close()
    before = free_bytes()
    del model
    gc.collect()
    return free_bytes() - before


def test_a_closed_trainers_memory_is_free_at_once(engines: Remote) -> None:
    assert engines.call(close_and_free, timeout_s=300) >= LEAST_BYTES


def sleep_and_free(engines: Engines) -> list[tuple[Answer, int]]:
    """Return what the engine answers after sleep of level 1, and of level 2, and the bytes that the trainer gave back
    between its push and the wake-up of the KV cache."""
    engines.start(engines.checkpoint("qwen3", "A"), enable_sleep_mode=True, **APART)
    sync, found = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S), []
    for level, weights in ((1, "B"), (2, "A")):
        engines.llm.sleep(level)
        model = in_large_memory(weights)
        engines.llm.wake_up(["weights"])
        sync.push(model)
        sync.close()
        before = free_bytes()
        model.to("cpu")
        freed = free_bytes() - before
        engines.llm.wake_up(["kv_cache"])
        found.append((engines.ask(), freed))
    return found


def test_a_trainer_makes_room_for_the_kv_cache_after_its_push(engines: Remote) -> None:
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    for (pushed, freed), weights in zip(engines.call(sleep_and_free, timeout_s=300), "BA", strict=True):
        assert_same(pushed, cold[weights], f"after sleep, {weights}")
        assert freed >= LEAST_BYTES
