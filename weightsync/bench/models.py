"""The trainers that a benchmark pushes from: models without data, under each backend.

Weights are random and stand for a text: the same in every process that asks, whatever is sharded how. They are
bfloat16 values, also where the trainer holds float32, so that engines which cast them hold the same.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightsync.senders import make_sender
from weightsync.senders.base import Model, TensorPolicy


def make_trainer(backend: str, model_dir: str, dtype: torch.dtype, device: torch.device) -> Model:
    """Collective: every trainer rank calls this, in its default process group. What `WeightSync.push` is given; the
    weights are not set yet. `model_dir` has a config.json."""
    make = {"fsdp": _fsdp, "deepspeed": _zero3, "megatron": _megatron}[backend]
    return make(model_dir, dtype, device)


@torch.no_grad()
def fill(model: Model, backend: str, weights: str, device: torch.device) -> None:
    """Overwrite this rank's part of the model in place with the values that `weights` stands for."""
    name, whole = "", torch.empty(0)
    for piece in make_sender(backend, TensorPolicy()).pieces(model):
        if piece.meta.name != name:
            name, whole = piece.meta.name, values(weights, piece.meta.name, piece.meta.shape, device)
        region = zip(piece.box.start, piece.box.size, strict=True)
        piece.tensor.copy_(whole[tuple(slice(start, start + size) for start, size in region)])


def share_memory(model: Model, backend: str) -> None:
    """Move this rank's part of the model to shared memory, as `nn.Module.share_memory` does for whole tensors: engines
    on this host then read it where it lies."""
    for piece in make_sender(backend, TensorPolicy()).pieces(model):
        piece.tensor.share_memory_()


def values(weights: str, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The bfloat16 values of one whole tensor. Those of a GPU are others than those of a CPU."""
    draw = torch.Generator(device).manual_seed(zlib.crc32(f"{weights} {name}".encode()))
    noise = torch.randn(shape, generator=draw, device=device)
    return (1 + 0.1 * noise if len(shape) == 1 else 0.04 * noise).to(torch.bfloat16)


def save_checkpoint(model_dir: str, weights: str, folder: Path, device: torch.device) -> None:
    """Write the model with these weights as transformers saves it: what an engine starts from. Takes the model's size
    of host memory."""
    model: Any = _empty(model_dir, torch.bfloat16)
    _materialize(model, torch.device("cpu"))
    with torch.no_grad():
        for piece in make_sender("fsdp", TensorPolicy()).pieces(model):
            piece.tensor.copy_(values(weights, piece.meta.name, piece.meta.shape, device))
    model.save_pretrained(folder)


def _config(model_dir: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_dir)


def _empty(model_dir: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(_config(model_dir), dtype=dtype)
    return model


def _materialize(model: Any, device: torch.device) -> None:
    model.to_empty(device=device)
    model.tie_weights()  # `to_empty` has given each name memory of its own


def _fsdp(model_dir: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = _empty(model_dir, dtype)
    tied = _config(model_dir).tie_word_embeddings
    if tied:  # before FSDP looks; such models are small enough to be whole on every rank for a moment
        _materialize(model, device)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    if not tied:
        model.to_empty(device=device)
    return model


def _zero3(model_dir: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed's device
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from transformers import AutoModelForCausalLM

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # or it compiles an all-reduce of its own first, which takes a minute
    deepspeed.init_distributed(torch.distributed.get_backend(), verbose=False)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=dtype):
        model = AutoModelForCausalLM.from_config(_config(model_dir), dtype=dtype)
    # Plain SGD, because its states take no memory and DeepSpeed's own optimizers need a compiler.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine: nn.Module = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    return engine


def _megatron(model_dir: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """All ranks are one tensor parallel group."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    hf = _config(model_dir)
    settings = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        qk_layernorm=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        layernorm_epsilon=hf.rms_norm_eps,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )
    model: nn.Module = GPTModel(
        settings,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        hf.vocab_size,
        hf.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    )
    return model.to(device)
