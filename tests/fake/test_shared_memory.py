"""One copy of the weights, with an engine that is not vLLM: what is asked of it, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost
from ranks import run_ranks
from torch import nn

from weightsync import ConfigError, EngineError, PlacementError, TensorSelection, WeightSync, WeightSyncError
from weightsync.strategies.shared_memory import check_pairs

HEADS, WIDTH = 4, 6


class EngineModel(nn.Module):
    """q, k and v are one parameter, of which each of `tp` workers has its rows."""

    def __init__(self, rank: int = 0, tp: int = 1) -> None:
        super().__init__()
        self.rank, self.rows = rank, HEADS // tp
        self.qkv = nn.Linear(WIDTH, 3 * self.rows, bias=False)
        self.norm = nn.Linear(WIDTH, 1, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm.weight":
                self.norm.weight.data.copy_(tensor)
            else:
                at = "qkv".index(name[0]) * self.rows
                own = tensor.narrow(0, self.rank * self.rows, self.rows)
                self.qkv.weight.data[at : at + self.rows].copy_(own)


class PaddedModel(EngineModel):
    """Its norm has a row that is in no checkpoint: the loader sets it to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(WIDTH, 2, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm.weight":
                self.norm.weight.data[:1].copy_(tensor)
                self.norm.weight.data[1:].fill_(0)
            else:
                super().load_weights([(name, tensor)])


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {**{f"{part}.weight": (HEADS, WIDTH) for part in "qkv"}, "norm.weight": (1, WIDTH)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def host(seed: int, rank: int = 0, tp: int = 1) -> ModuleHost:
    return ModuleHost(functools.partial(EngineModel, rank, tp), weights(seed), rank=rank, world=tp)


def on_meta() -> nn.ModuleDict:
    with torch.device("meta"):
        parts = {part: nn.Linear(WIDTH, HEADS, bias=False) for part in "qkv"}
        return nn.ModuleDict({**parts, "norm": nn.Linear(WIDTH, 1, bias=False)})


def write(model: nn.Module, seed: int) -> None:
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for name, param in model.named_parameters():
            value = weights(seed).get(name, param)
            if isinstance(param, DTensor):
                rows = value.shape[0] // param.device_mesh.size()
                value = value.narrow(0, param.device_mesh.get_rank() * rows, rows)
                param.to_local().copy_(value)
            else:
                param.copy_(value)


def write_half(sync: WeightSync, model: nn.Module, fails: bool) -> None:
    with sync.writing():
        write(model, 2)
        if fails:
            raise ValueError("half of it")


def assert_serves(engine: FakeEngine, seed: int) -> None:
    for rank, one in enumerate(engine.hosts):
        expected = host(seed, rank, len(engine.hosts)).live.state_dict()
        for name, tensor in one.live.state_dict().items():
            assert torch.equal(tensor, expected[name]), (rank, name)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with closing(FakeEngine(host(1))) as engine:
        yield engine


@pytest.fixture
def sync(engine: FakeEngine) -> Iterator[WeightSync]:
    with WeightSync("fsdp", "single_copy", engine, timeout_s=10.0) as sync:
        yield sync


def test_writing_reaches_the_engine_and_is_its_next_version(engine: FakeEngine, sync: WeightSync):
    model = on_meta()
    sync.attach(model)
    assert engine.log == []
    assert torch.equal(model["k"].weight, weights(1)["k.weight"])
    with sync.writing(version=5):
        assert set(engine.log) == {"pause keep", "start"}
        write(model, 2)
    assert_serves(engine, 2)
    assert sorted(engine.log[2:]) == ["finish", "reset caches", "resume"]
    assert engine.log[-1] == "resume"
    assert (engine.version(), engine.sessions[0].receiver.state) == ("5", "CLEAN")
    report = sync.last_report
    assert report is not None
    assert (report.version, report.nbytes, len(report.workers)) == (5, 0, 1)
    assert sync.push(model).version == 6
    assert_serves(engine, 2)
    with pytest.raises(ConfigError, match="version 6 is not newer than 6"), sync.writing(version=6):
        raise AssertionError("the body must not run")


def test_an_excluded_name_that_the_model_lacks_is_told(engine: FakeEngine, caplog: pytest.LogCaptureFixture):
    selection = TensorSelection(exclude=("nrom.*",))
    with WeightSync("fsdp", "single_copy", engine, selection=selection, timeout_s=10.0) as sync:
        sync.attach(on_meta())
    assert "patterns without effect: nrom.*. The trainer's nearest names are" in caplog.text


@pytest.mark.parametrize("shape", [(3, 0), (4096, 0), (0, 4096)])
@pytest.mark.parametrize("is_in_engine", [True, False])
def test_a_parameter_without_elements_is_attached(is_in_engine: bool, shape: tuple[int, int]):
    engine_model = host(1)
    if is_in_engine:
        for each in (engine_model.live, engine_model.pristine()):
            each.nothing = nn.Parameter(torch.empty(shape))
    with closing(FakeEngine(engine_model)) as engine, WeightSync("fsdp", "single_copy", engine, timeout_s=10.0) as sync:
        model = on_meta()
        model.nothing = nn.Parameter(torch.empty(shape, device="meta"))
        sync.attach(model)
        nothing = model.get_parameter("nothing")
        assert (nothing.shape, nothing.device.type) == (shape, "cpu")
        with sync.writing():
            write(model, 2)
    assert torch.equal(engine_model.live.norm.weight, weights(2)["norm.weight"])


def test_writing_gives_an_engine_with_random_weights_the_constants_of_its_loader():
    engine_model = ModuleHost(PaddedModel, weights(1))
    engine_model.live.norm.weight.data.fill_(7)
    with closing(FakeEngine(engine_model)) as engine, WeightSync("fsdp", "single_copy", engine, timeout_s=10.0) as sync:
        model = on_meta()
        sync.attach(model)
        assert engine_model.live.norm.weight.tolist() == [[7.0] * WIDTH] * 2
        write_half(sync, model, fails=False)
        cold = ModuleHost(PaddedModel, weights(2)).live
        assert torch.equal(engine_model.live.norm.weight, cold.norm.weight)


def test_a_raising_body_leaves_the_engine_paused_and_marked_until_it_is_rewritten(engine: FakeEngine, sync: WeightSync):
    model = on_meta()
    sync.attach(model)
    with pytest.raises(WeightSyncError, match=r"it; POISONED until .*: a fake engine \[trainer rank 0, phase write\]"):
        write_half(sync, model, True)
    assert "resume" not in engine.log
    assert str(engine.version()).startswith("POISONED")
    assert engine.sessions[0].receiver.state == "POISONED"
    with sync.writing():
        write(model, 3)
    assert_serves(engine, 3)
    assert engine.log[-1] == "resume"
    assert engine.version() == "1"


def test_a_body_runs_in_the_callers_modes_and_the_rest_does_not(engine: FakeEngine, sync: WeightSync):
    model = on_meta()
    with torch.inference_mode(), torch.device("meta"):
        sync.attach(model)
    assert not any(param.is_inference() for param in model.parameters())
    with torch.autocast("cpu", torch.bfloat16), sync.writing():
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        write(model, 2)
    assert torch.is_grad_enabled()
    assert_serves(engine, 2)
    with pytest.raises(WeightSyncError, match="half of it"), torch.inference_mode():
        write_half(sync, model, True)
    assert not torch.is_inference_mode_enabled()
    with torch.device("meta"), sync.writing():
        assert torch.empty(0).is_meta
    assert_serves(engine, 2)


def test_writes_outside_of_writing_are_noticed(sync: WeightSync):
    model = on_meta()
    sync.attach(model)
    with torch.no_grad():
        model["norm"].weight.add_(1)
    with pytest.raises(WeightSyncError, match="1 parameters were written outside"):
        sync.push(model)
    assert sync.push(model).version == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(WeightSyncError, match="take this optimizer step inside"):
        optimizer.step()
    with sync.writing():
        optimizer.step()


def test_an_engine_that_was_started_anew_is_refused_before_the_body_runs(engine: FakeEngine, sync: WeightSync):
    model = on_meta()
    sync.attach(model)
    with pytest.raises(WeightSyncError, match="half of it"), sync.writing():
        raise ValueError("half of it")
    engine.sessions[0].engine_instance = "another"
    with pytest.raises(EngineError, match="restarted since `attach`"), sync.writing():
        raise AssertionError("the body must not run")


def test_models_that_were_not_attached_are_refused(engine: FakeEngine, sync: WeightSync):
    with pytest.raises(ConfigError, match="call `attach"):
        sync.push(on_meta())
    with pytest.raises(ConfigError, match="call `attach"), sync.writing():
        raise AssertionError("the body must not run")
    sync.attach(on_meta())
    with pytest.raises(ConfigError, match="another model is attached"):
        sync.push(on_meta())
    with pytest.raises(ConfigError, match="attached already"):
        sync.attach(on_meta())
    assert engine.log == []


def test_a_parameter_with_values_of_its_own_is_refused_and_nothing_is_changed(engine: FakeEngine, sync: WeightSync):
    model = on_meta()
    model["norm"] = nn.Linear(WIDTH, 1, bias=False)
    with pytest.raises(ConfigError, match="has values of its own"):
        sync.attach(model)
    assert model["q"].weight.is_meta
    sync.attach(on_meta())
    assert_serves(engine, 1)


def test_options_that_have_no_effect_are_refused():
    for options in ({"max_bytes": 1}, {"verify": "full"}, {"bucketer": "module"}):
        with pytest.raises(ConfigError, match=f"^{next(iter(options))}: no effect with this SingleCopyTransport"):
            WeightSync("fsdp", "single_copy", **options)  # type: ignore[arg-type]
    for kept in ({"backend": "deepspeed"}, {"backend": "fsdp", "quantize": "fp8"}):
        with pytest.raises(ConfigError, match="single_copy takes a plain model"):
            WeightSync(transport="single_copy", **kept)
    WeightSync("fsdp", "single_copy", progress=False, rolling=False)  # nothing is asked for


def worker(group: int, boot_id: str) -> Any:
    hello = SimpleNamespace(group=group, boot_id=boot_id)
    return SimpleNamespace(hello=hello, connection=SimpleNamespace(peer=f"engine {group} worker tp=0"))


@pytest.mark.parametrize(
    ("hosts", "workers", "words"),
    [
        (["a"], [worker(0, "a"), worker(1, "a")], "one engine, got 2 engines"),
        (["a"], [worker(0, "a"), worker(0, "a")], "1 trainer ranks cannot share the memory of 2 engine workers"),
        (["a", "b"], [worker(0, "a"), worker(0, "a")], "but trainer rank 1 runs on another"),
        (["a"], [worker(0, "b")], "but engine 0 worker tp=0 runs on another"),
    ],
)
def test_ranks_without_a_worker_of_their_own_are_refused(hosts: list[str], workers: list[Any], words: str):
    with pytest.raises(PlacementError, match=words):
        check_pairs(hosts, workers)


def share_two_workers(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    engine = FakeEngine(host(1, 0, 2), host(1, 1, 2)) if rank == 0 else None
    model = parallelize_module(on_meta(), init_device_mesh("cpu", (2,)), {part: ColwiseParallel() for part in "qkv"})
    with WeightSync("fsdp", "single_copy", engine, timeout_s=20.0) as sync:
        sync.attach(model)
        for seed in (2, 3):
            with sync.writing():
                write(model, seed)
            if engine is not None:
                assert_serves(engine, seed)
        with pytest.raises(
            WeightSyncError, match=r"it; POISONED until .*: a fake engine \[trainer rank 1, phase write\]"
        ):
            write_half(sync, model, rank == 1)
        with sync.writing():
            write(model, 4)
        report = sync.last_report
        assert report is not None
        assert (report.version, len(report.workers)) == (3, 2)
        if engine is not None:
            assert_serves(engine, 4)
    if engine is not None:
        engine.close()


def test_every_rank_writes_the_memory_of_its_worker():
    run_ranks(share_two_workers, 2)


def test_writing_warns_of_what_is_not_finite(sync: WeightSync, caplog: pytest.LogCaptureFixture):
    model = on_meta()
    sync.attach(model)
    with sync.writing(), torch.no_grad():
        model["k"].weight[1, 2] = float("nan")
    with sync.writing(), torch.no_grad():
        model["k"].weight[1, 2] = 1.0
    (text,) = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert text == "the engines serve version 1 with NaN or infinity in 1 tensors: k.weight"
