"""Experts in fp8 on a GPU: made by vLLM as it loads them, and from compressed-tensors checkpoints."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import quantised_checkpoints
import tiny_models
from engines import TIMEOUT_S, Answer, Engines, Remote, VllmRemote, answers_around_sleep, assert_same

from weightsync import WeightSync

pytest_plugins = ["engine_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.gpu(1)]

MODEL, LAYERS = "qwen3-moe-blocks", 2


def start(engines: Engines, weights: str, quantization: str, **options: object) -> None:
    if quantization != "FP8-dynamic":
        engines.start(engines.checkpoint(MODEL, weights), quantization=quantization, enforce_eager=False, **options)
        return
    folder = engines.checkpoint(MODEL, weights).with_name(f"{MODEL}-{quantization}-{weights}")
    if not folder.exists():
        quantised_checkpoints.save(tiny_models.build(MODEL, weights), quantization, folder)
    engines.start(folder, enforce_eager=False, **options)


def serve_and_push(
    engines: Engines, quantization: str, transport: str, pushes: str
) -> tuple[dict[str, Answer], list[Answer], dict[str, int]]:
    """Return what cold engines answer, what one answers after each push, and the load paths."""
    cold = {}
    for weights in "AB":
        start(engines, weights, quantization)
        cold[weights] = engines.ask()
    start(engines, "B", quantization, load_format="dummy")
    trainer = tiny_models.build(MODEL, "A").cuda()
    found = []
    with WeightSync("fsdp", transport, engines.llm, timeout_s=TIMEOUT_S) as sync:
        for weights in pushes:
            tiny_models.fill(trainer, weights)
            load_paths = sync.push(trainer).load_paths
            found.append(engines.ask())
    return cold, found, load_paths


@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8", "fp8_per_block", "FP8-dynamic"])
def test_pushed_equals_cold(engines: Remote, quantization: str) -> None:
    cold, found, load_paths = engines.call(serve_and_push, quantization, "ipc", "BAAB", timeout_s=300)
    assert cold["A"] != cold["B"]
    for weights, pushed in zip("BAAB", found, strict=True):
        assert_same(pushed, cold[weights], weights)
    linear = 2 * LAYERS  # q, k and v in one, and o; a router stays as it is
    assert load_paths["fused_quantize"] >= linear + LAYERS, load_paths
    assert load_paths["reload"] == load_paths["native_loader"] == 0


def sleep_and_push(engines: Engines, quantization: str) -> tuple[Answer, Answer]:
    start(engines, "A", quantization, enable_sleep_mode=True)
    return answers_around_sleep(engines, MODEL)


@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8", "fp8_per_block", "FP8-dynamic"])
def test_pushed_after_sleep_of_level_2_equals_cold(quantization: str, tmp_path: Path) -> None:
    engines = VllmRemote(Engines, tmp_path, tmp_path, multiprocessing.Pipe()[1])  # vLLM has one sleeping LLM a process
    try:
        cold, pushed = engines.call(sleep_and_push, quantization, timeout_s=300)
    finally:
        engines.close()
    assert_same(pushed, cold, "after sleep of level 2")
