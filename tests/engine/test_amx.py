"""Engines on CPUs with AMX: kernels pack weights in formats of their own, and MLA's attention releases `kv_b_proj`."""

from __future__ import annotations

import pytest
import quantised_checkpoints
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same

from weightsync import TensorSelection, WeightSync

pytest_plugins = ["engine_fixtures"]
HAS_AMX = torch.cpu.get_capabilities().get("amx_tile", False)
pytestmark = [pytest.mark.engine, pytest.mark.skipif(not HAS_AMX, reason="needs a CPU with AMX")]

BLOCKS, MXFP4 = "FP8-block", "MXFP4"
"""Forms of checkpoints."""


def serve(engines: Engines, model: str, form: str | None, quantization: str | None) -> dict[str, Answer]:
    """Start an engine with random weights. Return what cold engines answer."""
    name = f"{model}-{form}" if form else model
    if form == MXFP4:
        engines.save(name, lambda weights, to: quantised_checkpoints.save_mxfp4(tiny_models.build(model, weights), to))
    elif form:
        engines.save(name, lambda weights, to: quantised_checkpoints.save(tiny_models.build(model, weights), form, to))
    options = {"quantization": quantization} if quantization else {}
    cold = engines.serve(name, **options)
    engines.start(engines.checkpoint(name, "A"), load_format="dummy", **options)
    return cold


def push(engines: Engines, model: str, pushes: str, frozen: tuple[str, ...] = ()) -> list[tuple[Answer, list[str]]]:
    """Return what the engine answers after each push, and what its modules hold that a cold engine's do not."""
    trainer = tiny_models.build(model, "A")
    found = []
    selection = TensorSelection(frozen=frozen)
    with WeightSync("fsdp", "ipc", engines.llm, selection=selection, timeout_s=TIMEOUT_S) as sync:
        for weights in pushes:
            tiny_models.fill(trainer, weights)
            sync.push(trainer)
            found.append((engines.ask(), engines.odd_state() if weights == "A" else []))
    return found


@pytest.mark.parametrize(
    ("model", "form", "quantization"),
    [
        ("deepseek-v3", None, None),
        ("deepseek-dense-blocks", BLOCKS, None),
        ("deepseek-dense-blocks", None, "fp8_per_block"),
        ("qwen3-moe-blocks", BLOCKS, None),
        ("qwen3-moe-blocks", None, "fp8_per_block"),
        ("gpt-oss-wide", MXFP4, None),
    ],
)
def test_pushed_equals_cold(engines: Remote, model: str, form: str | None, quantization: str | None) -> None:
    cold = engines.call(serve, model, form, quantization, timeout_s=240)
    assert cold["A"] != cold["B"]
    for weights, (pushed, odd) in zip("BAAB", engines.call(push, model, "BAAB", timeout_s=240), strict=True):
        assert_same(pushed, cold[weights], f"{weights} of {model}")
        assert odd == []


def test_released_weights_of_mla_may_be_frozen(engines: Remote) -> None:
    cold = engines.call(serve, "deepseek-v3", None, None, timeout_s=240)
    for pushed, odd in engines.call(push, "deepseek-v3", "AAA", ("*kv_b_proj*", "*embed*"), timeout_s=240):
        assert_same(pushed, cold["A"], "deepseek-v3")
        assert odd == []
