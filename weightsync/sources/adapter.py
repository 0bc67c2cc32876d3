"""The adapter of a model that PEFT has wrapped, without its base. Its factors have the names of `save_pretrained`.

The factors are read like the trainer's parameters: FSDP2's shards, ZeRO-3's partitions, whole tensors. Nothing is
gathered here.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from weightsync.errors import ConfigError, ManifestError, UnsupportedError
from weightsync.planning.layout import Manifest, TensorMeta
from weightsync.sources.base import Model, Reading, TensorShard, one_module, settled
from weightsync.sources.module import LocalParam, ModuleSource, NamedReader, adapters_of, refusal
from weightsync.sources.module_tree import modules, own_tensors, walk, walk_shells
from weightsync.sources.peft import AddedProducts

_Layers: TypeAlias = list[tuple[str, AddedProducts]]
_FILE_PREFIX = "base_model.model."
_EXPERTS = ["down_proj", "gate_up_proj"]
"""The tensors of fused experts, the outermost adapter first. vLLM tells them apart by their order alone."""
_KEEPS_BASE = ("gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`, beside true and false, that leave the base unchanged. Other values change the weights
of the base, and the engine has these from its checkpoint.
"""
_OF_ONE_RANK = {
    *("base_model_name_or_path", "corda_config", "peft_version", "revision", "runtime_config"),
    *("auto_mapping", "inference_mode", "init_lora_weights", "lora_dropout", "target_modules"),
}
"""Fields of PEFT's config without an effect on pushed factors, such as paths. They may differ between ranks."""


@torch.no_grad()
def read_lora(source: ModuleSource, model: Model, base_is_pushed: bool) -> tuple[Reading, Any, list[str]]:
    """Read the active adapter of `model` with the readers of `source`. Local, not collective.

    Returns the adapter's factors, its config, and a description: its name and the fields of the config, as texts. With
    `base_is_pushed` the base may train, and its weights may differ from the checkpoint.

    Raises `ConfigError` for a model without exactly one active adapter. Raises `ManifestError` if the selection gives
    two tensors one name. Raises `UnsupportedError`, with all reasons, for an adapter beyond plain LoRA, or one that
    vLLM cannot serve.
    """
    model = one_module(model)
    own = modules(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in own):
        raise UnsupportedError("adapters under FSDP1 are not covered; use `fully_shard`")
    source.reshard(own)
    layers = _plain(model)
    name = _active(layers)
    config = copy.copy(_config(model, name))
    config.inference_mode = True  # as `save_pretrained` has it
    _check(config, base_is_pushed)
    if not base_is_pushed:
        _refuse_trained(model)
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    held = _factors(source, layers, name, float(scaling))
    metas = {name: TensorMeta(name, one.shape, one.dtype) for name, one in held.items()}
    shards = [TensorShard(metas[name], box, view) for name, one in held.items() for box, view in one.parts]
    return settled(Reading(Manifest(tuple(metas.values())), shards)), config, _describe(name, config)


def _describe(name: str, config: Any) -> list[str]:
    """Return the adapter's name, and the fields of its config, as texts that are equal on ranks with equal adapters."""

    def plain(value: Any) -> Any:  # a set has another order in each process, and an object's text may have its address
        return sorted(value, key=str) if isinstance(value, set) else type(value).__name__

    fields = {"adapter": name} | {key: value for key, value in config.to_dict().items() if key not in _OF_ONE_RANK}
    return [f"{key}={json.dumps(value, sort_keys=True, default=plain)}" for key, value in fields.items()]


def _refuse_trained(model: nn.Module) -> None:
    """Raise `UnsupportedError` if tensors of the base train."""
    named = ((prefix + tail, each) for prefix, module in walk(model) for tail, each in own_tensors(module))
    if trained := [name for name, tensor in named if tensor.requires_grad]:
        raise UnsupportedError(
            f"{len(trained)} tensors of the base train beside the adapter, such as {trained[0]}, and engines keep "
            "their base. Freeze these tensors, choose a transport for weights, or push the base by another WeightSync "
            "and set LoraTransport(base_is_pushed=True)",
            tensors=dict.fromkeys(trained, "trains, and is no part of the adapter"),
        )


def _factors(source: ModuleSource, layers: _Layers, name: str, expected: float) -> dict[str, LocalParam]:
    """Return the factors of adapter `name`, by their names in PEFT's files. `expected` is its scaling."""
    held: dict[str, LocalParam] = {}
    refused: dict[str, str] = {}
    for prefix, adapter in layers:
        if name not in adapter.names():
            continue
        if (found := float(adapter.layer.scaling[name])) != expected:
            refused[prefix.rstrip(".")] = (
                f"its scaling is {found:g}, expected the config's {expected:g}; another scaling by `rank_pattern`, "
                "`alpha_pattern` or `set_scale` is not covered"
            )
        for given, read in _named_factors(source, prefix, adapter, name):
            full = f"{_FILE_PREFIX}{source.selection.renamed(given)}"
            if full in held:
                raise ManifestError(
                    f"TensorSelection.rename gives another tensor the name of {given}, {full}",
                    mismatched={full: "given to two tensors"},
                )
            try:
                held[full] = read()
            except UnsupportedError as error:
                refused[full] = error.message
    if refused:
        raise refusal(refused)
    return held


def _named_factors(source: ModuleSource, prefix: str, adapter: AddedProducts, name: str) -> Iterator[NamedReader]:
    for key, factor in adapter.factors(name).items():
        if not isinstance(factor, nn.ParameterDict):
            yield from ((f"{prefix}{key}.{tail}", read) for tail, read in source.readers(factor))
        else:  # an embedding's, with one parameter for each adapter
            yield from ((f"{prefix}{key}", read) for tail, read in source.readers(factor) if tail == name)


def _plain(model: nn.Module) -> _Layers:
    """Return PEFT's layers, each with the prefix of its names in PEFT's files.

    Raises `UnsupportedError` for adapters beyond plain LoRA.
    """
    found: _Layers = []
    refused: dict[str, str] = {}
    for prefix, adapters in adapters_of(model).items():
        tails = [adapter.tail for adapter in adapters]
        for depth, adapter in enumerate(adapters):
            try:
                names = adapter.names()
                if isinstance(adapter, AddedProducts) and adapter.is_plain:
                    found.append((prefix + "base_layer." * depth, adapter))
                    if adapter.is_experts and tails != _EXPERTS:
                        refused[prefix + adapter.tail] = (
                            f"its experts have adapters on {', '.join(tails)}; vLLM takes them on "
                            f"{' and '.join(_EXPERTS)} together. Choose a transport for weights, which merges them"
                        )
                elif names:
                    refused[prefix + adapter.tail] = (
                        f"it is in a {adapter.kind}; engines get plain LoRA on linear layers, embeddings and experts. "
                        "Choose a transport for weights, which merges the adapter"
                    )
            except UnsupportedError as error:
                refused[prefix.rstrip(".")] = error.message
    if refused:
        raise refusal(refused)
    return found


def _active(layers: _Layers) -> str:
    if not layers:
        raise ConfigError(
            "the model has no LoRA adapter; wrap it with PEFT's `get_peft_model(model, LoraConfig(...))`, or choose a "
            "transport for weights"
        )
    active = dict.fromkeys(name for _, adapter in layers for name in adapter.names())
    if len(active) != 1:
        found = ", ".join(active) if active else "none: they are disabled, or merged into the base"
        raise ConfigError(f"expected one active adapter, found {found}; call `set_adapter`")
    return next(iter(active))


def _config(model: nn.Module, name: str) -> Any:
    """Return PEFT's config of adapter `name`. Any wrapper of the model may have it."""
    _, shells = next(walk_shells(model))
    for shell in shells:
        configs = getattr(shell, "peft_config", None)
        if isinstance(configs, dict) and name in configs:
            return configs[name]
    raise ConfigError(f"the model's adapter {name!r} has no `peft_config`")


def _check(config: Any, base_is_pushed: bool) -> None:
    reasons = []
    if config.modules_to_save:
        reasons.append(f"modules_to_save={sorted(config.modules_to_save)}: an engine keeps its own copy of them")
    if config.bias != "none":
        reasons.append(f"bias={config.bias!r}: biases are part of the base, expected 'none'")
    if config.layer_replication:
        reasons.append("layer_replication: the engine lacks these layers")
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in _KEEPS_BASE and not base_is_pushed:
        reasons.append(
            f"init_lora_weights={init!r} changes the base, and engines keep their base. Expected true, false, one of "
            f"{', '.join(_KEEPS_BASE)}, or LoraTransport(base_is_pushed=True) beside another WeightSync for the base"
        )
    if reasons:
        raise UnsupportedError(
            f"an engine cannot serve this adapter: {'; '.join(reasons)}. Choose another transport: it merges the "
            "adapter into the weights"
        )
