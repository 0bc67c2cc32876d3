"""One worker's search for the modules of a running vLLM that an adapter is bound to.

vLLM takes an adapter's tensor if it knows the last part of its module's name. It binds the tensor to the engine's
module with the same whole name, after the model's own renaming. Without such a module it drops the tensor silently.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict
from safetensors import safe_open
from vllm.lora.utils import parse_fine_tuned_lora_name

from weightsync.errors import UnsupportedError
from weightsync.net.wire import ADAPTER_MODULES, NEWEST, NOT_LOADED, BoundModules
from weightsync.vllm import compat
from weightsync.vllm.kv_connectors import check_adapters

_FILE = "adapter_model.safetensors"


class _AdapterTarget(NamedTuple):
    """The target of an adapter's module: the engine's module, and the part of it if several have been packed."""

    module: str
    part: int
    parts: int


def offer(worker: Any) -> None:
    """Give this worker the method for `collective_rpc`. The worker extension has it already."""
    setattr(worker, ADAPTER_MODULES, partial(adapter_modules, worker))


def adapter_modules(worker: Any, path: str, number: int) -> dict[str, Any]:
    """Return this worker's bindings of the adapter at `path`, a `BoundModules` as plain values.

    Never raises: vLLM would leave the other workers' answers in their queues, and give them to later calls.

    Args:
        worker: vLLM's worker.
        path: The adapter's folder.
        number: The number of the loaded adapter, NEWEST or NOT_LOADED. A loaded adapter is searched too. If vLLM has
            dropped it to make room for another, only its names are searched.
    """
    try:
        return asdict(_bound_modules(worker, path, number))
    except UnsupportedError as error:
        return asdict(BoundModules(error=error.message))
    except Exception as error:
        return asdict(BoundModules(error=f"{type(error).__name__}: {error}"))


def _bound_modules(worker: Any, path: str, number: int) -> BoundModules:
    if (of_worker := getattr(worker.model_runner, "lora_manager", None)) is None:
        return BoundModules(error="it takes no adapters; start it with enable_lora=True, a server with --enable-lora")
    check_adapters(worker.vllm_config)
    manager = of_worker._adapter_manager
    targets = _targets(manager)
    loaded = _loaded(manager, number)
    names = _names(manager.model, Path(os.path.expanduser(path)) / _FILE)
    for module, layer in manager.modules.items():
        is_stacked = type(layer).__name__ == "FusedMoEWithLoRA" and module in names.values()
        if is_stacked and not getattr(manager.lora_config, "enable_mixed_moe_lora_format", False):
            return BoundModules(
                error=f"it takes adapters on {module} for each expert alone, and PEFT's are for all experts. Start it "
                "with enable_mixed_moe_lora_format=True, a server with --enable-mixed-moe-lora-format"
            )
    unbound: list[str] = []
    owners: dict[str, list[str]] = {}
    for name, known_as in names.items():
        target = targets.get(known_as) if known_as is not None else None
        if known_as is None or target is None or (loaded is not None and not _has(loaded, target)):
            unbound.append(name)
        else:
            owners.setdefault(known_as, []).append(name)
    twice = [name for those in owners.values() if len(those) > 1 for name in those]
    return BoundModules(unbound, twice, _likeliest(targets, unbound) if unbound or twice else [])


def _names(model: Any, file: Path) -> dict[str, str | None]:
    """Return vLLM's name for each of an adapter's modules. None: the model's rules leave the module out."""
    mapper = compat.adapter_renaming(model)
    skipped = getattr(model, "lora_skip_prefixes", None) or ()
    with safe_open(file, framework="pt") as tensors:
        found: dict[str, str | None] = {}
        for tensor in tensors.keys():  # noqa: SIM118, for it is no mapping
            own = parse_fine_tuned_lora_name(tensor)[0]
            is_left_out = any(f".{prefix}" in tensor or tensor.startswith(prefix) for prefix in skipped)
            found[own] = None if is_left_out else parse_fine_tuned_lora_name(tensor, mapper)[0]
    return found


def _targets(manager: Any) -> dict[str, _AdapterTarget]:
    """Return the target of each name by which vLLM finds one of the engine's modules."""
    targets: dict[str, _AdapterTarget] = {}
    for module, layer in manager.modules.items():
        parts = list(manager.packed_modules.get(module, [module]))
        if type(layer).__name__.startswith("FusedMoE"):
            # A worker may have only some of the experts, and stacks them. A fused adapter has two tensors for all
            # experts.
            named = {name: _AdapterTarget(module, 0, 0) for name in (*parts, module, f"{module}.base_layer")}
        else:
            named = {name: _AdapterTarget(module, part, len(parts)) for part, name in enumerate(parts)}
        targets |= named
        if getattr(manager, "is_pooling_model", False):
            targets |= {
                name.removeprefix("model."): target for name, target in named.items() if name not in manager.modules
            }
    return targets


def _loaded(manager: Any, number: int) -> Mapping[str, Any] | None:
    """Return the factors of a loaded adapter, by the engine's module. None: vLLM has no such adapter."""
    if number == NOT_LOADED:
        return None
    known = manager.list_adapters()
    number = max(known, default=0) if number == NEWEST else number
    loras: Mapping[str, Any] | None = known[number].loras if number in known else None
    return loras


def _has(loaded: Mapping[str, Any], target: _AdapterTarget) -> bool:
    factors = loaded.get(target.module, loaded.get(target.module.removeprefix("model.")))
    if factors is None:
        return False
    is_packed = isinstance(factors.lora_a, list) and len(factors.lora_a) == target.parts
    return not is_packed or factors.lora_a[target.part] is not None


def _likeliest(targets: Mapping[str, _AdapterTarget], unbound: list[str]) -> list[str]:
    """Return the names with targets, first the names with the last part of an unbound name."""
    ends = {name.rpartition(".")[2] for name in unbound}
    return sorted(targets, key=lambda name: name.rpartition(".")[2] not in ends)
