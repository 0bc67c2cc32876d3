"""An engine that sleeps while the trainer trains: vLLM has sleep levels on GPUs alone."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import tiny_models
from engines import TIMEOUT_S, Answer, Engines, Remote, VllmRemote, answers_around_sleep, assert_same

from weightsync import TensorSelection, WeightSync
from weightsync.errors import EngineAsleepError

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]


def sleep_and_push(engines: Engines) -> list[tuple[Answer, list[int]]]:
    """Return what the engine answers after sleep of level 1, and of level 2, and the bytes of the pushes."""
    engines.start(engines.checkpoint("qwen3", "A"), enable_sleep_mode=True)  # which a process may have once
    model = tiny_models.build("qwen3", "A")
    frozen = TensorSelection(frozen=["model.embed_tokens.*", "*.input_layernorm.*"])
    found = []
    with WeightSync("fsdp", "ipc", engines.llm, selection=frozen, timeout_s=TIMEOUT_S) as sync:
        for level, weights in ((1, "B"), (2, "A")):
            tiny_models.fill(model, weights)
            nbytes = [sync.push(model).nbytes for _ in range(2)]
            engines.llm.sleep(level)
            with pytest.raises(EngineAsleepError):
                sync.push(model)
            engines.llm.wake_up(["weights"])
            sync.push(model)
            engines.llm.wake_up(["kv_cache"])
            engines.llm.sleep(level)
            engines.llm.wake_up(["weights"])
            nbytes += [sync.push(model).nbytes for _ in range(2)]
            engines.llm.wake_up(["kv_cache"])
            found.append((engines.ask(), nbytes))
    return found


def test_pushed_after_sleep_equals_cold(engines: Remote) -> None:
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    light, deep = engines.call(sleep_and_push, timeout_s=240)
    for (pushed, (first, partial, after_sleep, last)), weights in ((light, "B"), (deep, "A")):
        assert_same(pushed, cold[weights], f"after sleep, {weights}")
        assert partial == last
        assert first > partial or weights == "A"  # frozen parameters have come by then
        assert after_sleep == (partial if weights == "B" else light[1][0])


def sleep_with_frozen_8_bits(engines: Engines) -> tuple[Answer, Answer, int, int]:
    """All frozen tensors are weights in 8 bits, which vLLM keeps transposed."""
    engines.start(engines.checkpoint("qwen3", "A"), enable_sleep_mode=True, quantization="fp8_per_channel")
    cold, model = engines.ask(), tiny_models.build("qwen3", "A")
    selection = TensorSelection(frozen=["*.mlp.*"])
    with WeightSync("fsdp", "ipc", engines.llm, selection=selection, timeout_s=TIMEOUT_S) as sync:
        first, partial = sync.push(model).nbytes, sync.push(model).nbytes
        assert partial < first
        engines.llm.sleep(2)
        engines.llm.wake_up()
        after_sleep = sync.push(model).nbytes
        return cold, engines.ask(), first, after_sleep


def test_frozen_weights_in_8_bits_come_again_after_sleep_of_level_2(tmp_path: Path) -> None:
    engines = VllmRemote(Engines, tmp_path, tmp_path, multiprocessing.Pipe()[1])
    try:
        cold, pushed, first, after_sleep = engines.call(sleep_with_frozen_8_bits, timeout_s=240)
    finally:
        engines.close()
    assert after_sleep == first
    assert_same(pushed, cold, "after sleep of level 2")


def sleep_with_slopes(engines: Engines) -> tuple[Answer, Answer]:
    backend = {"backend": "TRITON_ATTN"}  # FlashAttention takes slopes in its version 2 alone
    engines.start(engines.checkpoint("bloom", "A"), enable_sleep_mode=True, attention_config=backend)
    return answers_around_sleep(engines, "bloom")


def test_slopes_of_alibi_outlive_sleep_of_level_2(tmp_path: Path) -> None:
    engines = VllmRemote(Engines, tmp_path, tmp_path, multiprocessing.Pipe()[1])
    try:
        cold, pushed = engines.call(sleep_with_slopes, timeout_s=240)
    finally:
        engines.close()
    assert_same(pushed, cold, "after sleep of level 2")
