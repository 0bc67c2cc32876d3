"""Quantisation for engines that were started from an 8-bit checkpoint: one tensor of the trainer becomes several.

The engine's loader wants `q_proj.weight` in float8 or int8, and `q_proj.weight_scale` beside it. The trainer has
`q_proj.weight` in bfloat16. The never loaded model tells the scheme: by the dtype of the tensor's parameter, and by the
shape of the scales beside it. If int8 is packed into words, the loader wants `q_proj.weight_packed`,
`q_proj.weight_scale` and `q_proj.weight_shape`, and the layer's `scheme` tells how. GPT-OSS's experts in MXFP4 have
names of their own, `experts.gate_up_proj_blocks` and `_scales`. A trainer that sends quantised tensors and their scales
itself needs nothing of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from msgspec import structs
from torch import nn

from weightsync.kernels.quantize import BLOCK, MX_BLOCK, fp8_per_block, fp8_per_channel, int8_per_channel, mxfp4
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.worker.trace import Fill, Trace, uncovered

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""A function from a whole weight to its quantised values, its scales, and the loader's further tensors."""

_PER_CHANNEL: dict[torch.dtype, Quantise] = {torch.float8_e4m3fn: fp8_per_channel, torch.int8: int8_per_channel}
_WIDE = ("bfloat16", "float16", "float32", "float64")
_PER_WORD = 4
"""8-bit values in an int32."""
_OF_EXPERTS = ("w13_weight", "w2_weight")
"""The parameters with all experts of a layer, (experts, rows, columns), loaded one expert after the other."""
_IN_4_BITS = (".experts.gate_up_proj", ".experts.down_proj")
"""Endings, in transformers, of the names of experts that GPT-OSS's checkpoints store in MXFP4."""


@dataclass(frozen=True)
class QuantizedTensors:
    """The tensors that the loader is given in place of one: 8-bit values, their scales, perhaps more.

    made: the name, shape and dtype of each of them.
    quantise: makes them from the one tensor, in the order of `made`.
    """

    made: tuple[TensorMeta, ...]
    quantise: Quantise


def trace_quantized(
    model: nn.Module, manifest: Manifest, trace: Callable[[Manifest], Trace]
) -> tuple[Trace, dict[str, QuantizedTensors], dict[str, str]]:
    """Trace a loader for the tensors of the quantised checkpoint that the loader takes.

    model: was never loaded.
    trace: traces the loader of `model`.

    Returns the trace, the tensors to make several of, and the reasons for tensors not covered by a scheme, by name.
    """
    experts, unfit = find_experts(model, manifest)
    asked = expand(manifest, experts)
    with unpacked(model) as packs:
        seen = trace(asked)
        pairs, more_unfit = find_pairs(model, asked, seen)
    if pairs or packs:
        seen = trace(expand(asked, pairs))
    return seen, pairs | experts, unfit | more_unfit


@contextmanager
def unpacked(model: nn.Module) -> Iterator[bool]:
    """Add an int8 `weight` to each module with a weight packed into words, until the context ends.

    `model` is on `meta`. The loader loads the new weight like the packed one, so a trace shows its tensors. Yields
    whether `model` has such modules.
    """
    packing = [
        (module, packed)
        for module in model.modules()
        if (packed := module._parameters.get("weight_packed")) is not None and not hasattr(module, "weight")
    ]
    for module, packed in packing:
        weight = torch.empty(*packed.shape[:-1], packed.shape[-1] * _PER_WORD, dtype=torch.int8, device="meta")
        weight.__class__ = packed.__class__
        weight.__dict__ = dict(packed.__dict__)
        module.register_parameter("weight", weight)  # type: ignore[arg-type]
    try:
        yield bool(packing)
    finally:
        for module, _ in packing:
            del module._parameters["weight"]


def find_pairs(
    model: nn.Module, manifest: Manifest, trace: Trace
) -> tuple[dict[str, QuantizedTensors], dict[str, str]]:
    """Return the tensors to make several of, and the reasons for tensors not covered by a scheme, by name.

    model: was never loaded.
    trace: of the loader of the `unpacked` model, for `manifest`.
    """
    params = dict(model.named_parameters())
    pairs: dict[str, QuantizedTensors] = {}
    refused: dict[str, str] = {}
    held = {name: str(param.dtype).removeprefix("torch.") for name, param in params.items()}
    held |= {name: f"{kept} packed into words" for name, kept in held.items() if f"{name}_packed" in held}
    for name, param in dict.fromkeys((copy.name, copy.param) for copy in trace.copies if copy.param in held):
        comes, kept = manifest[name].dtype, held[param]
        if comes in _WIDE and _in_8_bits(kept):
            found = _pair(model, manifest, name, param)
            if isinstance(found, QuantizedTensors):
                pairs[name] = found
            else:
                refused[name] = f"the engine holds it in {kept}, and {found}"
        elif comes != kept and (_in_8_bits(comes) or _in_8_bits(kept)):
            ways = " or in ".join(dict.fromkeys((kept, "bfloat16")))
            refused[name] = f"it comes in {comes}, and the engine holds it in {kept}; send it in {ways}"
    return pairs, refused


def find_experts(model: nn.Module, manifest: Manifest) -> tuple[dict[str, QuantizedTensors], dict[str, str]]:
    """Return the experts to turn into MXFP4, and the reasons for experts that cannot, by name.

    The loader of `model` knows the names of the new tensors. `model` was never loaded.
    """
    pairs: dict[str, QuantizedTensors] = {}
    refused: dict[str, str] = {}
    if not any(_is_mxfp4(module._parameters) for module in model.modules()):
        return pairs, refused
    for meta in manifest:
        if not meta.name.endswith(_IN_4_BITS) or meta.dtype not in _WIDE or len(meta.shape) != 3:
            continue
        experts, inputs, outputs = meta.shape
        if inputs % MX_BLOCK:
            refused[meta.name] = f"the engine holds it in MXFP4, and {inputs} inputs are not a multiple of {MX_BLOCK}"
            continue
        scales = (experts, outputs, inputs // MX_BLOCK)
        made = (
            TensorMeta(f"{meta.name}_blocks", (*scales, MX_BLOCK // 2), "uint8"),
            TensorMeta(f"{meta.name}_scales", scales, "uint8"),
        )
        pairs[meta.name] = QuantizedTensors(made, mxfp4_experts)
    return pairs, refused


def expert_padding(model: nn.Module, trace: Trace) -> list[Fill]:
    """Return the zeros that pad the parameters of experts in MXFP4.

    vLLM makes these parameters larger than the model's experts, for its kernels. One tensor fills each parameter, so
    the unfilled rest is padding. vLLM makes the parameters of zeros, and no loader writes the padding. `trace` is the
    trace of the quantised tensors.
    """
    experts = {
        f"{path}.{key}".removeprefix("."): param
        for path, module in model.named_modules()
        if _is_mxfp4(module._parameters)
        for key, param in module.named_parameters(recurse=False)
    }
    if not experts:  # most models have none, and the search for holes reads all copies
        return []
    holes, _ = uncovered(model, trace)
    padded = {copy.param for copy in trace.copies if copy.param in holes} | trace.computed.keys()
    return [Fill(name, 0, tuple(param.shape), param.stride(), 0.0) for name, param in experts.items() if name in padded]


def mxfp4_experts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (`_blocks`, `_scales`) of experts, quantised one expert at a time.

    `weight` has transformers' shape, (experts, inputs, outputs).
    """
    experts, inputs, outputs = weight.shape
    blocks = weight.new_empty((experts, outputs, inputs // MX_BLOCK, MX_BLOCK // 2), dtype=torch.uint8)
    scales = weight.new_empty((experts, outputs, inputs // MX_BLOCK), dtype=torch.uint8)
    for expert in range(experts):
        blocks[expert], scales[expert] = mxfp4(weight[expert].t())
    return blocks, scales


def expand(manifest: Manifest, pairs: dict[str, QuantizedTensors]) -> Manifest:
    """Return the manifest as the loader sees it, with each tensor of `pairs` replaced by its quantised tensors."""
    tensors = (pairs[meta.name].made if meta.name in pairs else (meta,) for meta in manifest)
    return Manifest(tuple(chain.from_iterable(tensors)), manifest.tied)


def quantised(
    weights: Iterable[tuple[str, torch.Tensor]], pairs: Mapping[str, QuantizedTensors], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` as the loader wants them.

    A tensor of `pairs` is rounded to `dtype`, the dtype of a checkpoint, and quantised.
    """
    for name, tensor in weights:
        if (pair := pairs.get(name)) is None:
            yield name, tensor
        else:
            yield from zip((meta.name for meta in pair.made), pair.quantise(tensor.to(dtype)), strict=True)


def collapse(
    trace: Trace, pairs: dict[str, QuantizedTensors], values: Collection[str], scales: Collection[str]
) -> Trace:
    """Return a trace of the expanded manifest in terms of the trainer's tensors.

    A parameter that takes values or scales counts as computed from the trainer's tensor. A parameter in `values` is
    quantised on the way, and takes copies of the trainer's tensor. A parameter in `scales` takes nothing.
    """
    if not pairs:
        return trace
    source = _sources(pairs)
    computed = {param: _rename(names, source) for param, names in trace.computed.items()}
    for copy in trace.copies:
        if copy.name in source and copy.param not in values and copy.param not in scales:
            names = computed.setdefault(copy.param, [])
            if source[copy.name] not in names:
                names.append(source[copy.name])
    return Trace(
        copies=[copy for copy in trace.copies if copy.name not in source or copy.param in values],
        fills=trace.fills,
        computed=computed,
        refused={source.get(name, name): text for name, text in trace.refused.items()},
        unknown=_rename(trace.unknown, source),
    )


def renamed(trace: Trace, pairs: dict[str, QuantizedTensors]) -> Trace:
    """Return a trace of the expanded manifest in which copies have the trainer's names."""
    if not pairs:
        return trace
    source = _sources(pairs)
    copies = [structs.replace(copy, name=source.get(copy.name, copy.name)) for copy in trace.copies]
    return replace(trace, copies=copies)


def int8_packed(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (`weight_packed`, `weight_scale`, `weight_shape`) of a 2-D weight, as compressed-tensors packs int8.

    Symmetric, with a scale for each `group` of a row's columns. `group` and 4 must divide the columns. The bits are
    those of compressed-tensors' "memoryless_minmax" observer and its compressor: all arithmetic rounds to the weight's
    own dtype. CPUs and GPUs agree: division by 127.5 and multiplication by its reciprocal give the same scale for each
    bfloat16 and each float16.
    """
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = torch.maximum(low.abs(), high.abs()) / 127.5
    scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
    values = (groups / scale).clamp_(-128, 127).round_().to(torch.int8).view(weight.shape)
    # Values are stored with an offset of 128, so 0x80 is zero. A little-endian int32 has the first of four values in
    # its lowest byte.
    words = values.view(torch.uint8).bitwise_xor_(0x80).view(torch.int32)
    return words, scale.squeeze(2), torch.tensor(weight.shape)


def _sources(pairs: dict[str, QuantizedTensors]) -> dict[str, str]:
    """Return the trainer's tensor for each tensor made of it, by the name of the made tensor."""
    return {meta.name: name for name, pair in pairs.items() for meta in pair.made}


def _rename(names: Iterable[str], source: dict[str, str]) -> list[str]:
    """Return the trainer's names for names of the expanded manifest, each once."""
    return list(dict.fromkeys(source.get(name, name) for name in names))


def _in_8_bits(kept: str) -> bool:
    """Return whether a parameter's dtype has 8 bits, so that its numbers mean nothing without a scale."""
    return kept.partition(" ")[0] == "int8" or kept.startswith("float8")


def _is_mxfp4(params: Mapping[str, torch.Tensor | None]) -> bool:
    """Return whether a module's weights are pairs of 4-bit values, with a scale for each 32."""
    weight, scale = params.get("w13_weight"), params.get("w13_weight_scale")
    return (
        weight is not None
        and scale is not None
        and weight.dtype == scale.dtype == torch.uint8
        and weight.shape[-1] == scale.shape[-1] * MX_BLOCK // 2
    )


def _block_size(module: nn.Module) -> list[int]:
    """Return the rows and columns that share a scale, or [] if no blocks do."""
    holders = (module, getattr(module, "quant_method", None))
    return next(([*found] for each in holders if (found := getattr(each, "weight_block_size", None))), [])


def _pair(model: nn.Module, manifest: Manifest, name: str, param: str) -> QuantizedTensors | str:
    """Return the quantised tensors that a tensor must become, or the reason why it cannot."""
    path, _, own = param.rpartition(".")
    module = model.get_submodule(path)
    beside = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
    suffix = next((key for key in ("_scale", "_scale_inv") if own + key in beside), None)
    if suffix is None or not name.endswith("weight"):
        return "this version has no rule for its scales"
    if any("input" in key and "scale" in key for key in beside):
        return "the weights do not give its scales of activations: use a checkpoint with dynamic scales"
    meta, weight, scale = manifest[name], beside[own], beside[own + suffix]
    if name + suffix in manifest:
        return f"{name + suffix} comes with it: send both in 8 bits, or the weight alone in bfloat16"
    blocks = _block_size(module)
    if len(meta.shape) != 2 or weight.dim() != (3 if own in _OF_EXPERTS else 2):
        return "only two-dimensional weights are made into 8 bits"
    rows, columns = meta.shape
    kept = str(scale.dtype).removeprefix("torch.")
    if own + "_packed" in beside:
        scheme: Any = getattr(module, "scheme", None)
        if getattr(scheme, "num_bits", None) != 8 or not scheme.symmetric or own + "_g_idx" in beside:
            return "this version packs symmetric int8 with columns in their order alone"
        group = columns if scheme.group_size == -1 else scheme.group_size
        if columns % group or columns % _PER_WORD:
            return f"its {columns} columns are not a multiple of {group} and {_PER_WORD}"
        made = (
            TensorMeta(name + "_packed", (rows, columns // _PER_WORD), "int32"),
            TensorMeta(name + suffix, (rows, columns // group), kept),
            TensorMeta(name + "_shape", (2,), "int64"),
        )
        return QuantizedTensors(made, partial(int8_packed, group=group))
    if tuple(scale.shape) == (*weight.shape[:-1], 1) and weight.dtype in _PER_CHANNEL:
        shape, quantise = (rows, 1), _PER_CHANNEL[weight.dtype]
    elif weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and blocks == [BLOCK, BLOCK]:
        shape, quantise = (-(-rows // BLOCK), -(-columns // BLOCK)), fp8_per_block
    else:
        return f"this version has no scheme with scales of shape {tuple(scale.shape)}"
    values = TensorMeta(name, meta.shape, str(weight.dtype).removeprefix("torch."))
    return QuantizedTensors((values, TensorMeta(name + suffix, shape, kept)), quantise)
