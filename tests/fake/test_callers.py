"""What callers decide themselves: the pause, what engines report, the names, and the thread of a push."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_trainer import with_adapter
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, cold, trainer_model
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from ranks import run_ranks
from recorders import RecordedEngine
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from weightsync import (
    CheckpointTransport,
    ConfigError,
    EngineError,
    ManifestError,
    TensorSelection,
    WeightSync,
    WeightSyncError,
    save,
)

TIMEOUT_S = 30.0


@pytest.fixture
def engine() -> Iterator[RecordedEngine]:
    with closing(RecordedEngine(ModuleHost(TinyEngineModel, checkpoint(1)))) as engine:
        yield engine


def serves(engine: FakeEngine, seed: int) -> bool:
    return all(map(torch.equal, engine.hosts[0].live.parameters(), cold(checkpoint(seed)).parameters()))


# ---------------------------------------------------------------------------------------------------------------
# The pause


@pytest.mark.parametrize("says", [True, None], ids=["paused", "cannot say"])
def test_an_engine_that_the_caller_has_paused_is_neither_paused_nor_resumed(engine: Any, says: bool | None) -> None:
    engine.is_paused = lambda: says
    with WeightSync("fsdp", "ipc", engine, pause="caller", timeout_s=TIMEOUT_S) as sync:
        for seed in (2, 3):
            report = sync.push(trainer_model(checkpoint(seed)))
            assert serves(engine, seed)
    assert not {"resume", "pause keep", "pause caller"} & {*engine.calls}
    assert 0 < report.pause_s <= report.total_s


def test_an_engine_that_generates_though_the_caller_should_have_paused_it_is_refused(engine: Any) -> None:
    generates = False
    engine.is_paused = lambda: not generates
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, pause="caller", timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        generates = True
        model.load_state_dict(checkpoint(3))
        with pytest.raises(EngineError, match=r"the engine generates\. Pause it before each push"):
            sync.push(model)
        assert serves(engine, 2)
        assert engine.version() == "1"
        generates = False
        sync.push(model)
    assert serves(engine, 3)


# ---------------------------------------------------------------------------------------------------------------
# What engines report


def test_a_label_may_repeat(engine: RecordedEngine) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        for number, label in enumerate((7, 7, 3, None), start=1):
            assert sync.push(model, label=label).version == number
            assert engine.version() == str(number if label is None else label)


def test_a_push_that_is_refused_leaves_the_label(engine: RecordedEngine) -> None:
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        sync.push(model, label="step 7")
        with pytest.raises(ManifestError):
            sync.push(nn.Linear(2, 2), label="step 8")
        assert engine.version() == "step 7"


def test_a_call_that_is_refused_keeps_what_was_sent(engine: RecordedEngine) -> None:
    model = trainer_model(checkpoint(2))
    selection = TensorSelection(frozen=("embed.*",))
    with WeightSync("fsdp", "ipc", engine, selection=selection, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        later = sync.push(model).nbytes
        with pytest.raises(ConfigError, match="version 2 is not newer than 2"):
            sync.push(model, version=2)
        assert sync.push(model).nbytes == later
        model.load_state_dict(checkpoint(2))
        with pytest.raises(ConfigError, match="the model was written or moved since"):
            sync.catch_up(model)
        engine.calls.clear()
        assert sync.push(model).nbytes == later
    assert "init" not in engine.calls
    assert serves(engine, 2)


def test_labels_without_effect_are_refused(engine: RecordedEngine) -> None:
    with pytest.raises(ConfigError, match="must not begin with POISONED"):
        WeightSync("fsdp", "ipc", engine).push(nn.Linear(2, 2), label="POISONED")
    with pytest.raises(ConfigError, match="no effect with adapters"):
        WeightSync("fsdp", "lora", engine).push(nn.Linear(2, 2), label=1)


# ---------------------------------------------------------------------------------------------------------------
# Names


def prefixed(seed: int) -> nn.Module:
    return trainer_model({f"wrapped.{name}": tensor for name, tensor in checkpoint(seed).items()})


RENAMES: dict[str, Any] = {
    "patterns": {r"^wrapped\.": "then.", r"^then\.": ""},
    "function": lambda name: name.removeprefix("wrapped."),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
@pytest.mark.parametrize("transport", ["ipc", "broadcast", "checkpoint"])
def test_tensors_travel_under_other_names(engine: RecordedEngine, rename: Any, transport: str, tmp_path: Path) -> None:
    is_saved = transport == "checkpoint"  # and so complete in each push
    way = CheckpointTransport(tmp_path) if is_saved else transport
    selection = TensorSelection(rename=rename, frozen=() if is_saved else ("embed.*",), dtypes={"embed.*": "float32"})
    with WeightSync("fsdp", way, engine, selection=selection, timeout_s=TIMEOUT_S) as sync:
        model = prefixed(2)
        first = sync.push(model)
        later = sync.push(model)
    assert serves(engine, 2)
    assert (later.nbytes < first.nbytes) is not is_saved


def test_a_checkpoint_is_saved_under_other_names(tmp_path: Path) -> None:
    save(prefixed(2), tmp_path / "saved", selection=TensorSelection(rename=RENAMES["patterns"]))
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(checkpoint(2))


def test_a_pattern_that_matches_nothing_is_told_of_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(
        nn.Linear(2, 2), tmp_path / "saved", selection=TensorSelection(dtypes={"weight": "bfloat16", "wait": "float16"})
    )
    assert "patterns without effect: wait. The trainer's nearest names are bias, weight" in caplog.text


def test_a_pattern_that_excludes_nothing_is_told_of_a_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    selection = TensorSelection(exclude=("bias", "wait"), rename={"weight": "kernel", "^bias": "offset"})
    save(nn.Linear(2, 2), tmp_path / "saved", selection=selection)
    (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "without effect: wait, ^bias. The trainer's nearest names are kernel" in told


def test_a_selection_of_two_models_tells_of_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    selection = TensorSelection(exclude=("bias",))
    save(nn.Linear(2, 2), tmp_path / "first", selection=selection)
    assert "without effect" not in caplog.text
    save(nn.Linear(2, 2, bias=False), tmp_path / "second", selection=selection)
    assert "without effect: bias. " in caplog.text


def test_a_pattern_of_a_tied_tensors_other_name_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    save(model, tmp_path / "saved", selection=TensorSelection(dtypes={"1.*": "bfloat16", "*": "bfloat16"}))
    assert "without effect" not in caplog.text


def test_two_tensors_of_one_name_are_refused(engine: RecordedEngine) -> None:
    selection = TensorSelection(rename={r"\d+": "0"})
    with (
        WeightSync("fsdp", "ipc", engine, selection=selection, timeout_s=TIMEOUT_S) as sync,
        pytest.raises(ManifestError, match=r"layers\.0\.\S+ and layers\.1\.\S+ the same name") as caught,
    ):
        sync.push(trainer_model(checkpoint(2)))
    assert next(iter(caught.value.mismatched)).startswith("layers.0.")
    assert serves(engine, 1)


@pytest.mark.parametrize("rename", ["a", {"(": ""}, {"a": 1}, {"a": r"\1"}, {"a": r"\g<b>"}])
def test_a_rename_that_cannot_be_is_refused(rename: Any) -> None:
    with pytest.raises(ConfigError, match="rename"):
        TensorSelection(rename=rename)


def test_a_function_must_give_names() -> None:
    with pytest.raises(ConfigError, match="rename gives None for a; expected a name"):
        TensorSelection(rename=lambda name: None).renamed("a")


def test_a_selection_without_effect_on_a_save_is_refused(tmp_path: Path) -> None:
    for given in ({"frozen": ("a",)}, {"only_trained": True}, {"keep": ("a",)}, {"unquantized": ("a",)}):
        with pytest.raises(ConfigError, match=rf"TensorSelection\({next(iter(given))}\): no effect with save"):
            save(nn.Linear(2, 2), tmp_path / "saved", selection=TensorSelection(**given))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("transport", "given"),
    [
        ("lora", "frozen, only_trained, dtypes"),
        ("single_copy", "frozen, only_trained, dtypes, rename"),
        (CheckpointTransport("v"), "frozen, only_trained"),
        (CheckpointTransport("v", restart=True), "frozen, only_trained"),
    ],
)
def test_a_selection_without_effect_is_refused(transport: Any, given: str) -> None:
    selection = TensorSelection(frozen=("a",), only_trained=True, dtypes={"a": "float32"}, rename={"a": "b"})
    with pytest.raises(ConfigError, match=rf"{given}\): no effect with this"):
        WeightSync("fsdp", transport, selection=selection)


# ---------------------------------------------------------------------------------------------------------------
# The thread


def test_the_event_loop_goes_on_during_a_push(engine: RecordedEngine) -> None:
    loop_went_on = threading.Event()
    update = engine.update

    def update_once_the_loop_went_on(info: dict[str, Any]) -> None:
        assert loop_went_on.wait(TIMEOUT_S)
        update(info)

    engine.update = update_once_the_loop_went_on  # type: ignore[method-assign]

    async def main() -> None:
        with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
            pushing = asyncio.create_task(sync.push_async(trainer_model(checkpoint(2)), label="a"))
            while "start" not in engine.calls:
                await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match="is pushing already"):
                sync.push(trainer_model(checkpoint(3)))
            with pytest.raises(ConfigError, match="close it when that is done"):
                sync.close()
            loop_went_on.set()
            assert (await pushing).version == 1
            with pytest.raises(WeightSyncError):
                await sync.push_async(nn.Linear(2, 2))

    asyncio.run(main())
    assert serves(engine, 2)
    assert engine.version() == "a"


def test_a_task_that_is_cancelled_ends_when_its_push_has(engine: RecordedEngine) -> None:
    async def main() -> None:
        with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
            pushing = asyncio.create_task(sync.push_async(trainer_model(checkpoint(2))))
            while not engine.calls:
                await asyncio.sleep(0.01)
            pushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pushing
            assert serves(engine, 2)
            assert sync.push(trainer_model(checkpoint(3))).version == 2

    asyncio.run(main())


def push_of_two_ranks(rank: int) -> None:
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    model = trainer_model(checkpoint(2))
    with WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) as sync:
        for _ in range(2):
            report = asyncio.run(sync.push_async(model)) if rank == 0 else sync.push(model)
    assert report.version == 2
    if engine is not None:
        assert serves(engine, 2)
        engine.close()


def test_one_rank_may_await_what_another_waits_for() -> None:
    run_ranks(push_of_two_ranks, 2)


def sharded_models() -> list[Any]:
    """Return two models of one architecture, each with half of the rows on each rank."""
    models = [trainer_model(checkpoint(seed)) for seed in (2, 3)]
    return [fully_shard(each, ignored_params={p for p in each.parameters() if p.dim() == 0}) for each in models]


def pushes_at_once(rank: int) -> None:
    """Each rank begins with another push."""
    models = sharded_models()
    engines = [FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None for _ in models]
    syncs = [WeightSync("fsdp", "ipc", engine, timeout_s=TIMEOUT_S) for engine in engines]

    async def push(number: int) -> None:
        await asyncio.sleep(0.2 * (number ^ rank))
        await syncs[number].push_async(models[number])

    async def push_both() -> None:
        await asyncio.gather(push(0), push(1))

    for _ in range(2):
        asyncio.run(push_both())
    for sync in syncs:
        sync.close()
    for engine, seed in zip(engines, (2, 3), strict=True):
        if engine is not None:
            assert serves(engine, seed)
            engine.close()


def test_two_pushes_of_a_job_at_once_never_exchange_their_ranks() -> None:
    run_ranks(pushes_at_once, 2)


def saves_at_once(rank: int, folder: str) -> None:
    """Each rank begins with another save."""
    models = sharded_models()

    def save_one(number: int) -> None:
        time.sleep(0.2 * (number ^ rank))
        save(models[number], Path(folder, f"model-{number}", "hf"), timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(save_one, range(2)))
    for number, seed in enumerate((2, 3)):
        found = load_file(Path(folder, f"model-{number}", "hf", "model.safetensors"))
        assert all(torch.equal(found[name], tensor) for name, tensor in checkpoint(seed).items())


def test_two_saves_of_a_job_at_once_never_exchange_their_ranks(tmp_path: Path) -> None:
    run_ranks(saves_at_once, 2, str(tmp_path))


def pushes_of_unlike_adapters(rank: int) -> None:
    torch.manual_seed(5)
    model = with_adapter()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q", "k"], init_lora_weights=False))
    model.set_adapter("default")
    engine = FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1))) if rank == 0 else None
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    with WeightSync("fsdp", "ipc", engine, max_bytes=100, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        before = [] if engine is None else list(map(torch.clone, engine.hosts[0].live.parameters()))
        spoils: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (lambda: model.set_adapter("other"), lambda: model.set_adapter("default")),
            (lambda: [each.scale_layer(3.0) for each in layers], lambda: [each.unscale_layer() for each in layers]),
            (model.base_model.disable_adapter_layers, model.base_model.enable_adapter_layers),
        ]
        for spoil, mend in spoils:
            if rank:
                spoil()
            with pytest.raises(ConfigError, match="the ranks' adapters differ: trainer rank 1 has"):
                sync.push(model)
            if engine is not None:
                assert all(map(torch.equal, before, engine.hosts[0].live.parameters()))
            if rank:
                mend()
        sync.push(model)
    if engine is not None:
        assert all(map(torch.equal, before, engine.hosts[0].live.parameters()))
        engine.close()


def test_ranks_with_other_adapters_or_scalings_are_refused() -> None:
    run_ranks(pushes_of_unlike_adapters, 2)
