"""An engine that sleeps while the trainer trains: vLLM has sleep levels on GPUs alone."""

from __future__ import annotations

import pytest
import tiny_models
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import TensorSelection, WeightSync
from weightsync.errors import EngineAsleepError

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]


def sleep_and_push(engines: Engines, level: int) -> tuple[Answer, list[int]]:
    """Return what the engine answers after sleep and a push, and the bytes of two pushes before and two after."""
    engines.start(engines.checkpoint("qwen3", "A"), enable_sleep_mode=True)
    model = tiny_models.build("qwen3", "A")
    frozen = TensorSelection(frozen=["model.embed_tokens.*", "*.input_layernorm.*"])
    with WeightSync("fsdp", "ipc", engines.llm, selection=frozen, timeout_s=TIMEOUT_S) as sync:
        tiny_models.fill(model, "B")
        nbytes = [sync.push(model).nbytes for _ in range(2)]
        engines.llm.sleep(level)
        with pytest.raises(EngineAsleepError):
            sync.push(model)
        assert engines.llm.get_weight_version() == "2"
        engines.llm.wake_up(["weights"])
        sync.push(model)
        engines.llm.wake_up(["kv_cache"])
        engines.llm.sleep(level)
        engines.llm.wake_up(["weights"])
        nbytes += [sync.push(model).nbytes for _ in range(2)]
        engines.llm.wake_up(["kv_cache"])
        return engines.ask(), nbytes


@pytest.mark.parametrize("level", [1, 2])
def test_pushed_after_sleep_equals_cold(engines: Remote, level: int) -> None:
    cold = engines.call(Engines.serve, "qwen3", timeout_s=240)
    pushed, (whole, partial, after_sleep, last) = engines.call(sleep_and_push, level, timeout_s=240)
    assert_same(pushed, cold["B"], f"after sleep level {level}")
    assert partial == last < whole
    assert after_sleep == (partial if level == 1 else whole)
