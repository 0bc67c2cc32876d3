"""Every kind of PEFT's layers: a push sends the bits of `merge_and_unload` on a copy, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_models
import torch
import zero
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, give
from quantizers import find_quantizers, need_quantizers
from ranks import run_ranks
from test_lora import check, fill_adapters, pieces_of, wrapped
from torch import nn
from torch.distributed.fsdp import fully_shard

from weightsync import TensorSelection, UnsupportedError, WeightSync
from weightsync.sources import open_source
from weightsync.sources.base import SteadySource

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in ("Model .* `tie_word_embeddings", "The following .*_pattern keys", "LoRA adapter added to ConvNd")
]


class Convolutions(nn.Module):
    """A tower with convolutions, some of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Conv1d(4, 6, 3)
        self.plane = nn.Conv2d(6, 5, 1, bias=False)
        self.patch = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4))


def other(config: peft.PeftConfig, model: str = "qwen3") -> nn.Module:
    return peft.get_peft_model(tiny_models.build(model, "A"), config)


def experts(model: str = "qwen3-moe", **more: Any) -> nn.Module:
    return wrapped("linear", model=model, **more)


def tied(**more: Any) -> nn.Module:
    return wrapped("linear", model="qwen3-tied", **more)


MAKE: dict[str, Callable[[], nn.Module]] = {
    "DoRA": lambda: wrapped("embedding", use_dora=True),
    "two of DoRA": lambda: two_adapters(use_dora=True),
    "bias": lambda: wrapped("linear", model="qwen2", target_modules=["q_proj"], lora_bias=True),
    "IA3": lambda: other(peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "OFT": lambda: other(peft.OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=4)),
    "LoHa": lambda: other(peft.LoHaConfig(target_modules=["q_proj"])),
    "LoRA and LoHa": lambda: mixed(),
    "convolutions": lambda: peft.get_peft_model(
        Convolutions(), peft.LoraConfig(r=2, target_modules=["line", "plane", "patch"])
    ),
    "tokens": lambda: wrapped("linear", trainable_token_indices={"embed_tokens": [7, 1, 2]}),
    "tokens alone": lambda: other(peft.TrainableTokensConfig(token_indices=[1, 4], target_modules=["embed_tokens"])),
    "tied tokens": lambda: tied(trainable_token_indices={"embed_tokens": [1, 2]}),
    "tied embedding": lambda: tied(target_modules=["embed_tokens"]),
    "tied embedding and head": lambda: tied(target_modules=["embed_tokens", "lm_head"]),
    "tied DoRA": lambda: tied(target_modules=["embed_tokens"], use_dora=True),
    "experts": lambda: experts(target_modules="all-linear"),
    "experts of Mixtral": lambda: experts("mixtral", target_modules="all-linear"),
    "experts of GPT-OSS": lambda: experts("gpt-oss", target_parameters=["gate_up_proj", "down_proj"]),
    "parts of one tensor": lambda: wrapped("linear", model="hrm-text", target_modules="all-linear"),
    "one tensor of experts": lambda: experts(target_parameters=["experts.gate_up_proj"]),
}
SHARDED = ["DoRA", "bias", "convolutions", "tokens", "tied embedding and head", "experts", "parts of one tensor"]


def two_adapters(**more: Any) -> nn.Module:
    model = wrapped("linear", **more)
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], **more))
    model.base_model.set_adapter(["other", "default"])
    return model


def mixed() -> nn.Module:
    model = peft.get_peft_model(tiny_models.build("qwen3", "A"), peft.LoraConfig(target_modules=["q_proj"]), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(target_modules=["q_proj", "o_proj"]))
    model.set_adapter(["default", "other"])
    return model


def merged(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint of the merged model."""
    found = copy.deepcopy(model).merge_and_unload()
    if not hasattr(found, "save_pretrained"):
        return dict(found.state_dict())
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(found, found.state_dict()))


@pytest.mark.parametrize("kind", MAKE)
def test_a_push_merges_as_peft_does(kind: str):
    model = MAKE[kind]()
    for weights in "AB":
        fill_adapters(model, weights)
        check(model, merged(model))


def around(base: dict[str, nn.Parameter], alpha: int, weights: str) -> Any:
    """A model with these very parameters, and with an adapter of its own on layers of attention."""
    model = nn.Module()
    give(model, base)
    for layer in "01":
        for part in "qkv":
            name = f"layers.{layer}.attn.{part}"
            linear = nn.Linear(1, 1, device="meta")
            linear.weight, linear.bias = base[f"{name}.weight"], base[f"{name}.bias"]
            linear.out_features, linear.in_features = linear.weight.shape
            model.get_submodule(f"layers.{layer}.attn").add_module(part, linear)
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q", "v"]))
    fill_adapters(found, weights)
    return found


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_models_around_the_same_base_are_pushed_each_with_its_adapter(transport: str):
    base = {name: nn.Parameter(tensor) for name, tensor in checkpoint(2).items()}
    models = [around(base, 4, "A"), around(base, 4, "B"), around(base, 8, "A")]
    host = ModuleHost(TinyEngineModel, checkpoint(1))
    with closing(FakeEngine(host)) as engine, WeightSync("fsdp", transport, engine, timeout_s=30.0) as sync:
        for model in (*models, models[0]):
            sync.push(model)
            for name, tensor in cold(merged(model)).state_dict().items():
                assert torch.equal(host.live.state_dict()[name], tensor), name


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_shards_are_merged_as_the_whole_is(backend: str):
    run_ranks(check_sharded, 2, backend)


def check_sharded(rank: int, backend: str) -> None:
    for kind in SHARDED:
        model: Any = MAKE[kind]()
        fill_adapters(model, "A")
        expected = merged(model)
        if backend == "fsdp":
            for module in [each for each in model.modules() if hasattr(each, "self_attn")]:
                fully_shard(module)
            check(fully_shard(model), expected)
        else:
            engine = zero.initialize(model, zero.config(3, "fp32" if kind == "convolutions" else "bf16"))
            check(engine, expected, backend)
            engine.destroy()


def grouped() -> nn.Module:
    tower = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    return peft.get_peft_model(tower, peft.LoraConfig(r=2, target_modules=["0"]))


def attention() -> nn.Module:
    config = peft.LoraConfig(target_modules=["0"])
    return peft.get_peft_model(nn.Sequential(nn.MultiheadAttention(8, 2)), config)


def without_a_merge() -> nn.Module:
    return wrapped("linear", alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (grouped, "groups > 1"),
        (attention, "modules inside of the module"),
        (without_a_merge, "aLoRA does not support"),
    ],
)
def test_a_layer_that_peft_cannot_merge_is_refused(make: Callable[[], nn.Module], words: str):
    with pytest.raises(UnsupportedError, match=words):
        open_source("fsdp", TensorSelection()).read(make())


# ---------------------------------------------------------------------------------------------------------------
# Bases in 4 bits


def in_four_bits(kind: str, **adapter: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model whose linear layers bitsandbytes has packed, with the values of its weights."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import dequantize_4bit

    model = tiny_models.build("qwen3", "A")
    storage = torch.bfloat16 if kind == "stored as bfloat16" else torch.uint8
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            packed = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                compress_statistics=kind != "plain statistics", quant_storage=storage,
            )  # fmt: skip
            packed.weight = bnb.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", quant_storage=storage, module=packed,
                compress_statistics=kind != "plain statistics",
            )  # fmt: skip
            model.set_submodule(name, packed.to("cpu"))
    values = dict(tiny_models.build("qwen3", "A").state_dict())
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            values[f"{name}.weight"] = dequantize_4bit(module.weight.data, module.weight.quant_state)
    if adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, **adapter))
        fill_adapters(model, "A")
    return model, values


def with_merged(values: dict[str, torch.Tensor], model: nn.Module, **adapter: Any) -> dict[str, torch.Tensor]:
    """The merge of the same adapters into the values."""
    plain: Any = tiny_models.build("qwen3", "A")
    plain.load_state_dict(values)
    plain = peft.get_peft_model(plain, peft.LoraConfig(r=8, lora_alpha=16, **adapter))
    plain.load_state_dict({name: param for name, param in model.state_dict().items() if "lora_" in name}, strict=False)
    return dict(plain.merge_and_unload().state_dict())


def check_four_bits(rank: int, backend: str) -> None:
    find_quantizers()
    targets = ["q_proj", "down_proj", "embed_tokens"]
    kinds = ["stored as bfloat16", *(["compressed statistics", "plain statistics"] if backend == "fsdp" else [])]
    for kind in kinds:
        for adapter in ({}, {"target_modules": targets}, {"target_modules": targets, "use_dora": True}):
            model, values = in_four_bits(kind, **adapter)
            expected = with_merged(values, model, **adapter) if adapter else values
            check(model, expected)
            source = SteadySource(open_source("fsdp", TensorSelection()))
            assert source.read(model) is source.read(model)
            if kind != "stored as bfloat16":
                continue
            if backend == "deepspeed":
                engine = zero.initialize(model, zero.config(3, "fp32"))  # which leaves dtypes alone
                check(engine, expected, backend)
                engine.destroy()
            else:
                for module in [each for each in model.modules() if hasattr(each, "self_attn")]:
                    fully_shard(module)
                check(fully_shard(model), expected)


def check_loaded(rank: int, folder: str) -> None:
    """As from a checkpoint that bitsandbytes has packed before, such as those for QLoRA on the hub."""
    find_quantizers()
    import transformers

    plain = tiny_models.save(tiny_models.build("qwen3", "A"), Path(folder, "plain"))
    load, bits = transformers.AutoModelForCausalLM.from_pretrained, transformers.BitsAndBytesConfig
    first = load(plain, dtype=torch.bfloat16, quantization_config=bits(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    first.save_pretrained(Path(folder, "packed"))
    expected = {name: values for name, _, values, _ in pieces_of(first)}
    again = load(Path(folder, "packed"), dtype=torch.bfloat16)
    check(again, expected)
    in_8_bits = load(plain, dtype=torch.bfloat16, quantization_config=bits(load_in_8bit=True))
    with pytest.raises(UnsupportedError, match=r"q_proj\.weight is in bitsandbytes' 8 bits, which do not travel"):
        open_source("fsdp", TensorSelection()).read(in_8_bits)


def test_a_model_that_was_saved_in_4_bits_travels_dequantised(tmp_path: Path):
    need_quantizers()
    run_ranks(check_loaded, 1, str(tmp_path))


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_a_base_in_4_bits_travels_dequantised_and_merged(backend: str):
    need_quantizers()
    run_ranks(check_four_bits, 2, backend)
