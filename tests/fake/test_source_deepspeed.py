"""The DeepSpeed sender: real DeepSpeed over gloo, its pieces compared with what DeepSpeed gathers, bit by bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
import zero
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from test_lora import merged, wrapped
from torch import nn

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.selection import TensorSelection
from weightsync.sources import open_source
from weightsync.sources.base import ShardSource
from weightsync.sources.deepspeed import held_range
from weightsync.sources.fsdp import FsdpSource
from weightsync.tools.testing import check_source

SMALL = 6
"""Up to so many elements of a parameter persist on every rank: of `Net` the gains and the biases of `down`."""


class Block(nn.Module):
    """Sizes that two ranks cannot share evenly, a parameter of one element, of which the second rank has none, a frozen
    one, both kinds of buffer, and a submodule that really is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.module = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.rand(1))
        self.frozen = nn.Parameter(torch.rand(3, 5), requires_grad=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.module(torch.relu(self.up(x))) * self.gain + self.frozen.sum(0)


class Net(nn.Module):
    """Embeddings that are tied, in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(7)
    return Net()


def make(selection: TensorSelection) -> ShardSource:
    return open_source("deepspeed", selection)


def train(engine: Any, steps: int = 1, after_step: Callable[[], object] = lambda: None) -> list[float]:
    """Optimizer steps on other data on each rank; gives the losses."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = engine(torch.randint(9, (2, 4), generator=draw)).float().square().mean()
        engine.backward(loss)
        engine.step()
        after_step()
        losses.append(loss.item())
    return losses


@contextmanager
def started(settings: dict[str, Any], model: nn.Module | None = None) -> Iterator[Any]:
    engine = zero.initialize(net() if model is None else model, settings)
    yield engine
    engine.destroy()


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Collective. The float32 weights that the optimizer updates, of the parameters that have some."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    return {name: master for name, master in found.items() if master is not None}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or hasattr(a, "__dict__"))


# --- What runs on two ranks


def pieces_are_the_model(settings: dict[str, Any], dtype: str) -> None:
    """As built, and after steps, of the engine and of its module; and they are the masters in the model's dtype."""
    stage = settings["zero_optimization"]["stage"]
    with started(settings) as engine:
        before = zero.gathered(engine)
        assert list(before)[:2] == ["embed.weight", "blocks.0.gain"]
        assert "head.weight" not in before
        assert before["embed.weight"].dtype == zero.DTYPES[dtype]
        check_source(make, engine, before)
        train(engine, 2)
        after = zero.gathered(engine)
        assert not torch.equal(before["embed.weight"], after["embed.weight"])
        assert torch.equal(before["blocks.0.frozen"], after["blocks.0.frozen"])
        check_source(make, engine, after)
        check_source(make, engine.module, after)
        trained = masters(engine) if stage else {}
        assert bool(trained) == bool(stage)
        for name, master in trained.items():
            assert torch.equal(master.to(after[name].dtype), after[name]), f"{name} is not what the optimizer made"


def small_parameters_that_persist_are_read_where_they_are_partitioned() -> None:
    with started(zero.config(3, param_persistence_threshold=SMALL)) as engine:
        train(engine)
        gain = engine.module.blocks[0].gain
        assert gain.ds_persist
        assert gain.ds_status.name == "AVAILABLE"
        shards = make(TensorSelection()).read(engine).shards
        held = [piece.tensor.data_ptr() for piece in shards if piece.meta.name == "blocks.0.gain"]
        assert held == ([gain.ds_tensor.data_ptr()] if dist.get_rank() == 0 else [])
        check_source(make, engine, zero.gathered(engine))


def every_piece_is_a_view_of_a_partition_and_stays_where_it_is() -> None:
    with started(zero.config(3)) as engine:
        train(engine)
        first = make(TensorSelection(buffers=False)).read(engine).shards
        partitions = {
            param.ds_tensor.untyped_storage().data_ptr(): param.ds_tensor for param in engine.module.parameters()
        }
        assert {piece.tensor.untyped_storage().data_ptr() for piece in first} <= partitions.keys()
        train(engine)
        again = make(TensorSelection(buffers=False)).read(engine).shards
        assert [piece.tensor.data_ptr() for piece in first] == [piece.tensor.data_ptr() for piece in again]


def gathered_for_a_forward() -> None:
    """Between forward and backward, and after a forward that none follows, some parameters are whole."""
    with started(zero.config(3)) as engine:
        train(engine, 2)
        expected = zero.gathered(engine)
        loss = engine(torch.zeros(1, 2, dtype=torch.long)).float().sum()
        assert any(param.ds_status.name == "AVAILABLE" for param in engine.module.parameters())
        check_source(make, engine, expected)
        engine.backward(loss)
        check_source(make, engine, expected)
        engine.step()
        with torch.no_grad():
            engine(torch.zeros(1, 2, dtype=torch.long))
        check_source(make, engine, zero.gathered(engine))


def gathered_by_the_user() -> None:
    with started(zero.config(3)) as engine:
        deepspeed, head = zero.prepare(), engine.module.blocks[0].up.weight
        with deepspeed.zero.GatheredParameters([head], modifier_rank=0):
            head.data.fill_(dist.get_rank() + 2)
            with pytest.raises(UnsupportedError, match=r"blocks\.0\.up\.weight: .*GatheredParameters") as caught:
                make(TensorSelection()).read(engine)
            assert list(caught.value.tensors) == ["blocks.0.up.weight"]
        expected = zero.gathered(engine)
        assert bool((expected["blocks.0.up.weight"] == 2).all())
        check_source(make, engine, expected)


def built_in_partitions() -> None:
    """Under `zero.Init` the parameters are partitioned as soon as they exist."""
    settings = zero.config(3)
    with zero.prepare().zero.Init(config_dict_or_path=settings), started(settings, net()) as engine:
        check_source(make, engine, zero.gathered(engine))
        train(engine)
        check_source(make, engine, zero.gathered(engine))


def partitioned_beside_plain() -> None:
    """Only a part of the model is partitioned, over a group of its own, and no engine is there."""
    deepspeed, model = zero.prepare(), net()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    settings = zero.config(3)
    deepspeed.zero.Init(module=model.blocks[0], config_dict_or_path=settings, dtype=torch.float32)
    deepspeed.zero.Init(
        module=model.blocks[1], config_dict_or_path=settings, dtype=torch.float32, data_parallel_group=alone
    )
    expected = zero.gathered(model)
    assert len(expected) == len(dict(net().state_dict())) - 1
    check_source(make, model, expected)
    sizes = {piece.meta.name: piece.box.numel for piece in make(TensorSelection()).read(model).shards}
    assert sizes["embed.weight"] == 45
    assert sizes["blocks.1.up.bias"] == 7
    assert sizes["blocks.0.up.bias"] == 4 - dist.get_rank()


def secondary_partitions_are_copies() -> None:
    with started(zero.config(3, zero_hpz_partition_size=2)) as engine:
        with torch.no_grad():
            engine(torch.zeros(1, 2, dtype=torch.long))
        assert any(param.ds_secondary_tensor is not None for param in engine.module.parameters())
        check_source(make, engine, zero.gathered(engine))
        train(engine)
        check_source(make, engine, zero.gathered(engine))


def master_weights_in_the_models_dtype() -> None:
    """ZeRO-1 with gradients accumulated in float32 has an optimizer of its own."""
    settings = zero.config(1) | {"data_types": {"grad_accum_dtype": "fp32"}}
    pieces_are_the_model(settings, "bf16")


def computed_in_another_dtype() -> None:
    """Under DeepSpeed's autocast the parameters stay in float32, and are gathered in bfloat16."""
    for stage in (1, 3):
        settings = zero.config(stage, "fp32") | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        pieces_are_the_model(settings, "fp32")


def a_tied_transformers_model() -> None:
    expected = tiny_models.build("qwen3-tied", "A")
    for stage in (1, 3):
        model = tiny_models.build("qwen3-tied", "A")
        with started(
            zero.config(stage, param_persistence_threshold=200), torch.compile(model, backend="eager")
        ) as engine:
            state = zero.gathered(model)
            assert state.keys() == dict(expected.named_parameters()).keys()
            assert all(torch.equal(state[name], param) for name, param in expected.named_parameters())
            check_source(make, engine, state)


def fused_experts() -> None:
    """A rank's interval of a fused parameter begins and ends within an expert. A checkpoint has a tensor for each."""
    plain = tiny_models.build("qwen3-moe", "A")
    expected = {shard.meta.name: shard.tensor for shard in FsdpSource(TensorSelection()).read(plain).shards}
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in expected
    for stage in (1, 3):
        with started(zero.config(stage, param_persistence_threshold=0), tiny_models.build("qwen3-moe", "A")) as engine:
            check_source(make, engine, expected)


def adapters_are_merged(kind: str, settings: dict[str, Any], **options: Any) -> None:
    """As built and after a step, as PEFT merges a copy of the whole; and DeepSpeed's own state is as it was."""
    engine, plain = zero.initialize(wrapped(kind, **options), settings), wrapped(kind, **options)
    found = []
    for _ in range(2):
        plain.load_state_dict(zero.gathered(engine), strict=False)
        found.append(merged(plain))
        statuses = [getattr(param, "ds_status", None) for param in engine.module.parameters()]
        check_source(make, engine, found[-1])
        assert [getattr(param, "ds_status", None) for param in engine.module.parameters()] == statuses
        tokens = torch.arange(24).view(2, 12) * (dist.get_rank() + 3) % 251
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    assert not equal(*found), "a step changed nothing"
    assert {name for name in found[0] if not torch.equal(found[0][name], found[1][name])} == {
        shard.meta.name for shard in make(TensorSelection()).read(engine).shards if shard.trains
    }
    engine.destroy()


def trains_on(settings: dict[str, Any]) -> None:
    """A run whose weights are read after every step ends as one that was left alone, bit by bit."""

    def read_all(engine: Any) -> None:
        source = make(TensorSelection())
        for piece in source.read(engine).shards:
            piece.tensor.clone()

    ends = []
    for after_step in (read_all, lambda engine: None):
        with started(settings) as engine:
            losses = train(engine, 4, partial(after_step, engine))
            statuses = [getattr(param, "ds_status", None) for param in engine.module.parameters()]
            states = [state for _, state in engine.optimizer.optimizer.state.items()]
            ends.append(copy.deepcopy([losses, zero.gathered(engine), masters(engine), states, statuses]))
    disturbed, alone = ends
    assert len(set(alone[0])) == 4, "the model does not learn, so this shows nothing"
    assert alone[3], "there is no optimizer state, so this shows nothing"
    for what, found, expected in zip(
        ("losses", "weights", "masters", "states", "statuses"), disturbed, alone, strict=True
    ):
        assert equal(found, expected), what


# --- What is refused


def adapters_that_cannot_be_read() -> None:
    with started(zero.config(3), wrapped("linear")) as engine:
        q, v = (
            getattr(engine.module.base_model.model.model.layers[1].self_attn, name) for name in ("q_proj", "v_proj")
        )
        v.lora_A["default"].weight.ds_tensor.final_location = "nvme"
        with (
            zero.prepare().zero.GatheredParameters([q.lora_B["default"].weight], modifier_rank=0),
            pytest.raises(UnsupportedError) as caught,
        ):
            make(TensorSelection()).read(engine)
        found = {name.removeprefix("model.layers.1.self_attn."): why for name, why in caught.value.tensors.items()}
        assert found.keys() == {"q_proj.weight", "v_proj.weight"}
        assert found["q_proj.weight"].startswith("of a factor of its adapter 'default': it is gathered and may change")
        assert "NVMe" in found["v_proj.weight"]


def on_nvme_or_quantised_or_of_another_partitioning() -> None:
    """None of these can be had here: NVMe and quantisers are compiled, and MiCS has gone from DeepSpeed."""
    with started(zero.config(3)) as engine:
        block = engine.module.blocks[0]
        block.up.weight.ds_tensor.final_location = "nvme"
        block.up.bias.ds_tensor.ds_quant_scale = torch.ones(1)
        block.frozen.ds_tensor = copy.copy(block.frozen.ds_tensor)
        whole = torch.zeros(15)
        whole.status, whole.final_location = block.up.weight.ds_tensor.status, None
        block.frozen.ds_tensor = whole
        block.gain.weight_quantized = True
        with pytest.raises(UnsupportedError) as caught:
            make(TensorSelection()).read(engine)
        found = caught.value.tensors
        assert found.keys() == {f"blocks.0.{name}" for name in ("up.weight", "up.bias", "frozen", "gain")}
        assert "NVMe" in found["blocks.0.up.weight"]
        assert "zero_quantized_nontrainable_weights" in found["blocks.0.up.bias"]
        assert "expected 8 elements" in found["blocks.0.frozen"]
        assert "quantized_initialization" in found["blocks.0.gain"]
        rest = make(TensorSelection(exclude=("blocks.0.*",)))
        assert "blocks.1.gain" in rest.read(engine).manifest.names


def experts_of_deepspeed() -> None:
    zero.prepare()
    from deepspeed.moe.layer import MoE

    model = nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2))
    with pytest.raises(UnsupportedError, match="MoE") as caught:
        make(TensorSelection()).read(model)
    assert len(caught.value.tensors) == 2
    assert all("experts" in name for name in caught.value.tensors)


def cut_by_autotp() -> None:
    model = tiny_models.build("qwen3", "A")
    settings = zero.config(1) | {"tensor_parallel": {"autotp_size": 2}}
    with started(settings, model) as engine, pytest.raises(UnsupportedError, match="AutoTP") as caught:
        make(TensorSelection()).read(engine)
    assert "model.layers.0.self_attn.q_proj.weight" in caught.value.tensors
    assert "model.norm.weight" not in caught.value.tensors


def a_pipeline() -> None:
    deepspeed = zero.prepare()
    model = deepspeed.PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2)
    with pytest.raises(UnsupportedError, match="PipelineModule"):
        make(TensorSelection()).read(model)


def the_sender_of_another_backend() -> None:
    with (
        started(zero.config(3)) as engine,
        pytest.raises(UnsupportedError, match=r'embed\.weight, .* more: .*backend="deepspeed"'),
    ):
        open_source("fsdp", TensorSelection()).read(engine)


OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
CASES: dict[str, tuple[Callable[[], None], ...]] = {
    "stages": (
        *(
            partial(pieces_are_the_model, zero.config(stage, dtype, param_persistence_threshold=SMALL), dtype)
            for stage in range(4)
            for dtype in zero.DTYPES
        ),
        *(
            partial(pieces_are_the_model, zero.config(stage, overlap_comm=True, **OFFLOADED), "bf16")
            for stage in (1, 2, 3)
        ),
        partial(pieces_are_the_model, zero.config(3, param_persistence_threshold=0), "bf16"),
        partial(pieces_are_the_model, zero.config(3, param_persistence_threshold=1000), "bf16"),
        partial(pieces_are_the_model, zero.config(3, offload_param={"device": "cpu"}), "bf16"),
        master_weights_in_the_models_dtype,
        computed_in_another_dtype,
    ),
    "states": (
        small_parameters_that_persist_are_read_where_they_are_partitioned,
        every_piece_is_a_view_of_a_partition_and_stays_where_it_is,
        gathered_for_a_forward,
        gathered_by_the_user,
        built_in_partitions,
        partitioned_beside_plain,
        secondary_partitions_are_copies,
        a_tied_transformers_model,
        fused_experts,
        *(partial(trains_on, zero.config(stage, param_persistence_threshold=SMALL)) for stage in (1, 2, 3)),
        partial(trains_on, zero.config(3, "fp16", overlap_comm=True, **OFFLOADED)),
        *(partial(adapters_are_merged, kind, zero.config(3)) for kind in ("all of these", "rslora")),
        *(partial(adapters_are_merged, "all of these", zero.config(stage)) for stage in (1, 2)),
        partial(
            adapters_are_merged,
            "all of these",
            zero.config(3, "fp32", param_persistence_threshold=0),
            dtype=torch.float32,
        ),
        partial(adapters_are_merged, "embedding", zero.config(3, "fp32"), autocast=True),  # factors in float32
        partial(adapters_are_merged, "linear", zero.config(3, param_persistence_threshold=0, **OFFLOADED)),
        adapters_that_cannot_be_read,
        on_nvme_or_quantised_or_of_another_partitioning,
        the_sender_of_another_backend,
        experts_of_deepspeed,
        a_pipeline,
        cut_by_autotp,
    ),
}


def run_cases(rank: int, kind: str) -> None:
    warnings.simplefilter("ignore")  # DeepSpeed calls what torch has deprecated
    for case in CASES[kind]:
        try:
            case()
        except BaseException as error:
            raise AssertionError(f"in {case}") from error
        dist.barrier()


@pytest.mark.parametrize("kind", CASES)
def test_pieces_of_all_ranks_are_the_model(kind: str) -> None:
    run_ranks(run_cases, 2, kind, timeout_s=240)


# --- No process group needed


def test_a_plain_module_needs_no_deepspeed() -> None:
    model = net()
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    check_source(make, model, expected)


@given(st.integers(0, 40), st.integers(1, 9))
def test_partitions_are_cut_as_deepspeed_cuts(numel: int, world: int) -> None:
    partitions = torch.arange(numel + -numel % world).view(world, -1)
    for rank, partition in enumerate(partitions):
        start, stop, padded = held_range(numel, world, rank)
        assert padded == len(partition)
        assert list(range(start, stop)) == [element for element in partition.tolist() if element < numel]


def test_several_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="list of length 2"):
        make(TensorSelection()).read([net(), net()])
