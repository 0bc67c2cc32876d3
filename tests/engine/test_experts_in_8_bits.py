"""Experts quantised by vLLM as it loads them. CPUs have no kernel for these: an engine starts, and does not answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import quantised_checkpoints
import tiny_models
import torch
from engine_state import differing, state_of
from engines import TIMEOUT_S, Engines, Remote
from torch import nn

from weightsync import WeightSync
from weightsync.kernels.quantize import fp8_per_channel, fp8_per_tensor

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

LAYERS = 2
METHODS = ["Fp8PtpcOnlineMoEMethod", "Fp8PerTensorOnlineMoEMethod", "Fp8PerBlockOnlineMoEMethod(block)"]
METHODS += ["Fp8MoEMethod(block)", "CompressedTensorsW8A8Fp8MoEMethod(8 bit, channel)"]


def scaled_fp8_quant(
    weight: torch.Tensor, scale: torch.Tensor | None = None, use_per_token_if_dynamic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vllm's function, which has no kernel for CPUs. A test on a GPU shows that these forms have its bits."""
    if scale is not None:
        return fp8_per_tensor.values(weight, scale.reshape(1)), scale
    return (fp8_per_channel if use_per_token_if_dynamic else fp8_per_tensor)(weight)


def keep_experts_for(engines: Engines, backend: str) -> None:
    """Let engines keep experts in the format of a GPU's kernels."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8 as of_checkpoint
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as compressed,
    )
    from vllm.model_executor.layers.quantization.online import fp8

    from weightsync.vllm import supported_quant

    kernel = CutlassExpertsFp8 if backend == "VLLM_CUTLASS" else TritonExperts
    uncompiled = getattr(fp8.per_block_cast_to_fp8, "_torchdynamo_orig_callable", fp8.per_block_cast_to_fp8)
    proven = dict.fromkeys(METHODS, ("cpu",))
    chosen = (Fp8MoeBackend[backend], kernel)
    engines.patch = ExitStack()
    for patch in (
        *(
            mock.patch.object(at, "select_fp8_moe_backend", return_value=chosen)
            for at in (fp8, of_checkpoint, compressed)
        ),
        mock.patch.object(fp8, "per_block_cast_to_fp8", uncompiled),
        mock.patch.object(ops, "scaled_fp8_quant", scaled_fp8_quant),
        mock.patch.dict(supported_quant.PROVEN, proven),
    ):
        engines.patch.enter_context(patch)


def stop_patch(engines: Engines) -> None:
    engines.end()
    engines.patch.close()


def start(engines: Engines, weights: str, quantization: str) -> None:
    folder = engines.checkpoint("qwen3-moe-blocks", weights)
    engines.start(folder, quantization="online", quantization_config={"moe": quantization})


def start_checkpoint(engines: Engines, weights: str, scheme: str) -> None:
    """Start from a checkpoint with experts in 8 bits. Its other layers are not: in blocks they have no kernel here."""
    model = tiny_models.build("qwen3-moe-blocks", weights)
    folder = engines.checkpoint("qwen3-moe-blocks", weights).with_name(f"experts-{scheme}-{weights}")
    if not folder.exists():
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        quantised_checkpoints.save(model, scheme, folder, ignored=linear)
    engines.start(folder)


def note_state(engines: Engines) -> None:
    engines.noted = state_of(engines.live_model())


def changed_state(engines: Engines) -> list[str]:
    return differing(state_of(engines.live_model()), engines.noted)


def connect(engines: Engines, transport: str, max_bytes: int | None) -> None:
    engines.release()
    engines.model = tiny_models.build("qwen3-moe-blocks", "A")
    engines.sync = WeightSync("fsdp", transport, engines.llm, timeout_s=TIMEOUT_S, max_bytes=max_bytes)


def push(engines: Engines, weights: str) -> dict[str, int]:
    tiny_models.fill(engines.model, weights)
    return engines.sync.push(engines.model).load_paths


def check(engines: Remote, backend: str, start_from: Callable[[Engines, str, str], None], kind: str) -> None:
    """Push "B" to an engine that was started from "A". Its tensors are then those of one started from "B"."""
    engines.call(keep_experts_for, backend)
    engines.call(start_from, "B", kind, timeout_s=240)
    engines.call(note_state)
    engines.call(start_from, "A", kind, timeout_s=240)
    assert any("w13_weight_scale" in name for name in engines.call(changed_state))
    for transport, max_bytes in [("ipc", None), ("broadcast", 1 << 15)]:
        engines.call(connect, transport, max_bytes)
        for weights in "AB":
            assert engines.call(push, weights)["fused_quantize"] == LAYERS
        assert engines.call(changed_state) == []
    engines.call(stop_patch)


@pytest.mark.parametrize(
    ("quantization", "backend"),
    [
        ("fp8_per_channel", "TRITON"),
        ("fp8_per_channel", "VLLM_CUTLASS"),
        ("fp8_per_tensor", "TRITON"),
        ("fp8_per_block", "TRITON"),
        ("fp8_per_block", "FLASHINFER_CUTLASS"),
    ],
)
def test_experts_are_quantised_on_their_way(engines: Remote, quantization: str, backend: str):
    check(engines, backend, start, quantization)


@pytest.mark.parametrize(
    ("scheme", "backend"),
    [
        ("FP8-block", "TRITON"),
        ("FP8-dynamic", "TRITON"),
        ("FP8-dynamic", "VLLM_CUTLASS"),
    ],
)
def test_experts_of_a_checkpoint_are_quantised_on_their_way(engines: Remote, scheme: str, backend: str):
    check(engines, backend, start_checkpoint, scheme)
