"""The weight source for Megatron-core `GPTModel`s under tensor, pipeline, expert and data parallelism.

A rank reports the regions of the checkpoint's tensors that its parameters hold. A pipeline stage reports its layers,
and an expert-parallel rank its experts. The source reads the model's parameters in the model's dtype, never the fp32
masters of the optimizer. It uses the module tree, its configuration and its process groups, for any layer
specification. It imports nothing of Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weightsync.config import check_count
from weightsync.errors import ConfigError, UnsupportedError
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.base import LocalSource, Model, Reading, ShardSource, TensorShard, dtype_name, one_module
from weightsync.sources.megatron_names import (
    LATENT_BY_HEAD,
    LATENT_DOWN,
    LATENT_NORMS,
    MTP_NORMS,
    NORMS,
    WHOLE,
    Family,
    GroupPlace,
    Span,
    by_query_group,
    family_of,
    padded,
    share,
    side_by_side,
    whole,
)
from weightsync.sources.module import fingerprint, plain, readable, refusal, trains
from weightsync.sources.module_tree import modules, own_tensors

_REFUSED_OPTIONS = {
    "layernorm_zero_centered_gamma": "the checkpoint has 1 + gamma, and no memory holds this sum",
    "attention_output_gate": "no covered family has gates between queries and keys",
    "rotary_interleaved": "checkpoints have the two halves of a head apart, not interleaved",
}


@dataclass(frozen=True)
class MegatronBackend:
    """A Megatron-core model, with options: `WeightSync(MegatronBackend(vocab_size=151936), "ipc")`.

    Args:
        bridge: The family of the checkpoint names ("mixtral"). None: the model decides, for all known families but
            Mixtral. Other families need an object that exports the model, such as Megatron-Bridge's `AutoBridge` or
            mbridge's `Bridge`. It gathers every tensor.
        vocab_size: The rows of the checkpoint's embedding. None: all rows, with Megatron's padding.

    Raises:
        ConfigError: Arguments that cannot work.
    """

    bridge: Any = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            check_count("vocab_size", self.vocab_size, "the checkpoint's embedding has so many rows")

    def open(self, selection: TensorSelection, ranks: Any) -> ShardSource:
        """Return the source: `MegatronSource`, or `BridgeSource` for a bridge that exports whole tensors."""
        if self.bridge is None or isinstance(self.bridge, str):
            return MegatronSource(selection, bridge=self.bridge, vocab_size=self.vocab_size)
        from weightsync.sources.megatron_bridge import BridgeSource

        if self.vocab_size is not None:
            raise ConfigError("a bridge that exports whole tensors knows the vocabulary: leave vocab_size out")
        return BridgeSource(selection, self.bridge, ranks=ranks)


class MegatronSource(LocalSource):
    """The tensors of a `GPTModel`, or of the list of its chunks if pipeline stages are interleaved.

    The model may be in wrappers (`Float16Module`, `DistributedDataParallel`). An unknown parameter can be excluded by
    Megatron's name for it. Layers for multi-token prediction have the names of DeepSeek-V3's checkpoints.

    `bridge` and `vocab_size` are those of `MegatronBackend`. A family is named by `model_type` of its Hugging Face
    configuration.
    """

    def __init__(self, selection: TensorSelection, *, bridge: str | None = None, vocab_size: int | None = None) -> None:
        super().__init__(selection)
        self._family = family_of(bridge)
        self.vocab_size = vocab_size

    def _marks(self, model: Model) -> object:
        return fingerprint([module for chunk in _chunks(model) for module in modules(chunk)], plain)

    def _read(self, model: Model) -> Reading:
        metas: list[TensorMeta] = []
        shards: list[TensorShard] = []
        refused: dict[str, str] = {}
        for chunk in _chunks(model):
            reader = _ChunkReader(chunk, self._family, self.vocab_size)
            for name, tensor in _sources(chunk, self.selection.buffers):
                try:
                    tensors = reader.read(name, tensor)
                except UnsupportedError as error:
                    if not self.selection.excludes(name):  # it has no other name
                        refused[name] = error.message
                    continue
                for meta, parts in tensors:
                    if not self.selection.excludes(meta.name):
                        metas.append(meta)
                        shards += [TensorShard(meta, box, view, trains(tensor)) for box, view in parts]
        if refused:
            raise refusal(refused)
        shares = any(chunk.share_embeddings_and_output_weights for chunk in _chunks(model))
        names = {meta.name for meta in metas}
        is_tied = shares and not self.selection.excludes("lm_head.weight") and "model.embed_tokens.weight" in names
        tied = (("lm_head.weight", "model.embed_tokens.weight"),) if is_tied else ()
        return Reading(Manifest(tuple(metas), tied), shards)


def _sources(chunk: nn.Module, buffers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers under Megatron's names."""
    for prefix, module in chunk.named_modules():
        for name, tensor in own_tensors(module, buffers):
            yield f"{prefix}.{name}".removeprefix("."), tensor


# --- The model and its mesh


def _chunks(model: Model) -> list[nn.Module]:
    """Return the `GPTModel`s of this rank, without wrappers. Raise for a wrong model, list or mesh."""
    given = list(model) if isinstance(model, Sequence) else [one_module(model)]
    if not given:
        raise ConfigError("push got an empty list, expected the chunks of this rank's model")
    chunks = [_unwrapped(chunk) for chunk in given]
    config: Any = chunks[0].config
    interleaved = config.virtual_pipeline_model_parallel_size or 1
    stages: list[int] = [getattr(chunk, "vp_stage", None) or 0 for chunk in chunks]
    if sorted(stages) != list(range(interleaved)):
        raise ConfigError(
            f"push got {len(chunks)} chunks, of the virtual stages {stages}, expected {interleaved}: pass each chunk "
            "of this rank once"
        )
    for option, reason in _REFUSED_OPTIONS.items():
        if getattr(config, option, False):
            raise UnsupportedError(f"{option}=True is not covered: {reason}")
    return chunks


def refuse_overlap(model: nn.Module) -> None:
    """Raise `UnsupportedError` if the model's parameters may be gathered in the next forward, and are stale until then.

    Megatron's wrapper puts its hooks on the modules inside of it.
    """
    hooks = (hook for module in modules(model) for hook in module._forward_pre_hooks.values())
    if any("DistributedDataParallel._make_forward_pre_hook" in getattr(hook, "__qualname__", "") for hook in hooks):
        raise UnsupportedError(
            "with overlap_param_gather=True the parameters of other ranks' shards are stale until the next forward. "
            "Call the wrapper's `disable_forward_pre_hook()` before `push`, to gather them, and "
            "`enable_forward_pre_hook()` after it"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the `GPTModel` inside `Float16Module` and Megatron's `DistributedDataParallel`."""
    refuse_overlap(model)
    module = model
    while not hasattr(module, "decoder") and (inner := module._modules.get("module")) is not None:
        module = inner
    absent = [name for name in ("decoder", "config", "pre_process", "pg_collection") if not hasattr(module, name)]
    if absent:
        raise ConfigError(
            f'backend="megatron" pushes a GPTModel of Megatron-core 0.16, or the list of its chunks; {type(model)} '
            f"has no {', '.join(absent)}"
        )
    return module


def _shard(chunk: Any, group_name: str, option: str) -> GroupPlace:
    """Return this rank's place in a process group. Raise `ConfigError` if the model was built for another size."""
    expected = getattr(chunk.config, option, None) or 1
    group = getattr(chunk.pg_collection, group_name, None)
    shard = WHOLE if group is None else GroupPlace(group.rank(), group.size())
    if shard.size != expected:
        found = "no process group" if group is None else f"a process group of {shard.size}"
        raise ConfigError(
            f"the model's configuration says {option}={expected}, but pg_collection.{group_name} has {found}; call "
            "parallel_state.initialize_model_parallel with the same sizes before the model is built"
        )
    return shard


# --- One parameter at a time


@dataclass(frozen=True, slots=True)
class _Stack:
    """The content of a parameter: spans one after the other along `dim` of `view`."""

    spans: list[Span]
    view: torch.Tensor
    dim: int = 0


_SEQUENTIAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<number>\d+)\.linear_fc(?P<linear>[12])\.weight")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.linear_fc(?P<linear>[12])\.weight(?P<number>\d+)")
_LEGACY_EXPERTS = re.compile(r"mlp\.experts\.weight([12])")


class _ChunkReader:
    """A reader of one chunk's parameters. Making it raises `ConfigError` for a mesh that is not the model's."""

    def __init__(self, chunk: Any, family: Family, vocab_size: int | None) -> None:
        self._chunk = chunk
        self._config = chunk.config
        self._family = family
        self._tp = _shard(chunk, "tp", "tensor_model_parallel_size")
        _shard(chunk, "pp", "pipeline_model_parallel_size")
        self._expert_tp = WHOLE
        if self._config.num_moe_experts:
            _shard(chunk, "ep", "expert_model_parallel_size")
            self._expert_tp = _shard(chunk, "expt_tp", "expert_tensor_parallel_size")
        self._vocab_size = chunk.vocab_size if vocab_size is None else vocab_size
        if not 0 < self._vocab_size <= chunk.vocab_size:
            raise ConfigError(
                f"vocab_size={vocab_size}, but the model's embedding has {chunk.vocab_size} rows with its padding"
            )

    def read(self, name: str, tensor: torch.Tensor) -> list[tuple[TensorMeta, list[tuple[Box, torch.Tensor]]]]:
        """Return the checkpoint tensors in parameter `name`, each with this rank's regions of it.

        Raises `UnsupportedError`.
        """
        if type(tensor.detach()) is not torch.Tensor:  # DTensors of Megatron-FSDP, fp8 weights of Transformer Engine
            kind = type(tensor.detach()).__name__
            raise UnsupportedError(f"it is a {kind}, expected a plain tensor; keep the parameters in bf16")
        local = readable(tensor)
        found: dict[str, tuple[TensorMeta, list[tuple[Box, torch.Tensor]]]] = {}
        for stack in self._stacks(name, local):
            size = list(stack.view.shape)
            expected = sum(span.length for span in stack.spans)
            if size[stack.dim] != expected:
                raise UnsupportedError(
                    f"its shape on this rank is {tuple(local.shape)}, expected {expected} rows or columns"
                )
            at = 0
            for span in stack.spans:
                if span.name is not None:
                    shape = (*size[: stack.dim], span.total, *size[stack.dim + 1 :])
                    meta = TensorMeta(span.name, shape, dtype_name(local))
                    _, parts = found.setdefault(span.name, (meta, []))
                    if span.length > 0:
                        start = tuple(span.start if dim == stack.dim else 0 for dim in range(len(size)))
                        view = stack.view.narrow(stack.dim, at, span.length)
                        parts.append((Box(start, tuple(view.shape)), view))
                at += span.length
        return list(found.values())

    def _stacks(self, name: str, local: torch.Tensor) -> list[_Stack]:
        if name == "embedding.word_embeddings.weight":
            # Later stages have copies, for multi-token prediction.
            return self._vocabulary("model.embed_tokens.weight", local) if self._chunk.pre_process else []
        if name == "output_layer.weight":
            # The last stage's copy of a tied embedding travels as the embedding, from the first stage.
            tied = self._chunk.share_embeddings_and_output_weights
            return [] if tied else self._vocabulary("lm_head.weight", local)
        module, leaf = _module_and_leaf(name)
        if module == "decoder.final_layernorm":
            return [_replicated(f"model.norm.{leaf}", local)]
        stacks: list[_Stack] | None = None
        match name.split(".", 3):
            case "decoder", "layers", at, inside:
                layer = self._chunk.decoder.layers[int(at)]
                prefix = f"model.layers.{layer.layer_number - 1}."
                stacks = self._layer_stacks(layer, inside, local)
            case "mtp", "layers", at, inside:
                layer = self._chunk.mtp.layers[int(at)]
                prefix = f"model.layers.{self._config.num_layers + layer.layer_number - 1}."
                stacks = self._mtp_stacks(layer, inside, local)
        if stacks is not None:
            return [
                _Stack([replace(s, name=s.name and prefix + s.name) for s in each.spans], each.view, each.dim)
                for each in stacks
            ]
        raise UnsupportedError(f'shape {tuple(local.shape)}: backend="megatron" has no rule for this parameter')

    def _vocabulary(self, name: str, local: torch.Tensor) -> list[_Stack]:
        return [_Stack(share(padded(name, self._vocab_size, self._chunk.vocab_size), self._tp), local)]

    def _mtp_stacks(self, layer: Any, name: str, local: torch.Tensor) -> list[_Stack] | None:
        """Return the stacks of a layer of multi-token prediction, under the names of DeepSeek-V3's checkpoints."""
        module, leaf = _module_and_leaf(name)
        if module in MTP_NORMS:
            return [_replicated(f"{MTP_NORMS[module]}.{leaf}", local)]
        if name == "eh_proj.weight":
            return [_Stack(side_by_side([name], len(local), self._tp), local)]
        child, _, inside = name.partition(".")  # megatron-core 0.17 has renamed it, and numbers it from 1
        is_inside = child in ("transformer_layer", "mtp_model_layer")
        return self._layer_stacks(getattr(layer, child), inside, local) if is_inside else None

    def _layer_stacks(self, layer: Any, name: str, local: torch.Tensor) -> list[_Stack] | None:
        """Return the stacks under names relative to the layer, or None for an unknown parameter."""
        module, leaf = _module_and_leaf(name)
        latent = bool(getattr(self._config, "multi_latent_attention", False))
        if leaf not in ("weight", "bias"):
            return self._expert_stacks(layer, name, local)
        if (norm := (LATENT_NORMS if latent else NORMS).get(module)) is not None:
            return [_replicated(f"{norm}.{leaf}", local)]
        if module == "self_attention.linear_proj":
            return [self._row_parallel(f"self_attn.o_proj.{leaf}", local, self._tp)]
        if module == "self_attention.linear_qkv" and not latent:
            return [self._qkv(leaf, local)]
        if latent and module in LATENT_BY_HEAD:
            return [_Stack(side_by_side([f"{LATENT_BY_HEAD[module]}.{leaf}"], len(local), self._tp), local)]
        if latent and module in LATENT_DOWN:
            return [self._latent_down(module, leaf, local)]
        if module in ("mlp.linear_fc1", "mlp.shared_experts.linear_fc1"):
            up = [f"{self._mlp(layer, module)}.{name}.{leaf}" for name in self._gate_up("gate_proj", "up_proj")]
            return [_Stack(side_by_side(up, len(local), self._tp), local)]
        if module in ("mlp.linear_fc2", "mlp.shared_experts.linear_fc2"):
            return [self._row_parallel(f"{self._mlp(layer, module)}.down_proj.{leaf}", local, self._tp)]
        if name == "mlp.router.weight":
            return [_replicated(f"{self._family.moe}.gate.weight", local)]
        return self._expert_stacks(layer, name, local)

    def _qkv(self, leaf: str, local: torch.Tensor) -> _Stack:
        config = self._config
        q, k, v = (f"self_attn.{kind}_proj.{leaf}" for kind in "qkv")
        stack = by_query_group((q, k, v), config.num_attention_heads, config.num_query_groups, config.kv_channels)
        return _Stack(share(stack, self._tp), local)

    def _latent_down(self, module: str, leaf: str, local: torch.Tensor) -> _Stack:
        config = self._config
        is_query = module.endswith("q_down_proj")
        total = config.q_lora_rank if is_query else config.kv_lora_rank + config.qk_pos_emb_head_dim
        stack = whole(f"{LATENT_DOWN[module]}.{leaf}", total)
        return _Stack(stack if len(local) == total else share(stack, self._tp), local)

    def _mlp(self, layer: Any, module: str) -> str:
        """Return the checkpoint's name of the MLP around Megatron's linear `module`."""
        if module.startswith("mlp.linear"):
            return "mlp"
        # Qwen2-MoE has a gate and the singular name. The DeepSeek family has no gate and the plural.
        return "mlp.shared_expert" if layer.mlp.shared_experts.use_shared_expert_gate else "mlp.shared_experts"

    def _gate_up(self, gate: str, up: str) -> list[str]:
        return [gate, up] if self._config.gated_linear_unit else [up]

    def _row_parallel(self, name: str, local: torch.Tensor, shard: GroupPlace) -> _Stack:
        if local.dim() == 1:  # a bias is whole: it is added after the sum over ranks
            return _replicated(name, local)
        return _Stack(side_by_side([name], local.shape[1], shard), local, 1)

    def _expert_stacks(self, layer: Any, name: str, local: torch.Tensor) -> list[_Stack] | None:
        if name == "mlp.router.expert_bias":
            return [_replicated(f"{self._family.moe}.gate.e_score_correction_bias", local)]
        if name == "mlp.shared_experts.gate_weight":
            return [_replicated("mlp.shared_expert_gate.weight", local)]
        if (match := _SEQUENTIAL_EXPERT.fullmatch(name) or _GROUPED_EXPERT.fullmatch(name)) is not None:
            return [self._expert(layer, int(match["number"]), match["linear"], local)]
        if (match := _LEGACY_EXPERTS.fullmatch(name)) is not None:
            # Experts one after the other, each transposed. The parameter's own shape is (hidden, -1) or (-1, hidden).
            count, hidden = len(layer.mlp.local_expert_indices), self._config.hidden_size
            shape = (count, hidden, -1) if match[1] == "1" else (count, -1, hidden)
            experts = local.view(shape).transpose(1, 2)  # (experts, rows of outputs, columns of inputs)
            return [self._expert(layer, number, match[1], expert) for number, expert in enumerate(experts)]
        return None

    def _expert(self, layer: Any, number: int, linear: str, weight: torch.Tensor) -> _Stack:
        """Return linear 1 or 2 of the rank's expert `number`. Rows of `weight` are outputs."""
        family = self._family
        expert = f"{family.moe}.experts.{layer.mlp.local_expert_indices[number]}"
        if linear == "2":
            return self._row_parallel(f"{expert}.{family.down}.weight", weight, self._expert_tp)
        names = [f"{expert}.{name}.weight" for name in self._gate_up(family.gate, family.up)]
        return _Stack(side_by_side(names, len(weight), self._expert_tp), weight)


def _module_and_leaf(name: str) -> tuple[str, str]:
    """Split a name. Transformer Engine's `linear_qkv.layer_norm_weight` is the weight of `linear_qkv.layer_norm`."""
    module, _, leaf = name.rpartition(".")
    if leaf.startswith("layer_norm_"):
        return f"{module}.layer_norm", leaf.removeprefix("layer_norm_")
    return module, leaf


def _replicated(name: str, local: torch.Tensor) -> _Stack:
    return _Stack(whole(name, len(local)), local)
