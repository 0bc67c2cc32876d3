"""Weights that travel in 8 bits: what the ranks send is what quantising the whole weights gives, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
import torch.distributed as dist
import zero
from engines import TIMEOUT_S, Trainer, Trainers
from fake_engine import FakeEngine, ModuleHost, give
from megatron_models import Mesh, build, checkpoint, hf_config, load
from ranks import assert_in_step, no_barrier
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

from weightsync import ConfigError, ManifestError, TensorSelection, UnsupportedError, WeightSync, WeightSyncError
from weightsync.net.update import Update
from weightsync.sources import open_source
from weightsync.sources.base import ShardSource
from weightsync.sources.edits import region
from weightsync.sources.megatron import MegatronBackend
from weightsync.sources.quantize import FORMS, QuantizingSource
from weightsync.strategies import rank_max
from weightsync.tools.testing import check_source
from weightsync.tools.testing.assertions import same_bytes

pytest_plugins = ["engine_fixtures"]

BOTH = pytest.mark.parametrize("form", FORMS)
State = dict[str, torch.Tensor]


class Block(nn.Module):
    """Rows that two ranks cannot share evenly, or not without cutting one."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 7)
        self.down_proj = nn.Linear(7, 6, bias=False)
        self.gate = nn.Linear(6, 3, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(self.q_proj(self.norm(x))) + self.gate(x).sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(6, 9, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


QUANTIZED = {f"layers.{n}.{part}_proj.weight" for n in (0, 1) for part in ("q", "down")}


def net(dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(7)
    return Net().to(dtype)


def quantized(state: State, form: str, selection: TensorSelection | None = None) -> State:
    """What travels of a model with these tensors. Those in float32 are quantised as an engine in bfloat16 would."""
    found: State = {}
    for name, tensor in state.items():
        found[name] = tensor
        if tensor.dim() == 2 and (selection or TensorSelection()).quantizes(name):
            found[name], found[f"{name}_scale"] = FORMS[form](tensor.bfloat16())
    return found


def make(backend: Any, form: str, selection: TensorSelection) -> ShardSource:
    inner = open_source(backend, selection)
    return QuantizingSource(inner, form, selection, largest_of_the_job)


def largest_of_the_job(values: torch.Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)


def state_of(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# --- Each backend


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_plain_module(form: str, dtype: torch.dtype) -> None:
    model = net(dtype)
    expected = quantized(state_of(model), form)
    assert {name.removesuffix("_scale") for name in expected if name.endswith("_scale")} == QUANTIZED
    check_source(partial(make, "fsdp", form), model, expected)


def check_fsdp(_: object, form: str) -> None:
    state = state_of(net())
    by_row = fully_shard(net())
    by_column = fully_shard(net(), shard_placement_fn=lambda p: Shard(p.ndim - 1 if p.shape[-1] % 2 == 0 else 0))
    flat = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    for model in (by_row, by_column, flat):
        check_source(partial(make, "fsdp", form), model, quantized(state, form))
    held = [box for name, box in boxes(make("fsdp", form, TensorSelection()), by_column) if name in QUANTIZED]
    assert any(box.size[1] == 3 for box in held), "no rows are cut: this shows nothing"


def check_zero_3(_: object, form: str) -> None:
    engine = zero.initialize(net(), zero.config(3))
    try:
        check_source(partial(make, "deepspeed", form), engine, quantized(zero.gathered(engine), form))
        held = [box for name, box in boxes(make("deepspeed", form, TensorSelection()), engine) if name in QUANTIZED]
        assert any(box.size[1] not in (6, 7) for box in held), "no rows are cut: this shows nothing"
    finally:
        engine.destroy()


def check_megatron(_: object, folder: Path, form: str) -> None:
    """The row-parallel layers are cut by columns, those of experts too; a pipeline stage knows half of the names."""
    from transformers import AutoModelForCausalLM

    meshes = {"qwen3": Mesh(tp=2), "qwen3_moe": Mesh(tp=2, etp=2), "llama": Mesh(pp=2)}
    for family, mesh in meshes.items():
        config = hf_config(family)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tiny_models.fill(hf, "A")
        state = checkpoint(hf, folder)
        chunks = build(config, mesh, torch.bfloat16, padding=5)
        load(chunks, config, state)
        expected = quantized(state, form)
        assert 0 < sum(name.endswith("weight_scale") for name in expected) < len(expected) / 2
        assert not any("gate.weight_scale" in name or "embed" in name for name in expected if "_scale" in name)
        backend = MegatronBackend(vocab_size=config.vocab_size)
        if mesh.pp == 1:
            check_source(partial(make, backend, form), chunks, expected)
        else:
            check_values(make(backend, form, TensorSelection()), chunks, expected)


def boxes(source: ShardSource, model: Any) -> list[tuple[str, Any]]:
    return [(piece.meta.name, piece.box) for piece in source.read(model).shards]


def check_values(source: ShardSource, model: Any, expected: State) -> None:
    """Collective: the pieces of every rank are regions of what is expected, gathered in two buckets."""
    shards = source.read(model).shards
    names = list(expected)
    compared = 0
    for bucket in (names[:20], names[20:]):
        source.gather(bucket, no_barrier)
        for piece in shards:
            if piece.meta.name in bucket:
                values = piece.tensor if piece.compute is None else piece.compute()
                assert same_bytes(values, expected[piece.meta.name][region(piece.box)]), piece.meta.name
                compared += 1
    assert 0 < compared == len(shards)


def test_shards_of_fsdp(trainers: Trainers) -> None:
    for form in FORMS:
        trainers.call(check_fsdp, form)


def test_partitions_of_zero_3(trainers: Trainers) -> None:
    for form in FORMS:
        trainers.call(check_zero_3, form)


def test_shards_of_megatron(trainers: Trainers, tmp_path: Path) -> None:
    for form in FORMS:
        trainers.call(check_megatron, tmp_path, form)


# --- Policies


@BOTH
def test_what_the_policy_names_travels_as_it_is(form: str) -> None:
    selection = TensorSelection(unquantized=("*embed*", "lm_head.weight", "layers.0.*"), exclude=("layers.1.norm.*",))
    source = make("fsdp", form, selection)
    state = {name: tensor for name, tensor in state_of(net()).items() if not selection.excludes(name)}
    expected = quantized(state, form, selection)
    assert "layers.1.gate.weight_scale" in expected
    assert list(source.read(net()).manifest.names) == list(expected)
    check_values(source, net(), expected)


def test_float32_can_be_quantised_as_it_is() -> None:
    model = net(torch.float32)
    expected = quantized(state_of(model), "fp8")
    rounded = expected["layers.0.q_proj.weight_scale"]
    for name in QUANTIZED:
        expected[name], expected[f"{name}_scale"] = FORMS["fp8"](state_of(model)[name])
    assert not same_bytes(expected["layers.0.q_proj.weight_scale"], rounded)
    check_values(make("fsdp", "fp8", TensorSelection(dtypes={"*_proj.weight": "float32"})), model, expected)


def test_a_weight_that_is_no_floating_point_number_is_refused() -> None:
    model = net()
    model.layers[0].q_proj.weight = nn.Parameter(torch.ones(7, 6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"1 weights cannot be quantised.*\n  layers.0.q_proj.weight: int8") as e:
        make("fsdp", "int8", TensorSelection()).read(model)
    assert list(e.value.tensors) == ["layers.0.q_proj.weight"]
    with pytest.raises(UnsupportedError, match="from float8_e4m3fn"):
        make("fsdp", "fp8", TensorSelection(dtypes={"*": "float8_e4m3fn"})).read(net())


@pytest.mark.parametrize("form", ["fp8_per_tensor", "fp8_per_block", "int4", ""])
def test_other_forms_are_refused_at_once(form: str) -> None:
    with pytest.raises(ConfigError, match="choose one of fp8, int8, with a scale for"):
        WeightSync("fsdp", quantize=form)


# --- Pushes, to an engine without vLLM


class QuantizedNet(nn.Module):
    """`Net` as an engine has it that was started from a quantised checkpoint: with these tensors."""

    def __init__(self, shapes: State) -> None:
        super().__init__()
        empty = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in shapes.items()}
        give(self, {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in empty.items()})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def zeros(state: State) -> State:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def engine_of(state: State) -> FakeEngine:
    return FakeEngine(ModuleHost(partial(QuantizedNet, state), zeros(state)))


def check_live(engine: FakeEngine, expected: State) -> None:
    live = engine.hosts[0].live.state_dict()
    assert live.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bytes(live[name], tensor), name


def check_pushes(trainer: Trainer, form: str, transport: str) -> None:
    """Collective: every trainer rank calls this. Pushes of weights whose rows are cut; an engine joins for the last."""
    model = fully_shard(net(), shard_placement_fn=lambda p: Shard(p.ndim - 1 if p.shape[-1] % 2 == 0 else 0))
    start = quantized(state_of(net()), form)
    with closing(engine_of(start)) as engine, closing(engine_of(start)) as late:
        sync = WeightSync("fsdp", transport, engine, quantize=form, max_bytes=1, timeout_s=TIMEOUT_S)
        for factor in (1, 3, 2):
            if factor == 2 and trainer.rank == 0:
                sync.engines.add(late)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(factor)
            report = sync.push(model)
            whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
            expected = quantized(whole, form)
            assert report.nbytes == sum(tensor.nbytes for tensor in expected.values())
            assert report.chunks > 2
            if trainer.rank == 0:
                check_live(engine, expected)
        if trainer.rank == 0:
            check_live(late, expected)
        sync.close()


@BOTH
def test_pushes_from_two_ranks(trainers: Trainers, form: str) -> None:
    for transport in ("ipc", "broadcast"):
        trainers.call(check_pushes, form, transport)


def check_failure(trainer: Trainer) -> None:
    """Collective: every trainer rank calls this."""
    model = fully_shard(net(), shard_placement_fn=lambda p: Shard(p.ndim - 1 if p.shape[-1] % 2 == 0 else 0))
    with closing(engine_of(quantized(state_of(net()), "fp8"))) as engine:
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", max_bytes=64, timeout_s=TIMEOUT_S)
        source: Any = sync._strategy._source
        # The first is called by shards that were read before, so that it must be replaced before these are.
        for owner, name in ((source, "_values_of"), (source, "_read"), (source._source, "gather")):
            # Meanwhile the other rank waits in a collective.
            fails = mock.Mock(side_effect=lambda *_: time.sleep(0.3) or 1 / 0)
            broken = mock.patch.object(owner, name, fails) if trainer.rank == 1 else nullcontext()
            with broken, pytest.raises(WeightSyncError, match="division by zero"):
                sync.push(model)
            assert_in_step()
            sync.push(model)
        if trainer.rank == 0:
            check_live(engine, quantized(state_of(net()), "fp8"))
        sync.close()


def test_a_rank_is_waited_for_as_long_as_it_may_wait_for_a_worker() -> None:
    """Else the others would name the rank, and not the worker that holds it up."""
    ranks = mock.Mock(size=2, rank=0, broadcast=lambda value, *_: value)
    ranks.gather.return_value = [[1.0], [2.0 + 2**-20]]
    update = Update(ranks, 4.0)
    search = rank_max.RankMax(None, time.sleep)
    search.connect(update, on_gpu=False)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # a trainer's own, and too coarse for these numbers
        search(values := torch.zeros(1, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert values.tolist() == [2.0 + 2**-20]
    deadline = ranks.gather.call_args.args[4]
    assert deadline.timeout_s == update.deadline_after_workers().timeout_s > update.timeout_s


def test_a_rank_that_fails_leaves_the_jobs_collectives_in_step(trainers: Trainers) -> None:
    trainers.call(check_failure)


def test_what_moves_in_memory_is_still_read() -> None:
    """The trainer's tensors are not where they were, and nothing else has changed."""
    model = net()
    with closing(engine_of(quantized(state_of(model), "fp8"))) as engine:
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", timeout_s=TIMEOUT_S)
        sync.push(model)
        for param in model.parameters():
            param.data = param.data * 2
        sync.push(model)
        check_live(engine, quantized(state_of(model), "fp8"))
        sync.close()


def test_a_frozen_weight_stays_with_its_scales() -> None:
    model = net()
    with closing(engine_of(quantized(state_of(model), "fp8"))) as engine:
        selection = TensorSelection(frozen=("layers.0.*", "layers.1.q_proj.weight"))
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", selection=selection, timeout_s=TIMEOUT_S)
        first, second = sync.push(model).nbytes, sync.push(model).nbytes
        expected = quantized(state_of(model), "fp8")
        assert first - second == sum(t.nbytes for name, t in expected.items() if name.startswith("layers.0."))
        sync.close()


def test_a_dtype_of_scales_is_told_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    dtypes = {"*_scale": "bfloat16", "*.q_proj.weight": "float32"}
    expected = quantized(state_of(model), "fp8", TensorSelection(dtypes=dtypes))
    with closing(engine_of(expected)) as engine:
        selection = TensorSelection(dtypes=dtypes)
        with WeightSync("fsdp", "ipc", engine, quantize="fp8", selection=selection, timeout_s=TIMEOUT_S) as sync:
            sync.push(model)
        check_live(engine, expected)
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "patterns without effect: *_scale. " in told


def test_an_engine_that_holds_them_unquantised_is_refused() -> None:
    model = net()
    with closing(engine_of(state_of(model))) as engine:
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", timeout_s=TIMEOUT_S)
        with pytest.raises(ManifestError, match="4 weights come quantised, and the engine does not") as caught:
            sync.push(model)
        assert set(caught.value.mismatched) == QUANTIZED
        check_live(engine, zeros(state_of(model)))


def test_an_engine_with_the_other_kind_is_refused() -> None:
    model = net()
    with closing(engine_of(quantized(state_of(model), "int8"))) as engine:
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", timeout_s=TIMEOUT_S)
        with pytest.raises(ManifestError, match="quantised to float8_e4m3fn, the engine loads int8"):
            sync.push(model)


def test_what_an_engine_has_in_8_bits_beyond_that_it_quantises_itself() -> None:
    model = net()
    more = TensorSelection(unquantized=("*embed*",))
    expected = quantized(state_of(model), "fp8", more)
    assert "lm_head.weight_scale" in expected
    with closing(engine_of(expected)) as engine:
        with WeightSync("fsdp", "ipc", engine, quantize="fp8", timeout_s=TIMEOUT_S) as sync:
            sync.push(model)
        check_live(engine, expected)


def test_a_weight_of_two_layers_is_pushed_quantised_to_both() -> None:
    model = net()
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    expected = quantized(state_of(model), "fp8")
    with closing(engine_of(expected)) as engine:
        with WeightSync("fsdp", "ipc", engine, quantize="fp8", timeout_s=TIMEOUT_S) as sync:
            sync.push(model)
        check_live(engine, expected)


@pytest.mark.parametrize("unquantized", ["layers.0.*", "layers.1.*"])
def test_a_weight_of_two_layers_is_refused_if_one_alone_is_quantised(unquantized: str) -> None:
    model = net()
    model.layers[1].q_proj.weight = model.layers[0].q_proj.weight
    selection = TensorSelection(unquantized=("*embed*", "lm_head.weight", "*.gate.weight", unquantized))
    with closing(engine_of(quantized(state_of(model), "fp8", selection))) as engine:
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", selection=selection, timeout_s=TIMEOUT_S)
        with pytest.raises(ManifestError, match=r"layers.1.q_proj.weight"):
            sync.push(model)


def test_a_weight_is_not_torn_from_its_scales() -> None:
    model = net()
    with closing(engine_of(quantized(state_of(model), "fp8"))) as engine:
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", bucketer="parameter", timeout_s=TIMEOUT_S)
        with pytest.raises(ConfigError, match="puts 4 quantised weights and their scales into different buckets"):
            sync.push(model)


def test_a_model_without_linears_is_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(3))
    with closing(engine_of(state_of(model))) as engine:
        sync = WeightSync("fsdp", "ipc", engine, quantize="fp8", timeout_s=TIMEOUT_S)
        with pytest.raises(ConfigError, match="none of the 2 tensors is a matrix"):
            sync.push(model)
