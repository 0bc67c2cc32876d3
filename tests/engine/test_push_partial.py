"""Real engines, and a trainer of two ranks or in the engine's process: their attention trains, the rest is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Engines, Remote, Trainer, Trainers, assert_same

from weightsync import TensorSelection, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


FROZEN = ("*embed_tokens*", "*.mlp.*", "*layernorm.weight", "model.norm.weight", "lm_head*")


def serve(engines: Engines, model: str, options: dict[str, Any]) -> Any:
    import repack_plugin  # noqa: F401  (it registers the quantisations)

    return engines.serve(model, **options)["A"]


def push_other_weights(engines: Engines, model: str) -> None:
    with WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S) as sync:
        sync.push(tiny_models.build(model, "B"))


def push_whole_and_partial(trainer: Trainer | Engines, model: str, transport: str) -> list[int]:
    """The weights "A" with other attention, and then "A"; the bytes that these pushes moved."""
    trainer.release()
    trainer.model = tiny_models.build(model, "A")
    if isinstance(trainer, Trainer):
        tiny_models.shard(trainer.model)
    trained = {name: param for name, param in trainer.model.named_parameters() if "self_attn" in name}
    new = {name: param.detach().clone() for name, param in trained.items()}
    engine = trainer.engine if isinstance(trainer, Trainer) else trainer.llm
    trainer.sync = WeightSync(
        "fsdp", transport, engine, selection=TensorSelection(frozen=FROZEN), max_bytes=1 << 16, timeout_s=TIMEOUT_S
    )
    moved = []
    for attention in ({name: torch.zeros_like(param) for name, param in trained.items()}, new):
        with torch.no_grad():
            for name, param in trained.items():
                param.copy_(attention[name])
        moved.append(trainer.sync.push(trainer.model).nbytes)
    return moved


@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(
    ("model", "options"),
    [("qwen3-moe", {}), ("qwen3", {"quantization": "test-transposed"}), ("qwen3", {})],
    ids=["moe", "reload", "dense"],
)
def test_a_real_engine_equals_a_cold_one(
    engines: Remote, trainers: Trainers, model: str, options: dict[str, Any], transport: str, kind: str
):
    cold_answer = engines.call(serve, model, options, timeout_s=240)
    engines.call(push_other_weights, model)
    if kind == "plain":
        whole, partial = engines.call(push_whole_and_partial, model, transport)
    else:
        (whole, partial), _ = trainers.call(push_whole_and_partial, model, transport)
    assert 0 < partial < whole / 2
    assert_same(engines.call(Engines.ask), cold_answer, "the second push")
