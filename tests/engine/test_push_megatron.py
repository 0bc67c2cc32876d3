"""Pushed equals cold out of Megatron-core: tensor, pipeline and expert parallel trainers into real engines."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import megatron_models
import pytest
import tiny_models
import torch
import torch.distributed as dist
from engines import TIMEOUT_S, Engines, Remote, Trainer, Trainers, assert_same
from megatron_models import Mesh
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync import MegatronBackend, PushReport, WeightSync
from weightsync.errors import ManifestError

pytest_plugins = ["engine_fixtures"]
pytestmark = pytest.mark.engine

MESHES = {
    "qwen3": [Mesh(tp=2), Mesh(pp=2), Mesh(tp=2, pp=2)],
    "qwen3-moe": [Mesh(ep=2)],
}
SERVED = [(model, tp) for model in MESHES for tp in (1, 2)]
PADDING = 5  # to the next multiple of 8


@pytest.fixture(scope="module")
def four_ranks(
    tmp_path_factory: pytest.TempPathFactory, engine_calls: tuple[Connection, Connection]
) -> Iterator[Trainers]:
    ranks = Trainers(4, tmp_path_factory.mktemp("four-trainers"), engine_calls[0])
    yield ranks
    ranks.close()


# ---------------------------------------------------------------------------------------------------------------
# What runs in the trainers' processes


def load(trainer: Trainer, model: str, mesh: Mesh, transport: str, options: dict[str, Any]) -> None:
    trainer.release()
    config = tiny_models.CONFIGS[model]()
    trainer.model = megatron_models.build(config, mesh, torch.bfloat16, PADDING)
    backend = MegatronBackend(vocab_size=options.pop("vocab_size", config.vocab_size))
    trainer.sync = WeightSync(backend, transport, trainer.engine, timeout_s=TIMEOUT_S, **options)


def push(trainer: Trainer, model: str, checkpoint: Path) -> PushReport:
    config = tiny_models.CONFIGS[model]()
    megatron_models.load(trainer.model, config, load_file(checkpoint / "model.safetensors"))
    return trainer.sync.push(trainer.model)


def push_refused(trainer: Trainer, model: str, checkpoint: Path) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        push(trainer, model, checkpoint)
    return caught.value


def lose_layers(trainer: Trainer) -> None:
    if trainer.rank == 1:
        trainer.model[0].decoder.layers = nn.ModuleList()


# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize(("model", "tp"), SERVED, ids=[f"{model}-tp{tp}" for model, tp in SERVED])
def test_pushed_equals_cold(
    engines: Remote, trainers: Trainers, four_ranks: Trainers, model: str, tp: int, transport: str
):
    cold = engines.call(Engines.serve, model, tp, timeout_s=240)
    checkpoints = {weights: engines.call(Engines.checkpoint, model, weights) for weights in "AB"}
    for mesh in MESHES[model]:
        ranks = four_ranks if mesh.tp * mesh.pp == 4 else trainers
        ranks.call(load, model, mesh, transport, {"max_bytes": 1 << 16})
        for weights in "BA":
            *_, report = ranks.call(push, model, checkpoints[weights])
            assert report.chunks > 1
            assert_same(engines.call(Engines.ask), cold[weights], f"{mesh}, {weights}")
        ranks.call(Trainer.release)


def test_what_does_not_fit_is_refused_and_nothing_is_written(engines: Remote, trainers: Trainers):
    cold = engines.call(Engines.serve, "qwen3-moe", 2, timeout_s=240)
    checkpoint = engines.call(Engines.checkpoint, "qwen3-moe", "B")

    # Without `vocab_size` the embedding and the output layer travel with their padding.
    trainers.call(load, "qwen3-moe", Mesh(tp=2), "broadcast", {"vocab_size": None})
    for error in trainers.call(push_refused, "qwen3-moe", checkpoint):
        assert set(error.mismatched) == {"model.embed_tokens.weight", "lm_head.weight"}
        assert "(256, 128)" in str(error)
        assert "vocab_size=" in str(error)

    trainers.call(load, "qwen3-moe", Mesh(pp=2), "broadcast", {})
    trainers.call(lose_layers)
    for error in trainers.call(push_refused, "qwen3-moe", checkpoint):
        assert "The trainer pushes nothing of model.layers.1: it has fewer layers, or a pipeline stage" in str(error)
        assert all(name.startswith("model.layers.1.") for name in error.missing)

    assert_same(engines.call(Engines.ask), cold["A"], "after pushes that were refused")


# ---------------------------------------------------------------------------------------------------------------
# A family that the sender has no names for


class Phi3Bridge:
    """Exports Phi-3's fused tensors from a model under tensor parallelism, gathering each, as mbridge does."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.alive: list[StorageWeakRef] = []
        self.most_alive = 0

    def export_weights(self, models: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        (chunk,) = models
        for name, param in chunk.named_parameters():
            for hf_name, tensor in self.convert(name, self.gather(name, param)):
                # Its values in memory of its own, so that what is kept can be counted.
                tensor = tensor.clone()
                self.alive = [ref for ref in self.alive if not ref.expired()] + [
                    StorageWeakRef(tensor.untyped_storage())
                ]
                self.most_alive = max(self.most_alive, len(self.alive))
                yield hf_name, tensor

    def gather(self, name: str, param: torch.Tensor) -> torch.Tensor:
        if not getattr(param, "tensor_model_parallel", False):
            return param.detach()
        shards = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, param.detach())
        if "linear_fc1" in name:
            halves = [shard.chunk(2) for shard in shards]
            return torch.cat([half[number] for number in (0, 1) for half in halves])
        return torch.cat(shards, param.partition_dim)

    def convert(self, name: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        outer = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
        }
        if name in outer:
            yield outer[name], whole[: self.config.vocab_size]
            return
        _, _, number, rest = name.split(".", 3)
        if rest == "self_attention.linear_qkv.weight":
            heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
            by_group = whole.view(groups, heads // groups + 2, -1, whole.shape[1])
            whole = torch.cat([part.flatten(0, 2) for part in by_group.split([heads // groups, 1, 1], dim=1)])
        inner = {
            "self_attention.linear_qkv.weight": "self_attn.qkv_proj.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        }
        yield f"model.layers.{number}.{inner[rest]}", whole


class Phi3AutoBridge(Phi3Bridge):
    """The same with the face of Megatron-Bridge."""

    def export_hf_weights(self, model: list[nn.Module], cpu: bool, show_progress: bool) -> Iterator[Any]:
        assert not cpu
        assert not show_progress
        return super().export_weights(model)

    export_weights = None  # type: ignore[assignment]


def load_phi3(trainer: Trainer, transport: str, kind: type[Phi3Bridge]) -> None:
    trainer.release()
    config = tiny_models.CONFIGS["phi3"]()
    trainer.model = megatron_models.build(config, Mesh(tp=2), torch.bfloat16, PADDING)
    bridge = kind(config)
    backend = MegatronBackend(bridge)
    trainer.sync = WeightSync(backend, transport, trainer.engine, timeout_s=TIMEOUT_S, max_bytes=1 << 17)
    trainer.bridge = bridge


def push_phi3(trainer: Trainer, checkpoint: Path) -> tuple[PushReport, int]:
    config = tiny_models.CONFIGS["phi3"]()
    state = load_file(checkpoint / "model.safetensors")
    width, kv = config.hidden_size, config.hidden_size // 2
    for name in list(state):
        at, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "qkv_proj":
            for part, tensor in zip("qkv", state[name].split([width, kv, kv]), strict=True):
                state[f"{at}.{part}_proj.weight"] = tensor
        elif kind == "gate_up_proj":
            for part, tensor in zip(("gate", "up"), state[name].chunk(2), strict=True):
                state[f"{at}.{part}_proj.weight"] = tensor
    megatron_models.load(trainer.model, config, state)
    report = trainer.sync.push(trainer.model)
    return report, trainer.bridge.most_alive


@pytest.mark.parametrize(("transport", "kind"), [("ipc", Phi3Bridge), ("broadcast", Phi3AutoBridge)])
def test_a_bridge_exports_what_the_sender_has_no_names_for(
    engines: Remote, trainers: Trainers, transport: str, kind: type[Phi3Bridge]
):
    cold = engines.call(Engines.serve, "phi3", 1, timeout_s=240)
    checkpoints = {weights: engines.call(Engines.checkpoint, "phi3", weights) for weights in "AB"}
    trainers.call(load_phi3, transport, kind)
    for weights in "BAB":
        (report, most_alive), (_, alive_elsewhere) = trainers.call(push_phi3, checkpoints[weights])
        assert report.chunks > 3
        assert most_alive <= 10  # of 15: a bucket and a little of the next
        assert alive_elsewhere <= 2
        assert_same(engines.call(Engines.ask), cold[weights], weights)
