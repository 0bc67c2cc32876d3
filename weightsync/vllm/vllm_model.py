"""One vLLM worker's model, for the receiver."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank, get_tp_group
from vllm.utils.torch_utils import set_default_torch_dtype

from weightsync.errors import UnsupportedError, first_few
from weightsync.kernels.rows import AllReduceMax
from weightsync.vllm import compat, supported_quant
from weightsync.vllm.constants import NotedConstants, Place, is_small, unregistered
from weightsync.vllm.dummy_start import lost_values
from weightsync.vllm.handed_over import HandedOver
from weightsync.vllm.kv_cache import begin_search, last_layers
from weightsync.vllm.kv_connectors import check_resets, shared_role
from weightsync.vllm.pristine import build_on_meta, build_with_values, complete, fresh_config, share_alike, tie_alike
from weightsync.worker.engine_model import DRAFTER, WorkerIdentity
from weightsync.worker.verify import digests_of

logger = logging.getLogger(__name__)


class VllmModel:
    """The `weightsync.worker.engine_model.EngineModel` of a vLLM worker.

    `pristine` raises `UnsupportedError` for engines that a push cannot keep correct:

    - with adapters on experts, CPU offload, or expert load balancing
    - with sinks of no known parameter, or a KV connector without a reset
    - with a quantisation missing from the table of `supported_quant.py`
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, model: nn.Module, drafter: nn.Module | None
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.dtype = vllm_config.model_config.dtype
        self.sharing = get_tp_group().world_size
        self.all_reduce_max: AllReduceMax | None = _largest_of_all if self.sharing > 1 else None
        self.may_discard = compat.can_sleep(vllm_config)
        self._config = vllm_config
        self._model = model
        self._models = [model] if drafter is None else [model, drafter]
        self._drafts_apart = not compat.shares_checkpoint(vllm_config)
        self._drafter = drafter if not self._drafts_apart or compat.has_plain_head(vllm_config) else None
        own = {id(param) for param in model.parameters()}
        stays = drafter.named_parameters() if drafter is not None and self._drafter is None else ()
        self.unreachable_params: Sequence[str] = [f"{DRAFTER}.{name}" for name, param in stays if id(param) not in own]
        self._pristine: nn.Module | None = None
        self._attention: list[nn.Module] | None = None
        self._sinks: list[tuple[Any, nn.Parameter]] = []
        self._has_random_weights = compat.load_format(vllm_config) == "dummy"
        self._lost: list[tuple[torch.Tensor, torch.Tensor]] = []  # (live buffer, its value) for the next `restore_lost`
        self._lost_scales: list[nn.Module] = []
        self._at_start: dict[str, int] = {}  # digests of the parameters as the engine has loaded them
        self._constants: NotedConstants | None = None  # of an engine that can sleep
        self._constructed: dict[Place, torch.Size] = {}
        self._last_layers: list[str] | None = None
        self._pooled: Mapping[str, Any] = {}
        self._handed_over = HandedOver()
        parallel = vllm_config.parallel_config
        core = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        self.identity = WorkerIdentity(
            rank=get_pp_group().rank_in_group * get_tp_group().world_size + get_tensor_model_parallel_rank(),
            world=get_pp_group().world_size * get_tp_group().world_size,
            name=f"tp={get_tensor_model_parallel_rank()} pp={get_pp_group().rank_in_group} dp={core}",
            core=None if getattr(parallel, "data_parallel_external_lb", False) else core,
            kv_role=shared_role(vllm_config.kv_transfer_config),
            cores=parallel.data_parallel_size,
        )
        if not self.identity.rank and not compat.has_run():
            logger.warning(
                "weightsync never ran with vLLM %s. It ran with %s to %s: docs/evidence/versions.md",
                vllm.__version__,
                *(".".join(map(str, release)) for release in compat.HAVE_RUN),
            )

    @cached_property
    def live(self) -> nn.Module:
        """Return the running model and its drafter, without vLLM's wrapping layers for adapters."""
        model = self._model
        if self._drafter is not None:
            children = {**model._modules, DRAFTER: self._drafter}
            model = nn.Module()
            vars(model).update(_parameters=self._model._parameters, _buffers=self._model._buffers, _modules=children)
        return model if self._config.lora_config is None else compat.without_lora(model)

    def _check(self) -> None:
        config = self._config
        refused = {
            "expert load balancing moves experts between slots, and vLLM's loader fills the first slots; start "
            "the engine without enable_eplb": getattr(config.parallel_config, "enable_eplb", False),
            "offloaded weights cannot be pushed to; start the engine without cpu_offload_gb and "
            'offload_group_size. N-gram embeddings stay on the GPU with engram_config={"cpu_offload": False}': (
                compat.offloads_weights(config)
            ),
            "vLLM's first forward computes the scales of its 8-bit KV cache from the weights. No later forward "
            "does: start the engine without calculate_kv_scales": compat.computes_cache_scales(config),
            'with load_format="ipc_cache" the parameters are another process\'s memory, and later engines would '
            "start from pushed weights: start the engine with another load_format": (
                compat.loads_from_another_process(config)
            ),
            "vLLM before 0.22 drops a token of each request that a push interrupts: start the engine with "
            "async_scheduling=False, or take a newer vLLM": compat.drops_a_token(config),
            "the drafter has a quantised copy of the output layer, and a push would write unquantised values into it: "
            "start the engine without draft_lm_head_quantization": (
                self._drafter is not None and getattr(config.speculative_config, "draft_lm_head_quantization", None)
            ),
        }
        if reasons := [reason for reason, is_so in refused.items() if is_so]:
            raise UnsupportedError(reasons[0])
        check_resets(config)
        self._handed_over.watch(config.kv_transfer_config)
        supported_quant.check(self.live, config.quant_config, self.device)
        for model in filter(None, (self._model, self._drafter)):
            compat.refuse_made_once(model)

    def pristine(self) -> nn.Module:
        if self._pristine is None:
            self._check()
            self._sinks = compat.sinks_of(self.live)
            pristine = self._build(build_on_meta)
            made = unregistered(pristine)
            if self.may_discard and self._constants is None:
                _refuse_unnoted(made)
            self._pristine, self._constructed = pristine, {place: tensor.shape for place, tensor in made.items()}
            share_alike(self.live, self._pristine)
            tie_alike(self.live, self._pristine)
        return self._pristine

    def _build(self, build: Callable[..., nn.Module]) -> nn.Module:
        """Build the model and its drafter anew, by a function of `pristine.py`."""
        config = fresh_config(self._config)  # one for both, as vLLM's: a drafter's layers may have the model's renaming
        model = build(config, config.model_config, self.device)
        if self._drafter is not None:
            speculative = config.speculative_config
            prefix = "draft_model" if speculative.method == "draft_model" else ""
            config = compat.drafter_config(config)
            model.add_module(DRAFTER, build(config, speculative.draft_model_config, self.device, prefix))
        return model

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loader: Any = model.load_weights
        if self._drafter is not None and self._drafts_apart:
            prefix, drafters = f"{DRAFTER}.", model is not self._pristine
            weights = ((name.removeprefix(prefix), w) for name, w in weights if name.startswith(prefix) == drafters)
        with set_default_torch_dtype(self.dtype):  # as at a start: the loader may make parameters
            return loader(weights)

    def passes_over(self, name: str) -> bool:
        return compat.drops(self.pristine(), name) or compat.is_of_a_later_layer(self._config, name)

    def parts(self, module: nn.Module) -> list[Any]:
        method = compat.quant_method(module)
        return [module] if method is None else [module, method, *compat.kernel_objects(module)]

    def with_missing_towers(self, model: nn.Module) -> AbstractContextManager[list[str]]:
        return complete(model)

    def post_process(self, module: nn.Module) -> None:
        method = compat.quant_method(module)
        if method is not None:
            method.process_weights_after_loading(module)
            if (update := getattr(module, "update_param_tp_status", None)) is not None:
                update()  # post-processing may have replaced a parameter, and the new one knows only the global rank

    def find_lost(self, filled: Collection[str], kept: Sequence[str]) -> None:
        if not self._has_random_weights:
            return
        if kept:
            raise UnsupportedError(
                f"TensorSelection.keep leaves {kept[0]} to the engine's checkpoint, and the start with "
                'load_format="dummy" made it up. Start the engine from the checkpoint'
            )
        if any(map(compat.has_8_bit_cache, compat.attention_with_loaded_scales(self.live))):
            raise UnsupportedError(
                'load_format="dummy" makes up the scales of the engine\'s 8-bit KV cache: start the engine from the '
                "checkpoint"
            )
        self._lost_scales = compat.attention_with_scales(self.live)
        self._lost = lost_values(self.live, filled, partial(self._build, build_with_values))

    def note_start(self, worker: Any) -> None:
        """Note a worker's pooling requests and, before its first sleep, the values that sleep may discard."""
        self._pooled = compat.pooling_requests(worker)
        if self.may_discard and compat.has_never_slept(worker):
            self._at_start = digests_of(self._parameters())
            self._constants = NotedConstants(self._models, ["", DRAFTER])

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the model and of its drafter, also of a drafter out of reach."""
        apart = self._models[1:] if self._drafter is None else ()
        drafters = {f"{DRAFTER}.{name}": param for drafter in apart for name, param in drafter.named_parameters()}
        return {**dict(self.live.named_parameters()), **drafters}

    def check_kept(self, kept: Sequence[str]) -> None:
        if not kept or not self.may_discard:
            return
        live = self._parameters()
        now = digests_of({name: live[name] for name in kept if name in live})
        if not now:
            raise UnsupportedError(
                f"this push leaves {first_few(kept)} as the engine has loaded them. No such parameter can be watched, "
                "and sleep(level=2) may discard it. Start the engine without enable_sleep_mode"
            )
        if lost := [name for name in kept if now.get(name) != self._at_start.get(name)]:
            why = "sleep(level=2) has discarded them, or an earlier push has filled them. Restart the engine, or call "
            why += 'collective_rpc("reload_weights") on it'
            if not self._at_start:
                why = "sleep(level=2) may have discarded them: the engine slept before weightsync noted them. Restart "
                why += 'the engine with weight_transfer_config={"backend": "weightsync"}'
            raise UnsupportedError(f"this push leaves {first_few(lost)} as the engine has loaded them, and {why}")

    def restore_lost(self) -> None:
        for module in self._lost_scales:
            compat.reset_cache_scales(module)
        for buffer, value in self._lost:
            buffer.copy_(value)
        self._lost_scales, self._lost = [], []
        if self._constants is not None:
            self._constants.restore(self._constructed)

    def is_asleep(self) -> bool:
        return self.device.type == "cuda" and compat.weights_asleep()

    def guard_forward(self, check: Callable[[], None]) -> None:
        def before(*_: Any) -> None:
            check()
            self._handed_over.forget_expired()
            compat.drop_earlier_rows(self._pooled)

        for module in compat.answering(self._model):
            module.register_forward_pre_hook(before)

    def refresh_derived_state(self) -> bool:
        if self._attention is None:
            self._attention = compat.post_processed_attention(self.live)
        for module in self._attention:
            if compat.has_released(module):
                continue
            before = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
            with set_default_torch_dtype(self.dtype):  # as at a start: the hook may make parameters
                compat.call_attention_hook(module, self.dtype)
            for key, old in before.items():
                new = vars(module).get(key)
                if new is not old and isinstance(new, torch.Tensor):
                    old.copy_(new)  # CUDA graphs hold the old address
                    setattr(module, key, old)
        copied = [(kernel.sinks, p) for kernel, p in self._sinks if kernel.sinks.data_ptr() != p.data_ptr()]
        with torch.inference_mode():  # a forward has made the sinks in this mode
            for sinks, param in copied:
                sinks.copy_(param)
        return bool(self._attention or copied)

    def check_requests(self) -> None:
        self._handed_over.check()

    def search_kv_cache(self) -> Callable[[], bool]:
        if self.device.type == "cuda" and compat.kv_cache_asleep():
            return lambda: False  # sleep has discarded the cache
        layers = self._config.compilation_config.static_forward_context
        if self._last_layers is None:  # walk over all modules only once
            self._last_layers = last_layers(layers, self._models)
        return begin_search(layers, self._last_layers)

    def end_process(self, reason: str) -> None:
        is_own = self._config.parallel_config.distributed_executor_backend != "external_launcher"
        logger.critical("%s%s", reason, "; this process ends, restart the engine" if is_own else "")
        if is_own:
            os._exit(1)  # the thread in the collective would hold up any other end of the process

    def scope(self) -> AbstractContextManager[Any]:
        return compat.vllm_scope(self._config, self.device)


def _refuse_unnoted(constants: Mapping[Place, torch.Tensor]) -> None:
    if lost := [f"{at}.{key}" for (at, key, _), tensor in constants.items() if is_small(tensor)]:
        raise UnsupportedError(
            f"sleep(level=2) may have discarded {first_few(lost)}, which no push fills: the engine slept before "
            "weightsync noted them. Start the engine without enable_sleep_mode, or from vLLM 0.25 on with "
            'weight_transfer_config={"backend": "weightsync"}'
        )


def _largest_of_all(numbers: torch.Tensor) -> None:
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group)
