"""Quantised engines: pushed equals cold, to the bit, over and over, and nothing that they work with moves.

Of the four failures of vLLM's own path, two are here, on quantised engines: an update that dies half-way (the engine
lives, and is healed), and int8 checkpoints, whose kernels keep pointers to freed scales. A module that gets its shards
twice or not at all: `test_failures.test_tensors_that_do_not_fit`. Unquantised experts:
`test_push_equals_cold.test_an_engine_may_start_with_dummy_weights` and its neighbours, with "qwen3-moe".
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import drafter_checkpoints
import pytest
import quantised_checkpoints
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, assert_same
from fake_engine import fail_once_copied

from weightsync import ManifestError, UnsupportedError, WeightSync, WeightSyncError
from weightsync.planning.bucketing import Bucket
from weightsync.planning.layout import Manifest

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
FP8, INT8 = "fp8_per_channel", "weightsync_int8"
CHECKPOINTS = {f"qwen2-{scheme}": scheme for scheme in quantised_checkpoints.SCHEMES}

# ---------------------------------------------------------------------------------------------------------------
# These functions run in the engines' process, most beside the engine that they push to.


class SplitAttention:
    """A `Bucketer` of two buckets, with q and k of every layer in the first and v in the second."""

    def bucket(self, manifest: Manifest, groups: Any) -> list[Bucket]:
        last = [meta for meta in manifest if ".v_proj." in meta.name]
        first = [meta for meta in manifest if meta not in last]
        return [Bucket(tuple(m.name for m in part), sum(m.nbytes for m in part)) for part in (first, last)]


BUCKETS: dict[str, dict[str, Any]] = {
    "small chunks": {"bucketer": "module", "max_bytes": 1 << 14},
    "chunks of many modules": {"bucketer": "threshold", "max_bytes": 200_000},
    "v after q and k": {"bucketer": SplitAttention()},
    "a bucket for each parameter": {"bucketer": "parameter"},
}


def save(scheme: str, weights: str, folder: Path, cache_scale: float | None = None) -> None:
    quantised_checkpoints.save(tiny_models.build("qwen2", weights), scheme, folder, cache_scale)


def serve(engines: Engines, model: str, quantization: str | None = None, tp: int = 1) -> dict[str, Answer]:
    if model in CHECKPOINTS:
        engines.save(model, partial(save, CHECKPOINTS[model]))
    return engines.serve(model, tp, **({"quantization": quantization} if quantization else {}))


def connect(
    engines: Engines, model: str, buckets: str = "small chunks", transport: str = "ipc", **options: Any
) -> None:
    engines.release()
    engines.model = tiny_models.build("qwen2" if model in CHECKPOINTS else model, "A")
    engines.sync = WeightSync("fsdp", transport, engines.llm, timeout_s=TIMEOUT_S, **BUCKETS[buckets], **options)


def push(engines: Engines, weights: str) -> dict[str, int]:
    tiny_models.fill(engines.model, weights)
    return engines.sync.push(engines.model).load_paths


def push_and_fail(engines: Engines, weights: str) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as raised:
        push(engines, weights)
    return raised.value


def version(engines: Engines) -> str:
    return engines.llm.get_weight_version()


def tensors(engines: Engines) -> dict[str, tuple[int, str]]:
    """Where each parameter and buffer of the live model lies, and its dtype."""
    model = engines.live_model()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor.data_ptr(), str(tensor.dtype)) for name, tensor in named.items()}


# ---------------------------------------------------------------------------------------------------------------
# Pushed equals cold

SERVED = [
    ("qwen3", FP8, 1),
    ("qwen2", FP8, 2),  # row parallel layers have one scale over both workers
    ("qwen2.5", INT8, 1),  # tied embeddings, and biases
    ("glm4-moe", INT8, 1),  # a router in float32, and experts that stay as they are
    ("qwen2-FP8-dynamic", None, 1),
    ("qwen2-FP8-dynamic", None, 2),
    ("qwen2-W8A8-int8", None, 1),
]


@pytest.mark.parametrize(("model", "quantization", "tp"), SERVED, ids=[f"{m}-{q}-tp{tp}" for m, q, tp in SERVED])
def test_pushed_equals_cold(engines: Remote, model: str, quantization: str | None, tp: int):
    cold = engines.call(serve, model, quantization, tp, timeout_s=240)
    assert cold["A"] != cold["B"]
    before = engines.call(tensors) if tp == 1 else None
    kept_by_kernel = quantization == INT8 and torch.cpu._is_vnni_supported()  # by oneDNN
    path = "native_loader" if model == "qwen2-W8A8-int8" else "reload" if kept_by_kernel else "fused_quantize"
    for buckets, pushes in zip(BUCKETS, ("ABBA", "BA", "B", "A"), strict=True):
        engines.call(connect, model, buckets, "ipc" if "chunks" in buckets else "broadcast")
        for number, weights in enumerate(pushes):
            load_paths = engines.call(push, weights)
            assert load_paths[path] >= 8, load_paths
            assert_same(engines.call(Engines.ask), cold[weights], f"push {number} ({weights}) in {buckets}")
    if before is not None and "int8" not in model:  # oneDNN's int8 kernels keep the weights to themselves
        assert engines.call(tensors) == before


def test_ten_pushes_in_a_row(engines: Remote):
    cold = engines.call(serve, "qwen3", FP8, timeout_s=240)
    before = engines.call(tensors)
    engines.call(connect, "qwen3")
    for number in range(10):
        weights = "BA"[number % 2]
        engines.call(push, weights)
        assert_same(engines.call(Engines.ask), cold[weights], f"push {number}")
    assert engines.call(tensors) == before
    assert {dtype for name, (_, dtype) in before.items() if "norm" in name or "lm_head" in name} == {"torch.bfloat16"}
    assert {dtype for name, (_, dtype) in before.items() if name.endswith("_proj.weight")} == {"torch.float8_e4m3fn"}


# ---------------------------------------------------------------------------------------------------------------
# What has a dtype of its own

CACHE_SCALE = 0.25


def serve_with_cache_scales(engines: Engines) -> dict[str, Answer]:
    engines.save("cache-scales", partial(save, "FP8-dynamic", cache_scale=CACHE_SCALE))
    return engines.serve("cache-scales", kv_cache_dtype="fp8")


def cache_scales(engines: Engines) -> list[float]:
    modules = [module for module in engines.live_model().modules() if hasattr(module, "_k_scale_float")]
    return [
        number
        for module in modules
        for number in (module._k_scale_float, module._v_scale_float, float(module._k_scale), float(module._v_scale))
    ]


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM's fp8 cache on CPUs needs it")
def test_the_scales_of_an_fp8_cache_stay_what_the_checkpoint_says(engines: Remote):
    cold = engines.call(serve_with_cache_scales, timeout_s=240)
    before = engines.call(cache_scales)
    assert before == [CACHE_SCALE] * len(before) != []
    engines.call(connect, "qwen2")
    for number, weights in enumerate("BAB"):
        engines.call(push, weights)
        assert_same(engines.call(Engines.ask), cold[weights], f"push {number} ({weights})")
        assert engines.call(cache_scales) == before


def serve_with_renamed_layers(engines: Engines) -> dict[str, Answer]:
    """Serve a checkpoint in 8 bits, whose config names a layer that is not, as "proj" in place of "down_proj"."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.model_executor.models.utils import WeightsMapper

    own = getattr(Qwen2ForCausalLM, "hf_to_vllm_mapper", WeightsMapper())  # newer vLLM has one

    class RenamesLayers(Qwen2ForCausalLM):
        hf_to_vllm_mapper = own | WeightsMapper(orig_to_new_suffix={"proj": "down_proj"})

    def save(weights: str, folder: Path) -> None:
        left = "model.layers.1.mlp.down_proj"
        model = tiny_models.build("qwen2", weights)
        quantised_checkpoints.save(model, "FP8-dynamic", folder, ignored=("lm_head", left))
        config = folder / "config.json"
        config.write_text(config.read_text().replace(left, left.replace("down_", "")))

    ModelRegistry.register_model("RenamesLayersForTest", RenamesLayers)
    engines.save("renamed-layers", save)
    return engines.serve("renamed-layers", hf_overrides={"architectures": ["RenamesLayersForTest"]})


def test_names_of_layers_in_a_quantisation_are_mapped_once(engines: Remote):
    """VLLM maps them in place, each time that it makes a model."""
    cold = engines.call(serve_with_renamed_layers, timeout_s=240)
    engines.call(connect, "qwen2")
    for number, weights in enumerate("BA"):
        engines.call(push, weights)
        assert_same(engines.call(Engines.ask), cold[weights], f"push {number} ({weights})")


def serve_with_a_drafter(engines: Engines) -> dict[str, Answer]:
    """Serve MiMo in 8 bits, whose config names a layer of its drafter as the model's class renames it."""
    from safetensors.torch import load_file, save_file
    from vllm import ModelRegistry
    from vllm.model_executor.models.mimo import MiMoForCausalLM
    from vllm.model_executor.models.utils import WeightsMapper

    own = getattr(MiMoForCausalLM, "hf_to_vllm_mapper", WeightsMapper())

    class RenamesDraftersLayers(MiMoForCausalLM):
        hf_to_vllm_mapper = own | WeightsMapper(orig_to_new_suffix={"layers.2.mlp.proj": "layers.2.mlp.down_proj"})

    def save(weights: str, folder: Path) -> None:
        quantised_checkpoints.save(tiny_models.build("qwen2", weights), "FP8-dynamic", folder)
        quantisation = json.loads((folder / "config.json").read_text())["quantization_config"]
        plain = drafter_checkpoints.checkpoint(engines, "mimo", weights)
        tensors = load_file(plain / "model.safetensors")
        left = "model.mtp_layers.0.mlp.down_proj.weight"
        for name in [name for name in tensors if re.search(r"(self_attn|mlp)\.\w+\.weight$", name) and name != left]:
            tensors[name], tensors[f"{name}_scale"] = quantised_checkpoints.SCHEMES["FP8-dynamic"][2](tensors[name])
        save_file(tensors, folder / "model.safetensors")
        quantisation["ignore"].append("model.layers.2.mlp.proj")
        config = json.loads((plain / "config.json").read_text()) | {"quantization_config": quantisation}
        (folder / "config.json").write_text(json.dumps(config))

    ModelRegistry.register_model("RenamesDraftersLayersForTest", RenamesDraftersLayers)
    engines.save("mimo-FP8", save)
    overrides = {"architectures": ["RenamesDraftersLayersForTest"]}
    return engines.serve("mimo-FP8", hf_overrides=overrides, speculative_config=drafter_checkpoints.MTP)


def connect_with_a_drafter(engines: Engines) -> None:
    engines.release()
    engines.model = tiny_models.as_saved(drafter_checkpoints.checkpoint(engines, "mimo", "A"))
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)


def test_a_drafters_layers_are_left_out_as_the_models_class_names_them(engines: Remote):
    """VLLM maps the names of one quantisation for both: first for the model, then for the drafter."""
    cold = engines.call(serve_with_a_drafter, timeout_s=240)
    engines.call(connect_with_a_drafter)
    for number, weights in enumerate("BA"):
        engines.call(push, weights)
        assert_same(engines.call(Engines.ask), cold[weights], f"push {number} ({weights})")


def push_after_the_checkpoint_has_gone(engines: Engines, model: str, weights: str) -> None:
    folder = engines.folder / f"{model}-A"
    away = folder.rename(folder.with_name("away"))
    try:
        push(engines, weights)
    finally:
        away.rename(folder)


@pytest.mark.parametrize(("model", "quantization"), [("qwen2.5", INT8), ("qwen2-FP8-dynamic", None)])
def test_a_push_needs_no_file_of_the_engines_checkpoint(engines: Remote, model: str, quantization: str | None):
    """A trainer may start its engine from a temporary folder."""
    cold = engines.call(serve, model, quantization, timeout_s=240)
    engines.call(connect, model)
    engines.call(push_after_the_checkpoint_has_gone, model, "B")
    assert_same(engines.call(Engines.ask), cold["B"], "push of B")


# ---------------------------------------------------------------------------------------------------------------
# Pushes that die in the middle of a layer


@contextmanager
def failing_after(owner: Any, method: str, calls: int) -> Any:
    """Meanwhile call number `calls` of a class's method does its work and then raises."""
    original, count = getattr(owner, method), 0

    def call(*args: Any) -> Any:
        nonlocal count
        count += 1
        result = original(*args)
        if count == calls:
            raise MemoryError("no memory left for this chunk")
        return result

    setattr(owner, method, call)
    try:
        yield
    finally:
        setattr(owner, method, original)


def die_in_quantising(engines: Engines, calls: int) -> WeightSyncError:
    """q, k and v are quantised one after the other."""
    from weightsync.kernels.quantize import Form

    with failing_after(Form, "values", calls):
        return push_and_fail(engines, "B")


def die_after_the_copies(engines: Engines, chunk: int) -> WeightSyncError:
    """Of this chunk what is not quantised has been written, and nothing else."""
    worker = engines.llm.llm_engine.model_executor.driver_worker.worker
    fail_once_copied(worker.weight_transfer_engine.session.receiver._plan._paths[0], chunk)
    return push_and_fail(engines, "B")


@pytest.mark.parametrize(("die", "at"), [(die_in_quantising, 2), (die_in_quantising, 9), (die_after_the_copies, 0)])
def test_a_push_that_dies_in_the_middle_of_a_layer(engines: Remote, die: Any, at: int):
    cold = engines.call(serve, "qwen3", FP8, timeout_s=240)
    engines.call(connect, "qwen3")
    engines.call(push, "A")
    before = engines.call(tensors)
    error = engines.call(die, at)
    assert "no memory left for this chunk" in str(error)
    assert engines.call(version).startswith("POISONED")
    assert engines.call(tensors) == before
    assert "does not answer: it is POISONED" in engines.call(Engines.refusal)
    engines.call(push, "B")
    assert_same(engines.call(Engines.ask), cold["B"], "the next push")
    assert not engines.call(version).startswith("POISONED")


# ---------------------------------------------------------------------------------------------------------------
# What does not fit


def push_as_saved(engines: Engines, checkpoint: str, leave_out: str = "") -> dict[str, int] | WeightSyncError:
    """Push the tensors of a checkpoint as they are, all but those whose names end with `leave_out`."""
    engines.release()
    engines.model = tiny_models.as_saved(engines.folder / checkpoint)
    for name, _ in list(engines.model.named_parameters()):
        if leave_out and name.endswith(leave_out):
            path, _, last = name.rpartition(".")
            delattr(engines.model.get_submodule(path), last)
    engines.sync = WeightSync("fsdp", "ipc", engines.llm, timeout_s=TIMEOUT_S)
    try:
        return engines.sync.push(engines.model).load_paths
    except WeightSyncError as error:
        return error


def test_a_trainer_that_sends_8_bits_and_scales_is_taken_at_its_word(engines: Remote):
    cold = engines.call(serve, "qwen2-FP8-dynamic", timeout_s=240)
    before = engines.call(tensors)
    for weights in "BA":
        load_paths = engines.call(push_as_saved, f"qwen2-FP8-dynamic-{weights}")
        assert load_paths["native_loader"] == 0
        assert_same(engines.call(Engines.ask), cold[weights], f"push of {weights} in 8 bits")
    error = engines.call(push_as_saved, "qwen2-FP8-dynamic-B", "0.self_attn.k_proj.weight_scale")
    assert isinstance(error, ManifestError)
    assert "self_attn.k_proj.weight_scale" in str(error)
    assert_same(engines.call(Engines.ask), cold["A"], "after the refusal")
    assert engines.call(tensors) == before


def connect_quantising(engines: Engines, model: str, form: str, transport: str = "ipc") -> None:
    connect(engines, model, transport=transport, quantize=form)


@pytest.mark.parametrize(("model", "form"), [("qwen2-FP8-dynamic", "fp8"), ("qwen2-W8A8-int8", "int8")])
def test_the_sender_quantises(engines: Remote, model: str, form: str):
    cold = engines.call(serve, model, timeout_s=240)
    for transport in ("ipc", "broadcast"):
        engines.call(connect_quantising, model, form, transport)
        for weights in "BAB":
            load_paths = engines.call(push, weights)
            assert load_paths["native_loader"] == 0
            assert_same(engines.call(Engines.ask), cold[weights], f"push of {weights} over {transport}")
    engines.call(connect_quantising, model, "int8" if form == "fp8" else "fp8")
    error = engines.call(push_and_fail, "A")
    assert isinstance(error, ManifestError)
    assert "14 weights come quantised, and the engine does not load them so" in str(error)
    assert_same(engines.call(Engines.ask), cold["B"], "after the refusal")


ROWS = {
    '`quantization="fp8_per_channel"`': ("Fp8PtpcOnlineLinearMethod", "Fp8PtpcOnlineMoEMethod"),
    '`quantization="fp8"`, `"fp8_per_tensor"`': ("Fp8PerTensorOnlineLinearMethod", "Fp8PerTensorOnlineMoEMethod"),
    '`quantization="fp8_per_block"`': ("Fp8PerBlockOnlineLinearMethod(block)", "Fp8PerBlockOnlineMoEMethod(block)"),
    "a checkpoint with fp8 blocks of 128 by 128 (`weight_scale_inv`)": (
        "Fp8LinearMethod(block)",
        "Fp8MoEMethod(block)",
    ),
    "a compressed-tensors checkpoint FP8-dynamic, scales per channel": (
        "CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8(channel)",
        "CompressedTensorsW8A8Fp8MoEMethod(8 bit, channel)",
    ),
    "a compressed-tensors checkpoint W8A8-int8, scales per channel": (
        "CompressedTensorsLinearMethod/CompressedTensorsW8A8Int8(channel)",
        "",
    ),
    "a compressed-tensors checkpoint W8A16 (int8, `pack-quantized`, symmetric), scales per channel": (
        "CompressedTensorsLinearMethod/CompressedTensorsWNA16(8 bit, channel)",
        "",
    ),
    "a compressed-tensors checkpoint W8A16, scales per group of columns": (
        "CompressedTensorsLinearMethod/CompressedTensorsWNA16(8 bit, group)",
        "",
    ),
    "GPT-OSS's own checkpoints, experts in MXFP4": ("GptOssMxfp4MoEMethod", ""),
}
"""By the first column of the table in docs/use/quantized.md: the key of `PROVEN` for the row, and one for experts."""


def test_the_documents_say_what_is_proven():
    source = ast.parse((ROOT / "weightsync" / "vllm" / "supported_quant.py").read_text())
    (value,) = [node.value for node in source.body if isinstance(node, ast.AnnAssign) and node.target.id == "PROVEN"]
    proven = ast.literal_eval(value)
    assert proven.keys() == {key for keys in ROWS.values() for key in keys if key}
    lines = (ROOT / "docs/use/quantized.md").read_text().splitlines()
    table = {cells[1].strip(): cells[3:5] for line in lines if len(cells := line.split("|")) == 6}
    for row, (linear, experts) in ROWS.items():
        for device, cell in zip(("cpu", "cuda"), table[row], strict=True):
            assert cell.strip().startswith("tested") == (device in proven[linear]), (row, cell)
            said = cell.partition(";")[0]
            assert ("experts too" in said) == (device in proven.get(experts, ())), (row, cell)


def check_where_nothing_is_proven(engines: Engines) -> str:
    from weightsync.vllm import supported_quant

    proven = dict(supported_quant.PROVEN)
    config = engines.llm.llm_engine.vllm_config.quant_config
    device = next(engines.live_model().parameters()).device
    supported_quant.check(engines.live_model(), config, device)
    supported_quant.PROVEN.clear()
    try:
        with pytest.raises(UnsupportedError) as raised:
            supported_quant.check(engines.live_model(), config, device)
    finally:
        supported_quant.PROVEN.update(proven)
    return str(raised.value)


def test_what_is_not_proven_is_refused(engines: Remote):
    # That a refusal comes before anything is written: test_reload_road.py.
    engines.call(serve, "qwen2-FP8-dynamic", timeout_s=240)
    message = engines.call(check_where_nothing_is_proven)
    for words in ("CompressedTensorsW8A8Fp8(channel)", "qkv_proj", "a cpu device", "weightsync_int8"):
        assert words in message


def quantise_anew(engines: Engines) -> str:
    """Let a layer look like one of a 4-bit checkpoint, which vLLM quantises anew. It does that on GPUs."""
    from weightsync.vllm import supported_quant

    layer = engines.live_model().model.layers[0].self_attn.qkv_proj
    layer.quant_method.requantization_source = torch.nn.Identity()
    with pytest.raises(UnsupportedError) as raised:
        supported_quant.check(
            engines.live_model(), engines.llm.llm_engine.vllm_config.quant_config, layer.weight.device
        )
    return str(raised.value)


def test_a_layer_of_a_quantised_checkpoint_that_is_quantised_anew_is_refused(engines: Remote):
    engines.call(serve, "qwen3", FP8, timeout_s=240)
    assert "Fp8PtpcOnlineLinearMethod(from Identity)" in engines.call(quantise_anew)
