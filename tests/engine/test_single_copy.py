"""A trainer whose parameters are the engine's memory: what it writes, the engine answers with, as one started cold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same
from torch import nn

from weightsync import ConfigError, EngineError, PlacementError, UnsupportedError, WeightSync, WeightSyncError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine


def on_meta(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_models.CONFIGS[name](), dtype=dtype)


def serve(engines: Engines, name: str, tp: int = 1) -> dict[str, Answer]:
    """An engine that leaves its weights as they are, on every CPU."""
    return engines.serve(name, tp, quantization="weightsync_plain")


def attach(trainer: Trainer | Engines, name: str, make: Callable[..., nn.Module] = on_meta, *arguments: Any) -> None:
    trainer.release()
    engine = trainer.engine if isinstance(trainer, Trainer) else trainer.llm
    trainer.sync = WeightSync("fsdp", "single_copy", engine, timeout_s=TIMEOUT_S)
    trainer.model = make(name, *arguments)
    trainer.sync.attach(trainer.model)


def write(trainer: Trainer | Engines, weights: str) -> int:
    with trainer.sync.writing():
        tiny_models.fill(trainer.model, weights)
    return trainer.sync.last_report.version


def names_of_other_memory(engines: Engines) -> list[str]:
    """The trainer's parameters that lie in no storage of the engine's model."""
    theirs = {param.untyped_storage().nbytes() for param in engines.live_model().parameters()}
    return [n for n, p in engines.model.named_parameters() if p.untyped_storage().nbytes() not in theirs]


def compare_with_from_pretrained(engines: Engines, name: str) -> None:
    """Parameters and buffers, names, values, dtypes, ties."""
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(engines.checkpoint(name, "A"), dtype=torch.bfloat16)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(engines.model, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert tensor.dtype == theirs[key].dtype
            assert torch.equal(tensor, theirs[key]), key
            assert tensor.requires_grad == theirs[key].requires_grad
    assert engines.model.config.tie_word_embeddings == (
        engines.model.lm_head.weight is engines.model.model.embed_tokens.weight
    )


def train_a_step(engines: Engines, **options: Any) -> None:
    """One optimizer step, written as a user does."""
    model = engines.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    logits = model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.float()
    torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor([6, 7, 8])).backward()
    with engines.sync.writing():
        optimizer.step()


def start_cold_from_the_trainer(engines: Engines) -> Any:
    """What an engine answers that is started from what the trainer saves."""
    folder = engines.folder / "trained"
    tiny_models.save(engines.model, folder)
    engines.start(folder, quantization="weightsync_plain")
    return engines.ask()


@pytest.mark.parametrize("name", ["qwen2", "llama-tied", "llama3"])
def test_written_equals_cold(engines: Remote, name: str):
    cold = engines.call(serve, name)
    before = engines.call(Engines.ask)
    engines.call(attach, name)
    assert engines.call(names_of_other_memory) == []
    assert_same(engines.call(Engines.ask), before, "attached, nothing written")
    assert engines.call(write, "B") > 0
    assert_same(engines.call(Engines.ask), cold["B"], "written")
    engines.call(write, "A")
    assert_same(engines.call(Engines.ask), cold["A"], "written back")
    engines.call(compare_with_from_pretrained, name)


def test_what_an_optimizer_writes_equals_a_cold_start(engines: Remote):
    engines.call(serve, "qwen2")
    engines.call(attach, "qwen2")
    engines.call(write, "A")
    before = engines.call(Engines.ask)
    engines.call(train_a_step)
    found = engines.call(Engines.ask)
    assert found != before
    assert_same(found, engines.call(start_cold_from_the_trainer), "after a step of AdamW")


# ---------------------------------------------------------------------------------------------------------------
# What is done outside of `writing()`, and what fails inside


def step_outside(engines: Engines) -> None:
    before = engines.model.model.norm.weight.clone()
    optimizer = torch.optim.AdamW(engines.model.parameters(), lr=1e-2, fused=True)
    engines.model.model.norm.weight.grad = torch.ones_like(before)
    with pytest.raises(WeightSyncError, match=r"inside of `with sync\.writing"):
        optimizer.step()
    assert torch.equal(engines.model.model.norm.weight, before)


def write_outside(engines: Engines) -> None:
    with torch.no_grad():
        engines.model.model.norm.weight.mul_(1.5)
    with pytest.raises(WeightSyncError, match="1 parameters were written outside"):
        engines.sync.push(engines.model)


def replace_a_parameter(engines: Engines) -> None:
    mine = engines.model.model.norm.weight
    kept, mine.data = mine.data, mine.data.clone()
    with pytest.raises(WeightSyncError, match="no longer the engine's memory"), engines.sync.writing():
        pass
    mine.data = kept


def add_a_module(engines: Engines) -> None:
    engines.model.head = nn.Linear(2, 2)
    with pytest.raises(WeightSyncError, match="2 parameters outside of the engine's memory, and lacks 0"):
        engines.sync.push(engines.model)
    del engines.model.head


def replace_a_module(engines: Engines) -> None:
    mlp = engines.model.model.layers[0].mlp
    kept, mlp.up_proj = mlp.up_proj, nn.Linear(*mlp.up_proj.weight.shape[::-1], bias=False)
    with pytest.raises(WeightSyncError, match="1 parameters outside of the engine's memory, and lacks 1"):
        engines.sync.push(engines.model)
    mlp.up_proj = kept


def push_another_model(engines: Engines) -> None:
    with pytest.raises(ConfigError, match="another"):
        engines.sync.push(nn.Linear(2, 2))


def write_and_fail(engines: Engines) -> None:
    with engines.sync.writing():
        tiny_models.fill(engines.model, "B")
        raise ValueError("out of patience")


def fail_inside(engines: Engines) -> None:
    with pytest.raises(WeightSyncError, match="out of patience"):
        write_and_fail(engines)


def conversation_of(engines: Engines) -> Any:
    return engines.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine.session


def state_of(engines: Engines) -> str:
    return str(conversation_of(engines).receiver.state)


def test_what_goes_wrong_is_said_and_can_be_put_right(engines: Remote):
    cold = engines.call(serve, "qwen2")
    engines.call(attach, "qwen2")
    engines.call(write, "A")
    for wrong in (step_outside, write_outside, replace_a_parameter, add_a_module, replace_a_module, push_another_model):
        engines.call(wrong)
    assert engines.call(write, "A") > 1
    assert_same(engines.call(Engines.ask), cold["A"], "written again")
    engines.call(fail_inside)
    assert engines.call(state_of) == "POISONED"
    engines.call(write, "B")
    assert engines.call(state_of) == "CLEAN"
    assert_same(engines.call(Engines.ask), cold["B"], "written again")


def write_to_another_engine(engines: Engines) -> None:
    """At the same address, another instance."""
    engines.sync._strategy.reset(WeightSyncError("the connection is lost"))
    engines.sync._ranks.disconnect()
    conversation_of(engines).engine_instance = "another"
    with pytest.raises(EngineError, match="restarted since `attach`"), engines.sync.writing():
        raise AssertionError("the body must not run")


def test_an_engine_that_was_started_anew_is_not_taken_for_the_old_one(engines: Remote):
    engines.call(serve, "qwen2")
    engines.call(attach, "qwen2")
    engines.call(write_to_another_engine)


# ---------------------------------------------------------------------------------------------------------------
# What cannot be attached


def own_values(name: str) -> nn.Module:
    return tiny_models.build(name, "A")


def with_another_dtype(name: str) -> nn.Module:
    return on_meta(name, torch.float32)


def with_a_strange_buffer(name: str) -> nn.Module:
    model = on_meta(name)
    model.register_buffer("strange", torch.empty(3, device="meta"), persistent=False)
    return model


def refuse(engines: Engines, make: Callable[[str], nn.Module], kind: type[Exception], words: str) -> None:
    before = engines.ask()
    with pytest.raises(kind, match=words):
        attach(engines, "qwen2", make)
    assert all(p.is_meta for p in engines.model.parameters()) or make is own_values
    assert_same(engines.ask(), before, "refused")


def test_what_cannot_be_attached_is_refused(engines: Remote):
    engines.call(serve, "qwen2")
    engines.call(refuse, own_values, ConfigError, "has values of its own")
    engines.call(refuse, with_another_dtype, ConfigError, "float32 in the model and bfloat16 in the engine")
    engines.call(refuse, with_a_strange_buffer, UnsupportedError, "1 buffers .* 'strange'")


# ---------------------------------------------------------------------------------------------------------------
# Tensor parallelism


def sharded(name: str, embedding: bool = True, kv: bool = True) -> nn.Module:
    """As an engine with two workers has it; DTensors on the meta device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = on_meta(name)
    plan: dict[str, Any] = {
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    if embedding:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    if kv:
        plan |= {f"model.layers.*.self_attn.{part}_proj": ColwiseParallel() for part in "kv"}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def refuse_sharded(trainer: Trainer, name: str, words: str, embedding: bool) -> None:
    with pytest.raises(PlacementError, match=words):
        attach(trainer, name, sharded, embedding)


def test_every_rank_shares_the_memory_of_its_worker(engines: Remote, trainers: Trainers):
    cold = engines.call(serve, "llama-even", 2)
    trainers.call(refuse_sharded, "llama-even", r"lacks \d+ regions of trainer rank", False)
    # The one KV head is halved between the ranks, and whole in each worker; or whole on both sides.
    for kv in (True, False):
        trainers.call(attach, "llama-even", sharded, True, kv)
        for weights in "BA":
            trainers.call(write, weights)
            assert_same(engines.call(Engines.ask), cold[weights], f"{weights} written by two ranks")
