"""Models that PEFT has wrapped: what is pushed is what `merge_and_unload` of a copy gives, and nothing is changed."""

from __future__ import annotations

import copy
import functools
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import peft
import pytest
import tiny_models
import torch
import zero
from fake_engine import FakeEngine, ModuleHost
from peft.tuners.xlora import XLoraModel
from ranks import assert_in_step, no_barrier, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from weightsync import TensorSelection, UnsupportedError, WeightSync, WeightSyncError
from weightsync.planning.layout import Box, coverage
from weightsync.sources import open_source
from weightsync.sources.base import Barrier
from weightsync.sources.peft import AddedProducts
from weightsync.tools.testing import check_source

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "r": 3},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"], "lora_dropout": 0.1},
    "all of these": {
        "target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens"],
        "use_rslora": True,
        "modules_to_save": ["lm_head"],
    },
    "whole modules": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head", "model.norm"]},
}
DTYPES = [torch.bfloat16, torch.float32]


def wrapped(
    kind: str, dtype: torch.dtype = torch.bfloat16, *, autocast: bool = False, model: str = "qwen3", **more: Any
) -> Any:
    """A `PeftModel` of the weights "A" whose adapters do something."""
    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 16, "bias": "none", **KINDS[kind], **more})
    found = peft.get_peft_model(tiny_models.build(model, "A", dtype), config, autocast_adapter_dtype=autocast)
    fill_adapters(found, "A")
    return found


def fill_adapters(model: nn.Module, weights: str) -> None:
    """Other values for what trains, as an optimizer's step gives."""
    draw = torch.Generator().manual_seed(ord(weights))
    with torch.no_grad():
        for _, param in sorted(model.named_parameters()):
            if param.requires_grad:
                value = torch.randn(param.shape, generator=draw) * 0.1
                param.copy_(like(value, param))


def like(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def merged(model: Any) -> dict[str, torch.Tensor]:
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


def frozen_copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(param).clone() for name, param in model.named_parameters()}


def local(param: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter, wherever an optimizer writes it."""
    if hasattr(param, "ds_tensor"):
        return param.ds_tensor
    return param.detach().to_local() if isinstance(param, DTensor) else param.detach()


def pieces_of(model: nn.Module, backend: str = "fsdp", **selection: Any) -> list[tuple[str, Box, torch.Tensor, bool]]:
    """Name, region, values, and whether it trains; with nothing of the model changed."""
    before = frozen_copy(model)
    source = open_source(backend, TensorSelection(**selection))
    shards = source.read(model).shards
    source.gather(source.read(model).manifest.names, no_barrier)
    found = [(p.meta.name, p.box, p.compute() if p.compute else p.tensor, p.trains) for p in shards]
    assert all(p.compute is None or p.compute().data_ptr() != p.tensor.data_ptr() for p in shards)
    for name, param in model.named_parameters():
        now, then = (each.reshape(-1).view(torch.uint8) for each in (local(param), before[name]))  # some are NaN
        assert torch.equal(now, then), f"{name} was changed"
    return found


def check(model: nn.Module, expected: dict[str, torch.Tensor], backend: str = "fsdp") -> None:
    """What this rank holds is equal to the bit."""
    boxes: dict[str, list[Box]] = {}
    for name, box, values, _ in pieces_of(model, backend):
        region = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
        assert values.dtype == expected[name].dtype
        assert torch.equal(values, expected[name][region]), name
        boxes.setdefault(name, []).append(box)
    manifest = open_source(backend, TensorSelection()).read(model).manifest
    assert {*manifest.names, *(other for other, _ in manifest.tied)} == set(expected)
    assert all(torch.equal(expected[other], expected[name]) for other, name in manifest.tied)
    if not torch.distributed.is_initialized():
        assert all(not coverage(meta.shape, boxes[meta.name])[0] for meta in manifest)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_what_is_sent_is_what_a_merge_gives(backend: str, kind: str, dtype: torch.dtype, autocast: bool):
    model = wrapped(kind, dtype, autocast=autocast)
    check(model, merged(model), backend)
    fill_adapters(model, "B")
    check(model, merged(model), backend)


def test_the_sender_keeps_its_promises():
    model = wrapped("all of these")
    check_source(functools.partial(open_source, "fsdp"), model, merged(model))


def test_what_trains():
    """A weight with an adapter does, though it takes no gradient itself; its bias does not."""
    model = wrapped("whole modules", model="qwen2")
    trained = {name for name, _, _, trains in pieces_of(model) if trains}
    keys = {f"model.layers.{n}.self_attn.k_proj.weight" for n in (0, 1)}
    assert trained == keys | {"lm_head.weight", "model.norm.weight"}


def test_the_factors_of_one_bucket_are_held_at_a_time():
    model = wrapped("linear")
    source: Any = open_source("fsdp", TensorSelection())
    whole, given = source.whole, []

    def note(factors: list[torch.Tensor], barrier: Barrier) -> dict[torch.Tensor, torch.Tensor]:
        found = whole(factors, barrier)
        given.extend(map(weakref.ref, found.values()))
        return found

    source.whole = note
    for name in source.read(model).manifest.names:
        source.gather([name], no_barrier)
        assert sum(each() is not None for each in given) == 2 * any(
            module in name for module in KINDS["linear"]["target_modules"]
        )
    source.gather((), no_barrier)
    assert not any(each() is not None for each in given)


def test_several_adapters_are_added_in_their_order():
    model = wrapped("linear")
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    model.base_model.set_adapter(["other", "default"])
    fill_adapters(model, "B")
    check(model, merged(model))
    model.set_adapter("other")
    check(model, merged(model))


def test_what_the_trainer_would_compute_with_is_sent():
    """Merged adapters are in the base already; disabled ones count for nothing."""
    model = wrapped("whole modules")
    base = dict(tiny_models.build("qwen3", "A").state_dict())
    with model.disable_adapter():
        check(model, base)
    expected = merged(model)
    model.merge_adapter()
    check(model, expected)
    model.unmerge_adapter()


def lora_in(model: nn.Module) -> nn.Module:
    """A model of one's own, with adapters and without a `PeftModel` around it."""
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    fill_adapters(model, "A")
    return model


def test_a_sender_notices_that_adapters_are_unmerged():
    model = wrapped("whole modules")
    source = open_source("fsdp", TensorSelection())
    model.merge_adapter()
    assert not any(piece.compute for piece in source.read(model).shards)
    model.unmerge_adapter()  # only a flag tells
    assert any(piece.compute for piece in source.read(model).shards)


def test_adapters_without_a_peft_model():
    model = lora_in(tiny_models.build("qwen3", "A"))
    check(model, dict(peft.LoraModel.merge_and_unload(_Unloading(model)).state_dict()))


class _Unloading:
    """As much of a `LoraModel` as unloading asks for."""

    def __new__(cls, model: nn.Module) -> Any:
        copied = copy.deepcopy(model)
        tuner = peft.LoraModel.__new__(peft.LoraModel)
        nn.Module.__init__(tuner)
        tuner.model = copied
        tuner.peft_config = {}
        return tuner


def with_a_prompt() -> nn.Module:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(tiny_models.build("qwen3", "A"), config)


def half_merged() -> nn.Module:
    model = wrapped("linear")
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    model.merge_adapter(["default"])
    return model


def disabled_while_merged() -> nn.Module:
    model = wrapped("linear")
    model.merge_adapter()
    model.base_model.disable_adapter_layers()
    return model


def partitioned() -> nn.Module:
    """As FSDP1 leaves parameters behind on a rank that holds nothing of them: without elements."""
    model = wrapped("linear")
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = torch.empty(0, dtype=param.dtype)
    return model


def partitioned_and_persistent() -> nn.Module:
    """As ZeRO-3 leaves small parameters behind: gathered, out of partitions that are the truth."""
    model = wrapped("linear")
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.ds_tensor = param.data.view(-1)
    return model


def replicated() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[[0, 2], [0, 2]])
    return peft.get_peft_model(tiny_models.build("qwen3", "A"), config)


def gated() -> nn.Module:
    """X-LoRA's own model. It would load its experts from checkpoints."""
    model: Any = wrapped("linear")
    model.base_model.__class__ = type("Gated", (XLoraModel,), {})
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "prompt": (with_a_prompt, "PROMPT_TUNING adapter of PEFT's, which no merge"),
    "replicated layers": (replicated, "train without layer_replication"),
    "X-LoRA": (gated, "X-LoRA, whose classifier"),
    "half merged": (half_merged, r"call `unmerge_adapter\(\)`"),
    "disabled while merged": (disabled_while_merged, r"call `unmerge_adapter\(\)`"),
    "partitioned": (partitioned, "FSDP1 is not covered"),
    "of ZeRO-3": (partitioned_and_persistent, 'push with backend="deepspeed"'),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged_is_refused(kind: str):
    make, words = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=words):
        open_source("fsdp", TensorSelection()).read(make())


# ---------------------------------------------------------------------------------------------------------------
# Several ranks


def shard(model: Any, **options: Any) -> Any:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def fsdp2(rank: int) -> None:
    for kind in KINDS:
        model = wrapped(kind)
        expected = merged(model)
        check(shard(model), expected)
    # Adapters that are modules of their own to FSDP, and rows that do not divide.
    model = wrapped("embedding", torch.float32)
    expected = merged(model)
    for module in reversed(list(model.modules())):
        if type(module) is nn.Linear or isinstance(module, peft.tuners.lora.Linear):
            fully_shard(module)
    check(shard(model), expected)

    for use_dora in (False, True):
        model = wrapped("linear", use_dora=use_dora)
        flat = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True
        )
        with pytest.raises(UnsupportedError, match=r"FSDP1 has flattened it.*for adapters use `fully_shard`"):
            open_source("fsdp", TensorSelection()).read(flat)


def test_shards_are_merged_as_the_whole_is():
    run_ranks(fsdp2, 2)


def fail_between_gathers(rank: int, backend: str, failing: int) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(Head(), peft.LoraConfig(target_modules=["a", "b"], r=2))
    fill_adapters(model, "A")
    expected = merged(model)
    trained = fully_shard(model) if backend == "fsdp" else zero.initialize(model, zero.config(3, "fp32"))
    engine = FakeEngine(ModuleHost(Head, Head().state_dict())) if rank == 0 else None
    with WeightSync(backend, "ipc", engine, bucketer="parameter", timeout_s=30.0) as sync:
        sync.push(trained)
        broken = mock.patch.object(AddedProducts, "apply", side_effect=lambda *_: time.sleep(0.3) or 1 / 0)
        with broken if rank == failing else nullcontext(), pytest.raises(WeightSyncError, match="division by zero"):
            sync.push(trained)
        assert_in_step()
        sync.push(trained)
    if engine is not None:
        for name, tensor in engine.hosts[0].live.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        engine.close()


@pytest.mark.parametrize(("backend", "failing"), [("fsdp", 1), ("deepspeed", 0)])
def test_a_rank_that_fails_leaves_no_other_in_a_gather_of_factors(backend: str, failing: int):
    run_ranks(fail_between_gathers, 2, backend, failing)


# ---------------------------------------------------------------------------------------------------------------
# Pushes. The layer's object may be another one at the next push, where the base lies in the same place


class Head(nn.Module):
    """An engine's model of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4, bias=False)
        self.b = nn.Linear(4, 3, bias=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            dict(self.named_parameters())[name].data.copy_(tensor)


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_each_push_merges_anew(transport: str):
    torch.manual_seed(0)
    base = Head()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["a"], r=2))
    host = ModuleHost(Head, Head().state_dict())
    selection = TensorSelection(only_trained=True)
    engine = FakeEngine(host)
    with WeightSync("fsdp", transport, engine, selection=selection, timeout_s=10.0) as sync:
        moved = []

        def push() -> None:
            expected = merged(model)
            moved.append(sync.push(model).nbytes)
            for name, tensor in host.live.state_dict().items():
                assert torch.equal(tensor, expected[name]), name

        for weights in "ABC":
            fill_adapters(model, weights)
            push()
        assert moved == [4 * (24 + 12), 4 * 24, 4 * 24]
        model = peft.get_peft_model(model.unload(), peft.LoraConfig(target_modules=["a"], r=3))
        fill_adapters(model, "D")
        push()
        model.merge_adapter()  # what is sent lies in the trainer's memory now
        moved.append(sync.push(model).nbytes)
        assert torch.equal(host.live.a.weight, model.base_model.model.a.base_layer.weight)
        assert moved[3:] == [4 * 24, 4 * (24 + 12)]
    engine.close()
