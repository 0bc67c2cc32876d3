"""Tensors that hold NaN or infinity: a push warns of them, refuses them, or does not look."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, ModuleHost, TinyEngineModel, checkpoint, trainer_model
from ranks import no_barrier, run_ranks
from test_lora import wrapped

from weightsync import CheckpointTransport, ConfigError, NonFiniteError, TensorSelection, WeightSync, WeightSyncError
from weightsync.engines.server import VllmServer
from weightsync.planning.layout import Box, Manifest, TensorMeta
from weightsync.sources import open_source
from weightsync.sources.base import Reading, SteadySource, TensorShard
from weightsync.sources.finite import FiniteSource

TIMEOUT_S = 10.0
NAMES = list(checkpoint(1))
WORDS = "1 tensors .*NaN or infinity"


def spoil(model: torch.nn.Module, name: str, value: float = float("nan")) -> None:
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[-1] = value


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    found = [text for text in warned if "NaN" in text]
    caplog.clear()
    return found


def engine() -> FakeEngine:
    return FakeEngine(ModuleHost(TinyEngineModel, checkpoint(1)))


@pytest.mark.parametrize("option", [None, "warn"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_push_warns_of_what_is_not_finite(option: str | None, value: float, caplog: pytest.LogCaptureFixture):
    with closing(engine()) as one, WeightSync("fsdp", "ipc", one, timeout_s=TIMEOUT_S, non_finite=option) as sync:
        for number, name in enumerate(NAMES, start=1):
            model = trainer_model(checkpoint(2))
            spoil(model, name, value)
            assert sync.push(model).version == number
            (text,) = warnings_in(caplog)
            assert text == f"the engines serve version {number} with NaN or infinity in 1 tensors: {name}"
        sync.push(trainer_model(checkpoint(2)))
        assert warnings_in(caplog) == []


def test_a_push_refuses_what_is_not_finite_before_an_engine_is_paused(caplog: pytest.LogCaptureFixture):
    model = trainer_model(checkpoint(2))
    with closing(engine()) as one, WeightSync("fsdp", "ipc", one, timeout_s=TIMEOUT_S, non_finite="refuse") as sync:
        sync.push(model)
        one.log.clear()
        spoil(model, NAMES[0])
        spoil(model, NAMES[2], float("inf"))
        with pytest.raises(NonFiniteError, match="2 tensors hold NaN or infinity, and nothing was written") as raised:
            sync.push(model)
        assert raised.value.tensors == [NAMES[0], NAMES[2]]
        assert one.log == []
        assert one.version() == "1"
        assert sync.push(trainer_model(checkpoint(3))).version == 2
    assert warnings_in(caplog) == []


def test_a_push_need_not_look(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(FiniteSource, "non_finite")
    model = trainer_model(checkpoint(2))
    spoil(model, NAMES[0])
    with closing(engine()) as one, WeightSync("fsdp", "ipc", one, timeout_s=TIMEOUT_S, non_finite="ignore") as sync:
        sync.push(model)
    assert warnings_in(caplog) == []


def test_what_does_not_travel_again_is_warned_of_once(caplog: pytest.LogCaptureFixture):
    model = trainer_model(checkpoint(2))
    spoil(model, NAMES[0])
    selection = TensorSelection(frozen=(NAMES[0],))
    with closing(engine()) as one, WeightSync("fsdp", "ipc", one, selection=selection, timeout_s=TIMEOUT_S) as sync:
        sync.push(model)
        assert len(warnings_in(caplog)) == 1
        sync.push(model)
        assert warnings_in(caplog) == []


def test_tensors_of_a_stream_are_looked_at_as_they_come(caplog: pytest.LogCaptureFixture):
    good, bad = checkpoint(2), checkpoint(2)
    bad[NAMES[1]].view(-1)[0] = float("nan")
    with closing(engine()) as one, WeightSync("stream", "ipc", one, timeout_s=TIMEOUT_S) as sync:
        sync.push(iter(bad.items()))
        assert len(warnings_in(caplog)) == 1
        sync.push(good)
        assert warnings_in(caplog) == []
    with closing(engine()) as one, WeightSync("stream", "ipc", one, timeout_s=TIMEOUT_S, non_finite="refuse") as sync:
        for stream in (bad, list(bad.items()), lambda: bad.items()):
            with pytest.raises(NonFiniteError, match=NAMES[1]):
                sync.push(stream)
        with pytest.raises(ConfigError, match="an iterator can be read once"):
            sync.push(iter(good.items()))
        assert one.log == []
        assert sync.push(list(good.items())).version == 1


def test_what_is_computed_is_looked_at_as_it_is():
    model = wrapped("linear")
    name = "model.layers.0.self_attn.q_proj"
    spoil(model, f"base_model.model.{name}.lora_B.default.weight")
    source = FiniteSource(SteadySource(open_source("fsdp", TensorSelection())))
    reading = source.read(model)
    assert source.read(model) is reading
    assert source.non_finite() == []  # nothing was computed yet
    source.gather([f"{name}.weight"], no_barrier)
    for shard in reading.shards:
        if shard.meta.name == f"{name}.weight":
            shard.values()
    assert source.non_finite() == [f"{name}.weight"]
    assert source.non_finite() == []


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def test_tensors_on_gpus_take_turns_after_the_first_look():
    bad = [torch.full((2,), float("nan")).as_subclass(OnGpu) for _ in range(40)]
    metas = [TensorMeta(f"t{number}", (2,), "float32") for number in range(40)]
    shards = [TensorShard(meta, Box.full((2,)), each) for meta, each in zip(metas, bad, strict=True)]
    inner = SimpleNamespace(read=lambda model: Reading(Manifest(tuple(metas)), shards))
    source = FiniteSource(inner, takes_turns=True)  # type: ignore[arg-type]
    source.read(None)
    assert len(source.non_finite()) == 40
    turns = [source.non_finite() for _ in range(16)]
    assert {len(names) for names in turns} == {2, 3}
    assert sorted(name for names in turns for name in names) == sorted(meta.name for meta in metas)
    always = FiniteSource(inner)  # type: ignore[arg-type]
    always.read(None)
    assert [len(always.non_finite()) for _ in range(2)] == [40, 40]


def push_from_two(rank: int, folder: Path) -> None:
    del folder
    one = engine() if rank == 0 else None
    logs: list[str] = []
    logging.getLogger("weightsync").addHandler(handler := logging.Handler())
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign]
    for option in ("refuse", "warn"):
        model = trainer_model(checkpoint(2))
        with WeightSync("fsdp", "ipc", one, timeout_s=TIMEOUT_S, non_finite=option) as sync:
            sync.push(model)
            if rank == 1:
                spoil(model, NAMES[1])
            if option == "refuse":
                with pytest.raises(NonFiniteError, match=NAMES[1]):
                    sync.push(model)
                assert one is None or one.log[-1] == "resume"
            else:
                sync.push(model)
    assert len([text for text in logs if "NaN" in text and "push failed" not in text]) == (rank == 0)
    with (
        WeightSync("fsdp", "ipc", one, timeout_s=TIMEOUT_S, non_finite=("warn", "ignore")[rank]) as sync,
        pytest.raises(ConfigError, match="non_finite"),
    ):
        sync.push(model)
    if one is not None:
        one.close()


def test_every_rank_refuses_what_one_of_them_has(tmp_path: Path):
    run_ranks(push_from_two, 2, tmp_path)


def test_a_checkpoint_to_start_from_is_looked_at_before_it_is_written(tmp_path: Path):
    model = torch.nn.Linear(2, 2)
    spoil(model, "bias")
    server = VllmServer(tmp_path / "nothing", "--skip-tokenizer-init", log=tmp_path / "log")
    transport = CheckpointTransport(tmp_path / "versions", restart=True)
    with (
        WeightSync("fsdp", transport, server, non_finite="refuse") as sync,
        pytest.raises(NonFiniteError, match="bias"),
    ):
        sync.push(model)
    assert not (tmp_path / "versions").exists()


@pytest.mark.parametrize(
    ("transport", "option", "words"),
    [
        ("ipc", "never", "non_finite='never'; choose one of warn, refuse, ignore"),
        ("lora", "refuse", "non_finite: no effect with this LoraTransport"),
        ("single_copy", "refuse", "the trainer itself writes into the engine"),
    ],
)
def test_options_that_cannot_work(transport: str, option: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        WeightSync("fsdp", transport, non_finite=option)


def test_the_error_survives_the_wire():
    from weightsync.errors import from_fields

    error = from_fields(NonFiniteError("1 tensors", tensors=["a"]).to_fields())
    assert isinstance(error, NonFiniteError)
    assert isinstance(error, WeightSyncError)
    assert error.tensors == ["a"]
