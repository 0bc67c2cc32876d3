"""Models that PEFT has wrapped: the base model under its own names, and its weights with the LoRA adapters added.

The weights equal those of `merge_and_unload` on a copy, to the bit. PEFT's own code multiplies an adapter's whole
factors, because a product of fewer rows can round differently. Each shard gets its region of that product. The
trainer's base weights and adapters are only read, so there is nothing to unmerge, and nothing drifts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.planning.layout import Box

Shape: TypeAlias = "tuple[int, ...]"


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of PEFT's, without adapters, or None for any other module."""
    if "peft" not in sys.modules:  # not imported: no wrappers
        return None
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    inner: Any = None
    if isinstance(module, PeftModel):
        inner = module.base_model
    elif isinstance(module, BaseTuner):
        inner = module.model
    elif isinstance(module, BaseTunerLayer):
        inner = module.base_layer
    elif isinstance(module, ModulesToSaveWrapper) and module.active_adapters and not module.disable_adapters:
        inner = module.modules_to_save[module.active_adapters[0]]
    elif isinstance(module, AuxiliaryTrainingWrapper):
        inner = module.original_module
    return inner if isinstance(inner, nn.Module) else None


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter around the module that `module` wraps, or None if PEFT did not make `module`.

    Raises `UnsupportedError` for a model with adapters that change no weight, such as prompts.
    """
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if isinstance(module, PeftModel) and not isinstance(module.base_model, BaseTuner):
        kind = module.active_peft_config.peft_type.value
        raise UnsupportedError(f"the model has a {kind} adapter of PEFT's; only LoRA can be merged")
    if isinstance(module, BaseTunerLayer):
        return Adapter(module)
    if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
        return Adapter(module)
    return None


class Adapter:
    """One layer of the model that PEFT has wrapped: the active adapters' part of its weight."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def names(self) -> list[str]:
        """Return the adapters to add, in order: none if they are disabled, or merged into the base.

        Raises `UnsupportedError` for all but plain LoRA on a linear layer or an embedding.
        """
        from peft.tuners.lora.layer import Embedding, Linear

        layer = self._layer
        plain = [
            kind
            for kind in (Linear, Embedding)
            if isinstance(layer, kind)
            and type(layer).merge is kind.merge
            and type(layer).get_delta_weight is kind.get_delta_weight
        ]
        if not plain:
            kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
            raise UnsupportedError(f"it is in a {kind}; of PEFT, LoRA on linear layers and embeddings is covered")
        active = [name for name in layer.active_adapters if name in self._factors()]
        if layer.merged:
            if layer.disable_adapters or not set(active) <= set(layer.merged_adapters):
                raise UnsupportedError(
                    f"the adapters {layer.merged_adapters} are merged into it, and {active} are active; call "
                    "`unmerge_adapter()`"
                )
            return []
        if layer.disable_adapters:
            return []
        for name in active:
            if (variant := layer.lora_variant.get(name)) is not None:
                raise UnsupportedError(f"its adapter {name!r} is a {type(variant).__name__}, expected plain LoRA")
            if layer.lora_bias.get(name):
                raise UnsupportedError(f"its adapter {name!r} has a bias (`lora_bias=True`), expected none")
        return active

    def check(self, names: list[str], shape: tuple[int, ...], shape_of: Callable[[torch.Tensor], Shape]) -> None:
        """Raise `UnsupportedError` if these adapters cannot be added to a weight of `shape`.

        `shape_of` returns the full shape of a factor, or raises if the backend cannot read the factor.
        """
        for name in names:
            try:
                a, b = map(shape_of, self._factors()[name])
            except UnsupportedError as error:
                raise UnsupportedError(f"of a factor of its adapter {name!r}: {error.message}") from None
            if not len(a) == len(b) == 2 or {b[0], a[1]} != set(shape):
                raise UnsupportedError(
                    f"the factors of its adapter {name!r} have shapes {a} and {b} here, expected whole factors, or "
                    "factors sharded by `fully_shard` or ZeRO-3. FSDP1 is not covered"
                )

    def active_factors(self) -> list[torch.Tensor]:
        """Return this rank's factors of the adapters to add."""
        factors = self._factors()
        return [factor for name in self.names() for factor in factors[name]]

    @torch.no_grad()
    def add_to(self, values: torch.Tensor, box: Box, whole: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return a copy of `values`, the region `box` of the base weight, plus the same region of each active adapter.

        The sum rounds as PEFT's. `whole` maps each of `active_factors` to the whole factor. Uses memory for the whole
        product, in the factors' dtype.
        """
        from peft.tuners.lora.layer import Embedding

        merged = values.clone()
        region = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
        for name in self.names():
            a, b = (whole[factor] for factor in self._factors()[name])  # (rank, inputs), (outputs, rank)
            # Factors may be on a GPU when the values are offloaded to the CPU.
            delta = self._product(name, a, b)[region].to(merged.device)
            # PEFT lets a linear layer's sum be rounded once, and rounds an embedding's product first.
            merged += delta.to(merged.dtype) if isinstance(self._layer, Embedding) else delta
        return merged

    def factors(self, name: str) -> dict[str, nn.Module]:
        """Return the modules that hold the factors of adapter `name`, by their names in PEFT's files."""
        layer = self._layer
        if name in layer.lora_A:
            return {"lora_A": layer.lora_A[name], "lora_B": layer.lora_B[name]}
        return {"lora_embedding_A": layer.lora_embedding_A, "lora_embedding_B": layer.lora_embedding_B}

    def scaling(self, name: str) -> tuple[int, float]:
        """Return the rank of adapter `name`, and the multiplier of its factors' product."""
        return int(self._layer.r[name]), float(self._layer.scaling[name])

    def _product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Compute PEFT's addition to the whole weight from the whole factors. PEFT's own code runs on a stand-in."""
        linear = {"lora_A": {name: SimpleNamespace(weight=a)}, "lora_B": {name: SimpleNamespace(weight=b)}}
        embedding = {"lora_embedding_A": {name: a}, "lora_embedding_B": {name: b}}
        stand_in = SimpleNamespace(**{**vars(self._layer), **linear, **embedding})
        product: torch.Tensor = type(self._layer).get_delta_weight(stand_in, name)
        return product

    def _factors(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's A and B of each adapter, active or not."""
        layer = self._layer
        pairs = {name: (layer.lora_A[name].weight, layer.lora_B[name].weight) for name in layer.lora_A}
        return pairs | {
            name: (layer.lora_embedding_A[name], layer.lora_embedding_B[name]) for name in layer.lora_embedding_A
        }
