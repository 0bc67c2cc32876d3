"""The table of quantised engines that tests have proven. Pushes to any other quantised engine are refused.

A push reloads a quantised layer: its `process_weights_after_loading` runs again while the layer is live. vLLM does not
tell if a quantisation method allows this. Each row stands for tests on that kind of device: a pushed engine answers
like a cold one, to the bit. docs/use/quantized.md has the same table for users.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from weightsync.errors import UnsupportedError
from weightsync.vllm import compat

PROVEN: dict[str, tuple[str, ...]] = {
    # fp8_per_channel: bf16 weights, quantised as they are loaded
    "Fp8PtpcOnlineLinearMethod": ("cpu", "cuda"),
    "Fp8PtpcOnlineMoEMethod": ("cuda",),
    # fp8 and fp8_per_tensor, with Marlin's kernels too
    "Fp8PerTensorOnlineLinearMethod": ("cuda",),
    "Fp8PerTensorOnlineMoEMethod": ("cuda",),
    # fp8_per_block, on CPUs with AMX
    "Fp8PerBlockOnlineLinearMethod(block)": ("cpu", "cuda"),
    "Fp8PerBlockOnlineMoEMethod(block)": ("cpu", "cuda"),
    # checkpoints with `weight_scale_inv`, DeepSeek's layout, on CPUs with AMX
    "Fp8LinearMethod(block)": ("cpu", "cuda"),
    "Fp8MoEMethod(block)": ("cpu", "cuda"),
    # checkpoints of llm-compressor: FP8-dynamic and W8A8-int8
    "CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8(channel)": ("cpu", "cuda"),
    "CompressedTensorsLinearMethod/CompressedTensorsW8A8Int8(channel)": ("cpu", "cuda"),
    "CompressedTensorsW8A8Fp8MoEMethod(8 bit, channel)": ("cuda",),
    # and W8A16, with Machete's kernels and with Marlin's
    "CompressedTensorsLinearMethod/CompressedTensorsWNA16(8 bit, channel)": ("cuda",),
    "CompressedTensorsLinearMethod/CompressedTensorsWNA16(8 bit, group)": ("cuda",),
    # GPT-OSS's own checkpoints, with Triton's kernels and with Marlin's, and on CPUs with AMX
    "GptOssMxfp4MoEMethod": ("cpu", "cuda"),
}
"""The types of device on which tests have proven a layer's reload, by `kind_of` of the layer."""

_UNQUANTISED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


def check(model: nn.Module, quantisation: Any, device: torch.device) -> None:
    """Raise `UnsupportedError` if a quantised layer of the live `model` has no proven reload on this type of device.

    `quantisation` is the engine's configuration, None for an unquantised engine.
    """
    if quantisation is None or getattr(quantisation, "weightsync_reloads", False):
        return
    unproven: dict[str, str] = {}
    for name, module in model.named_modules():
        method = compat.quant_method(module)
        if method is None or type(method).__name__ in _UNQUANTISED or isinstance(method, BaseKVCacheMethod):
            continue
        kind = kind_of(module)
        if device.type not in PROVEN.get(kind, ()):
            unproven.setdefault(kind, name)
    if not unproven:
        return
    found = ", ".join(
        f"{kind} (such as {name}; proven on {' and '.join(PROVEN[kind])} only)"
        if kind in PROVEN
        else f"{kind} (such as {name})"
        for kind, name in unproven.items()
    )
    raise UnsupportedError(
        f"this engine is quantised ({quantisation.get_name()}), and reloading these layers on a {device.type} device "
        f"is not proven: {found}. Start the engine with a quantisation of docs/use/quantized.md, with "
        'quantization="weightsync_int8", or unquantised. Set the class attribute weightsync_reloads = True on your '
        "own configuration, if process_weights_after_loading may run again on freshly loaded parameters"
    )


def kind_of(module: nn.Module) -> str:
    """Return a key of `PROVEN`.

    It is "method", or "method(block)" for scales of blocks. A layer of a quantised checkpoint that vLLM quantises anew
    gives "method(from method)". Experts of compressed-tensors give "method(traits)", and a layer with a scheme
    "method/scheme(traits)". Traits are the granularity of scales, the number of bits, "asymmetric", and "g_idx" for
    reordered columns.
    """
    method = compat.quant_method(module)
    kind = type(method).__name__
    if (source := getattr(method, "requantization_source", None)) is not None:
        return f"{kind}(from {type(source).__name__})"
    scheme = getattr(module, "scheme", None)
    if scheme is None and getattr(method, "weight_block_size", None):
        return f"{kind}(block)"
    layout = scheme or getattr(method, "weight_quant", None)
    if layout is None:
        return kind
    strategy = getattr(layout, "strategy", "")
    traits = [f"{layout.num_bits} bit"] if hasattr(layout, "num_bits") else []
    traits.append(getattr(strategy, "value", strategy))
    traits += ["asymmetric"] * (getattr(layout, "symmetric", True) is False)
    traits += ["g_idx"] * bool(getattr(layout, "has_g_idx", False))
    return f"{f'{kind}/{type(scheme).__name__}' if scheme else kind}({', '.join(traits)})"
