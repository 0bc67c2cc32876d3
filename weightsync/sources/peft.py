"""Models that PEFT has wrapped: the base model under its own names, and its weights with the adapters added.

The weights equal those of `merge_and_unload` on a copy, to the bit, because PEFT's own code computes them. It runs on a
copy of one layer at a time with whole factors, since a product of fewer rows can round differently. The trainer's base
weights and adapters are only read, so there is nothing to unmerge, and nothing drifts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn

from weightsync.errors import UnsupportedError
from weightsync.planning.layout import Box
from weightsync.sources.edits import Whole, region

Shape: TypeAlias = "tuple[int, ...]"
ShapeOf: TypeAlias = "Callable[[torch.Tensor], Shape]"
"""A function that returns a tensor's full shape, or raises if the backend cannot read the tensor."""


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of PEFT's, without adapters, or None for any other module."""
    if "peft" not in sys.modules:  # not imported: no wrappers
        return None
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    inner: Any = None
    if isinstance(module, (PeftModel, PeftMixedModel)):
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


def adapters_around(shells: Sequence[nn.Module]) -> list[Adapter]:
    """Return PEFT's changes to the tensors of a module, the outermost first.

    shells: the module behind its wrappers, the outermost first.

    Raises `UnsupportedError` for a model with adapters that change no weight, such as prompts.
    """
    if "peft" not in sys.modules:
        return []
    from peft import PeftModel
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.tuners.xlora import XLoraModel
    from peft.utils.other import TrainableTokensWrapper

    found: list[Adapter] = []
    for shell in shells:
        if isinstance(shell, PeftModel) and not isinstance(shell.base_model, BaseTuner):
            kind = shell.active_peft_config.peft_type.value
            raise UnsupportedError(f"the model has a {kind} adapter of PEFT's, which no merge turns into weights")
        if isinstance(shell, XLoraModel):
            raise UnsupportedError("the model has PEFT's X-LoRA, whose classifier no merge turns into weights")
        configs = shell.peft_config.values() if isinstance(shell, PeftModel) else ()
        if any(getattr(config, "layer_replication", None) for config in configs):
            raise UnsupportedError(
                "PEFT's layer_replication gives several layers one weight and adapters of their own. A merge would add "
                "all of these to it: train without layer_replication"
            )
        layer: Any = shell.token_adapter if isinstance(shell, TrainableTokensWrapper) else shell
        if isinstance(layer, TrainableTokensLayer):
            found.append(TokenRows(layer, "weight"))
        elif isinstance(layer, BaseTunerLayer):
            found += _changes(layer)
    return found


def _changes(layer: Any) -> list[Adapter]:
    """Return the changes of one of PEFT's layers."""
    if _adds_products(layer):
        return [AddedProducts(layer, getattr(layer, "parameter_name", "weight"))]
    # Any of the module's own tensors may change: IA3 multiplies biases too.
    names = [name for name, param in layer.get_base_layer()._parameters.items() if param is not None]
    # Without any, "weight" is refused later: the adapter must not be left out silently.
    return [Adapter(layer, name) for name in names or ["weight"]]


def _adds_products(layer: Any) -> bool:
    """Return whether a merge adds a product of two factors for each adapter, and changes nothing else."""
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper, _ConvNd

    # PEFT imports its layers for bitsandbytes if it is installed.
    four_bits: Any = getattr(sys.modules.get("peft.tuners.lora.bnb"), "Linear4bit", None)
    kinds = [Linear, Embedding, _ConvNd, ParamWrapper, *filter(None, [four_bits])]
    own = [
        kind
        for kind in kinds
        if isinstance(layer, kind)
        and type(layer).merge is kind.merge
        and type(layer).get_delta_weight is kind.get_delta_weight
    ]
    if isinstance(layer, _ConvNd) and layer.get_base_layer().groups > 1:  # type: ignore[operator]
        return False
    return bool(own) and not any([*layer.lora_variant.values(), *layer.lora_bias.values()])


class Adapter:
    """A change of PEFT's to one tensor of a module, made by PEFT's own merge. An `Edit`.

    The merge runs on a copy of the layer with whole tensors.

    layer: PEFT's layer around the module.
    tail: the tensor's name in the module.
    shape: the tensor's full shape, from `check` on.
    """

    needs_whole = True

    def __init__(self, layer: Any, tail: str) -> None:
        self.layer = layer
        self.tail = tail
        self.shape: Shape = ()

    @property
    def kind(self) -> str:
        """The layer's class, and of LoRA the variants."""
        variants = {type(each).__name__: None for each in getattr(self.layer, "lora_variant", {}).values()}
        return " of a ".join([*variants, f"{type(self.layer).__module__}.{type(self.layer).__qualname__}"])

    @property
    def param(self) -> torch.Tensor:
        param: torch.Tensor = getattr(self.layer.get_base_layer(), self.tail)
        return param

    def names(self) -> list[str]:
        """Return the adapters to merge, in order: none if they are disabled, or merged into the base.

        Raises `UnsupportedError` if only some are merged.
        """
        layer = self.layer
        known = {name for each in layer.adapter_layer_names for name in getattr(layer, each, ())}
        active = [name for name in layer.active_adapters if name in known]
        if layer.merged:
            if layer.disable_adapters or not set(active) <= set(layer.merged_adapters):
                raise UnsupportedError(
                    f"the adapters {layer.merged_adapters} are merged into it, and {active} are active; call "
                    "`unmerge_adapter()`"
                )
            return []
        return [] if layer.disable_adapters else active

    def check(self, shape: Shape, dtype: torch.dtype, shape_of: ShapeOf, known: set[Hashable]) -> None:
        """Raise `UnsupportedError` if PEFT cannot merge the active adapters into a tensor of `shape`.

        The merge runs on tensors without storage. `known` gets a value for all layers of this form.
        """
        self.shape = shape
        try:
            shapes = {each: shape_of(each) for each in self.inputs() if each is not self.param}
        except UnsupportedError as error:
            names = ", ".join(map(repr, self.names()))
            raise UnsupportedError(f"of a factor of its adapter {names}: {error.message}") from None
        form = type(self.layer), self.kind, self.tail, shape, dtype, *shapes.values()
        if form in known:
            return
        whole = {each: torch.empty(size, dtype=each.dtype, device="meta") for each, size in shapes.items()}
        try:
            if type(self) is Adapter and self.layer.get_base_layer()._modules:
                raise TypeError("it may change the modules inside of the module too")
            found = self.apply(torch.empty(shape, dtype=dtype, device="meta"), Box.full(shape), whole)
            problem = "" if found.shape == shape else f"the result has shape {tuple(found.shape)}"
        except Exception as error:  # whatever PEFT raises for a layer without a merge
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise UnsupportedError(
                f"PEFT cannot merge its {self.kind} with factors of shapes {[*shapes.values()]} into shape {shape} "
                f"({problem}). Expected whole factors, or factors sharded by `fully_shard` or ZeRO-3. FSDP1 is not "
                "covered"
            )
        known.add(form)

    def inputs(self) -> list[torch.Tensor]:
        return [param for module in self.layer.modules() for param in module._parameters.values() if param is not None]

    @torch.no_grad()
    def apply(self, values: torch.Tensor, box: Box, whole: Whole) -> torch.Tensor:
        from peft.tuners.lora.layer import Linear

        # The merge writes into its copy, and a whole tensor may be the trainer's own memory.
        own = {each: whole[each].clone() for each in self.inputs() if each is not self.param}
        twin = _twin(self.layer, {**own, self.param: values.clone()})
        modules = [base.__module__ for base in type(self.layer).__mro__]
        # The merge of a quantised layer would quantise the result again.
        merge = Linear.merge if "peft.tuners.lora.bnb" in modules else type(self.layer).merge
        merge(twin, safe_merge=False, adapter_names=self.names())
        merged: torch.Tensor = getattr(twin.get_base_layer(), self.tail).data
        return merged

    def settings(self) -> str:
        """Return the active adapters, each with its scaling."""
        factors = getattr(self.layer, "scaling", {})
        return " + ".join(f"{factors[name]!r} * {name}" if name in factors else name for name in self.names())


class AddedProducts(Adapter):
    """LoRA: the product of two factors is added for each adapter. A region of the sum needs no other region."""

    needs_whole = False

    def inputs(self) -> list[torch.Tensor]:
        return [factor for name in self.names() for factor in self._factors(name)]

    @torch.no_grad()
    def apply(self, values: torch.Tensor, box: Box, whole: Whole) -> torch.Tensor:
        """Return a copy of the region `box` of the base, plus the same region of each product.

        The sum rounds as PEFT's. Uses memory for the whole product, in the factors' dtype.
        """
        from peft.tuners.lora.layer import Embedding

        merged = values.clone()
        for name in self.names():
            # Factors may be on a GPU when the values are offloaded to the CPU.
            delta = self._product(name, values, whole)[region(box)].to(merged.device)
            # PEFT lets a linear layer's sum be rounded once, and rounds an embedding's product first.
            merged += delta.to(merged.dtype) if isinstance(self.layer, Embedding) else delta
        return merged

    def _product(self, name: str, values: torch.Tensor, whole: Whole) -> torch.Tensor:
        """Compute PEFT's addition to the whole tensor. PEFT's own code runs on a stand-in for the layer."""
        a, b = (whole[factor] for factor in self._factors(name))
        # PEFT reads shape, dtype and device of the base. A sharded one has another shape.
        base = torch.empty((), dtype=values.dtype, device=values.device).expand(self.shape)
        modules = {
            "base_layer": SimpleNamespace(**{self.tail: base}, groups=1),
            "lora_A": {name: SimpleNamespace(weight=a)},
            "lora_B": {name: SimpleNamespace(weight=b)},
            "lora_embedding_A": {name: a},
            "lora_embedding_B": {name: b},
        }
        stand_in: Any = object.__new__(type(self.layer))
        vars(stand_in).update({**vars(self.layer), "_modules": modules})
        product: torch.Tensor = stand_in.get_delta_weight(name)
        return product

    @property
    def is_plain(self) -> bool:
        """Whether the layer is linear, an embedding, or one tensor of fused experts."""
        from peft.tuners.lora.layer import ParamWrapper, _ConvNd

        layer = self.layer
        if not isinstance(layer, ParamWrapper):
            return not isinstance(layer, _ConvNd)
        base = layer.get_base_layer()
        if not self.is_experts:
            return self.tail == "weight" and not isinstance(base, nn.Embedding) and not hasattr(base, "nx")  # Conv1D
        # An older PEFT, which swaps nothing, takes a tensor's rows for its columns.
        return getattr(layer, "_did_swap_in_out_features", False) != getattr(base, "is_transposed", False)

    @property
    def is_experts(self) -> bool:
        """Whether the tensor holds the weights of several experts."""
        return getattr(self.layer, "num_experts", 1) > 1

    def factors(self, name: str) -> dict[str, nn.Module]:
        """Return the modules that hold the factors of adapter `name`, by their names in PEFT's files."""
        layer = self.layer
        if name in layer.lora_A:
            return {"lora_A": layer.lora_A[name], "lora_B": layer.lora_B[name]}
        return {"lora_embedding_A": layer.lora_embedding_A, "lora_embedding_B": layer.lora_embedding_B}

    def _factors(self, name: str) -> list[torch.Tensor]:
        """Return this rank's A and B of an adapter."""
        found: list[Any] = [*self.factors(name).values()]
        return [each[name] if isinstance(each, nn.ParameterDict) else each.weight for each in found]


class TokenRows(Adapter):
    """Trainable tokens: rows of the weight are replaced for each adapter."""

    needs_whole = False

    def check(self, shape: Shape, dtype: torch.dtype, shape_of: ShapeOf, known: set[Hashable]) -> None:
        for name in self.names():
            rows, last = shape_of(self.layer.trainable_tokens_delta[name]), max(self.layer.token_indices[name])
            if rows != (len(self.layer.token_indices[name]), *shape[1:]) or last >= shape[0]:
                raise UnsupportedError(f"its adapter {name!r} has rows of shape {rows} up to {last}, of a {shape}")

    def inputs(self) -> list[torch.Tensor]:
        return [self.layer.trainable_tokens_delta[name] for name in self.names()]

    @torch.no_grad()
    def apply(self, values: torch.Tensor, box: Box, whole: Whole) -> torch.Tensor:
        merged = values.clone()
        for name in self.names():
            rows = whole[self.layer.trainable_tokens_delta[name]][:, region(box)[1]].to(merged)
            at = torch.tensor(self.layer.token_indices[name], device=merged.device) - box.start[0]
            here = (at >= 0) & (at < box.size[0])
            merged[at[here]] = rows[here]
        return merged


def _twin(module: nn.Module, whole: Mapping[torch.Tensor, torch.Tensor]) -> Any:
    """Return a copy of a module with other tensors in place of its own. All else is shared but lists and dicts."""
    twin: Any = object.__new__(type(module))  # a class that `fully_shard` has made has a `__new__` of its own
    own = {key: copy(value) if isinstance(value, (list, dict)) else value for key, value in vars(module).items()}
    vars(twin).update(own)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child, whole)
    for name, param in module._parameters.items():
        if param is not None and param in whole:
            twin._parameters[name] = nn.Parameter(whole[param], requires_grad=False)
    return twin
