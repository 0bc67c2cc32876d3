"""For engines that were started from an 8-bit checkpoint: which of the trainer's tensors must become several.

The engine's loader wants `q_proj.weight` in float8 or int8, and `q_proj.weight_scale` beside it; the trainer has
`q_proj.weight` in bfloat16. Which scheme that is, the never loaded model tells: by the dtype of the parameter that the
tensor lands in, and by the shape of the scales that stand beside it. Where it packs int8 into words, the loader wants
`q_proj.weight_packed`, `q_proj.weight_scale` and `q_proj.weight_shape`, and the layer's `scheme` says how. A trainer
that sends 8-bit tensors and their scales itself is taken at its word, and nothing here applies. This module knows
nothing about vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weightsync.kernels.quantize import BLOCK, fp8_per_block, fp8_per_channel, int8_per_channel
from weightsync.layout import Manifest, TensorMeta
from weightsync.receiver.trace import Trace

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""A whole 2-D weight to its 8-bit values, its scales, and what else the loader wants."""

_PER_CHANNEL: dict[torch.dtype, Quantise] = {torch.float8_e4m3fn: fp8_per_channel, torch.int8: int8_per_channel}
_WIDE = ("bfloat16", "float16", "float32", "float64")
_PER_WORD = 4
"""8-bit values in an int32."""


@dataclass(frozen=True)
class Pair:
    """What the loader is given in place of a tensor: those of `made`, 8-bit values and their scales for the most part,
    which `quantise` makes of it."""

    made: tuple[TensorMeta, ...]
    quantise: Quantise


@contextmanager
def unpacked(model: nn.Module) -> Iterator[bool]:
    """Meanwhile each module of `model`, which is on `meta`, that packs its weight into words has a `weight` in int8 as
    well, loaded as the packed one is: it shows which of a trainer's tensors belong there. Gives whether there are any.
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


def find_pairs(model: nn.Module, manifest: Manifest, trace: Trace) -> tuple[dict[str, Pair], dict[str, str]]:
    """By name: the tensors that must become pairs, and those that change their kind on the way in a manner that no
    scheme here covers, with what is wrong. `model` is never loaded, `trace` what its loader does with `manifest`, both
    as they are while it is `unpacked`."""
    params = dict(model.named_parameters())
    pairs: dict[str, Pair] = {}
    refused: dict[str, str] = {}
    for name, param in {(copy.name, copy.param) for copy in trace.copies if copy.param in params}:
        comes, kept = manifest[name].dtype, str(params[param].dtype).removeprefix("torch.")
        if f"{param}_packed" in params:
            kept += " packed into words"
        if comes in _WIDE and _in_8_bits(kept):
            found = _pair(model, manifest, name, param)
            if isinstance(found, Pair):
                pairs[name] = found
            else:
                refused[name] = f"the engine holds it in {kept}, and {found}"
        elif comes != kept and (_in_8_bits(comes) or _in_8_bits(kept)):
            refused[name] = f"it comes in {comes}, and the engine holds it in {kept}; send it in {kept}, or in bfloat16"
    return pairs, refused


def expand(manifest: Manifest, pairs: dict[str, Pair]) -> Manifest:
    """The manifest as the loader gets to see it."""
    tensors: list[TensorMeta] = []
    for meta in manifest:
        pair = pairs.get(meta.name)
        tensors += [meta] if pair is None else pair.made
    return Manifest(tuple(tensors))


def quantised(
    weights: Iterable[tuple[str, torch.Tensor]], pairs: dict[str, Pair], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` for the loader, one by one: a tensor that must become a pair is rounded to `dtype`, which a checkpoint
    would have it in, and quantised."""
    for name, tensor in weights:
        if (pair := pairs.get(name)) is None:
            yield name, tensor
        else:
            yield from zip((meta.name for meta in pair.made), pair.quantise(tensor.to(dtype)), strict=True)


def collapse(trace: Trace, pairs: dict[str, Pair]) -> Trace:
    """A trace of the expanded manifest in terms of the trainer's tensors: what lands in a parameter as values or as
    scales is computed from the tensor that becomes both."""
    source = _sources(pairs)
    computed = {param: _rename(names, source) for param, names in trace.computed.items()}
    for copy in trace.copies:
        if copy.name in source:
            names = computed.setdefault(copy.param, [])
            if source[copy.name] not in names:
                names.append(source[copy.name])
    return Trace(
        copies=[copy for copy in trace.copies if copy.name not in source],
        fills=trace.fills,
        computed=computed,
        refused={source.get(name, name): text for name, text in trace.refused.items()},
        unknown=_rename(trace.unknown, source),
    )


def renamed(trace: Trace, pairs: dict[str, Pair]) -> Trace:
    """A trace of the expanded manifest whose copies have the names that the trainer has for what they are made of."""
    source = _sources(pairs)
    return replace(trace, copies=[replace(copy, name=source.get(copy.name, copy.name)) for copy in trace.copies])


def int8_packed(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A 2-D weight as compressed-tensors packs it in 8 bits, symmetric, with a scale for each `group` of a row's
    columns: (`weight_packed`, `weight_scale`, `weight_shape`). `group` divides the columns, as 4 does.

    To the bit as its "memoryless_minmax" observer and its compressor have it: all arithmetic rounds to the weight's own
    dtype, twice where a value is divided and then rounded. On CPUs and GPUs alike: 127.5 and its reciprocal give the
    same scales for each number of bfloat16 and of float16.
    """
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = torch.maximum(low.abs(), high.abs()) / 127.5
    scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
    values = (groups / scale).clamp_(-128, 127).round_().to(torch.int8).view(weight.shape)
    # Unsigned, with 128 for zero, the first of four in the lowest byte: what a little-endian machine calls a word.
    words = values.view(torch.uint8).bitwise_xor_(0x80).view(torch.int32)
    return words, scale.squeeze(2), torch.tensor(weight.shape)


def _sources(pairs: dict[str, Pair]) -> dict[str, str]:
    """By name of what is made: the trainer's tensor that it is made of."""
    return {meta.name: name for name, pair in pairs.items() for meta in pair.made}


def _rename(names: Iterable[str], source: dict[str, str]) -> list[str]:
    """Names of the expanded manifest as the trainer has them, each once."""
    return list(dict.fromkeys(source.get(name, name) for name in names))


def _in_8_bits(kept: str) -> bool:
    """Whether numbers that are kept so mean nothing without a scale."""
    return kept.partition(" ")[0] == "int8" or kept.startswith("float8")


def _pair(model: nn.Module, manifest: Manifest, name: str, param: str) -> Pair | str:
    """The pair that a tensor must become, or why it cannot."""
    path, _, own = param.rpartition(".")
    module = model.get_submodule(path)
    beside = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
    suffix = next((key for key in ("_scale", "_scale_inv") if own + key in beside), None)
    if suffix is None or not name.endswith("weight"):
        return "has no scales beside it that this version knows how to make"
    if any("input" in key and "scale" in key for key in beside):
        return "wants scales for activations, which weights do not tell: use a checkpoint with dynamic ones"
    meta, weight, scale = manifest[name], beside[own], beside[own + suffix]
    if name + suffix in manifest:
        return f"{name + suffix} comes with it: send both in 8 bits, or the weight alone in bfloat16"
    if weight.dim() != 2 or len(meta.shape) != 2:
        return "only two-dimensional weights are made into 8 bits"
    rows, columns = meta.shape
    kept = str(scale.dtype).removeprefix("torch.")
    if own + "_packed" in beside:
        scheme: Any = getattr(module, "scheme", None)
        if getattr(scheme, "num_bits", None) != 8 or not scheme.symmetric or own + "_g_idx" in beside:
            return "this version packs symmetric int8 with columns in their order alone"
        group = columns if scheme.group_size == -1 else scheme.group_size
        if columns % group or columns % _PER_WORD:
            return f"its {columns} columns are no whole groups of {group}, or no whole words"
        made = (
            TensorMeta(name + "_packed", (rows, columns // _PER_WORD), "int32"),
            TensorMeta(name + suffix, (rows, columns // group), kept),
            TensorMeta(name + "_shape", (2,), "int64"),
        )
        return Pair(made, partial(int8_packed, group=group))
    if tuple(scale.shape) == (weight.shape[0], 1) and weight.dtype in _PER_CHANNEL:
        shape, quantise = (rows, 1), _PER_CHANNEL[weight.dtype]
    elif (
        weight.dtype == torch.float8_e4m3fn
        and scale.dtype == torch.float32
        and list(getattr(module, "weight_block_size", None) or ()) == [BLOCK, BLOCK]
    ):
        shape, quantise = (-(-rows // BLOCK), -(-columns // BLOCK)), fp8_per_block
    else:
        return f"its scales of shape {tuple(scale.shape)} belong to a scheme that this version does not know"
    values = TensorMeta(name, meta.shape, str(weight.dtype).removeprefix("torch."))
    return Pair((values, TensorMeta(name + suffix, shape, kept)), quantise)
