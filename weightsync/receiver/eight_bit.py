"""For engines that were started from an 8-bit checkpoint: which of the trainer's tensors must become two.

The engine's loader wants `q_proj.weight` in float8 or int8, and `q_proj.weight_scale` beside it; the trainer has
`q_proj.weight` in bfloat16. Which scheme that is, the never loaded model tells: by the dtype of the parameter that the
tensor lands in, and by the shape of the scales that stand beside it. A trainer that sends 8-bit tensors and their
scales itself is taken at its word, and nothing here applies. This module knows nothing about vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weightsync.kernels.quantize import BLOCK, fp8_per_block, fp8_per_channel, int8_per_channel
from weightsync.layout import Manifest, TensorMeta
from weightsync.receiver.trace import Trace

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A whole 2-D weight to its 8-bit values and its scales."""

_PER_CHANNEL: dict[torch.dtype, Quantise] = {torch.float8_e4m3fn: fp8_per_channel, torch.int8: int8_per_channel}
_WIDE = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Pair:
    """What the loader is given in place of the tensor `values.name`: 8-bit `values` under its name, and `scale`."""

    values: TensorMeta
    scale: TensorMeta
    quantise: Quantise


def find_pairs(model: nn.Module, manifest: Manifest, trace: Trace) -> tuple[dict[str, Pair], dict[str, str]]:
    """By name: the tensors that must become pairs, and those that change their kind on the way in a manner that no
    scheme here covers, with what is wrong. `model` is never loaded, `trace` what its loader does with `manifest`."""
    params = dict(model.named_parameters())
    pairs: dict[str, Pair] = {}
    refused: dict[str, str] = {}
    for name, param in {(copy.name, copy.param) for copy in trace.copies if copy.param in params}:
        comes, kept = manifest[name].dtype, str(params[param].dtype).removeprefix("torch.")
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
        tensors += [meta] if pair is None else [pair.values, pair.scale]
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
            values, scale = pair.quantise(tensor.to(dtype))
            yield name, values
            yield pair.scale.name, scale


def collapse(trace: Trace, pairs: dict[str, Pair]) -> Trace:
    """A trace of the expanded manifest in terms of the trainer's tensors: what lands in a parameter as values or as
    scales is computed from the tensor that becomes both."""
    source = {pair.scale.name: name for name, pair in pairs.items()} | {name: name for name in pairs}
    computed = {param: rename(names, pairs) for param, names in trace.computed.items()}
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
        unknown=rename(trace.unknown, pairs),
        ignored=rename(trace.ignored, pairs),
    )


def rename(names: Iterable[str], pairs: dict[str, Pair]) -> list[str]:
    """Names of the expanded manifest as the trainer has them, each once."""
    source = {pair.scale.name: name for name, pair in pairs.items()}
    return list(dict.fromkeys(source.get(name, name) for name in names))


def _in_8_bits(dtype: str) -> bool:
    """Whether numbers of this dtype mean nothing without a scale."""
    return dtype == "int8" or dtype.startswith("float8")


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
    return Pair(values, TensorMeta(name + suffix, shape, str(scale.dtype).removeprefix("torch.")), quantise)
