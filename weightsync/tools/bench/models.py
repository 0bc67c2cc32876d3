"""The trainers that a benchmark pushes from: models without data, under each backend.

Weights are random. All processes draw the same ones on the same kind of device for the same text. They are bfloat16
values, also if the trainer holds float32, so that a cast in the engine changes nothing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightsync.selection import TensorSelection
from weightsync.sources import open_source
from weightsync.sources.base import Model
from weightsync.sources.edits import region


def source_of(backend: str) -> str:
    """Return `WeightSync`'s backend for the benchmark's `backend`."""
    return "fsdp" if backend == "plain" else backend


def join(device: torch.device, *, alone: bool = False) -> None:
    """Use `device` from now on, as a rank of the default process group unless this process is alone. Collective."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if not alone:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


def gather_ranks(device: torch.device) -> None:
    """Return when all ranks of the default process group have called this, and their GPUs are idle. Collective."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_trainer(backend: str, model_dir: str, dtype: torch.dtype, device: torch.device) -> Model:
    """Return a model for `WeightSync.push`, without values so far. `model_dir` has a config.json. Collective.

    All but "plain" use the default process group.
    """
    make = {"plain": _plain, "fsdp": _fsdp, "deepspeed": _zero3, "megatron": _megatron}
    model: nn.Module = make[backend](model_dir, dtype, device)
    return model


@torch.no_grad()
def fill(model: Model, backend: str, weights: str, draw: torch.device) -> None:
    """Overwrite this rank's shards in place with values seeded by the text `weights`, drawn on device `draw`."""
    name, whole = "", torch.empty(0)
    for shard in _shards(model, backend):
        if shard.meta.name != name:
            name, whole = shard.meta.name, _values(weights, shard.meta.name, shard.meta.shape, draw)
        shard.tensor.copy_(whole[region(shard.box)])
    if draw.type == "cuda":
        torch.cuda.synchronize()  # peers read on their own streams, and a push must not wait for this


def stepper(model: Any, backend: str) -> Callable[[], None]:
    """Return one optimizer step: a forward and a backward pass of a short sequence, and SGD. Collective.

    SGD is part of the backward pass, except with DeepSpeed. Each gradient is freed at once, so a model may fill most of
    a GPU. Megatron's forward needs a GPU and a special batch, so its step adds a constant to the shards.
    """
    if backend == "megatron":
        tensors = [shard.tensor for shard in _shards(model, backend)]
        return lambda: torch._foreach_add_(tensors, 1e-3)
    device = next(model.parameters()).device
    tokens = torch.arange(5, 69, device=device)[None]

    def descend(param: Any) -> None:
        param.data.add_(param.grad, alpha=-1e-2)
        param.grad = None

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if backend == "deepspeed":
            model.backward(loss)
            model.step()
        else:
            loss.backward()

    if backend != "deepspeed":
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(descend)
    return step


def changer(model: Any, backend: str, share: float) -> Callable[[], None]:
    """Return a step that changes a share of this rank's values, at random, by one unit in the last place."""
    tensors = [shard.tensor for shard in _shards(model, backend)]
    draws = {tensor.device: torch.Generator(tensor.device).manual_seed(0) for tensor in tensors}

    @torch.no_grad()
    def step() -> None:
        for tensor in tensors:
            words = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
            noise = torch.rand(words.shape, generator=draws[tensor.device], device=tensor.device)
            # The lowest bit of a bfloat16 is bit 16 of a float32.
            words.bitwise_xor_((noise < share).to(words.dtype) << (16 if tensor.element_size() == 4 else 0))

    return step


def share_memory(model: Model, backend: str) -> None:
    """Move this rank's shards to shared memory, as `nn.Module.share_memory` does, for engines on this host."""
    for shard in _shards(model, backend):
        shard.tensor.share_memory_()


def _shards(model: Model, backend: str) -> list[Any]:
    return list(open_source(source_of(backend), TensorSelection()).read(model).shards)


def _values(weights: str, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the bfloat16 values of one whole tensor."""
    draw = torch.Generator(device).manual_seed(zlib.crc32(f"{weights} {name}".encode()))
    noise = torch.randn(shape, generator=draw, device=device)
    return (1 + 0.1 * noise if len(shape) == 1 else 0.04 * noise).to(torch.bfloat16)


def save_checkpoint(model_dir: str, weights: str, folder: Path, draw: torch.device) -> None:
    """Write the model with these weights as transformers saves it, with the architecture of `model_dir`.

    Takes the model's size of host memory.
    """
    model = _plain(model_dir, torch.bfloat16, torch.device("cpu"))
    fill(model, "plain", weights, draw)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": _config(model_dir).architectures}))


def _config(model_dir: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_dir)


def _empty(model_dir: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(_config(model_dir), dtype=dtype)
    return model


def _plain(model_dir: str, dtype: torch.dtype, device: torch.device) -> Any:
    model: Any = _empty(model_dir, dtype).to_empty(device=device)
    model.tie_weights()  # `to_empty` has given each name memory of its own
    _set_buffers(model)
    return model


def _set_buffers(model: Any) -> None:
    """Compute the frequencies of rotary embeddings. No checkpoint and no push has them."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.copy_(type(module)(module.config).inv_freq)


def _fsdp(model_dir: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    tied = _config(model_dir).tie_word_embeddings
    # Tie weights before `fully_shard`. Tied models are small enough to be whole on every rank for a moment.
    model = _plain(model_dir, dtype, device) if tied else _empty(model_dir, dtype)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    if not tied:
        model.to_empty(device=device)
        _set_buffers(model)
    return model


def _zero3(model_dir: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed's device
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from transformers import AutoModelForCausalLM

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # or it first compiles its own all-reduce
    deepspeed.init_distributed(torch.distributed.get_backend(), verbose=False)
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    settings |= {"bf16": {"enabled": dtype == torch.bfloat16}, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=dtype):
        model = AutoModelForCausalLM.from_config(_config(model_dir), dtype=dtype)
    # Plain SGD, because its states take no memory and DeepSpeed's own optimizers need a compiler.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine: nn.Module = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    return engine


def _megatron(model_dir: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build the model under Megatron-core, with all ranks as one tensor parallel group."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    hf = _config(model_dir)
    settings = TransformerConfig(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads, num_query_groups=hf.num_key_value_heads, kv_channels=hf.head_dim,
        qk_layernorm=True, normalization="RMSNorm", gated_linear_unit=True, activation_func=nn.functional.silu,
        add_bias_linear=False, layernorm_epsilon=hf.rms_norm_eps, tensor_model_parallel_size=tp, params_dtype=dtype,
        bf16=dtype == torch.bfloat16, perform_initialization=False, use_cpu_initialization=device.type == "cpu",
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    tied = hf.tie_word_embeddings
    places = hf.vocab_size, hf.max_position_embeddings
    model: nn.Module = GPTModel(
        settings, spec, *places, position_embedding_type="rope", share_embeddings_and_output_weights=tied
    )
    return model.to(device)
