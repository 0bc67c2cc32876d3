"""Adapters alone: what is read of a model, how it is delivered, when older ones go, and what an engine then answers."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import test_lora
import tiny_models
import torch
import torch.distributed as dist
import zero
from ranks import run_ranks
from safetensors.torch import load_file
from test_lora import fill_adapters, wrapped

import weightsync.strategies.lora
from weightsync import (
    ConfigError,
    EngineError,
    LoraAdapter,
    LoraTransport,
    ManifestError,
    NonFiniteError,
    PlacementError,
    TensorSelection,
    UnsupportedError,
    WeightSync,
    WeightSyncError,
)
from weightsync.net.ranks import Ranks
from weightsync.strategies.lora import AdapterFolder

KINDS = ["linear", "rslora", "embedding"]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm, which is everybody's."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(weightsync.strategies.lora, "_MEMORY", path)
    return path


class FakeEngine:
    """An `AdapterEngine` that loads the files and keeps what is in them."""

    host = "127.0.0.1"

    def __init__(self, name: str = "a fake engine", max_lora_rank: int | None = None) -> None:
        self.name = name
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.in_use: set[str] = set()
        self.log: list[str] = []
        self.fails = False
        self._max_lora_rank = max_lora_rank

    def max_lora_rank(self) -> int | None:
        return self._max_lora_rank

    def load_adapter(self, adapter: LoraAdapter) -> None:
        if self.fails:
            raise EngineError("no memory left for this adapter", who=self.name)
        self.log.append(f"load {adapter.name}")
        self.adapters[adapter.name] = load_file(Path(adapter.path) / "adapter_model.safetensors")

    def unload_adapter(self, adapter: LoraAdapter) -> None:
        if self.adapters.pop(adapter.name, None) is not None:
            self.log.append(f"unload {adapter.name}")

    def has_adapter(self, adapter: LoraAdapter) -> bool:
        return adapter.name in self.adapters

    def adapters_in_use(self) -> set[str]:
        return self.in_use

    def is_alive(self) -> bool:
        return True

    # `connect` takes what can be pushed weights to.
    def other(self, *args: Any) -> None:
        raise AssertionError("nothing but adapters is touched")

    init = start = update = finish = pause = resume = reset_caches = set_version = version = other


def in_peft(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT would save of the active adapter."""
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_holds(engine: FakeEngine, adapter: LoraAdapter | None, expected: dict[str, torch.Tensor]) -> None:
    assert adapter is not None
    held = engine.adapters[adapter.name]
    assert set(held) == set(expected)
    for name, tensor in held.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


# ---------------------------------------------------------------------------------------------------------------
# What is written


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_it_would_have_saved(kind: str, dtype: torch.dtype, backend: str, tmp_path: Path):
    model = wrapped(kind, dtype)
    engine = FakeEngine()
    with WeightSync(backend, LoraTransport(folder=tmp_path / "run"), engine) as sync:
        report = sync.push(model)
    assert sync.adapter is None
    (path,) = (tmp_path / "run").glob("policy-1-*")
    expected = in_peft(model)
    assert_holds(engine, LoraAdapter(path.name, 0, str(path)), expected)
    assert report.nbytes == sum(tensor.nbytes for tensor in expected.values())
    loaded = peft.PeftModel.from_pretrained(tiny_models.build("qwen3", "A", dtype), path, autocast_adapter_dtype=False)
    for name, tensor in in_peft(loaded).items():
        assert torch.equal(tensor, expected[name])
    assert loaded.peft_config["default"].inference_mode
    assert not model.peft_config["default"].inference_mode


EXPERTS = {
    "qwen3-moe": {"target_modules": "all-linear"},
    "mixtral": {"target_modules": "all-linear"},
    "gpt-oss": {"target_parameters": ["gate_up_proj", "down_proj"]},
}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("name", EXPERTS)
def test_adapters_on_experts_are_as_peft_saves_them(name: str, backend: str):
    model = wrapped("linear", model=name, **EXPERTS[name])
    engine = FakeEngine(max_lora_rank=16)
    with WeightSync(backend, "lora", engine) as sync:
        sync.push(model)
        expected = in_peft(model)
        assert any(".experts.base_layer.lora_A." in key for key in expected)
        assert_holds(engine, sync.adapter, expected)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
def test_the_engine_must_take_the_largest_rank():
    model = wrapped("linear", model="qwen3-moe", target_modules="all-linear")  # the two halves of gate_up_proj: 16
    with (
        WeightSync("fsdp", "lora", FakeEngine(max_lora_rank=8)) as sync,
        pytest.raises(ConfigError, match="rank 16, and the engine takes at most 8"),
    ):
        sync.push(model)


def test_one_of_several_adapters_is_pushed():
    model = wrapped("linear")
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["o_proj"]))
    model.set_adapter("other")
    fill_adapters(model, "B")
    engine = FakeEngine()
    with WeightSync("fsdp", "lora", engine) as sync:
        sync.push(model)
        assert_holds(engine, sync.adapter, in_peft_of(model, "other"))


def in_peft_of(model: Any, name: str) -> dict[str, torch.Tensor]:
    return dict(peft.get_peft_model_state_dict(model, adapter_name=name))


def both_active() -> Any:
    model = wrapped("linear")
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    return model


def merged() -> Any:
    model = wrapped("linear")
    model.merge_adapter()
    return model


def rescaled() -> Any:
    model = wrapped("linear")
    model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3.0)
    return model


def begun_otherwise() -> Any:
    """As `init_lora_weights="pissa"` leaves it, without the time that takes."""
    model = wrapped("linear")
    model.peft_config["default"].init_lora_weights = "pissa_niter_4"
    return model


def with_a_norm_that_trains() -> Any:
    model = wrapped("linear")
    model.base_model.model.model.norm.weight.requires_grad = True
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no adapter": (lambda: tiny_models.build("qwen3", "A"), ConfigError, "no LoRA adapter; wrap it"),
    "two": (both_active, ConfigError, "expected one active adapter, found default, other"),
    "merged": (merged, ConfigError, "merged into the base"),
    "prompt": (test_lora.with_a_prompt, UnsupportedError, "PROMPT_TUNING"),
    "dora": (lambda: wrapped("linear", use_dora=True), UnsupportedError, "DoraLinearVariant"),
    "whole modules": (lambda: wrapped("whole modules"), UnsupportedError, r"modules_to_save=\['lm_head', 'model.norm'"),
    "bias": (lambda: wrapped("linear", model="qwen2", bias="all"), UnsupportedError, "bias='all'"),
    "a base that trains": (with_a_norm_that_trains, UnsupportedError, r"1 tensors .* as model.norm.weight"),
    "another base": (begun_otherwise, UnsupportedError, "changes the base"),
    "ranks": (
        lambda: wrapped("linear", rank_pattern={"q_proj": 4}),
        UnsupportedError,
        "self_attn.q_proj: its scaling is 4,",
    ),
    "alphas": (lambda: wrapped("linear", alpha_pattern={"q_proj": 4}), UnsupportedError, "scaling is 0.5"),
    "scaled": (rescaled, UnsupportedError, "layers.0.self_attn.q_proj.*is 6, expected the config's 2"),
    "one tensor of experts": (
        lambda: wrapped(
            "linear", model="qwen3-moe", target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"]
        ),
        UnsupportedError,
        "adapters on gate_up_proj; vLLM takes them on down_proj and gate_up_proj together",
    ),
    "experts of another scaling": (
        lambda: wrapped("linear", model="qwen3-moe", target_modules="all-linear", use_rslora=True),
        UnsupportedError,
        "experts.base_layer: its scaling is 8, expected the config's 5.65685",
    ),
    "rows of an embedding": (
        lambda: wrapped("linear", target_parameters=["embed_tokens.weight"]),
        UnsupportedError,
        "embed_tokens.weight: it is in a peft.tuners.lora.layer.ParamWrapper",
    ),
}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_an_engine_cannot_serve_is_refused_before_it_is_called(kind: str, memory: Path):
    make, error, words = REFUSED[kind]
    engine = FakeEngine()
    with WeightSync("fsdp", "lora", engine) as sync, pytest.raises(error, match=words):
        sync.push(make())
    assert engine.log == []
    assert list(memory.iterdir()) == []


def test_an_adapter_travels_under_other_names(tmp_path: Path):
    model, engine = wrapped("embedding"), FakeEngine()
    selection = TensorSelection(rename={r"^model\.": "model.language_model."})
    with WeightSync("fsdp", LoraTransport(folder=tmp_path), engine, selection=selection) as sync:
        sync.push(model)
        old, new = "base_model.model.model.", "base_model.model.model.language_model."
        assert_holds(engine, sync.adapter, {name.replace(old, new): each for name, each in in_peft(model).items()})
    same = TensorSelection(rename={r"layers\.\d+": "layers.0"})
    with (
        WeightSync("fsdp", LoraTransport(folder=tmp_path), engine, selection=same) as sync,
        pytest.raises(ManifestError, match=r"another tensor the name of model\.layers\.1.*, base_model"),
    ):
        sync.push(model)


def test_an_adapter_that_is_not_finite_is_refused_before_it_is_written(memory: Path):
    model, engine = wrapped("linear"), FakeEngine()
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight[0, 0] = float("nan")
    with (
        WeightSync("fsdp", "lora", engine) as sync,
        pytest.raises(NonFiniteError, match="1 tensors of the") as raised,
    ):
        sync.push(model)
    assert raised.value.tensors == ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert engine.log == []
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("make", [with_a_norm_that_trains, begun_otherwise])
def test_an_adapter_of_a_base_that_is_pushed_as_well_is_not_refused(make: Callable[[], Any], memory: Path):
    engine, model = FakeEngine(), make()
    with WeightSync("fsdp", LoraTransport(base_is_pushed=True), engine) as sync:
        sync.push(model)
        assert_holds(engine, sync.adapter, in_peft(model))


# ---------------------------------------------------------------------------------------------------------------
# Several ranks


def of_rank_0(engine: FakeEngine, rank: int) -> FakeEngine | None:
    return engine if rank == 0 else None


def fsdp2(rank: int, folder: Path) -> None:
    for kind in KINDS:
        engine = FakeEngine()
        model = wrapped(kind)
        whole = in_peft(model)
        test_lora.shard(model)
        with WeightSync("fsdp", LoraTransport(folder=folder / kind), of_rank_0(engine, rank)) as sync:
            sync.push(model)
            if rank == 0:
                assert_holds(engine, sync.adapter, whole)
            name = sync.adapter.name
            fill_adapters(model, "B")
            report = sync.push(model)
            assert (report.version, sync.adapter.name != name) == (2, True)
        whole_b = wrapped(kind)
        fill_adapters(whole_b, "B")
        if rank == 0:
            assert_holds(engine, LoraAdapter(list(engine.adapters)[-1], 0, ""), in_peft(whole_b))
    # One rank cannot push, so none does; and then they can.
    with WeightSync("fsdp", LoraTransport(folder=folder), of_rank_0(engine, rank)) as sync:
        with pytest.raises(ConfigError, match=r"no LoRA adapter.*trainer rank 1"):
            sync.push(tiny_models.build("qwen3", "A") if rank == 1 else model)
        assert sync.adapter is None
        assert sync.push(model).version == 1


def zero3(rank: int, folder: Path) -> None:
    expected = in_peft(wrapped("linear"))
    trained = zero.initialize(wrapped("linear"), zero.config(3))
    engine = FakeEngine()
    with WeightSync("deepspeed", LoraTransport(folder=folder), of_rank_0(engine, rank)) as sync:
        sync.push(trained)
        if rank == 0:
            assert_holds(engine, sync.adapter, expected)
        for param in trained.module.parameters():
            if param.requires_grad:
                param.ds_tensor.add_(1)  # what a step writes
        sync.push(trained.module)
        if rank == 0:
            assert_holds(engine, sync.adapter, {name: tensor + 1 for name, tensor in expected.items()})


def several_ranks(rank: int, folder: Path) -> None:
    fsdp2(rank, folder)
    zero3(rank, folder)


def test_shards_and_partitions_are_gathered(tmp_path: Path):
    run_ranks(several_ranks, 2, tmp_path)


def see_other_folders(rank: int, folder: Path) -> None:
    """As on a host that does not have trainer rank 0's memory, or its folder."""
    engine, model = FakeEngine(), wrapped("linear")
    seen = weightsync.strategies.lora.check_seen
    with WeightSync("fsdp", LoraTransport(folder=folder), of_rank_0(engine, rank)) as sync:
        if rank == 1:
            weightsync.strategies.lora.check_seen = lambda path, *more: seen(path / "elsewhere", *more)
        with pytest.raises(
            PlacementError, match=r"rank 1 cannot open .*LoraTransport\(folder=\.\.\.\).*phase save"
        ) as error:
            sync.push(model)
        assert (error.value.who, error.value.phase) == ("trainer rank 1", "save")
        assert engine.log == []
        weightsync.strategies.lora.check_seen = seen
        assert sync.push(model).version == 1


def test_a_rank_without_the_folder_fails_the_push_before_an_engine_is_called(tmp_path: Path):
    run_ranks(see_other_folders, 2, tmp_path)
    assert names_in(tmp_path) == ["policy-1"]
    assert not list(tmp_path.glob(".incoming*"))


def have_other_adapters(rank: int, folder: Path) -> None:
    engine, model = FakeEngine(), wrapped("linear", torch.float32)
    model.add_adapter("other", peft.LoraConfig(r=8, lora_alpha=16, **test_lora.KINDS["linear"]))
    with WeightSync("fsdp", LoraTransport(folder=folder), of_rank_0(engine, rank), timeout_s=20) as sync:
        if rank == 1:
            model.set_adapter("other")
        expected = r'differ: trainer rank 1 has adapter="other", and rank 0 adapter="default"\..*\[trainer rank 0'
        with pytest.raises(ConfigError, match=expected):
            sync.push(model)
        if rank == 0:
            assert not folder.exists()
        model.set_adapter("default")
        sync.push(model)
        rescaled = wrapped("linear", lora_alpha=16 + 16 * rank)
        with pytest.raises(ConfigError, match="trainer rank 1 has lora_alpha=32, and rank 0 lora_alpha=16"):
            sync.push(rescaled)
        elsewhere = wrapped("linear")
        elsewhere.peft_config["default"].base_model_name_or_path = f"/scratch/{rank}/model"
        sync.push(elsewhere)
        assert len(engine.log) == (2 if rank == 0 else 0)


def test_ranks_with_other_adapters_or_scalings_are_refused(tmp_path: Path):
    run_ranks(have_other_adapters, 2, tmp_path / "run", timeout_s=60)


def close_rank_1(rank: int, folder: Path) -> None:
    engine, model = FakeEngine(), wrapped("linear")
    sync = WeightSync("fsdp", LoraTransport(folder=folder), of_rank_0(engine, rank), timeout_s=20)
    sync.push(model, version=1)
    if rank == 1:
        sync.close()
    dist.barrier()  # or rank 0 begins the next push, and rank 1 closes in it
    assert sync.push(model, version=2).version == 2
    if rank == 0:
        assert_holds(engine, sync.adapter, in_peft(model))
    sync.close()


def interrupt_rank_1(rank: int, folder: Path) -> None:
    """As Ctrl-C on one rank, when rank 0 has ended the push."""
    broadcast = Ranks.broadcast

    def interrupted(ranks: Ranks, value: Any, phase: str, *more: Any) -> Any:
        found = broadcast(ranks, value, phase, *more)
        if phase == "load":
            raise KeyboardInterrupt
        return found

    model = wrapped("linear")
    sync = WeightSync("fsdp", LoraTransport(folder=folder), of_rank_0(FakeEngine(), rank), timeout_s=20)
    if rank == 1:
        with mock.patch.object(Ranks, "broadcast", interrupted), pytest.raises(KeyboardInterrupt):
            sync.push(model, version=1)
    else:
        sync.push(model, version=1)
    dist.barrier()
    if rank == 0:
        with pytest.raises(WeightSyncError, match="interrupted"):
            sync.push(model, version=2)
    assert sync.push(model, version=3).version == 3
    sync.close()


@pytest.mark.parametrize("end", [close_rank_1, interrupt_rank_1])
def test_ranks_push_after_one_was_closed_or_interrupted(end: Callable[[int, Path], None], tmp_path: Path):
    run_ranks(end, 2, tmp_path, timeout_s=60)


# ---------------------------------------------------------------------------------------------------------------
# From one version to the next


@pytest.fixture(scope="module")
def model() -> Any:
    return wrapped("linear")


def names_in(folder: Path) -> list[str]:
    """The adapters that lie in a folder, or in the trainer's own in memory, without the numbers at their ends."""
    return sorted(path.name.rpartition("-")[0] for path in folder.rglob("policy-*"))


def test_older_adapters_go_after_their_last_request(model: Any, memory: Path):
    engine = FakeEngine()
    loaded = lambda: [name.rpartition("-")[0] for name in engine.adapters]  # noqa: E731
    with WeightSync("fsdp", "lora", engine) as sync:
        sync.push(model)
        first = sync.adapter
        assert first is not None
        assert oct(Path(first.path).parent.stat().st_mode & 0o777) == "0o700"
        engine.in_use = {first.name}
        for _ in range(3):
            sync.push(model)
        assert loaded() == ["policy-1", "policy-3", "policy-4"]
        engine.in_use = set()
        sync.push(model)
        assert loaded() == ["policy-4", "policy-5"]
        # Whoever has asked for one just now still finds its files, for one push more.
        assert names_in(memory) == ["policy-1", "policy-3", "policy-4", "policy-5"]
        engine.in_use = {first.name}
        sync.push(model)
        assert names_in(memory) == ["policy-1", "policy-4", "policy-5", "policy-6"]
        assert sync.push(model, version=20).version == 20
        with pytest.raises(ConfigError, match="version 20 is not newer than 20"):
            sync.push(model, version=20)
        engine.in_use = set()
    assert engine.adapters == {}
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_adapters_of_a_trainer_that_was_killed_go_with_the_next_one(model: Any, memory: Path, umask: int):
    engine = FakeEngine()
    killed = WeightSync("fsdp", "lora", engine)
    before = os.umask(umask)
    try:
        killed.push(model)
    finally:
        os.umask(before)
    killed._strategy._folder.close()  # as its lock goes with its process
    killed._strategy._folder = None
    killed.close()
    with WeightSync("fsdp", "lora", engine) as sync:
        sync.push(model)
        assert names_in(memory) == ["policy-1", "policy-1"]
    assert engine.adapters == {}
    assert list(memory.iterdir()) == []


def test_adapters_are_unloaded_when_their_trainer_is_collected_in_a_cycle(model: Any, memory: Path):
    engine = FakeEngine()
    sync = WeightSync("fsdp", "lora", engine)
    sync.on_step = sync.push  # refers to its owner
    sync.on_step(model)
    assert engine.adapters
    del sync
    gc.collect()
    assert not engine.adapters
    assert not [*memory.iterdir()]


def test_files_in_use_outlive_their_trainer_and_are_removed_by_the_next(model: Any, memory: Path):
    engine = FakeEngine()
    with WeightSync("fsdp", "lora", engine) as sync:
        sync.push(model)
        old = sync.adapter
        engine.in_use = {old.name}
    assert names_in(memory) == ["policy-1"]
    (memory / "weightsync-lora-of-one-that-was-killed").mkdir(mode=0o700)
    with (
        WeightSync("fsdp", LoraTransport(keep_last=1), engine) as sync,
        WeightSync("fsdp", "lora", FakeEngine()) as other,
    ):
        sync.push(model)
        other.push(model)  # it leaves alone what a living trainer has
        assert Path(old.path).exists()
        engine.in_use = set()
        sync.push(model)
        sync.push(model)
        assert not Path(old.path).parent.exists()
        assert names_in(memory) == ["policy-1", "policy-2", "policy-3"]
        assert len(list(memory.iterdir())) == 2
    assert list(memory.iterdir()) == []


def test_a_folder_keeps_adapters_and_their_versions(model: Any, tmp_path: Path):
    transport = LoraTransport(folder=tmp_path / "run")
    engine = FakeEngine()
    for count in (2, 1):
        with WeightSync("fsdp", transport, engine) as sync:
            for _ in range(count):
                sync.push(model)
            other = WeightSync("fsdp", transport, FakeEngine())
            with pytest.raises(ConfigError, match="another trainer writes adapters to"):
                other.push(model)
        assert len(engine.adapters) == 2
    assert [name.rpartition("-")[0] for name in engine.adapters] == ["policy-2", "policy-3"]
    (tmp_path / "run" / ".incoming-of-one-that-was-killed").mkdir()
    with WeightSync("fsdp", transport, engine) as sync:
        sync.push(model)
        sync.push(model)
    assert names_in(tmp_path / "run") == ["policy-3", "policy-4", "policy-5"]
    assert not list((tmp_path / "run").glob(".incoming*"))


def test_an_adapter_that_somebody_has_removed_keeps_no_other(model: Any, memory: Path):
    engine = FakeEngine()
    with WeightSync("fsdp", LoraTransport(keep_last=1), engine) as sync:
        sync.push(model)
        assert sync.adapter is not None
        shutil.rmtree(sync.adapter.path)
        for _ in range(4):
            sync.push(model)
        assert [name.rpartition("-")[0] for name in engine.adapters] == ["policy-5"]
        assert names_in(memory) == ["policy-4", "policy-5"]


# ---------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_folder_that_cannot_be_read_at_first_keeps_its_versions(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with WeightSync("fsdp", LoraTransport(folder=tmp_path), FakeEngine()) as sync:
        sync.push(model, version=7)

    def stale(folder: AdapterFolder) -> list[Path]:
        raise OSError("stale file handle")

    with WeightSync("fsdp", LoraTransport(folder=tmp_path), FakeEngine()) as sync:
        with monkeypatch.context() as patch:
            patch.setattr(AdapterFolder, "earlier", stale)
            with pytest.raises(PlacementError, match=r"cannot read the adapters in .*: stale file handle"):
                sync.push(model)
        assert sync.push(model).version == 8


def test_one_engine_that_fails_fails_the_push(model: Any, memory: Path):
    first, second = FakeEngine("engine A"), FakeEngine("engine B")
    with WeightSync("fsdp", "lora", [first, second]) as sync:
        assert [worker.name for worker in sync.push(model).workers] == ["engine A", "engine B"]
        good = sync.adapter
        second.fails = True
        with pytest.raises(
            EngineError, match=r"no memory left.* unloaded again from engine A.*\[engine B, phase load\]"
        ):
            sync.push(model)
        assert sync.adapter == good
        assert list(first.adapters) == list(second.adapters) == [good.name]
        assert names_in(memory) == ["policy-1"]
        second.fails = False
        assert sync.push(model).version == 2
        assert len(first.adapters) == len(second.adapters) == 2
        second.fails = True
        first.unload_adapter = second.load_adapter  # which fails
        with pytest.raises(EngineError, match=r"no memory left.* An engine may keep it"):
            sync.push(model)


def test_a_rank_that_is_too_high_is_refused_before_anything_is_written(model: Any, memory: Path):
    with (
        WeightSync("fsdp", "lora", [FakeEngine(max_lora_rank=8), FakeEngine("small", max_lora_rank=4)]) as sync,
        pytest.raises(ConfigError, match=r"rank 8, and the engine takes at most 4.*small"),
    ):
        sync.push(model)
    assert list(memory.iterdir()) == []


def test_a_folder_that_cannot_be_used(model: Any, tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        WeightSync("fsdp", LoraTransport(folder=tmp_path / "file" / "run"), FakeEngine()) as sync,
        pytest.raises(PlacementError, match="cannot write adapters to"),
    ):
        sync.push(model)


def test_a_folder_that_could_not_be_used_is_free_again(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".incoming-0").mkdir()

    def refuse(path: Path) -> None:
        raise OSError("device or resource busy")

    with WeightSync("fsdp", LoraTransport(folder=tmp_path), FakeEngine()) as sync:
        with monkeypatch.context() as patch:
            patch.setattr(weightsync.strategies.lora.shutil, "rmtree", refuse)
            with pytest.raises(PlacementError, match="busy"):
                sync.push(model)
        assert sync.push(model).version == 1


def test_engines_that_cannot_take_adapters(model: Any):
    elsewhere = FakeEngine()
    elsewhere.host = "192.0.2.1"  # nobody has it
    with WeightSync("fsdp", "lora", elsewhere) as sync, pytest.raises(PlacementError, match="give a folder that both"):
        sync.push(model)
    without = test_lora.FakeEngine(test_lora.ModuleHost(test_lora.Head, test_lora.Head().state_dict()))
    with WeightSync("fsdp", "lora", without) as sync, pytest.raises(UnsupportedError, match="takes no adapters"):
        sync.push(model)


def test_arguments_that_cannot_work():
    for options in ({"backend": "megatron"}, {"backend": "fsdp", "quantize": "fp8"}):
        with pytest.raises(ConfigError, match="adapters need PEFT"):
            WeightSync(transport="lora", **options)
    for keep_last in (0, 1.5):
        with pytest.raises(ConfigError, match=f"keep_last={keep_last}; it must be a whole number"):
            LoraTransport(keep_last=keep_last)
    for name in ("", "a/b", ".hidden", "a b"):
        with pytest.raises(ConfigError, match="expected a file name"):
            LoraTransport(name=name)
