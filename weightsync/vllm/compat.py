"""Every difference between vLLM versions that weightsync depends on; tested with 0.26 and 0.32."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import initialize_model

from weightsync.errors import UnsupportedError


def fresh_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return the same configuration, without the register of layers that a model under construction adds itself to."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    for name in ("static_all_moe_layers", "enabled_custom_ops", "disabled_custom_ops"):
        if (value := getattr(config.compilation_config, name, None)) is not None:
            setattr(config.compilation_config, name, type(value)())
    return config


class _IndicesOn(TorchFunctionMode):
    """Meanwhile tensors of computed integers are made on a real device: a model looks into its map of experts to ranks
    as it is built and as it is loaded. Weights are floating point or come from `torch.empty`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype: torch.dtype | None = kwargs.get("dtype")
        computed = func in (torch.full, torch.arange) and dtype is not None and not dtype.is_floating_point
        if computed and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **kwargs)


def build_on_meta(vllm_config: VllmConfig, model_config: Any, device: torch.device) -> nn.Module:
    """Build a copy of the model on the `meta` device, never loaded, with its indices on `device`.

    `device` is that of the running model. That model and its registers are not touched.
    """
    config = fresh_config(vllm_config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        with torch.device("meta"), _IndicesOn(device):
            model: nn.Module = initialize_model(vllm_config=config, model_config=model_config)
    finally:
        torch.set_default_dtype(before)
    _unwrap_loaders(model)
    _drop_cache_scales(model)
    return model


def _unwrap_loaders(model: nn.Module) -> None:
    """Replace loaders that hold back what arrives by the loaders that they are wrapped around.

    Layers that are quantised as they are loaded have such loaders, which make the layer when all is there.
    """
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        loader: Any = getattr(tensor, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = tensor.weight_loader = loader.__wrapped__


def _drop_cache_scales(model: nn.Module) -> None:
    """Remove the placeholders for the KV cache's scales, which a checkpoint may have and a started engine has not.

    What the engine made of them belongs to the cache, not to the weights, and stays.
    """
    for module in model.modules():
        if isinstance(quant_method(module), BaseKVCacheMethod):
            for name in list(module._parameters):
                if name.endswith(("_scale", "_zero_point")):
                    del module._parameters[name]


def without_lora(model: nn.Module) -> nn.Module:
    """Return the running model's tree without the layers that vLLM has put around others for adapters.

    Its tensors and the modules that own them are the model's own, under the names of a fresh copy. It must not be
    called. Raises `UnsupportedError` for layers that do more than add to what the layer inside them gives.
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


def lora_request(name: str, number: int, path: str) -> LoRARequest:
    """Return what vLLM is asked for an adapter with."""
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def _cannot_unwrap(name: str, module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"weights cannot be pushed into {name}, a {type(module).__name__} that takes adapters; start the engine "
        "without enable_lora, or push adapters alone"
    )


def check_experts(vllm_config: VllmConfig) -> None:
    """Raise `UnsupportedError` where vLLM would give some expert-parallel workers more experts than others: its
    loaders do so, but nothing that spreads tokens over the workers says that it is meant to."""
    parallel = vllm_config.parallel_config
    workers = parallel.tensor_parallel_size * parallel.data_parallel_size
    experts = vllm_config.model_config.get_num_experts() if parallel.enable_expert_parallel else 0
    if experts % workers:
        raise UnsupportedError(
            f"{experts} experts cannot be divided evenly over {workers} expert-parallel workers; start the engine with "
            "a number of workers that divides them, or without enable_expert_parallel"
        )


def quant_method(module: nn.Module) -> QuantizeMethodBase | None:
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def kernel_objects(module: nn.Module) -> list[Any]:
    """Return the objects beside a linear layer and its method that post-processing leaves something in, outermost
    first.

    These are the scheme of a compressed-tensors layer, and the kernel that was chosen for it.
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


def post_processed_attention(model: nn.Module) -> list[nn.Module]:
    """Return attention modules that derive tensors from another module's loaded weights (MLA's `W_UV`)."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading")
    ]


def has_model_level_hook(model: nn.Module) -> bool:
    return hasattr(type(model), "process_weights_after_loading")


def call_attention_hook(module: nn.Module, dtype: torch.dtype) -> None:
    hook: Any = module.process_weights_after_loading
    hook(dtype) if inspect.signature(hook).parameters else hook()


@contextmanager
def vllm_scope(vllm_config: VllmConfig, device: torch.device) -> Iterator[None]:
    """Set up what vLLM 0.21-0.26 does not set up around the calls of a weight transfer engine, and later versions do.

    It sets no default device, as an engine that starts sets none. With one, torch's compiler cannot look through vLLM's
    parameters, and each call of torch takes longer.
    """
    with set_current_vllm_config(vllm_config), torch.no_grad():
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield
