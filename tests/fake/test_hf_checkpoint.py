"""What a sender makes of a transformers model: the tensors of its checkpoint, as views of the model's own."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import quantised_checkpoints
import tiny_models
import torch
import transformers
from quantised_checkpoints import save_mxfp4
from ranks import run_ranks
from safetensors.torch import load_file
from test_source_fsdp import assert_same, rebuilt
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from transformers.conversion_mapping import get_model_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    Transpose,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

from weightsync import save
from weightsync.checkpoint.sidecars import with_configs
from weightsync.errors import UnsupportedError
from weightsync.planning.layout import Box, TensorMeta
from weightsync.selection import TensorSelection
from weightsync.sources.fsdp import FsdpSource
from weightsync.sources.hf_checkpoint import SavedParts, SavedRegion, each_once
from weightsync.sources.rename import renamed


def sent(model: nn.Module, **selection: object) -> dict[str, torch.Tensor]:
    """What an unsharded model sends."""
    chosen = TensorSelection(**selection)
    source = renamed(FsdpSource(chosen), chosen)
    shards = source.read(model).shards
    assert list(dict.fromkeys(shard.meta for shard in shards)) == list(source.read(model).manifest)
    found: dict[str, list[torch.Tensor]] = {}
    for shard in sorted(shards, key=lambda shard: shard.box.start[:1]):
        assert not any(shard.box.start[1:])
        found.setdefault(shard.meta.name, []).append(shard.tensor)
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()}


def written(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes."""
    return load_file(tiny_models.save(model, folder) / "model.safetensors")


@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS.keys() - {"gpt-oss-20b"}))  # a wide gpt-oss
def test_what_is_sent_is_what_save_pretrained_writes(name: str, tmp_path: Path):
    model = tiny_models.build(name, "A")
    expected = written(model, tmp_path)
    found = sent(model)
    assert_same({key: found.pop(key) for key in expected}, expected)
    assert not found
    assert sent(model).keys() == expected.keys()  # once more, from what it remembers


DEQUANTISE = {
    "gpt-oss-wide": lambda: transformers.Mxfp4Config(dequantize=True),
    "qwen3-blocks": lambda: transformers.FineGrainedFP8Config(dequantize=True),
    "qwen3-moe-blocks": lambda: transformers.FineGrainedFP8Config(dequantize=True),
}


@pytest.mark.parametrize("name", DEQUANTISE)
def test_a_dequantised_model_is_sent_as_its_class_is_saved(name: str, tmp_path: Path):
    """Such as GPT-OSS from its MXFP4 checkpoint, for training. `save_pretrained` itself loses tensors of these."""
    made, folder = tiny_models.build(name, "A"), tmp_path / "quantised"
    in_4_bits = name.startswith("gpt-oss")
    save_mxfp4(made, folder) if in_4_bits else quantised_checkpoints.save(made, "FP8-block", folder)
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, quantization_config=DEQUANTISE[name](), dtype=torch.bfloat16)
    before = dict(vars(model))
    made.load_state_dict(model.state_dict())
    assert_same(dict(sorted(sent(model).items())), written(made, tmp_path / "plain"))
    assert vars(model) == before
    save(model, tmp_path / "saved")
    loaded = kind.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert_same(loaded.state_dict(), model.state_dict())


def deep(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model of sixteen layers. The layers of one kind are alike."""
    config = tiny_models.CONFIGS[name]()
    config.num_hidden_layers = 16
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * 16
    monkeypatch.setitem(tiny_models.CONFIGS, name, lambda: config)
    return tiny_models.build(name, "A")


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "mixtral"])
def test_layers_that_are_alike_are_sent_as_save_pretrained_writes_each(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = deep(name, monkeypatch)
    expected = written(model, tmp_path)
    followed: list[int] = []

    def revert(built: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        followed.append(len(state))
        return revert_weight_conversion(built, state)

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", revert)
    found = sent(model)
    assert_same({key: found.pop(key) for key in expected}, expected)
    assert not found
    assert [number < len(expected) / 4 for number in followed] == [True]


@pytest.mark.parametrize("layer", [0, 8, 15])
def test_all_layers_are_followed_if_an_example_is_saved_in_another_way(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = deep("mixtral", monkeypatch)
    own = WeightRenaming(f"layers.{layer}.odd_norm", f"layers.{layer}.input_layernorm")
    vars(model)["_weight_conversions"] = [*get_model_conversion_mapping(model, add_legacy=False), own]
    expected = written(model, tmp_path)
    assert f"model.layers.{layer}.odd_norm.weight" in expected
    found = sent(model)
    assert_same({key: found.pop(key) for key in expected}, expected)
    assert not found


def test_experts_are_views_of_the_fused_tensors():
    model = tiny_models.build("mixtral", "A")
    fused = model.model.layers[1].mlp.experts
    found = sent(model)
    with torch.no_grad():
        fused.gate_up_proj += 1
    first, second = (found[f"model.layers.1.block_sparse_moe.experts.3.{part}.weight"] for part in ("w1", "w3"))
    assert torch.equal(torch.cat([first, second]), fused.gate_up_proj[3])


def test_names_of_either_form_are_excluded():
    model = tiny_models.build("qwen3-moe", "A")
    rest = sent(model, exclude=("*.layers.0.mlp.experts.gate_up_proj", "*.layers.1.mlp.experts.2.*"))
    experts = {name.partition(".mlp.experts.")[2] for name in rest if ".layers.1." in name and ".experts." in name}
    assert experts == {f"{i}.{part}_proj.weight" for i in (0, 1, 3) for part in ("gate", "up", "down")}
    assert not [name for name in rest if ".layers.0." in name and "gate_proj" in name]


def test_a_tied_tensor_is_sent_if_the_first_of_its_name_is_excluded():
    model = tiny_models.tied("qwen3-moe", "layers.0", "layers.1", "mlp.experts.gate_up_proj")
    first, second = (f"model.layers.{layer}.mlp.experts.2.up_proj.weight" for layer in (0, 1))
    found = sent(model, exclude=(first,))
    assert first not in found
    assert torch.equal(found[second], sent(model)[first])
    assert second not in sent(model)


@pytest.mark.parametrize("rename", [None, {r"^model\.": ""}])
def test_a_tied_tensor_with_a_dtype_of_its_own_is_sent(rename: Any):
    model = tiny_models.tied("llama", "layers.0", "layers.1", "input_layernorm.weight")
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
    prefix = "model." if rename is None else ""
    names = [f"{prefix}{name.removeprefix('model.')}" for name in names]
    for layer, own in ((0, names[:1]), (1, names)):
        found = sent(model, dtypes={f"{prefix}layers.{layer}.*": "float32"}, rename=rename)
        assert [name for name in names if name in found] == own
    assert names[1] not in sent(model, dtypes={"*": "float32"}, rename=rename)


class Expert(SavedRegion):
    """A region of an expert, one of tens of thousands."""

    def __hash__(self) -> int:
        raise AssertionError("compared, and nothing is tied to it")


def test_parts_that_nothing_is_tied_to_are_neither_compared_nor_copied():
    whole = Box.full((2, 3))
    metas = [TensorMeta(name, (2, 3), "float32") for name in ("embed", "expert", "head")]
    kinds = (SavedRegion, Expert, SavedRegion)
    saved = [SavedParts((meta,), (kind(whole, (0, 1), whole),)) for meta, kind in zip(metas, kinds, strict=True)]
    parts, tied = each_once(["embed", "expert", "embed"], saved)
    assert tied == {"head": "embed"}
    assert parts[1] is saved[1]
    assert parts[2].metas == ()


def test_adapters_of_layers_that_share_a_part_of_a_joined_tensor_are_merged(tmp_path: Path):
    def wrapped() -> Any:
        model = tiny_models.tied("hrm-text", "L_module.layers.0", "H_module.layers.0", "mlp.gate_proj.weight")
        torch.manual_seed(1)
        options = {"r": 4, "target_modules": ["gate_proj"], "init_lora_weights": False}
        return peft.get_peft_model(model, peft.LoraConfig(**options))

    save(wrapped(), tmp_path / "adapters")
    save(wrapped().merge_and_unload(), tmp_path / "merged")
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("adapters", "merged"))
    assert_same({key: found.pop(key) for key in expected}, expected)
    assert not found


def test_a_part_of_a_joined_tensor_is_not_excluded_alone():
    """The tensor would be saved without the part's rows."""
    model, at = tiny_models.build("hrm-text", "A"), "model.L_module.layers.0.mlp"
    joined = f"{at}.gate_up_proj.weight"
    with pytest.raises(UnsupportedError, match=f"such as {joined} without {at}.up_proj.weight") as caught:
        sent(model, exclude=("*.mlp.up_proj.weight",))
    assert len(caught.value.tensors) == 2
    rest = sent(model).keys() - {joined}
    assert sent(model, exclude=(joined,)).keys() == rest
    assert sent(model, exclude=(f"{at}.up_proj.weight", f"{at}.gate_proj.weight")).keys() == rest


def test_an_excluded_tensor_of_another_form_keeps_no_other_from_a_push():
    """It may be why transformers could not save the model."""
    model, at = tiny_models.build("hrm-text", "A"), "model.L_module.layers.0.mlp"
    both = f"{at}.up_proj.weight", f"{at}.gate_proj.weight"
    expected = sent(model, exclude=both).keys()
    up: Any = model.get_submodule(f"{at}.up_proj")
    up.weight = nn.Parameter(up.weight.detach().float())
    with pytest.raises(UnsupportedError, match=f"without {both[0]}.* exclude .*, all of its parts, or none"):
        sent(model, exclude=both[:1])
    up.weight = nn.Parameter(torch.zeros(4, 7))
    assert sent(model, exclude=both).keys() == expected

    experts = "model.layers.0.mlp.experts"
    moe: Any = tiny_models.build("qwen3-moe", "A")
    expected = sent(moe, exclude=(f"{experts}.gate_up_proj",)).keys()
    packed = nn.Parameter(torch.zeros(5, 1, dtype=torch.uint8), requires_grad=False)
    moe.model.layers[0].mlp.experts.gate_up_proj = packed
    assert sent(moe, exclude=(f"{experts}.gate_up_proj",)).keys() == expected


@pytest.mark.parametrize(
    "part",
    [
        nn.Parameter(torch.zeros(4, 7).to_sparse()),
        nn.UninitializedParameter(),
        nn.Parameter(torch.empty(4, 7, device="meta")),
        nn.Parameter(torch.zeros(())),
    ],
    ids=["sparse", "lazy", "meta", "scalar"],
)
def test_a_part_of_any_form_is_not_excluded_alone(part: nn.Parameter):
    """Neither its reader nor transformers need know its shape."""
    model, at = tiny_models.build("hrm-text", "A"), "model.L_module.layers.0.mlp"
    both = f"{at}.up_proj.weight", f"{at}.gate_proj.weight"
    expected = sent(model, exclude=both).keys()
    up: Any = model.get_submodule(f"{at}.up_proj")
    up.weight = part
    with pytest.raises(UnsupportedError, match=f"such as {at}.gate_up_proj.weight without {both[0]}"):
        sent(model, exclude=(*both[:1], "*norm*"))
    assert sent(model, exclude=both).keys() == expected
    assert sent(model, exclude=(*both[:1], f"{at}.gate_up_proj.weight")).keys() == expected


def test_a_part_that_is_computed_when_it_is_saved_is_not_excluded_alone():
    """Here transformers doubles the first part, and joins it with the other."""
    model = odd(WeightConverter("joined", ["one", "other"], [Concatenate(0).reverse_op, DoubledFirst()]), RENAMED)
    with pytest.raises(UnsupportedError, match="such as joined without one"):
        sent(model, exclude=("one",))
    assert list(sent(model, exclude=("one", "other"))) == ["turned", "norm_old"]


def test_excluded_tensors_are_not_converted(monkeypatch: pytest.MonkeyPatch):
    given: list[set[str]] = []

    def revert(built: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given.append({*state})
        return revert_weight_conversion(built, state)

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", revert)
    sent(tiny_models.build("hrm-text", "A"), exclude=("*embed*",))
    assert [any("embed" in name for name in names) for names in given] == [False]


def sharded_stacks(rank: int, folder: str) -> None:
    """Two ranks, each with a part of every tensor that the checkpoint has with others in one."""
    found = rebuilt(fully_shard(tiny_models.build("hrm-text", "A")))
    expected = load_file(Path(folder) / "model.safetensors")
    assert_same({key: found.pop(key) for key in expected}, expected)
    assert not found


def test_sharded_tensors_that_a_checkpoint_has_in_one(tmp_path: Path):
    tiny_models.save(tiny_models.build("hrm-text", "A"), tmp_path)
    run_ranks(sharded_stacks, 2, str(tmp_path))


def test_config_of_weights_in_4_bits_says_what_is_saved():
    model = tiny_models.build("qwen3", "A")
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    config, *_ = with_configs(model, None, None, None)
    assert "quantization_config" not in config.to_dict()
    assert model.config.quantization_config.load_in_4bit


CODE = """
import transformers

class TinyConfig(transformers.Qwen3Config):
    model_type = "tiny-of-its-own"

class Tiny(transformers.Qwen3ForCausalLM):
    config_class = TinyConfig

TinyConfig.register_for_auto_class()
Tiny.register_for_auto_class("AutoModelForCausalLM")
"""


def test_a_model_of_remote_code_is_saved_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "code_of_a_model.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    code = importlib.import_module("code_of_a_model")
    sizes = {key: value for key, value in tiny_models.CONFIGS["qwen3"]().to_dict().items() if key != "model_type"}
    model = code.Tiny(code.TinyConfig(**sizes)).bfloat16()
    save(model, tmp_path / "ours")
    code.Tiny(code.TinyConfig(**sizes)).bfloat16().save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.suffix in (".py", ".json")}
        for folder in (tmp_path / "ours", tmp_path / "theirs")
    )
    assert ours.keys() == theirs.keys() > {"code_of_a_model.py", "config.json"}
    assert ours["code_of_a_model.py"].read_text() == CODE
    maps = [json.loads(files["config.json"].read_text())["auto_map"] for files in (ours, theirs)]
    assert (
        maps[0]
        == maps[1]
        == {"AutoConfig": "code_of_a_model.TinyConfig", "AutoModelForCausalLM": "code_of_a_model.Tiny"}
    )


def sharded_experts(rank: int, folder: str) -> None:
    """Two ranks: on the experts' own dimension, replicated, on the one along which gate and up lie, and flattened."""
    expected = load_file(Path(folder) / "model.safetensors")

    def check(model: nn.Module) -> None:
        found = rebuilt(model)
        assert_same({key: found.pop(key) for key in expected}, expected)
        assert not found

    check(tiny_models.shard(tiny_models.build("mixtral", "A")))
    replicated = replicate(tiny_models.build("mixtral", "A"))
    check(replicated)
    assert with_configs(replicated, None, None, None)[0].architectures == ["MixtralForCausalLM"]
    for dim in (1, 2):
        model = tiny_models.build("mixtral", "A")
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, shard_placement_fn=lambda param, dim=dim: Shard(dim))
        check(tiny_models.shard(model))
    for use_orig_params in (True, False):
        model = tiny_models.build("mixtral", "A")
        check(
            FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
        )


def test_sharded_experts_are_those_of_the_checkpoint(tmp_path: Path):
    tiny_models.save(tiny_models.build("mixtral", "A"), tmp_path)
    run_ranks(sharded_experts, 2, str(tmp_path))


# ---------------------------------------------------------------------------------------------------------------
# Conversions that none of the models above has


class OddConfig(transformers.PretrainedConfig):
    model_type = "weightsync_test_odd"


class Odd(transformers.PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.turned = nn.Parameter(torch.rand(2, 3, 4))
        self.one = nn.Parameter(torch.rand(4))
        self.other = nn.Parameter(torch.rand(4))
        self.norm = nn.Parameter(torch.rand(4))


def odd(*conversions: object) -> Odd:
    register_checkpoint_conversion_mapping(OddConfig.model_type, list(conversions), overwrite=True)
    return Odd(OddConfig())


RENAMED = WeightRenaming("^norm_old", "norm")


def test_a_transposed_tensor_is_a_strided_view():
    model = odd(WeightConverter("flipped", "turned", [Transpose(1, 2)]), RENAMED)
    found = sent(model)
    assert list(found) == ["flipped", "one", "other", "norm_old"]
    assert torch.equal(found["flipped"], model.turned.transpose(1, 2))
    assert found["flipped"].data_ptr() == model.turned.data_ptr()


def test_tensors_that_a_checkpoint_has_in_one_are_regions_of_that():
    # `Chunk` when it is loaded, and so `Concatenate` when it is saved.
    joined = WeightConverter("joined", ["one", "other"], [Concatenate(0).reverse_op])
    model = odd(joined, RENAMED)
    model.one.requires_grad = False
    source = FsdpSource(TensorSelection())
    assert [meta.name for meta in source.read(model).manifest] == ["turned", "joined", "norm_old"]
    first, second = (shard for shard in source.read(model).shards if shard.meta.name == "joined")
    assert first.meta.shape == second.meta.shape == (8,)
    assert (first.box, second.box) == (Box((0,), (4,)), Box((4,), (4,)))
    assert (first.tensor.data_ptr(), second.tensor.data_ptr()) == (model.one.data_ptr(), model.other.data_ptr())
    assert first.trains  # it travels with the other, which does


class Doubled(ConversionOps):
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {name: [2 * tensor[0]] for name, tensor in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class DoubledInPlace(Doubled):
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {name: [tensor[0].mul_(2)] for name, tensor in input_dict.items()}


class DoubledFirst(Doubled):
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {name: [2 * each[0]] if name == "one" else each for name, each in input_dict.items()}


def test_what_a_checkpoint_has_in_another_form_than_a_view_is_refused():
    kinds = {"one": Doubled(), "other": DoubledInPlace()}
    doubled = [WeightConverter(f"twice_{name}", name, [kind]) for name, kind in kinds.items()]
    with pytest.raises(UnsupportedError, match="transformers saves values computed from them") as caught:
        sent(odd(*doubled, RENAMED))
    assert set(caught.value.tensors) == {"one", "other"}
    assert list(sent(odd(*doubled, RENAMED), exclude=("one", "other"))) == ["turned", "norm_old"]
    with pytest.raises(UnsupportedError, match="cannot follow how transformers saves a Odd"):
        sent(odd(WeightConverter("mixed", "turned", [Interleave(2)])))


def test_a_manifest_has_the_other_names_of_tied_tensors():
    model = tiny_models.build("qwen3-tied", "A")
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    assert FsdpSource(TensorSelection()).read(model).manifest.tied == (pair,)
    assert FsdpSource(TensorSelection(exclude=("lm_head.weight",))).read(model).manifest.tied == ()
    under_a = TensorSelection(rename=lambda name: f"a.{name}")
    assert renamed(FsdpSource(under_a), under_a).read(model).manifest.tied == (tuple(f"a.{name}" for name in pair),)
    assert FsdpSource(TensorSelection()).read(tiny_models.build("qwen3", "A")).manifest.tied == ()
