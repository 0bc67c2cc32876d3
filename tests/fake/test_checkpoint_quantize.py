"""Engines from 8-bit checkpoints, without vLLM: which of the trainer's tensors become pairs of values and scales."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import ModuleHost
from memory_trainer import MemoryTrainer, manifest_of
from test_fused_quantize import Workers
from torch import nn

from weightsync.kernels.quantize import BlockForm, Form, fp8_per_block, fp8_per_channel, int8_per_channel
from weightsync.planning.load_plan import LoadPlan
from weightsync.worker.checkpoint_quantize import int8_packed, mxfp4_experts
from weightsync.worker.load_planner import FUSED_QUANTIZE, IN_PLACE, NATIVE_LOADER
from weightsync.worker.loader import Receiver

FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 256, 128


class Layer(nn.Module):
    """Two weights of `ROWS / 2` rows fused into one, and the scales beside it. As int32 it is packed."""

    def __init__(self, dtype: torch.dtype, suffix: str, scales: tuple[int, ...]) -> None:
        super().__init__()
        if dtype == torch.int32:
            for key, like in [
                ("packed", torch.zeros(ROWS, COLUMNS // 4, dtype=dtype)),
                ("scale", torch.zeros(scales, dtype=torch.bfloat16)),
                ("shape", torch.zeros(2, dtype=torch.int64)),
            ]:
                self.register_parameter(f"weight_{key}", nn.Parameter(like, requires_grad=False))
            group = COLUMNS // scales[1] if scales[1] > 1 else -1
            self.scheme = SimpleNamespace(num_bits=8, symmetric=True, group_size=group)
            return
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype), requires_grad=False)
        self.register_parameter("weight" + suffix, nn.Parameter(torch.zeros(scales), requires_grad=False))
        if suffix == "_scale_inv":
            self.weight_block_size = [128, 128]


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, suffix: str, scales: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype, suffix, scales) for _ in range(3))
        self.norm = nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            half = 1 if ".up." in name else 0
            target = params[name.replace(".gate.", ".").replace(".up.", ".")].data
            if name != "norm" and not name.endswith("_shape"):
                rows = target.shape[0] // 2
                target = target[half * rows : (half + 1) * rows]
            assert target.shape == tensor.shape
            target.copy_(tensor)


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    names = [f"layers.{n}.{half}.weight" for n in range(3) for half in ("gate", "up")]
    shape = (ROWS // 2, COLUMNS)
    return {name: torch.randn(shape, generator=draw).bfloat16() for name in names} | {"norm": torch.randn(4)}


SCHEMES = {
    "fp8 per channel": (FP8, "_scale", (ROWS, 1), fp8_per_channel),
    "int8 per channel": (torch.int8, "_scale", (ROWS, 1), int8_per_channel),
    "fp8 per block": (FP8, "_scale_inv", (2, 1), fp8_per_block),
    "int8 packed, per channel": (torch.int32, "_scale", (ROWS, 1), functools.partial(int8_packed, group=COLUMNS)),
    "int8 packed, in groups": (torch.int32, "_scale", (ROWS, 4), functools.partial(int8_packed, group=32)),
}


def in_8_bits(tensors: dict[str, torch.Tensor], suffix: str, quantise: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        made = (tensor,) if name == "norm" else quantise(tensor.bfloat16())
        keys = ("_packed", suffix, "_shape") if len(made) == 3 else ("", suffix)
        found |= {name + key: part for key, part in zip(keys, made, strict=False)}
    return found


def host(scheme: str) -> ModuleHost:
    dtype, suffix, scales, quantise = SCHEMES[scheme]
    made = ModuleHost(functools.partial(Model, dtype, suffix, scales), in_8_bits(weights(0), suffix, quantise))
    made.dtype = torch.bfloat16
    return made


def plan_of(made: ModuleHost, tensors: dict[str, torch.Tensor]) -> LoadPlan:
    return Receiver(made).make_plan(manifest_of(tensors))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("max_bytes", [None, 10_000])  # with which a tensor is cut
@pytest.mark.parametrize("travels_as", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_engine_quantises_as_the_checkpoint_was(scheme: str, travels_as: torch.dtype, max_bytes: int | None):
    _, suffix, _, quantise = SCHEMES[scheme]
    made, new = host(scheme), weights(1)
    sent = {name: tensor.to(travels_as) for name, tensor in new.items()}
    trainer = MemoryTrainer(made, tensors=sent, max_bytes=max_bytes)
    trainer.push()
    path = NATIVE_LOADER if "packed" in scheme else FUSED_QUANTIZE
    assert trainer.load_paths == {IN_PLACE: 1, path: 3}
    expected = Model(*SCHEMES[scheme][:3])
    expected.load_weights(in_8_bits(new, suffix, quantise).items())
    for name, tensor in expected.state_dict().items():
        if name != "norm":
            assert torch.equal(raw(made.live.state_dict()[name]), raw(tensor)), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_comes_in_8_bits_is_loaded_as_it_is(scheme: str):
    _, suffix, _, quantise = SCHEMES[scheme]
    made, new = host(scheme), in_8_bits(weights(1), suffix, quantise)
    trainer = MemoryTrainer(made, tensors=new)
    trainer.push()
    assert trainer.load_paths == {IN_PLACE: 4}
    expected = Model(*SCHEMES[scheme][:3])
    expected.load_weights(new.items())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(raw(made.live.state_dict()[name]), raw(tensor)), name


def scale_beside_bf16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"layers.1.up.weight_scale": torch.ones(ROWS // 2, 1)}


def in_another_kind(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return in_8_bits(tensors, "_scale", int8_per_channel)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scale_beside_bf16, "layers.1.up.weight_scale comes with it"),
        (in_another_kind, "it comes in int8, and the engine holds it in float8_e4m3fn"),
    ],
)
def test_what_no_scheme_covers_is_refused_and_nothing_is_written(change: Any, words: str):
    made = host("fp8 per channel")
    before = {name: raw(tensor).clone() for name, tensor in made.live.state_dict().items()}
    assert any(words in text for text in plan_of(made, change(weights(1))).refused.values())
    assert all(torch.equal(raw(tensor), before[name]) for name, tensor in made.live.state_dict().items())


def test_scales_for_activations_are_not_made_up():
    made = host("fp8 per channel")
    for model in (made.live, made.pristine()):
        model.layers[0].register_parameter("input_scale", nn.Parameter(torch.ones(1), requires_grad=False))
    refused = plan_of(made, weights(1)).refused
    assert refused.keys() == {"layers.0.gate.weight", "layers.0.up.weight"}
    assert "do not give its scales of activations" in refused["layers.0.up.weight"]


# ---------------------------------------------------------------------------------------------------------------
# Packed into words


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_bits": 4}, "packs symmetric int8 with columns in their order alone"),
        ({"symmetric": False}, "packs symmetric int8 with columns in their order alone"),
        ({"group_size": 48}, "its 128 columns are not a multiple of 48"),
    ],
)
def test_what_is_packed_otherwise_is_refused(how: dict[str, Any], words: str):
    made = host("int8 packed, per channel")
    vars(made.pristine().layers[1].scheme).update(how)
    plan = plan_of(made, weights(1))
    assert plan.refused.keys() == {"layers.1.gate.weight", "layers.1.up.weight"}
    assert words in plan.refused["layers.1.up.weight"]
    assert set(plan.hints) <= plan.refused.keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scale_beside_bf16, "layers.1.up.weight_scale comes with it"),
        (in_another_kind, "it comes in int8, and the engine holds it in int8 packed into words"),
    ],
)
def test_what_does_not_fit_a_packed_layer_is_refused_by_its_own_name(change: Any, words: str):
    made = host("int8 packed, per channel")
    assert any(words in text for text in plan_of(made, change(weights(1))).refused.values())
    assert not any("weight" in vars(layer)["_parameters"] for layer in made.pristine().layers)


@pytest.mark.parametrize("scheme", ["fp8 per channel", "int8 packed, per channel"])
def test_a_missing_tensor_is_hinted_at_by_its_own_name(scheme: str):
    tensors = weights(1)
    del tensors["layers.1.up.weight"]
    plan = plan_of(host(scheme), tensors)
    assert plan.missing != []
    assert plan.hints == ["layers.1.up.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [None, 128, 32])
def test_int8_is_packed_as_by_compressed_tensors(group: int | None, dtype: torch.dtype):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    args = quantization.QuantizationArgs(
        num_bits=8, type="int", symmetric=True, strategy="group" if group else "channel", group_size=group
    )
    weight = torch.randn(4096, 384, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 3, 4096)[:, None]
    weight[:3, :128] = 0
    weight[5, 7] = -(weight[5].abs().max() * 2)  # -127.5 scales
    weight = weight.to(dtype)
    groups = weight.unflatten(-1, (-1, group or 384))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)  # as its "memoryless_minmax" observer
    expected = PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero},
        quantization.QuantizationScheme(targets=["Linear"], weights=args),
    )
    found = dict(zip(("weight_packed", "weight_scale", "weight_shape"), int8_packed(weight, group or 384), strict=True))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_packed_weights_are_the_same_where_a_division_is_a_product(dtype: torch.dtype):
    """A GPU multiplies by the reciprocal of a Python number, a CPU divides by it."""
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    assert torch.equal(every / 127.5, (every.float() * torch.tensor(127.5).reciprocal()).to(dtype))


# --- GPT-OSS's experts in 4 bits


class Experts(nn.Module):
    """What vLLM has of GPT-OSS's experts: 4 of them, in and out of 64, and as many `padding` columns more."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        for key, columns in (("w13", 128), ("w2", 64)):
            for suffix, rows in (("", 32 + padding // 2), ("_scale", 2 + padding // 32)):
                data = torch.zeros(4, columns + padding, rows, dtype=torch.uint8)
                self.register_parameter(f"{key}_weight{suffix}", nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            key = "w13_weight" if "gate_up" in name else "w2_weight"
            if name.endswith(("_blocks", "_scales")):
                whole = params[key + "_scale" * name.endswith("_scales")].data
                rows = tensor.flatten(2)
                whole[:, : rows.shape[1], : rows.shape[2]].copy_(rows)
            else:
                params[key].data.copy_(tensor)


def experts(seed: int, inputs: int = 64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"mlp.experts.gate_up_proj": (4, inputs, 128), "mlp.experts.down_proj": (4, 64, 64)}
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}


def in_4_bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {name: mxfp4_experts(tensor) for name, tensor in tensors.items()}
    return {f"{name}_{key}": pair[n] for name, pair in made.items() for n, key in enumerate(("blocks", "scales"))}


@pytest.mark.parametrize("padding", [0, 32])
@pytest.mark.parametrize("quantised_by", ["the engine", "the trainer"])
def test_experts_become_what_a_checkpoint_has_of_them(quantised_by: str, padding: int):
    make = functools.partial(Experts, padding)
    made, new = ModuleHost(make, in_4_bits(experts(0))), experts(1)
    made.dtype = torch.bfloat16
    trainer = MemoryTrainer(made, tensors=new if quantised_by == "the engine" else in_4_bits(new))
    trainer.push()
    expected = make()
    expected.load_weights(in_4_bits(new).items())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(made.live.state_dict()[name], tensor), name


def test_experts_are_laid_out_as_transformers_reads_them():
    from transformers.integrations.mxfp4 import dequantize_convertops

    weight = experts(2)["mlp.experts.gate_up_proj"]
    blocks, scales = mxfp4_experts(weight)
    read = dequantize_convertops(blocks, scales)
    assert read.shape == weight.shape
    steps = 2.0 ** (scales.float() - 127).repeat_interleave(32, 2).transpose(1, 2)
    assert ((read.float() - weight.float()).abs() <= steps).all()
    again = dequantize_convertops(*mxfp4_experts(read))
    assert torch.equal(again, read)  # an untrained model comes back as it was


def test_experts_of_which_one_is_missing_are_no_padding():
    made = ModuleHost(functools.partial(Experts, 32), in_4_bits(experts(0)))
    made.dtype = torch.bfloat16
    plan = plan_of(made, {"mlp.experts.down_proj": experts(1)["mlp.experts.down_proj"]})
    assert [name.partition("[")[0] for name in plan.missing] == ["w13_weight", "w13_weight_scale"]


def test_experts_that_are_no_whole_blocks_are_refused():
    made = ModuleHost(Experts, in_4_bits(experts(0)))
    made.dtype = torch.bfloat16
    assert "mlp.experts.gate_up_proj" in plan_of(made, experts(1, inputs=48)).refused


EXPERTS, HALF, HIDDEN = 16, 128, 256
OF_EXPERTS: dict[str, tuple[str, Form | BlockForm]] = {
    "fp8 per block": ("_scale_inv", fp8_per_block),
    "fp8 per channel": ("_scale", fp8_per_channel),
}


class Fp8Experts(nn.Module):
    """VLLM's parameters for experts in fp8: of each, gate over up projection, and down projection.

    Each of `tp` workers has a part of the rows of gate and up, and of the columns of down.
    """

    def __init__(self, scheme: str, tp: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.suffix, form = OF_EXPERTS[scheme]
        self.tp, self.rank = tp, rank
        for key, rows, columns in (("w13", 2 * HALF * 2 // tp, HIDDEN), ("w2", HIDDEN, 2 * HALF // tp)):
            weight = torch.zeros(EXPERTS, rows, columns, dtype=FP8)
            scale = torch.zeros(EXPERTS, *form.scale_shape(rows, columns))
            for own, data in (("", weight), (self.suffix, scale)):
                self.register_parameter(f"{key}_weight{own}", nn.Parameter(data, requires_grad=False))
        if form is fp8_per_block:
            self.quant_method = SimpleNamespace(weight_block_size=[128, 128])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            _, number, projection, own = name.split(".")
            target = params[("w2_" if projection == "down_proj" else "w13_") + own].data[int(number)]
            if projection != "down_proj":
                target = target.chunk(2)[projection == "up_proj"]
                tensor = tensor.chunk(self.tp)[self.rank]
            elif tensor.shape[1] > 1:
                tensor = tensor.chunk(self.tp, 1)[self.rank]
            target.copy_(tensor)


def of_experts(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"gate": (2 * HALF, HIDDEN), "up": (2 * HALF, HIDDEN), "down": (HIDDEN, 2 * HALF)}
    return {
        f"experts.{n}.{part}_proj.weight": torch.randn(shape, generator=draw).bfloat16()
        for n in range(EXPERTS)
        for part, shape in shapes.items()
    }


def up_before_gate(module: nn.Module) -> None:
    """What FlashInfer's CUTLASS kernel wants."""
    if isinstance(module, Fp8Experts):
        for key in ("w13_weight", f"w13_weight{module.suffix}"):
            param = getattr(module, key)
            setattr(module, key, nn.Parameter(torch.cat([*reversed(param.data.chunk(2, 1))], 1), requires_grad=False))


def host_of_experts(scheme: str, seed: int, process: Any, tp: int = 1, rank: int = 0) -> ModuleHost:
    suffix, form = OF_EXPERTS[scheme]
    weights = in_8_bits(of_experts(seed), suffix, form)
    made = ModuleHost(lambda: Fp8Experts(scheme, tp, rank), weights, process, rank, tp)
    made.dtype = torch.bfloat16
    return made


def hosts_of_experts(scheme: str, seed: int, process: Any, tp: int) -> list[ModuleHost]:
    hosts = [host_of_experts(scheme, seed, process, tp, rank) for rank in range(tp)]
    workers = Workers(lambda rank: nn.Module(), nn.Module)
    for rank, made in enumerate(hosts if tp > 1 else ()):
        made.sharing, made.all_reduce_max = tp, functools.partial(workers.largest, rank)
    return hosts


@pytest.mark.parametrize("max_bytes", [None, 40_000, 1 << 16])
@pytest.mark.parametrize("process", [lambda module: None, up_before_gate], ids=["as loaded", "up before gate"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("scheme", OF_EXPERTS)
def test_experts_are_quantised_as_the_checkpoint_was(scheme: str, tp: int, process: Any, max_bytes: int | None):
    """Parts of columns have the scales of whole rows, or blocks of their own."""
    hosts = hosts_of_experts(scheme, 0, process, tp)
    trainer = MemoryTrainer(*hosts, tensors=of_experts(1), max_bytes=max_bytes)
    trainer.push()
    assert trainer.load_paths == {FUSED_QUANTIZE: tp}
    for made, expected in zip(hosts, hosts_of_experts(scheme, 1, process, tp), strict=True):
        for name, tensor in expected.live.state_dict().items():
            assert torch.equal(raw(made.live.state_dict()[name]), raw(tensor)), name


def test_workers_that_hold_other_parts_of_rows_than_all_of_them_use_the_loader():
    """As with data parallelism: more workers have parts of a row than agree on its scale."""
    hosts = hosts_of_experts("fp8 per channel", 0, lambda module: None, 2)
    for made in hosts:
        made.sharing = 4
    trainer = MemoryTrainer(*hosts, tensors=of_experts(1))
    trainer.push()
    assert trainer.load_paths == {NATIVE_LOADER: 2}
    for made, expected in zip(hosts, hosts_of_experts("fp8 per channel", 1, lambda module: None, 2), strict=True):
        for name, tensor in expected.live.state_dict().items():
            assert torch.equal(raw(made.live.state_dict()[name]), raw(tensor)), name


def test_a_plan_for_8_bits_after_one_for_more_loads_them_as_they_are():
    made = host_of_experts("fp8 per block", 0, lambda module: None)
    receiver = Receiver(made)
    new = in_8_bits(of_experts(2), "_scale_inv", fp8_per_block)
    for tensors, path in ((of_experts(1), FUSED_QUANTIZE), (new, IN_PLACE)):
        trainer = MemoryTrainer(made, tensors=tensors, receivers=[receiver])
        trainer.push()
        receiver.disconnect()
        assert trainer.load_paths == {path: 1}
    expected = host_of_experts("fp8 per block", 2, lambda module: None)
    for name, tensor in expected.live.state_dict().items():
        assert torch.equal(raw(made.live.state_dict()[name]), raw(tensor)), name
