"""The never loaded copy of an engine's model, on the `meta` device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightsync.vllm import compat
from weightsync.worker.engine_model import DRAFTER
from weightsync.worker.reload import materialise


def fresh_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration as before any model was built: with empty registers, and its quantisation read anew.

    A model under construction registers its layers there, and renames those of the quantisation in place. If the
    checkpoint has no quantisation, the engine's names no layers. To read it, vLLM would look for the checkpoint's
    files, which may be gone.
    """
    config = copy.copy(vllm_config)
    if config.model_config.model_arch_config.quantization_config is not None:
        config.quant_config = VllmConfig.get_quantization_config(config.model_config, config.load_config)
        if (deep_gemm := getattr(vllm_config.quant_config, "use_deep_gemm", None)) is not None:
            config.quant_config.use_deep_gemm = deep_gemm  # vLLM decides it after it has read the rest
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    for name in ("static_all_moe_layers", "enabled_custom_ops", "disabled_custom_ops"):
        if (value := getattr(config.compilation_config, name, None)) is not None:
            setattr(config.compilation_config, name, type(value)())
    return config


class _IndicesOn(TorchFunctionMode):
    """A mode that makes tensors of computed integers on a real device.

    A model reads its map of experts to ranks while it is built and loaded. Weights are floating point or come from
    `torch.empty`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype: torch.dtype | None = kwargs.get("dtype")
        computed = func in (torch.full, torch.arange) and dtype is not None and not dtype.is_floating_point
        if computed and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **kwargs)


class _WeightsOnMeta(TorchFunctionMode):
    """A mode that puts allocated tensors on `meta`. Tensors computed from numbers stay real."""

    _ALLOCATE = (torch.empty, torch.empty_strided, torch.zeros, torch.ones)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if func in self._ALLOCATE else kwargs))


def build_on_meta(vllm_config: VllmConfig, model_config: Any, device: torch.device, prefix: str = "") -> nn.Module:
    """Build a never loaded copy of a model on the `meta` device, with its indices on `device`.

    `device` is the running model's. The constructor changes `vllm_config`, which must be a `fresh_config`.
    """
    with set_default_torch_dtype(model_config.dtype):
        try:
            with torch.device("meta"), _IndicesOn(device):
                model: nn.Module = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        except (NotImplementedError, RuntimeError):
            # Some constructors compute with values: the bounds of xIELU, the slopes of ALiBi.
            model = build_with_values(fresh_config(vllm_config), model_config, device, prefix)
            _move_parameters_to_meta(model)
    _unwrap_loaders(model)
    _drop_cache_scales(model)
    return model


def build_with_values(vllm_config: VllmConfig, model_config: Any, device: torch.device, prefix: str = "") -> nn.Module:
    """Build a never loaded copy of a model. Values that its constructor computes from numbers are on `device`.

    Tensors that are only allocated are on the `meta` device.
    """
    with set_default_torch_dtype(model_config.dtype), torch.device(device), _WeightsOnMeta():
        model: nn.Module = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        return model


def share_alike(live: nn.Module, pristine: nn.Module) -> None:
    """Share the model's modules with the drafter in `pristine` as vLLM does in `live`."""
    first: dict[nn.Module, str] = {}
    for name, module in live.named_modules(remove_duplicate=False):
        at = first.setdefault(module, name)
        path, _, key = name.rpartition(".")
        if at.partition(".")[0] != DRAFTER == path.partition(".")[0]:
            pristine.get_submodule(path)._modules[key] = pristine.get_submodule(at)


def tie_alike(live: nn.Module, pristine: nn.Module) -> None:
    """Give modules of `pristine` one common parameter if the modules of `live` have one.

    vLLM builds a separate output layer if the checkpoint has one. It ties the layer again after loading if it equals
    the embedding.
    """
    twins = dict(pristine.named_modules(remove_duplicate=False))
    first: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in live.named_modules(remove_duplicate=False):
        twin = twins.get(name)
        for key, param in module._parameters.items() if twin is not None else ():
            own = twin._parameters.get(key)  # type: ignore[union-attr]
            if param is not None and own is not None:
                tied = first.setdefault(param, own)
                if tied is not own and tied.shape == own.shape:
                    twin._parameters[key] = tied  # type: ignore[union-attr]


def _move_parameters_to_meta(model: nn.Module) -> None:
    """Replace computed parameters by parameters on `meta`. `Module.to` would lose their loaders."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and not param.is_meta:
                module._parameters[key] = moved.setdefault(param, materialise(param, torch.device("meta")))


def _unwrap_loaders(model: nn.Module) -> None:
    """Replace deferring loaders by the loaders that they wrap.

    Layers that are quantised at loading have deferring loaders. These make the layer once all its tensors are there.
    """
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        loader: Any = getattr(tensor, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = tensor.weight_loader = loader.__wrapped__


def _drop_cache_scales(model: nn.Module) -> None:
    """Remove the placeholders for the KV cache's scales.

    A checkpoint may have the scales, and a started engine has no placeholders. The engine's own scales belong to the
    cache, not to the weights, and stay.
    """
    for module in compat.attention_with_loaded_scales(model):
        for name in list(module._parameters):
            if name.endswith(("_scale", "_zero_point")):
                del module._parameters[name]


@contextmanager
def complete(model: nn.Module) -> Iterator[list[str]]:
    """Put back the modules left out by vLLM, until the context ends. Yields the paths of all towers.

    vLLM leaves out a tower if no prompt may have its modality.
    """
    missing = [
        (module, f"{path}.{key}".removeprefix("."), key, child)
        for path, module in model.named_modules()
        for key, child in module._modules.items()
        if type(child).__name__ == "StageMissingLayer" and vars(child).get("module") is not None
    ]
    try:
        for module, _, key, child in missing:
            module._modules[key] = vars(child)["module"]
        yield list({*getattr(model, "_tower_model_names", ()), *(path for _, path, _, _ in missing)})
    finally:
        for module, _, key, child in missing:
            module._modules[key] = child
