"""A model that PEFT has wrapped, merged into a real engine: it equals a cold one of the merged model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import zero
from engines import TIMEOUT_S, Answer, Engines, Remote, Trainer, Trainers, assert_same
from quantizers import find_quantizers, need_quantizers
from test_lora import fill_adapters, frozen_copy, local, shard, wrapped
from test_peft_layers import MAKE, in_four_bits, with_merged

from weightsync import TensorSelection, WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of the trainers. The last bits of a product depend on it, so the cold engine's weights are merged there too."""


def build(kind: str, base: str) -> Any:
    return (MAKE[kind]() if kind in MAKE else wrapped(kind, model=base)).to(DEVICE)


def cold(engines: Engines, folder: Path, kind: str, base: str) -> Answer:
    """What an engine answers that was started from the merged weights; it runs on."""
    model = build(kind, base)
    fill_adapters(model, "A")
    engines.start(tiny_models.save(model.merge_and_unload(), folder / "merged"))
    engines._running = ()
    return engines.ask()


def connect(trainer: Trainer | Engines, backend: str, kind: str, base: str, transport: str) -> None:
    model = trainer.model = build(kind, base)
    if backend == "deepspeed":
        trainer.model = zero.initialize(model, zero.config(3))
    elif isinstance(trainer, Trainer):
        shard(model)
    engine = trainer.engine if isinstance(trainer, Trainer) else trainer.llm
    selection = TensorSelection(only_trained=True)
    trainer.sync = WeightSync(backend, transport, engine, selection=selection, max_bytes=1 << 16, timeout_s=TIMEOUT_S)


def push(trainer: Trainer | Engines, weights: str) -> int:
    """The bytes that it moved; the trainer's own are as they were."""
    with zero.to_fill(trainer.model):
        fill_adapters(trainer.model, weights)
    before = frozen_copy(trainer.model)
    nbytes = trainer.sync.push(trainer.model).nbytes
    for name, param in trainer.model.named_parameters():
        now, then = (each.reshape(-1).view(torch.uint8) for each in (local(param), before[name]))  # 4 bits may be NaN
        assert torch.equal(now, then), name
    return nbytes


def release(trainer: Trainer | Engines) -> None:
    engine = trainer.model
    trainer.release()
    if hasattr(engine, "destroy"):
        engine.destroy()


@pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="gloo crashes where GPU tensors are gathered, and NCCL wants two GPUs"
)
@pytest.mark.parametrize(
    ("kind", "base", "transport"),
    [
        ("all of these", "qwen3", "ipc"),
        ("all of these", "qwen3", "broadcast"),
        ("rslora", "qwen3-moe", "ipc"),
        ("one tensor of experts", "qwen3-moe", "ipc"),
        ("tied DoRA", "qwen3-tied", "ipc"),
        ("tied tokens", "qwen3-tied", "ipc"),
    ],
)
def test_a_real_engine_equals_a_cold_one_of_the_merged_model(
    engines: Remote, trainers: Trainers, tmp_path: Path, kind: str, base: str, transport: str
):
    expected = engines.call(cold, tmp_path, kind, base, timeout_s=240)
    sides = [(engines, "fsdp"), (trainers, "fsdp")]
    if DEVICE == "cpu":  # the DeepSpeed of tests has its models there
        sides.append((trainers, "deepspeed"))
    for side, backend in sides:
        side.call(connect, backend, kind, base, transport)
        whole = side.call(push, "B")
        assert engines.call(Engines.ask) != expected
        partial = side.call(push, "A")
        assert (partial if side is engines else partial[0]) < (whole if side is engines else whole[0])
        assert_same(engines.call(Engines.ask), expected, backend)
        side.call(release)


# ---------------------------------------------------------------------------------------------------------------
# A base in 4 bits

QLORA = {"target_modules": ["q_proj", "down_proj", "embed_tokens"]}


def prepare_four_bits(trainer: Trainer, folder: Path) -> None:
    """Shard a base that bitsandbytes has packed, with adapters. Rank 0 saves what PEFT merges of both weights."""
    find_quantizers()
    model, values = in_four_bits("stored as bfloat16", **QLORA)
    for weights in "AB" if trainer.rank == 0 else ():
        fill_adapters(model, weights)
        merged = tiny_models.build("qwen3", "A")
        merged.load_state_dict(with_merged(values, model, **QLORA))
        tiny_models.save(merged, folder / weights)
    trainer.model = shard(model)
    trainer.sync = WeightSync("fsdp", "ipc", trainer.engine, max_bytes=1 << 16, timeout_s=TIMEOUT_S)


def start_and_ask(engines: Engines, checkpoint: Path, options: dict[str, Any]) -> Answer:
    engines.start(checkpoint, **options)
    return engines.ask()


@pytest.mark.skipif(torch.cuda.is_available(), reason="these trainers pack and merge on the CPU")
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8_per_channel"}], ids=["bfloat16", "fp8"])
def test_an_engine_equals_a_cold_one_of_what_qlora_has_trained(
    engines: Remote, engine_calls: tuple[Any, Any], tmp_path: Path, options: dict[str, Any]
):
    """The trainers are processes of the test's own: PEFT and vLLM look for bitsandbytes once in a process."""
    need_quantizers()
    with closing(Trainers(2, tmp_path, engine_calls[0])) as trainers:
        trainers.call(prepare_four_bits, tmp_path, timeout_s=240)
        cold = {weights: engines.call(start_and_ask, tmp_path / weights, options, timeout_s=240) for weights in "BA"}
        assert cold["A"] != cold["B"]
        for weights in "BAB":
            trainers.call(push, weights)
            assert_same(engines.call(Engines.ask), cold[weights], weights)
