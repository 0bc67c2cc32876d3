"""Engines from W8A16 checkpoints: int8 packed into words, as compressed-tensors calls it `pack-quantized`.

vLLM's kernels for them run on GPUs alone. Here a plain one stands in for these, behind vLLM's own loader and scheme.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from engines import TIMEOUT_S, Answer, Engines, Remote, VllmRemote, assert_same
from torch import nn

from weightsync import WeightSync
from weightsync.planning.layout import Box, Manifest
from weightsync.selection import TensorSelection
from weightsync.sources.fsdp import FsdpSource
from weightsync.worker.checkpoint_quantize import expand, find_pairs, int8_packed, unpacked
from weightsync.worker.trace import trace_loader, uncovered

pytest_plugins = ["engine_fixtures"]

GROUP = {"channel": None, "group": 32}
KIND = "CompressedTensorsLinearMethod/CompressedTensorsWNA16(8 bit, {})"


def save(strategy: str, weights: str, folder: Path) -> nn.Module:
    """A checkpoint as llm-compressor's `QuantizationModifier(scheme="W8A16")` writes it. Gives the model."""
    from safetensors.torch import save_file

    model = tiny_models.build("qwen2", weights)
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = tensors.pop(f"{name}.weight")
            made = int8_packed(weight, GROUP[strategy] or weight.shape[1])  # test_eight_bit.py: as compressed-tensors
            for key, tensor in zip(("packed", "scale", "shape"), made, strict=True):
                tensors[f"{name}.weight_{key}"] = tensor.contiguous()
    how = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    how |= {"strategy": strategy, "group_size": GROUP[strategy]}
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": how}},
        },
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return model


def add_kernel() -> None:
    """One that keeps words and scales transposed, as Machete and Marlin do in their way."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.platforms import PlatformEnum

    class PlainLinearKernel(linear.MPLinearKernel):
        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return c.weight_type.size_bits == 8, "for 8 bits alone"

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            for name in (self.w_q_name, self.w_s_name):
                self._transform_param(layer, name, lambda param: param.data.t().contiguous())

        def apply_weights(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            words, scale, *_ = self._get_weight_params(layer)
            values = torch.stack([(words >> 8 * n & 255) - 128 for n in range(4)], dim=1).flatten(0, 1)
            weight = (values.unflatten(0, (len(scale), -1)) * scale.unsqueeze(1)).flatten(0, 1)
            out = x @ weight.to(x.dtype)
            return out if bias is None else out + bias

    if not any(kernel.__name__ == "PlainLinearKernel" for kernel in linear._POSSIBLE_KERNELS[PlatformEnum.CPU]):
        linear.register_linear_kernel(PlainLinearKernel, PlatformEnum.CPU, "mp")


# ---------------------------------------------------------------------------------------------------------------
# Plans


class Planner:
    """Lives in a process of its own, which imports vLLM."""

    connections = ()

    def plan(self, strategy: str, folder: Path, tp: int) -> list[tuple[set[str], dict[str, Any]]]:
        """By rank: the trainer's tensors that become others, and what arrives in layer 0, by tensor as (parameter,
        regions of the tensor)."""
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs

        from weightsync.vllm import plan_offline
        from weightsync.vllm.pristine import build_on_meta, fresh_config

        add_kernel()
        trained = save(strategy, "A", folder)
        manifest = FsdpSource(TensorSelection()).read(trained).manifest
        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True, tensor_parallel_size=tp
        ).create_engine_config()
        found = []
        with set_current_vllm_config(config), plan_offline._alone() as become:
            for rank in range(tp):
                become(rank, tp)
                found.append(
                    self._plan_of(
                        build_on_meta(fresh_config(config), config.model_config, torch.device("cpu")), manifest
                    )
                )
        return found

    def _plan_of(self, model: Any, manifest: Manifest) -> tuple[set[str], dict[str, Any]]:
        before = dict(model.named_parameters()).keys()
        with unpacked(model):
            pairs, unfit = find_pairs(model, manifest, trace_loader(model, model.load_weights, manifest))
        trace = trace_loader(model, model.load_weights, expand(manifest, pairs))
        assert dict(model.named_parameters()).keys() == before
        assert [unfit, trace.refused, trace.unknown, trace.computed] == [{}, {}, [], {}]
        assert {copy.name for copy in trace.copies} == {meta.name for meta in expand(manifest, pairs)}
        assert uncovered(model, trace) == ({}, {})
        landed: dict[str, Any] = {}
        for copy in trace.copies:
            if ".0." in copy.name:
                landed.setdefault(copy.name.partition(".0.")[2], (copy.param.partition(".0.")[2], []))[1].append(
                    copy.box
                )
        return set(pairs), landed

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def planner() -> Iterator[Remote]:
    remote = VllmRemote(Planner)
    yield remote
    remote.close()


@pytest.mark.engine
@pytest.mark.parametrize("strategy", GROUP)
@pytest.mark.parametrize("tp", [1, 2])
def test_which_tensors_are_packed_and_how_workers_cut_them(planner: Remote, strategy: str, tp: int, tmp_path: Path):
    plans = planner.call(Planner.plan, strategy, tmp_path / "model", tp)
    for rank, (packed, landed) in enumerate(plans):
        assert len(packed) == 2 * 7
        assert {name.rpartition(".")[2] for name in packed} == {"weight"}
        for name, param in [("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj")]:
            for key in ("weight_packed", "weight_scale", "weight_shape"):
                assert landed[f"self_attn.{name}.{key}"][0] == f"self_attn.{param}.{key}"
        # Row parallel, 128 by 128: a scale for a row belongs to all of it.
        columns = 128 // tp
        assert landed["self_attn.o_proj.weight_packed"][1] == [Box((0, rank * columns // 4), (128, columns // 4))]
        scales = (
            Box((0, 0), (128, 1)) if strategy == "channel" else Box((0, rank * columns // 32), (128, columns // 32))
        )
        assert landed["self_attn.o_proj.weight_scale"][1] == [scales]
        rows = 128 // tp
        groups = 1 if strategy == "channel" else 4
        assert landed["self_attn.q_proj.weight_scale"][1] == [Box((rank * rows, 0), (rows, groups))]


# ---------------------------------------------------------------------------------------------------------------
# An engine. These functions run in its process.


def serve(engines: Engines, strategy: str) -> dict[str, Answer]:
    add_kernel()
    engines.save(f"W8A16-{strategy}", partial(save, strategy))
    return engines.serve(f"W8A16-{strategy}")


def push_and_compare(engines: Engines, strategy: str) -> None:
    from weightsync.vllm import supported_quant

    cold = serve(engines, strategy)
    assert cold["A"] != cold["B"]
    before = [(name, param.data_ptr()) for name, param in engines.live_model().named_parameters()]
    engines.model = tiny_models.build("qwen2", "A")
    with mock.patch.dict(supported_quant.PROVEN, {KIND.format(strategy): ("cpu",)}):
        for transport, options in [("ipc", {"bucketer": "parameter"}), ("broadcast", {"max_bytes": 1 << 30})]:
            with WeightSync("fsdp", transport, engines.llm, timeout_s=TIMEOUT_S, **options) as sync:
                for weights in "BBA":
                    tiny_models.fill(engines.model, weights)
                    assert sync.push(engines.model).load_paths["native_loader"] == 8
                    assert_same(engines.ask(), cold[weights], f"push of {weights} over {transport}")
    assert [(name, param.data_ptr()) for name, param in engines.live_model().named_parameters()] == before


@pytest.mark.engine
@pytest.mark.parametrize("strategy", GROUP)
def test_pushed_equals_cold(engines: Remote, strategy: str):
    engines.call(push_and_compare, strategy, timeout_s=240)


def refusal(engines: Engines) -> str:
    from types import SimpleNamespace

    from weightsync import UnsupportedError
    from weightsync.vllm import supported_quant

    (layer,) = [module for name, module in engines.live_model().named_modules() if name.endswith("0.mlp.down_proj")]
    config = engines.llm.llm_engine.vllm_config.quant_config
    said = []
    for traits in ({"num_bits": 4}, {"symmetric": False}, {"has_g_idx": True}):
        scheme = type("CompressedTensorsWNA16", (SimpleNamespace,), {})(**vars(layer.scheme) | traits)
        with mock.patch.object(layer, "scheme", scheme), pytest.raises(UnsupportedError) as raised:
            supported_quant.check(layer, config, torch.device("cuda"))
        said.append(str(raised.value))
    return "\n".join(said)


@pytest.mark.engine
def test_what_is_packed_otherwise_is_refused(engines: Remote):
    engines.call(serve, "group", timeout_s=240)
    said = engines.call(refusal)
    for words in ("WNA16(4 bit, group)", "WNA16(8 bit, group, asymmetric)", "WNA16(8 bit, group, g_idx)"):
        assert words in said
