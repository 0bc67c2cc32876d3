"""The differences between vLLM versions that weightsync depends on. docs/evidence/versions.md says which ran."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from weightsync.errors import UnsupportedError

HAVE_RUN = (0, 20), (0, 33)
"""The first and the last vLLM that weightsync ran with. `weightsync.tools.doctor` and setup.py repeat the last."""

_MADE_IN_FORWARD = "_merged_conv_weight", "_wp_fp32", "sink_populated", "update_cache", "patch_pos_embed"
"""Attributes for values that vLLM's first forward makes from weights, in GLM-5 Next, openPangu, FoPE and HunYuan-VL."""
_MAKERS = {
    "_fse_fuse_gate": "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS",
    "_fp8_dynamic_scale": 'mm_encoder_attn_dtype="fp8", or with its mm_encoder_fp8_scale_path',
    "specialized_decode_config": "decode_backend",
}
"""Attributes that are set if vLLM keeps such values, each with the option behind it."""


def release() -> tuple[int, int] | None:
    """Return the first two numbers of vLLM's version. None if it has none, as a build of one's own may."""
    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def is_before(major: int, minor: int) -> bool:
    """Return whether this vLLM is older than a release. False for a build without a version."""
    return (release() or (major, minor)) < (major, minor)


def has_run() -> bool:
    """Return whether weightsync ran with this vLLM, or with one before it and one after it."""
    return HAVE_RUN[0] <= (release() or HAVE_RUN[1]) <= HAVE_RUN[1]


def without_lora(model: nn.Module) -> nn.Module:
    """Return the running model's tree without vLLM's wrapping layers for adapters.

    Its tensors and the modules that own them are the model's own, under the names of a fresh copy. Do not call its
    forward.

    Raises:
        UnsupportedError: A wrapping layer does more than add to the wrapped layer's output.
    """
    known: dict[nn.Module, nn.Module] = {}

    def unwrapped(name: str, module: nn.Module) -> nn.Module:
        if module not in known:
            known[module] = found = module
            if isinstance(module, BaseLayerWithLoRA):
                known[module] = found = module.base_layer
                if not isinstance(found, (LinearBase, VocabParallelEmbedding, LogitsProcessor)):
                    raise _cannot_unwrap(name, found)
            children = {
                key: unwrapped(f"{name}.{key}", child) for key, child in module._modules.items() if child is not None
            }
            if found is module and any(child is not module._modules[key] for key, child in children.items()):
                if quant_method(module) is not None or post_processed_attention(module):
                    raise _cannot_unwrap(name, module)
                known[module] = nn.Module()
                vars(known[module]).update(_parameters=module._parameters, _buffers=module._buffers, _modules=children)
        return known[module]

    return unwrapped("model", model)


def drafter_of(worker: Any) -> nn.Module | None:
    """Return the drafter of this vLLM worker. None: the worker has no drafter, or one without a model."""
    runner = worker.model_runner
    if hasattr(runner, "get_draft_model"):
        found = runner.get_draft_model()
    else:
        found = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
        found = getattr(found, "unwrap", lambda: found)()
    return found if isinstance(found, nn.Module) else None


def worker_under_way() -> Any:
    """Return the vLLM worker now making its weight transfer engine, found in a calling frame.

    The worker gives the engine its model. It gives its drafter only to an update of the drafter alone, once the engine
    is up.

    Raises:
        UnsupportedError: No frame belongs to a worker.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if hasattr(caller := frame.f_locals.get("self"), "model_runner"):
            return caller
        frame = frame.f_back
    raise UnsupportedError(
        "this vLLM makes its weight transfer engine outside of a worker, and weightsync cannot find the drafter. "
        "Start the engine without speculative_config, or with weightsync's worker extension"
    )


def drafter_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return vLLM's configuration for the drafter."""
    speculative, config = vllm_config.speculative_config, copy.copy(vllm_config)
    if (backend := getattr(speculative, "moe_backend", None)) is not None:
        config.kernel_config = copy.copy(config.kernel_config)
        config.kernel_config.moe_backend = backend
    if speculative.method == "draft_model":
        config.model_config = speculative.draft_model_config
        config.quant_config = VllmConfig.get_quantization_config(config.model_config, config.load_config)
    return config


def shares_checkpoint(vllm_config: VllmConfig) -> bool:
    """Return whether a cold start would load the drafter from the model's own checkpoint.

    It does so for layers that predict several tokens.
    """
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return draft is not None and draft.model == vllm_config.model_config.model


def has_plain_head(vllm_config: VllmConfig) -> bool:
    """Return whether the drafter is an EAGLE head without any state but its parameters at the start."""
    speculative = vllm_config.speculative_config
    return (
        getattr(speculative, "method", None) in ("eagle", "eagle3")
        and speculative.draft_model_config.quantization is None
        and not getattr(speculative, "parallel_drafting", False)
    )


def lora_request(name: str, number: int, path: str) -> LoRARequest:
    """Return vLLM's request for an adapter. Adapters on experts have PEFT's layout, with one tensor for all experts."""
    layout = {"is_3d_lora_weight": True} if "is_3d_lora_weight" in LoRARequest.__struct_fields__ else {}
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, **layout)


def adapter_renaming(model: nn.Module) -> Any:
    """Return the mapper by which vLLM renames an adapter's tensors. None: it renames nothing."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for method in ("get_rename_mapper", "get_unstacked_mapper"):  # the second one until 0.26
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    return mapper


def _cannot_unwrap(name: str, module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"weights cannot be pushed into {name}, a {type(module).__name__} with adapters; start the engine without "
        "enable_lora, or push adapters alone"
    )


def quant_method(module: nn.Module) -> QuantizeMethodBase | None:
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def kernel_objects(module: nn.Module) -> list[Any]:
    """Return the objects beside a linear layer and its method that hold post-processed state, outermost first.

    They are the scheme of a compressed-tensors layer, and the kernel chosen for it.
    """
    found: list[Any] = []
    if isinstance(module, LinearBase):
        inside = [quant_method(module), getattr(module, "scheme", None)]
        while inside:
            holder = inside.pop(0)
            for value in vars(holder).values() if holder is not None else ():
                if callable(getattr(value, "process_weights_after_loading", None)) and not isinstance(value, nn.Module):
                    inside.append(value)
            if holder is not None and holder is not quant_method(module):
                found.append(holder)
    return found


_ROTARY = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Buffers in older checkpoints. Every engine computes them."""


_POOLER = ("pooler.dense.weight", "pooler.dense.bias")
"""BERT's pooler. An engine for embeddings has none, and loaders before 0.32 have no table to drop its tensors."""


def is_of_a_later_layer(vllm_config: VllmConfig, name: str) -> bool:
    """Return whether a tensor is of a layer for further tokens. Checkpoints number these layers after all others.

    vLLM's loaders pass over them if no drafter has them.
    """
    config = vllm_config.model_config.hf_text_config
    first, count = getattr(config, "num_hidden_layers", 0), getattr(config, "num_nextn_predict_layers", 0) or 0
    found = re.search(r"\blayers\.(\d+)\.", name)
    return found is not None and first <= int(found[1]) < first + count


def drops(model: nn.Module, name: str) -> bool:
    """Return whether vLLM's loaders pass over a tensor of this name.

    Each module of `model` may have a table of names to drop. An inner module's table holds names without the prefix of
    that module.
    """
    if any(part in name for part in _ROTARY) or name.endswith(_POOLER):
        return True
    ends = [name, *(name[at + 1 :] for at, letter in enumerate(name) if letter == ".")]
    for module in model.modules():
        table = getattr(module, "hf_to_vllm_mapper", None)
        beginnings = [key for key, new in getattr(table, "orig_to_new_prefix", {}).items() if new is None]
        parts = [key for key, new in getattr(table, "orig_to_new_substr", {}).items() if new is None]
        if any(part in name for part in parts) or any(end.startswith(tuple(beginnings)) for end in ends):
            return True
    return False


_PLAIN_CACHES = "auto", "bfloat16", "float16", "float32"
"""The dtypes of KV caches without scales, as vLLM names them."""
CACHE_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
"""The buffers with an attention layer's scales of an 8-bit KV cache."""


def attention_with_loaded_scales(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers with possible scales for an 8-bit KV cache in a checkpoint."""
    return [module for module in model.modules() if isinstance(quant_method(module), BaseKVCacheMethod)]


def attention_with_scales(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers with scales for a KV cache. vLLM's dummy loader fills them."""
    return [module for module in model.modules() if hasattr(module, CACHE_SCALES[0])]


def has_8_bit_cache(attention: nn.Module) -> bool:
    return str(getattr(attention, "kv_cache_dtype", "auto")) not in _PLAIN_CACHES


def reset_cache_scales(attention: nn.Module) -> None:
    """Give an attention layer the scales of a start without scales in the checkpoint."""
    held = {**vars(attention), **attention._buffers, **attention._parameters}  # the place depends on the version
    for key, value in held.items():
        if key.removesuffix("_cpu").removesuffix("_float") in CACHE_SCALES:
            if isinstance(value, torch.Tensor):
                value.data.fill_(1.0)
            elif isinstance(value, float):
                setattr(attention, key, 1.0)


def post_processed_attention(model: nn.Module) -> list[nn.Module]:
    """Return attention modules with tensors derived from another module's weights: MLA's `W_UV`, KDA's on AMD."""
    return [
        module
        for module in model.modules()
        if any(hasattr(module, name) for name in ("kv_b_proj", "decode_conv1d_weight"))
        and hasattr(module, "process_weights_after_loading")
    ]


def refuse_made_once(model: nn.Module) -> None:
    """Raise `UnsupportedError` if vLLM makes values from a model's weights once, and keeps them."""
    hook = "process_weights_after_loading"
    made = {f"{type(model).__name__}.{hook}": ""} if hasattr(type(model), hook) else {}
    for module in model.modules():
        own, kind = vars(module), type(module).__name__
        made |= {f"{kind}.{name}": "" for name in _MADE_IN_FORWARD if name in own}
        made |= {f"{kind}.{name}": f", or start it without {one}" for name, one in _MAKERS.items() if own.get(name)}
    if made:
        name, way_out = next(iter(made.items()))
        raise UnsupportedError(
            f"vLLM makes values from weights once, by {name}, and would not make them again after a push. Restart the "
            f"engine from a checkpoint{way_out}"
        )


def has_released(attention: Any) -> bool:
    """Return whether MLA's attention has released `kv_b_proj`, as with AMX, and no push has filled it since."""
    return getattr(attention, "is_amx_bmm_enabled", False) and not attention.kv_b_proj.weight.numel()


def sinks_of(model: nn.Module) -> list[tuple[Any, nn.Parameter]]:
    """Return the attention kernels with sinks, each with the parameter behind its sinks.

    Most kernels read the parameter. FlashInfer's kernels copy it to float32. A CPU's kernel may copy it in the first
    forward.

    Raises:
        UnsupportedError: The sinks belong to no known parameter.
    """
    found: list[tuple[Any, nn.Parameter]] = []
    for name, module in model.named_modules():
        kernel = getattr(module, "impl", None)
        sinks = getattr(kernel, "sinks", None)
        if not isinstance(sinks, torch.Tensor):
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        own = [p for key, p in layer.named_parameters(recurse=False) if "sink" in key and p.shape == sinks.shape]
        if len(own) != 1:
            raise UnsupportedError(
                f"the attention kernel of {name} has sinks, and its layer has {len(own)} parameters of their shape, "
                "expected 1: a push would not reach the sinks"
            )
        found.append((kernel, own[0]))
    return found


def answering(model: nn.Module) -> list[nn.Module]:
    """Return the modules that every answer passes outside of CUDA graphs: the makers of logits, and a pooler.

    A model without them is returned itself.
    """
    made = [m for m in model.modules() if isinstance(getattr(m, "base_layer", m), LogitsProcessor)]
    pooler = getattr(model, "pooler", None)
    return [*made, pooler] if isinstance(pooler, nn.Module) else made or [model]


def pooling_requests(worker: Any) -> Mapping[str, Any]:
    """Return a live view of a worker's pooling requests by id. Empty with vLLM's V2 runner, which drops rows itself."""
    runner = worker.model_runner
    return getattr(runner, "requests", {}) if getattr(runner, "is_pooling_model", False) else {}


def drop_earlier_rows(pooling_requests: Mapping[str, Any]) -> None:
    """Drop the rows of preempted requests before their first chunk runs again. vLLM would answer with rows twice."""
    for request in pooling_requests.values():
        if not request.num_computed_tokens and request.pooling_states is not None:
            request.pooling_states.clean()


def drops_a_token(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM drops the next token of a request that a pause has frozen, as before 0.22."""
    return is_before(0, 22) and bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))


def offloads_weights(vllm_config: VllmConfig) -> bool:
    """Return whether the engine reads weights from the host, or copies them from there in each forward."""
    offload, tables = vllm_config.offload_config, getattr(vllm_config, "engram_config", None)
    sizes = offload.uva.cpu_offload_gb, offload.prefetch.offload_group_size
    return any(sizes) or getattr(tables, "cpu_offload", False)


def computes_cache_scales(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM before 0.28 computes the scales of an 8-bit KV cache, from weights, in its first forward."""
    cache = vllm_config.cache_config
    return getattr(cache, "calculate_kv_scales", False) and str(cache.cache_dtype) not in _PLAIN_CACHES


def load_format(vllm_config: VllmConfig) -> str:
    """Return vLLM's source of the weights at the engine's start, such as "dummy". vLLM may keep an enum."""
    found = vllm_config.load_config.load_format
    return str(getattr(found, "value", found))


def loads_from_another_process(vllm_config: VllmConfig) -> bool:
    """Return whether the engine maps its parameters from the daemon of vLLM's weight cache."""
    options = vllm_config.load_config.model_loader_extra_config or {}
    return load_format(vllm_config) == "ipc_cache" and options.get("mode") != "copy"


def can_sleep(vllm_config: VllmConfig) -> bool:
    """Return whether the engine's weights lie in memory that vLLM's sleep can discard."""
    config = vllm_config.model_config
    return getattr(config, "enable_sleep_mode", False) or getattr(config, "enable_cumem_allocator", False)


def has_never_slept(worker: Any) -> bool:
    """Return whether a vLLM worker has never slept. False if it does not tell, as before 0.25.

    A worker makes the backend of its sleep mode when it first sleeps or wakes up.
    """
    return getattr(worker, "_sleep_mode_backend", worker) is None


def weights_asleep() -> bool:
    """Return whether vLLM has given back the memory of this GPU worker's weights, as its sleep levels 1 and 2 do.

    Older allocators do not tell this for level 2.
    """
    return any(getattr(data, "is_asleep", data.cpu_backup_tensor is not None) for data in _sleeping_memory("weights"))


def kv_cache_asleep() -> bool:
    """Return whether vLLM has given back the memory of this GPU worker's KV cache.

    True if an engine can sleep and its allocator does not tell.
    """
    return any(getattr(data, "is_asleep", True) for data in _sleeping_memory("kv_cache"))


def _sleeping_memory(tag: str) -> list[Any]:
    """Return the records of vLLM's allocator for memory that sleep may give back, with this tag."""
    from vllm.device_allocator.cumem import CuMemAllocator

    known = CuMemAllocator.instance.pointer_to_data.values() if CuMemAllocator.instance is not None else ()
    return [data for data in known if data.tag == tag]


def call_attention_hook(module: nn.Module, dtype: torch.dtype) -> None:
    hook: Any = module.process_weights_after_loading
    hook(dtype) if inspect.signature(hook).parameters else hook()


@contextmanager
def vllm_scope(vllm_config: VllmConfig, device: torch.device) -> Iterator[None]:
    """Set up the context that vLLM 0.21-0.26 lacks around calls of a weight transfer engine. Later versions set it up.

    Sets no default device, like an engine at its start. With a default device, torch's compiler cannot trace vLLM's
    parameters, and each call of torch takes longer.
    """
    of_worker = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with set_current_vllm_config(vllm_config), torch.no_grad(), of_worker:
        yield
